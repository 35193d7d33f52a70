"""The compiled library as Python sees it: found, loaded, checked, called."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn.backends.cpu.build import HERE, NAME

PATH = HERE / NAME
LEVELS = ("plain", "avx2", "avx512")  # plain: SSE2 or NEON, whichever every machine of the kind has
VERSION = 6  # of csrc/problem.h
BLOCK = 64  # tokens between kept states, as there
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ISA = "LINATTN_CPU_ISA"
_MATRIX = struct.Struct("26Q17qd")
_ELEMENTWISE = struct.Struct("24Q7q")
_SELECTIVE = struct.Struct("19Q10q")
_TOKENS = "2Q3q"
_LAYERS = {
    "convolution": struct.Struct(f"{_TOKENS}13Q8q"),
    "norm": struct.Struct("12Q13q2d"),
    "glu": struct.Struct("4Q6q"),
    "mix": struct.Struct(f"{_TOKENS}11Q6q"),
    "softplus": struct.Struct("7Q6q"),
    "skip": struct.Struct("11Q9q"),
}
AXES = 6  # that operands of an instruction have
_INSTRUCTION = struct.Struct(f"7q{AXES}q" + 4 * f"Qq{AXES}q" + "4qd")
_PROGRAM = struct.Struct("2Q3q")


class LibraryError(Exception):
    """Why the library can't be used."""


class Library:
    """Loaded functions, for one instruction set."""

    def __init__(self, functions: ctypes.CDLL, level: int) -> None:
        self._functions, self.level = functions, level
        self.part = int(functions.linattn_part(level))
        self.lanes = int(functions.linattn_selective_lanes(level))
        self.unit = int(functions.linattn_decode_unit(level))  # numbers in a step along bfloat16 weights

    def scratch(self, problem: bytes) -> int:
        """Floats of scratch that a thread needs."""
        return int(self._functions.linattn_scratch(self.level, problem))

    def forward(self, problem: bytes) -> bool:
        """False if a gate is positive or NaN."""
        return not self._functions.linattn_forward(self.level, problem)

    def backward(self, problem: bytes) -> None:
        """Writes every gradient."""
        self._functions.linattn_backward(self.level, problem)

    def elementwise_forward(self, problem: bytes) -> bool:
        """False if a gate is positive or NaN."""
        return not self._functions.linattn_elementwise_forward(self.level, problem)

    def elementwise_backward(self, problem: bytes) -> None:
        """Writes every gradient."""
        self._functions.linattn_elementwise_backward(self.level, problem)

    def selective_scratch(self, problem: bytes) -> int:
        """Floats of scratch that a thread needs."""
        return int(self._functions.linattn_selective_scratch(self.level, problem))

    def selective_forward(self, problem: bytes) -> bool:
        """False if a step or a rate is out of range."""
        return not self._functions.linattn_selective_forward(self.level, problem)

    def selective_backward(self, problem: bytes) -> None:
        """Writes every gradient."""
        self._functions.linattn_selective_backward(self.level, problem)

    def layer(self, name: str, problem: bytes, *, backward: bool) -> None:
        """Run what a layer does beside the recurrence: convolution, norm, glu, mix, softplus, skip."""
        getattr(self._functions, f"linattn_{name}_backward" if backward else f"linattn_{name}")(self.level, problem)

    def operation(self, name: str, kind: int) -> int:
        """The number of an elementwise operation on that kind of numbers, or -1."""
        return int(self._functions.linattn_decode_operation(self.level, name.encode(), kind))

    def decode(self, problem: bytes) -> int:
        """Walks a tape. The place of the instruction that failed, or -1."""
        return int(self._functions.linattn_decode_run(self.level, problem))


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
    decode = [f"decode_{name}" for name in ("run", "operation", "unit")]
    layers = [name for layer in _LAYERS for name in (layer, f"{layer}_backward")]
    every = (*selective, *decode, *layers, "elementwise_forward", "elementwise_backward")
    for name in ("best_level", "part", "scratch", "forward", "backward", *every):
        function: Any = getattr(functions, f"linattn_{name}")
        function.restype = None if name.endswith("backward") or name in layers else ctypes.c_int64
        arity = {"best_level": 0, "part": 1, "selective_lanes": 1, "decode_unit": 1, "decode_operation": 3}.get(name, 2)
        function.argtypes = [ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64][:arity]
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


def elementwise_problem(pointers: list[int], sizes: list[int]) -> bytes:
    """csrc/problem.h's Elementwise."""
    return _ELEMENTWISE.pack(*pointers, *sizes)


def selective_problem(pointers: list[int], sizes: list[int]) -> bytes:
    """csrc/problem.h's Selective."""
    return _SELECTIVE.pack(*pointers, *sizes)


def instruction(
    head: list[int],
    sizes: Sequence[int],
    operands: Sequence[tuple[int, int, Sequence[int]]],
    picked: Sequence[int],
    number: float,
) -> bytes:
    """csrc/problem.h's Instruction; operands are (address, bytes of an element, strides in bytes)."""
    fields = [*head, *sizes, *[0] * (AXES - len(sizes))]
    for at, item, strides in operands:
        fields += [at, item, *strides, *[0] * (AXES - len(strides))]
    fields += [0] * ((2 + AXES) * (4 - len(operands)))
    return _INSTRUCTION.pack(*fields, *picked, number)


def program_problem(pointers: list[int], sizes: list[int]) -> bytes:
    """csrc/problem.h's Program."""
    return _PROGRAM.pack(*pointers, *sizes)


def layer_problem(name: str, values: list[int | float]) -> bytes:
    """csrc/problem.h's Convolution, Norm, Glu, Mix, Softplus or Skip."""
    return _LAYERS[name].pack(*values)
