"""From tensors to launches: which letter plays which part, and how rows are split where there are few."""

from __future__ import annotations

import contextlib
import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.backends._boundary import Grads
from linattn.backends._protocol import MatrixInputs
from linattn.backends.triton import kernels
from linattn.backends.triton.table import settings
from linattn.recurrence import Read

# Bits that channels may decay by within a chunk: the exponents of float32 and bfloat16 reach 126. float32 stays near 1,
# to keep the last digits of the running sum.
LIMIT = {torch.bfloat16: 92.0, torch.float16: 92.0, torch.float32: 24.0}
PRECISION = {torch.bfloat16: "tf32", torch.float16: "tf32", torch.float32: "tf32x3"}
_GPU = torch.cuda.is_available()
SHORTEST = 512  # tokens of a segment, at least
JOINED = 1024  # elements of a state that one program joins


_compiled: dict[tuple[Any, ...], Any] = {}


def _launch(
    kernel: Any, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...],
    constants: tuple[Any, ...], warps: int, stages: int,
) -> None:  # fmt: skip
    """Launch, by Triton's own way the first time; it looks at every argument, longer than a small kernel runs."""
    key: tuple[Any, ...] = (kernel, constants, warps, stages, torch.cuda.current_device() if _GPU else -1)
    for t in tensors:
        if t is None:
            key += (None,)
        elif t.data_ptr() & 15:
            key = ()
            break
        else:
            key += (t.dtype,)
    arguments = (*tensors, *numbers, *constants)
    found = _compiled.get(key) if key else None
    if found is None:
        found = kernel[(programs,)](*arguments, num_warps=warps, num_stages=stages)
        if key and _GPU:
            _compiled[key] = found
        return
    stream = torch._C._cuda_getCurrentRawStream(key[4])
    found.run(programs, 1, 1, stream, found.function, found.packed_metadata, None, None, None, *arguments)


