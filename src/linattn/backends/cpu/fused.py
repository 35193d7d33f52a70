"""What layers do beside the recurrence, as registered ops: short convolution, norms, gated units, token shift.

Each op is one pass over its inputs, forward and backward, in float32 whatever the dtype outside; its backward computes
again what it needs. ``linattn.layers`` has the same functions in plain torch, which is their definition.

    linattn::convolution, linattn::norm, linattn::glu, linattn::mix, and their _backward

``torch.compile(fullgraph=True)`` and autograd see one node with a known shape. There is no second derivative.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from linattn import _checks
from linattn.backends.cpu.layout import threads_for
from linattn.backends.cpu.library import TYPES, address, layer_problem, loaded

WIDEST = 32  # convolution, as in csrc/problem.h
MIXES = 8  # as there
_PIECE = 256  # tokens whose gradients of a weight are summed together
_NUMBERS = 1 << 16  # of a norm's piece, which is of _ROWS rows at least
_ROWS = 32


def serves(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether the kernels read these: floats of up to 32 bits, some of them, on a CPU."""
    if x.numel() == 0:
        return False
    return not any(t is not None and (t.dtype not in TYPES or t.device.type != "cpu") for t in (x, *weights))


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


def _laid(x: Tensor) -> tuple[Tensor, int]:
    """x as rows of its last axis: itself where it can be read so, or a copy."""
    row = x.shape[-1] if x.is_contiguous() else _rows(x, 1)
    return (x, row) if row is not None else (x.contiguous(), x.shape[-1])


def _numbers(x: Tensor | None) -> Tensor | None:
    """Parameters as the kernels read them."""
    return None if x is None else (x if x.dtype == torch.float32 else x.float()).contiguous()


def _fits(name: str, x: Tensor | None, *shape: int) -> None:
    """The kernels believe in shapes."""
    if x is not None and x.shape != shape:
        raise _checks.fail(name, f"shape {list(x.shape)}", str(list(shape)))


