"""RWKV's recurrences against their papers' formulas, and RWKV-4 where its exponentials overflow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linattn import rwkv4, rwkv5, rwkv6, rwkv7
from linattn.mechanisms import RWKV4State
from linattn.testing import Case, Form, Sizes, Subject, forms

SIZES = Sizes(B=2, T=45, G=1, H=2, K=12, V=7)
every_form = pytest.mark.parametrize("form", forms(Subject.of("rwkv6"), dtype=torch.float64), ids=str)


def drawn(name: str, gates: str = "ordinary") -> dict[str, Tensor]:
    return Case(Subject.of(name), SIZES, torch.float64, gates).tensors()


def as_heads(x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return x["q"].expand(-1, -1, 2, -1), x["k"].expand(-1, -1, 2, -1), x["v"]


@every_form
def test_rwkv4_is_a_weighted_average(form: Form) -> None:
    """arXiv 2305.13048, eq. 16, as it stands there: sums over all tokens before."""
    x = drawn("rwkv4")
    k, v, g, u = (x[name] for name in "kvgu")
    outputs = []
    for t in range(45):
        before = torch.arange(t, dtype=torch.float64)[None, :, None]
        weight = ((t - 1 - before) * g + k[:, :t]).exp()
        own = (u + k[:, t]).exp()
        outputs.append(((weight * v[:, :t]).sum(1) + own * v[:, t]) / (weight.sum(1) + own))
    o, state = rwkv4(**x, mode=form.mode, backend=form.backend)
    torch.testing.assert_close(o, torch.stack(outputs, 1))
    weight = ((44 - torch.arange(45, dtype=torch.float64))[:, None] * g + k).exp()
    torch.testing.assert_close(state.denominator * state.maximum.exp(), weight.sum(1))
    torch.testing.assert_close(state.numerator * state.maximum.exp(), (weight * v).sum(1))


@every_form
@pytest.mark.parametrize("name", ["rwkv5", "rwkv5 of heads", "rwkv6"])
def test_rwkv5_and_6_read_before_they_write(name: str, form: Form) -> None:
    """arXiv 2404.05892, section 4: wkv_t = Diag(u) k_tᵀ v_t + Σ_i Diag(Π w) k_iᵀ v_i, o_t = r_t wkv_t."""
    x = drawn(name.split()[0])
    if name == "rwkv5 of heads":
        x["g"] = x["g"][:, 0]
    r, k, v = as_heads(x)
    decay = x["g"].exp()
    S, outputs = torch.zeros(2, 2, 12, 7, dtype=torch.float64), []
    for t in range(45):
        write = k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", r[:, t], x["u"][..., None] * write + S))
        S = (decay[:, t] if name == "rwkv6" else decay.view(2, -1)).unsqueeze(-1) * S + write
    function = rwkv6 if name == "rwkv6" else rwkv5
    o, end = function(**x, mode=form.mode, backend=form.backend)
    torch.testing.assert_close(o, torch.stack(outputs, 1))
    torch.testing.assert_close(end, S)
    halved, _ = function(**x, scale=0.5, mode=form.mode, backend=form.backend)
    torch.testing.assert_close(halved, o / 2)


@every_form
def test_rwkv7_is_a_product_of_transitions(form: Form) -> None:
    """arXiv 2503.14456, eq. 17: S_t = S_{t−1} (Diag(w_t) − κ_tᵀ (a_t ⊙ κ_t)) + v_tᵀ k_t, o_t = r_t S_tᵀ."""
    x = drawn("rwkv7")
    r, k, v = as_heads(x)
    S, outputs = torch.zeros(2, 2, 7, 12, dtype=torch.float64), []
    for t in range(45):
        kappa = x["kappa"][:, t]
        erase = kappa[..., :, None] * (x["a"][:, t] * kappa)[..., None, :]
        S = S @ (torch.diag_embed(x["g"][:, t].exp()) - erase) + v[:, t, :, :, None] * k[:, t, :, None]
        outputs.append((S @ r[:, t, :, :, None]).squeeze(-1))
    o, end = rwkv7(**x, mode=form.mode, backend=form.backend)
    torch.testing.assert_close(o, torch.stack(outputs, 1))
    torch.testing.assert_close(end, S.mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rwkv4_never_overflows(dtype: torch.dtype) -> None:
    """Keys of ±6e4, whose exponentials no dtype holds: the largest key's value, and finite gradients."""
    k = torch.tensor([-6e4, 0.0, 6e4, -6e4, 5e4])[None, :, None].to(dtype).requires_grad_()
    v = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])[None, :, None].to(dtype).requires_grad_()
    g, u = torch.tensor([-1e-3]).requires_grad_(), torch.tensor([1.0]).requires_grad_()
    o, state = rwkv4(k, v, g, u)
    assert o.flatten().tolist() == [1, 2, 3, 3, 3]
    o.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (k, v, g, u))
    assert all(part.isfinite().all() and part.dtype == torch.float32 for part in state)


def test_rwkv4_with_nothing_to_read() -> None:
    """Keys of -inf are not written; with no other the output is zero."""
    k = torch.tensor([-torch.inf, 1.0, -torch.inf])[None, :, None]
    v = torch.tensor([7.0, 2.0, 9.0])[None, :, None].requires_grad_()
    o, _ = rwkv4(k, v, torch.tensor([-0.5]), torch.tensor([0.0]))
    assert o.flatten().tolist() == [0, 2, 2]
    o.sum().backward()
    assert v.grad is not None
    assert v.grad.flatten().tolist() == [0, 2, 0]


def test_bad_input_is_named() -> None:
    x = Case(Subject.of("rwkv4"), Sizes(B=2, T=4, V=3)).tensors()
    part = torch.zeros(2, 3)
    for changes, words in (
        ({"k": x["k"][:, :3]}, "k: "),
        ({"g": x["g"][:2]}, "g: "),
        ({"u": x["u"][None]}, "u: "),
        ({"g": -x["g"] + 1}, "positive|≤ 0"),
        ({"state": part}, "state: got Tensor, wanted a RWKV4State"),
        ({"state": RWKV4State(part, part[:1], part)}, "state.denominator: "),
        ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens: "),
    ):
        with pytest.raises(ValueError, match=words):
            rwkv4(**{**x, **changes})
    y = Case(Subject.of("rwkv7"), Sizes(B=1, T=4, G=1, K=3, V=3)).tensors()
    with pytest.raises(ValueError, match="kappa: "):
        rwkv7(**{**y, "kappa": y["kappa"][0]})
    with pytest.raises(ValueError, match="a: "):
        rwkv7(**{**y, "a": y["a"][:, :2]})
