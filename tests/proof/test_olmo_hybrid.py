"""Gated DeltaNet with negative eigenvalues in the place of the linear attention of transformers' OLMo Hybrid."""

from __future__ import annotations

import pytest
import torch
from proof.transplant import Parameters, prove, shaken

from linattn import GatedDeltaNet

transformers = pytest.importorskip("transformers")


def convert(theirs: Parameters) -> Parameters:
    rows = [theirs[f"{name}_proj.weight"] for name in ("q", "k", "v", "g", "a", "b")]
    kept = {name: theirs[name] for name in ("A_log", "dt_bias", "conv1d.weight")}
    norm, out = theirs["o_norm.weight"], theirs["o_proj.weight"]
    return {"in_proj.weight": torch.cat(rows), "norm.weight": norm, "out_proj.weight": out, **kept}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gated_delta_net(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = transformers.OlmoHybridConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        initializer_range=0.1, linear_a_log_min=0.5, pad_token_id=0, eos_token_id=1,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )  # fmt: skip
    assert config.linear_allow_neg_eigval
    prove(
        "gated_delta_rule",
        "transformers OlmoHybridForCausalLM",
        shaken(transformers.OlmoHybridForCausalLM(config)),
        "linear_attn",
        lambda: GatedDeltaNet(32, num_heads=4, head_dim=6, allow_neg_eigval=True),
        convert,
        dtype,
    )
