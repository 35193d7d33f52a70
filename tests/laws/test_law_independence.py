"""Law 3: packed = separate, no row feels its neighbours, no token the future."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws.cases import ENGINE, MECHANISMS, RECURRENCES, RECURRENT, pairs, within_reach

from linattn.testing import AUTO, Case, Form, Sizes, Subject, law_accuracy, law_causality, law_rows

LENGTHS = [
    (1,),
    (0, 0, 5, 0),
    (3, 0, 1, 33, 30),
    (70, 1, 2, 65),
    (1, 2, 1, 3, 1, 1, 4, 1, 5, 2, 1, 1),
]


@pytest.mark.parametrize(("subject", "form"), pairs(RECURRENT))
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_equals_separate(subject: Subject, form: Form, lengths: tuple[int, ...]) -> None:
    if within_reach(subject, form, Sizes(T=max(lengths))):
        law_accuracy(Case(subject, Sizes(G=1), lengths=lengths, continued=len(lengths) > 2), form)


@pytest.mark.parametrize("subject", RECURRENCES, ids=str)
def test_packed_recurrences(subject: Subject) -> None:
    law_accuracy(Case(subject, Sizes(G=1, K=8), lengths=(3, 0, 1, 20, 19)), AUTO)


@pytest.mark.parametrize("subject", RECURRENT, ids=str)
@pytest.mark.parametrize("gates", ["mixed", "-inf"])
def test_packed_under_extreme_gates(subject: Subject, gates: str) -> None:
    if subject.gated:
        law_accuracy(Case(subject, gates=gates, lengths=(40, 0, 1, 9)), AUTO)


@pytest.mark.parametrize("subject", [ENGINE["token_channel+delta+after"], ENGINE["scan+token"]], ids=str)
@settings(max_examples=8)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6).map(tuple).filter(sum))
def test_any_packing(subject: Subject, lengths: tuple[int, ...]) -> None:
    law_accuracy(Case(subject, Sizes(K=4, V=4), lengths=lengths), AUTO, gradients=False)


@pytest.mark.parametrize(("subject", "form"), pairs(MECHANISMS))
def test_rows_are_independent(subject: Subject, form: Form) -> None:
    law_rows(Case(subject, Sizes(B=3, T=33)), form)


@pytest.mark.parametrize("subject", RECURRENCES, ids=str)
def test_rows_of_recurrences_are_independent(subject: Subject) -> None:
    law_rows(Case(subject, Sizes(B=2, T=35)), AUTO)


@pytest.mark.parametrize(("subject", "form"), pairs([*MECHANISMS, *RECURRENCES], reference=False))
def test_the_future_does_not_leak(subject: Subject, form: Form) -> None:
    T = 67 if within_reach(subject, form, Sizes()) else 33
    for t in {1, T // 2, T - 1}:
        law_causality(Case(subject, Sizes(T=T, G=1)), form, t)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_boundaries_in_either_integer(dtype: torch.dtype) -> None:
    case = Case(ENGINE["none+additive+after"], lengths=(3, 4))
    assert case.cu_seqlens is not None
    case.subject.function(**case.tensors(), cu_seqlens=case.cu_seqlens.to(dtype))
