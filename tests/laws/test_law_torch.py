"""Law 8: torch.compile sees one graph, autocast changes nothing, the registered ops are what they say."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from laws.cases import ENGINE, MECHANISMS, RECURRENT
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from linattn.testing import AUTO, Case, Form, Sizes, Subject, call, evaluate, law_run

# torch.compile makes an instance of every autograd.Function, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

SMALL = Sizes(B=2, T=35, G=1, H=2, K=8, V=8)


def compiled(subject: Subject, compiler: str, **options: Any) -> Subject:
    torch.compiler.reset()
    return dataclasses.replace(
        subject, function=torch.compile(subject.function, fullgraph=True, backend=compiler, **options)
    )


@pytest.mark.parametrize("subject", MECHANISMS, ids=str)
def test_one_graph_forward_and_backward(subject: Subject) -> None:
    """With a state and without, and for one token, as training, prefill and generation call it."""
    graph = compiled(subject, "aot_eager")
    for sizes, continued in ((SMALL, False), (SMALL, True), (dataclasses.replace(SMALL, T=1), True)):
        case = Case(subject, sizes, continued=continued)
        law_run(case, lambda case: call(dataclasses.replace(case, subject=graph), AUTO), "compiled")


@pytest.mark.parametrize("subject", RECURRENT, ids=str)
def test_one_graph_of_packed_sequences(subject: Subject) -> None:
    case = Case(subject, SMALL, lengths=(3, 0, 1, 20))
    graph = compiled(subject, "aot_eager")
    law_run(case, lambda case: call(dataclasses.replace(case, subject=graph), AUTO, case.cu_seqlens), "compiled")


@pytest.mark.parametrize(
    "name",
    [
        "token_channel+low_rank+before+bonus",
        "channel+delta+after",
        "none+additive+after+sum",
        "scan+token",
        "selective",
    ],
)
def test_one_graph_of_the_engine(name: str) -> None:
    case = Case(ENGINE[name], SMALL)
    graph = compiled(case.subject, "aot_eager")
    law_run(case, lambda case: call(dataclasses.replace(case, subject=graph), AUTO), "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated_delta_rule", "gated_linear_attention"])
def test_inductor(name: str) -> None:
    case = Case(Subject.of(name), SMALL)
    graph = compiled(case.subject, "inductor")
    law_run(case, lambda case: call(dataclasses.replace(case, subject=graph), AUTO), "inductor")


@pytest.mark.parametrize("name", ["gated_delta_rule", "gated_linear_attention", "retention", "mamba"])
def test_one_graph_for_every_length(name: str) -> None:
    """dynamic=True: another number of tokens compiles nothing anew."""
    subject = Subject.of(name)
    graph = compiled(subject, "aot_eager", dynamic=True)
    for T in (35, 50, 80):
        case = Case(subject, dataclasses.replace(SMALL, T=T))
        with torch.compiler.set_stance("fail_on_recompile" if T == 80 else "default"):
            law_run(case, lambda case: call(dataclasses.replace(case, subject=graph), AUTO), "dynamic")


@pytest.mark.parametrize("subject", RECURRENT, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(subject: Subject, dtype: torch.dtype) -> None:
    """The recurrence is computed in float32 whatever autocast says; results keep their dtypes."""
    case = Case(subject, SMALL, dtype)
    run = call(case, AUTO)
    plain = evaluate(case, run, case.tensors(), case.state())
    with torch.autocast("cpu", torch.bfloat16):
        cast = evaluate(case, run, case.tensors(), case.state())
    assert {name: x.dtype for name, x in cast.items()} == {name: x.dtype for name, x in plain.items()}
    different = [name for name, x in plain.items() if not torch.equal(x, cast[name])]
    assert not different


class _Recorder(TorchDispatchMode):
    """Keeps the calls of this library's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "linattn":
            self.calls.append((func, pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), args)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "lengths", "dtype"),
    [
        ("head+additive+before+bonus", (), torch.bfloat16),
        ("token_channel+delta+after", (3, 0, 10), torch.float32),
        ("token_channel+low_rank+after", (), torch.float32),
        ("scan+token", (), torch.float32),
        ("selective", (), torch.bfloat16),
        ("selective", (3, 0, 10), torch.float32),
    ],
)
def test_the_registered_ops(name: str, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    case = Case(ENGINE[name], SMALL, dtype, lengths=lengths)
    recorder = _Recorder()
    with recorder:
        evaluate(case, call(case, Form("chunked", "chunkwise"), case.cu_seqlens), case.tensors(), case.state())
    calls = {str(op): (op, args) for op, args in recorder.calls}
    assert len(calls) == (1 if name.startswith("scan") else 2)
    for op, args in calls.values():
        if "backward" not in str(op):
            args = pytree.tree_map_only(torch.Tensor, lambda x: x.requires_grad_(x.is_floating_point()), args)
        torch.library.opcheck(op, args)
