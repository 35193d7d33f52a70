"""What a thread walks: a segment of a long sequence where heads are few, else neighbouring heads together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from linattn.recurrence import Decay, Write
from linattn.testing import Case, Form, Sizes, Subject, call, evaluate, law_accuracy, law_purity, recurrences

CPU = Form("cpu", "recurrent")
LONG = Sizes(B=1, T=64 * 24 + 37, G=1, H=1, K=12, V=20)
ADDITIVE = [
    subject
    for subject in recurrences()
    if (r := subject.recurrence) is not None
    and r.write is Write.ADDITIVE
    and str(subject).count("+") > 1  # no scans
    and (r.bonus or r.decay in (Decay.NONE, Decay.TOKEN_HEAD, Decay.TOKEN_CHANNEL))
]


@pytest.fixture
def threads() -> Iterator[None]:
    """More of them than rows of the long sequence: three segments."""
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("subject", ADDITIVE, ids=str)
def test_a_split_sequence_equals_the_whole(subject: Subject) -> None:
    """To a few roundings; gates of -1e4 and -inf are as exact as others."""
    for gates in ("ordinary", "mixed") if subject.gated else ("ordinary",):
        case = Case(subject, LONG, gates=gates)
        run, tensors, state = call(case, CPU), case.tensors(), case.state()
        torch.set_num_threads(8)
        split = evaluate(case, run, tensors, state)
        torch.set_num_threads(1)
        for name, whole in evaluate(case, run, tensors, state).items():
            assert (split[name] - whole).abs().max() <= 64 * torch.finfo(torch.float32).eps * whole.abs().max(), name


@pytest.mark.usefixtures("threads", "poisoned")
def test_laws_of_a_split_sequence() -> None:
    for subject in ADDITIVE[-4::3]:
        law_accuracy(Case(subject, LONG, gates="mixed"), CPU)
        law_purity(Case(subject, LONG), CPU)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("subject", [s for s in recurrences() if str(s).count("+") > 1], ids=str)
def test_heads_walked_together_equal_heads_alone(subject: Subject) -> None:
    """Bit for bit. A thread walks all four together; three, among which four don't divide, walk them one by one."""
    case = Case(subject, Sizes(B=1, T=64 * 2 + 3, G=4, H=4, K=64, V=12), gates="mixed" if subject.gated else "ordinary")
    run, tensors, state = call(case, CPU), case.tensors(), case.state()
    torch.set_num_threads(1)
    together = evaluate(case, run, tensors, state)
    torch.set_num_threads(3)
    alone = evaluate(case, run, tensors, state)
    assert all(torch.equal(together[name], x) for name, x in alone.items())
