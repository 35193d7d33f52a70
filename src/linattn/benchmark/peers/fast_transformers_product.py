"""pytorch-fast-transformers: its causal product on the CPU, which is linear attention without decay."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def causal_product() -> Callable[..., Tensor]:
    """q, k [B, T, H, K], v [B, T, H, V] and arguments of other kinds -> [B, T, H, V], with our scale."""
    from fast_transformers.causal_product import causal_dot_product

    def run(q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> Tensor:
        heads_first = ((q * q.shape[-1] ** -0.5).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        o: Tensor = causal_dot_product(*(x.contiguous() for x in heads_first))
        return o.transpose(1, 2)

    return run
