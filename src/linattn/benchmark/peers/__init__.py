"""Adapters to other libraries that do the same work, a small file each. What isn't installed is left out.

A language model, ours or a peer's, is a :data:`Reader`: ids [B, T] -> logits [B, V] after the last token, and a
:data:`Stepper` that goes on from there: ids [B] -> logits [B, V]. A peer that keeps one state only goes on from what it
read last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from linattn.models import LanguageModel

Stepper = Callable[[Tensor], Tensor]
Reader = Callable[[Tensor], tuple[Tensor, Stepper]]


class Peer(Protocol):
    """A module here, of a library that runs language models."""

    PRECISIONS: Mapping[str, Any]
    """fp32, bf16, int8: those of the weights that it has, and its own words for them."""

    def reader(self, model: LanguageModel, folder: Path, precision: str) -> Reader:
        """Our model in the library, by way of a file in ``folder`` that stays there.

        Raises ModuleNotFoundError where the library is not installed.
        """
        ...


PACKAGES = ("transformers", "rwkv", "llama-cpp-python", "gguf", "pytorch-fast-transformers")


def versions() -> dict[str, str | None]:
    """Of the packages that peers come from; None is not installed."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
