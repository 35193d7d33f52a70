"""Gated DeltaProduct: its relation to the gated delta rule, and the states that it tracks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from linattn import GatedDeltaProduct, gated_delta_product, gated_delta_rule
from linattn.testing import Case, Form, Sizes, Subject, forms

SIZES = Sizes(B=2, T=15, G=2, H=4, K=12, V=7)
SUBJECT = Subject.of("gated_delta_product")
FORMS = forms(SUBJECT, dtype=torch.float64)


def drawn(**options: Any) -> dict[str, Tensor]:
    return Case(SUBJECT, SIZES, torch.float64, **options).tensors()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_is_the_delta_rule_step_by_step(form: Form) -> None:
    """The decay once a token, the query after the last of its steps."""
    x = drawn()
    outputs, state = [], None
    for t, j in itertools.product(range(SIZES.T), range(2)):
        g = x["g"][:, t : t + 1] * (j == 0)
        one = (x[name][:, t, j : j + 1] for name in ("k", "v"))
        o, state = gated_delta_rule(x["q"][:, t : t + 1], *one, g, x["beta"][:, t, j : j + 1], state=state)
        outputs.append(o)
    o, final = gated_delta_product(**x, mode=form.mode, backend=form.backend)
    torch.testing.assert_close(o, torch.cat(outputs[1::2], 1))
    torch.testing.assert_close(final, state)


def test_one_step_is_the_gated_delta_rule() -> None:
    x = drawn()
    x |= {name: x[name][:, :, :1] for name in ("k", "v", "beta")}
    wanted, state = gated_delta_rule(**x | {name: x[name].squeeze(2) for name in ("k", "v", "beta")})
    o, final = gated_delta_product(**x)
    torch.testing.assert_close(o, wanted)
    torch.testing.assert_close(final, state)


def test_no_gate_is_no_decay() -> None:
    x = drawn()
    wanted, state = gated_delta_product(**x | {"g": torch.zeros_like(x["g"])})
    o, final = gated_delta_product(**x | {"g": None})
    torch.testing.assert_close(o, wanted)
    torch.testing.assert_close(final, state)


def test_two_steps_rotate_three_things() -> None:
    """With β = 2 a step with the key (e_i − e_j)/√2 swaps i and j; two swaps are a 3-cycle, which one cannot be."""
    swaps = torch.zeros(2, 3, dtype=torch.float64)
    swaps[0, :2] = swaps[1, 1:] = torch.tensor([1.0, -1.0]).double() / 2**0.5
    k = swaps.expand(1, 5, 2, 3).unsqueeze(3)
    q, v, beta = torch.zeros(1, 5, 1, 3).double(), torch.zeros(1, 5, 2, 1, 3).double(), torch.full((1, 5, 2, 1), 2.0)
    cycle = torch.eye(3, dtype=torch.float64)[[1, 2, 0]]
    _, state = gated_delta_product(q, k, v, None, beta, state=torch.eye(3, dtype=torch.float64)[None, None])
    torch.testing.assert_close(state[0, 0], torch.linalg.matrix_power(cycle, 5))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("v", {"v": None}),
        ("v", {"v": torch.zeros(2, 15, 4, 7).double()}),
        ("q", {"q": torch.zeros(2, 14, 2, 12).double()}),
        ("k", {"k": torch.zeros(2, 15, 3, 2, 12).double()}),
        ("k", {"k": torch.zeros(2, 15, 2, 2, 12)}),
        ("beta", {"beta": torch.zeros(2, 15, 4)}),
        ("g", {"g": torch.zeros(2, 15, 2, 4)}),
        ("g", {"g": torch.ones(2, 15, 4)}),
        ("state", {"state": torch.zeros(2, 4, 12, 7)}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 15])}),
        ("mode", {"mode": "fast"}),
    ],
)
def test_bad_input(argument: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: got "):
        gated_delta_product(**drawn() | change)


def test_boundaries_count_tokens_not_steps() -> None:
    x = {name: t[:1] for name, t in drawn().items()}
    with pytest.raises(ValueError, match="cu_seqlens: got a last boundary of 16, wanted T=15"):
        gated_delta_product(**x, cu_seqlens=torch.tensor([0, 16]))


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="num_householder: got 0"):
        GatedDeltaProduct(16, num_householder=0)
