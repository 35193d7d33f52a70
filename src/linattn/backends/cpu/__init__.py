"""Compiled kernels for CPUs: the recurrence with its state in registers, forward, backward and one token.

The kernels are C++ (csrc/kernels.cpp, selective.cpp and elementwise.cpp say how they work) in a shared library with a
plain C interface. They run on as many threads as ``torch.get_num_threads()``, parallel over sequences, heads and value
columns (of a selective scan: sequences and channels) and, where those are fewer, over pieces of a long sequence with an
additive write. Memory is O(T (K + V)), of a selective scan O(T (D + N)), and a state for every 64 tokens where a
gradient is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn import _checks
from linattn.backends import _boundary, _fused
from linattn.backends._boundary import KERNELS, SELECTIVE, Grads, Kernel, Saved, state_like
from linattn.backends._protocol import AverageInputs, Backend, MatrixInputs, Request, SelectiveInputs
from linattn.backends.cpu import elementwise, fused
from linattn.backends.cpu.layout import floats, in_large_pages, parts_for, plain, scratch, threads_for, type_of
from linattn.backends.cpu.library import (
    BLOCK,
    TYPES,
    Library,
    LibraryError,
    loaded,
    matrix_problem,
)
from linattn.backends.cpu.selective import Selective
from linattn.recurrence import Mode, Read, Write

_WRITES = {Write.ADDITIVE: 0, Write.DELTA: 1, Write.LOW_RANK: 2}
_DECAYS = {1: 1, 2: 2, 3: 3, 4: 4}  # by the axes of g: [H], [H, K], [B, T, H], [B, T, H, K]


class _Call:
    """A matrix recurrence laid out for the library."""

    def __init__(self, x: MatrixInputs, native: Library) -> None:
        (self.B, self.T, self.H, self.V), self.G, self.K = x.v.shape, x.k.shape[2], x.k.shape[-1]
        self.native = native
        tensors = (x.q, x.k, x.v, x.g, x.beta, x.a, x.b)
        self.q, self.k, self.v, self.g, self.beta, self.a, self.b = (plain(t) for t in tensors)
        if self.a is not None and self.b is not None and self.a.dtype != self.b.dtype:
            self.a, self.b = self.a.float(), self.b.float()
        self.u = None if x.u is None else x.u.float().contiguous()
        self.state = None if x.state is None else x.state.contiguous()
        self.ends = None if x.cu_seqlens is None else x.cu_seqlens.to(torch.int64).contiguous()
        self.rows = self.B if self.ends is None else self.ends.shape[0] - 1
        self.threads = threads_for(self.B * self.T * self.H * self.K * self.V)
        self.parts = parts_for(self.rows * self.H, self.threads, max(1, -(-self.V // native.part)))
        self.write, self.before, self.scale = x.write, x.read is Read.BEFORE, x.scale

    def problem(self, outputs: list[Tensor | None], key_type: int = 0) -> tuple[bytes, Tensor]:
        """The problem, and its scratch, which must outlive the call."""
        inputs = (self.q, self.k, self.v, self.g, self.beta, self.a, self.b, self.u, self.state, self.ends)
        pointers = [0 if t is None else t.data_ptr() for t in (*inputs, *outputs)]
        decay = 0 if self.g is None else _DECAYS[self.g.dim()]
        sizes = [
            self.rows, self.T, self.B * self.T, self.G, self.H, self.K, self.V,
            _WRITES[self.write], self.before, decay,
            type_of(self.v), type_of(self.g), type_of(self.beta), type_of(self.a), key_type, self.parts, self.threads,
        ]  # fmt: skip
        needed = self.native.scratch(matrix_problem([*pointers, 0], sizes, self.scale))
        memory, start = scratch(self.threads, needed)
        return matrix_problem([*pointers, start], sizes, self.scale), memory


def _slots(x: MatrixInputs) -> int:
    """States that a forward keeps: before every BLOCK tokens of every sequence, or room for as many."""
    B, T = x.v.shape[:2]
    return B * (-(-T // BLOCK)) if x.cu_seqlens is None else T // BLOCK + x.cu_seqlens.shape[0] - 1


class _Native(Kernel):
    reads_gates = False  # the library finds gates that are positive or NaN by itself, while it reads them

    def saved_shapes(self, x: MatrixInputs, mode: str) -> tuple[list[int] | None, list[int]]:
        writes = None if x.write is Write.ADDITIVE else list(x.v.shape)
        return writes, [_slots(x), x.v.shape[2], x.k.shape[-1], x.v.shape[-1]]

    def forward(self, x: MatrixInputs, ends: list[int] | None, mode: str, save: bool) -> tuple[Tensor, Tensor, Saved]:
        shapes = self.saved_shapes(x, mode) if save else (None, None)
        saved = Saved(*(None if shape is None else floats(*shape) for shape in shapes))
        return *self.run(x, *saved), saved

    def run(self, x: MatrixInputs, writes: Tensor | None, states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output and final state, and what is to be kept."""
        call = _Call(x, loaded())
        assert call.v is not None
        o = in_large_pages(torch.empty_like(call.v))
        S = floats(call.rows, call.H, call.K, call.V) if call.state is None else torch.empty_like(call.state)
        problem, _scratch = call.problem([o, S, writes, states, *[None] * 11])
        if not call.native.forward(problem):
            _checks.log_decay(x.g)
        return o, S

    def backward(
        self, x: MatrixInputs, ends: list[int] | None, mode: str, saved: Saved, do: Tensor, dS: Tensor | None,
        need_g: bool,
    ) -> Grads:  # fmt: skip
        dS = torch.zeros_like(state_like(x)) if dS is None else dS
        if x.v.numel() == 0 or x.k.numel() == 0:
            needed = (x.q, x.k, x.v, x.g if need_g else None, x.beta, x.a, x.b, x.u)
            return Grads._make([*(None if t is None else torch.zeros_like(t) for t in needed), dS.clone()])
        call = _Call(x, loaded())
        B, T, H, K, rows, parts = call.B, call.T, call.H, call.K, call.rows, call.parts
        do, dS = do.to(x.v.dtype).contiguous(), dS.contiguous()
        alone = parts == 1 and call.G == H  # each number of dq and dk comes from one task
        key_type = x.k.dtype if alone else torch.float32
        dq, dk = (in_large_pages(x.k.new_empty(parts, B, T, H, K, dtype=key_type)) for _ in range(2))
        dv, dstate = in_large_pages(x.v.new_empty(x.v.shape)), floats(rows, H, K, call.V)
        dg = dbeta = da = db = du = None
        if x.g is not None and need_g:
            dg = floats(parts, *([rows] if x.g.dim() < 3 else []), *x.g.shape)
        if x.beta is not None:
            dbeta = floats(parts, *x.beta.shape)
        if x.a is not None:
            da, db = floats(parts, *x.a.shape), floats(parts, *x.a.shape)
        if x.u is not None:
            du = floats(parts, rows, *x.u.shape)
        writes = None if x.write is Write.ADDITIVE else saved.writes
        assert saved.states is not None
        given = [None, None, writes, saved.states.contiguous(), do, dS]
        problem, _scratch = call.problem([*given, dq, dk, dv, dg, dbeta, da, db, du, dstate], TYPES[key_type])
        call.native.backward(problem)

        def total(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
            if grad is None or like is None:
                return None
            if grad.shape[-like.dim() :] != like.shape:  # fewer query/key heads
                grad = grad.unflatten(-2, (like.shape[-2], -1)).sum(-2)
            extra = grad.dim() - like.dim()
            grad = grad.sum(tuple(range(extra))) if grad.shape[:extra].numel() != 1 else grad.reshape(like.shape)
            return grad.to(like.dtype)

        pairs = ((dq, x.q), (dk, x.k), (dv, x.v), (dg, x.g), (dbeta, x.beta), (da, x.a), (db, x.b), (du, x.u))
        return Grads._make([*(total(grad, like) for grad, like in pairs), dstate])


_NATIVE = _Native()


@torch.compiler.assume_constant_result
def _unavailable() -> str | None:
    """Why there is no library to call, or None."""
    try:
        loaded()
    except LibraryError as error:
        return str(error)
    return None


class Cpu(Backend):
    """C++ kernels, float32 inside; float32, bfloat16 and float16 outside."""

    name = "cpu"
    modes = (Mode.CHUNKWISE, Mode.RECURRENT)

    def unavailable(self, device: torch.device) -> str | None:
        return f"it runs on CPUs, not on {device.type!r}" if device.type != "cpu" else _unavailable()

    def unsuited(self, request: Request) -> str | None:
        if request.dtype not in TYPES:
            return f"it computes in float32, not {str(request.dtype).removeprefix('torch.')}"
        if request.mode is Mode.PARALLEL:
            return "it walks along the tokens and has no parallel form"
        return None

    def matrix(self, inputs: MatrixInputs, mode: Mode | None) -> tuple[Tensor, Tensor]:
        x = inputs
        tensors = (x.q, x.k, x.v, x.g, x.beta, x.a, x.b, x.u, x.state)
        if (
            x.v.shape[1] == 1
            and x.cu_seqlens is None
            and _checks.has_values(x.v)  # what is traced keeps the boundary
            and not torch.compiler.is_compiling()
            and not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))
        ):  # generation: no op boundary, which costs more than the token
            return _NATIVE.run(x, None, None)
        return _boundary.matrix(x, (mode or Mode.RECURRENT).value, self.name)

    def scan(
        self, x: Tensor, g: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, mode: Mode | None
    ) -> tuple[Tensor, Tensor]:
        return elementwise.scan(x, g, state, cu_seqlens)

    def average(self, inputs: AverageInputs, mode: Mode | None) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None:
        return elementwise.average(inputs)

    def selective_scan(self, inputs: SelectiveInputs, mode: Mode | None) -> tuple[Tensor, Tensor]:
        if (
            inputs.x.shape[1] == 1
            and inputs.cu_seqlens is None
            and _checks.has_values(inputs.x)
            and not torch.compiler.is_compiling()
            and not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs))
        ):  # as above
            y, h, _ = SELECTIVE[self.name].forward(inputs, None, Mode.RECURRENT.value, False)
            return y, h
        return _boundary.selective(inputs, (mode or Mode.RECURRENT).value, self.name)


KERNELS[Cpu.name] = _NATIVE
SELECTIVE[Cpu.name] = Selective()
_fused.KERNELS["cpu"] = fused.KERNELS
