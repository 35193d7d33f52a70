"""What fla's RWKV-6 and RWKV-7 share: LayerNorms with biases, one of them on the embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from linattn.checkpoints.fla.frame import Frame, rounded
from linattn.checkpoints.layout import Config, Renew, Rule, demand, renamed


def rwkv_frame(
    mlp: str,
    ratio: float,
    channel_mix: Callable[[Config], Iterable[Rule]],
    renew: Renew = lambda tensors: tensors,
) -> Frame:
    """The frame whose MLP is our channel mix ``mlp``, ``ratio`` times as wide, with the tensors of ``channel_mix``."""
    return Frame(
        defaults={
            "hidden_ratio": ratio, "hidden_act": "sqrelu", "norm_eps": 1e-5, "norm_first": True, "norm_bias": True,
        },
        fields=partial(_fields, mlp, ratio),
        describe=lambda config: {"hidden_act": "sqrelu", "norm_first": True, "norm_bias": True},
        norms=("weight", "bias"),
        first=lambda: renamed("embedding_norm", "pre_norm", "weight", "bias"),
        block=partial(_block, channel_mix),
        renew=renew,
    )  # fmt: skip


def _fields(mlp: str, ratio: float, config: Config) -> dict[str, Any]:
    demand(config, hidden_act="sqrelu", norm_first=True, norm_bias=True)
    hidden = rounded(config, config["hidden_ratio"] or ratio, 32)
    return {"mlp": mlp, "mlp_hidden": hidden, "norm": "layer", "embedding_norm": True}


def _block(channel_mix: Callable[[Config], Iterable[Rule]], config: Config) -> Iterable[Rule]:
    yield from renamed("mlp_norm", "ffn_norm", "weight", "bias")
    for rule in channel_mix(config):
        yield rule.within("mlp.", "ffn.")


def low_rank(ours: str, theirs: str, *, bias: bool = True) -> Iterable[Rule]:
    """Their LoRA, which is our narrow layer."""
    yield Rule(f"{ours}.down.weight", (f"{theirs}.lora.0.weight",))
    yield Rule(f"{ours}.up.weight", (f"{theirs}.lora.2.weight",))
    if bias:
        yield Rule(f"{ours}.bias", (f"{theirs}.lora.2.bias",))
