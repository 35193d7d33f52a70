"""LayerNorm on each head's output."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.backends import _fused as fused
from linattn.layers.compiled import serves
from linattn.layers.norms import promote


class GroupNorm(nn.Module):
    """(x - mean) / √(variance + eps) over each head, then weight and bias over all heads' channels (RWKV's ln_x).

    eps is 64e-5 in RWKV-5 to 7, whose outputs were divided by 8 before a norm of eps 1e-5. It cannot be told from the
    weights of a checkpoint. ``start``: of the weight. ``bias=False``: the MultiHeadLayerNorm of xLSTM.
    """

    def __init__(self, heads: int, size: int, *, eps: float = 64e-5, start: float = 1.0, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.full((heads * size,), start))
        self.bias = nn.Parameter(torch.zeros(heads * size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H, V] -> [..., H · V] in x's dtype, computed in float32."""
        if serves("norm", x, self.weight, self.bias):
            heads = x.shape[-2]
            return fused.norm(x.flatten(-2), self.weight, self.bias, None, groups=heads, centred=True, eps=self.eps)
        y = F.layer_norm(promote(x), x.shape[-1:], None, None, self.eps).flatten(-2)
        y = y * self.weight if self.bias is None else y * self.weight + self.bias
        return y.to(x.dtype)
