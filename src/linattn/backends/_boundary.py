"""Where torch ends and a kernel begins: the registered ops, written once for every compiled-in backend.

A kernel may branch on data and write into buffers; behind an op, ``torch.compile(fullgraph=True)`` and autograd see one
node with a known shape. Ops of a matrix recurrence are called as :mod:`linattn.backends._ops` says.

    linattn::matrix_forward   -> output, final state, and what the backward keeps: low-rank writes, states on the way
    linattn::matrix_backward  -> gradients of q, k, v, g, beta, a, b, u, state (empty where the input was absent)
    linattn::divided_forward  -> divided output, sums, final state and final sum of keys
    linattn::divided_backward -> gradients of q, k, v, g, state, weight, z, m (empty where the input was absent)
    linattn::stabilized, linattn::stabilized_backward -> the running maximum of exponential gates
    linattn::scan             -> all elementwise states; its backward is itself, run backwards in time
    linattn::selective_forward, linattn::selective_backward -> the selective scan in the same way
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn import _checks
from linattn.backends._ops import call, define, differentiable
from linattn.backends._protocol import (
    Divisor,
    MatrixInputs,
    SelectiveInputs,
    Stabilized,
    check_steps,
    check_values,
    state_dtype,
)
from linattn.recurrence import Read, Write


class Saved(NamedTuple):
    """What a forward keeps for its backward: O(T V) and a few states; None, or an empty tensor, where nothing is."""

    writes: Tensor | None  # [B, T, H, V]: what the low-rank term wrote; or sums of gates
    states: Tensor | None  # [n, H, K, V] or [n, B, H, K, V]


class Grads(NamedTuple):
    """Gradients of the inputs of the same names."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    a: Tensor | None
    b: Tensor | None
    u: Tensor | None
    state: Tensor | None


class Kernel(ABC):
    """The compute of a backend behind the ops; ``ends`` are the checked boundaries of packed sequences, or None.

    ``reads_gates`` False: the values of the gates are not checked, which would wait for the device. ``reads_ends``
    False: ``ends`` is always None, and boundaries are checked once, where they can be.
    """

    reads_gates = True
    reads_ends = True

    @abstractmethod
    def saved_shapes(self, x: MatrixInputs, mode: str) -> tuple[list[int] | None, list[int] | None]:
        """Shapes of :class:`Saved`; None for None."""

    @abstractmethod
    def forward(self, x: MatrixInputs, ends: list[int] | None, mode: str, save: bool) -> tuple[Tensor, Tensor, Saved]:
        """Output, final state, and what the backward keeps when ``save``."""

    @abstractmethod
    def backward(
        self, x: MatrixInputs, ends: list[int] | None, mode: str, saved: Saved, do: Tensor, dS: Tensor | None,
        need_g: bool,
    ) -> Grads:  # fmt: skip
        """Gradients, given those of the output and of the final state (None: zero)."""


class SelectiveGrads(NamedTuple):
    """Gradients of the inputs of the same names."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    state: Tensor


class SelectiveKernel(ABC):
    """The compute of a backend behind the ops of the selective scan; ``ends`` as for :class:`Kernel`.

    ``reads_gates`` False: it finds steps and rates out of range by itself.
    """

    reads_gates = True

    @abstractmethod
    def states_shape(self, x: SelectiveInputs) -> list[int]:
        """Shape of the states that the backward keeps."""

    @abstractmethod
    def forward(
        self, x: SelectiveInputs, ends: list[int] | None, mode: str, save: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output, final state, and the states that the backward keeps when ``save``."""

    @abstractmethod
    def backward(
        self, x: SelectiveInputs, ends: list[int] | None, mode: str, states: Tensor, dy: Tensor, dh: Tensor
    ) -> SelectiveGrads:
        """Gradients, given those of the output and of the final state."""


