"""The laws on the Triton backend: on a GPU, or in Triton's interpreter where TRITON_INTERPRET=1 is set."""

from __future__ import annotations

import dataclasses
import itertools
import os

import pytest
import torch
import torch.utils._pytree as pytree

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if INTERPRETED:  # numpy's warnings about infinities that are masked afterwards, and about Triton's use of it
    pytestmark += [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("RuntimeWarning", "DeprecationWarning")]

if INTERPRETED:  # its products take the raw bits of bfloat16 for integers
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    _create_dot = interpreter.InterpreterBuilder.create_dot

    def _float32(handle: object) -> object:
        if handle.dtype.scalar == tl.bfloat16:
            return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return handle

    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: _create_dot(
        self, _float32(a), _float32(b), *rest
    )

from linattn import testing  # noqa: E402
from linattn.backends.triton import LARGEST  # noqa: E402
from linattn.recurrence import Decay, Engine, Normalizer, Read, Write  # noqa: E402
from linattn.testing import (  # noqa: E402
    GATES,
    LAYOUTS,
    REFERENCE,
    Case,
    Form,
    Sizes,
    Standard,
    Subject,
    Tensors,
    call,
    evaluate,
    judge,
    law_causality,
    law_expanded,
    law_layout,
    law_nothing,
    law_pieces,
    law_purity,
    law_rows,
    mechanisms,
    recurrences,
    separately,
    standard,
)

FORM = Form("triton", "chunkwise")
SUBJECTS = [
    s
    for s in recurrences()
    if s.recurrence is not None
    and s.recurrence.engine is Engine.MATRIX
    and s.recurrence.write is Write.ADDITIVE
    and (s.recurrence.normalizer is Normalizer.NONE or s.recurrence.decay not in (Decay.CHANNEL, Decay.TOKEN_CHANNEL))
]
SUMS = [
    s
    for s in recurrences()
    if s.recurrence is not None
    and s.recurrence.normalizer is Normalizer.SUM
    and s.recurrence.read is Read.AFTER
    and s.recurrence.decay in (Decay.NONE, Decay.HEAD, Decay.TOKEN_HEAD)
]
ENGINE = {s.name: s for s in SUBJECTS}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = Sizes(B=1, T=67, G=1, H=2, K=16, V=8)
# every kind of decay and of reading, where not every pair of them is worth the time
FEW = [
    ENGINE[name]
    for name in (
        "none+additive+before",
        "head+additive+after",
        "channel+additive+before+bonus",
        "token_head+additive+after",
        "none+additive+after+sum",
        "token_head+additive+after+sum",
        "token_channel+additive+after",
    )
]
MIXED = [s for s in mechanisms() if s.name in ("linear_attention", "mlstm")]  # weights and denominators of their own
CASES = [
    Case(subject, SMALL, dtype, gates, device=DEVICE)
    for subject in SUBJECTS
    for dtype in DTYPES
    for gates in (GATES if subject.gated else ["ordinary"])
]
if INTERPRETED:
    kept = {"ordinary", "mixed", "-inf"}
    CASES = [
        c for c in CASES if c.gates in kept and c.dtype == (torch.bfloat16 if c.gates == "mixed" else torch.float32)
    ]
    CASES = [c for c in CASES if c.subject in FEW]


