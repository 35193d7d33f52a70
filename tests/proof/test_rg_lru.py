"""RG-LRU in the place of the recurrent blocks of transformers' RecurrentGemma."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from proof.transplant import Parameters, Transplant, prove, shaken
from torch import Tensor

from linattn import RGLRU

transformers = pytest.importorskip("transformers")

HEADS = 4


class Graft(Transplant):
    """RecurrentGemma gives its recurrent blocks the mask of its attention, and takes a pair."""

    def forward(self, hidden_states: Tensor, cache: Any = None, **_: Any) -> Any:
        return super().forward(hidden_states, cache), None


def config() -> Any:
    return transformers.RecurrentGemmaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=HEADS,
        num_key_value_heads=1, attention_window_size=16, block_types=["recurrent", "attention", "recurrent"],
        w_init_variance_scale=1.0,
    )  # fmt: skip


def convert(theirs: Parameters) -> Parameters:
    return {
        **{f"in_proj.{kind}": torch.cat([theirs[f"linear_{x}.{kind}"] for x in "xy"]) for kind in ("weight", "bias")},
        **{f"conv1d.{kind}": theirs[f"conv_1d.{kind}"] for kind in ("weight", "bias")},
        **{f"out_proj.{kind}": theirs[f"linear_out.{kind}"] for kind in ("weight", "bias")},
        **{
            f"gate_{kind}": torch.stack([theirs[f"rg_lru.{gate}_gate_{kind}"] for gate in ("input", "recurrent")])
            for kind in ("weight", "bias")
        },
        "decay": theirs["rg_lru.recurrent_param"],
    }


def test_rg_lru() -> None:
    """Without padding, which their recurrent blocks do not skip."""
    torch.manual_seed(0)
    theirs = shaken(transformers.RecurrentGemmaForCausalLM(config()))
    prove(
        "rg_lru", "transformers RecurrentGemmaForCausalLM", theirs, "temporal_block",
        lambda: RGLRU(32, num_heads=HEADS), convert, torch.float32, graft=Graft, padding=False,
        make_cache=lambda: transformers.DynamicCache(config=theirs.config),
    )  # fmt: skip
