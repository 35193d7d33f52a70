"""The way back from a model of this library to RWKV-LM's tensors; :mod:`linattn.checkpoints.rwkv` is the way here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from linattn._checks import fail
from linattn.checkpoints.assemble import distinct_tensors
from linattn.checkpoints.layout import difference
from linattn.checkpoints.rwkv import convert
from linattn.models import LanguageModel

LERPS = {"4": "rkv", "5.0": "rkv", "5.1": "rkvg", "5.2": "rkvg", "6": "wkvrg", "7": "rwkvag"}
"""What the rows of our ``shift_mix`` are for."""


def to_official(model: LanguageModel) -> dict[str, Tensor]:
    """The tensors of a model, named and laid out as RWKV-LM's. Raises ValueError for one that its files cannot say."""
    own = {name: tensor.detach() for name, tensor in distinct_tensors(model).items()}
    version = _version(model)
    try:
        tensors = _official(model, version, own)
        config, ours = convert(tensors)
    except (KeyError, ValueError, RuntimeError) as error:
        raise fail("model", f"one that is no RWKV-{version} ({error})", "one that RWKV-LM has") from error
    with torch.device("meta"):
        reread = LanguageModel(config)
    if differing := difference(model, reread):
        raise fail("model", differing, f"what a file of RWKV-{version} can say")
    if foreign := own.keys() ^ ours.keys():
        raise fail("model", ", ".join(sorted(foreign)[:6]), f"the tensors of RWKV-{version}")
    return tensors


def _version(model: LanguageModel) -> str:
    mechanisms = set(model.config.layers)
    known = {"rwkv4": "4", "rwkv5": "5", "rwkv6": "6", "rwkv7": "7"}
    if len(mechanisms) != 1 or not mechanisms <= known.keys():
        raise fail("layout", f"'rwkv' for {model.config.pattern!r}", f"a model of {', '.join(known)} alone")
    version = known[mechanisms.pop()]
    mixer: Any = model.blocks[0].mixer
    return str(mixer.version) if version == "5" else version


def _official(model: LanguageModel, version: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = {"emb.weight": own["embedding.weight"]}

    def norm(theirs: str, ours: str) -> None:
        for part in ("weight", "bias"):
            tensors[f"{theirs}.{part}"] = own[f"{ours}.{part}"]

    norm("blocks.0.ln0", "embedding_norm")
    for layer in range(model.config.num_layers):
        block = f"blocks.{layer}."
        norm(block + "ln1", block + "mixer_norm")
        norm(block + "ln2", block + "mlp_norm")
        mixer, mlp = ({n.removeprefix(at): t for n, t in own.items() if n.startswith(at)} for at in _places(block))
        tensors |= {f"{block}att.{name}": tensor for name, tensor in _time_mix(version, layer, mixer).items()}
        tensors |= {f"{block}ffn.{name}": tensor for name, tensor in _channel_mix(version, mlp).items()}
    norm("ln_out", "norm")
    tensors["head.weight"] = own["head.weight"]
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _places(block: str) -> tuple[str, str]:
    return f"{block}mixer.", f"{block}mlp."


def _lerps(version: str, letters: str, weights: Tensor) -> dict[str, Tensor]:
    """Version 4 and 5 store the weight of the token itself, which is one less that of the token before."""
    prefix = {"6": "time_maa_", "7": "x_"}.get(version, "time_mix_")
    weights = weights if version in "67" else 1 - weights
    return {prefix + letter: row.view(1, 1, -1) for letter, row in zip(letters, weights, strict=True)}


def _low_rank(own: Mapping[str, Tensor], ours: str, down: str, up: str, bias: str | None = None) -> dict[str, Tensor]:
    tensors = {down: own[f"{ours}.down.weight"].T, up: own[f"{ours}.up.weight"].T}
    return tensors if bias is None else tensors | {bias: own[f"{ours}.bias"].view(1, 1, -1)}


def _time_mix(version: str, layer: int, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = _lerps(version, LERPS[version], own["shift_mix"])
    if version in ("4", "5.2"):
        tensors |= {"time_decay": own["time_decay"]}
        tensors |= {"time_first" if version == "4" else "time_faaaa": own["time_bonus"]}
    elif version in ("5.0", "5.1"):
        tensors |= {"time_decay": own["time_decay"].flatten(), "time_first": own["time_bonus"].flatten()}
    elif version == "6":
        tensors |= {
            "time_maa_x": own["shift_base"].view(1, 1, -1),
            "time_maa_w1": own["shift_down.weight"].T,
            "time_maa_w2": own["shift_up"],
            **_low_rank(own, "decay", "time_decay_w1", "time_decay_w2", "time_decay"),
            "time_faaaa": own["time_bonus"],
        }
    else:
        tensors |= _low_rank(own, "decay", "w1", "w2", "w0") | _low_rank(own, "rate", "a1", "a2", "a0")
        tensors |= _low_rank(own, "residual", "v1", "v2", "v0") if layer else {}
        tensors |= _low_rank(own, "gate", "g1", "g2")
        tensors |= {name: own[name].view(1, 1, -1) for name in ("k_k", "k_a")} | {"r_k": own["r_k"]}
    for name in ("receptance", "key", "value", "gate", "output"):
        if f"{name}.weight" in own:
            tensors[f"{name}.weight"] = own[f"{name}.weight"]
    if version != "4":
        tensors |= {f"ln_x.{part}": own[f"norm.{part}"] for part in ("weight", "bias")}
    return tensors


def _channel_mix(version: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = _lerps(version, "k" if version == "7" else "kr", own["shift_mix"])
    tensors |= {name: own[name] for name in ("key.weight", "receptance.weight", "value.weight") if name in own}
    if "deep_embed.table.weight" in own:  # version 7a
        tensors |= {
            "s_emb.weight": own["deep_embed.table.weight"],
            "s_emb_x.weight": own["deep_embed.from_embedding.weight"],
            "s0": own["deep_embed.up.bias"].view(1, 1, -1),
            "s1": own["deep_embed.down.weight"].T,
            "s2": own["deep_embed.up.weight"].T,
        }
    return tensors
