"""The gated feed-forward layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from linattn.backends import _fused as fused
from linattn.layers.compiled import serves
from linattn.layers.linear import Linear


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer, arXiv 2002.05202), without biases; gate and up are one projection."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.in_proj = Linear(d_model, 2 * hidden, bias=False)
        self.out_proj = Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_model] -> [..., d_model]."""
        h = self.in_proj(x)
        if serves("glu", h):
            h = fused.glu(h)
        else:
            gate, up = h.chunk(2, dim=-1)
            h = F.silu(gate) * up
        y: Tensor = self.out_proj(h)
        return y
