"""Each mechanism against its paper's formula, written out in float64 without the engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linattn import delta_rule, gated_delta_rule, gated_linear_attention, mamba2, retention
from linattn.testing import Case, Form, Sizes, Subject, forms

SIZES = Sizes(B=2, T=45, G=2, H=2, K=12, V=7)
FORMS = forms(Subject.of("retention"), dtype=torch.float64)

pytestmark = pytest.mark.parametrize("form", FORMS, ids=str)


def drawn(name: str, sizes: Sizes = SIZES, gates: str = "ordinary") -> dict[str, Tensor]:
    return Case(Subject.of(name), sizes, torch.float64, gates).tensors()


def test_retention_is_the_decay_mask(form: Form) -> None:
    """arXiv 2307.08621, eq. 5: (Q Kᵀ ⊙ D) V with D_nm = γ^{n−m} for n ≥ m, γ = 1 − 2^{−5−h}."""
    x = drawn("retention")
    distance = (torch.arange(45)[:, None] - torch.arange(45)).double()
    gamma = 1 - 2.0 ** (-5 - torch.arange(2, dtype=torch.float64))
    D = torch.where(distance >= 0, gamma[:, None, None] ** distance.clamp_min(0), 0)
    scores = torch.einsum("bnhk,bmhk->bhnm", x["q"], x["k"]) * D
    o, _ = retention(x["q"], x["k"], x["v"], gamma.log(), scale=1.0, mode=form.mode, backend=form.backend)
    torch.testing.assert_close(o, torch.einsum("bhnm,bmhv->bnhv", scores, x["v"]))
    default, _ = retention(x["q"], x["k"], x["v"], scale=1.0, mode=form.mode, backend=form.backend)
    single = {
        "rtol": torch.finfo(torch.float32).eps * 45,
        "atol": 0,
    }  # the default decay is float32, raised to the 45th
    torch.testing.assert_close(default.norm(), o.norm(), **single)


def test_gated_linear_attention_is_a_cumulative_product(form: Form) -> None:
    """arXiv 2312.06635, eq. 4: P = ((Q ⊙ B)(K / B)ᵀ) masked, b_t the product of the gates up to t."""
    x = drawn("gated_linear_attention")
    b = x["g"].cumsum(1).exp()
    P = torch.einsum("bnhk,bmhk->bhnm", x["q"] * b, x["k"] / b).tril()
    o, S = gated_linear_attention(**x, scale=1.0, mode=form.mode, backend=form.backend)
    torch.testing.assert_close(o, torch.einsum("bhnm,bmhv->bnhv", P, x["v"]))
    torch.testing.assert_close(S, torch.einsum("bthk,bthv->bhkv", x["k"] * (b[:, -1:] / b), x["v"]))


def test_mamba2_is_a_discretised_state_space(form: Form) -> None:
    """arXiv 2405.21060: h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_tᵀ, y_t = C_tᵀ h_t + D x_t, B and C shared by groups."""
    x = drawn("mamba2", Sizes(B=2, T=45, G=2, H=6, K=12, V=7))
    h = torch.zeros(2, 6, 12, 7, dtype=torch.float64)
    outputs = []
    for t in range(45):
        for head in range(6):
            group = head // 3
            step = x["dt"][:, t, head, None, None]
            write = x["B"][:, t, group, :, None] * x["x"][:, t, head, None, :]
            h[:, head] = torch.exp(step * x["A"][head]) * h[:, head] + step * write
        C = x["C"][:, t].repeat_interleave(3, 1)
        outputs.append(torch.einsum("bhk,bhkv->bhv", C, h) + x["D"][:, None] * x["x"][:, t])
    y, S = mamba2(**x, mode=form.mode, backend=form.backend)
    torch.testing.assert_close(y, torch.stack(outputs, 1))
    torch.testing.assert_close(S, h)
    without, _ = mamba2(**(x | {"D": None}), mode=form.mode, backend=form.backend)
    torch.testing.assert_close(y - without, x["D"][:, None] * x["x"])


@pytest.mark.parametrize("gated", [False, True])
def test_the_delta_rule_is_a_product_of_householders(form: Form, gated: bool) -> None:
    """arXiv 2412.06464 (2406.06484 with α = 1): S_t = S_{t−1} α_t (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ, o_t = S_t q_t."""
    x = drawn("gated_delta_rule")
    S = torch.zeros(2, 2, 7, 12, dtype=torch.float64)
    outputs = []
    for t in range(45):
        k, v, beta = x["k"][:, t], x["v"][:, t], x["beta"][:, t, :, None, None]
        alpha = x["g"][:, t].exp()[..., None, None] if gated else 1
        householder = torch.eye(12, dtype=torch.float64) - beta * k[..., :, None] * k[..., None, :]
        S = S @ (alpha * householder) + beta * v[..., :, None] * k[..., None, :]
        outputs.append((S @ x["q"][:, t, :, :, None]).squeeze(-1))
    if gated:
        o, final = gated_delta_rule(**x, scale=1.0, mode=form.mode, backend=form.backend)
    else:
        rest = {name: value for name, value in x.items() if name != "g"}
        o, final = delta_rule(**rest, scale=1.0, mode=form.mode, backend=form.backend)
    torch.testing.assert_close(o, torch.stack(outputs, 1))
    torch.testing.assert_close(final, S.mT)


def test_the_delta_rule_overwrites(form: Form) -> None:
    """With β = 1 a key written again forgets its old value: the state answers with the last one."""
    x = drawn("delta_rule", Sizes(B=1, T=6, G=1, H=1, K=8, V=5))
    k = torch.eye(8, dtype=torch.float64)[torch.tensor([0, 1, 0, 2, 1, 0])].view(1, 6, 1, 8)
    beta = torch.ones(1, 6, 1, dtype=torch.float64)
    _, S = delta_rule(x["q"], k, x["v"], beta, mode=form.mode, backend=form.backend)
    for key, last in ((0, 5), (1, 4), (2, 3)):
        torch.testing.assert_close(S[0, 0, key], x["v"][0, last, 0])


def test_scale_is_the_root_of_the_key_size(form: Form) -> None:
    x = drawn("gated_linear_attention")
    one, _ = gated_linear_attention(**x, scale=1.0, mode=form.mode, backend=form.backend)
    default, _ = gated_linear_attention(**x, mode=form.mode, backend=form.backend)
    torch.testing.assert_close(default, one * 12**-0.5)
