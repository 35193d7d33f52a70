"""What the models of flash-linear-attention share: what stands around their mixers, and their config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from linattn.checkpoints.layout import Config, Layout, Renew, Rule, Spread, demand, renamed
from linattn.models import LanguageModel, ModelConfig


@dataclass(frozen=True)
class Frame:
    """The blocks around a mixer: their defaults, our config's fields for theirs and back, and their tensors.

    ``first`` lists tensors of the first block alone, ``block`` those of each, ``norms`` the tensors of a norm.
    """

    defaults: Config
    fields: Callable[[Config], dict[str, Any]]
    describe: Callable[[ModelConfig], dict[str, Any]]
    norms: tuple[str, ...]
    first: Callable[[], Iterable[Rule]]
    block: Callable[[Config], Iterable[Rule]]
    renew: Renew = lambda tensors: tensors


def rounded(config: Config, ratio: float, multiple: int) -> int:
    """The hidden width of their MLP: given, or ``ratio`` times the width, up to a multiple."""
    if config["intermediate_size"] is not None:
        return int(config["intermediate_size"])
    return -(-int(config["hidden_size"] * ratio) // multiple) * multiple


def _swiglu_size(config: Config) -> int:
    return rounded(config, (config["hidden_ratio"] or 4) * 2 / 3, 256)


def _swiglu_fields(config: Config) -> dict[str, Any]:
    demand(config, hidden_act=("swish", "silu"), attnres_block_size=None)
    return {"mlp": "swiglu", "mlp_hidden": _swiglu_size(config), "norm": "rms", "embedding_norm": False}


def _swiglu_block(config: Config) -> Iterable[Rule]:
    size = _swiglu_size(config)
    yield Rule("mlp.in_proj.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), (size, size))
    yield Rule("mlp.out_proj.weight", ("mlp.down_proj.weight",))
    yield from renamed("mlp_norm", "mlp_norm", "weight")


def _gate_and_up(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Their models of 2024 had both projections in one, the gate first."""
    renewed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        up = name.replace("mlp.gate_proj", "mlp.up_proj")
        if up != name and up not in tensors:
            renewed[name], renewed[up] = tensor.chunk(2)
        else:
            renewed[name] = tensor
    return renewed


SWIGLU = Frame(
    defaults={"hidden_ratio": 4, "hidden_act": "swish", "norm_eps": 1e-6, "attnres_block_size": None},
    fields=_swiglu_fields,
    describe=lambda config: {"hidden_act": "swish"},
    norms=("weight",),
    first=lambda: (),
    block=_swiglu_block,
    renew=_gate_and_up,
)


def layout(
    model_type: str,
    mechanism: str,
    architecture: str,
    *,
    defaults: Mapping[str, Any],
    options: Callable[[Config], dict[str, Any]],
    describe: Callable[[Any], dict[str, Any]],
    mixer: Callable[[Config, int], Iterable[Rule]],
    frame: Frame = SWIGLU,
    whole_model: Callable[[Config], Iterable[Spread]] = lambda config: (),
) -> Layout:
    """A layout of theirs from what is its mixer's own.

    ``options`` are our layer's for their config, ``describe`` their keys for a layer of ours, and ``mixer`` lists the
    tensors of the layer of that number, named within it; ``whole_model`` those of all layers together.
    """

    def read(config: Config) -> ModelConfig:
        demand(config, attn=None)
        return ModelConfig(
            vocab_size=config["vocab_size"],
            d_model=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            pattern=mechanism,
            mixers={mechanism: options(config)},
            norm_eps=config["norm_eps"],
            tie_embeddings=config["tie_word_embeddings"],
            **frame.fields(config),
        )

    def write(model: LanguageModel) -> dict[str, Any]:
        config, last = model.config, model.blocks[-1]
        return {
            "model_type": model_type,
            "architectures": [architecture],
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "num_hidden_layers": config.num_layers,
            "intermediate_size": config.mlp_size,
            "norm_eps": config.norm_eps,
            "tie_word_embeddings": config.tie_embeddings,
            **frame.describe(config),
            **describe(last.mixer),
        }

    def rules(config: Config) -> Iterable[Rule | Spread]:
        yield Rule("embedding.weight", ("model.embeddings.weight",))
        for rule in frame.first():
            yield rule.within("", "model.layers.0.")
        for layer in range(config["num_hidden_layers"]):
            ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
            for rule in renamed("mixer_norm", "attn_norm", *frame.norms):
                yield rule.within(ours, theirs)
            for rule in mixer(config, layer):
                yield rule.within(f"{ours}mixer.", f"{theirs}attn.")
            for rule in frame.block(config):
                yield rule.within(ours, theirs)
        yield from whole_model(config)
        yield from renamed("norm", "model.norm", *frame.norms)
        if not config["tie_word_embeddings"]:
            yield Rule("head.weight", ("lm_head.weight",))

    def copies(config: Config) -> Mapping[str, str]:
        return {"lm_head.weight": "model.embeddings.weight"} if config["tie_word_embeddings"] else {}

    common = {
        "hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 32000, "intermediate_size": None, "attn": None,
        "tie_word_embeddings": False, "fuse_norm": True,
    }  # fmt: skip
    return Layout(
        name=f"flash-linear-attention's {model_type}",
        mechanism=mechanism,
        defaults={**common, **frame.defaults, **defaults},
        read=read,
        write=write,
        rules=rules,
        copies=copies,
        renew=frame.renew,
    )


def projections(names: str, *sizes: int) -> Rule:
    """Our one projection of the input, from theirs; ``names`` are their letters, such as "q k v"."""
    return Rule("in_proj.weight", tuple(f"{name}_proj.weight" for name in names.split()), sizes)


def convolution_size(config: Config) -> int:
    """The width of their short convolutions, 0 without; the activation is there all the same."""
    return int(config["conv_size"]) if config["use_short_conv"] else 0


def convolution(config: Config, names: str, *sizes: int) -> Iterable[Rule]:
    """Their convolutions, which are one of ours; ``names`` are their letters."""
    if config["use_short_conv"]:
        yield Rule("conv1d.weight", tuple(f"{name}_conv1d.weight" for name in names.split()), sizes)
