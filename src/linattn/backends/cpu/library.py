"""The compiled library as Python sees it: found, loaded, checked, called."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn.backends.cpu.build import HERE, NAME

PATH = HERE / NAME
LEVELS = ("plain", "avx2", "avx512")  # plain: SSE2 or NEON, whichever every machine of the kind has
VERSION = 2  # of csrc/problem.h
BLOCK = 64  # tokens between kept states, as there
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ISA = "LINATTN_CPU_ISA"
_MATRIX = struct.Struct("26Q17qd")
_SCAN = struct.Struct("4Q4q")
_SELECTIVE = struct.Struct("19Q10q")


class LibraryError(Exception):
    """Why the library can't be used."""


class Library:
    """Loaded functions, for one instruction set."""

    def __init__(self, functions: ctypes.CDLL, level: int) -> None:
        self._functions, self.level = functions, level
        self.part = int(functions.linattn_part(level))
        self.lanes = int(functions.linattn_selective_lanes(level))

    def scratch(self, problem: bytes) -> int:
        """Floats of scratch that a thread needs."""
        return int(self._functions.linattn_scratch(self.level, problem))

    def forward(self, problem: bytes) -> bool:
        """False if a gate is positive or NaN."""
        return not self._functions.linattn_forward(self.level, problem)

    def backward(self, problem: bytes) -> None:
        """Writes every gradient."""
        self._functions.linattn_backward(self.level, problem)

    def scan(self, problem: bytes) -> None:
        """Writes every state."""
        self._functions.linattn_scan(self.level, problem)

    def selective_scratch(self, problem: bytes) -> int:
        """Floats of scratch that a thread needs."""
        return int(self._functions.linattn_selective_scratch(self.level, problem))

    def selective_forward(self, problem: bytes) -> bool:
        """False if a step or a rate is out of range."""
        return not self._functions.linattn_selective_forward(self.level, problem)

    def selective_backward(self, problem: bytes) -> None:
        """Writes every gradient."""
        self._functions.linattn_selective_backward(self.level, problem)


@functools.cache
def _open(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise LibraryError(
            "its library was not built: install linattn from source where a C++ compiler is, "
            "or run python -m linattn.backends.cpu.build"
        )
    try:
        functions = ctypes.CDLL(str(path))
        functions.linattn_version.restype = ctypes.c_int64
        version = functions.linattn_version()
    except (OSError, AttributeError) as error:
        raise LibraryError(f"its library does not load: {error}") from error
    if version != VERSION:
        raise LibraryError(f"its library {path} has version {version}, wanted {VERSION}: build it anew")
    selective = [f"selective_{name}" for name in ("lanes", "scratch", "forward", "backward")]
    for name in ("best_level", "part", "scratch", "forward", "backward", "scan", *selective):
        function: Any = getattr(functions, f"linattn_{name}")
        function.restype = None if name.endswith(("backward", "scan")) else ctypes.c_int64
        arity = {"best_level": 0, "part": 1, "selective_lanes": 1}.get(name, 2)
        function.argtypes = [ctypes.c_int64, ctypes.c_char_p][:arity]
    return functions


@functools.cache
def _at_level(path: Path, wanted: str) -> Library:
    functions = _open(path)
    best = int(functions.linattn_best_level())
    if not wanted:
        return Library(functions, best)
    if wanted not in LEVELS[: best + 1]:
        raise LibraryError(f"{_ISA} is {wanted!r}, this machine runs {', '.join(LEVELS[: best + 1])}")
    return Library(functions, LEVELS.index(wanted))


def loaded() -> Library:
    """The library, at the best level of this machine or at the one that LINATTN_CPU_ISA names.

    Raises LibraryError where it was not built, does not load, or the machine doesn't run that level.
    """
    return _at_level(PATH, os.environ.get(_ISA, ""))


def address(x: Tensor | None) -> int:
    """Where a tensor's numbers lie; 0 for none."""
    return 0 if x is None else x.data_ptr()


def matrix_problem(pointers: list[int], sizes: list[int], scale: float) -> bytes:
    """csrc/problem.h's Matrix."""
    return _MATRIX.pack(*pointers, *sizes, scale)


def scan_problem(pointers: list[int], sizes: list[int]) -> bytes:
    """csrc/problem.h's Scan."""
    return _SCAN.pack(*pointers, *sizes)


def selective_problem(pointers: list[int], sizes: list[int]) -> bytes:
    """csrc/problem.h's Selective."""
    return _SELECTIVE.pack(*pointers, *sizes)
