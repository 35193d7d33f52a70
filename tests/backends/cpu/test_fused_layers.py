"""The compiled kernels of layers against the layers' torch code: the same numbers, gradients, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from linattn import engine
from linattn.backends import _fused
from linattn.backends.cpu import fused
from linattn.layers import RMSNorm, ShortConvolution, SwiGLU, l2_normalize
from linattn.layers.group_norm import GroupNorm
from linattn.layers.mixer import time_steps
from linattn.layers.token_shift import token_mix, token_shift
from linattn.mechanisms.mamba import skip_and_gate
from linattn.testing import Standard, accurate

Run = Callable[..., Any]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


class Subject(NamedTuple):
    """A layer, the shapes of what it reads, and how it is called; ``where`` are the sequences."""

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    call: Run
    where: Mapping[str, Tensor] = MappingProxyType({})


class Mixes(nn.Module):
    def __init__(self, number: int, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(number, channels))

    def forward(self, x: Tensor, state: Tensor | None = None, **where: Tensor) -> tuple[Tensor, ...]:
        mixed, last = token_mix(x, self.weight, state, **where)
        return *mixed, last


class Unit(SwiGLU):
    """The activation alone."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.in_proj = self.out_proj = nn.Identity()


class Channels(nn.Module):
    """A number for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))


def _steps(channels: nn.Module, x: Tensor) -> Tensor:
    return time_steps(x, channels.weight)


def _skipped(channels: nn.Module, y: Tensor, x: Tensor, z: Tensor) -> Tensor:
    return skip_and_gate(y, x, z, channels.weight)


def _gated(norm: nn.Module, x: Tensor, z: Tensor) -> Any:
    return norm(x, z)


def _plainly(layer: nn.Module, *inputs: Tensor, **where: Tensor) -> Any:
    return layer(*inputs, **where)


MASK = torch.ones(3, 70, dtype=torch.bool)
MASK[0, :9], MASK[1, 60:], MASK[2] = False, False, False
PACKED = torch.tensor([0, 1, 1, 3, 68, 140])
ROW = (1, 140)


def _convolution(*, C: int = 21, **options: Any) -> Callable[[], nn.Module]:
    return lambda: ShortConvolution(C, **options)


SUBJECTS: dict[str, Subject] = {
    "convolution": Subject(_convolution(bias=True), ((2, 130, 21),), _plainly),
    "convolution of one token": Subject(_convolution(), ((2, 1, 21), (2, 3, 21)), _plainly),
    "wide, continued": Subject(_convolution(width=7, C=300), ((1, 70, 300), (1, 6, 300)), _plainly),
    "shorter than it sees": Subject(_convolution(width=31, C=8), ((2, 5, 8), (2, 30, 8)), _plainly),
    "width 1": Subject(_convolution(width=1, bias=True), ((2, 9, 21), (2, 0, 21)), _plainly),
    "no activation": Subject(_convolution(width=2, activation=False), ((2, 66, 21), (2, 1, 21)), _plainly),
    "padded": Subject(_convolution(C=32), ((3, 70, 32), (3, 3, 32)), _plainly, {"mask": MASK}),
    "packed": Subject(_convolution(bias=True), ((*ROW, 21), (5, 3, 21)), _plainly, {"cu_seqlens": PACKED}),
    "norm": Subject(lambda: RMSNorm(48), ((2, 37, 48),), _plainly),
    "norm of odd heads, gated": Subject(lambda: RMSNorm(21), ((2, 11, 3, 21),) * 2, _gated),
    "norm without weight": Subject(lambda: RMSNorm(7, affine=False), ((5, 7),), _plainly),
    "norm of groups, gate first": Subject(lambda: RMSNorm(96, groups=4, gate_first=True), ((2, 40, 96),) * 2, _gated),
    "long norm, gated": Subject(lambda: RMSNorm(4500), ((3, 4500),) * 2, _gated),
    "long norm, gate first": Subject(lambda: RMSNorm(2051, gate_first=True), ((3, 2051),) * 2, _gated),
    "unit length": Subject(nn.Identity, ((2, 11, 3, 20),), lambda _, x: l2_normalize(x)),
    "group norm": Subject(lambda: GroupNorm(3, 20), ((2, 40, 3, 20),), _plainly),
    "group norm without bias": Subject(lambda: GroupNorm(2, 64, bias=False), ((2, 40, 2, 64),), _plainly),
    "gated unit": Subject(Unit, ((2, 40, 42),), _plainly),
    "long gated unit": Subject(Unit, ((3, 4100),), _plainly),
    "steps": Subject(lambda: Channels(150), ((2, 270, 150),), _steps),
    "long steps": Subject(lambda: Channels(1100), ((2, 1100),), _steps),
    "skip": Subject(lambda: Channels(150), ((2, 270, 150),) * 3, _skipped),
    "long skip": Subject(lambda: Channels(1101), ((2, 1101),) * 3, _skipped),
    "mixes": Subject(lambda: Mixes(6, 150), ((2, 70, 150),), _plainly),
    "mixes of one token": Subject(lambda: Mixes(3, 16), ((2, 1, 16), (2, 16)), _plainly),
    "padded mixes": Subject(lambda: Mixes(2, 16), ((3, 70, 16), (3, 16)), _plainly, {"mask": MASK}),
    "packed mixes": Subject(lambda: Mixes(5, 21), ((*ROW, 21), (5, 21)), _plainly, {"cu_seqlens": PACKED}),
}
every_subject = pytest.mark.parametrize("name", SUBJECTS)


@contextmanager
def torch_code() -> Iterator[None]:
    """The layers as they are where there is no library."""
    kernels = dict(_fused.KERNELS)
    _fused.KERNELS.clear()
    try:
        yield
    finally:
        _fused.KERNELS.update(kernels)


def layer_of(subject: Subject) -> nn.Module:
    torch.manual_seed(0)
    layer = subject.make()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.6)
    return layer


def inputs_of(subject: Subject, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=random).to(dtype) for shape in subject.shapes]


def results_of(subject: Subject, layer: nn.Module, inputs: list[Tensor], call: Run | None = None) -> dict[str, Tensor]:
    """Outputs, and the gradients of inputs and parameters for random gradients of real tokens' outputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = (call or subject.call)(layer, *inputs, **subject.where)
    outputs = list(y) if isinstance(y, tuple) else [y]
    mask = subject.where.get("mask")
    if mask is not None:
        outputs = [t[mask] if t.shape[:2] == mask.shape else t for t in outputs]
    random = torch.Generator().manual_seed(2)
    grads = [torch.randn(t.shape, generator=random).to(inputs[0].dtype).to(t) for t in outputs]
    wanted = [*inputs, *layer.parameters()]
    moved, given = zip(*((t, grad) for t, grad in zip(outputs, grads, strict=True) if t.requires_grad), strict=True)
    found = torch.autograd.grad(moved, wanted, given, allow_unused=True, materialize_grads=True)
    results = {f"output {n}": t for n, t in enumerate(outputs)}
    return {name: t.detach() for name, t in (results | {f"gradient {n}": t for n, t in enumerate(found)}).items()}


