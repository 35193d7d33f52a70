"""Checks of arguments: one ValueError that names the argument, what came and what was wanted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from itertools import islice, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MANY = 4096  # calls that are remembered
Result = TypeVar("Result")
_NEW: Any = object()
_passed: dict[tuple[Any, ...], Any] = {}


def remembered(check: Callable[..., Result], how: tuple[Hashable, ...], *tensors: Any) -> Result:
    """``check(*how, *tensors)``, at once where it passed before with tensors of the same shapes, dtypes and devices.

    The check may look at nothing else of them, nor at anything but its arguments. No tensor is kept.
    """
    key, result = None, _NEW
    if not torch.compiler.is_compiling():
        try:
            key = (check, how, *[None if t is None else (t.shape, t.dtype, t.device) for t in tensors])
            result = _passed.get(key, _NEW)
        except (AttributeError, TypeError):  # no tensors, as the check will say, or symbolic sizes
            key = None
    if result is _NEW:
        result = check(*how, *tensors)
        if key is not None:
            if len(_passed) >= MANY:
                _passed.clear()
            _passed[key] = result
    return result


def fail(name: str, came: object, wanted: object) -> ValueError:
    """The library's one form of complaint."""
    return ValueError(f"{name}: got {came}, wanted {wanted}")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """``value`` is one of ``allowed``."""
    if value not in allowed:
        raise fail(name, repr(value), "one of " + ", ".join(map(repr, allowed)))


def _known(axes: list[str], sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in axes)


def tensor(name: str, value: object, dims: str, sizes: dict[str, int], dtype: torch.dtype | None = None) -> None:
    """``value`` is a floating tensor with the axes ``dims``; sizes of known axes must agree, new ones are recorded.

    ``dtype`` None accepts any floating dtype.
    """
    if not isinstance(value, Tensor):
        raise fail(name, type(value).__name__, f"a tensor [{', '.join(dims.split())}]")
    axes, shape, known = dims.split(), value.shape, len(sizes)
    if len(shape) != len(axes):
        raise fail(name, f"shape {list(shape)}", f"{len(axes)} axes [{_known(axes, sizes)}]")
    for axis, size in zip(axes, shape, strict=True):
        if sizes.setdefault(axis, size) != size:
            given = dict(islice(sizes.items(), known))
            raise fail(name, f"shape {list(shape)}", f"[{_known(axes, given)}]")
    if value.dtype not in FLOATS:
        raise fail(name, f"dtype {value.dtype}", "float32, bfloat16, float16 or float64")
    if dtype is not None and value.dtype != dtype:
        raise fail(name, f"dtype {value.dtype}", str(dtype))


def same_device(tensors: Mapping[str, Tensor | None]) -> None:
    """All given tensors are on the device of the first."""
    present = [(name, value) for name, value in tensors.items() if value is not None]
    first_name, first = present[0]
    for name, value in present[1:]:
        if value.device != first.device:
            raise fail(name, f"device {value.device}", f"{first.device}, where {first_name} is")


def grouped(name: str, groups: int, heads: int, what: str = "heads", wholes: str = "value heads") -> None:
    """The query/key heads divide the value heads."""
    if groups == 0 or heads % groups:
        legal = [n for n in range(1, heads + 1) if heads % n == 0]
        raise fail(name, f"{groups} {what}", f"a number of {what} that divides the {heads} {wholes}: {legal}")


def cu_seqlens_form(value: object, batch: int, name: str = "cu_seqlens") -> None:
    """Shape and dtype of packed boundaries; needs no look at the data."""
    if not isinstance(value, Tensor) or value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
        came = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise fail(name, came, "an int32 or int64 tensor [N+1]")
    if value.numel() < 2:
        raise fail(name, f"{value.numel()} boundaries", "at least 2: 0 and T")
    if batch != 1:
        raise fail(name, f"a batch of {batch}", "packed sequences in one row, B=1")


def boundaries(value: Tensor, length: int, name: str = "cu_seqlens") -> list[int]:
    """The boundaries as integers: they begin at 0, never fall and end at T. Looks at the data."""
    ends = [int(n) for n in value.tolist()]
    if ends[0] != 0:
        raise fail(name, f"a first boundary of {ends[0]}", "0")
    for left, right in pairwise(ends):
        if right < left:
            raise fail(name, f"{right} after {left}", "boundaries that never fall")
    if ends[-1] != length:
        raise fail(name, f"a last boundary of {ends[-1]}", f"T={length}")
    return ends


def has_values(x: Tensor) -> bool:
    """Whether there is data to look at: an empty tensor has none, nor has one of a FakeTensorMode, a shape alone."""
    return x.numel() > 0 and not isinstance(x, FakeTensor)


def log_decay(g: Tensor | None, name: str = "g") -> None:
    """No gate is positive or NaN. Looks at the data."""
    if g is not None and has_values(g):
        top = float(g.detach().amax())
        if not top <= 0:
            raise fail(name, f"a log-decay of {top:g}", "natural logarithms of decays, ≤ 0")


def steps(dt: Tensor, name: str = "dt") -> None:
    """No time step is negative or NaN. Looks at the data."""
    if has_values(dt):
        least = float(dt.detach().amin())
        if not least >= 0:
            raise fail(name, f"a step of {least:g}", "steps ≥ 0, after their softplus")


def rates(A: Tensor, name: str = "A") -> None:
    """No rate of decay is positive, infinite or NaN. Looks at the data."""
    if has_values(A):
        low, high = (float(end) for end in A.detach().aminmax())
        if not (high <= 0 and low > float("-inf")):
            raise fail(name, f"a rate of {high if not high <= 0 else low:g}", "finite rates of decay, ≤ 0")
