"""From tensors to launches: which letter plays which part, and how rows are split where there are few."""

from __future__ import annotations

import contextlib
import math
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.backends._boundary import Grads
from linattn.backends._protocol import MatrixInputs, SumInputs
from linattn.backends.triton import kernels
from linattn.backends.triton.table import DIVIDED, settings
from linattn.recurrence import Read, Write

# Bits that channels may decay by within a chunk: the exponents of float32 and bfloat16 reach 126. float32 stays near 1,
# to keep the last digits of the running sum.
LIMIT = {torch.bfloat16: 92.0, torch.float16: 92.0, torch.float32: 24.0}
PRECISION = {torch.bfloat16: "tf32", torch.float16: "tf32", torch.float32: "tf32x3"}
_GPU = torch.cuda.is_available()
CHUNK = 64  # tokens that gates are divided out over
SUMMED = 512  # numbers that the gate's gradient is summed over at once
DIVIDED_AT_ONCE = 256  # tokens of a program that does
# The parts that the tensors play in each sweep: x, y, z, mate; whether the gate's channels are z's; backward in time.
PARTS: dict[str, tuple[tuple[str, str, str, str], bool, bool]] = {
    "o": (("q", "k", "v", "q"), False, False),
    "dv": (("k", "q", "do", "k"), False, True),
    "dq": (("do", "v", "k", "q"), True, False),
    "dk": (("v", "do", "q", "k"), True, True),
}
SHORTEST = 512  # tokens of a segment, at least
JOINED = 1024  # elements of a state that one program joins
WALKED = 8  # tokens of a row that is walked one by one, at most; and where programs are at most two a processor:
WALKED_BY_FEW = 32
BLOCK, WARPS = 32, 4  # channels of v that a program walks, and its warps


_HERE = contextlib.nullcontext()
_compiled: dict[tuple[Any, ...], Any] = {}


def _launch(
    kernel: Any, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...],
    constants: tuple[Any, ...], warps: int, stages: int,
) -> None:  # fmt: skip
    """Launch, by Triton's own way the first time; it looks at every argument, longer than a small kernel runs."""
    device = torch.cuda.current_device() if _GPU else -1
    types: list[torch.dtype | None] = []
    places: list[int | None] = []
    bits = 0
    for t in tensors:
        if t is None:
            types.append(None)
            places.append(None)
        else:
            place = t.data_ptr()
            types.append(t.dtype)
            places.append(place)
            bits |= place
    key = (kernel.fn, device, warps, stages, *constants, *types)
    aligned = bits & 15 == 0
    found = _compiled.get(key) if aligned else None
    if found is None:
        found = kernel[(programs,)](*tensors, *numbers, *constants, num_warps=warps, num_stages=stages)
        if aligned and _GPU:
            _compiled[key] = found
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    found.run(
        programs, 1, 1, stream, found.function, found.packed_metadata, None, None, None, *places, *numbers, *constants
    )


class Rows(NamedTuple):
    """``number`` rows of T tokens, each cut in ``segments`` of ``length``; or what lies between boundaries ``cu``."""

    number: int
    T: int
    length: int
    segments: int
    cu: Tensor | None


class Divided(NamedTuple):
    """What the kernel `divide` writes."""

    q: Tensor
    k: Tensor
    ends: Tensor
    steep: Tensor
    qk: Tensor | None


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _on(x: Tensor) -> contextlib.AbstractContextManager[object]:
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)


