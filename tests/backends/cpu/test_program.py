"""The tape that decoding runs: every operation against torch, at every instruction set; weights; memory; threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.backends.cpu.program import (
    BOOL,
    FLOAT32,
    FLOAT64,
    INT64,
    STORED,
    WEIGHTS,
    Builder,
    Session,
    Unsupported,
    Value,
    pack,
)

SIZES = (3, 1, 37)  # no whole vectors


@pytest.fixture
def threads() -> Iterator[None]:
    """More than one, also where the machine has no more."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def ran(builder: Builder, *results: Value) -> list[Tensor]:
    """What the results hold, each copied to a slot at the end."""
    slots = [builder.copy(value, builder.slot(value.kind, value.shape)) for value in results]
    session = Session(builder.finish())
    session.run()
    return [
        session.slots[slot.memory.slot].view(STORED[slot.kind]).view(slot.shape)  # type: ignore[index]
        for slot in slots
    ]


def numbers(kind: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(SIZES, generator=random, dtype=torch.float64)
    return x > 0 if kind == BOOL else x.round().long() if kind == INT64 else x.to(STORED[kind])


REAL = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "sigmoid": torch.sigmoid, "silu": F.silu,
    "softplus": F.softplus, "log_sigmoid": F.logsigmoid, "relu": torch.relu, "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "expm1": torch.expm1, "tanh": torch.tanh, "sin": torch.sin,
    "cos": torch.cos, "reciprocal": torch.reciprocal, "round": torch.round, "floor": torch.floor,
    "log": lambda x: x.abs().log(), "log1p": lambda x: x.abs().log1p(), "sqrt": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: x.abs().rsqrt(), "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "floor_div": lambda x, y: torch.floor(x / y), "pow": lambda x, y: x.abs().pow(y), "maximum": torch.maximum,
    "minimum": torch.minimum, "logaddexp": torch.logaddexp, "fused": torch.addcmul,
}  # fmt: skip
LOOSE = {"pow": 8, "gelu": 8, "gelu_tanh": 1000}  # arguments are amplified; far below zero digits cancel
POSITIVE = {"log", "log1p", "sqrt", "rsqrt", "pow"}
TESTS = {"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}
BITS = {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}
WHOLE = {
    "neg": torch.neg, "abs": torch.abs, "add": torch.add, "sub": torch.sub, "mul": torch.mul, "fused": torch.addcmul,
    "maximum": torch.maximum, "minimum": torch.minimum, "not": torch.bitwise_not,
    "floor_div": lambda x, y: torch.where(y == 0, 0, torch.div(x, torch.where(y == 0, 1, y), rounding_mode="floor")),
}  # fmt: skip


def arity(name: str) -> int:
    return {"fused": 3}.get(name, 2 if name in {"add", "sub", "mul", "div", "floor_div", "pow", "maximum", "minimum",
                                                "logaddexp", *TESTS, *BITS} else 1)  # fmt: skip


def check(name: str, function: Any, kind: int, result_kind: int) -> None:
    inputs = [numbers(kind, seed) for seed in range(arity(name))]
    if name in POSITIVE:
        inputs[0] = inputs[0].abs()
    builder = Builder()
    result = builder.room(result_kind, SIZES)
    builder.map(name, result, *(builder.constant(x) for x in inputs))
    (found,) = ran(builder, result)
    wanted = function(*(x.double() if x.is_floating_point() else x for x in inputs))
    if result_kind == FLOAT32:
        scale = wanted.abs().clamp_min(1e-3)
        assert ((found - wanted).abs() <= 4e-7 * scale * LOOSE.get(name, 1)).all()
    elif result_kind == FLOAT64:
        assert torch.allclose(found, wanted, rtol=1e-13, atol=1e-14)
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", [FLOAT32, FLOAT64])
def test_real_numbers(kind: int, level: str) -> None:
    for name, function in REAL.items():
        check(name, function, kind, kind)


def test_other_numbers(level: str) -> None:
    for kind in (FLOAT32, FLOAT64, INT64, BOOL):
        for name, function in TESTS.items():
            check(name, function, kind, BOOL)
    for kind in (INT64, BOOL):
        for name, function in BITS.items():
            check(name, function, kind, kind)
    for name, function in WHOLE.items():
        check(name, function, INT64, INT64)
    with pytest.raises(Unsupported, match=r"exp of torch\.int64"):
        check("exp", torch.exp, INT64, INT64)
    for a in (FLOAT32, FLOAT64, INT64, BOOL):
        for b in (FLOAT32, FLOAT64, INT64, BOOL):
            builder, x = Builder(), numbers(a, 0)
            (found,) = ran(builder, builder.cast(builder.constant(x), b))
            assert torch.equal(found, x.to(STORED[b]))


def test_the_ends_of_the_line(level: str) -> None:
    """Infinities, NaN and large numbers come out as in torch."""
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 200.0, -200.0, 0.0, -0.0, 1e-30, 88.8])
    for name in ("exp", "sigmoid", "silu", "softplus", "log_sigmoid", "relu", "tanh", "abs"):
        builder = Builder()
        (found,) = ran(builder, builder.map(name, builder.room(FLOAT32, x.shape), builder.constant(x)))
        wanted = REAL[name](x)
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-37, equal_nan=True), name


