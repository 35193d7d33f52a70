"""Laws 1, 4, 5 and 6: outputs, final state and all gradients equal the float64 reference's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from laws.cases import DTYPES, GATED, MECHANISMS, RECURRENCES, RECURRENT, pairs, within_reach

from linattn.testing import GATES, REFERENCE, Case, Form, Sizes, Subject, forms, law_accuracy

SIZES = [
    Sizes(B=2, T=1, G=1, H=1, K=8, V=8),
    Sizes(B=1, T=2, G=3, H=3, K=20, V=60),
    Sizes(B=2, T=3, G=2, H=4, K=1, V=20),
    Sizes(B=3, T=33, G=1, H=3, K=60, V=1),
    Sizes(B=1, T=63, G=1, H=1, K=100, V=20),
    Sizes(B=2, T=64, G=1, H=3, K=20, V=20),
    Sizes(B=1, T=65, G=2, H=6, K=60, V=100),
    Sizes(B=2, T=97, G=3, H=3, K=20, V=7),
]


def fitted(subject: Subject, form: Form, sizes: Sizes) -> Sizes:
    if within_reach(subject, form, sizes):
        return sizes
    return dataclasses.replace(sizes, T=min(sizes.T, 33), K=max(sizes.K, 2))


@pytest.mark.parametrize(("subject", "form"), pairs(MECHANISMS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(subject: Subject, form: Form, dtype: torch.dtype) -> None:
    case = Case(subject, fitted(subject, form, Sizes(G=1, H=3)), dtype)
    if form in forms(subject, dtype=dtype):
        law_accuracy(case, form)


@pytest.mark.parametrize(("subject", "form"), pairs(MECHANISMS))
def test_gates_in_float32_beside_values_in_half(subject: Subject, form: Form) -> None:
    sizes = fitted(subject, form, Sizes())
    law_accuracy(Case(subject, sizes, torch.bfloat16, gate_dtype=torch.float32, continued=False), form)


@pytest.mark.parametrize(("subject", "form"), pairs(RECURRENCES, reference=False))
def test_every_recurrence(subject: Subject, form: Form) -> None:
    law_accuracy(Case(subject, fitted(subject, form, Sizes(G=1))), form)


@pytest.mark.parametrize(("subject", "form"), pairs(RECURRENCES[::2], reference=False))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_recurrences_in_other_dtypes_without_a_first_state(subject: Subject, form: Form, dtype: torch.dtype) -> None:
    sizes = fitted(subject, form, Sizes(G=2, H=4, K=20))
    if form in forms(subject, dtype=dtype):
        law_accuracy(Case(subject, sizes, dtype, continued=False), form)


@pytest.mark.parametrize(("subject", "form"), pairs(RECURRENT, auto=True))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_size(subject: Subject, form: Form, sizes: Sizes) -> None:
    if form != REFERENCE:
        law_accuracy(Case(subject, fitted(subject, form, sizes), continued=sizes.T % 2 == 1), form)


@pytest.mark.parametrize(("subject", "form"), pairs(MECHANISMS, reference=False))
def test_a_thousand_tokens(subject: Subject, form: Form) -> None:
    sizes = Sizes(B=1, T=1000, G=1, H=2, K=20, V=16)
    if within_reach(subject, form, sizes):
        law_accuracy(Case(subject, sizes), form)


@pytest.mark.parametrize(("subject", "form"), pairs(GATED))
@pytest.mark.parametrize("gates", GATES)
def test_every_gate(subject: Subject, form: Form, gates: str) -> None:
    sizes = fitted(subject, form, Sizes(B=2, T=70, G=1, H=4))
    law_accuracy(Case(subject, sizes, gates=gates), form)


@pytest.mark.parametrize(("subject", "form"), pairs(GATED, reference=False))
@pytest.mark.parametrize("gates", ["-1e4", "mixed"])
def test_gates_in_half(subject: Subject, form: Form, gates: str) -> None:
    dtype = torch.bfloat16 if gates == "mixed" else torch.float16
    law_accuracy(Case(subject, fitted(subject, form, Sizes()), dtype, gates), form)


@pytest.mark.parametrize(("subject", "form"), pairs([s for s in GATED if s.recurrence], reference=False))
def test_strong_gates_over_many_chunks(subject: Subject, form: Form) -> None:
    sizes = Sizes(B=1, T=300, G=1, H=2, K=8, V=8)
    if within_reach(subject, form, sizes):
        law_accuracy(Case(subject, sizes, gates="mixed"), form)
