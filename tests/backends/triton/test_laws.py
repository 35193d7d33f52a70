"""The laws on the Triton backend: on a GPU, or in Triton's interpreter where TRITON_INTERPRET=1 is set."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

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

from linattn import engine, testing  # noqa: E402
from linattn.backends._protocol import Stabilized  # noqa: E402
from linattn.backends.triton import LARGEST, launch  # noqa: E402
from linattn.benchmark.launches import draw, recorded  # noqa: E402
from linattn.layers.exponential_gate import stabilize  # noqa: E402
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
    law_run,
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
INF = float("inf")
OP_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
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
MIXED = [
    s for s in mechanisms() if s.name in ("linear_attention", "mlstm", "mamba2")
]  # weights and denominators of their own
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
    CASES = [c for c in CASES if c.subject in FEW and not (c.gates == "mixed" and c.subject.recurrence.decay.fixed)]
    CASES += [
        Case(ENGINE[name], SMALL, torch.bfloat16, gates)
        for name in ("head+additive+after", "token_head+additive+after", "token_head+additive+after+sum")
        for gates in ("ordinary", "-inf")
    ]
    # steep gates of channels have chunks of a token, so that a few tell as much
    SHORT = dataclasses.replace(SMALL, T=20)
    CHANNELS = (Decay.CHANNEL, Decay.TOKEN_CHANNEL)
    CASES = [
        dataclasses.replace(c, sizes=SHORT) if c.gates != "ordinary" and c.subject.recurrence.decay in CHANNELS else c
        for c in CASES
    ]


# Heads that share queries and keys have kernels of their own for the gradients of these; CASES have such heads.
SHARING = [
    s
    for s in (FEW if INTERPRETED else SUBJECTS)
    if s.recurrence.read is Read.AFTER
    and s.recurrence.normalizer is Normalizer.NONE
    and s.recurrence.decay in (Decay.NONE, Decay.HEAD, Decay.TOKEN_HEAD)
]
OWN = [dataclasses.replace(c, sizes=dataclasses.replace(c.sizes, G=2)) for c in CASES if c.subject in SHARING]


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


def _with_divisor_held(case: Case) -> float:
    """The largest number of q's gradient with the divisor held; the divisor's own part may cancel nearly all of it."""
    calls: list[tuple[Any, dict[str, Any]]] = []
    matrix = engine.matrix

    def spy(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        return matrix(*args, **options)

    plain = dataclasses.replace(case, device="cpu")
    tensors = {name: x.cpu().double() for name, x in case.tensors().items()}
    state = pytree.tree_map_only(torch.Tensor, lambda x: x.cpu().double(), case.state())
    q = tensors["q"].requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "matrix", spy)
        cu = None if case.cu_seqlens is None else case.cu_seqlens.cpu()
        o, _ = call(plain, REFERENCE, cu)(tensors, state)
    if not calls:  # the subject is the engine's own function
        calls = [((case.subject.recurrence,), {**tensors, "state": state, "cu_seqlens": cu})]
    ((recurrence, *args), options) = calls[0]
    before = options.pop("state")
    options = {name: x for name, x in options.items() if name not in ("m", "eps", "mode", "backend")}
    undivided = dataclasses.replace(recurrence, normalizer=Normalizer.NONE)
    sums, _ = matrix(undivided, *args, **options, state=None if before is None else before.S, backend="reference")
    divisor = (sums * o).sum(-1, keepdim=True) / (o * o).sum(-1, keepdim=True).clamp_min(1e-300)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(case.seed)).to(case.dtype).double()
    (part,) = torch.autograd.grad(sums, q, do / divisor.detach().abs().clamp_min(1e-300))
    return float(part.abs().max())


def law_accuracy(case: Case, form: Form) -> None:
    """As linattn.testing's; but the plain computation of the gate's gradient is the identity that the kernels use, and
    that of q with a sum normaliser takes both of its parts from the case's dtype."""
    recurrence = case.subject.recurrence
    summed = recurrence is not None and recurrence.normalizer is Normalizer.SUM and case.dtype != torch.float32
    if not case.subject.gated and not summed:
        testing.law_accuracy(case, form)
        return
    if not case.subject.gated:
        judge(case, lambda case: _measured(case, form, {}), form)
        return
    truths = [standard(other).truth["gradient of g"].cpu() for other in case.draws()]
    sizes = [float(x.abs().max()) if x.numel() else 0.0 for x in truths]
    plain = max(
        float((_gate_gradient_plainly(other).double() - truth.double()).abs().max()) / size if size else 0.0
        for other, truth, size in zip(case.draws(), truths, sizes, strict=True)
    )

    def measure(case: Case) -> tuple[Tensors, Standard]:
        truth = standard(case).truth["gradient of g"]
        size = float(truth.abs().max()) if truth.numel() else 0.0
        return _measured(case, form, {"gradient of g": 2 * (plain + torch.finfo(case.dtype).eps) * size})

    judge(case, measure, form)


