"""fla's HGRN2, which keeps the lower bounds of all layers' forget gates in one tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from linattn.checkpoints.fla.frame import convolution, convolution_size, layout, projections
from linattn.checkpoints.layout import Config, Rule, Spread, demand, whole


def _options(config: Config) -> dict[str, Any]:
    demand(config, use_lower_bound=True, elementwise_affine=True)
    heads = config["num_heads"]
    if config["expand_ratio"] is not None:
        heads = whole("hidden_size / expand_ratio", config["hidden_size"] / config["expand_ratio"])
    return {
        "num_heads": heads,
        "conv_size": convolution_size(config),
        "norm_eps": 1e-5,  # whatever their config says
    }


def _describe(mixer: Any) -> dict[str, Any]:
    return {
        "num_heads": mixer.num_heads,
        "expand_ratio": mixer.head_dim,
        "use_short_conv": mixer.conv1d.width > 0,
        "conv_size": mixer.conv1d.width,
    }


def _mixer(config: Config, layer: int) -> Iterable[Rule]:
    width = config["hidden_size"]
    yield projections("q f i", width, width, width)
    yield from convolution(config, "q f i", width, width, width)
    yield Rule("norm.weight", ("g_norm.weight",))
    yield Rule("out_proj.weight", ("o_proj.weight",))


def _bounds(logits: Tensor) -> Tensor:
    """[L, C], whose softmax over the layers sums up to the bounds -> the logits of layers 1 … L-1's own bounds.

    In float64, where a bound close to 1 keeps its distance from it.
    """
    p = logits.double().softmax(0)
    rest = p.flip(0).cumsum(0).flip(0)[2:]
    above = torch.cat([rest, torch.zeros_like(p[:1])])[: len(p) - 1] + p[0]
    return (p[1:].cumsum(0).log() - above.log()).to(logits.dtype)


def _logits(bounds: Tensor) -> Tensor:
    """The inverse of ``_bounds``. Raises ValueError for bounds that do not rise with the layer."""
    share = bounds.double().sigmoid()
    p = torch.cat([(-bounds.double()[-1:]).sigmoid(), share[:1], share.diff(dim=0)])
    if bool((p <= 0).any()):
        raise ValueError("model: got bounds of the forget gates that do not rise with the layer, wanted rising ones")
    return p.log().to(bounds.dtype)


def _whole_model(config: Config) -> Iterable[Spread]:
    ours = tuple(f"blocks.{layer}.mixer.forget_gate.bound" for layer in range(1, config["num_hidden_layers"]))
    yield Spread(ours, ("model.lower_bounds",), _bounds, _logits)


HGRN2 = layout(
    "hgrn2", "hgrn2", "HGRN2ForCausalLM",
    defaults={
        "num_heads": None, "expand_ratio": 128, "use_short_conv": False, "conv_size": 4, "use_lower_bound": True,
        "elementwise_affine": True,
    },
    options=_options,
    describe=_describe,
    mixer=_mixer,
    whole_model=_whole_model,
)  # fmt: skip
