"""The launches that a call of the Triton backend makes, one by one: to time them, or to compile them without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.backends._protocol import MatrixInputs
from linattn.recurrence import Decay, Read, Write


class Launch(NamedTuple):
    """What :func:`linattn.backends.triton.launch._launch` is given."""

    kernel: Any
    programs: int
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[float, ...]
    constants: tuple[Any, ...]
    warps: int
    stages: int

    @property
    def named(self) -> dict[str, Any]:
        """All arguments by their names in the kernel."""
        return dict(zip(self.kernel.arg_names, (*self.tensors, *self.numbers, *self.constants), strict=True))

    @property
    def key(self) -> tuple[Any, ...]:
        """What it is compiled for."""
        dtypes = tuple(None if t is None else t.dtype for t in self.tensors)
        return (self.kernel.__name__, dtypes, self.constants, self.warps, self.stages)


@contextmanager
def recorded(*, run: bool) -> Iterator[list[Launch]]:
    """Launches made meanwhile, which are made indeed only with ``run``: without it tensors may be on device "meta"."""
    from linattn.backends.triton import launch

    original = launch._launch
    found: list[Launch] = []

    def record(*args: Any) -> None:
        found.append(Launch(*args))
        if run:
            original(*args)

    launch._launch = record  # type: ignore[assignment]
    try:
        yield found
    finally:
        launch._launch = original


def draw(
    decay: Decay,
    dtype: torch.dtype,
    sizes: dict[str, int],
    *,
    device: str,
    read: Read = Read.AFTER,
    bonus: bool = False,
    strength: float = 1 / 16,
) -> tuple[MatrixInputs, Tensor, Tensor]:
    """Random inputs with sizes B, T, H, K, V, and gradients of the output and the final state.

    ``strength``: how many times log σ(x) the gates are. Gates of channels have the inputs' dtype, others float32.
    """

    def normal(dims: str, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn([sizes[axis] for axis in dims.split()], device=device, dtype=dtype)

    g = None
    if decay is not Decay.NONE:
        g = torch.nn.functional.logsigmoid(normal(decay.value, torch.float32)) * strength
        g = g.to(dtype) if decay is Decay.TOKEN_CHANNEL else g
    u = normal("H K", torch.float32) if bonus else None
    state, dS = normal("B H K V", torch.float32), normal("B H K V", torch.float32)
    qkv = (normal("B T H K"), normal("B T H K"), normal("B T H V"))
    scale = sizes["K"] ** -0.5
    return MatrixInputs(*qkv, g, None, None, None, u, state, None, scale, Write.ADDITIVE, read), normal("B T H V"), dS