def _measured(case: Case, form: Form, least: dict[str, float]) -> tuple[Tensors, Standard]:
    """Results, and the standard with errors of at ``least`` so much allowed."""
    recurrence, wanted = case.subject.recurrence, standard(case)
    if recurrence is not None and recurrence.normalizer is Normalizer.SUM and case.dtype != torch.float32:
        least = least | {"gradient of q": 2 * torch.finfo(case.dtype).eps * _with_divisor_held(case)}
    allowed = {name: max(error, least.get(name, 0.0)) for name, error in wanted.allowed.items()}
    results = evaluate(case, call(case, form, case.cu_seqlens), case.tensors(), case.state())
    return results, wanted._replace(allowed=allowed)


LENGTHS = [1, 2, 63, 64, 65] if INTERPRETED else [1, 2, 3, 63, 64, 65, 127, 128, 129, 509, 1000]
SIZES = [(20, 60)] if INTERPRETED else [(16, 16), (20, 60), (100, 36), (64, 128), (128, 64), (256, 200), (130, 256)]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_accuracy(case: Case) -> None:
    law_accuracy(case, FORM)


@pytest.mark.parametrize("case", OWN, ids=repr)
def test_heads_with_keys_of_their_own(case: Case) -> None:
    law_accuracy(case, FORM)


