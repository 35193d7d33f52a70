"""RWKV's own checkpoints: from the names and shapes of RWKV-LM's tensors to a model of this library.

Versions 4, 5.0, 5.1, 5.2, 6, 7 and 7a are told by their tensors. What they do not tell is the epsilon of the norm on
each head's output: 64e-5 in all official models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from linattn._checks import fail
from linattn.models import ModelConfig

FIRST = "blocks.0."


def version(tensors: Mapping[str, Tensor]) -> str:
    """The version of RWKV that a checkpoint is. Raises ValueError if it is none, or one that this library has not."""
    for name in ("emb.weight", "head.weight", "ln_out.weight", FIRST + "ln0.weight", FIRST + "ffn.key.weight"):
        if name not in tensors:
            raise fail("tensors", f"no {name}", "a checkpoint of RWKV-LM")
    attention = FIRST + "att."
    if attention + "r_k" in tensors:
        for name, what in (("qkv.qq.weight", "7b, with attention"), ("ffn.enn.weight", "8")):
            if FIRST + name in tensors:
                raise fail("tensors", f"RWKV-{what}", "RWKV-4, 5, 6, 7 or 7a")
        return "7a" if FIRST + "ffn.s_emb.weight" in tensors else "7"
    if attention + "time_maa_x" in tensors:
        return "6"
    if attention + "ln_x.weight" not in tensors:
        return "4"
    if attention + "gate.weight" not in tensors:
        return "5.0"
    decay = tensors[attention + "time_decay"]
    return "5.2" if decay.dim() > 1 and decay.shape[1] > 1 else "5.1"


def convert(tensors: Mapping[str, Tensor], *, group_norm_eps: float = 64e-5) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the weights, by the names of a ``LanguageModel``, of a checkpoint of RWKV-LM.

    ``group_norm_eps``: of the norm on each head's output in versions 5 to 7. Tensors keep their dtype, but for the
    weights of the token shift in versions 4 and 5, which are at least float32; they may be on the meta device. Raises
    ValueError for a version that is not known and for tensors missing or left over.
    """
    kind = version(tensors)
    left = dict(tensors)
    ours: dict[str, Tensor] = {}

    def take(name: str) -> Tensor:
        if name not in left:
            raise fail("tensors", f"no {name}", f"a checkpoint of RWKV-{kind}")
        return left.pop(name)

    def move(theirs: str, mine: str, *names: str) -> None:
        for name in names:
            ours[f"{mine}.{name}"] = take(f"{theirs}.{name}")

    layers = 1 + max(int(match[1]) for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name)))
    width, hidden = left["emb.weight"].shape[1], left[FIRST + "ffn.key.weight"].shape[0]
    ours["embedding.weight"], ours["head.weight"] = take("emb.weight"), take("head.weight")
    move(FIRST + "ln0", "embedding_norm", "weight", "bias")
    move("ln_out", "norm", "weight", "bias")
    options: dict[str, Any] = {} if kind == "4" else {"group_norm_eps": group_norm_eps}
    for layer in range(layers):
        theirs, mine = f"blocks.{layer}.", f"blocks.{layer}."
        move(theirs + "ln1", mine + "mixer_norm", "weight", "bias")
        move(theirs + "ln2", mine + "mlp_norm", "weight", "bias")
        for name in ("receptance", "key", "value", "output"):
            move(f"{theirs}att.{name}", f"{mine}mixer.{name}", "weight")
        if kind != "4":
            move(theirs + "att.ln_x", mine + "mixer.norm", "weight", "bias")
        mixer = _MIXERS[kind[0]](kind, layer, lambda name, at=theirs: take(f"{at}att.{name}"))  # type: ignore[misc]
        ours |= {f"{mine}mixer.{name}": tensor for name, tensor in mixer.items()}
        mlp = _channel_mix(kind, lambda name, at=theirs: take(f"{at}ffn.{name}"))  # type: ignore[misc]
        ours |= {f"{mine}mlp.{name}": tensor for name, tensor in mlp.items()}
    if kind[0] == "7":  # unused in the first layer, and in some checkpoints all the same
        left = {name: tensor for name, tensor in left.items() if not re.fullmatch(r"blocks\.0\.att\.v[012]", name)}
    if left:
        raise fail("tensors", f"{', '.join(sorted(left)[:6])} beside those of RWKV-{kind}", "none left over")
    options |= _options(kind, ours)
    config = ModelConfig(
        vocab_size=ours["embedding.weight"].shape[0],
        d_model=width,
        num_layers=layers,
        pattern=f"rwkv{kind[0]}",
        mixers={f"rwkv{kind[0]}": options} if options else {},
        mlp="channel_mix_v7a" if kind == "7a" else None,  # type: ignore[arg-type]
        mlp_hidden=hidden,
    )
    return config, ours


Take = Callable[[str], Tensor]


