"""A gate through a narrow layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from linattn.layers.linear import Linear
from linattn.layers.mixer import no_weight_decay


class LowRank(nn.Module):
    """y = bias + W_up f(W_down x) with a narrow middle: the gates of RWKV-6 and 7.

    ``bias``: the start of a learnt [size] vector, or its absence. At the start W_down is zero, so that y is the bias,
    and W_up has the variance of an orthogonal matrix times 0.1, as in RWKV-LM. None of it is decayed.
    """

    def __init__(
        self, d_model: int, rank: int, size: int, activation: Callable[[Tensor], Tensor], bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.activation = activation
        self.down = Linear(d_model, rank, bias=False)
        self.up = Linear(rank, size, bias=False)
        self.down.weight = no_weight_decay(torch.zeros(rank, d_model))
        self.up.weight = no_weight_decay(torch.randn(size, rank) * (0.1 * size**-0.5))
        self.bias = None if bias is None else no_weight_decay(bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_model] -> [..., size]."""
        y: Tensor = self.up(self.activation(self.down(x)))
        return y if self.bias is None else self.bias + y
