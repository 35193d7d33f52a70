"""Laws 5 and 7: any layout in memory; results complete and repeatable; nothing given is modified."""

from __future__ import annotations

import pytest
import torch
from laws.cases import ENGINE, GATED, MECHANISMS, RECURRENCES, pairs

from linattn.testing import (
    AUTO,
    LAYOUTS,
    Case,
    Form,
    Sizes,
    Subject,
    law_accuracy,
    law_expanded,
    law_layout,
    law_nothing,
    law_purity,
)


@pytest.mark.parametrize(("subject", "form"), pairs(MECHANISMS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(subject: Subject, form: Form, layout: str) -> None:
    law_layout(Case(subject, Sizes(T=33, G=1, H=3)), form, layout)


@pytest.mark.parametrize(("subject", "form"), pairs(MECHANISMS))
def test_expanded(subject: Subject, form: Form) -> None:
    law_expanded(Case(subject, Sizes(T=33)), form)


@pytest.mark.parametrize(
    "name", ["token_channel+low_rank+before+bonus", "channel+delta+after", "scan+token", "scan+fixed", "selective"]
)
def test_layouts_of_the_engine(name: str) -> None:
    for layout in LAYOUTS:
        law_layout(Case(ENGINE[name], Sizes(T=35, G=1)), AUTO, layout)
    law_expanded(Case(ENGINE[name], Sizes(T=35)), AUTO)


@pytest.mark.parametrize(("subject", "form"), pairs(MECHANISMS))
def test_same_bits_and_nothing_modified(subject: Subject, form: Form) -> None:
    law_purity(Case(subject), form)


@pytest.mark.parametrize("subject", RECURRENCES, ids=str)
def test_the_engine_modifies_nothing(subject: Subject) -> None:
    law_purity(Case(subject, gates="mixed"), AUTO)
    law_purity(Case(subject, lengths=(3, 0, 40)), AUTO)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("subject", "form"), pairs(MECHANISMS, reference=False))
def test_all_memory_is_written(subject: Subject, form: Form) -> None:
    law_accuracy(Case(subject, Sizes(T=33, G=1)), form)
    if subject.recurrence:
        law_accuracy(Case(subject, Sizes(G=1), lengths=(3, 0, 1, 30, 31)), form)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("subject", "form"), pairs(GATED, reference=False))
def test_all_memory_is_written_under_strong_gates(subject: Subject, form: Form) -> None:
    law_accuracy(Case(subject, Sizes(T=33), gates="mixed"), form)


@pytest.mark.parametrize(("subject", "form"), pairs([*MECHANISMS, *RECURRENCES], auto=True))
def test_no_tokens_or_no_rows(subject: Subject, form: Form) -> None:
    law_nothing(Case(subject), form)


@pytest.mark.parametrize("subject", MECHANISMS, ids=str)
def test_no_gradient_asked_for(subject: Subject) -> None:
    """Inference keeps nothing alive for a backward, and gives the same."""
    case = Case(subject)
    with torch.inference_mode():
        o, state = subject.function(**case.tensors(), state=case.state())
    assert not o.requires_grad
    grad_o, _ = subject.function(**{name: x.requires_grad_() for name, x in case.tensors().items()}, state=case.state())
    assert torch.equal(o, grad_o)
    assert state is not None