def standard(subject: Subject, dtype: torch.dtype) -> Standard:
    """Right is torch in float64; wrong by at most twice as much as torch in ``dtype``."""
    with torch_code():
        layer, inputs = layer_of(subject), inputs_of(subject, dtype)
        plain = results_of(subject, layer, inputs)
        truth = results_of(subject, layer.double(), [x.double() for x in inputs])
    sizes = {name: float(t.abs().max()) if t.numel() else 0.0 for name, t in truth.items()}
    errors = [float((plain[name].double() - t).abs().max()) / sizes[name] for name, t in truth.items() if sizes[name]]
    allowed = 2 * (max(errors) + torch.finfo(dtype).eps)
    return Standard(truth, {name: allowed * size for name, size in sizes.items()})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that have run."""
    names: list[str] = []
    run = fused._run

    def recorded(name: str, *rest: Any, **options: Any) -> None:
        names.append(name)
        run(name, *rest, **options)

    monkeypatch.setattr(fused, "_run", recorded)
    return names


@every_subject
@DTYPES
@pytest.mark.usefixtures("level", "poisoned")
def test_equals_the_torch_code(name: str, dtype: torch.dtype, calls: list[str]) -> None:
    subject = SUBJECTS[name]
    inputs = inputs_of(subject, dtype)
    results = results_of(subject, layer_of(subject), inputs)
    assert len(calls) == 2  # forward and backward
    assert results["output 0"].dtype == (torch.float32 if "steps" in name else dtype)
    accurate(results, standard(subject, dtype), name)
    with torch.no_grad():  # generation
        y = subject.call(layer_of(subject), *inputs, **subject.where)
    y = y[0] if isinstance(y, tuple) else y
    mask = subject.where.get("mask")
    assert torch.equal(y if mask is None else y[mask], results["output 0"])


@pytest.mark.parametrize(
    "name", ["convolution", "norm of odd heads, gated", "norm of groups, gate first", "gated unit", "steps", "skip"]
)
@pytest.mark.parametrize("layout", ["part of a projection", "transposed", "expanded"])
def test_any_layout(name: str, layout: str) -> None:
    """Slices are read where they lie; whatever else, from a copy. Gradients of outputs may lie anywhere, too."""
    subject = SUBJECTS[name]
    inputs = inputs_of(subject, torch.float32)
    if layout == "expanded":
        inputs = [x[:1].expand_as(x) for x in inputs]
    wanted = results_of(subject, layer_of(subject), [x.contiguous() for x in inputs])

    def lay(x: Tensor) -> Tensor:
        if layout == "transposed":
            return x.mT.contiguous().mT
        if layout == "expanded":
            return x[:1].expand_as(x)
        return torch.stack([x.flatten(2), x.flatten(2)], 2).flatten(2)[..., : x.flatten(2).shape[-1]].view_as(x)

    def call(layer: nn.Module, *inputs: Tensor) -> Any:
        y = subject.call(layer, *map(lay, inputs))
        return (lay(y[0]), y[1]) if isinstance(y, tuple) else lay(y)

    results = results_of(subject, layer_of(subject), inputs, call)
    exact = [n for n in wanted if layout != "expanded" or "output" in n]  # expanded gradients are sums over rows
    assert all(torch.equal(results[n], wanted[n]) for n in exact)


@pytest.mark.parametrize(("name", "separate"), [("packed", "convolution"), ("packed mixes", "mixes")])
def test_packed_equals_separate_and_padded_alone(name: str, separate: str) -> None:
    """Bit for bit, the states too."""
    subject = SUBJECTS[name]
    layer, (x, state) = layer_of(subject), inputs_of(subject, torch.float32)
    *y, last = layer(x, state, cu_seqlens=PACKED)
    lengths = PACKED.diff().tolist()
    for n, part in enumerate(x.split(lengths, 1)):
        start, end = int(PACKED[n]), int(PACKED[n + 1])
        if end > start:
            *alone, tail = layer(part, state[n : n + 1])
            assert all(torch.equal(a, b[:, start:end]) for a, b in zip(alone, y, strict=True))
            assert torch.equal(tail[0], last[n])
        else:
            assert torch.equal(state[n], last[n])
    x = inputs_of(subject, torch.float32)[0].view(2, 70, 21)
    *y, last = layer(x, state[:2], mask=MASK[:2])
    for n, mask in enumerate(MASK[:2]):
        *alone, tail = layer(x[n : n + 1, mask], state[n : n + 1])
        assert all(torch.equal(a[0], b[n, mask]) for a, b in zip(alone, y, strict=True))
        assert all((b[n, ~mask] == 0).all() for b in y)
        assert torch.equal(tail[0], last[n])


@pytest.mark.parametrize("name", ["wide, continued", "mixes"])
def test_pieces_equal_the_whole(name: str) -> None:
    """With the state carried, and gradients through it."""
    subject = SUBJECTS[name]

    def pieces(layer: nn.Module, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, ...]:
        outputs = []
        for part in x.split([1, 2, 3, x.shape[1] - 6], 1):
            *y, state = layer(part, state)
            outputs.append(y)
        assert state is not None
        return *(torch.cat(parts, 1) for parts in zip(*outputs, strict=True)), state

    results = results_of(subject, layer_of(subject), inputs_of(subject, torch.float32), pieces)
    accurate(results, standard(subject, torch.float32), name)


@every_subject
def test_threads_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits on one thread and on three, and twice."""
    subject, found = SUBJECTS[name], []
    for threads in (1, 3, 3):
        monkeypatch.setattr(fused, "threads_for", lambda work, threads=threads: threads)
        found.append(results_of(subject, layer_of(subject), inputs_of(subject, torch.float32)))
    assert all(torch.equal(found[0][n], other[n]) for other in found[1:] for n in found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("level")
def test_gates_of_any_size(dtype: torch.dtype) -> None:
    """silu and its slope from one end of the numbers to the other; NaN stays NaN."""
    z = torch.tensor([-math.inf, -3e38, -1e4, -100, -89, -87, -20, -1e-30, 0, 1e-30, 20, 89, 1e4, 3e38, math.nan])
    z = z.to(dtype).requires_grad_()
    y = _fused.glu(torch.stack([z, torch.ones_like(z)], -1))[:, 0]
    (slope,) = torch.autograd.grad(y, z, torch.ones_like(y))
    wide = z.detach().double().requires_grad_()
    wanted = nn.functional.silu(wide)
    (steep,) = torch.autograd.grad(wanted, wide, torch.ones_like(wanted))
    for got, right in ((y, wanted), (slope, steep)):
        torch.testing.assert_close(got[1:-1].double(), right[1:-1], rtol=2 * torch.finfo(dtype).eps, atol=1e-35)
        assert got[-1].isnan()
    assert y[0].abs() <= 1e-35
    assert slope[0].abs() <= 1e-35


@pytest.mark.parametrize(
    "name", ["padded", "packed", "norm of odd heads, gated", "gated unit", "packed mixes", "steps", "skip"]
)
def test_the_registered_ops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SUBJECTS[name]
    call, ops = _fused.call, []

    def recorded(op: str, *values: Any) -> Any:
        ops.append((op, [v.detach().clone() if isinstance(v, Tensor) else v for v in values]))
        return call(op, *values)

    monkeypatch.setattr(_fused, "call", recorded)
    results_of(subject, layer_of(subject), inputs_of(subject, torch.float32))
    (forward, values), (backward, others) = ops
    assert backward == f"{forward}_backward"
    for op, arguments in ((forward, values), (backward, others)):
        moving = [
            v.requires_grad_(op == forward and v.is_floating_point()) if isinstance(v, Tensor) else v for v in arguments
        ]
        torch.library.opcheck(getattr(torch.ops.linattn, op), tuple(moving))


@pytest.mark.parametrize(
    "name", ["convolution", "padded", "packed", "norm of odd heads, gated", "mixes", "gated unit", "steps", "skip"]
)
def test_one_graph(name: str, calls: list[str]) -> None:
    subject = SUBJECTS[name]
    torch.compiler.reset()
    layer, inputs = layer_of(subject), inputs_of(subject, torch.float32)
    wanted = results_of(subject, layer, inputs)
    run = torch.compile(subject.call, fullgraph=True, backend="aot_eager")
    calls.clear()
    results = results_of(subject, layer, inputs, run)
    assert len(calls) == 2
    assert all(torch.equal(results[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("level")
def test_steps_of_any_size(dtype: torch.dtype) -> None:
    """softplus to float32's accuracy where it is tiny, too; NaN stays NaN."""
    z = torch.tensor([-math.inf, -3e38, -110, -80, -20, -1e-30, 0, 1e-30, 20, 89, 3e38, math.inf, math.nan]).to(dtype)
    z.requires_grad_()
    y = time_steps(z[:, None], torch.zeros(1))[:, 0]
    (slope,) = torch.autograd.grad(y, z, torch.ones_like(y))
    wide = z.detach().double()
    torch.testing.assert_close(y.double(), nn.functional.softplus(wide), rtol=5e-7, atol=1e-44, equal_nan=True)
    rtol = max(5e-7, torch.finfo(dtype).eps)
    torch.testing.assert_close(slope.double(), wide.sigmoid(), rtol=rtol, atol=1e-38, equal_nan=True)


@pytest.mark.parametrize("name", ["convolution", "norm", "gated unit", "mixes", "steps"])
def test_there_is_no_second_derivative(name: str) -> None:
    subject = SUBJECTS[name]
    (x,) = (t.requires_grad_() for t in inputs_of(subject, torch.float32))
    y = subject.call(layer_of(subject), x)
    y = y[0] if isinstance(y, tuple) else y
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; LINATTN_BACKEND=reference has"):
        grad.sum().backward()


def test_what_takes_the_torch_code(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SUBJECTS["norm"]
    norm, (x,) = RMSNorm(48), inputs_of(subject, torch.float32)
    y = norm(x)
    assert calls == ["norm"]
    calls.clear()
    norm.double()(x.double())
    norm.float()
    torch.testing.assert_close(torch.func.vmap(norm)(x), y)
    with FakeTensorMode(allow_non_fake_inputs=True):
        norm(torch.zeros(2, 48))
    for named in ("chunked", "reference", "triton"):
        monkeypatch.setattr(engine, "PREFERRED", named)
        torch.testing.assert_close(norm(x), y)
    ShortConvolution(3, 33)(torch.zeros(1, 4, 3))
    assert not calls
    monkeypatch.setattr(engine, "PREFERRED", "cpu")
    assert torch.equal(norm(x), y)
    assert calls == ["norm"]


def test_bad_input() -> None:
    convolution, mixes = ShortConvolution(5), Mixes(2, 5)
    x = torch.zeros(1, 4, 5)
    for layer in (convolution, mixes):
        with pytest.raises(ValueError, match=r"x: got shape \[1, 4, 6\], wanted \[B, T, 5\]"):
            layer(torch.zeros(1, 4, 6))
        with pytest.raises(ValueError, match="cu_seqlens: got a last boundary of 9, wanted T=4"):
            layer(x, cu_seqlens=torch.tensor([0, 9]))
        with pytest.raises(ValueError, match=r"mask: got shape \[1, 3\], wanted \[1, 4\]"):
            layer(x, mask=torch.ones(1, 3, dtype=torch.bool))
        with pytest.raises(ValueError, match="state: got"):
            layer(x, torch.zeros(1, 2, 5))
    with pytest.raises(ValueError, match=r"weight: got shape \[6\], wanted \[5\]"):
        GroupNorm(2, 3)(torch.zeros(2, 1, 5))
    with pytest.raises(ValueError, match=r"bias: got shape \[2\], wanted \[5\]"):
        time_steps(x, torch.zeros(2))
    with pytest.raises(ValueError, match=r"z: got shape \[1, 4, 2\], wanted \[1, 4, 5\]"):
        skip_and_gate(x, x, x[..., :2], torch.zeros(5))
    with pytest.raises(ValueError, match=r"weight: got shape \[1\], wanted \[5\]"):
        skip_and_gate(x, x, x, torch.zeros(1))


def test_a_mix_is_the_shift_and_its_interpolation() -> None:
    x, mixes = torch.randn(2, 5, 3), Mixes(2, 3)
    (first, _), last = token_mix(x, mixes.weight)
    before, end = token_shift(x)
    torch.testing.assert_close(first, x + mixes.weight[0] * (before - x))
    assert torch.equal(last, end)
