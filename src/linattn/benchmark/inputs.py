"""Inputs of any registered mechanism, drawn from the table of its arguments."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from linattn import testing
from linattn.recurrence import Domain
from linattn.registry import Mechanism


def draw(
    mechanism: Mechanism,
    sizes: Mapping[str, int],
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random tensors for every required argument of ``mechanism.function``, by name, with ordinary gates.

    ``sizes`` gives each axis of :class:`linattn.recurrence.Argument` a size. Gates, steps and betas are float32
    (float64 for float64), as layers hand them over; the rest has ``dtype``. Equal seeds draw equal numbers.
    """
    random = torch.Generator().manual_seed(seed)
    drawn = {}
    for argument in mechanism.arguments:
        if not argument.optional:
            plain = argument.domain in (Domain.REAL, Domain.UNIT)
            wanted = dtype if plain else torch.promote_types(dtype, torch.float32)
            drawn[argument.name] = testing.draw(argument, sizes, "ordinary", random).to(device, wanted)
    return drawn


def cut(mechanism: Mechanism, inputs: Mapping[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """The first ``tokens`` tokens of drawn inputs."""
    axes = {argument.name: argument.dims.split() for argument in mechanism.arguments}
    return {
        name: value.narrow(axes[name].index("T"), 0, tokens) if "T" in axes[name] else value
        for name, value in inputs.items()
    }
