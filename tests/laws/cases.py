"""Which functions are held to which laws, and in which forms."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from linattn.recurrence import Write
from linattn.testing import AUTO, REFERENCE, Form, Sizes, Subject, forms, mechanisms, recurrences

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

MECHANISMS = [
    *mechanisms(),
    Subject.of("linear_attention", feature_map="relu"),
    Subject.of("linear_attention", feature_map="squared_relu", normalize=False),
    Subject.of("linear_attention", feature_map="identity", normalize=False),
    Subject.of("mlstm", normalize=False),
]
RECURRENT = [subject for subject in MECHANISMS if subject.recurrence]
RECURRENCES = list(recurrences())
ENGINE = {subject.name: subject for subject in RECURRENCES}

# What a gate can meet: every kind of decay, write and read at least once.
GATED = [subject for subject in MECHANISMS if subject.gated] + [
    ENGINE[name]
    for name in (
        "head+low_rank+after",
        "channel+additive+before+bonus",
        "channel+delta+after",
        "token_head+low_rank+before",
        "token_head+additive+after+sum",
        "token_channel+additive+before",
        "token_channel+delta+after",
        "token_channel+delta+before+bonus",
        "token_channel+low_rank+after",
        "scan+fixed",
        "scan+token",
        "selective",
    )
]


def pairs(
    subjects: Iterable[Subject], *, reference: bool = True, auto: bool = False, dtype: torch.dtype = torch.float32
) -> list[object]:
    """Every subject in every form that serves it in ``dtype``."""
    return [
        pytest.param(subject, form, id=f"{subject}-{form}")
        for subject in subjects
        for form in dict.fromkeys([*forms(subject, dtype=dtype), *[AUTO] * auto])
        if reference or form != REFERENCE
    ]


def within_reach(subject: Subject, form: Form, sizes: Sizes) -> bool:
    """The parallel form of a low-rank write solves one [T, T] system: accurate at a chunk's length, not far beyond.

    Nor where keys of one channel overwrite all of the state with every token.
    """
    additive = subject.recurrence is None or subject.recurrence.write is Write.ADDITIVE
    return form.mode != "parallel" or additive or (sizes.T <= 33 and sizes.K > 1)
