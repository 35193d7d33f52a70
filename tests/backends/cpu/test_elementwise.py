"""The scan and the exponentially weighted average on every instruction set, and what only they can get wrong."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from linattn import engine
from linattn.mechanisms.rwkv4 import RWKV4State, rwkv4
from linattn.testing import Case, Form, Sizes, Subject, law_accuracy, law_layout, law_nothing, law_pieces, law_rows

CPU = Form("cpu", "recurrent")
AVERAGE, SCAN = Subject.of("rwkv4"), Subject.of("hgrn")
BOTH = pytest.mark.parametrize("subject", [AVERAGE, SCAN], ids=str)


@pytest.mark.usefixtures("level", "poisoned")
@BOTH
@pytest.mark.parametrize("V", [1, 20, 129])
def test_blocks_and_strips_of_any_length(subject: Subject, V: int) -> None:
    law_accuracy(Case(subject, Sizes(B=1, T=66, V=V)), CPU)
    if V == 20:
        law_accuracy(Case(subject, Sizes(V=V), lengths=(3, 0, 1, 65, 0), continued=False), CPU)


@pytest.mark.usefixtures("level")
@BOTH
@pytest.mark.parametrize("gates", ["mixed", "-1e-6", "-inf"])
def test_gates(subject: Subject, gates: str) -> None:
    law_accuracy(Case(subject, Sizes(T=20), gates=gates), CPU)


@pytest.mark.usefixtures("level")
@BOTH
def test_half_outside_rows_pieces_and_nothing(subject: Subject) -> None:
    law_accuracy(Case(subject, Sizes(T=20), torch.bfloat16), CPU)
    law_accuracy(Case(subject, Sizes(T=20), torch.float16, gate_dtype=torch.float32), CPU)
    law_rows(Case(subject, Sizes(T=9)), CPU)
    law_pieces(Case(subject, Sizes(T=9)), (1, 4), CPU)
    law_layout(Case(subject, Sizes(T=9)), CPU, "sliced")
    law_nothing(Case(subject), CPU)


@pytest.mark.usefixtures("level")
def test_an_average_counts_many_small_decays() -> None:
    """A maximum in one float32 would forget decays below half of its last digit."""
    T, k = 4000, torch.full((1, 4000, 3), -30.0)
    k[:, 0] = 3.0
    v, g, u = torch.randn(1, T, 3), torch.full((3,), -1e-7), torch.zeros(3)
    o, state = rwkv4(k, v, g, u, backend="cpu")
    right, final = rwkv4(k.double(), v.double(), g.double(), u.double(), backend="reference")
    torch.testing.assert_close(o.double(), right, rtol=2e-5, atol=2e-5)
    for name in ("numerator", "denominator"):
        ours, theirs = ((getattr(s, name).double() * s.maximum.double().exp()) for s in (state, final))
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("level")
def test_the_last_of_equal_keys_is_the_maximum() -> None:
    """Where keys tie, the gradient of the maximum goes to one of them, the same as elsewhere."""
    grads = []
    for backend in ("cpu", "chunked"):
        k = torch.ones(1, 5, 2, requires_grad=True)
        v, g, u = torch.arange(10.0).view(1, 5, 2), torch.zeros(2), torch.zeros(2)
        _, state = rwkv4(k, v, g, u, backend=backend)
        grads.append(torch.autograd.grad(state.maximum.sum(), k)[0])
    assert torch.equal(*grads)
    assert grads[0][0, :, 0].tolist() == [0, 0, 0, 0, 1]


def test_bad_gates_are_refused() -> None:
    x = torch.randn(1, 3, 2)
    for g in (torch.full((2,), 0.1), torch.full((1, 3, 2), torch.nan)):
        with pytest.raises(ValueError, match=r"g: got"):
            rwkv4(x, x, g, torch.zeros(2), backend="cpu")
        with pytest.raises(ValueError, match=r"g: got"):
            engine.scan(x, g, backend="cpu")


@pytest.mark.parametrize("continued", [False, True])
def test_the_registered_ops(continued: bool) -> None:
    x, v, g = (torch.randn(1, 5, 4, requires_grad=True) for _ in range(3))
    g = (-g.detach().abs()).requires_grad_()
    u, ends = torch.randn(4, requires_grad=True), torch.tensor([0, 2, 5])
    state = [torch.rand(2, 4, requires_grad=True) for _ in range(3)] if continued else [None] * 3
    forward, backward = torch.ops.linattn.elementwise_forward, torch.ops.linattn.elementwise_backward
    for inputs in ((x, v, g, u, *state, ends), (x, None, g, None, state[0], None, None, ends)):
        torch.library.opcheck(forward, (*inputs, True))
        y, *_, kept = forward(*inputs, True)
        plain = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, inputs)
        torch.library.opcheck(backward, (torch.randn(y.shape), None, None, None, kept.detach(), *plain))


def test_a_state_is_the_one_that_other_backends_return() -> None:
    k, v = torch.randn(2, 2, 7, 3).unbind()
    g, u = -torch.rand(3), torch.randn(3)
    ours, theirs = (rwkv4(k, v, g, u, backend=backend)[1] for backend in ("cpu", "chunked"))
    assert isinstance(ours, RWKV4State)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_there_is_no_second_derivative() -> None:
    x, g = torch.randn(1, 5, 3, requires_grad=True), -torch.rand(3)
    h, _ = engine.scan(x, g, backend="cpu")
    (grad,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; LINATTN_BACKEND=reference has"):
        grad.sum().backward()
