"""``load`` and ``save``: models in this library's format and in others', recognised by their config or tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn import _checks
from linattn.checkpoints import fla, mamba_ssm, native, rwkv, transformers_mamba, transformers_rwkv
from linattn.checkpoints.assemble import assemble
from linattn.checkpoints.files import (
    read_json,
    read_pickle,
    read_tensors,
    read_weights,
    write_json,
    write_pickle,
    write_tensors,
)
from linattn.checkpoints.layout import Config, Layout
from linattn.checkpoints.rwkv_official import to_official
from linattn.checkpoints.tokenizer import HuggingFaceTokenizer, RwkvTokenizer, Tokenizer
from linattn.models import LanguageModel, ModelConfig

TRANSFORMERS = {**transformers_mamba.LAYOUTS, "rwkv": transformers_rwkv.RWKV}
BY_MODEL_TYPE = TRANSFORMERS | fla.LAYOUTS
# In the order in which they are tried.
WRITTEN: dict[str, tuple[Layout, ...]] = {
    "transformers": tuple(TRANSFORMERS.values()),
    "mamba_ssm": tuple(mamba_ssm.BY_LAYER.values()),
    "fla": tuple(fla.LAYOUTS.values()),
}
PILE = "20B_tokenizer.json"  # as the Pile's tokenizer is called beside RWKV's files


def load(path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> LanguageModel:
    """Read a model.

    Args:
        path: A checkpoint folder of this library, or a run folder (its newest checkpoint); a folder with the
            ``config.json`` and weights of transformers (mamba, mamba2, falcon_mamba, rwkv), mamba_ssm (Mamba, Mamba-2)
            or flash-linear-attention (gla, retnet, delta_net, gated_deltanet, hgrn2, rwkv6, rwkv7, linear_attn); or a
            file of RWKV-LM, version 4 to 7a.
        dtype: Of the weights; None keeps what is stored.
        device: Where the model is to be.

    The global random state is left alone.

    Raises:
        ValueError: nothing there, a file missing, truncated or of a kind that isn't known, a config that says what
            this library has no equal of, or tensors that are not those of the config: the message lists what is
            missing, left over and of another shape. Nothing is half loaded.
    """
    device = torch.device(device)
    file = Path(os.path.realpath(path))
    if file.is_file():
        return assemble(*_rwkv(file), file, device=device, dtype=dtype)
    folder = native.find(path)
    config = read_json(folder / native.CONFIG)
    if "format" in config:
        return native.read_model(folder, device, dtype)
    try:
        layout = _layout(config)
        ours = layout.from_theirs(config, read_weights(folder))
    except (TypeError, KeyError, ValueError, RuntimeError) as error:
        raise ValueError(f"{folder}: {error}") from error
    return assemble(*ours, folder, device=device, dtype=dtype)


def save(
    folder: str | Path, model: LanguageModel, *, tokenizer: Tokenizer | None = None, layout: str = "linattn"
) -> None:
    """Write a checkpoint; an existing one is replaced, and at every instant one of the two is complete.

    Args:
        folder: Where to; new, empty, or a checkpoint. With layout "rwkv" a file, such as ``model.pth``.
        model: The model; ``layout`` other than "linattn" takes the patterns of one mechanism which that library has.
        tokenizer: Kept with it; other libraries read a ``tokenizer.json`` alone, and "rwkv" keeps none.
        layout: "linattn", or "transformers", "mamba_ssm", "fla", "rwkv" for that library's config and tensor names.

    Raises:
        ValueError: ``folder`` is a file or holds something else than a checkpoint; the disk refuses; the layout has no
            equal of this model or tokenizer.
    """
    _checks.one_of("layout", layout, ("linattn", "rwkv", *WRITTEN))
    if layout == "linattn":
        with native.renewed(folder) as staging:
            native.write_model(staging, model, tokenizer)
        return
    if layout == "rwkv":
        official = to_official(model)
        with native.renewed_file(folder) as staging:
            write_pickle(staging, official)
        return
    if tokenizer is not None and not isinstance(tokenizer, HuggingFaceTokenizer):
        raise _checks.fail("tokenizer", type(tokenizer).__name__, f"a HuggingFaceTokenizer, with layout={layout!r}")
    config, tensors = _translated(model, layout)
    with native.renewed(folder) as staging:
        write_json(staging / native.CONFIG, config)
        if tokenizer is not None:
            (staging / native.TOKENIZER).write_text(tokenizer.json, encoding="utf-8")
        if layout == "mamba_ssm":
            write_pickle(staging / native.PICKLE, tensors)
        else:
            write_tensors(staging / native.MODEL, tensors)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint: what the checkpoint names, a ``tokenizer.json`` in it, or RWKV's World vocabulary.

    Raises:
        ValueError: as :func:`load` does, and if the checkpoint has no tokenizer.
        ModuleNotFoundError: the package that reads it is not installed.
    """
    file = Path(os.path.realpath(path))
    if file.is_file():
        folder = file.parent
        vocabulary: object = _rwkv(file, "meta")[0].vocab_size
    else:
        folder = native.find(path)
        config = read_json(folder / native.CONFIG)
        if "format" in config:
            return native.load_tokenizer(folder)
        vocabulary = config.get("vocab_size") if str(config.get("model_type")).startswith("rwkv") else None
    if vocabulary == RwkvTokenizer.vocab_size:
        return RwkvTokenizer()
    for name in (native.TOKENIZER, PILE):
        if (folder / name).exists():
            return HuggingFaceTokenizer(folder / name)
    raise ValueError(f"{path}: has no {native.TOKENIZER}; name a tokenizer yourself (linattn generate --tokenizer)")


def _rwkv(file: Path, device: str = "cpu") -> tuple[ModelConfig, dict[str, Tensor]]:
    tensors = read_tensors(file) if file.suffix == ".safetensors" else read_pickle(file, device)
    try:
        return rwkv.convert(tensors)
    except (KeyError, ValueError, RuntimeError, IndexError) as error:
        raise ValueError(f"{file}: {error}") from error


def _translated(model: LanguageModel, layout: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    mechanisms = sorted({known.mechanism for known in WRITTEN[layout]})
    reason = _checks.fail("layout", f"{layout!r} for {model.config.pattern!r}", f"a model of {', '.join(mechanisms)}")
    for known in WRITTEN[layout]:
        if {known.mechanism} == set(model.config.layers):
            try:
                return known.to_theirs(model)
            except ValueError as error:
                reason = error
    raise reason


def _layout(config: Config) -> Layout:
    kind = config.get("model_type")
    if kind is None and "d_model" in config and "n_layer" in config:
        return mamba_ssm.layout(config)
    if not isinstance(kind, str) or kind not in BY_MODEL_TYPE:
        wanted = f"format={native.FORMAT!r}, or a model_type of {', '.join(BY_MODEL_TYPE)}"
        raise _checks.fail(native.CONFIG, f"model_type={kind!r} and no format", wanted)
    return BY_MODEL_TYPE[kind]
