"""Normalisation: root mean square, with an optional gate, and to unit length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.backends import _fused as fused
from linattn.layers.compiled import serves


def promote(x: Tensor) -> Tensor:
    """``x`` in float32, or float64 as it is: for gates and norms that half precision would spoil."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / √(‖x‖² + eps) over the last axis, computed in float32, in x's dtype. Zero stays zero.

    The delta rule needs ‖k‖ ≤ 1: with β up to 2 a longer key would make the state grow.
    """
    if serves("norm", x):
        return fused.norm(x, None, None, None, mean=False, eps=eps)
    y = promote(x)
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last axis (Zhang & Sennrich, arXiv 1910.07467), with an optional gate z.

    The gate multiplies the result by silu(z); with ``gate_first`` it multiplies x before the norm, as in Mamba-2.
    ``groups`` splits the last axis into parts that are normalised on their own. ``affine=False`` has no weight.
    It is one pass, in float32 inside, where a backend has a kernel for it.
    """

    def __init__(
        self, size: int, *, eps: float = 1e-6, affine: bool = True, groups: int = 1, gate_first: bool = False
    ) -> None:
        super().__init__()
        self.size, self.eps, self.groups, self.gate_first = size, eps, groups, gate_first
        self.weight = nn.Parameter(torch.ones(size)) if affine else None

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x and gate: [..., size]; returns the same shape in x's dtype."""
        fits = x.shape[-1] == self.size and (gate is None or gate.shape == x.shape)
        alone = gate is None and self.groups == 1
        if fits and serves("norm", x, self.weight, gate, torch_has_one=alone):
            first = self.gate_first
            return fused.norm(x, self.weight, None, gate, groups=self.groups, gate_first=first, eps=self.eps)
        dtype = x.dtype
        weight = None if self.weight is None else self.weight.to(dtype)
        if gate is not None and self.gate_first:
            x = x * F.silu(gate)
        if self.groups == 1:
            x = F.rms_norm(x, (self.size,), weight, self.eps)
        else:
            x = F.rms_norm(x.unflatten(-1, (self.groups, -1)), (self.size // self.groups,), None, self.eps).flatten(-2)
            x = x if weight is None else x * weight
        if gate is not None and not self.gate_first:
            x = x * F.silu(gate)
        return x.to(dtype)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}, groups={self.groups}, gate_first={self.gate_first}"