def _mixes(take: Take, names: str, *, prefix: str = "time_mix_", flip: bool = True) -> Tensor:
    """The weights of the token before; version 4 and 5 store those of the token itself.

    What is left of 1 is float32, for half precision would round it.
    """
    weights = torch.stack([take(prefix + name).flatten() for name in names])
    return 1 - weights.to(torch.promote_types(weights.dtype, torch.float32)) if flip else weights


def _low_rank(take: Take, name: str, down: str, up: str, bias: str | None = None) -> dict[str, Tensor]:
    """RWKV-LM's low-rank matrices are [in, out]."""
    tensors = {f"{name}.down.weight": take(down).T.contiguous(), f"{name}.up.weight": take(up).T.contiguous()}
    return tensors if bias is None else tensors | {f"{name}.bias": take(bias).flatten()}


def _rwkv4(kind: str, layer: int, take: Take) -> dict[str, Tensor]:
    return {
        "shift_mix": _mixes(take, "rkv"),
        "time_decay": take("time_decay").flatten(),
        "time_bonus": take("time_first").flatten(),
    }


def _rwkv5(kind: str, layer: int, take: Take) -> dict[str, Tensor]:
    decay = take("time_decay")
    bonus = take("time_faaaa" if kind == "5.2" else "time_first")  # the latter is a logarithm
    heads = decay.shape[0]
    tensors = {
        "shift_mix": _mixes(take, "rkv" if kind == "5.0" else "rkvg"),
        "time_decay": decay.reshape(heads, -1),
        "time_bonus": bonus.reshape(heads, -1),
    }
    return tensors if kind == "5.0" else tensors | {"gate.weight": take("gate.weight")}


def _rwkv6(kind: str, layer: int, take: Take) -> dict[str, Tensor]:
    return {
        "shift_base": take("time_maa_x").flatten(),
        "shift_mix": _mixes(take, "wkvrg", prefix="time_maa_", flip=False),
        "shift_down.weight": take("time_maa_w1").T.contiguous(),
        "shift_up": take("time_maa_w2"),
        **_low_rank(take, "decay", "time_decay_w1", "time_decay_w2", "time_decay"),
        "time_bonus": take("time_faaaa"),
        "gate.weight": take("gate.weight"),
    }


def _rwkv7(kind: str, layer: int, take: Take) -> dict[str, Tensor]:
    r_k = take("r_k")
    return {
        "shift_mix": _mixes(take, "rwkvag", prefix="x_", flip=False),
        **_low_rank(take, "decay", "w1", "w2", "w0"),
        **_low_rank(take, "rate", "a1", "a2", "a0"),
        **(_low_rank(take, "residual", "v1", "v2", "v0") if layer else {}),
        **_low_rank(take, "gate", "g1", "g2"),
        "k_k": take("k_k").reshape(r_k.shape),
        "k_a": take("k_a").reshape(r_k.shape),
        "r_k": r_k,
    }


_MIXERS = {"4": _rwkv4, "5": _rwkv5, "6": _rwkv6, "7": _rwkv7}


def _channel_mix(kind: str, take: Take) -> dict[str, Tensor]:
    tensors = {name: take(name) for name in ("key.weight", "value.weight")}
    if kind[0] == "7":
        tensors["shift_mix"] = _mixes(take, "k", prefix="x_", flip=False)
    else:
        prefix = "time_maa_" if kind == "6" else "time_mix_"
        tensors["shift_mix"] = _mixes(take, "kr", prefix=prefix, flip=kind != "6")
        tensors["receptance.weight"] = take("receptance.weight")
    if kind == "7a":
        tensors |= {
            "deep_embed.table.weight": take("s_emb.weight"),
            "deep_embed.from_embedding.weight": take("s_emb_x.weight"),
            "deep_embed.down.weight": take("s1").T.contiguous(),
            "deep_embed.up.weight": take("s2").T.contiguous(),
            "deep_embed.up.bias": take("s0").flatten(),
        }
    return tensors


def _options(kind: str, ours: Mapping[str, Tensor]) -> dict[str, Any]:
    """The options of the mixers that shapes tell."""
    if kind == "4":
        return {}

    def mixer(name: str, layer: int = 0) -> torch.Size:
        return ours[f"blocks.{layer}.mixer.{name}"].shape

    if kind[0] == "5":
        return {"num_heads": mixer("time_bonus")[0], "version": kind}
    if kind == "6":
        return {
            "num_heads": mixer("time_bonus")[0],
            "mix_rank": mixer("shift_up")[1],
            "decay_rank": mixer("decay.down.weight")[0],
        }
    ranks = {f"{name}_rank": mixer(f"{name}.down.weight")[0] for name in ("decay", "rate", "gate")}
    if "blocks.1.mixer.residual.bias" in ours:
        ranks["value_rank"] = mixer("residual.down.weight", 1)[0]
    return {"num_heads": mixer("r_k")[0], **ranks}
