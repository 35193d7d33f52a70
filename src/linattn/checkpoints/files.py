"""Folders of JSON and safetensors files that are complete at every instant, whatever happens to the process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def previous(folder: Path) -> Path:
    """Where ``replacing`` keeps the old folder during the instant between its two renames."""
    return folder.with_name(f".{folder.name}.old")


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; once filled it takes the place of ``folder``.

    The new files are written beside, flushed to the disk and renamed. A process killed at any point leaves the old
    folder or the new one, whole: at ``folder`` or, in the instant between the two renames, at ``previous(folder)``.
    An error leaves the old folder in place. A failing disk (full, read-only, ...) raises ValueError.
    """
    staging, old = folder.with_name(f".{folder.name}.new"), previous(folder)
    try:
        if old.exists() and not folder.exists():
            old.rename(folder)
        if staging.exists():
            shutil.rmtree(staging)
        staging.mkdir(parents=True)
        yield staging
        for file in staging.iterdir():
            flush(file)
        flush(staging)
        if old.exists():
            shutil.rmtree(old)
        if folder.exists():
            folder.rename(old)
        staging.rename(folder)
        flush(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        if old.exists() and not folder.exists():
            old.rename(folder)
        reason = f"cannot write the checkpoint: {error.strerror or error}"
        raise ValueError(f"{folder}: {reason}; what was there before is untouched") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows has no descriptor of a folder
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_json(file: Path) -> dict[str, Any]:
    """Read one JSON object. Raises ValueError naming the file if it is missing, truncated or something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: got a JSON {type(value).__name__}, wanted an object")
    return value


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors as safetensors. Raises OSError if the disk refuses."""
    file.touch()
    mode = file.stat().st_mode  # as the user's umask has it; save_file makes its file private
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    file.chmod(mode)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read named tensors, views of the file. Raises ValueError naming the file if it is missing or truncated."""
    try:
        with safe_open(file, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