class DividedKernel(ABC):
    """The compute of a backend behind the ops of a divided output. It does not look at the gates."""

    @abstractmethod
    def forward(self, x: MatrixInputs, by: Divisor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output, sums, final state and final sum of keys."""

    @abstractmethod
    def backward(
        self, x: MatrixInputs, by: Divisor, o: Tensor, s: Tensor, do: Tensor, dS: Tensor | None, dz: Tensor | None,
        need_g: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Gradients of q, k, v, g, the state, weight, z and m, given output and sums, and the gradients of output,
        final state and final sum of keys."""


class StabilizingKernel(ABC):
    """The compute of a backend behind the ops of the running maximum; f, i [B, T, X]."""

    @abstractmethod
    def forward(self, f: Tensor, i: Tensor, m: Tensor | None, cu_seqlens: Tensor | None) -> Stabilized:
        """The results."""

    @abstractmethod
    def backward(
        self, f: Tensor, i: Tensor, m: Tensor | None, cu_seqlens: Tensor | None, maxima: Tensor, rescale: Tensor,
        grads: tuple[Tensor | None, ...],
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Gradients of f, i and m, given the results m and rescale and the gradients of all results."""


KERNELS: dict[str, Kernel] = {}
DIVIDED: dict[str, DividedKernel] = {}
STABILIZERS: dict[str, StabilizingKernel] = {}
SCANS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
"""h_t = decay_t * h_{t-1} + x_t for x, decay [B, T, D] and h_{-1} = state [B, D]."""
SELECTIVE: dict[str, SelectiveKernel] = {}

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? a, Tensor? b, Tensor? u, Tensor? state, "
    "Tensor? cu_seqlens, float scale, str write, str read, str mode, str kernel"
)
_ARITY = 10  # tensors among _INPUTS
_SELECTIVE = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? state, Tensor? cu_seqlens, str mode, str kernel"
)
_DIVIDED = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? state, Tensor? cu_seqlens, Tensor? weight, Tensor? z, Tensor? m, "
    "float scale, float eps, str kernel"
)
_GATES = "Tensor f, Tensor i, Tensor? m, Tensor? cu_seqlens, str kernel"
_WORDS: dict[str, Any] = {word.value: word for words in (Write, Read) for word in words}


def _inputs(args: tuple[Any, ...]) -> tuple[MatrixInputs, str, str]:
    *tensors, scale, write, read, mode, kernel = args
    q, k, v, g, beta, a, b, u, state, cu_seqlens = tensors
    x = MatrixInputs(q, k, v, g, beta, a, b, u, state, cu_seqlens, scale, _WORDS[write], _WORDS[read])
    return x, mode, kernel


def _rows(x: MatrixInputs) -> int:
    return x.v.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1


def state_like(x: MatrixInputs) -> Tensor:
    """An empty tensor [N, H, K, V]."""
    return x.v.new_empty(_rows(x), x.v.shape[2], x.k.shape[-1], x.v.shape[-1], dtype=state_dtype(x.v.dtype))


_HERE = nullcontext()


def _uncast(x: Tensor) -> AbstractContextManager[object]:
    """Autocast off, for torch's operations in kernels."""
    return torch.autocast(x.device.type, enabled=False) if torch._C._is_any_autocast_enabled() else _HERE


def check_boundaries(cu_seqlens: Tensor | None, length: int) -> None:
    """Of packed sequences that a kernel reads by itself: now, unless the call is only recorded in a CUDA graph."""
    if cu_seqlens is not None and not (cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()):
        _checks.boundaries(cu_seqlens, length)


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    x, mode, kernel = _inputs(args[:-1])
    run, ends = KERNELS[kernel], None
    if run.reads_ends:
        ends = check_values(x.g if run.reads_gates else None, x.cu_seqlens, x.v.shape[1])
    else:
        check_boundaries(x.cu_seqlens, x.v.shape[1])
    with _uncast(x.v):
        o, S, saved = run.forward(x, ends, mode, args[-1])
    return o, S, *saved


def _backward(
    do: Tensor, dS: Tensor | None, writes: Tensor | None, states: Tensor | None, *args: Any
) -> tuple[Tensor | None, ...]:
    x, mode, kernel = _inputs(args[:-1])
    run = KERNELS[kernel]
    ends = check_values(None, x.cu_seqlens, x.v.shape[1]) if run.reads_ends else None
    with _uncast(x.v):
        return run.backward(x, ends, mode, Saved(writes, states), do, dS, args[-1])


def _forward_fake(*args: Any) -> tuple[Tensor | None, ...]:
    x, mode, kernel = _inputs(args[:-1])
    shapes = KERNELS[kernel].saved_shapes(x, mode) if args[-1] else (None, None)
    dtype = state_dtype(x.v.dtype)
    saved = (None if shape is None else x.v.new_empty(shape, dtype=dtype) for shape in shapes)
    return x.v.new_empty(x.v.shape), state_like(x), *saved


def _backward_fake(
    do: Tensor, dS: Tensor | None, writes: Tensor | None, states: Tensor | None, *args: Any
) -> tuple[Tensor | None, ...]:
    x, _, _ = _inputs(args[:-1])
    need = (x.q, x.k, x.v, x.g if args[-1] else None, x.beta, x.a, x.b, x.u)
    return *(None if t is None else t.new_empty(t.shape) for t in need), state_like(x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    ctx.save_for_backward(*inputs[:_ARITY], *output[2:])
    ctx.rest = inputs[_ARITY:-1]
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, do: Tensor | None, dS: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    *tensors, writes, states = ctx.saved_tensors
    need = ctx.needs_input_grad
    do = torch.zeros_like(tensors[2]) if do is None else do
    grads = call("matrix_backward", do, dS, writes, states, *tensors, *ctx.rest, need[3])
    wanted = zip(grads, need, tensors, strict=False)
    return (*(grad if need and given is not None else None for grad, need, given in wanted), *(None,) * 7)


def _scan(x: Tensor, decay: Tensor, state: Tensor, kernel: str) -> Tensor:
    return SCANS[kernel](x, decay, state)


def _scan_fake(x: Tensor, decay: Tensor, state: Tensor, kernel: str) -> Tensor:
    return x.new_empty(x.shape)


def _scan_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, decay, state, ctx.kernel = inputs
    ctx.save_for_backward(decay, state, output)


def _scan_gradient(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
    """adj_t = dh_t + decay_{t+1} adj_{t+1}: the same scan from the other end."""
    decay, state, h = ctx.saved_tensors
    late = torch.cat([decay[:, 1:], torch.zeros_like(decay[:, :1])], 1)
    adjoint = torch.ops.linattn.scan(dh.flip(1), late.flip(1), torch.zeros_like(state), ctx.kernel).flip(1)
    before = torch.cat([state.unsqueeze(1), h[:, :-1]], 1)
    return adjoint, adjoint * before, (decay[:, :1] * adjoint[:, :1]).sum(1), None


def _selective_state(x: SelectiveInputs) -> Tensor:
    rows = x.x.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    return x.x.new_empty(rows, *x.A.shape, dtype=state_dtype(x.x.dtype))


def _selective_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, mode, kernel, save = args
    x, run = SelectiveInputs(*tensors), SELECTIVE[kernel]
    ends = check_steps(x) if run.reads_gates else check_values(None, x.cu_seqlens, x.x.shape[1])
    with _uncast(x.x):
        return run.forward(x, ends, mode, save)


def _selective_forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, _, kernel, save = args
    x = SelectiveInputs(*tensors)
    shape = SELECTIVE[kernel].states_shape(x) if save else [0]
    return x.x.new_empty(x.x.shape), _selective_state(x), x.x.new_empty(shape, dtype=state_dtype(x.x.dtype))


def _selective_backward(dy: Tensor, dh: Tensor | None, states: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *tensors, mode, kernel = args
    x = SelectiveInputs(*tensors)
    ends = check_values(None, x.cu_seqlens, x.x.shape[1])
    dh = torch.zeros_like(_selective_state(x)) if dh is None else dh
    with _uncast(x.x):
        return SELECTIVE[kernel].backward(x, ends, mode, states, dy, dh)


def _selective_backward_fake(dy: Tensor, dh: Tensor | None, states: Tensor, *args: Any) -> tuple[Tensor, ...]:
    x = SelectiveInputs(*args[:-2])
    return (*(t.new_empty(t.shape) for t in x[:5]), _selective_state(x))


def _selective_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, mode, kernel, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.rest = mode, kernel
    ctx.set_materialize_grads(False)


def _selective_gradient(ctx: Any, dy: Tensor | None, dh: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    *tensors, states = ctx.saved_tensors
    dy = torch.zeros_like(tensors[0]) if dy is None else dy
    grads = call("selective_backward", dy, dh, states, *tensors, *ctx.rest)
    return (*(grad if need else None for grad, need in zip(grads, ctx.needs_input_grad, strict=False)), *(None,) * 4)


def _divided_inputs(args: tuple[Any, ...]) -> tuple[MatrixInputs, Divisor, str]:
    q, k, v, g, state, cu_seqlens, weight, z, m, scale, eps, kernel = args
    x = MatrixInputs(q, k, v, g, None, None, None, None, state, cu_seqlens, scale, Write.ADDITIVE, Read.AFTER)
    return x, Divisor(weight, z, m, eps), kernel


def _divided_arguments(x: MatrixInputs, by: Divisor) -> tuple[Any, ...]:
    return x.q, x.k, x.v, x.g, x.state, x.cu_seqlens, by.weight, by.z, by.m, x.scale, by.eps


def _divided_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, by, kernel = _divided_inputs(args)
    check_boundaries(x.cu_seqlens, x.v.shape[1])
    with _uncast(x.v):
        return DIVIDED[kernel].forward(x, by)


def _divided_forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, _, _ = _divided_inputs(args)
    S, sums = state_like(x), x.v.new_empty(x.v.shape[:-1], dtype=state_dtype(x.v.dtype))
    return x.v.new_empty(x.v.shape), sums, S, S.new_empty(S.shape[:-1])


def _divided_backward(
    do: Tensor, dS: Tensor | None, dz: Tensor | None, o: Tensor, s: Tensor, *args: Any
) -> tuple[Tensor | None, ...]:
    x, by, kernel = _divided_inputs(args[:-1])
    with _uncast(x.v):
        return DIVIDED[kernel].backward(x, by, o, s, do, dS, dz, args[-1])


def _divided_backward_fake(
    do: Tensor, dS: Tensor | None, dz: Tensor | None, o: Tensor, s: Tensor, *args: Any
) -> tuple[Tensor | None, ...]:
    x, by, _ = _divided_inputs(args[:-1])
    S = state_like(x)
    needed = (x.q, x.k, x.v, x.g if args[-1] else None, S, by.weight, S[..., 0], by.m)
    return tuple(None if t is None else t.new_empty(t.shape) for t in needed)


def _divided_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[:2], *inputs[:-3])
    ctx.rest = inputs[-3:]
    ctx.set_materialize_grads(False)


def _divided_gradient(
    ctx: Any, do: Tensor | None, _: None, dS: Tensor | None, dz: Tensor | None
) -> tuple[Tensor | None, ...]:
    o, s, *tensors = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    need = ctx.needs_input_grad
    found = call("divided_backward", do, dS, dz, o, s, *tensors, *ctx.rest, need[3])
    grads = [*found[:5], None, *found[5:]]
    wanted = zip(grads, need, tensors, strict=False)
    return (*(grad if need and given is not None else None for grad, need, given in wanted), *(None,) * 3)


def _stabilized(*args: Any) -> Stabilized:
    *gates, kernel = args
    check_boundaries(gates[3], gates[1].shape[1])
    return STABILIZERS[kernel].forward(*gates)


def _stabilized_fake(
    f: Tensor, i: Tensor, m: Tensor | None, cu_seqlens: Tensor | None, kernel: str
) -> tuple[Tensor, ...]:
    B, T, X = i.shape
    N, dtype = B if cu_seqlens is None else cu_seqlens.shape[0] - 1, state_dtype(i.dtype)
    shapes = (((B, T, X), dtype),) * 2 + (((B, T, X), torch.float64),) * 2 + (((N, X), dtype), ((N, X), torch.float64))
    return tuple(i.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


def _stabilized_backward(*args: Any) -> tuple[Tensor | None, ...]:
    *grads, maxima, rescale, f, i, m, cu_seqlens, kernel = args
    return STABILIZERS[kernel].backward(f, i, m, cu_seqlens, maxima, rescale, tuple(grads))


def _stabilized_backward_fake(*args: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.new_empty(t.shape) for t in args[8:11])


def _stabilized_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[3], output[5], *inputs[:-1])
    ctx.kernel = inputs[-1]
    ctx.set_materialize_grads(False)


def _stabilized_gradient(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    found = call("stabilized_backward", *grads, *ctx.saved_tensors, ctx.kernel)
    return (*(grad if need else None for grad, need in zip(found, ctx.needs_input_grad, strict=False)), None, None)


define(
    "matrix_forward", f"({_INPUTS}, bool save) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward, _forward_fake, _setup, _gradient,
)  # fmt: skip
define(
    "matrix_backward",
    f"(Tensor do, Tensor? dS, Tensor? writes, Tensor? states, {_INPUTS}, bool need_g) -> "
    f"({', '.join(['Tensor'] * 9)})",
    _backward, _backward_fake,
)  # fmt: skip
define(
    "divided_forward", f"({_DIVIDED}) -> (Tensor, Tensor, Tensor, Tensor)",
    _divided_forward, _divided_forward_fake, _divided_setup, _divided_gradient,
)  # fmt: skip
define(
    "divided_backward",
    f"(Tensor do, Tensor? dS, Tensor? dz, Tensor o, Tensor s, {_DIVIDED}, bool need_g) -> "
    f"({', '.join(['Tensor'] * 8)})",
    _divided_backward, _divided_backward_fake,
)  # fmt: skip
define(
    "stabilized", f"({_GATES}) -> ({', '.join(['Tensor'] * 6)})",
    _stabilized, _stabilized_fake, _stabilized_setup, _stabilized_gradient,
)  # fmt: skip
define(
    "stabilized_backward",
    "(Tensor? dg, Tensor? dj, Tensor? dm_before, Tensor? dm, Tensor? dfinal, Tensor? drescale, "
    f"Tensor maxima, Tensor rescale, {_GATES}) -> (Tensor, Tensor, Tensor)",
    _stabilized_backward, _stabilized_backward_fake,
)  # fmt: skip
define(
    "scan", "(Tensor x, Tensor decay, Tensor state, str kernel) -> Tensor",
    _scan, _scan_fake, _scan_setup, _scan_gradient,
)  # fmt: skip
define(
    "selective_forward", f"({_SELECTIVE}, bool save) -> (Tensor, Tensor, Tensor)",
    _selective_forward, _selective_forward_fake, _selective_setup, _selective_gradient,
)  # fmt: skip
define(
    "selective_backward",
    f"(Tensor dy, Tensor? dh, Tensor states, {_SELECTIVE}) -> ({', '.join(['Tensor'] * 6)})",
    _selective_backward, _selective_backward_fake,
)  # fmt: skip


def matrix(x: MatrixInputs, mode: str, kernel: str) -> tuple[Tensor, Tensor]:
    """Run ``kernel`` on a matrix recurrence."""
    *tensors, scale, write, read = x
    save = differentiable(tensors)
    o, S, _, _ = call("matrix_forward", *tensors, scale, write.value, read.value, mode, kernel, save)
    return o, S


def scan(x: Tensor, g: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, kernel: str) -> tuple[Tensor, Tensor]:
    """Run ``kernel`` on an elementwise recurrence; a packed sequence starts by forgetting the one before."""
    dtype, (B, T, D) = state_dtype(x.dtype), x.shape
    decay, h = g.to(dtype).exp().expand(B, T, D), x.to(dtype)
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    start = x.new_zeros(rows, D, dtype=dtype) if state is None else state.to(dtype)
    if cu_seqlens is None:
        h = torch.ops.linattn.scan(h, decay, start, kernel)
        return h.to(x.dtype), h[:, -1].clone() if T else start
    ends = cu_seqlens.to(torch.int64)
    filled = ends[1:] > ends[:-1]
    # an empty sequence has no first token: its (zero) contribution goes to token 0
    first = torch.where(filled, ends[:-1], 0)
    entering = torch.where(filled[:, None], decay[0].index_select(0, first) * start, 0)
    h = h[0].index_add(0, first, entering)
    fresh = torch.zeros(T, dtype=torch.int64, device=x.device).index_add(0, first, filled.to(torch.int64)) > 0
    decay = torch.where(fresh[:, None], 0, decay[0])
    h = torch.ops.linattn.scan(h.unsqueeze(0), decay.unsqueeze(0), x.new_zeros(1, D, dtype=dtype), kernel)
    final = torch.where(filled[:, None], h[0].index_select(0, (ends[1:] - 1).clamp_min(0)), start)
    return h.to(x.dtype), final


def divided(x: MatrixInputs, by: Divisor, kernel: str) -> tuple[Tensor, Tensor, Tensor]:
    """Run ``kernel`` on a recurrence whose output is divided by its sum of keys, read after the write."""
    o, _, S, z = call("divided_forward", *_divided_arguments(x, by), kernel)
    return o, S, z


def stabilized(f: Tensor, i: Tensor, m: Tensor | None, cu_seqlens: Tensor | None, kernel: str) -> Stabilized:
    """Run ``kernel`` on exponential gates."""
    return Stabilized(*call("stabilized", f, i, m, cu_seqlens, kernel))


def selective(x: SelectiveInputs, mode: str, kernel: str) -> tuple[Tensor, Tensor]:
    """Run ``kernel`` on a selective scan."""
    y, h, _ = call("selective_forward", *x, mode, kernel, differentiable(x))
    return y, h