def test_strides_and_broadcasting(level: str, threads: None) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, 70, 30, generator=random).permute(3, 0, 2, 1)[:, :, ::2]
    y = torch.randn(5, 1, 7, generator=random)
    builder = Builder()
    a, b = builder.constant(x), builder.constant(y)
    results = [
        builder.map("add", builder.room(FLOAT32, x.shape, strides), a, b) for strides in (None, (1, 7350, 210, 30))
    ]
    for found in ran(builder, *results):
        assert torch.equal(found, x + y)


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_folds(axes: tuple[int, ...], level: str, threads: None) -> None:
    x = torch.randn(33, 65, 19, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    builder = Builder()
    a = builder.constant(x)
    shape = [1 if axis in axes else n for axis, n in enumerate(x.shape)]
    results = [
        builder.fold(name, builder.room(FLOAT32, shape), a, axes, s)
        for name, s in (("sum", 0.5), ("amax", 1.0), ("amin", 1.0))
    ]
    half, top, low = ran(builder, *results)
    assert torch.allclose(half, x.double().sum(axes, keepdim=True).float() / 2, rtol=1e-5, atol=1e-5)
    assert torch.equal(top, x.amax(axes, keepdim=True))
    assert torch.equal(low, x.amin(axes, keepdim=True))
    if len(axes) == 1:
        builder = Builder()
        (found,) = ran(builder, builder.fold("cumsum", builder.room(FLOAT32, x.shape), builder.constant(x), axes))
        assert torch.allclose(found, x.cumsum(axes[0]), rtol=1e-5, atol=1e-5)


def test_picks(level: str) -> None:
    x = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(0))
    rows, columns = torch.tensor([5, 0, -1, 2]), torch.tensor([[1, 1, 4, 0, 2, 3, 4]] * 4)
    builder = Builder()
    source = builder.constant(x)
    index = builder.constant(rows.view(-1, 1, 1))
    taken = builder.pick(builder.room(FLOAT32, (4, 5, 7)), source, {0: index})
    both = builder.pick(builder.room(FLOAT32, (4, 1, 7)), source, {0: index, 1: builder.constant(columns[:, None])})
    found, pairs = ran(builder, taken, both)
    assert torch.equal(found, x[rows])
    assert torch.equal(pairs[:, 0], x[rows[:, None], columns, torch.arange(7)])
    builder = Builder()
    builder.pick(
        builder.room(FLOAT32, (1, 5, 7)), builder.constant(x), {0: builder.constant(torch.tensor([6]).view(1, 1, 1))}
    )
    with pytest.raises(ValueError, match="an index out of range"):
        Session(builder.finish()).run()


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights(weights: str, rows: int, level: str, threads: None) -> None:
    """As exact as the numbers that are stored: in float32, of which int8 rounds x to 15 bits or so."""
    random = torch.Generator().manual_seed(0)
    for outputs, inputs in ((5, 3), (130, 192), (257, 1000)):
        weight = torch.randn(outputs, inputs, generator=random)
        x = torch.randn(rows, inputs + 3, generator=random)[:, 3:]
        builder = Builder(weights)
        (found,) = ran(builder, builder.linear(builder.room(FLOAT32, (rows, outputs)), builder.constant(x), weight))
        packed = pack(weight, weights, builder.native.unit)
        stored = packed.weight[:, :inputs].double()
        if packed.scales is not None:
            stored = stored * packed.scales.double()[:, None]
            assert (stored - weight).abs().amax(1).le(packed.scales * 0.51).all()
        terms = x.abs().double() @ stored.abs().T
        allowed = 1e-4 if weights == "int8" else 2e-6
        assert ((found - x.double() @ stored.T).abs() <= allowed * terms).all()


def test_int8_sums_do_not_overflow(level: str) -> None:
    for inputs in (600, 20000):
        x, weight = torch.ones(2, inputs), torch.ones(3, inputs)
        builder = Builder("int8")
        (found,) = ran(builder, builder.linear(builder.room(FLOAT32, (2, 3)), builder.constant(x), weight))
        assert torch.allclose(found, torch.full((2, 3), float(inputs)), rtol=1e-3)
        builder = Builder("int8")
        zero = builder.constant(torch.zeros(2, inputs))
        assert not ran(builder, builder.linear(builder.room(FLOAT32, (2, 3)), zero, 0 * weight))[0].any()


def test_products(level: str, threads: None) -> None:
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 21, 40, generator=random), torch.randn(3, 40, 50, generator=random)
    for left, right in ((a, b), (a.transpose(1, 2).contiguous().transpose(1, 2), b.transpose(1, 2).contiguous().mT)):
        builder = Builder()
        result = builder.room(FLOAT32, (3, 21, 50))
        (found,) = ran(builder, builder.product(result, builder.constant(left), builder.constant(right)))
        assert torch.allclose(found, a @ b, rtol=1e-4, atol=1e-4)


def test_memory_is_used_again_but_never_too_early(threads: None) -> None:
    """A long chain needs the room of a few results, and gives what torch gives, on several threads, every time."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 256, generator=random) / 16
    x = torch.randn(4, 256, generator=random)
    builder = Builder()
    value, wanted = builder.constant(x), x
    for _ in range(30):
        before = value
        value = builder.linear(builder.room(FLOAT32, (4, 256)), value, weight)
        value = builder.map("tanh", builder.room(FLOAT32, (4, 256)), value)
        value = builder.map("add", builder.room(FLOAT32, (4, 256)), value, before)
        wanted = torch.tanh(wanted @ weight.T) + wanted
    slot = builder.copy(value, builder.slot(FLOAT32, (4, 256)))
    program = builder.finish()
    assert program.size <= 4 * 4 * 256 * 4
    session = Session(program)
    for _ in range(20):
        session.slots[0].zero_()
        session.run()
        found = session.slots[slot.memory.slot].view(torch.float32).view(4, 256)  # type: ignore[index]
        assert torch.allclose(found, wanted, rtol=0, atol=0.01)  # rounding grows along the chain
