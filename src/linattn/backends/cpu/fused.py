"""The compiled kernels of what layers do beside the recurrence (:mod:`linattn.backends._fused`), on CPUs."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from linattn import _checks
from linattn.backends._fused import Kernels, as_output, fits, laid, norm_layout, rows_of_tokens
from linattn.backends.cpu.layout import threads_for
from linattn.backends.cpu.library import TYPES, address, layer_problem, loaded

_PIECE = 256  # tokens whose gradients of a weight are summed together
_NUMBERS = 1 << 16  # of a norm's piece, which is of _ROWS rows at least
_ROWS = 32


def serves(op: str, x: Tensor, *weights: Tensor | None, **where: Tensor | bool | None) -> bool:
    """Whether the kernels read these: floats of up to 32 bits, some of them, on a CPU."""
    if x.numel() == 0:
        return False
    return not any(t is not None and (t.dtype not in TYPES or t.device.type != "cpu") for t in (x, *weights))


def _numbers(x: Tensor | None) -> Tensor | None:
    """Parameters as the kernels read them."""
    return None if x is None else (x if x.dtype == torch.float32 else x.float()).contiguous()


def _like(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.new_empty(x.shape)


def _scratch(x: Tensor, *shape: int) -> Tensor:
    """For sums over pieces."""
    return x.new_empty(shape, dtype=torch.float64)


def _gradient(like: Tensor | None) -> Tensor | None:
    """Room for a parameter's gradient, in float32."""
    return None if like is None else like.new_empty(like.shape, dtype=torch.float32)


def _run(name: str, values: list[int | float], *, backward: bool = False) -> None:
    loaded().layer(name, layer_problem(name, values), backward=backward)


