"""fla's RWKV-7."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from linattn.checkpoints.fla.frame import layout
from linattn.checkpoints.fla.rwkv import low_rank, rwkv_frame
from linattn.checkpoints.layout import Config, Rule, demand, renamed, same, whole

LERPS = "rwkvag"
"""The order in which both libraries mix a token with the one before."""


def _heads(config: Config) -> int:
    if config["head_dim"] is None:
        return int(config["num_heads"])
    return whole("hidden_size / head_dim", config["hidden_size"] / config["head_dim"])


def _options(config: Config) -> dict[str, Any]:
    width, heads = config["hidden_size"], _heads(config)
    demand(config, value_dim=(None, width, [width] * config["num_hidden_layers"]))
    return {
        "num_heads": heads,
        "decay_rank": config["decay_low_rank_dim"],
        "rate_rank": config["a_low_rank_dim"],
        "value_rank": config["v_low_rank_dim"],
        "gate_rank": config["gate_low_rank_dim"],
        "group_norm_eps": width // heads * config["norm_eps"],
    }


def _describe(mixer: Any) -> dict[str, Any]:
    residual = {} if mixer.residual is None else {"v_low_rank_dim": mixer.residual.down.out_features}
    return {
        **residual,
        "head_dim": mixer.head_dim,
        "decay_low_rank_dim": mixer.decay.down.out_features,
        "a_low_rank_dim": mixer.rate.down.out_features,
        "gate_low_rank_dim": mixer.gate.down.out_features,
    }


def _mixer(config: Config, layer: int) -> Iterable[Rule]:
    heads, parts = _heads(config), tuple(f"x_{letter}" for letter in LERPS)
    yield Rule("shift_mix", parts, (1,) * len(parts), lambda t: t.flatten(0, 1), lambda t: t[:, None])
    yield from low_rank("decay", "w_lora")
    yield from low_rank("rate", "a_lora")
    if layer:
        yield from low_rank("residual", "v_lora")
    yield from low_rank("gate", "g_lora", bias=False)
    for name in ("k_k", "k_a"):
        yield Rule(name, (name,), (), lambda t: t.view(heads, -1), lambda t: t.flatten())
    yield from same("r_k")
    for ours, theirs in (("receptance", "r"), ("key", "k"), ("value", "v"), ("output", "o")):
        yield from renamed(ours, f"{theirs}_proj", "weight")
    yield from renamed("norm", "g_norm", "weight", "bias")


def _renew(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Their first version kept the six lerps of a layer in one tensor, x_x [6, C]."""
    renewed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        at, dot, part = name.rpartition(".")
        if part == "x_x" and tensor.shape[0] == len(LERPS):
            renewed |= {f"{at}{dot}x_{letter}": row[None, None] for letter, row in zip(LERPS, tensor, strict=True)}
        else:
            renewed[name] = tensor
    return renewed


def _channel_mix(config: Config) -> Iterable[Rule]:
    yield Rule("shift_mix", ("x_k",), (), lambda t: t[None], lambda t: t[0])
    yield from same("key.weight", "value.weight")


RWKV7 = layout(
    "rwkv7", "rwkv7", "RWKV7ForCausalLM",
    defaults={
        "head_dim": 64, "num_heads": None, "decay_low_rank_dim": 64, "gate_low_rank_dim": 128, "a_low_rank_dim": 64,
        "v_low_rank_dim": 16, "value_dim": None,
    },
    options=_options,
    describe=_describe,
    mixer=_mixer,
    frame=rwkv_frame("channel_mix_v7", 4, _channel_mix, _renew),
)  # fmt: skip
