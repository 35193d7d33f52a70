"""The laws on every instruction set: the laws' own tests run the best one only."""

from __future__ import annotations

import pytest
import torch
from laws.cases import ENGINE, RECURRENCES

from linattn.testing import Case, Form, Sizes, Subject, law_accuracy, law_layout, law_nothing, law_purity

CPU = Form("cpu", "recurrent")
KINDS = [
    ENGINE[name]
    for name in (
        "none+additive+after",
        "head+additive+before",
        "token_channel+additive+before+bonus",
        "token_head+additive+after+sum",
        "channel+delta+before+bonus",
        "token_head+delta+after",
        "token_channel+delta+after",
        "token_head+low_rank+before",
        "token_channel+low_rank+after",
        "scan+token",
        "selective",
    )
]
SIZES = [
    Sizes(B=2, T=1, G=1, H=1, K=8, V=8),
    Sizes(B=1, T=65, G=2, H=4, K=20, V=65),
    Sizes(B=1, T=129, G=1, H=1, K=33, V=20),
    Sizes(B=3, T=33, G=3, H=3, K=17, V=1),
]


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("subject", RECURRENCES[::3], ids=str)
def test_recurrences(subject: Subject) -> None:
    law_accuracy(Case(subject, Sizes(G=1, K=20, V=24)), CPU)


@pytest.mark.usefixtures("level", "poisoned")
@pytest.mark.parametrize("subject", KINDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tails_of_every_kind(subject: Subject, sizes: Sizes) -> None:
    law_accuracy(Case(subject, sizes, continued=sizes.T != 65), CPU)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("subject", [subject for subject in KINDS if subject.gated], ids=str)
@pytest.mark.parametrize("gates", ["mixed", "-20", "-inf"])
def test_extreme_gates(subject: Subject, gates: str) -> None:
    law_accuracy(Case(subject, Sizes(T=70), gates=gates), CPU)


@pytest.mark.usefixtures("level", "poisoned")
@pytest.mark.parametrize("subject", KINDS, ids=str)
def test_packed_rows(subject: Subject) -> None:
    law_accuracy(Case(subject, Sizes(G=1), lengths=(3, 0, 1, 64, 65, 0)), CPU)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("subject", KINDS, ids=str)
def test_half_outside(subject: Subject) -> None:
    law_accuracy(Case(subject, Sizes(T=33, G=1, H=3, K=20, V=20), torch.bfloat16), CPU)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("subject", KINDS, ids=str)
def test_layouts_repeats_and_nothing(subject: Subject) -> None:
    law_layout(Case(subject, Sizes(T=33)), CPU, "heads first")
    law_purity(Case(subject), CPU)
    law_nothing(Case(subject), CPU)


@pytest.mark.parametrize("subject", KINDS, ids=str)
def test_value_columns_split_over_threads(subject: Subject) -> None:
    """One head on three threads: its columns are shared out, and sums over them are put together again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for V in (25, 50, 100):  # four pairs of vectors of 4, 8 and 16 floats
            law_accuracy(Case(subject, Sizes(B=1, T=130, G=1, H=1, K=20, V=V)), CPU)
        law_accuracy(Case(subject, Sizes(G=1, H=1, K=24, V=80), lengths=(70, 0, 60)), CPU)
    finally:
        torch.set_num_threads(threads)