class Rows(NamedTuple):
    """``number`` rows of T tokens, each cut in ``segments`` of ``length``; or what lies between boundaries ``cu``."""

    number: int
    T: int
    length: int
    segments: int
    cu: Tensor | None


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _on(x: Tensor) -> contextlib.AbstractContextManager[object]:
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def _scratch(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


class Call:
    """What the output and the gradients of one call share."""

    def __init__(self, x: MatrixInputs, scale: float) -> None:
        self.q, self.k, self.v = x.q.contiguous(), x.k.contiguous(), x.v.contiguous()
        self.g = None if x.g is None else x.g.contiguous()
        self.u = None if x.u is None else x.u.contiguous()
        self.state = None if x.state is None else x.state.contiguous()
        self.decay = 0 if self.g is None else self.g.dim()
        self.vector = self.decay in (2, 4)
        self.late = x.read is Read.BEFORE
        self.scale = scale
        (B, T, self.H, self.V), self.K = x.v.shape, x.k.shape[-1]
        if x.cu_seqlens is None:
            self.rows = self._split(B, T)
        else:
            self.rows = Rows(x.cu_seqlens.shape[0] - 1, T, T, 1, x.cu_seqlens.contiguous())

    def _split(self, B: int, T: int) -> Rows:
        """Few heads would leave processors idle: cut the rows until there are two programs a processor."""
        programs = B * self.H * -(-min(self.K, self.V) // 64)
        wanted = min(2 * _processors(self.v.device) // max(programs, 1), T // SHORTEST)
        length = -(-T // max(wanted, 1))
        length = -(-length // 64) * 64
        segments = -(-T // length) if T else 1
        return Rows(B, T, T, 1, None) if segments < 3 else Rows(B, T, length, segments, None)

    def states(self) -> Tensor:
        return _scratch(self.v, self.rows.number * self.rows.segments, self.H, self.K, self.V)

    def gate_scratch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where the sweeps of dq and dk leave the parts of the gate's gradient: moved, rest, dg."""
        assert self.g is not None
        blocks = -(-self.K // settings(self.v.dtype, self.decay, True, self.V).block)
        moved = _scratch(self.v, *self.v.shape[:2], self.H, self.K) if self.vector else None
        if moved is None:
            moved = _scratch(self.v, blocks, *self.v.shape[:2], self.H)
        rest = _scratch(self.v, self.rows.number * self.rows.segments, self.H, self.K if self.vector else blocks)
        if self.decay in (1, 2):
            return moved, rest, torch.empty_like(rest)
        return moved, rest, torch.empty_like(self.g if self.vector else moved)

    def sweep(
        self, x: Tensor, y: Tensor, z: Tensor, init: Tensor | None, *, outer: bool, reverse: bool,
        mate: Tensor | None = None, dS: Tensor | None = None, out: Tensor | None = None, final: Tensor | None = None,
        total: Tensor | None = None, moved: Tensor | None = None, rest: Tensor | None = None, dg: Tensor | None = None,
        du: Tensor | None = None,
    ) -> None:  # fmt: skip
        rows, DX, DZ = self.rows, x.shape[-1], z.shape[-1]
        s = settings(x.dtype, self.decay, outer, DX)
        programs = rows.number * rows.segments * self.H * -(-DZ // s.block)
        if programs:
            tensors = (x, y, z, self.g, self.u, mate, rows.cu, init, dS, out, final, total, moved, rest, dg, du)
            constants = (
                self.H, x.shape[2], z.shape[2], DX, DZ, max(64, 1 << (DX - 1).bit_length()), s.block, s.chunk,
                self.decay, self.late, outer, reverse, LIMIT[x.dtype], PRECISION[x.dtype],
            )  # fmt: skip
            numbers = (self.scale, rows.T, rows.length, rows.segments)
            _launch(kernels.sweep, programs, tensors, numbers, constants, s.warps, s.stages)

    def starts(self, x: Tensor, y: Tensor, z: Tensor, init: Tensor | None, *, reverse: bool) -> Tensor | None:
        """State that each row or segment starts from, given the one of each row."""
        rows = self.rows
        if rows.segments == 1:
            return init
        parts, states = self.states(), self.states()
        per = (self.K,) if self.vector else ()
        total = _scratch(self.v, rows.number * rows.segments, self.H, *per)
        self.sweep(x, y, z, None, outer=False, reverse=reverse, final=parts, total=total)
        programs = rows.number * self.H * -(-self.K * self.V // JOINED)
        constants = (self.H, self.K, self.V, self.vector, reverse, JOINED)
        _launch(kernels.join, programs, (total, init, parts, states), (rows.segments,), constants, 4, 1)
        return states

    def outermost(self, states: Tensor, at: int) -> Tensor:
        """Of a state for each segment, that of each row's first (0) or last (-1)."""
        if self.rows.segments == 1:
            return states
        return states.unflatten(0, (self.rows.number, self.rows.segments))[:, at].contiguous()


def forward(x: MatrixInputs) -> tuple[Tensor, Tensor]:
    """Output and final state."""
    with _on(x.v):
        c = Call(x, x.scale)
        o, final = torch.empty_like(c.v), c.states()
        start = c.starts(c.q, c.k, c.v, c.state, reverse=False)
        c.sweep(c.q, c.k, c.v, start, outer=False, reverse=False, out=o, final=final)
        return o, c.outermost(final, -1)


def backward(x: MatrixInputs, do: Tensor, dS: Tensor | None, need_g: bool, need_state: bool = True) -> Grads:
    """Gradients, given those of the output and of the final state (None: zero)."""
    with _on(x.v):
        c = Call(x, x.scale or 1.0)
        do = (do if x.scale else torch.zeros_like(do)).contiguous()
        rows = c.rows
        S = c.starts(c.q, c.k, c.v, c.state, reverse=False)
        dS_ends = c.starts(c.k, c.q, do, None if dS is None else dS.contiguous(), reverse=True)
        dv, first = torch.empty_like(c.v), c.states() if need_state else None
        c.sweep(c.k, c.q, do, dS_ends, outer=False, reverse=True, out=dv, final=first)

        dq, dk = (torch.empty(*x.v.shape[:2], c.H, c.K, dtype=c.v.dtype, device=c.v.device) for _ in range(2))
        moved, rest, dg = c.gate_scratch() if need_g else (None, None, None)
        du = None
        if c.u is not None:
            du = _scratch(c.v, rows.number * rows.segments, c.H, c.K)
        end = rest
        if rest is not None and dS_ends is None:
            rest.zero_()
            end = None
        c.sweep(
            do, c.v, c.k, S, outer=True, reverse=False, mate=c.q, dS=dS_ends if need_g else None, out=dq,
            moved=moved, rest=end, du=du,
        )  # fmt: skip
        c.sweep(c.v, do, c.q, dS_ends, outer=True, reverse=True, mate=c.k, out=dk, moved=moved, rest=rest, dg=dg)

        if dg is not None and c.decay != 4:  # partial sums: over sequences, over blocks of channels
            assert c.g is not None
            dg = dg.sum((0, 2) if c.decay == 1 else 0).to(c.g.dtype)
        if dg is not None:  # smaller than what rounding left in the difference, and to be multiplied by its logarithm
            assert c.g is not None
            dg = dg.masked_fill(torch.lt(c.g, math.log(torch.finfo(c.v.dtype).eps)), 0)
        if du is not None:
            assert c.u is not None
            du = du.sum(0).to(c.u.dtype)
        dq, dk = (_grouped(t, x.q.shape[2]) for t in (dq, dk))
        return Grads(dq, dk, dv, dg, None, None, None, du, None if first is None else c.outermost(first, 0))  # type: ignore[arg-type]


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[B, T, H, K] summed over the value heads that share a query/key head."""
    return x if x.shape[2] == groups else x.unflatten(2, (groups, -1)).sum(3, dtype=x.dtype)


def token(x: MatrixInputs) -> tuple[Tensor, Tensor]:
    """Output and new state of rows of one token."""
    with _on(x.v):
        (B, _, H, V), K = x.v.shape, x.k.shape[-1]
        out, final = torch.empty_like(x.v, memory_format=torch.contiguous_format), _scratch(x.v, B, H, K, V)
        block = min(32, max(16, 1 << (V - 1).bit_length()))
        programs = B * H * -(-V // block)
        q, k, v, g, u, state = (None if t is None else t.contiguous() for t in (x.q, x.k, x.v, x.g, x.u, x.state))
        if programs:
            constants = (
                H, x.q.shape[2], K, V, max(16, 1 << (K - 1).bit_length()), block,
                0 if g is None else g.dim(), x.read is Read.BEFORE,
            )  # fmt: skip
            _launch(kernels.token, programs, (q, k, v, g, u, state, out, final), (x.scale,), constants, 4, 1)
        return out, final
