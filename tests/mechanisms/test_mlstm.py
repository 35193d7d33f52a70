"""mLSTM against its paper's equations, with gates of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from linattn import MLSTM, MLSTMState, mlstm
from linattn.testing import Case, Form, Sizes, Subject, forms

SIZES = Sizes(B=2, T=45, G=2, H=4, K=12, V=7)
every_form = pytest.mark.parametrize("form", forms(Subject.of("mlstm"), dtype=torch.float64), ids=str)


def drawn() -> dict[str, Tensor]:
    return Case(Subject.of("mlstm"), SIZES, torch.float64).tensors()


def run(x: dict[str, Tensor], form: Form, **options: Any) -> Any:
    return mlstm(**x, **options, mode=form.mode, backend=form.backend)


def paper(x: dict[str, Tensor], *, normalize: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """arXiv 2405.04517, eq. 19 to 27, without a stabiliser: h, C and n, whose gates are small enough."""
    q, k = (x[name].repeat_interleave(2, 2) for name in "qk")
    C, n, outputs = torch.zeros(2, 4, 12, 7).double(), torch.zeros(2, 4, 12).double(), []
    for t in range(q.shape[1]):
        f, i = (x[name][:, t].exp()[..., None] for name in "fi")
        C = f[..., None] * C + i[..., None] * k[:, t, :, :, None] * x["v"][:, t, :, None, :]
        n = f * n + i * k[:, t]
        scaled = q[:, t] / 12**0.5
        h = torch.einsum("bhkv,bhk->bhv", C, scaled)
        floor = torch.ones(1, dtype=torch.float64)
        below = torch.maximum((n * scaled).sum(-1, keepdim=True).abs(), floor) if normalize else floor
        outputs.append(h / below)
    return torch.stack(outputs, 1), C, n


@every_form
def test_the_paper(form: Form) -> None:
    x = drawn()
    h, C, n = paper(x)
    got, state = run(x, form, eps=0.0)
    torch.testing.assert_close(got, h)
    size = state.m.exp()[..., None]
    torch.testing.assert_close(state.C * size[..., None], C)
    torch.testing.assert_close(state.n * size, n)


@every_form
def test_without_a_normaliser(form: Form) -> None:
    x = drawn()
    x["i"] = torch.nn.functional.logsigmoid(x["i"])
    h, C, _ = paper(x, normalize=False)
    got, state = run(x, form, normalize=False)
    torch.testing.assert_close(got, h)
    torch.testing.assert_close(state, C)


@every_form
@pytest.mark.parametrize("level", [-2000.0, 2000.0])
def test_the_level_of_the_input_gates(form: Form, level: float) -> None:
    """Far up only their differences count, and the denominator is never the floor; far down nothing is written."""
    x = drawn()
    lifted, state = run(x | {"i": x["i"] + level}, form, eps=0.0)
    assert lifted.isfinite().all()
    assert all(part.isfinite().all() for part in state)
    if level < 0:
        assert lifted.abs().max() == 0
        return
    higher, _ = run(x | {"i": x["i"] + level + 500}, form, eps=0.0)
    torch.testing.assert_close(higher, lifted)


@every_form
def test_one_token_above_all_others(form: Form) -> None:
    """An input gate of e^500 leaves nothing else in sight, until it is forgotten."""
    x = drawn()
    x["i"][:, 10] = 500
    x["f"][:, 30] = -1e4
    h, _ = run(x, form, eps=0.0)
    kq = torch.einsum("btgk,bgk->btg", x["q"], x["k"][:, 10]).repeat_interleave(2, 2)[..., None]
    torch.testing.assert_close(h[:, 10:30], kq[:, 10:30].sign() * x["v"][:, 10:11].expand(2, 20, 4, 7))
    rest, _ = run({name: value[:, 30:] for name, value in x.items()}, form, eps=0.0)
    torch.testing.assert_close(h[:, 30:], rest)


def test_float32_of_a_large_state() -> None:
    """The maximum is rounded to float32, here to a sixteenth; what it loses is in the state."""
    x = {name: value.float() for name, value in drawn().items()}
    x["i"] += 1e6
    _, single = mlstm(**x)
    _, double = mlstm(**{name: value.double() for name, value in x.items()})
    assert isinstance(single, MLSTMState)
    assert isinstance(double, MLSTMState)
    assert (single.m != double.m).any()
    size = (double.m - single.m).exp()[..., None]
    bound = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(single.n.double(), double.n * size, **bound)
    torch.testing.assert_close(single.C.double(), double.C * size[..., None], **bound)


def test_gradients_with_an_eps_that_counts() -> None:
    """The one thing that depends on the maximum."""
    x = Case(Subject.of("mlstm"), Sizes(B=1, T=4, G=1, H=2, K=2, V=2), torch.float64).tensors()
    C, n, m = torch.randn(1, 2, 2, 2).double(), torch.randn(1, 2, 2).double(), torch.randn(1, 2).double()

    def call(*tensors: Tensor) -> Any:
        h, state = mlstm(*tensors[:5], eps=0.3, state=MLSTMState(*tensors[5:]))
        return h, *state

    torch.autograd.gradcheck(call, [t.requires_grad_() for t in (*x.values(), C, n, m)])


def test_bad_input() -> None:
    x = drawn()
    state = MLSTMState(torch.zeros(2, 4, 12, 7).double(), torch.zeros(2, 4, 12).double(), torch.zeros(2, 4).double())
    for change, words in (
        ({"i": x["i"][..., 0]}, "i: got shape"),
        ({"f": x["f"][:, 1:]}, "f: got shape"),
        ({"f": -x["f"]}, "f: got a log-decay"),
        ({"i": x["i"].to("meta")}, "i: got device"),
        ({"k": x["k"][..., 1:]}, "k: got shape"),
        ({"state": state.C}, r"state: got Tensor, wanted an MLSTMState\(C, n, m\)"),
        ({"state": "none"}, "state: got str"),
        ({"state": state._replace(m=state.m[:1])}, "state.m: got shape"),
        ({"state": state._replace(m=state.m.float())}, "state.m: got dtype"),
        ({"state": state._replace(n=state.n[..., 1:])}, "state.n: got shape"),
        ({"state": state, "normalize": False}, "state: got"),
        ({"cu_seqlens": torch.tensor([0, 45])}, "cu_seqlens: got a batch of 2"),
        ({name: t[:1] for name, t in x.items()} | {"cu_seqlens": torch.tensor([0, 50])}, "cu_seqlens: got a last"),
        ({"mode": "fast"}, "mode: got 'fast'"),
    ):
        with pytest.raises(ValueError, match=words):
            mlstm(**(x | change))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="input_gate: got 'linear'"):
        MLSTM(16, input_gate="linear")
