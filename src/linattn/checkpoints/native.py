"""The library's own checkpoint: a folder of ``config.json``, ``model.safetensors`` and perhaps ``tokenizer.json``.

``config.json`` is ``{"format": "linattn", "version": 1, "model": {...}, "tokenizer": ...}``, the last one ``"bytes"``,
``"tokenizer.json"`` or null.
A tensor that the model uses twice (a tied head) is stored once. A training run adds its own two files and keeps its
checkpoints in folders ``step-00000100`` of one run folder. Nothing is pickled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from linattn.checkpoints.files import previous, read_json, read_tensors, replacing, write_json, write_tensors
from linattn.checkpoints.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from linattn.models import LanguageModel, ModelConfig

CONFIG, MODEL, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
FORMAT, VERSION = "linattn", 1
_STEP = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.old")


def save(folder: str | Path, model: LanguageModel, *, tokenizer: Tokenizer | None = None) -> None:
    """Write a checkpoint; an existing one is replaced, and at every instant one of the two is complete.

    Raises:
        ValueError: ``folder`` is a file or holds something else than a checkpoint; the disk refuses.
    """
    target = _real(folder)
    if target.exists() and not target.is_dir():
        raise ValueError(f"{folder}: is a file, wanted a folder for the checkpoint")
    foreign = sorted({file.name for file in target.iterdir()} - {CONFIG, MODEL, TOKENIZER}) if target.exists() else []
    if foreign:
        raise ValueError(f"{folder}: holds {_some(foreign)}, which belongs to no checkpoint; choose another folder")
    with replacing(target) as staging:
        write_model(staging, model, tokenizer)


def load(path: str | Path, *, device: str | torch.device = "cpu") -> LanguageModel:
    """Read the model of a checkpoint folder, or of the newest checkpoint of a run folder.

    The weights keep the dtype in which they were saved; the global random state is left alone.

    Raises:
        ValueError: nothing there, a file missing or truncated, another format, or weights that are not those of the
            config: the message lists what is missing, left over and of another shape.
    """
    return read_model(find(path), torch.device(device))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint. Raises ValueError as ``load`` does, and if the checkpoint has none."""
    folder = find(path)
    name = _read_config(folder).get("tokenizer")
    if name == "bytes":
        return ByteTokenizer()
    if name == TOKENIZER:
        return HuggingFaceTokenizer(folder / TOKENIZER)
    raise ValueError(f"{folder / CONFIG}: tokenizer: got {name!r}, wanted 'bytes' or {TOKENIZER!r}")


def find(path: str | Path) -> Path:
    """The checkpoint folder that a path means: itself, or the newest ``step-...`` in it."""
    folder = _real(path)
    if not folder.exists() and previous(folder).is_dir():
        return previous(folder)  # the writer was killed between its two renames
    if not folder.is_dir():
        raise ValueError(f"{path}: {'is a file' if folder.exists() else 'does not exist'}, wanted a checkpoint folder")
    if (folder / CONFIG).exists():
        return folder
    found = steps(folder)
    if not found:
        raise ValueError(f"{path}: holds neither {CONFIG} nor a folder step-..., wanted a checkpoint or a run folder")
    return found[max(found)]


def steps(run: Path) -> dict[int, Path]:
    """The checkpoints of a run folder by step."""
    if not run.is_dir():
        return {}
    # Sorted, so that a folder overrides the previous one of its name, which counts only where it stands alone.
    found = {folder: _STEP.fullmatch(folder.name) for folder in sorted(run.iterdir())}
    return {int(match[1] or match[2]): folder for folder, match in found.items() if match}


def step_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / f"step-{step:08d}"


def write_model(folder: Path, model: LanguageModel, tokenizer: Tokenizer | None) -> None:
    """Write the files of a checkpoint into an empty folder."""
    name = None
    if isinstance(tokenizer, ByteTokenizer):
        name = "bytes"
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        name = TOKENIZER
        (folder / TOKENIZER).write_text(tokenizer.json, encoding="utf-8")
    config = {"format": FORMAT, "version": VERSION, "model": model.config.to_dict(), "tokenizer": name}
    write_json(folder / CONFIG, config)
    write_tensors(folder / MODEL, distinct_tensors(model))


def read_model(folder: Path, device: torch.device) -> LanguageModel:
    """Read the model from the files of a checkpoint."""
    description = _read_config(folder).get("model")
    if not isinstance(description, dict):
        raise ValueError(f"{folder / CONFIG}: model: got {description!r}, wanted an object")
    tensors = read_tensors(folder / MODEL)
    try:
        with torch.random.fork_rng(devices=[]):
            model = LanguageModel(ModelConfig.from_dict(description)).to(device)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: model: {error}") from error
    fill(model, tensors, folder / MODEL)
    return model


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each once though the model may use it under several names."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (name, tensor))
    return dict(tensors.values())


def fill(model: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Put tensors in the place of a model's own, all or none. Raises ValueError listing every disagreement."""
    own = distinct_tensors(model)
    shapes = [
        f"{name} {list(tensors[name].shape)} instead of {list(own[name].shape)}"
        for name in own.keys() & tensors.keys()
        if tensors[name].shape != own[name].shape
    ]
    complaints = [
        f"{what} {_some(sorted(names))}"
        for what, names in (
            ("missing", own.keys() - tensors.keys()),
            ("left over", tensors.keys() - own.keys()),
            ("other shapes:", shapes),
        )
        if names
    ]
    if complaints:
        raise ValueError(f"{source}: not the weights of the config beside it: {'; '.join(complaints)}")
    for name, tensor in own.items():
        # A copy: tensors of a file are views of its pages, and the file may be deleted or replaced.
        tensor.data = tensors[name].to(tensor.device, copy=True)


def _read_config(folder: Path) -> dict[str, object]:
    config = read_json(folder / CONFIG)
    if config.get("format") != FORMAT:
        raise ValueError(f"{folder / CONFIG}: format: got {config.get('format')!r}, wanted {FORMAT!r}")
    if config.get("version") != VERSION:
        raise ValueError(f"{folder / CONFIG}: version: got {config.get('version')!r}, wanted {VERSION}")
    unknown = sorted(config.keys() - {"format", "version", "model", "tokenizer"})
    if unknown:
        raise ValueError(f"{folder / CONFIG}: unknown {_some(unknown)}")
    return config


def _some(names: Iterable[str], limit: int = 6) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))
