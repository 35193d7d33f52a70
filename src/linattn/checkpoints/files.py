"""Files of JSON and tensors, and folders of them that are whole at every instant, whatever becomes of the process."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
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
        value = json.loads(file.read_text(encoding="utf-8"), object_hook=_number)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: got a JSON {type(value).__name__}, wanted an object")
    return value


def _number(value: dict[str, Any]) -> Any:
    """transformers writes infinity, which JSON has not, as an object of its own."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


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


def read_pickle(file: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Read the named tensors that ``torch.save`` wrote; nothing but tensors is unpickled (``weights_only``).

    ``device="meta"`` reads shapes alone. Raises ValueError naming the file if it is missing, truncated, not torch's, or
    holds something else than tensors by name.
    """
    try:
        value = torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = "it holds more than tensors, which could run a program, or is no file of torch"
        raise ValueError(f"{file}: cannot be read: {reason}") from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or "it is truncated"
        raise ValueError(f"{file}: cannot be read: {reason}") from error
    if not isinstance(value, Mapping) or not value or not all(isinstance(t, Tensor) for t in value.values()):
        raise ValueError(f"{file}: got a {type(value).__name__}, wanted tensors by name")
    return {str(name): tensor for name, tensor in value.items()}


def write_pickle(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors as ``torch.save`` does, each with no more memory than its own. Raises OSError."""
    try:
        torch.save({name: tensor.detach().clone() for name, tensor in tensors.items()}, file)
    except RuntimeError as error:
        raise OSError(str(error)) from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder as Hugging Face lays it out: safetensors or torch's own files, whole or in shards.

    Raises ValueError if there are none, a file is missing or damaged, or a file lacks what the index promises.
    """
    for name, read in (("model.safetensors", read_tensors), ("pytorch_model.bin", read_pickle)):
        index = folder / f"{name}.index.json"
        if (folder / name).exists():
            return read(folder / name)
        if index.exists():
            return _read_shards(index, read)
    raise ValueError(
        f"{folder}: holds no weights, wanted model.safetensors or pytorch_model.bin, or an index of shards"
    )


def _read_shards(index: Path, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise ValueError(f"{index}: weight_map: got {type(places).__name__}, wanted the file of each tensor")
    tensors: dict[str, Tensor] = {}
    for place in sorted(set(places.values())):
        if Path(place).name != place:
            raise ValueError(f"{index}: weight_map: got {place!r}, wanted the name of a file in this folder")
        shard = read(index.parent / place)
        promised = {name for name, where in places.items() if where == place}
        if absent := promised - shard.keys():
            raise ValueError(f"{index.parent / place}: lacks {some(sorted(absent))}, which {index.name} places there")
        tensors |= {name: shard[name] for name in promised}
    return tensors


def some(names: Iterable[str], limit: int = 6) -> str:
    """The first of many names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
