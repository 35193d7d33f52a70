"""Softmax attention in the place of transformers' own: gated with partial rotary (Qwen3-Next), in windows (Qwen3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from proof.transplant import Parameters, Transplant, prove, shaken
from torch import Tensor, nn

from linattn import SoftmaxAttention

transformers = pytest.importorskip("transformers")

HEADS, KV_HEADS, SIZE = 4, 2, 16
OPTIONS: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": HEADS, "head_dim": SIZE,
    "num_key_value_heads": KV_HEADS, "initializer_range": 0.1,
}  # fmt: skip


class Graft(Transplant):
    """The interface of transformers' attention: a mask [B, 1, T, S], of which the last row shows the padding."""

    def forward(self, hidden_states: Tensor, *_: Any, **given: Any) -> Any:
        mask = given.pop("attention_mask", None)
        if mask is not None:
            whole = mask[:, 0].bool() if mask.dtype == torch.bool else mask[:, 0] == 0
            mask = whole.any(1)  # a token that nobody sees is padding
        return super().forward(hidden_states, given.get("cache"), mask), None


def norm(weight: Tensor) -> Tensor:
    """Qwen3-Next's norms multiply by 1 + weight; a gradient is no weight."""
    return weight + 1 if isinstance(weight, nn.Parameter) else weight


def gated(theirs: Parameters) -> Parameters:
    q, gate = theirs["q_proj.weight"].unflatten(0, (HEADS, 2, SIZE)).unbind(1)
    parts = [q.flatten(0, 1), theirs["k_proj.weight"], theirs["v_proj.weight"], gate.flatten(0, 1)]
    norms = {name: norm(theirs[name]) for name in ("q_norm.weight", "k_norm.weight")}
    return {"in_proj.weight": torch.cat(parts), "out_proj.weight": theirs["o_proj.weight"], **norms}


def plain(theirs: Parameters) -> Parameters:
    parts = torch.cat([theirs[f"{name}_proj.weight"] for name in "qkv"])
    norms = {name: theirs[name] for name in ("q_norm.weight", "k_norm.weight")}
    return {"in_proj.weight": parts, "out_proj.weight": theirs["o_proj.weight"], **norms}


def model(kind: str, config: Any, rotated: int) -> nn.Module:
    """That model, its rotary frequencies exact: it computes them in float32."""
    torch.manual_seed(0)
    theirs = shaken(getattr(transformers, kind)(config)).double()
    theirs.model.rotary_emb.inv_freq = 10000.0 ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    return theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gated_attention_with_partial_rotary(dtype: torch.dtype) -> None:
    config = transformers.Qwen3NextConfig(
        **OPTIONS, num_hidden_layers=2, mlp_only_layers=[0, 1], layer_types=["full_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    options = {"qk_norm": True, "output_gate": True, "rope_fraction": 0.25}
    prove(
        "softmax_attention, gated, partial rotary",
        "transformers Qwen3NextForCausalLM",
        model("Qwen3NextForCausalLM", config, SIZE // 4),
        "self_attn",
        lambda: SoftmaxAttention(32, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=SIZE, **options).double(),
        gated,
        dtype,
        kind="full_attention",
        graft=Graft,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("kind", "window"), [("full_attention", None), ("sliding_attention", 6)])
def test_grouped_attention_with_norms_and_windows(kind: str, window: int | None, dtype: torch.dtype) -> None:
    config = transformers.Qwen3Config(
        **OPTIONS, num_hidden_layers=2, layer_types=[kind, kind], use_sliding_window=True, sliding_window=6,
        max_window_layers=0,
    )  # fmt: skip
    options = {"qk_norm": True, "window": window}
    prove(
        f"softmax_attention, {kind.removesuffix('_attention')}, norms on q and k",
        "transformers Qwen3ForCausalLM",
        model("Qwen3ForCausalLM", config, SIZE),
        "self_attn",
        lambda: SoftmaxAttention(32, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=SIZE, **options).double(),
        plain,
        dtype,
        kind=kind,
        graft=Graft,
    )
