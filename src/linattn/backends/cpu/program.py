"""A model's step for one token as a tape of small operations that the library walks in one call (csrc/decode.cpp).

A :class:`Builder` is told the operations in order, each on values: places in memory with a shape and strides.
``finish`` gives a :class:`Program`, in which results share memory when their times do not overlap; it holds the weights
and may have many sessions, each with memory of its own: the slots (inputs, outputs, states) and the arena.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.backends.cpu.library import (
    AXES,
    Library,
    address,
    instruction,
    loaded,
    matrix_problem,
    program_problem,
    selective_problem,
)

FLOAT32, FLOAT64, INT64, BOOL, BFLOAT16, FLOAT16 = range(6)  # kinds of numbers; the last two of constants alone
STORED = (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.float16)
KINDS = {dtype: kind for kind, dtype in enumerate(STORED)} | {torch.int32: INT64}
WEIGHTS = ("float32", "bfloat16", "int8")
_MAP, _FOLD, _PICK, _PRODUCT, _LINEAR, _MATRIX, _SELECTIVE = range(7)
_FOLDS = ("sum", "amax", "amin", "cumsum")
_STEP = 64  # numbers that rows of int8 weights are a multiple of, as in decode.cpp
_ROOM = 1 << 15  # bytes of scratch for some rows of weights as float32, as decode.cpp's DEEP and HIGH have it
_HUGE = 1 << 21  # bytes of a huge page
_COLLAPSE = 25  # Linux's MADV_COLLAPSE, which the mmap module does not name yet
SHARED = 1 << 14  # work, in simple operations, from which on all threads share an instruction
_COST = {"exp": 2, "sigmoid": 3, "silu": 3, "softplus": 5, "log_sigmoid": 5, "sqrt": 2, "rsqrt": 2, "div": 2}
_SCALAR = {"gelu", "gelu_tanh", "expm1", "log", "log1p", "tanh", "sin", "cos", "pow", "logaddexp", "round", "floor_div"}


class Unsupported(Exception):
    """What a program can't do."""


@dataclass(eq=False)
class Memory:
    """Where values lie: the arena, a constant ``tensor``, or a ``slot`` of the session."""

    bytes: int
    tensor: Tensor | None = None
    slot: int | None = None


class Value(NamedTuple):
    """Numbers of a kind in memory; strides and offset in elements."""

    memory: Memory
    kind: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return STORED[self.kind].itemsize

    def expand(self, shape: Sequence[int]) -> Value:
        """The same broadcast to ``shape``."""
        missing = len(shape) - len(self.shape)
        own = zip(self.shape, self.strides, strict=True)
        return self._replace(shape=tuple(shape), strides=(0,) * missing + tuple(0 if n == 1 else s for n, s in own))


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Packed(NamedTuple):
    """A weight [O, K] as the library reads it: rows ``stride`` bytes apart, and for int8 their scales."""

    weight: Tensor
    stride: int
    scales: Tensor | None = None
    largest: int = 0  # int16 that no sum overflows with


