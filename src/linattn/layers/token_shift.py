"""Token shift: each token sees the one before it, channel by channel (RWKV)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn._checks import fail
from linattn.backends import _fused as fused
from linattn.layers.compiled import serves
from linattn.layers.sequences import sequence_of_token, take


class TimeMixState(NamedTuple):
    """What an RWKV time mix continues from: the last input, [N, d_model], and the recurrence's state."""

    shift: Tensor
    recurrent: Any


def token_shift(
    x: Tensor, state: Tensor | None = None, *, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [B, T, C] -> the input before each token, [B, T, C], and the last input of each sequence, [N, C].

    ``state`` [N, C] is what the sequence last read, None (zero) at its start. ``mask`` [B, T] True for real tokens:
    padding is skipped wherever it stands. ``cu_seqlens`` [N+1] for packed sequences in one row. Raises ValueError if
    the state is of another shape.
    """
    batch, length, channels = x.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = _checked(state, x, sequences)
    state = x.new_zeros(sequences, channels) if state is None else state
    token = torch.arange(length, device=x.device)
    if cu_seqlens is not None:  # the states in front, one a sequence
        context = torch.cat([state, x[0]])
        sequence = sequence_of_token(cu_seqlens, length)
        before = torch.where(token == cu_seqlens[sequence], sequence, token + (sequences - 1))
        number = torch.arange(sequences, device=x.device)
        last = torch.where(cu_seqlens.diff() > 0, cu_seqlens[1:] + (sequences - 1), number)
        return context.index_select(0, before)[None], context.index_select(0, last)
    context = torch.cat([state[:, None], x], dim=1)
    if mask is None:
        return context[:, :-1], context[:, -1].clone()  # a slice would keep the whole context alive
    # The place of the newest real token up to each one; 0 is the state's.
    newest = torch.where(mask, token + 1, 0).cummax(1).values
    newest = torch.cat([newest.new_zeros(batch, 1), newest], dim=1)
    return take(context, newest[:, :-1]), take(context, newest[:, -1:])[:, 0]


def _checked(state: Tensor | None, x: Tensor, sequences: int) -> Tensor | None:
    if state is None:
        return None
    if state.shape != (sequences, x.shape[2]):
        raise fail("state", f"a shifted input {list(state.shape)}", [sequences, x.shape[2]])
    return state.to(x.dtype)


def token_mix(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Sequence[Tensor], Tensor]:
    """x + weight_k · (x' - x) with x' the input before each token: [B, T, C] for each row of ``weight`` [n, C].

    Also the last input of each sequence, [N, C]. Other arguments and errors as of :func:`token_shift`. On CPUs it is
    one compiled pass, in float32 inside, where the CPU backend has its library; its results are zero at padding.
    """
    if len(weight) <= fused.MIXES and serves("mix", x, weight):
        state = _checked(state, x, x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        return fused.mix(x, weight, state, mask, cu_seqlens)
    before, last = token_shift(x, state, mask=mask, cu_seqlens=cu_seqlens)
    return interpolate(x, before, weight).unbind(), last


def interpolate(x: Tensor, before: Tensor, weight: Tensor) -> Tensor:
    """x + weight · (before - x) for each row of ``weight`` [n, C]: [n, B, T, C]; unbind it."""
    return torch.lerp(x, before, weight[:, None, None].to(x.dtype))


def channel_ramp(channels: int, exponent: float, shift: float = 0.0) -> Tensor:
    """[C]: 1 - ((c/C)^exponent + shift), RWKV's first weights of the token before; late channels look back least."""
    return 1 - ((torch.arange(channels) / channels) ** exponent + shift)
