"""The forget gate of HGRN and HGRN2, which keeps a share of the past that rises with the layer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.layers.mixer import no_weight_decay
from linattn.layers.norms import promote


class LowerBoundedGate(nn.Module):
    """g = log f, f = β + (1 - β) σ(x), for each channel: lower layers may forget all, higher ones keep a part.

    β = σ(bound) starts at layer_index/num_layers, where the papers' running sum of a softmax over the layers starts;
    the first layer has none (β = 0, no parameter). Source: arXiv 2311.04823, section 3.3.
    """

    def __init__(self, channels: int, layer_index: int, num_layers: int) -> None:
        super().__init__()
        share = layer_index / max(num_layers, layer_index + 1)
        start = torch.full((channels,), math.log(share / (1 - share)) if share else 0.0)
        self.bound = no_weight_decay(start) if layer_index else None

    def forward(self, x: Tensor) -> Tensor:
        """Preactivations [..., channels] -> g ≤ 0 of the same shape, in float32 (float64 for float64)."""
        g = F.logsigmoid(promote(x))
        if self.bound is None:
            return g
        bound = promote(self.bound)
        return torch.logaddexp(F.logsigmoid(bound), F.logsigmoid(-bound) + g)
