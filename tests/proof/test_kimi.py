"""Kimi Delta Attention in the place of that of transformers' Kimi Linear."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from proof import plainly
from proof.transplant import Parameters, prove, shaken
from torch import Tensor, nn

from linattn import KimiDeltaAttention

transformers = pytest.importorskip("transformers")


def config() -> object:
    return transformers.KimiLinearConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, linear_num_heads=3, linear_head_dim=8, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, mlp_layer_types=["dense"] * 3, initializer_range=0.1, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, layer_types=["linear_attention", "full_attention", "linear_attention"],
    )  # fmt: skip


def convert(theirs: Parameters) -> Parameters:
    rows = [
        theirs[f"{name}.weight"]
        for name in ("q_proj", "k_proj", "v_proj", "forget_gate.f_a_proj", "g_a_proj", "b_proj")
    ]
    return {
        "in_proj.weight": torch.cat(rows),
        "conv1d.weight": theirs["conv1d.weight"],
        "decay_proj.weight": theirs["forget_gate.f_b_proj.weight"],
        "gate_proj.weight": theirs["g_b_proj.weight"],
        "A_log": theirs["forget_gate.A_log"].flatten(),
        "dt_bias": theirs["forget_gate.dt_bias"],
        "norm.weight": theirs["o_norm.weight"],
        "out_proj.weight": theirs["o_proj.weight"],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_kimi_delta_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    prove(
        "kimi_delta_attention",
        "transformers KimiLinearForCausalLM",
        shaken(transformers.KimiLinearForCausalLM(config())),
        "self_attn",
        lambda: KimiDeltaAttention(32, num_heads=3, head_dim=8),
        convert,
        dtype,
    )


class Alone(nn.Module):
    """The mixer of GLM-5 Next as a model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
        config = pytest.importorskip("transformers.models.glm5_next.configuration_glm5_next").Glm5NextTextConfig(
            hidden_size=32, linear_num_heads=3, linear_head_dim=8, num_hidden_layers=1, layer_types=["linear_attention"]
        )
        assert config.linear_lower_bound == -5
        layer = nn.Module()
        layer.self_attn = modeling.Glm5NextTextLinearAttention(config, 0)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([layer])
        self.config = SimpleNamespace(layer_types=config.layer_types, hidden_size=32, vocab_size=32)

    def forward(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None = None, cache: Any = None, use_cache: bool = False
    ) -> SimpleNamespace:
        cache = object() if use_cache else None
        (layer,) = self.model.layers
        return SimpleNamespace(logits=layer.self_attn(inputs_embeds, cache, attention_mask), cache=cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bounded_decay(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs = Alone()
    for name, parameter in theirs.named_parameters():
        if name.endswith(("A_log", "dt_bias")):  # which it leaves to its model
            nn.init.uniform_(parameter, -1, 1)
    prove(
        "kimi_delta_attention",
        "transformers Glm5NextTextLinearAttention",
        shaken(theirs),
        "self_attn",
        lambda: KimiDeltaAttention(32, num_heads=3, head_dim=8, lower_bound=-5.0),
        convert,
        dtype,
    )


def test_values_of_more_heads() -> None:
    """arXiv 2510.26692, eq. 1, with β up to 2, a biased gate and values of twice as many heads as keys."""
    H, K, V = 2, 6, 10

    def maths(p: Parameters, x: Tensor) -> Tensor:
        qkv, decay, gate, b = (x @ p["in_proj.weight"].T).split((2 * H * K + 2 * H * V, V, V, 2 * H), -1)
        q, k, v = plainly.convolved(qkv, p["conv1d.weight"]).split((H * K, H * K, 2 * H * V), -1)
        q, k = (plainly.unit(t.unflatten(-1, (H, K))).repeat_interleave(2, 1) for t in (q, k))
        v, gate = (t.unflatten(-1, (2 * H, V)) for t in (v, gate @ p["gate_proj.weight"].T + p["gate_proj.bias"]))
        z = (decay @ p["decay_proj.weight"].T + p["dt_bias"]).unflatten(-1, (2 * H, K))
        alpha, beta = (-p["A_log"].exp()[:, None] * (1 + z.exp()).log()).exp(), 2 * b.sigmoid()
        S, rows = torch.zeros(2 * H, K, V, dtype=x.dtype), []
        for t in range(plainly.T):
            write = beta[t][:, None, None] * plainly.outer(k[t], v[t])
            S = plainly.householder(k[t], beta[t]) @ (alpha[t][..., None] * S) + write
            o = plainly.rms((q[t][:, None] @ S)[:, 0] * K**-0.5, 1e-5) * p["norm.weight"]
            rows.append(o * gate[t].sigmoid())
        return torch.stack(rows).flatten(1) @ p["out_proj.weight"].T

    torch.manual_seed(0)
    layer = KimiDeltaAttention(
        plainly.D, num_heads=H, head_dim=K, num_v_heads=2 * H, expand_v=V / K, allow_neg_eigval=True, gate_bias=True
    )
    plainly.prove("kimi_delta_attention", "arXiv 2510.26692", layer, maths)
