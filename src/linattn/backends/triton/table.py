"""Launch settings: written down, never searched for when a user calls. `make tune` measures and prints them anew."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Settings(NamedTuple):
    """How a sweep is launched: channels of z a program, at most; tokens a chunk, warps, pipeline stages.

    deep: the stages where there are no more programs than processors, so that none needs room beside another.
    """

    block: int
    chunk: int
    warps: int
    stages: int
    deep: int


# Compute capabilities that the settings were measured and every kernel was checked on.
MEASURED = ((9, 0),)

WALKED = 8  # tokens of a row that is walked one by one, at most

# (kind of decay, size of x up to) -> settings, NVIDIA H200. Kinds: none, scalar, inner (the gate's channels are those
# of x and y), outer (those of z), divided and divided outer (the same, divided out before); summed and summed outer,
# where a sum normaliser divides; states, of any of these but inner and outer, where nothing else is wanted. bfloat16
# multiplies as it is, float16 as tf32, for its range, float32 in three tf32s.
DIVIDED = 8  # added to a decay's number in the kernels where it is divided out before
_KINDS = ("none", "scalar", "inner", "outer", "divided", "divided outer", "summed", "summed outer", "states")
_HALF = {
    **{(kind, 64): Settings(64, 64, 4, 3, 3) for kind in _KINDS},
    **{(kind, 128): Settings(64, 64, 4, 2, 3) for kind in _KINDS},
    **{(kind, 256): Settings(64, 64, 8, 1, 1) for kind in _KINDS},
    # two blocks of z in one where x is so small, as in Mamba-2, which `make tune`, whose heads are square, has not
    **{(kind, 64): Settings(128, 64, 4, 3, 3) for kind in ("none", "scalar")},
    **{(kind, size): Settings(64, 64, 4, 1, 1) for kind in ("inner", "outer") for size in (64, 128)},
    **{(kind, size): Settings(64, 64, 4, 2, 2) for kind in ("summed", "summed outer") for size in (64, 128)},
    **{(kind, 256): Settings(64, 64, 8, 2, 2) for kind in ("summed", "summed outer")},
    **{("states", size): Settings(128, 64, 8, 3, 3) for size in (64, 128)},
}
_FULL = {(kind, size): Settings(64, 64, 8, 1, 1) for kind in _KINDS for size in (64, 128)}
TABLE: dict[torch.dtype, dict[tuple[str, int], Settings]] = {
    torch.bfloat16: _HALF,
    torch.float16: dict(_FULL),
    torch.float32: dict(_FULL),
}


def kind(decay: int, outer: bool, summed: bool = False, states: bool = False) -> str:
    """The table's name for a decay (its number in the kernels)."""
    if states and decay not in (2, 4):
        return "states"
    if summed:
        return "summed outer" if outer else "summed"
    if decay in (2, 4):
        return "outer" if outer else "inner"
    if decay >= DIVIDED:
        return "divided outer" if outer else "divided"
    return "scalar" if decay else "none"


def settings(dtype: torch.dtype, decay: int, outer: bool, size: int, summed: bool, states: bool) -> Settings:
    """Settings of a sweep whose x has ``size`` channels."""
    return TABLE[dtype][kind(decay, outer, summed, states), 64 if size <= 64 else 128 if size <= 128 else 256]
