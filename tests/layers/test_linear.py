"""Projections in half precision on machines without instructions for it: as exact as rounding once allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from linattn import layers
from linattn.layers import linear as module
from linattn.layers.linear import FEW, Linear, einsum, linear

HALVES = (torch.bfloat16, torch.float16)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
Product = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes of torch's products, on a machine without instructions, where weights are cut in several slices."""
    monkeypatch.setattr(module, "WIDENED", HALVES)
    monkeypatch.setattr(module, "SLICE", 1000)
    found: list[torch.dtype] = []
    product = F.linear

    def recorded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found.append(x.dtype)
        return product(x, weight, bias)

    monkeypatch.setattr(F, "linear", recorded)
    return found


def drawn(dtype: torch.dtype, *shape: int, bias: bool = True) -> list[Tensor]:
    """x of the shape, a weight and a bias."""
    random = torch.Generator().manual_seed(0)
    shapes = [shape, (57, shape[-1]), (57,)][: 2 + bias]
    return [torch.randn(s, generator=random).to(dtype) for s in shapes]


def results(product: Product, given: list[Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The product and the gradients of what it was given."""
    leaves = [t.detach().clone().requires_grad_() for t in given]
    y = product(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype or y.dtype).to(y.dtype)
    return dict(zip(("y", "x", "weight", "bias"), (y.detach(), *torch.autograd.grad(y, leaves, dy)), strict=False))


@every_half
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 37, 40), (FEW, 40), (3, 0, 40), (200, 1)])
@pytest.mark.usefixtures("poisoned")
def test_no_less_exact_than_the_truth_rounded_once(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    """Gradients included: torch's own products in half precision cannot be nearer."""
    given = drawn(dtype, *shape, bias=bias)
    truth = results(F.linear, [t.double() for t in given], dtype)
    found = results(linear, given)
    for name, exact in truth.items():
        assert found[name].dtype == dtype
        assert found[name].shape == exact.shape
        least = (exact.to(dtype).double() - exact).norm()
        assert (found[name].double() - exact).norm() <= 1.01 * least + 1e-7 * exact.norm(), name


@every_half
@pytest.mark.parametrize("rows", [1, 13])
def test_blocks_of_a_weight(dtype: torch.dtype, rows: int) -> None:
    """A product for each head, as exact."""
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=random).to(dtype) for s in ((2, rows, 3, 20), (3, 20, 24))]

    def product(run: Callable[..., Tensor]) -> Product:
        return lambda x, weight: run("bthi,hio->btho", x, weight)

    truth = results(product(torch.einsum), [t.double() for t in given], dtype)
    found = results(product(einsum), given)
    for name, exact in truth.items():
        assert found[name].dtype == dtype
        least = (exact.to(dtype).double() - exact).norm()
        assert (found[name].double() - exact).norm() <= 1.01 * least + 1e-7 * exact.norm(), name
    wide = [t.float() for t in given]
    assert torch.equal(product(einsum)(*wide), product(torch.einsum)(*wide))
    with torch.autocast("cpu", dtype):
        assert torch.equal(product(einsum)(*wide), found["y"])


@every_half
def test_the_product_is_float32s(dtype: torch.dtype, calls: list[torch.dtype]) -> None:
    x, weight, bias = drawn(dtype, FEW, 40)
    calls.clear()
    y = linear(x, weight, bias)
    assert calls == [torch.float32] * 3  # slices
    assert torch.equal(y, F.linear(x.float(), weight.float(), bias.float()).to(dtype))
    for none_needed in (torch.no_grad, torch.inference_mode):
        with none_needed():
            assert torch.equal(linear(x, weight, bias), y)


def test_what_takes_torchs_own_product(calls: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows, float32 and float64, torch.func, shapes without data, and machines with instructions."""
    given = drawn(torch.bfloat16, FEW, 40)
    x, weight, bias = given

    def checked(run: Callable[[], object], dtype: torch.dtype = torch.bfloat16) -> None:
        calls.clear()
        run()
        assert calls == [dtype]

    checked(lambda: linear(x[: FEW - 1], weight, bias))
    for dtype in (torch.float32, torch.float64):
        wide = [t.to(dtype) for t in given]
        assert torch.equal(linear(*wide), F.linear(*wide))
        checked(lambda wide=wide: linear(*wide), dtype)  # type: ignore[misc]
    checked(lambda: torch.func.grad(lambda w: linear(x, w, bias).sum())(weight))
    checked(lambda: torch.func.vmap(linear, (0, None, None))(x.expand(2, FEW, 40), weight, bias))
    with FakeTensorMode(allow_non_fake_inputs=True):
        checked(lambda: linear(torch.empty(FEW, 40, dtype=torch.bfloat16), weight, bias))
    monkeypatch.setattr(module, "WIDENED", ())
    checked(lambda: linear(x, weight, bias))
    with pytest.raises(RuntimeError):
        linear(x, weight.float())


@every_half
def test_autocast(dtype: torch.dtype, calls: list[torch.dtype]) -> None:
    """Weights in float32, the product of what autocast rounds them to; gradients in float32."""
    given = drawn(torch.float32, 9, 40)

    def rounded(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return linear(*tensors)

    found = results(rounded, given)
    wanted = results(lambda *tensors: linear(*(t.to(dtype) for t in tensors)), given)
    assert {name: t.dtype for name, t in found.items()} == dict.fromkeys(("x", "weight", "bias"), torch.float32) | {
        "y": dtype
    }
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    x, *rest = given
    mixed = results(rounded, [x.to(dtype), *rest])  # what an earlier product gave, with weights in float32
    assert torch.equal(mixed["y"], wanted["y"])
    assert set(calls) == {torch.float32}


@every_half
def test_one_graph(dtype: torch.dtype) -> None:
    torch.compiler.reset()
    given = drawn(dtype, 2, 9, 40)
    wanted = results(linear, given)
    found = results(torch.compile(linear, fullgraph=True, backend="aot_eager"), given)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)


def test_it_is_a_linear_of_torch() -> None:
    """What looks for projections by their type finds them, by the same names."""
    torch.manual_seed(0)
    ours = Linear(3, 5)
    assert isinstance(ours, nn.Linear)
    assert layers.Linear is Linear
    theirs = nn.Linear(3, 5)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(4, 3)
    assert torch.equal(ours(x), theirs(x))
