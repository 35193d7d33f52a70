"""HGRN and RG-LRU against their papers' equations, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linattn import hgrn, hgrn2, rg_lru
from linattn.testing import Case, Form, Sizes, Subject, forms

SIZES = Sizes(B=2, T=45, V=7)
every_form = pytest.mark.parametrize("form", forms(Subject.of("hgrn"), dtype=torch.float64), ids=str)


def drawn(name: str) -> tuple[Tensor, Tensor]:
    tensors = Case(Subject.of(name), SIZES, torch.float64, "strong").tensors()
    return tensors["x"], tensors["g"]


def paper(x: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + weight_t x_t."""
    h, outputs = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + weight[:, t] * x[:, t]
        outputs.append(h)
    return torch.stack(outputs, 1)


@every_form
def test_hgrn(form: Form) -> None:
    """arXiv 2311.04823, eq. 5, without its phase."""
    x, g = drawn("hgrn")
    h, state = hgrn(x, g, mode=form.mode, backend=form.backend)
    wanted = paper(x, g.exp(), 1 - g.exp())
    torch.testing.assert_close(h, wanted)
    torch.testing.assert_close(state, wanted[:, -1])


def test_hgrn2_of_one_channel_a_head_is_hgrn() -> None:
    """With K = V = 1 and queries of 1 the matrix is the number."""
    x, g = (t.unsqueeze(-1) for t in drawn("hgrn"))
    o, S = hgrn2(torch.ones_like(x), x, g)
    h, state = hgrn(x.squeeze(-1), g.squeeze(-1))
    torch.testing.assert_close(o.squeeze(-1), h)
    torch.testing.assert_close(S.flatten(1), state)


@every_form
def test_rg_lru(form: Form) -> None:
    """arXiv 2402.19427, eq. 4: the input is scaled by √(1 - a²), a first input is not."""
    x, g = drawn("rg_lru")
    a = g.exp()
    weight = (1 - a.square()).sqrt()
    weight[:, 0] = 1
    h, state = rg_lru(x, g, mode=form.mode, backend=form.backend)
    torch.testing.assert_close(h, paper(x, a, weight))
    torch.testing.assert_close(state, h[:, -1])


def test_rg_lru_where_sequences_begin() -> None:
    x, g = drawn("rg_lru")
    whole, _ = rg_lru(x, g)
    _, state = rg_lru(x[:, :20], g[:, :20])
    rest, _ = rg_lru(x[:, 20:], g[:, 20:], state=state)  # goes on: nothing is written whole
    torch.testing.assert_close(rest, whole[:, 20:])
    packed, _ = rg_lru(x[:1], g[:1], cu_seqlens=torch.tensor([0, 20, 20, 45]))
    alone, _ = rg_lru(x[:1, 20:], g[:1, 20:])
    torch.testing.assert_close(packed, torch.cat([whole[:1, :20], alone], 1))
    first = torch.zeros(2, 45, dtype=torch.bool)
    first[0, 0] = first[1, 3] = True  # as for a row with three tokens of padding in front
    marked, _ = rg_lru(x * (torch.arange(45) >= torch.tensor([[0], [3]]))[..., None], g, first=first)
    torch.testing.assert_close(marked[0], whole[0])
    torch.testing.assert_close(marked[1:, 3:], rg_lru(x[1:, 3:], g[1:, 3:])[0])


def test_rg_lru_keeps_the_size_of_its_input() -> None:
    """What √(1 - a²) is for: inputs of variance 1 give states of variance 1, whatever the decay."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4000, 3, generator=random)
    h, _ = rg_lru(x, torch.tensor([-1.0, -0.1, -0.02]).expand_as(x))
    torch.testing.assert_close(h.var(1), torch.ones(1, 3), rtol=0.3, atol=0)


def test_rg_lru_has_finite_gradients_without_decay() -> None:
    x, g = torch.randn(1, 5, 3), torch.zeros(1, 5, 3, requires_grad=True)
    h, _ = rg_lru(x, g)
    (grad,) = torch.autograd.grad(h.sum(), g)
    assert grad.isfinite().all()
    assert grad.abs().max() <= 1000 * 2 * 5 * x.abs().max()


def test_bad_input() -> None:
    x, g = drawn("hgrn")
    q = x.unsqueeze(-1)
    for call, words in (
        (lambda: hgrn(x, g[:, 1:]), "g: got shape"),
        (lambda: hgrn(x, -g), "g: got a log-decay"),
        (lambda: hgrn(x, g, state=x[0]), "state: got shape"),
        (lambda: hgrn(x, g.to("meta")), "g: got device"),
        (lambda: hgrn(x, g, cu_seqlens=torch.tensor([0, 45])), "cu_seqlens: got a batch of 2"),
        (lambda: rg_lru(x[0], g[0]), "x: got shape"),
        (lambda: rg_lru(x, -g), "g: got a log-decay"),
        (lambda: rg_lru(x, g, first=torch.ones(2, 44, dtype=torch.bool)), "first: got torch.bool"),
        (lambda: rg_lru(x, g, first=torch.ones(2, 45)), "first: got torch.float32"),
        (lambda: rg_lru(x[:1], g[:1], cu_seqlens=torch.tensor([0, 46])), "cu_seqlens: got a last boundary of 46"),
        (lambda: hgrn2(q, q, q[:, :, 1:]), "g: got shape"),
        (lambda: hgrn2(q, q, -g.unsqueeze(-1)), "g: got a log-decay"),
        (lambda: hgrn2(q.float(), q, g.unsqueeze(-1)), "q: got dtype"),
    ):
        with pytest.raises(ValueError, match=words):
            call()  # type: ignore[no-untyped-call]
