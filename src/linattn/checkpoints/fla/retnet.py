"""fla's RetNet: rotary positions are RoPE's, the norm has a weight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from linattn.checkpoints.fla.frame import layout, projections
from linattn.checkpoints.layout import Config, Rule, demand, whole


def _options(config: Config) -> dict[str, Any]:
    demand(
        config, num_kv_heads=(None, config["num_heads"]), feature_map=None, use_short_conv=False, use_output_gate=True,
        elementwise_affine=True, expand_k=1.0,
    )  # fmt: skip
    return {
        "num_heads": config["num_heads"],
        "expand_v": config["expand_v"],
        "norm_eps": config["norm_eps"],
        "rope": True,
        "norm_affine": True,
    }


def _describe(mixer: Any) -> dict[str, Any]:
    return {"num_heads": mixer.num_heads, "expand_v": mixer.sizes[2] / mixer.d_model}


def _mixer(config: Config, layer: int) -> Iterable[Rule]:
    keys = config["hidden_size"]
    values = whole("expand_v * hidden_size", keys * config["expand_v"])
    yield projections("q k v g", keys, keys, values, values)
    yield Rule("norm.weight", ("g_norm_swish_gate.weight" if config["fuse_norm"] else "g_norm.weight",))
    yield Rule("out_proj.weight", ("o_proj.weight",))


RETNET = layout(
    "retnet", "retention", "RetNetForCausalLM",
    defaults={
        "hidden_ratio": 2, "expand_k": 1.0, "expand_v": 2.0, "num_heads": 8, "num_kv_heads": None, "feature_map": None,
        "use_short_conv": False, "use_output_gate": True, "elementwise_affine": True,
    },
    options=_options,
    describe=_describe,
    mixer=_mixer,
)  # fmt: skip
