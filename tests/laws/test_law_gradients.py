"""Law 4: gradients of every input and of the initial state equal finite differences, given one on the final state.

That gradients equal the reference's in every dtype is part of test_law_accuracy.
"""

from __future__ import annotations

import pytest
import torch
from laws.cases import ENGINE, MECHANISMS, RECURRENCES, pairs

from linattn.testing import Case, Form, Sizes, Subject, law_gradients

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
