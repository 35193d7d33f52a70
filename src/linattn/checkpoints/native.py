"""The library's own checkpoint: a folder of ``config.json``, ``model.safetensors`` and perhaps ``tokenizer.json``.

``config.json`` is ``{"format": "linattn", "version": 1, "model": {...}, "tokenizer": ...}``, the last one ``"bytes"``,
``"rwkv"``, ``"tokenizer.json"`` or null.
A tensor that the model uses twice (a tied head) is stored once. A training run adds its own two files and keeps its
checkpoints in folders ``step-00000100`` of one run folder. Nothing is pickled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from linattn.checkpoints.assemble import assemble, distinct_tensors
from linattn.checkpoints.files import (
    flush,
    previous,
    read_json,
    read_tensors,
    replacing,
    some,
    write_json,
    write_tensors,
)
from linattn.checkpoints.tokenizer import NAMED_TOKENIZERS, HuggingFaceTokenizer, Tokenizer
from linattn.models import LanguageModel, ModelConfig

CONFIG, MODEL, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
PICKLE = "pytorch_model.bin"  # what mamba_ssm reads
FORMAT, VERSION = "linattn", 1
_STEP = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.old")


@contextmanager
def renewed(folder: str | Path) -> Iterator[Path]:
    """Yield an empty folder to fill with a checkpoint; an existing one is replaced, and at every instant one of the two
    is complete. Raises ValueError if ``folder`` is a file or holds something else; or if the disk refuses.
    """
    target = _real(folder)
    if target.exists() and not target.is_dir():
        raise ValueError(f"{folder}: is a file, wanted a folder for the checkpoint")
    known = {CONFIG, MODEL, PICKLE, TOKENIZER}
    foreign = sorted({file.name for file in target.iterdir()} - known) if target.exists() else []
    if foreign:
        raise ValueError(f"{folder}: holds {some(foreign)}, which belongs to no checkpoint; choose another folder")
    with replacing(target) as staging:
        yield staging


@contextmanager
def renewed_file(path: str | Path) -> Iterator[Path]:
    """Yield a file to write, which then takes the place of ``path``: whole at every instant, as a checkpoint is.

    Raises ValueError if ``path`` is a folder or the disk refuses.
    """
    target = _real(path)
    if target.is_dir():
        raise ValueError(f"{path}: is a folder, wanted a file")
    staging = target.with_name(f".{target.name}.new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield staging
        flush(staging)
        staging.replace(target)
        flush(target.parent)
    except OSError as error:
        reason = f"cannot write the checkpoint: {error.strerror or error}"
        raise ValueError(f"{path}: {reason}; what was there before is untouched") from error
    finally:
        staging.unlink(missing_ok=True)


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
    name = next((name for name, kind in NAMED_TOKENIZERS.items() if isinstance(tokenizer, kind)), None)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        name = TOKENIZER
        (folder / TOKENIZER).write_text(tokenizer.json, encoding="utf-8")
    config = {"format": FORMAT, "version": VERSION, "model": model.config.to_dict(), "tokenizer": name}
    write_json(folder / CONFIG, config)
    write_tensors(folder / MODEL, distinct_tensors(model))


def read_model(folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> LanguageModel:
    """Read the model from the files of a checkpoint; the global random state is left alone."""
    description = read_config(folder).get("model")
    if not isinstance(description, dict):
        raise ValueError(f"{folder / CONFIG}: model: got {description!r}, wanted an object")
    tensors = read_tensors(folder / MODEL)
    try:
        config = ModelConfig.from_dict(description)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: model: {error}") from error
    return assemble(config, tensors, folder / MODEL, device=device, dtype=dtype)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint. Raises ValueError if it has none."""
    name = read_config(folder).get("tokenizer")
    if name == TOKENIZER:
        return HuggingFaceTokenizer(folder / TOKENIZER)
    if name in NAMED_TOKENIZERS:
        return NAMED_TOKENIZERS[name]()
    wanted = ", ".join(map(repr, (*NAMED_TOKENIZERS, TOKENIZER)))
    raise ValueError(f"{folder / CONFIG}: tokenizer: got {name!r}, wanted one of {wanted}")


def read_config(folder: Path) -> dict[str, object]:
    config = read_json(folder / CONFIG)
    if config.get("format") != FORMAT:
        raise ValueError(f"{folder / CONFIG}: format: got {config.get('format')!r}, wanted {FORMAT!r}")
    if config.get("version") != VERSION:
        raise ValueError(f"{folder / CONFIG}: version: got {config.get('version')!r}, wanted {VERSION}")
    unknown = sorted(config.keys() - {"format", "version", "model", "tokenizer"})
    if unknown:
        raise ValueError(f"{folder / CONFIG}: unknown {some(unknown)}")
    return config


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))