@pytest.mark.parametrize("subject", SHARING, ids=str)
def test_keys_shared_by_large_heads(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SHARED", {})
    law_accuracy(Case(subject, SMALL, device=DEVICE), FORM)
    law_accuracy(Case(subject, SMALL, lengths=(3, 0, 1, 66), device=DEVICE), FORM)


@pytest.mark.parametrize("subject", SHARING, ids=str)
def test_the_past_gets_no_gradient_from_the_future(subject: Subject) -> None:
    law_causality(Case(subject, dataclasses.replace(SMALL, T=70), device=DEVICE), FORM, 40)


def test_no_error_adds_up_in_gradients_of_gates_of_heads_that_share_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are summed alone, which leaves a fraction of the error of sums over whole rows."""
    torch.manual_seed(0)
    x, do, _ = draw(
        Decay.TOKEN_HEAD, torch.bfloat16, {"B": 1, "T": 640, "H": 2, "K": 16, "V": 16}, device=DEVICE, strength=1.0
    )
    x = x._replace(q=x.q[:, :, :1], k=x.k[:, :, :1], state=None)
    exactly = x._replace(q=x.q.float(), k=x.k.float(), v=x.v.float())
    right = launch.backward(exactly, do.float(), None, True).g
    off = []
    for size in (128 * 64, 0):
        monkeypatch.setitem(launch.SHARED, torch.bfloat16, size)
        off.append(float((launch.backward(x, do, None, True).g - right).norm() / right.norm()))
    assert off[0] < min(5e-3, off[1] / 2), off


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


@pytest.mark.parametrize(("dtype", "V"), [(torch.float32, 192), (torch.bfloat16, 512)], ids=str)
@pytest.mark.parametrize("subject", FEW[-3:-1] if INTERPRETED else FEW, ids=str)
def test_values_of_several_heads(subject: Subject, dtype: torch.dtype, V: int) -> None:
    case = Case(subject, Sizes(B=1, T=20, G=1, H=2, K=16, V=V), dtype, device=DEVICE)
    law_accuracy(case, FORM)
    with torch.no_grad():  # walked, in one piece
        short = dataclasses.replace(case, sizes=dataclasses.replace(case.sizes, T=3))
        law_run(short, lambda case: call(case, FORM), gradients=False)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("decay", [Decay.NONE, Decay.HEAD, Decay.TOKEN_HEAD], ids=str)
def test_a_scale_of_any_sign(decay: Decay, scale: float) -> None:
    """Kernels take the scale's logarithm; without one of its own a layer's is above 0."""
    sizes = {"B": 1, "T": 67, "H": 2, "K": 16, "V": 8}
    x, do, dS = draw(decay, torch.float32, sizes, device=DEVICE)
    o, S, *_ = launch.forward(x._replace(scale=scale))
    (wanted, wanted_S, *_), one = launch.forward(x), x.scale
    torch.testing.assert_close(o, wanted * (scale / one), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(S, wanted_S)
    grads = launch.backward(x._replace(scale=scale), do, dS, x.g is not None)
    right = launch.backward(x, do * (scale / one), dS, x.g is not None)
    for name, got, want in zip(grads._fields, grads, right, strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("subject", FEW, ids=str)
def test_packed(subject: Subject) -> None:
    law_accuracy(Case(subject, SMALL, lengths=(3, 0, 1, 66), device=DEVICE), FORM)


@pytest.mark.parametrize("subject", FEW if INTERPRETED else SUBJECTS, ids=str)
def test_grouped_heads(subject: Subject) -> None:
    law_accuracy(Case(subject, Sizes(B=1, T=35, G=2, H=4, K=16, V=8), torch.bfloat16, device=DEVICE), FORM)


@pytest.mark.parametrize(("K", "V"), [(70, 20), (20, 70)])
@pytest.mark.parametrize("subject", [s for s in FEW if s.recurrence.decay in (Decay.NONE, Decay.TOKEN_HEAD)], ids=str)
def test_wide_blocks(subject: Subject, K: int, V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_processors", lambda device: 1)
    law_accuracy(Case(subject, Sizes(B=1, T=67, G=1, H=2, K=K, V=V), torch.bfloat16, device=DEVICE), FORM)


@pytest.mark.parametrize("name", ["token_head+additive+after", "token_channel+additive+after"])
def test_decays_that_vanish_have_no_gradient(name: str) -> None:
    """Not the rounding of a difference, which the logarithm of the decay would multiply on its way to a rate."""
    sizes = dataclasses.replace(SMALL, T=24) if INTERPRETED else SMALL
    case = Case(ENGINE[name], sizes, gates="mixed", continued=False, device=DEVICE)
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


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are cut where they have 192 tokens."""
    monkeypatch.setattr(launch, "SHORTEST", 64)
    monkeypatch.setattr(launch, "_processors", lambda device: 132)


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize(("subject", "H"), [*((s, 1) for s in FEW), *((s, 2) for s in SHARING)], ids=str)
def test_split_rows(subject: Subject, H: int) -> None:
    law_accuracy(Case(subject, Sizes(B=1, T=300, G=1, H=H, K=16, V=8), device=DEVICE), FORM)


@pytest.mark.parametrize("length", [70, 300])
def test_sums_of_gates_are_kept(length: int, split: None) -> None:
    """The backward that is given them sums no gates, and has the same bits."""
    x, do, dS = draw(Decay.TOKEN_HEAD, torch.bfloat16, {"B": 1, "T": length, "H": 1, "K": 16, "V": 8}, device=DEVICE)
    *_, sums = launch.forward(x, (True, True))
    assert sums is not None
    assert list(sums.shape) == launch.sums_shape(x)
    launches, grads = [], []
    for given in (None, sums):
        with recorded(run=True) as found:
            grads.append(launch.backward(x, do, dS, True, True, None, given))
        launches.append([each.kernel.__name__ for each in found])
    assert launches[0].count("sum_gates") == launches[1].count("sum_gates") + 1 == 1
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert launch.forward(x)[3] is None


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("decay", [Decay.NONE, Decay.TOKEN_HEAD, Decay.TOKEN_CHANNEL], ids=str)
def test_states_before_segments_are_kept(decay: Decay) -> None:
    """The backward that is given them makes fewer launches, and the same bits; no launch reads what none wrote."""
    sizes = {"B": 1, "T": 200, "H": 1, "K": 16, "V": 8}
    x, do, dS = draw(decay, torch.float32, sizes, device=DEVICE)
    _, _, starts, _ = launch.forward(x, (x.g is not None, True))
    assert starts is not None
    assert list(starts.shape) == launch.starts_shape(x) == [2, 1, 16, 8]
    assert torch.equal(starts[:1], x.state)
    launches, grads = [], []
    for given in (None, starts):
        with recorded(run=True) as found:
            grads.append(launch.backward(x, do, dS, x.g is not None, True, given))
        launches.append([each.kernel.__name__ for each in found])
    assert launches[0].count("join") == launches[1].count("join") + 1
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert launch.forward(x)[2] is None


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
def test_weights_and_denominators(subject: Subject, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the gradient of the gate, and of the maximum before, which comes from it: test_accuracy measures it."""

    def measure(case: Case) -> tuple[Tensors, Standard]:
        found, wanted = _measured(case, FORM, {})
        kept = [name for name in found if name not in ("gradient of f", "gradient of initial state.m")]
        return {name: found[name] for name in kept}, Standard(
            {name: wanted.truth[name] for name in kept}, {name: wanted.allowed[name] for name in kept}
        )

    wide = dataclasses.replace(SMALL, K=70)  # one wide block of keys where programs are enough
    monkeypatch.setattr(launch, "_processors", lambda device: 1)
    judge(Case(subject, wide, dtype, device=DEVICE), measure, FORM)


@pytest.mark.parametrize("subject", SUMS, ids=str)
def test_few_tokens_and_their_sum(subject: Subject) -> None:
    law_accuracy(Case(subject, Sizes(B=2, T=5, G=1, H=2, K=20, V=60), device=DEVICE), FORM)


@pytest.fixture(autouse=True)
def _shared_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all dtypes, as float32 tells more."""
    monkeypatch.setattr(launch, "SHARED", dict.fromkeys(DTYPES, 128 * 64))


@pytest.fixture(autouse=INTERPRETED)
def _short_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones take long in the interpreter."""
    monkeypatch.setattr(launch, "SCANNED", 32)
    monkeypatch.setattr(launch, "FEW_SCANNED", 4)


def _gates(
    length: int, dtype: torch.dtype, *, fixed: bool = False, lengths: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """f, i, m and boundaries, some of them -inf."""
    random = torch.Generator().manual_seed(length)
    B, X = 1 if lengths else 2, 3
    f, i = torch.randn(2, B, length, X, generator=random)
    f, i, m = torch.nn.functional.logsigmoid(f), 4 * i, torch.randn(len(lengths) or B, X, generator=random)
    f[0, length // 3, 0], i[0, :2, -1], i[0, length // 2], m[-1, 1] = -INF, -INF, -INF, -INF
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE) if lengths else None
    return (f[0, 0] if fixed else f).to(DEVICE, dtype), i.to(DEVICE, dtype), m.to(DEVICE), cu_seqlens


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "kind",
    [{"length": n} for n in ((1, 150) if INTERPRETED else (1, 9, 300, 2048, 20000))]
    + [{"length": 50, "fixed": True}, {"length": 200, "lengths": (0, 7, 0, 143, 50, 0)}],
    ids=str,
)
def test_running_maximum(kind: dict[str, Any], dtype: torch.dtype) -> None:
    """Everything, and all gradients, as torch's operations, which sum in float64, give it."""

    def run(backend: str, *gates: torch.Tensor, cu_seqlens: torch.Tensor | None) -> list[torch.Tensor]:
        gates = [x.detach().requires_grad_() for x in gates]
        results = stabilize(*gates, cu_seqlens, backend)
        random = torch.Generator().manual_seed(0)
        weights = [torch.randn(x.shape, generator=random).to(x) for x in results]
        keep = [n for n, name in enumerate(results._fields) if name != "m_before"]  # its gradient is the first token's
        grads = torch.autograd.grad([results[n] for n in keep], gates, [weights[n] for n in keep])
        return [*results, *grads]

    *gates, cu_seqlens = _gates(dtype=dtype, **kind)
    found, wanted = (run(backend, *gates, cu_seqlens=cu_seqlens) for backend in ("triton", "chunked"))
    for got, right, name in zip(found, wanted, [*Stabilized._fields, "df", "di", "dm"], strict=True):
        assert got.dtype == right.dtype
        near = 1e-10 if got.dtype == torch.float64 else 4 * torch.finfo(got.dtype).eps
        torch.testing.assert_close(got, right, rtol=near, atol=near, msg=lambda text, name=name: f"{name}: {text}")


def test_running_maximum_of_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are joined at once."""
    monkeypatch.setattr(launch, "SCANNED", 2)
    test_running_maximum({"length": 135, "lengths": (2, 133)}, torch.float32)


def test_running_maximum_over_a_long_row() -> None:
    """What the maxima say of the state stays exact, however long the row is: g sums up to what f and m say."""
    T = 500 if INTERPRETED else 131072
    f, i = torch.full((1, T, 2), -1 / 3, device=DEVICE), torch.full((1, T, 2), -INF, device=DEVICE)
    i[:, :: T // 3, 0], i[:, 0, 1] = 1000.0, -7.0
    found, wanted = (
        stabilize(f.to(x), i.to(x), backend="triton" if x == DEVICE else "chunked") for x in (DEVICE, "cpu")
    )
    for got, right in zip(found[2:4], wanted[2:4], strict=True):
        torch.testing.assert_close(got.cpu(), right, rtol=0, atol=1e-6)
    for got, right in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(got.cpu(), right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("packed", [False, True])
def test_registered_ops(packed: bool) -> None:
    """opcheck, of the ops that other backends do not have."""
    f, i, m, cu_seqlens = _gates(12, torch.float32, lengths=(3, 0, 9) if packed else ())
    gates = [x.requires_grad_() for x in (f, i, m)]
    torch.library.opcheck(torch.ops.linattn.stabilized, (*gates, cu_seqlens, "triton"), test_utils=OP_TESTS)
    case = Case(ENGINE["token_head+additive+after+sum"], Sizes(B=len(i), T=12, G=3, H=3, K=16, V=16), device=DEVICE)
    q, k, v, g = (x.requires_grad_() for x in case.tensors().values())
    S, z = (torch.randn(len(m), *x.shape[1:], device=DEVICE).requires_grad_() for x in case.state())
    weight, maxima = (torch.rand_like(g).requires_grad_() for _ in range(2))
    args = (q, k, v, g, S, cu_seqlens, weight, z, maxima, 0.25, 1e-6, "triton")
    torch.library.opcheck(torch.ops.linattn.divided_forward, args, test_utils=OP_TESTS)


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("length", [70, 200])
def test_the_registered_op_of_rows_that_may_be_cut(length: int) -> None:
    sizes = {"B": 1, "T": length, "H": 1, "K": 16, "V": 8}
    x, do, _ = draw(Decay.TOKEN_HEAD, torch.float32, sizes, device=DEVICE)
    *tensors, scale, write, read = x
    rest = (scale, write.value, read.value, "chunkwise", "triton")
    moving = [None if t is None else t.requires_grad_() for t in tensors]
    torch.library.opcheck(torch.ops.linattn.matrix_forward, (*moving, *rest, True), test_utils=OP_TESTS)
    given = [None if t is None else t.detach() for t in tensors]
    *_, writes, states = torch.ops.linattn.matrix_forward(*given, *rest, True)
    assert bool(states.numel()) == (length == 200)
    args = (do, None, writes, states, *given, *rest, True)
    torch.library.opcheck(torch.ops.linattn.matrix_backward, args)


@pytest.mark.parametrize("traced", [False, True])
def test_there_is_no_second_derivative(traced: bool) -> None:
    case = Case(ENGINE["token_head+additive+after"], Sizes(B=1, T=20, G=1, H=1, K=16, V=8), device=DEVICE)
    tensors = {name: t.requires_grad_() for name, t in case.tensors().items()}
    with FlopCounterMode(display=False) if traced else contextlib.nullcontext():
        o, _ = call(case, FORM)(tensors, None)
        (grad,) = torch.autograd.grad(o.square().sum(), tensors["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; LINATTN_BACKEND=reference has"):
        grad.sum().backward()


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
def test_many_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SHARED", {})  # a sum of so many, one by one, has the error of so many
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
