"""fla's GLA."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from linattn.checkpoints.fla.frame import layout
from linattn.checkpoints.layout import Config, Rule, demand, whole


def _options(config: Config) -> dict[str, Any]:
    demand(
        config, num_kv_heads=(None, config["num_heads"]), feature_map=None, use_short_conv=False, use_output_gate=True,
        clamp_min=None, elementwise_affine=True,
    )  # fmt: skip
    return {
        "num_heads": config["num_heads"],
        "expand_k": config["expand_k"],
        "expand_v": config["expand_v"],
        "norm_eps": config["norm_eps"],
        "gate_low_rank_dim": 16,
        "gate_logit_normalizer": 16.0,
    }


def _describe(mixer: Any) -> dict[str, Any]:
    return {
        "num_heads": mixer.num_heads,
        "expand_k": mixer.sizes[0] / mixer.d_model,
        "expand_v": mixer.sizes[2] / mixer.d_model,
    }


def _mixer(config: Config, layer: int) -> Iterable[Rule]:
    keys = whole("expand_k * hidden_size", config["hidden_size"] * config["expand_k"])
    values = whole("expand_v * hidden_size", config["hidden_size"] * config["expand_v"])
    names = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.weight", "gk_proj.0.weight")
    yield Rule("in_proj.weight", names, (keys, keys, values, values, 16))
    yield Rule("gate_proj.weight", ("gk_proj.1.weight",))
    yield Rule("gate_proj.bias", ("gk_proj.1.bias",))
    yield Rule("norm.weight", ("g_norm_swish_gate.weight" if config["fuse_norm"] else "g_norm.weight",))
    yield Rule("out_proj.weight", ("o_proj.weight",))


GLA = layout(
    "gla", "gated_linear_attention", "GLAForCausalLM",
    defaults={
        "expand_k": 0.5, "expand_v": 1.0, "num_heads": 4, "num_kv_heads": None, "feature_map": None,
        "use_short_conv": False, "use_output_gate": True, "clamp_min": None, "elementwise_affine": True,
    },
    options=_options,
    describe=_describe,
    mixer=_mixer,
)  # fmt: skip
