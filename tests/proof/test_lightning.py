"""Lightning attention in the place of the linear attention of transformers' MiniMax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from proof.transplant import Parameters, Transplant, prove, shaken

from linattn import LightningAttention

transformers = pytest.importorskip("transformers")

HEADS, SIZE = 4, 6


class Graft(Transplant):
    """MiniMax's mixers return a second thing, which nobody reads."""

    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options), None


def config() -> Any:
    return transformers.MiniMaxConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=HEADS,
        num_key_value_heads=2, head_dim=SIZE, num_local_experts=2, block_size=16, initializer_range=0.1,
        layer_types=["full_attention", "linear_attention", "linear_attention", "linear_attention"],
    )  # fmt: skip


def convert(theirs: Parameters) -> Parameters:
    """Their projection holds q, k, v head by head."""
    qkv = theirs["qkv_proj.weight"].unflatten(0, (HEADS, 3, SIZE)).transpose(0, 1).flatten(0, 2)
    kept = {name: theirs[name] for name in ("norm.weight", "out_proj.weight")}
    return {"in_proj.weight": torch.cat([qkv, theirs["output_gate.weight"]]), **kept}


def test_lightning_attention() -> None:
    torch.manual_seed(0)
    theirs, indices = shaken(transformers.MiniMaxForCausalLM(config())), iter((1, 2, 3))

    def build() -> LightningAttention:
        return LightningAttention(32, num_heads=HEADS, head_dim=SIZE, layer_index=next(indices), num_layers=4)

    prove(
        "lightning_attention",
        "transformers MiniMaxForCausalLM",
        theirs,
        "self_attn",
        build,
        convert,
        torch.float32,
        theirs_in=torch.float32,
        graft=Graft,
    )
