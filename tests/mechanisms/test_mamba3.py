"""Mamba-3: its relation to Mamba-2, its turning state, and the laws with several inputs and outputs (MIMO)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from linattn import Mamba3, Mamba3State, mamba2, mamba3, registry
from linattn.testing import (
    Case,
    Form,
    Sizes,
    Subject,
    forms,
    law_accuracy,
    law_causality,
    law_gradients,
    law_pieces,
)

SISO = Subject.of("mamba3")
MIMO = dataclasses.replace(
    SISO,
    name="mamba3-mimo",
    arguments=tuple(
        dataclasses.replace(x, dims=x.dims.replace("B T", "B T R")) if x.name in ("x", "B", "C") else x
        for x in registry.get("mamba3").arguments
    ),
)
FORMS = forms(MIMO)


def drawn(subject: Subject = SISO, **sizes: int) -> dict[str, Tensor]:
    return Case(subject, Sizes(**{"B": 2, "T": 9, "G": 2, "H": 4, "K": 8, "V": 5} | sizes), torch.float64).tensors()


def test_the_whole_share_without_turning_is_mamba2() -> None:
    x = drawn()
    A = x["A"][0, 0]
    x |= {"trap": torch.ones_like(x["trap"]), "angles": 0 * x["angles"], "A": A.expand_as(x["A"])}
    y, state = mamba3(**x)
    wanted, S = mamba2(x["x"], x["dt"], A, x["B"], x["C"], D=x["D"])
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(state.recurrent, S)


def test_the_trapezoidal_rule_is_of_second_order() -> None:
    """λ = ½ integrates h' = A h + x(t) more exactly than λ = 1: halving the step quarters the error, not halves it."""

    def error(steps: int, share: float) -> float:
        time = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
        x, one = time.sin().view(1, -1, 1, 1), torch.ones(1, steps + 1, 1, 1, dtype=torch.float64)
        dt = torch.full((1, steps + 1, 1), 1 / steps, dtype=torch.float64)
        dt[:, 0] = 0
        y, _ = mamba3(x, dt, -one[..., 0], one, one, share * one[..., 0], one[..., :0])
        return abs(y[0, -1].item() - (math.sin(1) - math.cos(1) + math.exp(-1)) / 2)

    assert error(40, 0.5) < error(20, 0.5) / 3.9
    assert error(40, 1.0) > error(20, 1.0) / 2.1


def test_turning_by_pi_tracks_parity() -> None:
    bits = torch.randint(2, (1, 200, 1), generator=torch.Generator().manual_seed(0))
    one = torch.ones(1, 200, 1)
    x, B = torch.zeros(1, 200, 1, 1), torch.tensor([1.0, 0.0]).expand(1, 200, 1, 2)
    x[:, 0] = 1
    y, _ = mamba3(x, one, -1e-7 * one, B, B, one, (math.pi * bits)[..., None].float())
    parity = (bits.cumsum(1) - bits[:, :1]) % 2
    torch.testing.assert_close(y[..., 0], 1.0 - 2 * parity, atol=1e-4, rtol=0)


def test_angles_stay_exact_over_thousands_of_tokens() -> None:
    """In one piece or two hundred: the angle is kept within [-π, π], summed in float64."""
    x = {name: t.float() for name, t in drawn(B=1, T=4000, H=2, K=4, V=2, G=1).items()}
    x["angles"] = 50 * x["angles"]
    wanted, _ = mamba3(**{name: t.double() for name, t in x.items()})
    whole, end = mamba3(**x)
    state, parts = None, []
    for start in range(0, 4000, 20):
        part = {name: t[:, start : start + 20] if t.dim() > 1 else t for name, t in x.items()}
        y, state = mamba3(**part, state=state)
        parts.append(y)
    assert state is not None
    for got in (whole, torch.cat(parts, 1)):
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert state.angle.abs().max() <= math.pi + 1e-6
    torch.testing.assert_close(torch.polar(torch.ones(1), state.angle), torch.polar(torch.ones(1), end.angle))