def _room(size: int) -> Tensor:
    """Bytes, on huge pages where the system has them: a walk through all weights misses the address cache less."""
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def settle(weight: Tensor) -> None:
    """Move a weight to huge pages where it lies, as far as the system lets us; its address and numbers stay."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    first, last = -(-weight.data_ptr() // _HUGE), (weight.data_ptr() + weight.nbytes) // _HUGE
    if last > first:
        where = (ctypes.c_void_p(first * _HUGE), ctypes.c_size_t((last - first) * _HUGE))
        advise = ctypes.CDLL(None).madvise
        for advice in (mmap.MADV_HUGEPAGE, _COLLAPSE):  # a refusal changes nothing
            advise(*where, advice)


def pack(weight: Tensor, weights: str, unit: int) -> Packed:
    """``weight`` [O, K] in one of the WEIGHTS; where it lies, if it has that dtype and rows that the library can read.

    ``unit``: numbers that rows of bfloat16 must be a multiple of. int8 is w ≈ scale · q, q = round(w / scale), with
    scale = max|w| / 127 of each row.
    """
    weight = weight.detach()
    outputs, inputs = weight.shape
    if weights == "int8":
        width = -(-inputs // _STEP) * _STEP
        packed = _room(outputs * width).view(torch.int8).view(outputs, width)
        scales, largest = torch.empty(outputs), 1
        for begin in range(0, outputs, 1024):
            rows = slice(begin, begin + 1024)
            w = weight[rows].float()
            scales[rows] = w.abs().amax(1) / 127
            q = (w / scales[rows, None].clamp_min(torch.finfo(torch.float32).tiny)).round_()
            largest = max(largest, int(q.abs().sum(1, dtype=torch.int64).amax()))
            packed[rows, inputs:] = 0
            packed[rows, :inputs] = q
        return Packed(packed, width, scales, min(32767, (2**31 - 1) // largest))
    dtype = getattr(torch, weights)
    width = -(-inputs // unit) * unit
    if weight.dtype == dtype and weight.stride(1) == 1 and width == inputs:
        return Packed(weight, weight.stride(0) * dtype.itemsize)
    packed = _room(outputs * width * dtype.itemsize).view(dtype).view(outputs, width)
    packed[:, inputs:] = 0
    packed[:, :inputs] = weight
    return Packed(packed, width * dtype.itemsize)


class _Operand(NamedTuple):
    memory: Memory
    offset: int  # bytes
    item: int
    strides: tuple[int, ...]  # bytes


@dataclass
class _Step:
    """An instruction whose operands have no addresses yet; the result comes first."""

    kind: int
    sizes: tuple[int, ...]
    operands: list[_Operand | None]
    code: int = 0
    type: int = 0
    axes: int = 0
    picked: tuple[int, int, int, int] = (0, 0, 0, 0)
    number: float = 1.0
    work: int = 0
    scratch: int = 0  # bytes a thread
    problem: tuple[list[Value | None], list[int], float] | None = None
    written: int = 1  # of the problem's pointers, the last so many are results
    wait: bool = False

    @property
    def parallel(self) -> bool:
        return self.work >= SHARED

    def touched(self) -> list[tuple[Memory, bool]]:
        """The memory that is read, or written (True)."""
        if self.problem is not None:
            pointers = self.problem[0]
            last = len(pointers) - self.written
            return [(v.memory, at >= last) for at, v in enumerate(pointers) if v is not None]
        return [(o.memory, at == 0) for at, o in enumerate(self.operands) if o is not None]


def _operand(value: Value, strides: Sequence[int] | None = None) -> _Operand:
    item = value.item
    chosen = value.strides if strides is None else strides
    return _Operand(value.memory, value.offset * item, item, tuple(s * item for s in chosen))


def _merged(sizes: Sequence[int], table: Sequence[Sequence[int]], axes: int) -> tuple[list[int], list[list[int]], int]:
    """Neighbouring axes as one where every operand allows it; the first ``axes`` and the others apart."""
    out: list[int] = []
    rows: list[list[int]] = [[] for _ in table]
    kept = 0
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        first = len(out) == (0 if axis < axes else kept)
        if not first and all(row[-1] == strides[axis] * size for row, strides in zip(rows, table, strict=True)):
            out[-1] *= size
            for row, strides in zip(rows, table, strict=True):
                row[-1] = strides[axis]
        else:
            out.append(size)
            for row, strides in zip(rows, table, strict=True):
                row.append(strides[axis])
        if axis < axes:
            kept = len(out)
    return out, rows, kept


class Builder:
    """Takes down operations; nothing is computed yet."""

    def __init__(self, weights: str = "float32", packed: dict[Any, Packed] | None = None) -> None:
        self.native = loaded()
        self.weights = weights
        self.packed: dict[Any, Packed] = {} if packed is None else packed
        self.steps: list[_Step] = []
        self.slots: list[Memory] = []

    # ---- values

    def constant(self, tensor: Tensor) -> Value:
        """A tensor that stays as it is: its numbers are read where they lie."""
        tensor = tensor.detach()
        if tensor.dtype == torch.int32:
            tensor = tensor.long()
        kind = self.kind(tensor.dtype)
        return Value(Memory(tensor.nbytes, tensor), kind, tuple(tensor.shape), tensor.stride())

    def number(self, value: float | int | bool, kind: int) -> Value:
        """A constant of one element."""
        return self.constant(torch.tensor(value, dtype=STORED[kind]))

    def slot(self, kind: int, shape: Sequence[int]) -> Value:
        """Memory that every session has."""
        memory = Memory(math.prod(shape) * STORED[kind].itemsize, slot=len(self.slots))
        self.slots.append(memory)
        return Value(memory, kind, tuple(shape), dense(shape))

    def room(self, kind: int, shape: Sequence[int], strides: Sequence[int] | None = None) -> Value:
        """Memory for a result."""
        strides = dense(shape) if strides is None else tuple(strides)
        count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if math.prod(shape) else 0
        return Value(Memory(count * STORED[kind].itemsize), kind, tuple(shape), strides)

    def kind(self, dtype: torch.dtype) -> int:
        """The kind of numbers that stand for a dtype. Raises Unsupported for one that none does."""
        if dtype not in KINDS:
            raise Unsupported(f"numbers of dtype {str(dtype).removeprefix('torch.')}")
        return KINDS[dtype]

    # ---- operations

    def map(self, name: str, result: Value, *operands: Value) -> Value:
        """result = name(operands), element by element; they are broadcast to it and of one kind (but for ``where``)."""
        if not math.prod(result.shape):
            return result
        kind = result.kind if name.startswith("from_") else operands[-1].kind
        code = self.native.operation(name, kind)
        if code < 0:
            raise Unsupported(f"{name} of {STORED[kind]}")
        order = sorted(range(len(result.shape)), key=lambda axis: -result.strides[axis])
        values = [result, *(value.expand(result.shape) for value in operands)]
        table = [[value.strides[axis] for axis in order] for value in values]
        sizes, rows, _ = _merged([result.shape[axis] for axis in order], table, 0)
        if not sizes:
            sizes, rows = [1], [[1] for _ in values]
        cost = 20 if name in _SCALAR else _COST.get(name, 1)
        self._add(
            _MAP, sizes, [_operand(v, s) for v, s in zip(values, rows, strict=True)],
            code=code, type=kind, work=cost * math.prod(sizes),
        )  # fmt: skip
        return result

    def copy(self, value: Value, result: Value) -> Value:
        """The same numbers elsewhere, perhaps of another kind."""
        return self.map(f"from_{str(STORED[value.kind]).removeprefix('torch.')}", result, value)

    def cast(self, value: Value, kind: int) -> Value:
        """As numbers of another kind."""
        return value if value.kind == kind else self.copy(value, self.room(kind, value.shape))

    def contiguous(self, value: Value) -> Value:
        """Without gaps, in float32."""
        own = [s for n, s in zip(value.shape, value.strides, strict=True) if n != 1]
        wanted = [s for n, s in zip(value.shape, dense(value.shape), strict=True) if n != 1]
        if value.kind == FLOAT32 and own == wanted:
            return value._replace(strides=dense(value.shape))
        return self.copy(value, self.room(FLOAT32, value.shape))

    def fold(self, name: str, result: Value, operand: Value, axes: Sequence[int], scale: float = 1.0) -> Value:
        """result = scale · name over ``axes`` of the operand; result has them too, with length 1 (cumsum: whole)."""
        if not math.prod(operand.shape):
            raise Unsupported(f"{name} of nothing")
        outer = [axis for axis in range(len(operand.shape)) if axis not in axes]
        order = [*outer, *axes]
        kept = name == "cumsum"
        result_strides = [s if axis in outer or kept else 0 for axis, s in enumerate(result.strides)]
        table = [[strides[axis] for axis in order] for strides in (result_strides, operand.strides)]
        sizes, rows, count = _merged([operand.shape[axis] for axis in order], table, len(outer))
        if count == len(sizes):
            sizes, rows = [*sizes, 1], [[*row, operand_item] for row, operand_item in zip(rows, (0, 1), strict=True)]
        self._add(
            _FOLD, sizes, [_operand(result, rows[0]), _operand(operand, rows[1])],
            code=_FOLDS.index(name), type=operand.kind, axes=count, number=scale, work=math.prod(sizes),
        )  # fmt: skip
        return result

    def pick(self, result: Value, source: Value, index: dict[int, Value]) -> Value:
        """result[i…] = source with its axes in ``index`` at these indices, broadcast to the result; the rest as in it.

        ``source`` has as many axes as the result; what it has along an axis of ``index`` is reached by the index alone.
        """
        if len(index) > 2:
            raise Unsupported("indexing by more than two tensors")
        if not math.prod(result.shape):
            return result
        own = enumerate(zip(source.shape, source.strides, strict=True))
        strides = [0 if axis in index or n == 1 else s for axis, (n, s) in own]
        values = [value.expand(result.shape) for value in index.values()]
        table = [result.strides, strides, *(value.strides for value in values)]
        sizes, rows, _ = _merged(result.shape, table, 0)
        if not sizes:
            sizes, rows = [1], [[0] for _ in table]
        pairs = [(source.shape[axis], source.strides[axis] * source.item) for axis in index] + [(0, 0)]
        self._add(
            _PICK, sizes,
            [_operand(result, rows[0]), _operand(source, rows[1]), *map(_operand, values, rows[2:])],
            picked=(*pairs[0], *pairs[1]), work=math.prod(sizes),
        )  # fmt: skip
        return result

    def product(self, result: Value, a: Value, b: Value) -> Value:
        """result [B, i, j] = Σ_k a [B, i, k] b [B, k, j]."""
        batch, rows, inner = a.shape
        columns = b.shape[2]
        self._add(
            _PRODUCT, (batch, rows, columns, inner),
            [
                _operand(result, (*result.strides, 0)),
                _operand(a, (*a.strides[:2], 0, a.strides[2])),
                _operand(b, (b.strides[0], 0, b.strides[2], b.strides[1])),
            ],
            work=batch * rows * columns * inner,
        )  # fmt: skip
        return result

    def linear(self, result: Value, x: Value, weight: Tensor) -> Value:
        """result [M, O] = x [M, K] · weightᵀ, weight [O, K] in this program's format; result without gaps in a row."""
        key = (weight.data_ptr(), weight.dtype, tuple(weight.shape), weight.stride())
        if key not in self.packed:
            self.packed[key] = pack(weight, self.weights, self.native.unit)
        packed = self.packed[key]
        (rows, inputs), outputs = x.shape, weight.shape[0]
        if x.kind != FLOAT32 or (x.strides[1] != 1 and inputs != 1):
            x = self.copy(x, self.room(FLOAT32, x.shape))
        wide = -(-rows // 32) * 32 if rows > 1 else 1  # whole vectors of batch rows
        scales = None if packed.scales is None else _operand(self.constant(packed.scales))
        matrix = _Operand(Memory(packed.weight.nbytes, packed.weight), 0, 1, (packed.stride,))
        self._add(
            _LINEAR, (rows, outputs, inputs), [_operand(result), _operand(x), matrix, scales],
            type=(0, 1, 3)[WEIGHTS.index(self.weights)], number=packed.largest,
            work=rows * outputs * inputs, scratch=4 * wide * (inputs + 3 * _STEP) + _ROOM,
        )  # fmt: skip
        return result

    def matrix(
        self, inputs: Sequence[Value | None], o: Value, final: Value, write: int, before: bool, scale: float
    ) -> None:
        """The matrix recurrence of q, k, v, g, beta, a, b, u, state, contiguous float32; ``final`` may be the state."""
        q, v, g = inputs[0], inputs[2], inputs[3]
        assert q is not None and v is not None
        B, T, H, V = v.shape
        G, K = q.shape[2:]
        decay = 0 if g is None else len(g.shape)
        sizes = [B, T, B * T, G, H, K, V, write, before, decay, 0, 0, 0, 0, 0, 1, 1]
        pointers = [*inputs, None, o, final, *[None] * 13]
        needed = self.native.scratch(matrix_problem([1 if p else 0 for p in [*pointers, None]], sizes, scale))
        self._recurrence(_MATRIX, [*inputs, None, o, final], sizes, scale, needed, B * T * H * K * V)

    def selective(self, inputs: Sequence[Value | None], y: Value, final: Value) -> None:
        """The selective scan of x, dt, B, C, A, state, contiguous float32; ``final`` may be the state."""
        x, B = inputs[0], inputs[2]
        assert x is not None and B is not None
        (S, T, D), (G, N) = x.shape, B.shape[2:]
        sizes = [S, T, S * T, D, G, N, 0, 0, 1, 1]
        pointers = [*inputs, None, y, final]
        needed = self.native.selective_scratch(selective_problem([1 if p else 0 for p in pointers] + [0] * 10, sizes))
        self._recurrence(_SELECTIVE, pointers, sizes, 0.0, needed, 8 * S * T * D * N)

    def _recurrence(
        self, kind: int, pointers: list[Value | None], sizes: list[int], scale: float, needed: int, work: int
    ) -> None:
        self._add(
            kind, (1,), [], problem=(pointers, sizes, scale), written=2, work=work, scratch=4 * needed + 64,
        )  # fmt: skip

    def _add(self, kind: int, sizes: Sequence[int], operands: Sequence[_Operand | None], **rest: Any) -> None:
        if len(sizes) > AXES:
            raise Unsupported(f"a tensor of {len(sizes)} axes that do not merge")
        self.steps.append(_Step(kind, tuple(sizes), list(operands), **rest))

    def finish(self) -> Program:
        """The program of all that was taken down."""
        places, size = _arrange(self.steps)
        ends = [size]
        for slot in self.slots:
            ends.append(ends[-1] + slot.bytes)
        starts = places | {id(slot): start for slot, start in zip(self.slots, ends, strict=False)}
        _meet(self.steps, starts)
        return Program(self.native, self.steps, self.slots, places, size)


def _arrange(steps: list[_Step]) -> tuple[dict[int, int], int]:
    """Where each memory of the arena begins, by its id, and the arena's size: first fit, while others are in use."""
    times: dict[int, tuple[Memory, int, int]] = {}
    for time, step in enumerate(steps):
        for memory, _ in step.touched():
            if memory.tensor is None and memory.slot is None:
                first = times[id(memory)][1] if id(memory) in times else time
                times[id(memory)] = (memory, first, time)
    placed: list[tuple[int, int, int]] = []  # start, end, last use
    places, size = {}, 0
    for key, (memory, first, last) in times.items():  # in the order of their first use
        placed = [piece for piece in placed if piece[2] >= first]
        start = 0
        for begin, end, _ in sorted(placed):
            if begin - start >= memory.bytes:
                break
            start = max(start, end)
        end = start + -(-memory.bytes // 64) * 64
        placed.append((start, end, last))
        places[key], size = start, max(size, end)
    return places, size


def _meet(steps: list[_Step], starts: dict[int, int]) -> None:
    """Set ``wait`` where a step touches what another thread may still write, or writes what it may still read.

    What the first thread does alone is in order by itself.
    """
    alone: list[tuple[int, int, bool]] = []
    shared: list[tuple[int, int, bool]] = []
    for step in steps:
        mine = [
            (starts[id(memory)], starts[id(memory)] + memory.bytes, written)
            for memory, written in step.touched()
            if memory.tensor is None
        ]
        others = alone + shared if step.parallel else shared
        step.wait = any(a < d and c < b and (w or v) for a, b, w in mine for c, d, v in others)
        if step.wait:
            alone, shared = [], []
        (shared if step.parallel else alone).extend(mine)


@dataclass(frozen=True)
class Program:
    """Instructions, their constants and weights, and where results lie in an arena of ``size`` bytes."""

    native: Library
    steps: list[_Step]
    slots: list[Memory]
    places: dict[int, int]
    size: int

    @property
    def weights(self) -> list[Tensor]:
        """The matrices, as they are read."""
        found = [step.operands[2].memory.tensor for step in self.steps if step.kind == _LINEAR and step.operands[2]]
        return [weight for weight in found if weight is not None]


class Session:
    """A program with memory of its own. ``slots[n]`` are the bytes of the n-th slot."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._arena = torch.empty(program.size + 64, dtype=torch.uint8, device="cpu")
        self.slots = [torch.zeros(slot.bytes, dtype=torch.uint8, device="cpu") for slot in program.slots]
        self._shared = any(step.parallel for step in program.steps)
        self._problems: list[Tensor] = []
        self._tape = torch.frombuffer(bytearray(b"".join(map(self._instruction, program.steps))), dtype=torch.uint8)
        self._scratch, self._threads = torch.empty(0), 0
        self._problem = b""

    def _at(self, memory: Memory) -> int:
        if memory.tensor is not None:
            return address(memory.tensor)
        if memory.slot is not None:
            return address(self.slots[memory.slot])
        return address(self._arena) + -address(self._arena) % 64 + self.program.places[id(memory)]

    def _where(self, value: Value | None) -> int:
        return 0 if value is None else self._at(value.memory) + value.offset * value.item

    def _instruction(self, step: _Step) -> bytes:
        operands = [(self._at(o.memory) + o.offset, o.item, o.strides) if o else (0, 0, ()) for o in step.operands]
        if step.problem is not None:
            values, sizes, scale = step.problem
            where = [self._where(value) for value in values]
            if step.kind == _MATRIX:
                body = matrix_problem([*where, *[0] * (26 - len(where))], sizes, scale)
            else:
                body = selective_problem([*where, *[0] * (19 - len(where))], sizes)
            memory = torch.frombuffer(bytearray(body), dtype=torch.uint8)
            self._problems.append(memory)
            operands = [(address(memory), 1, ())]
        return instruction(
            [step.kind, step.code, step.type, step.parallel, step.wait, len(step.sizes), step.axes],
            step.sizes, operands, step.picked, step.number,
        )  # fmt: skip

    def run(self) -> None:
        """Walk the tape. Raises ValueError where a gate, a step or an index is out of range."""
        threads = torch.get_num_threads() if self._shared else 1
        if threads != self._threads:
            size = -(-max((step.scratch for step in self.program.steps), default=0) // 64) * 64
            self._scratch, self._threads = torch.empty(size * threads + 64, dtype=torch.uint8, device="cpu"), threads
            start = address(self._scratch) + -address(self._scratch) % 64
            self._problem = program_problem([address(self._tape), start], [len(self.program.steps), size, threads])
        failed = self.program.native.decode(self._problem)
        if failed >= 0:
            what = "an index" if self.program.steps[failed].kind == _PICK else "a gate or a step"
            raise ValueError(f"decode: got {what} out of range or NaN, wanted a model whose numbers are finite")