def _like(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.new_empty(x.shape)


def _scratch(x: Tensor, *shape: int) -> Tensor:
    """For sums over pieces."""
    return x.new_empty(shape, dtype=torch.float64)


def _gradient(like: Tensor | None) -> Tensor | None:
    """Room for a parameter's gradient, in float32."""
    return None if like is None else like.new_empty(like.shape, dtype=torch.float32)


def _given(grad: Tensor | None, like: Tensor | None, x: Tensor) -> Tensor:
    """What an op returns, which cannot be None: empty where there was no input."""
    return x.new_empty(0) if grad is None or like is None else grad.to(like.dtype)


def _shape_of(like: Tensor | None, x: Tensor) -> Tensor:
    return x.new_empty(0) if like is None else like.new_empty(like.shape)


def _run(name: str, values: list[int | float], *, backward: bool = False) -> None:
    loaded().layer(name, layer_problem(name, values), backward=backward)


class _Tokens:
    """Which tokens belong together; padding is left out."""

    def __init__(self, x: Tensor, channels: int, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        if x.dim() != 3 or x.shape[2] != channels:
            raise _checks.fail("x", f"shape {list(x.shape)}", f"[B, T, {channels}]")
        self.N, self.T = x.shape[:2]
        self.count = self.N * self.T
        self.ends = self.index = None
        if mask is not None:
            _fits("mask", mask, self.N, self.T)
            self.ends = mask.new_zeros(self.N + 1, dtype=torch.int64)
            torch.cumsum(mask.sum(1), 0, out=self.ends[1:])
            self.index = mask.flatten().nonzero()
            self.count = len(self.index)
        elif cu_seqlens is not None:
            _checks.cu_seqlens_form(cu_seqlens, self.N)
            _checks.boundaries(cu_seqlens, self.T)
            self.ends = cu_seqlens.to(torch.int64).contiguous()
            self.N = len(self.ends) - 1

    def values(self) -> list[int]:
        return [address(self.ends), address(self.index), self.N, self.T, self.count]

    def room(self, x: Tensor) -> Tensor:
        """For results of x's shape, zero at padding."""
        return x.new_empty(x.shape) if self.index is None else x.new_zeros(x.shape)


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


# ---- convolution


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: bool,
) -> tuple[Tensor, Tensor]:
    C, W = weight.shape[0], weight.shape[-1]
    tokens = _Tokens(x, C, mask, cu_seqlens)
    _fits("state", tail, tokens.N, W - 1, C)
    (x, row), weight, bias = _laid(x), _numbers(weight), _numbers(bias)  # type: ignore[assignment]
    tail = None if tail is None else tail.contiguous()
    y, new = tokens.room(x), x.new_empty(tokens.N, W - 1, C)
    pointers = [address(t) for t in (x, tail, weight, bias, y, new)]
    sizes = [C, W, row, 0, activation, TYPES[x.dtype], _PIECE, threads_for(x.numel() * (W + 16))]
    _run("convolution", [*tokens.values(), *pointers, *[0] * 7, *sizes])
    return y, new


def _convolution_backward(
    dy: Tensor,
    d_new: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: bool,
) -> tuple[Tensor, ...]:
    C, W = weight.shape[0], weight.shape[-1]
    tokens = _Tokens(x, C, mask, cu_seqlens)
    (x, row), (dy, dy_row) = _laid(x), _laid(dy.to(x.dtype))
    tail, d_new = (None if t is None else t.contiguous() for t in (tail, d_new))
    numbers, offset = _numbers(weight), _numbers(bias)
    dx, dtail, dweight, dbias = tokens.room(x), _like(tail), _gradient(weight), _gradient(bias)
    partial = _scratch(x, -(-tokens.count // _PIECE), W + 1, C)
    tensors = (x, tail, numbers, offset, None, None, dy, d_new, dx, dtail, dweight, dbias, partial)
    sizes = [C, W, row, dy_row, activation, TYPES[x.dtype], _PIECE, threads_for(x.numel() * (3 * W + 24))]
    _run("convolution", [*tokens.values(), *(address(t) for t in tensors), *sizes], backward=True)
    pairs = ((dweight, weight), (dbias, bias), (dtail, tail))
    return dx, *(_given(grad, like, x) for grad, like in pairs)


def _convolution_fake(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    cu_seqlens = rest[3]
    return x.new_empty(x.shape), x.new_empty(_sequences(x, cu_seqlens), weight.shape[-1] - 1, x.shape[-1])


def _convolution_backward_fake(dy: Tensor, d_new: Tensor | None, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(_shape_of(t, x) for t in (x, *rest[:3]))


# ---- norm


def _norm_layout(x: Tensor, gate: Tensor | None, groups: int) -> tuple[Tensor, Tensor | None, list[int]]:
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


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    groups: int,
    centred: bool,
    gate_first: bool,
    mean: bool,
    eps: float,
) -> Tensor:
    for name, numbers in (("weight", weight), ("bias", bias)):
        _fits(name, numbers, x.shape[-1])
    _fits("gate", gate, *x.shape)
    x, gate, (R, M, N, row, gate_row) = _norm_layout(x, gate, groups)
    y, weight, bias = x.new_empty(x.shape), _numbers(weight), _numbers(bias)
    pointers = [address(t) for t in (x, gate, weight, bias, y)]
    sizes = _norm_sizes(x, weight, gate, gate_first, centred, [R, M, N, row, gate_row, 0], 8)
    _run("norm", [*pointers, *[0] * 7, *sizes, 1 / N if mean else 1.0, eps])
    return y


def _norm_sizes(
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    gate_first: bool,
    centred: bool,
    layout: list[int],
    cost: int,
) -> list[int]:
    _, M, N, *_ = layout
    weights, gated = 0 if weight is None else weight.numel(), 0 if gate is None else 1 if gate_first else 2
    types = [TYPES[x.dtype], 0 if gate is None else TYPES[gate.dtype]]
    return [*layout, weights, gated, centred, *types, max(_NUMBERS // (M * N), _ROWS), threads_for(cost * x.numel())]


def _norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    groups: int,
    centred: bool,
    gate_first: bool,
    mean: bool,
    eps: float,
) -> tuple[Tensor, ...]:
    x, gate, (R, M, N, row, gate_row) = _norm_layout(x, gate, groups)
    dy = dy.to(x.dtype).contiguous()
    numbers, offset = _numbers(weight), _numbers(bias)
    dx, dgate, dweight, dbias = _like(x), _like(gate), _gradient(weight), _gradient(bias)
    sizes = _norm_sizes(x, weight, gate, gate_first, centred, [R, M, N, row, gate_row, M * N], 16)
    pieces = -(-R // sizes[-2])
    partials = [None if t is None else _scratch(x, pieces, t.numel()) for t in (weight, bias)]
    tensors = (x, gate, numbers, offset, None, dy, dx, dgate, dweight, dbias, *partials)
    _run("norm", [*map(address, tensors), *sizes, 1 / N if mean else 1.0, eps], backward=True)
    pairs = ((dx, x), (dweight, weight), (dbias, bias), (dgate, gate))
    return tuple(_given(grad, like, x) for grad, like in pairs)


def _norm_fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def _norm_backward_fake(dy: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(_shape_of(t, dy) for t in rest[:4])


# ---- glu


def _glu(x: Tensor) -> Tensor:
    x, row = _laid(x)
    N = x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], N)
    sizes = [y.numel() // N, N, row, 0, TYPES[x.dtype], threads_for(16 * y.numel())]
    _run("glu", [address(x), address(y), 0, 0, *sizes])
    return y


def _glu_backward(dy: Tensor, x: Tensor) -> Tensor:
    (x, row), (dy, dy_row) = _laid(x), _laid(dy.to(x.dtype))
    N, dx = x.shape[-1] // 2, x.new_empty(x.shape)
    sizes = [dy.numel() // N, N, row, dy_row, TYPES[x.dtype], threads_for(24 * dy.numel())]
    _run("glu", [address(x), 0, address(dy), address(dx), *sizes], backward=True)
    return dx


def _glu_fake(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _glu_backward_fake(dy: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


# ---- mix


def _table(tensors: list[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*map(address, tensors))


def _mix(
    x: Tensor, weight: Tensor, state: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None
) -> list[Tensor]:
    K, C = weight.shape
    tokens = _Tokens(x, C, mask, cu_seqlens)
    _fits("state", state, tokens.N, C)
    (x, row), numbers = _laid(x), _numbers(weight)
    state = None if state is None else state.contiguous()
    y, last = [tokens.room(x) for _ in range(K)], x.new_empty(tokens.N, C)
    table = _table(y)
    pointers = [*map(address, (x, state, numbers)), ctypes.addressof(table), address(last)]
    sizes = [K, C, row, TYPES[x.dtype], _PIECE, threads_for(2 * K * x.numel())]
    _run("mix", [*tokens.values(), *pointers, *[0] * 6, *sizes])
    return [*y, last]


def _mix_backward(
    grads: list[Tensor],
    x: Tensor,
    weight: Tensor,
    state: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:
    K, C = weight.shape
    tokens = _Tokens(x, C, mask, cu_seqlens)
    (x, row), numbers = _laid(x), _numbers(weight)
    *dy, d_last = (grad.to(x.dtype).contiguous() for grad in grads)
    state = None if state is None else state.contiguous()
    dx, dstate, dweight = tokens.room(x), _like(state), _gradient(weight)
    partial = _scratch(x, -(-tokens.count // _PIECE), K, C)
    table = _table(dy)
    pointers = [*map(address, (x, state, numbers)), 0, 0, ctypes.addressof(table)]
    sizes = [K, C, row, TYPES[x.dtype], _PIECE, threads_for(6 * K * x.numel())]
    outputs = map(address, (d_last, dx, dstate, dweight, partial))
    _run("mix", [*tokens.values(), *pointers, *outputs, *sizes], backward=True)
    return dx, _given(dweight, weight, x), _given(dstate, state, x)


def _mix_fake(
    x: Tensor, weight: Tensor, state: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None
) -> list[Tensor]:
    return [*(x.new_empty(x.shape) for _ in weight), x.new_empty(_sequences(x, cu_seqlens), x.shape[-1])]


def _mix_backward_fake(grads: list[Tensor], x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(_shape_of(t, x) for t in (x, *rest[:2]))


# ---- the ops

_WHERE = "Tensor? mask, Tensor? cu_seqlens"
_CONVOLUTION = f"Tensor x, Tensor weight, Tensor? bias, Tensor? tail, {_WHERE}, bool activation"
_NORM = (
    "Tensor x, Tensor? weight, Tensor? bias, Tensor? gate, int groups, bool centred, bool gate_first, bool mean, "
    "float eps"
)
_MIX = f"Tensor x, Tensor weight, Tensor? state, {_WHERE}"
_SCHEMAS = {
    "convolution": f"({_CONVOLUTION}) -> (Tensor, Tensor)",
    "convolution_backward": f"(Tensor dy, Tensor? d_new, {_CONVOLUTION}) -> (Tensor, Tensor, Tensor, Tensor)",
    "norm": f"({_NORM}) -> Tensor",
    "norm_backward": f"(Tensor dy, {_NORM}) -> (Tensor, Tensor, Tensor, Tensor)",
    "glu": "(Tensor x) -> Tensor",
    "glu_backward": "(Tensor dy, Tensor x) -> Tensor",
    "mix": f"({_MIX}) -> Tensor[]",
    "mix_backward": f"(Tensor[] grads, {_MIX}) -> (Tensor, Tensor, Tensor)",
}
_IMPLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "convolution": (_convolution, _convolution_fake),
    "convolution_backward": (_convolution_backward, _convolution_backward_fake),
    "norm": (_norm, _norm_fake),
    "norm_backward": (_norm_backward, _norm_backward_fake),
    "glu": (_glu, _glu_fake),
    "glu_backward": (_glu_backward, _glu_backward_fake),
    "mix": (_mix, _mix_fake),
    "mix_backward": (_mix_backward, _mix_backward_fake),
}


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors = sum(value is None or isinstance(value, Tensor) for value in inputs)  # which come first
    ctx.save_for_backward(*inputs[:tensors])
    ctx.rest = inputs[tensors:]
    ctx.set_materialize_grads(False)


def _wanted(ctx: Any, grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs that need one, which the ops give in the inputs' order."""
    given = (*grads, *[None] * (len(ctx.needs_input_grad) - len(grads)))
    return tuple(grad if need else None for grad, need in zip(given, ctx.needs_input_grad, strict=True))


def _convolution_gradient(ctx: Any, dy: Tensor | None, d_new: Tensor | None) -> tuple[Tensor | None, ...]:
    x, *rest = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    return _wanted(ctx, _call("convolution_backward", dy, d_new, x, *rest, *ctx.rest))


def _norm_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _wanted(ctx, _call("norm_backward", dy, *ctx.saved_tensors, *ctx.rest))


def _glu_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _wanted(ctx, (_call("glu_backward", dy, *ctx.saved_tensors),))


def _mix_gradient(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, state, *where = ctx.saved_tensors
    last = x.new_empty(_sequences(x, where[1]), x.shape[-1])
    like = [*(x for _ in weight), last]
    given = [torch.zeros_like(t) if grad is None else grad for grad, t in zip(grads, like, strict=True)]
    return _wanted(ctx, _call("mix_backward", given, x, weight, state, *where))


_GRADIENTS: dict[str, Callable[..., tuple[Tensor | None, ...]]] = {
    "convolution": _convolution_gradient,
    "norm": _norm_gradient,
    "glu": _glu_gradient,
    "mix": _mix_gradient,
}


class _Node(torch.autograd.Function):
    """What the ops are to autograd where no graph is captured: the same, in less time than the dispatcher takes."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> Any:
        *inputs, ctx.op = values
        outputs = _IMPLS[ctx.op][0](*inputs)
        _setup(ctx, tuple(inputs), outputs)
        return tuple(outputs) if isinstance(outputs, list) else outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _GRADIENTS[ctx.op](ctx, *grads)


def _nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """A backward keeps nothing for one of its own."""


def _refuse(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("the compiled kernels of layers have no second derivative; LINATTN_BACKEND=chunked has")


_library = Library("linattn", "FRAGMENT")
for _name, (_impl, _fake) in _IMPLS.items():
    _library.define(_name + _SCHEMAS[_name])
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"linattn::{_name}", _fake, lib=_library)
    if _name.endswith("_backward"):
        torch.library.register_autograd(f"linattn::{_name}", _refuse, setup_context=_nothing, lib=_library)
for _name in ("convolution", "norm", "glu"):
    torch.library.register_autograd(f"linattn::{_name}", _GRADIENTS[_name], setup_context=_setup, lib=_library)
torch.library.register_autograd(
    "linattn::mix", lambda ctx, grads: _mix_gradient(ctx, *grads), setup_context=_setup, lib=_library
)


def _call(name: str, *values: Any) -> Any:
    """The op, or what stands behind it where torch need not see one."""
    first = values[0][0] if isinstance(values[0], list) else values[0]
    if (
        torch.compiler.is_compiling()
        or type(first) not in (Tensor, torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        return getattr(torch.ops.linattn, name)(*values)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in values):
        return _Node.apply(*values, name) if name in _GRADIENTS else getattr(torch.ops.linattn, name)(*values)
    return _IMPLS[name][0](*values)


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
    y, new = _call("convolution", x, weight, bias, tail, mask, cu_seqlens, activation)
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
    y: Tensor = _call("norm", x, weight, bias, gate, groups, centred, gate_first, mean, eps)
    return y


def glu(x: Tensor) -> Tensor:
    """silu(a) · b for x = (a, b) [..., 2N] -> [..., N]."""
    y: Tensor = _call("glu", x)
    return y


def mix(
    x: Tensor, weight: Tensor, state: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """x_t + weight_k (x_{t-1} - x_t) for each row of weight [K, C], K at most MIXES, and the last inputs [N, C].

    x [B, T, C] and state [N, C], the inputs before it, of one dtype; mask, cu_seqlens and errors as for
    :func:`convolution`.
    """
    *y, last = _call("mix", x, weight, state, mask, cu_seqlens)
    return y, last