def _gate_gradient_plainly(case: Case) -> torch.Tensor:
    """The gate's gradient by the identity that the kernels use, plainly in torch, from gradients in the case's dtype.

    dg_l = sum_{i >= l} <q_i, dq_i> - sum_{j >= l} <k_j, dk_j> + <S_T, dS_T>, without the bonus, and i > l where
    tokens read before their own write.
    """
    recurrence = case.subject.recurrence
    assert recurrence is not None
    plain, tensors, state = dataclasses.replace(case, device="cpu"), case.tensors(), case.state()
    tensors = {name: x.cpu() for name, x in tensors.items()}
    for name in ("q", "k"):  # gradients of every head, not their sums over groups
        tensors[name] = tensors[name].repeat_interleave(case.sizes.H // case.sizes.G, 2)
    if "u" in tensors:
        tensors["u"] = torch.zeros_like(tensors["u"])
    run = separately(plain, REFERENCE) if case.lengths else call(plain, REFERENCE)
    found = evaluate(plain, run, tensors, pytree.tree_map_only(torch.Tensor, lambda x: x.cpu(), state))
    random = torch.Generator().manual_seed(case.seed)
    torch.randn(found["output"].shape, generator=random)
    across = torch.zeros(())
    for name, x in found.items():  # the state, and the sum of keys
        if name.startswith("final state"):
            moved = x * torch.randn(x.shape, generator=random).to(case.dtype).float()
            across = across + (moved if name.endswith("z") else moved.sum(-1))
    change = [tensors[name].float() * found[f"gradient of {name}"].float() for name in ("q", "k")]
    scalar = recurrence.decay in (Decay.HEAD, Decay.TOKEN_HEAD)
    if scalar:
        change, across = [x.sum(-1) for x in change], across.sum(-1)
    ends = [0, *itertools.accumulate(case.lengths or [case.sizes.T])]
    parts = []
    for n, (start, end) in enumerate(itertools.pairwise(ends)):
        read, written = (x[:, start:end] for x in change)
        if recurrence.read is Read.BEFORE:
            read = torch.cat([read[:, 1:], torch.zeros_like(read[:, :1])], 1)
        rest = across[n : n + 1] if case.lengths else across
        parts.append((read - written).flip(1).cumsum(1).flip(1) + rest.unsqueeze(1))
    dg = torch.cat(parts, 1)
    return dg.sum((0, 1)) if recurrence.decay.fixed else dg


def law_accuracy(case: Case, form: Form) -> None:
    """As linattn.testing's; but the plain computation of the gate's gradient is the identity that the kernels use."""
    if not case.subject.gated:
        testing.law_accuracy(case, form)
        return
    truths = [standard(other).truth["gradient of g"].cpu() for other in case.draws()]
    sizes = [float(x.abs().max()) if x.numel() else 0.0 for x in truths]
    plain = max(
        float((_gate_gradient_plainly(other).double() - truth.double()).abs().max()) / size if size else 0.0
        for other, truth, size in zip(case.draws(), truths, sizes, strict=True)
    )

    def measure(case: Case) -> tuple[Tensors, Standard]:
        wanted = standard(case)
        truth = wanted.truth["gradient of g"]
        size = float(truth.abs().max()) if truth.numel() else 0.0
        allowed = max(wanted.allowed["gradient of g"], 2 * (plain + torch.finfo(case.dtype).eps) * size)
        results = evaluate(case, call(case, form, case.cu_seqlens), case.tensors(), case.state())
        return results, wanted._replace(allowed=wanted.allowed | {"gradient of g": allowed})

    judge(case, measure, form)


LENGTHS = [1, 2, 63, 64, 65] if INTERPRETED else [1, 2, 3, 63, 64, 65, 127, 128, 129, 509, 1000]
SIZES = [(20, 60)] if INTERPRETED else [(16, 16), (20, 60), (100, 36), (64, 128), (128, 64), (256, 200), (130, 256)]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_accuracy(case: Case) -> None:
    law_accuracy(case, FORM)


@pytest.mark.parametrize("dtype", DTYPES[1:2] if INTERPRETED else DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("subject", FEW[-2:] if INTERPRETED else FEW, ids=str)
def test_length(subject: Subject, length: int, dtype: torch.dtype) -> None:
    law_accuracy(Case(subject, Sizes(B=2, T=length, G=1, H=2, K=32, V=32), dtype, device=DEVICE), FORM)


@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else DTYPES, ids=str)
@pytest.mark.parametrize(("K", "V"), SIZES)
@pytest.mark.parametrize("subject", FEW[-2:] if INTERPRETED else FEW, ids=str)
def test_size(subject: Subject, K: int, V: int, dtype: torch.dtype) -> None:
    if max(K, V) > LARGEST[dtype]:
        pytest.skip("refused")
    law_accuracy(Case(subject, Sizes(B=1, T=70, G=1, H=2, K=K, V=V), dtype, device=DEVICE), FORM)


@pytest.mark.parametrize("subject", FEW, ids=str)
def test_packed(subject: Subject) -> None:
    law_accuracy(Case(subject, SMALL, lengths=(3, 0, 1, 66), device=DEVICE), FORM)


@pytest.mark.parametrize("subject", FEW if INTERPRETED else SUBJECTS, ids=str)
def test_grouped_heads(subject: Subject) -> None:
    law_accuracy(Case(subject, Sizes(B=1, T=35, G=2, H=4, K=16, V=8), torch.bfloat16, device=DEVICE), FORM)


@pytest.mark.parametrize("name", ["token_head+additive+after", "token_channel+additive+after"])
def test_decays_that_vanish_have_no_gradient(name: str) -> None:
    """Not the rounding of a difference, which the logarithm of the decay would multiply on its way to a rate."""
    case = Case(ENGINE[name], SMALL, gates="mixed", continued=False, device=DEVICE)
    dg = evaluate(case, call(case, FORM), case.tensors(), None)["gradient of g"]
    gone = case.tensors()["g"] < -1000
    assert gone.any()
    assert not dg[gone].any()
    assert dg[~gone].any()


@pytest.mark.skipif(INTERPRETED, reason="takes long in the interpreter")
@pytest.mark.parametrize("subject", FEW, ids=str)
def test_laws(subject: Subject) -> None:
    case = Case(subject, Sizes(B=2, T=67, G=1, H=2, K=16, V=8), device=DEVICE)
    law_pieces(case, (1, 30, 31), FORM)
    law_rows(case, FORM)
    law_causality(case, FORM, 40)
    for layout in LAYOUTS:
        law_layout(case, FORM, layout)
    law_expanded(case, FORM)
    law_purity(case, FORM)
    law_nothing(case, FORM)


@pytest.mark.parametrize("subject", FEW, ids=str)
def test_split_rows(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from linattn.backends.triton import launch

    monkeypatch.setattr(launch, "SHORTEST", 64)
    monkeypatch.setattr(launch, "_processors", lambda device: 132)
    law_accuracy(Case(subject, Sizes(B=1, T=200, G=1, H=1, K=16, V=8), device=DEVICE), FORM)


@pytest.mark.parametrize("dtype", DTYPES[1:2] if INTERPRETED else DTYPES, ids=str)
@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_one_token(subject: Subject, dtype: torch.dtype) -> None:
    law_accuracy(Case(subject, Sizes(B=2, T=1, G=1, H=2, K=20, V=60), dtype, device=DEVICE), FORM)


@pytest.mark.parametrize("length", [5] if INTERPRETED else [2, 7, 8, 9, 31, 32])
@pytest.mark.parametrize("subject", FEW, ids=str)
def test_few_tokens(subject: Subject, length: int) -> None:
    case = Case(subject, Sizes(B=2, T=length, G=1, H=2, K=20, V=60), torch.bfloat16, device=DEVICE)
    law_accuracy(case, FORM)
    law_accuracy(Case(subject, SMALL, lengths=(0, 1, length, 0), device=DEVICE), FORM)
    if not INTERPRETED:  # it takes long
        law_pieces(case, (1, length - 1), FORM)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("subject", MIXED, ids=str)
def test_weights_and_denominators(subject: Subject, dtype: torch.dtype) -> None:
    """All but the gradient of the gate, and of the maximum before, which comes from it: test_accuracy measures it."""

    def measure(case: Case) -> tuple[Tensors, Standard]:
        found, wanted = evaluate(case, call(case, FORM), case.tensors(), case.state()), standard(case)
        kept = [name for name in found if name not in ("gradient of f", "gradient of initial state.m")]
        return {name: found[name] for name in kept}, Standard(
            {name: wanted.truth[name] for name in kept}, {name: wanted.allowed[name] for name in kept}
        )

    judge(Case(subject, SMALL, dtype, device=DEVICE), measure, FORM)


@pytest.mark.parametrize("subject", SUMS, ids=str)
def test_few_tokens_and_their_sum(subject: Subject) -> None:
    law_accuracy(Case(subject, Sizes(B=2, T=5, G=1, H=2, K=20, V=60), device=DEVICE), FORM)


@pytest.mark.skipif(INTERPRETED, reason="a GPU's")
@pytest.mark.parametrize("length", [1, 5, 100])
def test_cuda_graph(length: int) -> None:
    case = Case(ENGINE["token_channel+additive+after"], Sizes(B=2, T=length, K=64, V=64), torch.bfloat16, device=DEVICE)
    given, state, run = case.tensors(), case.state(), call(case, FORM)
    with torch.no_grad():
        wanted = run(given, state)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(given, state)
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="a GPU's")
@pytest.mark.parametrize("subject", FEW, ids=str)
def test_compiled_as_one_graph(subject: Subject) -> None:
    case = Case(subject, Sizes(B=1, T=67, K=64, V=64), torch.bfloat16, device=DEVICE)
    run = call(case, FORM)
    plain, compiled = (
        evaluate(case, f, case.tensors(), case.state()) for f in (run, torch.compile(run, fullgraph=True))
    )
    assert all(torch.equal(plain[name], x) for name, x in compiled.items())


@pytest.mark.skipif(INTERPRETED, reason="a GPU's")
def test_many_heads() -> None:
    law_rows(Case(ENGINE["token_head+additive+after"], Sizes(B=2, T=3, G=1, H=40000, K=16, V=16), device=DEVICE), FORM)


@pytest.mark.skipif(INTERPRETED, reason="a GPU's")
@pytest.mark.parametrize("name", ["none+additive+after", "token_channel+additive+after"])
def test_offsets_beyond_32_bits(name: str) -> None:
    T, H, D = 140_000, 128, 128
    assert T * H * D > 2**31
    q, k, v = (torch.randn(1, T, H, D, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    given = {"q": q, "k": k, "v": v}
    if "channel" in name:
        given["g"] = torch.full_like(q, -0.5)
    run = ENGINE[name].function
    with torch.no_grad():
        o, S = run(**given, backend="triton")
        _, state = run(**{n: x[:, :-100] for n, x in given.items()}, backend="triton")
        last, final = run(**{n: x[:, -100:] for n, x in given.items()}, state=state, backend="chunked")
    assert (o[:, -100:].double() - last.double()).norm() <= 1e-2 * last.double().norm()
    assert (S - final).norm() <= 1e-2 * final.norm()


def test_kinds() -> None:
    assert {s.recurrence.decay for s in FEW if s.recurrence is not None} == set(Decay)
