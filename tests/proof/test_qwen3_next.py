"""Gated DeltaNet in the place of the linear attention of transformers' Qwen3-Next."""

from __future__ import annotations

import pytest
import torch
from proof.transplant import Parameters, prove, shaken
from torch import Tensor

from linattn import GatedDeltaNet

transformers = pytest.importorskip("transformers")

HEADS, V_HEADS, K, V = 2, 4, 8, 16


def config() -> object:
    return transformers.Qwen3NextConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=HEADS, linear_num_value_heads=V_HEADS,
        linear_key_head_dim=K, linear_value_head_dim=V, mlp_only_layers=[0, 1, 2], initializer_range=0.1,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )  # fmt: skip


def by_kind(weight: Tensor, *sizes: int) -> list[Tensor]:
    """Rows that lie together by key head, split into kinds."""
    return [part.flatten(0, 1) for part in weight.unflatten(0, (HEADS, -1)).split(sizes, 1)]


def convert(theirs: Parameters) -> Parameters:
    per = V_HEADS // HEADS
    q, k, v, z = by_kind(theirs["in_proj_qkvz.weight"], K, K, per * V, per * V)
    b, a = by_kind(theirs["in_proj_ba.weight"], per, per)
    kept = {name: theirs[name] for name in ("A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight")}
    return {"in_proj.weight": torch.cat([q, k, v, z, a, b]), **kept}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gated_delta_net(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs = shaken(transformers.Qwen3NextForCausalLM(config()))
    for name, parameter in theirs.named_parameters():
        if name.endswith("dt_bias"):
            parameter.data -= 4  # where it starts, a token forgets nearly all, and the gates' gradients are near zero
    prove(
        "gated_delta_rule",
        "transformers Qwen3NextForCausalLM",
        theirs,
        "linear_attn",
        lambda: GatedDeltaNet(32, num_heads=HEADS, head_dim=K, num_v_heads=V_HEADS, expand_v=V / K, norm_eps=1e-6),
        convert,
        dtype,
    )
