"""Law 4: gradients of every input and of the initial state equal finite differences, given one on the final state.

That gradients equal the reference's in every dtype is part of test_law_accuracy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from laws.cases import ENGINE, MECHANISMS, RECURRENCES, pairs

from linattn.recurrence import Domain
from linattn.testing import Case, Form, Sizes, Subject, call, law_accuracy, law_gradients

TINY = Sizes(B=1, T=4, G=1, H=2, K=2, V=2)


@pytest.mark.parametrize(("subject", "form"), pairs(MECHANISMS, dtype=torch.float64))
def test_mechanisms(subject: Subject, form: Form) -> None:
    law_gradients(Case(subject, TINY, torch.float64), form)


@pytest.mark.parametrize(("subject", "form"), pairs(RECURRENCES, reference=False, dtype=torch.float64))
def test_recurrences(subject: Subject, form: Form) -> None:
    law_gradients(Case(subject, TINY, torch.float64), form)


@pytest.mark.parametrize("name", ["token_channel+low_rank+before", "token_head+delta+after", "scan+token", "selective"])
def test_packed(name: str) -> None:
    subject = ENGINE[name]
    law_gradients(Case(subject, TINY, torch.float64, lengths=(2, 0, 1, 2)), Form("chunked", "chunkwise"))


@pytest.mark.parametrize(
    ("subject", "form"), pairs([ENGINE["token_channel+low_rank+after"]], reference=False, dtype=torch.float64)
)
@pytest.mark.parametrize("gates", ["strong", "-20"])
def test_under_strong_gates(subject: Subject, form: Form, gates: str) -> None:
    law_gradients(Case(subject, TINY, torch.float64, gates), form)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["token_channel+low_rank+before+bonus", "token_head+delta+after", "selective"])
def test_across_chunks(name: str) -> None:
    sizes = Sizes(B=1, T=67, G=1, H=1, K=1, V=1)
    law_gradients(Case(ENGINE[name], sizes, torch.float64), Form("chunked", "chunkwise"))


def _by_its_rate(name: str) -> Subject:
    """The recurrence with the gate g = -e^{2 w}, as models learn it: mild and strong decays side by side."""
    subject = ENGINE[name]

    def function(*, w: torch.Tensor, **rest: Any) -> Any:
        return subject.function(g=-(2 * w).exp(), **rest)

    arguments = tuple(replace(x, name="w", domain=Domain.REAL) if x.name == "g" else x for x in subject.arguments)
    return Subject(f"{name} by its rate", function, arguments, subject.recurrence)


READS = ("after", "before")
RATES = [_by_its_rate(f"{decay}+additive+{read}") for decay in ("token_head", "token_channel") for read in READS]


@pytest.mark.parametrize(("subject", "form"), pairs(RATES, reference=False))
def test_rates(subject: Subject, form: Form) -> None:
    """A strong decay's gradient, tiny as it is, is multiplied by its logarithm on the way to the rate."""
    law_accuracy(Case(subject, Sizes(B=2, T=100, G=1, H=2, K=16, V=8)), form)


WRITES = ("delta", "low_rank")
CONSTANT = [
    f"{decay}+{write}+after" for decay in ("head", "channel", "token_head", "token_channel") for write in WRITES
]


@pytest.mark.parametrize(("subject", "form"), pairs([ENGINE[name] for name in CONSTANT], reference=False))
def test_gates_that_need_no_gradient(subject: Subject, form: Form) -> None:
    """The other gradients are what they are beside it."""
    case = Case(subject, Sizes(B=1, T=70, G=1, H=2, K=16, V=8))
    run, results = call(case, form), []
    for constant in (False, True):
        given = {n: x.requires_grad_(not (constant and n == "g")) for n, x in case.tensors().items()}
        output, final = run(given, case.state())
        wanted = [x for name, x in given.items() if name != "g"]
        results.append(torch.autograd.grad(output.sum() + final.sum(), wanted))
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm()
