"""Lightning attention's decays, and the function against the sum that it stands for."""

from __future__ import annotations

import pytest
import torch

from linattn import lightning_attention
from linattn.mechanisms.lightning_attention import slope_decay
from linattn.testing import Case, Form, Sizes, Subject, forms


@pytest.mark.parametrize("form", forms(Subject.of("lightning_attention"), dtype=torch.float64), ids=str)
def test_the_decay_mask(form: Form) -> None:
    """arXiv 2401.04658, eq. 3: (Q Kᵀ ⊙ M) V with M_ts = λ^{t-s} for t ≥ s."""
    x = Case(Subject.of("lightning_attention"), Sizes(B=2, T=45, G=2, H=2, K=12, V=7), torch.float64).tensors()
    decay = -torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)  # of two heads: 2^{-8 (h+1) / 2}
    distance = (torch.arange(45)[:, None] - torch.arange(45)).double()
    M = torch.where(distance >= 0, (decay[:, None, None] * distance.clamp_min(0)).exp(), 0)
    wanted = torch.einsum("bhts,bshv->bthv", torch.einsum("bthk,bshk->bhts", x["q"], x["k"]) * M, x["v"])
    given = x | {"decay": decay}
    o, _ = lightning_attention(**given, scale=1.0, mode=form.mode, backend=form.backend)
    torch.testing.assert_close(o, wanted)
    default, _ = lightning_attention(**(x | {"decay": None}), mode=form.mode, backend=form.backend)
    slopes, _ = lightning_attention(**(x | {"decay": slope_decay(2)}), mode=form.mode, backend=form.backend)
    assert torch.equal(default, slopes)


def test_slopes_fall_with_the_layer() -> None:
    first, middle, last = (slope_decay(8, n, 5) for n in (0, 2, 4))
    torch.testing.assert_close(first, -(2.0 ** -torch.arange(1.0, 9)), rtol=2e-5, atol=0)
    torch.testing.assert_close(middle, first / 2, rtol=1e-4, atol=0)
    assert (last > -2e-5).all()
    assert (last < 0).all()
