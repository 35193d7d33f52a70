"""fla's RWKV-6."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from linattn.checkpoints.fla.frame import layout
from linattn.checkpoints.fla.rwkv import low_rank, rwkv_frame
from linattn.checkpoints.layout import Config, Rule, demand, renamed

ORDER, BACK = [1, 2, 3, 0, 4], [3, 0, 1, 2, 4]
"""Theirs is r, w, k, v, g; ours w, k, v, r, g; and the other way."""


def _options(config: Config) -> dict[str, Any]:
    demand(config, expand_v=1.0)
    return {
        "num_heads": config["num_heads"],
        "expand_k": config["expand_k"],
        "mix_rank": config["proj_low_rank_dim"],
        "decay_rank": config["gate_low_rank_dim"],
        "group_norm_eps": config["norm_eps"],
    }


def _describe(mixer: Any) -> dict[str, Any]:
    return {
        "num_heads": mixer.num_heads,
        "expand_k": mixer.key.out_features / mixer.d_model,
        "proj_low_rank_dim": mixer.shift_up.shape[1],
        "gate_low_rank_dim": mixer.decay.down.out_features,
    }


def _blocks(order: list[int], tensor: Tensor) -> Tensor:
    """Reorder the five parts of the first axis."""
    return tensor.unflatten(0, (5, -1))[order].flatten(0, 1)


def _mixer(config: Config, layer: int) -> Iterable[Rule]:
    yield Rule("shift_base", ("x_proj.0.mu",))
    yield Rule(
        "shift_down.weight", ("x_proj.0.linear.weight",), (), lambda t: _blocks(ORDER, t), lambda t: _blocks(BACK, t)
    )
    yield Rule(
        "shift_up", ("x_proj.2.weight",), (),
        lambda t: t.unflatten(1, (5, -1)).permute(1, 2, 0)[ORDER],
        lambda t: t[BACK].permute(2, 0, 1).flatten(1),
    )  # fmt: skip
    yield Rule("shift_mix", ("x_bias",), (), lambda t: t[ORDER], lambda t: t[BACK])
    yield from low_rank("decay", "w_proj.linear")
    yield Rule("time_bonus", ("bonus",))
    for ours, theirs in (("receptance", "r"), ("key", "k"), ("value", "v"), ("gate", "g")):
        yield from renamed(ours, f"{theirs}_proj.linear", "weight")
    yield from renamed("norm", "g_norm", "weight", "bias")
    yield from renamed("output", "o_proj", "weight")


def _channel_mix(config: Config) -> Iterable[Rule]:
    width = config["hidden_size"]
    yield Rule(
        "shift_mix", ("key.mu", "receptance.mu"), (width, width), lambda t: t.view(2, -1), lambda t: t.flatten()
    )  # fmt: skip
    yield from renamed("key", "key.linear", "weight")
    yield from renamed("receptance", "receptance.linear", "weight")
    yield Rule("value.weight", ("value.weight",))


RWKV6 = layout(
    "rwkv6", "rwkv6", "RWKV6ForCausalLM",
    defaults={
        "expand_k": 0.5, "expand_v": 1.0, "num_heads": 4, "proj_low_rank_dim": 32, "gate_low_rank_dim": 64,
    },
    options=_options,
    describe=_describe,
    mixer=_mixer,
    frame=rwkv_frame("channel_mix", 3.5, _channel_mix),
)  # fmt: skip