def test_one_rank_is_the_same_with_its_axis() -> None:
    x = drawn()
    wanted, wanted_state = mamba3(**x)
    y, state = mamba3(**x | {name: x[name].unsqueeze(2) for name in ("x", "B", "C")})
    assert torch.equal(y.squeeze(2), wanted)
    assert all(map(torch.equal, state, wanted_state))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mimo_keeps_the_laws(form: Form, dtype: torch.dtype) -> None:
    case = Case(MIMO, Sizes(B=2, T=35, G=1, H=2), dtype)
    law_accuracy(case, form)
    law_accuracy(dataclasses.replace(case, gates="mixed", lengths=(3, 0, 1, 20)), form)
    if dtype == torch.float32:
        law_pieces(case, (1, 2, 16, 17), form)
        law_causality(case, form, 17)


def test_mimo_gradients() -> None:
    law_gradients(Case(MIMO, Sizes(B=1, T=3, G=1, H=2, K=2, V=2), torch.float64), Form("chunked", "chunkwise"))


def test_padding_is_skipped_wherever_it_stands() -> None:
    torch.manual_seed(0)
    layer = Mamba3(16, num_heads=4, d_state=8, mimo_rank=2).double()
    x, state = torch.randn(1, 8, 16, dtype=torch.float64), layer(torch.randn(1, 3, 16, dtype=torch.float64))[1]
    mask = torch.tensor([[True, False, False, True, True, False, True, False]])
    y, end = layer(x, state, mask=mask)
    wanted, wanted_end = layer(x[:, mask[0]], state)
    torch.testing.assert_close(y[:, mask[0]], wanted)
    torch.testing.assert_close(tuple(end), tuple(wanted_end))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("x", {"x": None}),
        ("x", {"x": torch.zeros(2, 9, 20)}),
        ("dt", {"dt": torch.zeros(2, 8, 4)}),
        ("A", {"A": -torch.ones(4)}),
        ("A|dt|g", {"A": torch.ones(2, 9, 4)}),
        ("B", dict.fromkeys(("B", "C"), torch.zeros(2, 9, 3, 8).double())),
        ("B", {"B": torch.zeros(2, 9, 2, 8)}),
        ("C", {"C": torch.zeros(2, 9, 2, 7).double()}),
        ("trap", {"trap": torch.zeros(2, 9, 2)}),
        ("angles", {"angles": torch.zeros(2, 9, 4)}),
        ("angles", {"angles": torch.zeros(2, 9, 4, 5)}),
        ("D", {"D": torch.zeros(3)}),
        ("D", {"D": torch.zeros(4, device="meta")}),
        ("state", {"state": torch.zeros(2, 4, 8, 5)}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 9])}),
        ("mode", {"mode": "scan"}),
    ],
)
def test_bad_input(argument: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^({argument}): got "):
        mamba3(**drawn() | change)


def test_a_bad_state_is_named_by_its_part() -> None:
    x = drawn()
    _, state = mamba3(**x)
    for name, part in state._asdict().items():
        for wrong in (part[:1], part.float()):
            with pytest.raises(ValueError, match=rf"^state\.{name}: got "):
                mamba3(**x, state=Mamba3State(**state._asdict() | {name: wrong}))
    row = {name: t[:1] if t.dim() > 1 else t for name, t in x.items()}
    with pytest.raises(ValueError, match="cu_seqlens: got a last boundary of 10, wanted T=9"):
        mamba3(**row, cu_seqlens=torch.tensor([0, 10]))


def test_bad_options() -> None:
    for options, words in (
        ({"mimo_rank": 0}, "mimo_rank: got 0"),
        ({"rope_fraction": 1.5}, "rope_fraction: got 1.5"),
        ({"num_heads": 4, "num_groups": 3}, "num_groups: got 3"),
    ):
        with pytest.raises(ValueError, match=words):
            Mamba3(16, **options)
