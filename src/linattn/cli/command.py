"""What every verb has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch

from linattn.cli.output import Output

INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """A verb: its fields are its options."""

    json: bool = False
    """Print JSON for machines and nothing else."""
    threads: int | None = None
    """CPU threads to use; by default torch's own choice."""

    @abstractmethod
    def run(self, output: Output) -> int:
        """Do it; the exit code."""


def present(device: str) -> torch.device:
    """A device of this machine. Raises ValueError if torch does not find it."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: got {device!r}, wanted a device that torch finds here ({reason})") from error


def new_folder(wanted: Path | None, default: Path) -> Path:
    """A folder to fill: ``wanted``, which must be new or empty, or ``default`` with the first number that is free.

    Raises ValueError if ``wanted`` holds something: nothing is ever overwritten.
    """
    if wanted is not None:
        if wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
            raise ValueError(
                f"out {wanted}: already exists; choose another folder (a training goes on with: "
                f"linattn train --resume {wanted})"
            )
        return wanted
    folder, number = default, 1
    while folder.exists():
        number += 1
        folder = default.with_name(f"{default.name}-{number}")
    return folder