def _plain(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _scratch(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


class Sums(NamedTuple):
    """What a sum of keys adds to a call: weights of writes, the sum before, gradients of all sums and of the last."""

    weight: Tensor | None
    z: Tensor | None
    ds: Tensor | None
    dz: Tensor | None


class Call:
    """What the output and the gradients of one call share."""

    def __init__(self, x: MatrixInputs, scale: float, sums: Sums | None = None) -> None:
        self.q, self.k, self.v = x.q.contiguous(), x.k.contiguous(), x.v.contiguous()
        self.g, self.u, self.state = _plain(x.g), _plain(x.u), _plain(x.state)
        self.decay = 0 if self.g is None else self.g.dim()
        self.vector = self.decay in (2, 4)
        self.late = x.read is Read.BEFORE
        self.scale = scale
        (B, T, self.H, self.V), self.K = x.v.shape, x.k.shape[-1]
        self.do: Tensor | None = None
        self.sums = sums
        if x.cu_seqlens is None:
            self.rows = Rows(B, T, T, 1, None) if sums else self._split(B, T)
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

    @cached_property
    def divided(self) -> Divided | None:
        """Queries and keys without their gates, for decays of channels."""
        if not self.vector:
            return None
        B, T = self.v.shape[:2]
        rows = self.rows
        length = T if rows.cu is not None else DIVIDED_AT_ONCE
        segments = 1 if rows.cu is not None else -(-T // length)
        slots = B * -(-T // CHUNK) if rows.cu is None else T // CHUNK + rows.number
        dtype = self.v.dtype if self.v.dtype == torch.bfloat16 else torch.float32
        q, k = (torch.empty(B, T, self.H, self.K, dtype=dtype, device=self.v.device) for _ in range(2))
        ends = _scratch(self.v, slots, self.H, self.K)
        steep = torch.empty(slots, self.H, dtype=torch.int32, device=self.v.device)
        qk = None if self.u is None else _scratch(self.v, B, T, self.H)
        programs = rows.number * segments * self.H
        if programs:
            size = max(16, 1 << (self.K - 1).bit_length())
            tensors = (self.q, self.k, self.g, self.u, rows.cu, q, k, ends, steep, qk)
            constants = (
                self.H, self.q.shape[2], self.K, size, CHUNK, self.decay, self.late, LIMIT[self.v.dtype],
            )  # fmt: skip
            _launch(kernels.divide, programs, tensors, (T, length, segments), constants, 8 if size > 128 else 4, 1)
        return Divided(q, k, ends, steep, qk)

    def sweep(
        self, part: str, init: Tensor | None, *, dS: Tensor | None = None, out: Tensor | None = None,
        final: Tensor | None = None, total: Tensor | None = None, moved: Tensor | None = None,
        rest: Tensor | None = None, own: Tensor | None = None, sums: Tensor | None = None, z: Tensor | None = None,
    ) -> None:  # fmt: skip
        """``part``: o, dv, dq or dk."""
        given = {"q": self.q, "k": self.k, "v": self.v, "do": self.do}
        results = (out, final, total, moved, rest, own, sums, z)
        self._sweep(part, given, self.decay, init, dS, results)
        if self.divided is not None:
            given |= {"q": self.divided.q, "k": self.divided.k}
            self._sweep(part, given, self.decay + DIVIDED, init, dS, results)

    def _sweep(
        self, part: str, given: dict[str, Tensor | None], decay: int, init: Tensor | None, dS: Tensor | None,
        results: tuple[Tensor | None, ...],
    ) -> None:  # fmt: skip
        names, outer, reverse = PARTS[part]
        x, y, z, mate = (given[name] for name in names)
        assert x is not None and z is not None
        rows, DX, DZ, dtype, by = self.rows, x.shape[-1], z.shape[-1], self.v.dtype, self.divided
        s = settings(dtype, decay, outer, DX)
        programs = rows.number * rows.segments * self.H * -(-DZ // s.block)
        if programs:
            stages = s.deep if programs <= _processors(x.device) else s.stages
            divided = (None, None, None) if by is None else (by.ends, by.steep, by.qk)
            mate = None if results[3] is None else mate
            weight = zinit = ds = dz = None
            if self.sums is not None:
                weight = self.sums.weight
                if part != "dv":
                    zinit = self.sums.dz if reverse else self.sums.z
                if outer:
                    ds, dz = self.sums.ds, None if results[4] is None else self.sums.dz
            tensors = (x, y, z, self.g, self.u, mate, rows.cu, init, dS, *divided, weight, ds, zinit, dz, *results)
            constants = (
                self.H, x.shape[2], z.shape[2], DX, DZ, max(64, 1 << (DX - 1).bit_length()), s.block, s.chunk,
                decay, self.late, outer, reverse, LIMIT[dtype], PRECISION[dtype],
            )  # fmt: skip
            numbers = (self.scale, rows.T, rows.length, rows.segments)
            _launch(kernels.sweep, programs, tensors, numbers, constants, s.warps, stages)

    def blocks(self) -> int:
        """Programs of the sweep of dq that share a row."""
        return -(-self.K // settings(self.v.dtype, self.decay, True, self.V).block)

    def gate_gradient(
        self, dq: Tensor, dk: Tensor, moved: Tensor | None, rest: Tensor | None, own: Tensor | None, need_g: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the gate and of the bonus; ``moved``: what the sweeps of dq and dk left of decays of heads."""
        g, rows = self.g, self.rows
        number, fixed = rows.number * rows.segments, self.decay in (1, 2)
        dg = None if g is None or not need_g else _scratch(g, number, *g.shape) if fixed else torch.empty_like(g)
        du = None if self.u is None else _scratch(self.v, number, self.H, self.K)
        size = max(16, 1 << (self.K - 1).bit_length())
        block = min(size, 64) if self.vector or self.decay == 0 else size
        programs = number * self.H * -(-self.K // block)
        if programs and not (dg is None and du is None):
            read, written = (None, None) if moved is None else moved
            weight = None if self.sums is None else self.sums.weight
            tensors = (self.q, self.k, dq, dk, read, written, weight, g, self.u, own, rest, rows.cu, dg, du)
            numbers = (self.scale, rows.T, rows.length, rows.segments, math.log(torch.finfo(self.v.dtype).eps))
            parts = 1 if self.vector else self.blocks()
            chunk = CHUNK if moved is None else SUMMED
            constants = (self.H, self.q.shape[2], self.K, block, chunk, self.decay, self.late, parts)
            _launch(kernels.gate_gradient, programs, tensors, numbers, constants, 4, 3)
        if dg is not None and g is not None and fixed:
            dg = dg.sum(0).to(g.dtype)
        return dg, None if du is None or self.u is None else du.sum(0).to(self.u.dtype)

    def starts(self, part: str, init: Tensor | None) -> Tensor | None:
        """State that each row or segment of a sweep (o, dv) starts from, given the one of each row."""
        rows = self.rows
        if rows.segments == 1:
            return init
        parts, states = self.states(), self.states()
        per = (self.K,) if self.vector else ()
        total = _scratch(self.v, rows.number * rows.segments, self.H, *per)
        self.sweep(part, None, final=parts, total=total)
        programs = rows.number * self.H * -(-self.K * self.V // JOINED)
        constants = (self.H, self.K, self.V, self.vector, PARTS[part][2], JOINED)
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
        c.sweep("o", c.starts("o", c.state), out=o, final=final)
        return o, c.outermost(final, -1)


def backward(x: MatrixInputs, do: Tensor, dS: Tensor | None, need_g: bool, need_state: bool = True) -> Grads:
    """Gradients, given those of the output and of the final state (None: zero)."""
    with _on(x.v):
        c = Call(x, x.scale or 1.0)
        c.do = (do if x.scale else torch.zeros_like(do)).contiguous()
        first = c.states() if need_state else None
        dq, dk, dv, dg, du, _ = _gradients(c, _plain(dS), need_g, first, None)
        return Grads(dq, dk, dv, dg, None, None, None, du, None if first is None else c.outermost(first, 0))  # type: ignore[arg-type]


def _gradients(
    c: Call, dS: Tensor | None, need_g: bool, first: Tensor | None, first_z: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Of q, k, v, g, u and the weight; those of the states before are written to ``first`` and ``first_z``."""
    rows, tokens = c.rows, c.v.shape[:2]
    S, dS_ends = c.starts("o", c.state), c.starts("dv", dS)
    dv = torch.empty_like(c.v)
    c.sweep("dv", dS_ends, out=dv, final=first)

    dq, dk = (torch.empty(*tokens, c.H, c.K, dtype=c.v.dtype, device=c.v.device) for _ in range(2))
    own = None if c.u is None else _scratch(c.v, *tokens, c.H)
    rest = moved = None
    if need_g and dS_ends is not None:
        rest = _scratch(c.v, rows.number * rows.segments, c.H, c.K if c.vector else c.blocks())
    weighed = c.sums is not None and c.sums.weight is not None
    if (need_g or weighed) and not c.vector and c.u is None:
        moved = _scratch(c.v, 2, c.blocks(), *tokens, c.H)
    read, written = (None, None) if moved is None else moved
    c.sweep("dq", S, dS=None if rest is None else dS_ends, out=dq, moved=read if need_g else None, rest=rest, own=own)
    c.sweep("dk", dS_ends, out=dk, moved=written, z=first_z)
    dg, du = c.gate_gradient(dq, dk, moved, rest, own, need_g)
    dq, dk = (_grouped(t, c.q.shape[2]) for t in (dq, dk))
    return dq, dk, dv, dg, du, written.sum(0) if weighed and written is not None else None


def _call_of(x: SumInputs, scale: float) -> Call:
    matrix = MatrixInputs(
        x.q, x.k, x.v, x.g, None, None, None, None, x.S, x.cu_seqlens, x.scale, Write.ADDITIVE, Read.AFTER
    )
    return Call(matrix, scale, Sums(_plain(x.weight), _plain(x.z), None, None))


def forward_sums(x: SumInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, sums, final state and final sum of keys."""
    with _on(x.v):
        c = _call_of(x, x.scale)
        o, S = torch.empty_like(c.v), c.states()
        s, z = _scratch(c.v, *x.v.shape[:-1]), _scratch(c.v, c.rows.number, c.H, c.K)
        c.sweep("o", c.state, out=o, final=S, sums=s, z=z)
        return o, s, S, z


def backward_sums(
    x: SumInputs, do: Tensor, ds: Tensor, dS: Tensor | None, dz: Tensor | None, need_g: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, g, weight, S and z, given those of the output, the sums, the last S and the last z."""
    with _on(x.v):
        c = _call_of(x, x.scale or 1.0)
        assert c.sums is not None
        first, first_z = c.states(), _scratch(c.v, c.rows.number, c.H, c.K)
        if dS is not None or dz is not None:
            dS = torch.zeros_like(first) if dS is None else dS.contiguous()
            dz = torch.zeros_like(first_z) if dz is None else dz.contiguous()
        do, ds = (t if x.scale else torch.zeros_like(t) for t in (do, ds))
        c.do, c.sums = do.contiguous(), c.sums._replace(ds=ds.contiguous(), dz=dz)
        dq, dk, dv, dg, _, dw = _gradients(c, dS, need_g, first, first_z)
        return dq, dk, dv, dg, dw, first, first_z


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[B, T, H, K] summed over the value heads that share a query/key head."""
    return x if x.shape[2] == groups else x.unflatten(2, (groups, -1)).sum(3, dtype=x.dtype)


def walks(x: MatrixInputs | SumInputs) -> bool:
    """Whether rows are short enough to be walked token by token; with gates of channels, if few, longer ones too."""
    T = x.v.shape[1]
    channels = x.g is not None and x.g.dim() in (2, 4)
    if T <= WALKED or T > WALKED_BY_FEW or not channels:
        return T <= WALKED
    H, V = x.v.shape[2:]
    rows = x.v.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    return rows * H * -(-V // BLOCK) <= 2 * _processors(x.v.device)


def tokens(x: MatrixInputs) -> tuple[Tensor, Tensor]:
    """Output and final state of rows that are walked token by token."""
    q, k, v, g, *_, u, S, cu, scale, _, read = x
    o, _, S, _ = _walk(q, k, v, g, u, None, S, None, cu, scale, late=read is Read.BEFORE, summed=False)
    return o, S


def token_sums(x: SumInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`forward_sums` of rows that are walked token by token."""
    q, k, v, g, w, S, z, cu, scale = x
    o, s, S, z = _walk(q, k, v, g, None, w, S, z, cu, scale, late=False, summed=True)
    assert s is not None and z is not None
    return o, s, S, z


def _walk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, u: Tensor | None, w: Tensor | None, S: Tensor | None,
    z: Tensor | None, cu: Tensor | None, scale: float, *, late: bool, summed: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """Output, sums, final state and final sum of keys."""
    (N, T, H, V), (G, K) = v.shape, k.shape[2:]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    g, u, w, S, z, cu = _plain(g), _plain(u), _plain(w), _plain(S), _plain(z), _plain(cu)
    if cu is not None:
        N = cu.shape[0] - 1
    with _on(v):
        out, final = torch.empty_like(v), _scratch(v, N, H, K, V) if S is None else torch.empty_like(S)
        sums, last = (_scratch(v, *v.shape[:3]), _scratch(v, N, H, K)) if summed else (None, None)
        block = min(BLOCK, max(16, 1 << (V - 1).bit_length()))
        programs = N * H * -(-V // block)
        if programs:
            constants = (H, G, K, V, max(16, 1 << (K - 1).bit_length()), block, 0 if g is None else g.dim(), late)
            tensors = (q, k, v, g, u, w, cu, S, z, out, sums, final, last)
            _launch(kernels.tokens, programs, tensors, (scale, T), constants, WARPS, 1)
    return out, sums, final, last
