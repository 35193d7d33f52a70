"""Law 2: recurrent = chunkwise = parallel = one step at a time; any split with the state carried = the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws.cases import ENGINE, MECHANISMS, RECURRENCES, RECURRENT, pairs, within_reach

from linattn.testing import AUTO, REFERENCE, Case, Form, Sizes, Subject, forms, law_pieces

SPLIT = Sizes(B=2, T=100, G=1, H=2, K=16, V=8)


@pytest.mark.parametrize(("subject", "form"), pairs(MECHANISMS, auto=True))
def test_one_step_at_a_time(subject: Subject, form: Form) -> None:
    case = Case(subject, Sizes(T=12))
    law_pieces(case, tuple(range(1, 12)), form)


@pytest.mark.parametrize("subject", RECURRENCES, ids=str)
def test_recurrences_one_step_at_a_time(subject: Subject) -> None:
    law_pieces(Case(subject, Sizes(T=7, G=1), continued=False), tuple(range(1, 7)), AUTO)


@pytest.mark.parametrize("subject", MECHANISMS, ids=str)
def test_prefill_then_generate(subject: Subject) -> None:
    """Every form continues what every other began."""
    case = Case(subject, Sizes(T=72), continued=False)
    served = forms(subject)
    for n, first in enumerate(served):
        rest = [*served[n + 1 :], *served[: n + 1]]
        law_pieces(case, (33, 34, 66, 67, 68, 69), first, *rest, AUTO)


@pytest.mark.parametrize(("subject", "form"), pairs(RECURRENT, reference=False, auto=True))
@settings(max_examples=4)
@given(cuts=st.lists(st.integers(0, SPLIT.T), max_size=4).map(sorted).map(tuple))
def test_any_split(subject: Subject, form: Form, cuts: tuple[int, ...]) -> None:
    """Empty pieces included."""
    longest = max(end - start for start, end in zip((0, *cuts), (*cuts, SPLIT.T), strict=True))
    if within_reach(subject, form, Sizes(T=longest)):
        law_pieces(Case(subject, SPLIT), cuts, form)


@pytest.mark.parametrize("name", ["token_channel+low_rank+before", "token_channel+additive+before+bonus", "scan+token"])
@pytest.mark.parametrize("gates", ["strong", "mixed"])
@settings(max_examples=3)
@given(cuts=st.lists(st.integers(0, SPLIT.T), max_size=4).map(sorted).map(tuple))
def test_any_split_under_strong_gates(name: str, gates: str, cuts: tuple[int, ...]) -> None:
    law_pieces(Case(ENGINE[name], SPLIT, gates=gates), cuts, AUTO, REFERENCE)
