"""The elementwise recurrence in plain torch, many tokens side by side."""

from __future__ import annotations

import math

from torch import Tensor


def elementwise(x: Tensor, decay: Tensor, state: Tensor, width: int | None = None) -> Tensor:
    """h_t = decay_t * h_{t-1} + x_t for x, decay [B, T, ...] and h_{-1} = state [B, ...]; returns every h.

    Rows of ``width`` tokens (about sqrt(T)) side by side, then their carries one after another: exact, only products of
    decays. A width of 1 walks along the tokens.
    """
    B, T = x.shape[:2]
    C = max(1, math.isqrt(T)) if width is None else width
    n = -(-T // C)
    h = x.new_zeros(B, n * C, *x.shape[2:])
    h[:, :T] = x
    A = x.new_ones(h.shape)
    A[:, :T] = decay
    h, A = h.unflatten(1, (n, C)), A.unflatten(1, (n, C))
    for t in range(1, C):
        h[:, :, t].addcmul_(A[:, :, t], h[:, :, t - 1])
        A[:, :, t] *= A[:, :, t - 1]
    for i in range(n):
        h[:, i].addcmul_(A[:, i], state.unsqueeze(1))
        state = h[:, i, -1]
    return h.flatten(1, 2)[:, :T].clone()
