"""What layers do beside the recurrence, as registered ops: short convolution, norms, gated units, token shift, steps.

Each op is one pass over its inputs, forward and backward, in float32 whatever the dtype outside; its backward computes
again what it needs. ``linattn.layers`` has the same functions in plain torch, which is their definition. A backend
has kernels for some of them, in its own module ``fused``.

    linattn::convolution, linattn::norm, linattn::glu, linattn::mix, linattn::softplus, linattn::skip,
    and their _backward

``torch.compile(fullgraph=True)`` and autograd see one node with a known shape. There is no second derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn import _checks
from linattn.backends._ops import call, define

WIDEST = 32  # convolution, as in csrc/problem.h
MIXES = 8  # as there


class Kernels(NamedTuple):
    """A backend, on a type of device: ``serves(op, x, *tensors, state, mask, torch_has_one)``, whether it does these
    (better than torch's own kernel, where it has one); its ops."""

    backend: str
    serves: Callable[..., bool]
    ops: dict[str, Callable[..., Any]]


KERNELS: dict[str, Kernels] = {}
"""By type of device."""


def backend(op: str, x: Tensor, *tensors: Tensor | None, **where: Tensor | bool | None) -> str | None:
    """The backend that has a kernel which reads these."""
    kernels = KERNELS.get(x.device.type)
    found = kernels is not None and op in kernels.ops and kernels.serves(op, x, *tensors, **where)
    return kernels.backend if kernels is not None and found else None


# ---- how tensors lie


def _rows(x: Tensor, axes: int) -> int | None:
    """The distance between rows, which are the last ``axes`` axes, if numbers within them lie side by side."""
    size, row, follows = 1, 0, 0
    for n, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if axes:
            if n != 1 and stride != size:
                return None
            size *= n
            axes -= 1
        elif n != 1:
            if row and stride != follows:
                return None
            row, follows = row or stride, stride * n
            if not row:
                return None  # expanded
    return row or size


def laid(x: Tensor) -> tuple[Tensor, int]:
    """x as rows of its last axis: itself where it can be read so, or a copy."""
    row = x.shape[-1] if x.is_contiguous() else _rows(x, 1)
    return (x, row) if row is not None else (x.contiguous(), x.shape[-1])


def fits(name: str, x: Tensor | None, *shape: int) -> None:
    """The kernels believe in shapes."""
    if x is not None and x.shape != shape:
        raise _checks.fail(name, f"shape {list(x.shape)}", str(list(shape)))


def rows_of_tokens(x: Tensor, channels: int) -> tuple[int, int]:
    """B and T of x [B, T, channels]."""
    if x.dim() != 3 or x.shape[2] != channels:
        raise _checks.fail("x", f"shape {list(x.shape)}", f"[B, T, {channels}]")
    return x.shape[0], x.shape[1]


def as_output(grad: Tensor | None, like: Tensor | None, x: Tensor) -> Tensor:
    """What an op returns, which cannot be None: empty where there was no input."""
    return x.new_empty(0) if grad is None or like is None else grad.to(like.dtype)


def _shape_of(like: Tensor | None, x: Tensor) -> Tensor:
    return x.new_empty(0) if like is None else like.new_empty(like.shape)


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _convolution_fake(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    cu_seqlens = rest[3]
    return x.new_empty(x.shape), x.new_empty(_sequences(x, cu_seqlens), weight.shape[-1] - 1, x.shape[-1])


def _convolution_backward_fake(dy: Tensor, d_new: Tensor | None, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(_shape_of(t, x) for t in (x, *rest[:3]))


# ---- norm


def norm_layout(x: Tensor, gate: Tensor | None, groups: int) -> tuple[Tensor, Tensor | None, list[int]]:
    """x and gate as rows of equal parts, copied only where they do not lie so; R, M, N and the distances of rows."""
    N = x.shape[-1] // groups
    lies = x.is_contiguous() and (gate is None or gate.is_contiguous())
    for axes in () if lies else (1, 2):
        if axes == 2 and (groups > 1 or x.dim() < 2):
            break
        row, gate_row = _rows(x, axes), 0 if gate is None else _rows(gate, axes)
        if row is not None and gate_row is not None:
            size = x.shape[-axes:].numel()
            return x, gate, [x.numel() // size, size // N, N, row, gate_row]
    gate, size = None if gate is None else gate.contiguous(), x.shape[-1]
    return x.contiguous(), gate, [x.numel() // size, groups, N, size, size]


def _norm_fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def _norm_backward_fake(dy: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(_shape_of(t, dy) for t in rest[:4])


def _glu_fake(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _glu_backward_fake(dy: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _mix_fake(
    x: Tensor, weight: Tensor, state: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None
) -> list[Tensor]:
    return [*(x.new_empty(x.shape) for _ in weight), x.new_empty(_sequences(x, cu_seqlens), x.shape[-1])]


def _mix_backward_fake(grads: list[Tensor], x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(_shape_of(t, x) for t in (x, *rest[:2]))


def _softplus_fake(x: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


def _softplus_backward_fake(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


def _skip_fake(x: Tensor, u: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _skip_backward_fake(dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in inputs)


# ---- the ops


_WHERE = "Tensor? mask, Tensor? cu_seqlens"
_CONVOLUTION = f"Tensor x, Tensor weight, Tensor? bias, Tensor? tail, {_WHERE}, bool activation"
_NORM = (
    "Tensor x, Tensor? weight, Tensor? bias, Tensor? gate, int groups, bool centred, bool gate_first, bool mean, "
    "float eps"
)
_MIX = f"Tensor x, Tensor weight, Tensor? state, {_WHERE}"
_SOFTPLUS = "Tensor x, Tensor bias"
_SKIP = "Tensor x, Tensor u, Tensor z, Tensor weight"
_SCHEMAS = {
    "convolution": f"({_CONVOLUTION}) -> (Tensor, Tensor)",
    "convolution_backward": f"(Tensor dy, Tensor? d_new, {_CONVOLUTION}) -> (Tensor, Tensor, Tensor, Tensor)",
    "norm": f"({_NORM}) -> Tensor",
    "norm_backward": f"(Tensor dy, {_NORM}) -> (Tensor, Tensor, Tensor, Tensor)",
    "glu": "(Tensor x) -> Tensor",
    "glu_backward": "(Tensor dy, Tensor x) -> Tensor",
    "mix": f"({_MIX}) -> Tensor[]",
    "mix_backward": f"(Tensor[] grads, {_MIX}) -> (Tensor, Tensor, Tensor)",
    "softplus": f"({_SOFTPLUS}) -> Tensor",
    "softplus_backward": f"(Tensor dy, {_SOFTPLUS}) -> (Tensor, Tensor)",
    "skip": f"({_SKIP}) -> Tensor",
    "skip_backward": f"(Tensor dy, {_SKIP}) -> (Tensor, Tensor, Tensor, Tensor)",
}

_FAKES: dict[str, Callable[..., Any]] = {
    "convolution": _convolution_fake,
    "convolution_backward": _convolution_backward_fake,
    "norm": _norm_fake,
    "norm_backward": _norm_backward_fake,
    "glu": _glu_fake,
    "glu_backward": _glu_backward_fake,
    "mix": _mix_fake,
    "mix_backward": _mix_backward_fake,
    "softplus": _softplus_fake,
    "softplus_backward": _softplus_backward_fake,
    "skip": _skip_fake,
    "skip_backward": _skip_backward_fake,
}


def _run(name: str, *values: Any) -> Any:
    """The op, by the kernels of the device that its tensors are on."""
    first = values[0][0] if isinstance(values[0], list) else values[0]
    return KERNELS[first.device.type].ops[name](*values)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors = sum(value is None or isinstance(value, Tensor) for value in inputs)  # which come first
    ctx.save_for_backward(*inputs[:tensors])
    ctx.rest, ctx.inputs = inputs[tensors:], len(inputs)
    ctx.set_materialize_grads(False)


def _wanted(ctx: Any, grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs that need one, which the ops give in the inputs' order."""
    given = (*grads, *[None] * (ctx.inputs - len(grads)))
    return tuple(grad if need else None for grad, need in zip(given, ctx.needs_input_grad, strict=False))


def _convolution_gradient(ctx: Any, dy: Tensor | None, d_new: Tensor | None) -> tuple[Tensor | None, ...]:
    x, *rest = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    return _wanted(ctx, call("convolution_backward", dy, d_new, x, *rest, *ctx.rest))


def _norm_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _wanted(ctx, call("norm_backward", dy, *ctx.saved_tensors, *ctx.rest))


def _glu_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _wanted(ctx, (call("glu_backward", dy, *ctx.saved_tensors),))


def _mix_gradient(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, state, *where = ctx.saved_tensors
    last = x.new_empty(_sequences(x, where[1]), x.shape[-1])
    like = [*(x for _ in weight), last]
    given = [torch.zeros_like(t) if grad is None else grad for grad, t in zip(grads, like, strict=True)]
    return _wanted(ctx, call("mix_backward", given, x, weight, state, *where))


def _softplus_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _wanted(ctx, call("softplus_backward", dy, *ctx.saved_tensors))


def _skip_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _wanted(ctx, call("skip_backward", dy, *ctx.saved_tensors))


_GRADIENTS: dict[str, Callable[..., tuple[Tensor | None, ...]]] = {
    "convolution": _convolution_gradient,
    "norm": _norm_gradient,
    "glu": _glu_gradient,
    "mix": _mix_gradient,
    "softplus": _softplus_gradient,
    "skip": _skip_gradient,
}


for _name, _schema in _SCHEMAS.items():
    define(_name, _schema, partial(_run, _name), _FAKES[_name], _setup, _GRADIENTS.get(_name))


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: bool,
) -> tuple[Tensor, Tensor]:
    """y_t = f(bias + Σ_j weight_j x_{t-W+1+j}), f silu or nothing, on each channel, and the last W-1 inputs.

    x [B, T, C] and tail [N, W-1, C] of one dtype, weight [C, ..., W] of at most WIDEST, bias [C]; mask [B, T], False at
    padding, where y is zero; cu_seqlens [N+1]. Raises ValueError for shapes or boundaries that don't fit.
    """
    y, new = call("convolution", x, weight, bias, tail, mask, cu_seqlens, activation)
    return y, new


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    *,
    groups: int = 1,
    centred: bool = False,
    gate_first: bool = False,
    mean: bool = True,
    eps: float,
) -> Tensor:
    """c · (‖c‖²/n + eps)^-½ · weight + bias for each of ``groups`` parts, of n numbers, of x's last axis.

    c is u, or u less its average if ``centred``; without ``mean`` the sum of squares is not divided by n. With a gate
    of x's shape, u is x silu(gate) if ``gate_first``; otherwise u is x, and the result is multiplied by silu(gate).
    Raises ValueError for shapes that don't fit.
    """
    y: Tensor = call("norm", x, weight, bias, gate, groups, centred, gate_first, mean, eps)
    return y


def glu(x: Tensor) -> Tensor:
    """silu(a) · b for x = (a, b) [..., 2N] -> [..., N]."""
    y: Tensor = call("glu", x)
    return y


def mix(
    x: Tensor, weight: Tensor, state: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """x_t + weight_k (x_{t-1} - x_t) for each row of weight [K, C], K at most MIXES, and the last inputs [N, C].

    x [B, T, C] and state [N, C], the inputs before it, of one dtype; mask, cu_seqlens and errors as for
    :func:`convolution`.
    """
    *y, last = call("mix", x, weight, state, mask, cu_seqlens)
    return y, last


def softplus(x: Tensor, bias: Tensor) -> Tensor:
    """log(1 + e^{x + bias}) in float32, for x [..., N] and bias [N]. Raises ValueError for a bias that doesn't fit."""
    y: Tensor = call("softplus", x, bias)
    return y


def skip(x: Tensor, u: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """(x + weight · u) · silu(z), for x, u, z [..., N] of one dtype and weight [N]; ValueError if they don't fit."""
    y: Tensor = call("skip", x, u, z, weight)
    return y
