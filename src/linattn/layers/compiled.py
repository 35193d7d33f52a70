"""When a layer's compiled kernels take the place of its torch code, which stays their definition."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from linattn import engine
from linattn.backends import _fused as fused


def serves(op: str, x: Tensor, *weights: Tensor | None, **where: Tensor | bool | None) -> bool:
    """Whether a backend has a kernel of :mod:`linattn.backends._fused` for these, and LINATTN_BACKEND names no other.

    ``where``: the state and the mask; ``torch_has_one``, whether torch has one operation for it, too, of one pass.

    Outside of torch.compile, shapes without data and the transforms of torch.func take the torch code.
    """
    backend = fused.backend(op, x, *weights, **where)
    return (
        backend is not None
        and engine.PREFERRED in ("auto", backend)
        and engine.BACKENDS[backend].unavailable(x.device) is None
        and plain(x)
    )


def plain(x: Tensor) -> bool:
    """Whether numbers stand behind ``x``, now or when a compiled graph runs, and no transform of torch.func."""
    return torch.compiler.is_compiling() or not (
        isinstance(x, FakeTensor) or torch._C._are_functorch_transforms_active()
    )
