"""What the RWKV layers share: how they start, and the blocks that they stand in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def block(mlp: str, mlp_ratio: float) -> Mapping[str, Any]:
    """The blocks of an RWKV: LayerNorms, one of them on the embedding, a channel mix, a head of its own."""
    return {
        "norm": "layer",
        "norm_eps": 1e-5,
        "embedding_norm": True,
        "mlp": mlp,
        "mlp_ratio": mlp_ratio,
        "tie_embeddings": False,
    }


def depth(layer_index: int, num_layers: int) -> tuple[float, float]:
    """How deep a layer lies, from 0 to 1, and what is left above it, from 1 to almost 0."""
    return layer_index / max(num_layers - 1, 1), 1 - layer_index / num_layers


def decay_start(size: int, low: float, high: float, deep: float) -> Tensor:
    """[size]: log-log decays from ``low`` to ``high``; the deeper the layer, the more of them are long."""
    return low + (high - low) * torch.linspace(0, 1, size) ** (0.7 + 1.3 * deep)


def bonus_start(size: int, deep: float) -> Tensor:
    """[size]: falling in deep layers, with a zigzag of three channels."""
    return deep * (1 - torch.linspace(0, 1, size)) + 0.1 * ((torch.arange(size) + 1) % 3 - 1)


def start(*projections: tuple[nn.Linear | None, float]) -> None:
    """Draw each weight from a normal distribution with standard deviation factor/√d_model; a factor of 0 is zero.

    RWKV-LM makes orthogonal matrices of the same variance, which takes minutes in large models.
    """
    for projection, factor in projections:
        if projection is not None:
            nn.init.normal_(projection.weight, std=factor * projection.in_features**-0.5)
