"""fla's DeltaNet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from linattn.checkpoints.fla.frame import convolution, convolution_size, layout, projections
from linattn.checkpoints.layout import Config, Rule, demand


def _options(config: Config) -> dict[str, Any]:
    demand(config, use_gate=False, use_beta=True, qk_norm="l2", qk_activation="silu", expand_k=1.0, expand_v=1.0)
    return {
        "num_heads": config["num_heads"],
        "allow_neg_eigval": config["allow_neg_eigval"],
        "conv_size": convolution_size(config),
        "norm_eps": config["norm_eps"],
    }


def _describe(mixer: Any) -> dict[str, Any]:
    return {
        "num_heads": mixer.num_heads,
        "allow_neg_eigval": mixer.beta_max == 2,
        "use_short_conv": mixer.conv1d.width > 0,
        "conv_size": mixer.conv1d.width,
    }


def _mixer(config: Config, layer: int) -> Iterable[Rule]:
    width = config["hidden_size"]
    yield projections("q k v b", width, width, width, config["num_heads"])
    yield from convolution(config, "q k v", width, width, width)
    yield Rule("norm.weight", ("o_norm.weight",))
    yield Rule("out_proj.weight", ("o_proj.weight",))


DELTA_NET = layout(
    "delta_net", "delta_rule", "DeltaNetForCausalLM",
    defaults={
        "expand_k": 1.0, "expand_v": 1.0, "num_heads": 16, "use_gate": False, "use_beta": True, "use_short_conv": True,
        "allow_neg_eigval": False, "conv_size": 4, "qk_norm": "l2", "qk_activation": "silu",
    },
    options=_options,
    describe=_describe,
    mixer=_mixer,
)  # fmt: skip
