"""Kimi Delta Attention: what its decay of channels adds, and its bounded gate."""

from __future__ import annotations

import pytest
import torch

from linattn import KimiDeltaAttention, gated_delta_rule, kimi_delta_attention
from linattn.testing import Case, Form, Sizes, Subject, forms

SIZES = Sizes(B=2, T=31, G=2, H=4, K=12, V=7)
FORMS = forms(Subject.of("kimi_delta_attention"), dtype=torch.float64)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_one_decay_for_all_channels_is_the_gated_delta_rule(form: Form) -> None:
    x = Case(Subject.of("gated_delta_rule"), SIZES, torch.float64, "mixed").tensors()
    wanted, wanted_state = gated_delta_rule(**x, backend="reference")
    x["g"] = x["g"].unsqueeze(-1).expand(-1, -1, -1, SIZES.K)
    o, state = kimi_delta_attention(**x, mode=form.mode, backend=form.backend)
    torch.testing.assert_close(o, wanted)
    torch.testing.assert_close(state, wanted_state)


def test_a_channel_forgets_alone() -> None:
    """A value written under two keys at once fades from one of them only."""
    k = torch.eye(2).view(1, 2, 1, 2)
    g = torch.zeros(1, 2, 1, 2)
    g[0, 1, 0, 0] = -torch.inf
    v = torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)
    _, S = kimi_delta_attention(k, k, v, g, torch.ones(1, 2, 1))
    assert S.flatten().tolist() == [0, 5]


def test_the_bounded_decay_keeps_its_bound() -> None:
    layer = KimiDeltaAttention(16, num_heads=2, lower_bound=-5.0)
    for size in (1.0, 1e4):
        g = layer._log_decay(size * torch.randn(2, 9, 8))
        assert g.shape == (2, 9, 2, 8)
        assert ((g <= 0) & (g >= -5)).all()


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="lower_bound: got 5"):
        KimiDeltaAttention(16, lower_bound=5)
    with pytest.raises(ValueError, match=r"num_heads: got 2, .*num_v_heads=3"):
        KimiDeltaAttention(16, num_heads=2, num_v_heads=3)