class _Tokens:
    """Which tokens belong together; padding is left out."""

    def __init__(self, x: Tensor, channels: int, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        self.N, self.T = rows_of_tokens(x, channels)
        self.count = self.N * self.T
        self.ends = self.index = None
        if mask is not None:
            fits("mask", mask, self.N, self.T)
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
    fits("state", tail, tokens.N, W - 1, C)
    (x, row), weight, bias = laid(x), _numbers(weight), _numbers(bias)  # type: ignore[assignment]
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
    (x, row), (dy, dy_row) = laid(x), laid(dy.to(x.dtype))
    tail, d_new = (None if t is None else t.contiguous() for t in (tail, d_new))
    numbers, offset = _numbers(weight), _numbers(bias)
    dx, dtail, dweight, dbias = tokens.room(x), _like(tail), _gradient(weight), _gradient(bias)
    partial = _scratch(x, -(-tokens.count // _PIECE), W + 1, C)
    tensors = (x, tail, numbers, offset, None, None, dy, d_new, dx, dtail, dweight, dbias, partial)
    sizes = [C, W, row, dy_row, activation, TYPES[x.dtype], _PIECE, threads_for(x.numel() * (3 * W + 24))]
    _run("convolution", [*tokens.values(), *(address(t) for t in tensors), *sizes], backward=True)
    pairs = ((dweight, weight), (dbias, bias), (dtail, tail))
    return dx, *(as_output(grad, like, x) for grad, like in pairs)


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
        fits(name, numbers, x.shape[-1])
    fits("gate", gate, *x.shape)
    x, gate, (R, M, N, row, gate_row) = norm_layout(x, gate, groups)
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
    x, gate, (R, M, N, row, gate_row) = norm_layout(x, gate, groups)
    dy = dy.to(x.dtype).contiguous()
    numbers, offset = _numbers(weight), _numbers(bias)
    dx, dgate, dweight, dbias = _like(x), _like(gate), _gradient(weight), _gradient(bias)
    sizes = _norm_sizes(x, weight, gate, gate_first, centred, [R, M, N, row, gate_row, M * N], 16)
    pieces = -(-R // sizes[-2])
    partials = [None if t is None else _scratch(x, pieces, t.numel()) for t in (weight, bias)]
    tensors = (x, gate, numbers, offset, None, dy, dx, dgate, dweight, dbias, *partials)
    _run("norm", [*map(address, tensors), *sizes, 1 / N if mean else 1.0, eps], backward=True)
    pairs = ((dx, x), (dweight, weight), (dbias, bias), (dgate, gate))
    return tuple(as_output(grad, like, x) for grad, like in pairs)


# ---- glu


def _glu(x: Tensor) -> Tensor:
    x, row = laid(x)
    N = x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], N)
    sizes = [y.numel() // N, N, row, 0, TYPES[x.dtype], threads_for(16 * y.numel())]
    _run("glu", [address(x), address(y), 0, 0, *sizes])
    return y


def _glu_backward(dy: Tensor, x: Tensor) -> Tensor:
    (x, row), (dy, dy_row) = laid(x), laid(dy.to(x.dtype))
    N, dx = x.shape[-1] // 2, x.new_empty(x.shape)
    sizes = [dy.numel() // N, N, row, dy_row, TYPES[x.dtype], threads_for(24 * dy.numel())]
    _run("glu", [address(x), 0, address(dy), address(dx), *sizes], backward=True)
    return dx


# ---- mix


def _table(tensors: list[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*map(address, tensors))


def _mix(
    x: Tensor, weight: Tensor, state: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None
) -> list[Tensor]:
    K, C = weight.shape
    tokens = _Tokens(x, C, mask, cu_seqlens)
    fits("state", state, tokens.N, C)
    (x, row), numbers = laid(x), _numbers(weight)
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
    (x, row), numbers = laid(x), _numbers(weight)
    *dy, d_last = (grad.to(x.dtype).contiguous() for grad in grads)
    state = None if state is None else state.contiguous()
    dx, dstate, dweight = tokens.room(x), _like(state), _gradient(weight)
    partial = _scratch(x, -(-tokens.count // _PIECE), K, C)
    table = _table(dy)
    pointers = [*map(address, (x, state, numbers)), 0, 0, ctypes.addressof(table)]
    sizes = [K, C, row, TYPES[x.dtype], _PIECE, threads_for(6 * K * x.numel())]
    outputs = map(address, (d_last, dx, dstate, dweight, partial))
    _run("mix", [*tokens.values(), *pointers, *outputs, *sizes], backward=True)
    return dx, as_output(dweight, weight, x), as_output(dstate, state, x)


# ---- softplus


def _softplus(x: Tensor, bias: Tensor) -> Tensor:
    fits("bias", bias, x.shape[-1])
    (x, row), numbers, y = laid(x), _numbers(bias), x.new_empty(x.shape, dtype=torch.float32)
    N = x.shape[-1]
    sizes = [x.numel() // N, N, row, TYPES[x.dtype], _PIECE, threads_for(16 * x.numel())]
    _run("softplus", [*map(address, (x, numbers, y)), *[0] * 4, *sizes])
    return y


def _softplus_backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    (x, row), numbers, dy = laid(x), _numbers(bias), dy.float().contiguous()
    N = x.shape[-1]
    R, dx, dbias = x.numel() // N, x.new_empty(x.shape), _gradient(bias)
    tensors = (x, numbers, None, dy, dx, dbias, _scratch(x, -(-R // _PIECE), N))
    sizes = [R, N, row, TYPES[x.dtype], _PIECE, threads_for(16 * x.numel())]
    _run("softplus", [*map(address, tensors), *sizes], backward=True)
    return dx, as_output(dbias, bias, x)


# ---- skip


def _skip(x: Tensor, u: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    N = x.shape[-1]
    fits("weight", weight, N)
    for name, t in (("u", u), ("z", z)):
        fits(name, t, *x.shape)
    (tensors, rows), numbers = zip(*map(laid, (x, u, z)), strict=True), _numbers(weight)
    y = x.new_empty(x.shape)
    sizes = [x.numel() // N, N, *rows, 0, TYPES[x.dtype], _PIECE, threads_for(16 * x.numel())]
    _run("skip", [*map(address, (*tensors, numbers, y)), *[0] * 6, *sizes])
    return y


def _skip_backward(dy: Tensor, x: Tensor, u: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    (tensors, rows), numbers = zip(*map(laid, (x, u, z, dy.to(x.dtype))), strict=True), _numbers(weight)
    (*given, dy), N = tensors, x.shape[-1]
    R, (dx, du, dz), dweight = x.numel() // N, (x.new_empty(x.shape) for _ in range(3)), _gradient(weight)
    partial = _scratch(x, -(-R // _PIECE), N)
    sizes = [R, N, *rows, TYPES[x.dtype], _PIECE, threads_for(32 * x.numel())]
    _run("skip", [*map(address, (*given, numbers, None, dy, dx, du, dz, dweight, partial)), *sizes], backward=True)
    return dx, du, dz, as_output(dweight, weight, x)


KERNELS = Kernels(
    "cpu",
    serves,
    {
        "convolution": _convolution,
        "convolution_backward": _convolution_backward,
        "norm": _norm,
        "norm_backward": _norm_backward,
        "glu": _glu,
        "glu_backward": _glu_backward,
        "mix": _mix,
        "mix_backward": _mix_backward,
        "softplus": _softplus,
        "softplus_backward": _softplus_backward,
        "skip": _skip,
        "skip_backward": _skip_backward,
    },
)
