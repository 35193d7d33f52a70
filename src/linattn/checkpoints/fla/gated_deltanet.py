"""fla's Gated DeltaNet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from linattn.checkpoints.fla.frame import convolution, convolution_size, layout, projections
from linattn.checkpoints.layout import Config, Rule, demand, same, whole


def _value_heads(config: Config) -> int:
    return int(config["num_heads"] if config["num_v_heads"] is None else config["num_v_heads"])


def _options(config: Config) -> dict[str, Any]:
    demand(config, use_gate=True, output_gate_activation=("swish", "silu"))
    return {
        "num_heads": config["num_heads"],
        "head_dim": config["head_dim"],
        "expand_v": config["expand_v"],
        "num_v_heads": _value_heads(config),
        "allow_neg_eigval": config["allow_neg_eigval"],
        "conv_size": convolution_size(config),
        "norm_eps": config["norm_eps"],
    }


def _describe(mixer: Any) -> dict[str, Any]:
    return {
        "num_heads": mixer.num_heads,
        "num_v_heads": mixer.num_v_heads,
        "head_dim": mixer.head_dim,
        "expand_v": mixer.head_v_dim / mixer.head_dim,
        "allow_neg_eigval": mixer.beta_max == 2,
        "use_short_conv": mixer.conv1d.width > 0,
        "conv_size": mixer.conv1d.width,
    }


def _mixer(config: Config, layer: int) -> Iterable[Rule]:
    heads, keys = _value_heads(config), config["num_heads"] * config["head_dim"]
    values = heads * whole("expand_v * head_dim", config["head_dim"] * config["expand_v"])
    yield projections("q k v g a b", keys, keys, values, values, heads, heads)
    yield from convolution(config, "q k v", keys, keys, values)
    yield from same("A_log", "dt_bias")
    yield Rule("norm.weight", ("o_norm.weight",))
    yield Rule("out_proj.weight", ("o_proj.weight",))


GATED_DELTANET = layout(
    "gated_deltanet", "gated_delta_rule", "GatedDeltaNetForCausalLM",
    defaults={
        "num_hidden_layers": 21, "expand_v": 2.0, "num_heads": 6, "num_v_heads": None, "head_dim": 256,
        "use_gate": True, "output_gate_activation": "swish", "use_short_conv": True, "allow_neg_eigval": False,
        "conv_size": 4,
    },
    options=_options,
    describe=_describe,
    mixer=_mixer,
)  # fmt: skip
