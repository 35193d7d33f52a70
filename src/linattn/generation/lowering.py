"""From a model to a decode program: its step for one token is traced once, and every op becomes instructions.

The trace (over shapes, no data) is a list of aten ops and of linattn's own, with what every result looks like in
memory. A result that shares its input's memory there shares it here, so views cost nothing and writes in place are just
that. What depends on weights alone is computed now. An op without a rule is a refusal that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from linattn.backends.cpu.program import BOOL, FLOAT32, FLOAT64, INT64, Builder, Packed, Program, Unsupported, Value
from linattn.models import LanguageModel
from linattn.models.decoder import ModelState
from linattn.recurrence import Read, Write

_ONE = ("neg abs exp expm1 log log1p sigmoid silu relu tanh sqrt rsqrt sin cos round floor reciprocal").split()
_ARITHMETIC = {"mul": "mul", "maximum": "maximum", "minimum": "minimum", "logaddexp": "logaddexp"}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_BITS = {
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "logical_and": "and", "logical_or": "or",
    "__and__": "and", "__or__": "or", "__xor__": "xor", "__lshift__": "shift_left", "__rshift__": "shift_right",
    "bitwise_left_shift": "shift_left", "bitwise_right_shift": "shift_right",
}  # fmt: skip
_BLANK = {"new_zeros": 0, "zeros_like": 0, "new_ones": 1, "ones_like": 1, "new_empty": 0, "empty_like": 0}
_WRITES = {Write.ADDITIVE.value: 0, Write.DELTA.value: 1, Write.LOW_RANK.value: 2}


@dataclass(frozen=True)
class Step:
    """A program, and which of its slots hold the tokens [B] int64, the logits [B, V] and the tensors of the state."""

    program: Program
    ids: int
    logits: int
    states: list[int]


class _Call(NamedTuple):
    """An op of the trace. Tensors among its arguments are traced, or real where they are the model's own."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class _Recorder(TorchDispatchMode):
    """Keeps every op that is called, in order, and all that came out, so that no two share an identity."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = target(*args, **(kwargs or {}))
        if _tensors(result):  # not a device or the like
            self.calls.append(_Call(target, args, kwargs or {}, result))
        return result


def lower(model: LanguageModel, state: ModelState, batch: int, weights: str, packed: dict[Any, Packed]) -> Step:
    """The program of ``model``'s step from a state like ``state`` (whose numbers are not read), for ``batch`` rows.

    Raises Unsupported, naming the op, where the library has no rule for one.
    """
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        before = pytree.tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), state)
        ids = torch.zeros(batch, 1, dtype=torch.int64)
        try:
            with _Recorder() as recorder:
                hidden, after = model.features(ids, before)
                logits = model.head(hidden[:, -1])
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise Unsupported(f"{error.func}, whose result decides what is computed") from error
    inputs, outputs = ([x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)] for tree in (before, after))
    return _Lowering(recorder.calls, [ids, *inputs], [logits, *outputs], Builder(weights, packed)).run()


class _Lowering:
    """What every tensor of the trace stands for: a Value, or a real tensor where it is constant."""

    def __init__(self, calls: list[_Call], inputs: list[Tensor], outputs: list[Tensor], builder: Builder) -> None:
        self.calls, self.inputs, self.outputs, self.builder = calls, inputs, outputs, builder
        self.known: dict[int, Any] = {}  # by the identity of the traced tensor
        self.last: dict[int, int] = {}  # the last call that touches a memory
        for time, call in enumerate(calls):
            for tensor in _tensors((call.args, call.kwargs, call.result)):
                self.last[_storage(tensor)] = time
        self.last |= {_storage(tensor): len(calls) for tensor in outputs}

    def run(self) -> Step:
        shapes = [(a.shape, b.shape) for a, b in zip(self.inputs[1:], self.outputs[1:], strict=True)]
        if any(a != b for a, b in shapes):
            raise Unsupported("a state that grows with every token")
        slots = []
        for fake in self.inputs:
            slots.append(self.builder.slot(self._kind(fake.dtype), fake.shape))
            self.known[id(fake)] = slots[-1]
        for time, call in enumerate(self.calls):
            self._call(call, time)
        logits = self._value(self.known[id(self.outputs[0])])
        out = self.builder.slot(FLOAT32, logits.shape)
        self.builder.copy(logits, out)
        pending = []
        for target, output in zip(slots[1:], self.outputs[1:], strict=True):
            value = self._value(self.known[id(output)])
            if value.memory is target.memory and value.strides == target.strides and value.offset == target.offset:
                continue
            if any(value.memory is other.memory for other in slots):  # a state of another's: not overwritten meanwhile
                value = self.builder.copy(value, self.builder.room(value.kind, value.shape))
            pending.append((value, target))
        for value, target in pending:
            self.builder.copy(value, target)
        names = [value.memory.slot for value in (*slots, out)]
        first, *states, last = [name for name in names if name is not None]
        return Step(self.builder.finish(), first, last, states)

    def _call(self, call: _Call, time: int) -> None:
        """Enter what comes out of a call, computed now if nothing in it moves."""
        args, kwargs = pytree.tree_map_only(FakeTensor, lambda t: self.known[id(t)], (call.args, call.kwargs))
        if any(isinstance(leaf, Value) for leaf in pytree.tree_leaves((args, kwargs), _is_value)):
            found = self._moving(call, time, args, kwargs)
        elif torch.Tag.nondeterministic_seeded in call.target.tags:
            raise Unsupported(f"{call.target}, which draws random numbers")
        else:
            found = call.target(*args, **{**kwargs, "device": "cpu"} if "device" in kwargs else kwargs)
        pairs = (
            zip(call.result, found, strict=True) if isinstance(call.result, list | tuple) else [(call.result, found)]
        )
        for fake, result in pairs:
            if isinstance(fake, Tensor):
                self.known[id(fake)] = result

    def _moving(self, call: _Call, time: int, args: Any, kwargs: Any) -> Any:
        target = call.target
        schema = target._schema
        if not schema.is_mutable and (shared := self._view(call)) is not None:
            return shared
        name = schema.name.removeprefix("aten::")
        if name in _BLANK:  # of the input they have the shape alone
            return torch.full(call.result.shape, _BLANK[name], dtype=call.result.dtype)
        given = _bound(schema, args, kwargs)
        if schema.is_mutable:
            if not isinstance(args[0], Value) or args[0].memory.slot is not None:
                raise Unsupported(f"{target}, which writes into a constant or a state")
            return self._elementwise(name.removesuffix("_"), call, given, args[0])
        rule: Callable[..., Any] | None = getattr(self, f"op_{name.replace('::', '_')}", None)
        if rule is None:
            return self._elementwise(name, call, given, None)
        return rule(call, time, **{"self_" if key == "self" else key: x for key, x in given.items()})

    # ---- values

    def _view(self, call: _Call) -> Any:
        """What the call gives if that is an argument's memory seen in another way, else None."""
        every = call.result if isinstance(call.result, list | tuple) else [call.result]
        sources = _tensors((call.args, call.kwargs))
        views = []
        for one in every:
            source = next((t for t in sources if isinstance(one, Tensor) and _storage(one) == _storage(t)), None)
            base = None if source is None else self.known.get(id(source))
            if source is None or not isinstance(base, Value) or one.dtype != source.dtype:
                return None
            views.append(Value(base.memory, base.kind, tuple(one.shape), one.stride(), one.storage_offset()))
        return views if isinstance(call.result, list | tuple) else views[0]

    def _value(self, x: Any, kind: int | None = None) -> Value:
        """``x`` as a Value (of a kind)."""
        if isinstance(x, Tensor):
            x = self.builder.constant(x.to(_stored(x.dtype)))
        elif not isinstance(x, Value):
            default = BOOL if isinstance(x, bool) else INT64 if isinstance(x, int) else FLOAT32
            return self.builder.number(x, default if kind is None else kind)
        return x if kind is None else self.builder.cast(x, kind)

    def _kind(self, dtype: torch.dtype) -> int:
        return self.builder.kind(_stored(dtype))

    def _room(self, fake: Tensor) -> Value:
        return self.builder.room(self._kind(fake.dtype), fake.shape, fake.stride())

    def _like(self, call: _Call) -> Value:
        return self._room(call.result)

    def _map(self, name: str, kind: int, *operands: Any, result: Value | None = None) -> Value:
        """An elementwise op among numbers of one kind, with a result of its own unless one is given."""
        values = [self._value(x, kind) for x in operands]
        if result is None:
            shape = torch.broadcast_shapes(*(value.shape for value in values))
            result = self.builder.room(BOOL if name in _COMPARISONS else kind, shape)
        if result.kind != (BOOL if name in _COMPARISONS else kind):
            return self.builder.copy(self._map(name, kind, *operands), result)
        return self.builder.map(name, result, *values)

    # ---- elementwise ops

    def _elementwise(self, name: str, call: _Call, given: dict[str, Any], inplace: Value | None) -> Value:
        refused = Unsupported(f"{call.target}")
        if not isinstance(call.result, Tensor):
            raise refused
        result = self._like(call) if inplace is None else inplace
        kind, x = result.kind, given.get("self")
        other = given.get("other", given.get("exponent"))
        power = other if isinstance(other, int | float) else None

        def put(op: str, *operands: Any, among: int = kind) -> Value:
            return self._map(op, among, *operands, result=result)

        if name in _ONE:
            return put(name, x)
        if name in _ARITHMETIC:
            return put(_ARITHMETIC[name], x, other)
        if name in _COMPARISONS:
            return put(name, x, other, among=self._common(call))
        if name in _BITS:
            return put(_BITS[name], x, other)
        if name in ("bitwise_not", "logical_not"):
            return put("not", x)
        match name:
            case "add" | "sub" | "rsub":
                alpha = given["alpha"]
                x, other = (other, x) if name == "rsub" else (x, other)
                if alpha == 1:
                    return put("add" if name == "add" else "sub", x, other)
                if name == "rsub":
                    raise refused
                return put("fused", x, other, alpha if name == "add" else -alpha)
            case "addcmul":
                product = given["tensor1"]
                if given["value"] != 1:
                    product = self._map("mul", kind, product, given["value"])
                return put("fused", x, product, given["tensor2"])
            case "lerp":
                return put("fused", x, self._map("sub", kind, given["end"], x), given["weight"])
            case "div":
                if given.get("rounding_mode") not in (None, "floor"):
                    raise refused
                return put("div" if given.get("rounding_mode") is None else "floor_div", x, other)
            case "floor_divide":
                return put("floor_div", x, other)
            case "pow" if power == 2:
                return put("mul", x, x)
            case "pow" if power == 0.5:
                return put("sqrt", x)
            case "pow":
                return put("pow", x, other)
            case "clamp" | "clamp_min" | "clamp_max":
                low, high = given.get("min"), given.get("max")
                for op, bound in (("maximum", low), ("minimum", high)):
                    if bound is not None:
                        x = self._map(op, kind, x, bound)
                return self.builder.copy(self._value(x, kind), result)
            case "softplus" if given["beta"] == 1 and given["threshold"] == 20:
                return put("softplus", x)
            case "gelu":
                return put("gelu" if given["approximate"] == "none" else "gelu_tanh", x)
            case "elu" if given["scale"] == 1 and given["input_scale"] == 1:
                low = self._map("mul", kind, self._map("expm1", kind, self._map("minimum", kind, x, 0)), given["alpha"])
                return put("add", self._map("maximum", kind, x, 0), low)
            case "where":
                cond = self._value(given["condition"], BOOL)
                return self.builder.map("where", result, cond, self._value(x, kind), self._value(other, kind))
            case "nan_to_num":
                return self._nan_to_num(kind, result, x, given)
            case "clone" | "_to_copy" | "copy":
                source = self._value(given["src"] if name == "copy" else x)
                return self.builder.copy(source.expand(result.shape), result)
        raise refused

    def _common(self, call: _Call) -> int:
        """The kind of numbers that operands are compared as."""
        first, second = (a if isinstance(a, Tensor | int | float) else 0 for a in call.args[:2])
        return self._kind(torch.result_type(first, second))

    def _nan_to_num(self, kind: int, result: Value, x: Any, given: dict[str, Any]) -> Value:
        info = torch.finfo(torch.float64 if kind == FLOAT64 else torch.float32)
        limits = ((math.inf, given["posinf"], info.max), (-math.inf, given["neginf"], info.min))
        value = self._value(x, kind)
        x = self._choose(kind, self._map("ne", kind, value, value), given["nan"] or 0.0, value)
        for infinity, asked, otherwise in limits:
            x = self._choose(kind, self._map("eq", kind, x, infinity), otherwise if asked is None else asked, x)
        return self.builder.copy(x, result)

    def _choose(self, kind: int, condition: Value, x: Any, other: Value) -> Value:
        return self.builder.map("where", self.builder.room(kind, other.shape), condition, self._value(x, kind), other)

    # ---- ops by name: (call, time, arguments by the schema's names) -> what comes out

    def op_log_sigmoid_forward(self, call: _Call, time: int, self_: Any) -> Any:
        fake = call.result[0]
        return [self._map("log_sigmoid", self._kind(fake.dtype), self_, result=self._room(fake)), None]

    def op_sum(self, call: _Call, time: int, self_: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
        return self._fold("sum", call, self_, dim, keepdim)

    def op_mean(self, call: _Call, time: int, self_: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
        return self._fold("sum", call, self_, dim, keepdim, mean=True)

    def op_amax(self, call: _Call, time: int, self_: Any, dim: Any = (), keepdim: bool = False) -> Value:
        return self._fold("amax", call, self_, dim, keepdim)

    def op_amin(self, call: _Call, time: int, self_: Any, dim: Any = (), keepdim: bool = False) -> Value:
        return self._fold("amin", call, self_, dim, keepdim)

    def _fold(self, name: str, call: _Call, x: Any, dim: Any, keepdim: bool, mean: bool = False) -> Value:
        result = self._like(call)
        value = self._value(x, result.kind)
        axes = _axes(dim, len(value.shape))
        whole = result
        if not keepdim:
            shape = tuple(1 if axis in axes else n for axis, n in enumerate(value.shape))
            own = iter(result.strides)
            whole = result._replace(
                shape=shape, strides=tuple(0 if a in axes else next(own) for a in range(len(shape)))
            )
        count = math.prod(value.shape[axis] for axis in axes)
        self.builder.fold(name, whole, value, axes, 1 / count if mean else 1.0)
        return result

    def op_linalg_vector_norm(
        self, call: _Call, time: int, self_: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any
    ) -> Value:
        if ord != 2:
            raise Unsupported(f"{call.target} of order {ord}")
        kind = self._like(call).kind
        total = self._fold("sum", call, self._map("mul", kind, self_, self_), dim, keepdim)
        return self._map("sqrt", kind, total, result=self._like(call))

    def op_cumsum(self, call: _Call, time: int, self_: Any, dim: int, dtype: Any = None) -> Value:
        result = self._like(call)
        value = self._value(self_, result.kind)
        return self.builder.fold("cumsum", result, value, _axes(dim, len(value.shape)))

    def op_cummax(self, call: _Call, time: int, self_: Any, dim: int) -> Any:
        value = self._value(self_)
        if value.shape[dim] != 1:
            raise Unsupported(f"{call.target} of {value.shape[dim]} numbers")
        values, indices = call.result
        return [self.builder.copy(value, self._room(values)), torch.zeros(indices.shape, dtype=torch.int64)]

    def op_native_layer_norm(
        self, call: _Call, time: int, input: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float
    ) -> Any:
        result = self._room(call.result[0])
        x = self._value(input, result.kind)
        axes = _axes(tuple(range(-len(normalized_shape), 0)), len(x.shape))
        shape = tuple(1 if axis in axes else n for axis, n in enumerate(x.shape))
        share = 1 / math.prod(normalized_shape)

        def mean(value: Value) -> Value:
            return self.builder.fold("sum", self.builder.room(value.kind, shape), value, axes, share)

        kind = result.kind
        centred = self._map("sub", kind, x, mean(x))
        variance = mean(self._map("mul", kind, centred, centred))
        inverse = self._map("rsqrt", kind, self._map("add", kind, variance, eps))
        for operand, op in ((inverse, "mul"), (weight, "mul"), (bias, "add")):
            centred = centred if operand is None else self._map(op, kind, centred, operand)
        return [self.builder.copy(centred, result), None, None]

    def op_mm(self, call: _Call, time: int, self_: Any, mat2: Any) -> Value:
        if isinstance(mat2, Tensor):
            return self._linear(self._like(call), self._value(self_, FLOAT32), mat2.t())
        result = self._like(call)
        a, b, y = (self._value(v, FLOAT32) for v in (self_, mat2, result))
        self.builder.product(*(v._replace(shape=(1, *v.shape), strides=(0, *v.strides)) for v in (y, a, b)))
        return result

    def _linear(self, result: Value, x: Value, weight: Tensor) -> Value:
        """Into a result whose rows have no gaps."""
        rows = result if result.strides[1] == 1 else self.builder.room(FLOAT32, result.shape)
        self.builder.linear(rows, x, weight)
        return result if rows is result else self.builder.copy(rows, result)

    def op_addmm(self, call: _Call, time: int, self_: Any, mat1: Any, mat2: Any, beta: Any, alpha: Any) -> Value:
        if not (beta == alpha == 1 and isinstance(mat2, Tensor)):
            raise Unsupported(f"{call.target} without a constant weight")
        result = self._like(call)
        product = self._linear(self.builder.room(FLOAT32, result.shape), self._value(mat1, FLOAT32), mat2.t())
        return self._map("add", result.kind, product, self_, result=result)

    def op_bmm(self, call: _Call, time: int, self_: Any, mat2: Any) -> Value:
        result = self._like(call)
        a = self._value(self_, FLOAT32)
        if isinstance(mat2, Tensor) and mat2[0].numel() >= 4096:
            for part in range(a.shape[0]):
                self._linear(_part(result, 0, part), _part(a, 0, part), mat2[part].t())
            return result
        return self.builder.product(result, a, self._value(mat2, FLOAT32))

    def op_embedding(self, call: _Call, time: int, weight: Any, indices: Any, *_: Any, **__: Any) -> Value:
        value, index = self._raw(weight), self._value(indices)
        ones = (1,) * len(index.shape)
        source = value._replace(shape=(*ones[1:], *value.shape), strides=(*(0,) * len(ones[1:]), *value.strides))
        axis = len(ones) - 1
        return self._picked(call, source, {axis: index._replace(shape=(*index.shape, 1), strides=(*index.strides, 0))})

    def _raw(self, x: Any) -> Value:
        """As :meth:`_value`, but half precision stays as it is: only what is picked is converted."""
        return self.builder.constant(x) if isinstance(x, Tensor) else self._value(x)

    def _picked(self, call: _Call, source: Value, index: dict[int, Value]) -> Value:
        result = self._like(call)
        raw = result if source.kind == result.kind else self.builder.room(source.kind, result.shape)
        self.builder.pick(raw, source, index)
        return result if raw is result else self.builder.copy(raw, result)

    def op_gather(self, call: _Call, time: int, self_: Any, dim: int, index: Any, sparse_grad: bool = False) -> Value:
        source, at = self._raw(self_), self._value(index)
        return self._picked(call, source, {dim % len(source.shape): at})

    def op_index_select(self, call: _Call, time: int, self_: Any, dim: int, index: Any) -> Value:
        source, at = self._raw(self_), self._value(index)
        axis, rank = dim % len(source.shape), len(source.shape)
        shape = [1] * rank
        shape[axis] = at.shape[0]
        strides = tuple(at.strides[0] if a == axis else 0 for a in range(rank))
        return self._picked(call, source, {axis: at._replace(shape=tuple(shape), strides=strides)})

    def op_index(self, call: _Call, time: int, self_: Any, indices: Sequence[Any]) -> Value:
        source, result = self._raw(self_), self._like(call)
        axes = [axis for axis, index in enumerate(indices) if index is not None]
        values = [self._value(indices[axis]) for axis in axes]
        if any(v.kind != INT64 for v in values) or axes != list(range(axes[0], axes[-1] + 1)):
            raise Unsupported(f"{call.target} by masks or by axes apart")
        # The indices' common axes stand where the indexed ones stood; the fewer get axes of length 1 in front.
        at, after, rank = axes[0], len(source.shape) - axes[-1] - 1, max(len(v.shape) for v in values)
        width = max(rank, len(axes))
        source, wide = _widened(source, at, width - len(axes)), _widened(result, at, width - rank)
        index = {}
        for axis, value in zip(axes, values, strict=True):
            lead = at + width - len(value.shape)
            index[axis + width - len(axes)] = value._replace(
                shape=(*(1,) * lead, *value.shape, *(1,) * after), strides=(*(0,) * lead, *value.strides, *(0,) * after)
            )
        raw = wide if source.kind == wide.kind else self.builder.room(source.kind, wide.shape)
        self.builder.pick(raw, source, index)
        if raw is not wide:
            self.builder.copy(raw, wide)
        return result

    def op_cat(self, call: _Call, time: int, tensors: Sequence[Any], dim: int = 0) -> Value:
        result = self._like(call)
        begin, axis = 0, dim % len(result.shape)
        for tensor in tensors:
            value = self._value(tensor, result.kind)
            if value.shape == (0,):
                continue
            size = value.shape[axis]
            shape = tuple(size if a == axis else n for a, n in enumerate(result.shape))
            self.builder.copy(value, result._replace(shape=shape, offset=result.offset + begin * result.strides[axis]))
            begin += size
        return result

    def op_stack(self, call: _Call, time: int, tensors: Sequence[Any], dim: int = 0) -> Value:
        result = self._like(call)
        axis = dim % len(result.shape)
        for at, tensor in enumerate(tensors):
            self.builder.copy(self._value(tensor, result.kind), _part(result, axis, at))
        return result

    def op_constant_pad_nd(self, call: _Call, time: int, self_: Any, pad: Sequence[int], value: Any = 0) -> Value:
        result = self._like(call)
        x = self._value(self_, result.kind)
        if any(p < 0 for p in pad):
            raise Unsupported(f"{call.target} that takes away")
        self.builder.copy(self._value(value, result.kind).expand(result.shape), result)
        offset = sum(before * stride for before, stride in zip(pad[::2], reversed(result.strides), strict=False))
        self.builder.copy(x, result._replace(shape=x.shape, offset=result.offset + offset))
        return result

    def op_repeat(self, call: _Call, time: int, self_: Any, repeats: Sequence[int]) -> Value:
        result = self._like(call)
        x = self._value(self_)
        x = x.expand((*(1,) * (len(repeats) - len(x.shape)), *x.shape))
        shape = [n for pair in zip(repeats, x.shape, strict=True) for n in pair]
        target = [s for n, s in zip(x.shape, result.strides, strict=True) for s in (n * s, s)]
        source = [s for stride in x.strides for s in (0, stride)]
        self.builder.copy(
            x._replace(shape=tuple(shape), strides=tuple(source)),
            result._replace(shape=tuple(shape), strides=tuple(target)),
        )
        return result

    def op_searchsorted(
        self, call: _Call, time: int, sorted_sequence: Any, self_: Any, right: bool = False, **_: Any
    ) -> Value:
        """How many of the sorted ones are less (``right``: or equal)."""
        result = self._like(call)
        edges, x = self._value(sorted_sequence), self._value(self_)
        if len(edges.shape) != 1:
            raise Unsupported(f"{call.target} of several sequences")
        kind = max(edges.kind, x.kind) if INT64 not in (edges.kind, x.kind) else INT64
        x = x._replace(shape=(*x.shape, 1), strides=(*x.strides, 0))
        less = self._value(self._map("le" if right else "lt", kind, edges, x), INT64)
        flat = result._replace(shape=(*result.shape, 1), strides=(*result.strides, 0))
        self.builder.fold("sum", flat, less, [len(less.shape) - 1])
        return result

    # ---- linattn's own

    def op_linattn_matrix_forward(self, call: _Call, time: int, **given: Any) -> Any:
        names = ("q", "k", "v", "g", "beta", "a", "b", "u", "state")
        if given["cu_seqlens"] is not None or given["save"]:
            raise Unsupported(f"{call.target} of packed sequences")
        inputs = [None if given[name] is None else self.builder.contiguous(self._value(given[name])) for name in names]
        q, v = inputs[0], inputs[2]
        assert q is not None and v is not None
        (B, T, H, V), K = v.shape, q.shape[3]
        o = self.builder.room(FLOAT32, (B, T, H, V))
        final = self._final(call, time, inputs[8], (B, H, K, V))
        before = given["read"] == Read.BEFORE.value
        self.builder.matrix(inputs, o, final, _WRITES[given["write"]], before, given["scale"])
        return [o, final, None, None]

    def op_linattn_selective_forward(self, call: _Call, time: int, **given: Any) -> Any:
        if given["cu_seqlens"] is not None or given["save"]:
            raise Unsupported(f"{call.target} of packed sequences")
        names = ("x", "dt", "B", "C", "A", "state")
        inputs = [None if given[name] is None else self.builder.contiguous(self._value(given[name])) for name in names]
        x, A = inputs[0], inputs[4]
        assert x is not None and A is not None
        y = self.builder.room(FLOAT32, x.shape)
        final = self._final(call, time, inputs[5], (x.shape[0], *A.shape))
        self.builder.selective(inputs, y, final)
        return [y, final, None]

    def _final(self, call: _Call, time: int, state: Value | None, shape: tuple[int, ...]) -> Value:
        """Where the state after it goes: over the one before it where that is an input that nothing else reads."""
        if state is None or state.memory.slot is None or state.offset or state.shape != shape:
            return self.builder.room(FLOAT32, shape)
        if self.last[_storage(self.inputs[state.memory.slot])] == time:
            return state
        return self.builder.room(FLOAT32, shape)


def _is_value(x: Any) -> bool:
    return isinstance(x, Value)


def _stored(dtype: torch.dtype) -> torch.dtype:
    """What a dtype is computed in: half precision in float32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(x: Tensor) -> int:
    """The identity of the memory that a tensor lies in."""
    return int(x.untyped_storage()._cdata)


def _part(value: Value, axis: int, at: int) -> Value:
    """The ``at``-th of an axis, without that axis."""
    shape, strides = (tuple(x for a, x in enumerate(xs) if a != axis) for xs in (value.shape, value.strides))
    return value._replace(shape=shape, strides=strides, offset=value.offset + at * value.strides[axis])


def _widened(value: Value, axis: int, count: int) -> Value:
    """With ``count`` axes of length 1 before an axis."""
    shape = (*value.shape[:axis], *(1,) * count, *value.shape[axis:])
    return value._replace(shape=shape, strides=(*value.strides[:axis], *(0,) * count, *value.strides[axis:]))


def _axes(dim: Any, rank: int) -> list[int]:
    every = range(rank) if dim is None or dim == () or dim == [] else [dim] if isinstance(dim, int) else dim
    return sorted(axis % rank for axis in every)


def _bound(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names, defaults filled in; ``self`` is ``self_`` to rules that are methods."""
    given = {}
    for place, argument in enumerate(schema.arguments):
        name = argument.name
        if place < len(args):
            given[name] = args[place]
        elif name in kwargs:
            given[name] = kwargs[name]
        elif argument.has_default_value():
            given[name] = argument.default_value
    return given
