"""When a layer's compiled kernels take the place of its torch code, which stays their definition."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from linattn import engine
from linattn.backends.cpu import fused


def serves(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether :mod:`linattn.backends.cpu.fused` reads these, and LINATTN_BACKEND doesn't name another backend.

    Outside of torch.compile, shapes without data and the transforms of torch.func take the torch code.
    """
    return (
        fused.serves(x, *weights)
        and engine.PREFERRED in ("auto", "cpu")
        and engine.BACKENDS["cpu"].unavailable(x.device) is None
        and (
            torch.compiler.is_compiling()
            or not (isinstance(x, FakeTensor) or torch._C._are_functorch_transforms_active())
        )
    )
