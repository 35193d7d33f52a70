"""Law 9, the net is proved: a fault sown into the backend makes the law that is there for it fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from laws.cases import ENGINE
from torch import Tensor

from linattn import engine
from linattn.backends._protocol import MatrixInputs, SelectiveInputs, repeat_heads
from linattn.backends.chunked import Chunked
from linattn.recurrence import Mode
from linattn.testing import (
    Case,
    Form,
    Sizes,
    Subject,
    law_accuracy,
    law_causality,
    law_gradients,
    law_layout,
    law_nothing,
    law_pieces,
    law_purity,
    law_rows,
)

FORM = Form("faulty", "chunkwise")
Result = tuple[Tensor, Tensor]
Run = Callable[[MatrixInputs], Result]
Fault = Callable[[Run, MatrixInputs], Result]
SelectiveRun = Callable[[SelectiveInputs], Result]
SelectiveFault = Callable[[SelectiveRun, SelectiveInputs], Result]


class _Faulty(Chunked):
    """The chunked backend with a fault around it."""

    name = "faulty"

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def matrix(self, inputs: MatrixInputs, mode: Mode | None) -> Result:
        return self.fault(lambda x: Chunked.matrix(_SOUND, x, mode), inputs)


_SOUND = Chunked()


@pytest.fixture
def sow(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    return lambda fault: monkeypatch.setitem(engine.BACKENDS, "faulty", _Faulty(fault))


def _tokens(x: MatrixInputs, which: slice | Tensor) -> MatrixInputs:
    values = {name: getattr(x, name) for name in ("q", "k", "v", "g", "beta", "a", "b")}
    return x._replace(**{name: y[:, which] for name, y in values.items() if y is not None and y.dim() > 2})


def decay_off_by_one_token(run: Run, x: MatrixInputs) -> Result:
    assert x.g is not None
    return run(x._replace(g=x.g.roll(1, 1)))


def decay_of_one_channel_for_all(run: Run, x: MatrixInputs) -> Result:
    assert x.g is not None
    return run(x._replace(g=x.g[..., :1].expand_as(x.g)))


def beta_dropped(run: Run, x: MatrixInputs) -> Result:
    assert x.beta is not None
    return run(x._replace(beta=torch.ones_like(x.beta)))


def scale_dropped(run: Run, x: MatrixInputs) -> Result:
    return run(x._replace(scale=1.0))


def first_state_dropped(run: Run, x: MatrixInputs) -> Result:
    return run(x._replace(state=None))


def last_token_not_written(run: Run, x: MatrixInputs) -> Result:
    o, _ = run(x)
    return o, run(_tokens(x, slice(-1)))[1]


def chunks_swapped(run: Run, x: MatrixInputs) -> Result:
    order = torch.cat([torch.arange(32, 64), torch.arange(32), torch.arange(64, x.v.shape[1])])
    o, S = run(_tokens(x, order))
    return o[:, order.argsort()], S


def carry_forgotten(run: Run, x: MatrixInputs) -> Result:
    first, _ = run(_tokens(x, slice(64)))
    rest, S = run(_tokens(x, slice(64, None))._replace(state=None))
    return torch.cat([first, rest], 1), S


def causal_mask_missing(run: Run, x: MatrixInputs) -> Result:
    o, S = run(x)
    whole = torch.einsum("bthk,bhkv->bthv", repeat_heads(x.q, x.v.shape[2]).to(S.dtype), S) * x.scale
    return whole.to(o.dtype), S


def one_token_leaks_back(run: Run, x: MatrixInputs) -> Result:
    o, S = run(x)
    return o + 1e-3 * torch.cat([o[:, 1:].detach(), o[:, :1]], 1), S


def gradient_from_the_future(run: Run, x: MatrixInputs) -> Result:
    o, S = run(x)
    late = x.v.roll(-1, 1)
    return o + (late - late.detach()) * 1e-3, S


def gradient_of_the_final_state_dropped(run: Run, x: MatrixInputs) -> Result:
    o, S = run(x)
    return o, S.detach() + 0 * o.sum()


def gradient_of_the_first_state_dropped(run: Run, x: MatrixInputs) -> Result:
    return run(x._replace(state=None if x.state is None else x.state.detach()))


def gradient_of_the_gate_halved(run: Run, x: MatrixInputs) -> Result:
    assert x.g is not None
    return run(x._replace(g=(x.g + x.g.detach()) / 2))


def heads_grouped_the_other_way(run: Run, x: MatrixInputs) -> Result:
    repeats = x.v.shape[2] // x.q.shape[2]
    return run(x._replace(q=x.q.repeat(1, 1, repeats, 1), k=x.k.repeat(1, 1, repeats, 1)))


def boundaries_ignored(run: Run, x: MatrixInputs) -> Result:
    assert x.cu_seqlens is not None
    o, _ = run(x._replace(cu_seqlens=None, state=None if x.state is None else x.state[:1]))
    return o, run(x)[1]


def boundaries_off_by_one(run: Run, x: MatrixInputs) -> Result:
    assert x.cu_seqlens is not None
    inner = torch.zeros_like(x.cu_seqlens)
    inner[1:-1] = 1
    return run(x._replace(cu_seqlens=(x.cu_seqlens - inner).clamp_min(0)))


def state_kept_in_bfloat16(run: Run, x: MatrixInputs) -> Result:
    o, S = run(x)
    return o, S + (S.bfloat16().to(S.dtype) - S).detach()


def products_in_bfloat16(run: Run, x: MatrixInputs) -> Result:
    o, S = run(x._replace(**{name: getattr(x, name).bfloat16() for name in ("q", "k", "v")}))
    return o.to(x.v.dtype), S


def output_in_float32(run: Run, x: MatrixInputs) -> Result:
    o, S = run(x)
    return o.float(), S


def strong_gates_clamped(run: Run, x: MatrixInputs) -> Result:
    """What a kernel does that divides by e^{G} without looking."""
    assert x.g is not None
    return run(x._replace(g=x.g.clamp_min(-3.0)))


def rescaled_without_looking(run: Run, x: MatrixInputs) -> Result:
    assert x.g is not None
    G = x.g.float().cumsum(1)
    q, k = (repeat_heads(y, x.v.shape[2]).float() for y in (x.q, x.k))
    P = torch.einsum("bthk,bshk->bhts", q * G.exp(), k * (-G).exp()).tril()
    _, S = run(x)
    return (torch.einsum("bhts,bshv->bthv", P, x.v.float()) * x.scale).to(x.v.dtype), S


def row_feels_its_neighbours(run: Run, x: MatrixInputs) -> Result:
    o, S = run(x)
    return o + 0 * o.sum(0, keepdim=True), S


def state_updated_in_place(run: Run, x: MatrixInputs) -> Result:
    o, S = run(x)
    if x.state is not None:
        x.state.data.copy_(S)  # behind autograd's back, as a kernel would
    return o, S


def other_bits_every_time(run: Run, x: MatrixInputs) -> Result:
    o, S = run(x)
    return o * (1 + torch.finfo(o.dtype).eps * torch.randint(2, o.shape)), S


def strides_ignored(run: Run, x: MatrixInputs) -> Result:
    def misread(y: Tensor) -> Tensor:
        return y if y.is_contiguous() else torch.as_strided(y, y.shape, torch.empty(y.shape).stride())

    return run(x._replace(v=misread(x.v)))


def memory_not_written(run: Run, x: MatrixInputs) -> Result:
    o, S = run(x)
    hole = torch.empty_like(o)
    mask = torch.ones_like(o, dtype=torch.bool)
    mask[:, -1, -1] = False
    return torch.where(mask, o, hole), S


def empty_input_resets_the_state(run: Run, x: MatrixInputs) -> Result:
    o, S = run(x)
    return o, S if x.v.shape[1] else torch.zeros_like(S)


def steps_forget_the_scale(run: Run, x: MatrixInputs) -> Result:
    return run(x._replace(scale=1.0) if x.v.shape[1] == 1 else x)


GLA = Subject.of("gated_linear_attention")
GDN = Subject.of("gated_delta_rule")
RETNET = Subject.of("retention")
TINY = Sizes(B=1, T=4, G=1, H=2, K=2, V=2)
PACKED = (3, 0, 1, 30)


def accuracy(subject: Subject, gates: str = "ordinary", **options: object) -> Callable[[], None]:
    return lambda: law_accuracy(Case(subject, gates=gates, **options), FORM)  # type: ignore[arg-type]


FAULTS: list[tuple[Fault, Callable[[], None]]] = [
    (decay_off_by_one_token, accuracy(GDN)),
    (decay_of_one_channel_for_all, accuracy(GLA)),
    (beta_dropped, accuracy(GDN)),
    (scale_dropped, accuracy(RETNET)),
    (first_state_dropped, accuracy(RETNET)),
    (first_state_dropped, lambda: law_pieces(Case(RETNET), (30,), FORM)),
    (last_token_not_written, accuracy(GLA)),
    (chunks_swapped, accuracy(GLA)),
    (carry_forgotten, accuracy(GLA)),
    (causal_mask_missing, accuracy(GLA)),
    (causal_mask_missing, lambda: law_causality(Case(GLA), FORM, 40)),
    (one_token_leaks_back, lambda: law_causality(Case(GLA), FORM, 40)),
    (gradient_from_the_future, lambda: law_causality(Case(GLA, Sizes(K=8, V=8)), FORM, 40)),
    (gradient_of_the_final_state_dropped, accuracy(GDN)),
    (gradient_of_the_final_state_dropped, lambda: law_gradients(Case(GDN, TINY, torch.float64), FORM)),
    (gradient_of_the_first_state_dropped, accuracy(GDN)),
    (gradient_of_the_gate_halved, accuracy(GLA)),
    (gradient_of_the_gate_halved, lambda: law_gradients(Case(GLA, TINY, torch.float64), FORM)),
    (heads_grouped_the_other_way, accuracy(GLA, sizes=Sizes(G=2, H=4))),
    (boundaries_ignored, accuracy(GLA, lengths=PACKED)),
    (boundaries_off_by_one, accuracy(GLA, lengths=PACKED)),
    (state_kept_in_bfloat16, accuracy(GLA)),
    (products_in_bfloat16, accuracy(GLA)),
    (output_in_float32, accuracy(GLA, dtype=torch.bfloat16)),
    (strong_gates_clamped, accuracy(GLA, "-20")),
    (strong_gates_clamped, accuracy(GLA, "mixed")),
    (rescaled_without_looking, accuracy(GLA, "mixed")),
    (rescaled_without_looking, accuracy(GLA, "steep")),
    (row_feels_its_neighbours, lambda: law_rows(Case(GLA), FORM)),
    (state_updated_in_place, lambda: law_purity(Case(GLA), FORM)),
    (other_bits_every_time, lambda: law_purity(Case(GLA), FORM)),
    (strides_ignored, lambda: law_layout(Case(GLA), FORM, "heads first")),
    (empty_input_resets_the_state, lambda: law_nothing(Case(GLA), FORM)),
    (steps_forget_the_scale, lambda: law_pieces(Case(GLA, Sizes(T=3)), (1, 2), FORM)),
]


@pytest.mark.parametrize(("fault", "law"), FAULTS, ids=[f"{n}-{f.__name__}" for n, (f, _) in enumerate(FAULTS)])
def test_a_fault_is_found(fault: Fault, law: Callable[[], None], sow: Callable[[Fault], None]) -> None:
    sow(lambda run, x: run(x))
    law()  # sound, the law holds
    sow(fault)
    with pytest.raises(AssertionError):
        law()


@pytest.mark.usefixtures("poisoned")
def test_memory_that_is_not_written_is_found(sow: Callable[[Fault], None]) -> None:
    sow(memory_not_written)
    with pytest.raises(AssertionError, match="output: "):
        accuracy(GLA)()


@pytest.mark.parametrize("name", ["scan+token", "scan+fixed"])
def test_faults_of_the_scan_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Chunked):
        name = "faulty"

        def scan(self, x: Tensor, g: Tensor, *rest: object) -> Result:
            return Chunked.scan(_SOUND, x, g.roll(1, -1 if g.dim() == 1 else 1), *rest)  # type: ignore[arg-type]

    monkeypatch.setitem(engine.BACKENDS, "faulty", Late())
    with pytest.raises(AssertionError):
        law_accuracy(Case(ENGINE[name]), FORM)


def step_off_by_one_token(run: SelectiveRun, x: SelectiveInputs) -> Result:
    return run(x._replace(dt=x.dt.roll(1, 1)))


def rate_of_one_number_for_all(run: SelectiveRun, x: SelectiveInputs) -> Result:
    return run(x._replace(A=x.A[:, :1].expand_as(x.A)))


def groups_dealt_the_other_way(run: SelectiveRun, x: SelectiveInputs) -> Result:
    repeats = x.x.shape[2] // x.B.shape[2]
    return run(x._replace(B=x.B.repeat(1, 1, repeats, 1), C=x.C.repeat(1, 1, repeats, 1)))


def segments_apart(run: SelectiveRun, x: SelectiveInputs) -> Result:
    first, rest = (
        x._replace(**{name: getattr(x, name)[:, part] for name in ("x", "dt", "B", "C")})
        for part in (slice(64), slice(64, None))
    )
    y, h = run(rest._replace(state=None))
    return torch.cat([run(first)[0], y], 1), h


def gradient_of_the_last_state_dropped(run: SelectiveRun, x: SelectiveInputs) -> Result:
    y, h = run(x)
    return y, h.detach() + 0 * y.sum()


def gradient_of_the_step_through_the_decay_dropped(run: SelectiveRun, x: SelectiveInputs) -> Result:
    return run(x._replace(dt=x.dt.detach(), x=x.x * x.dt / x.dt.detach().clamp_min(1e-30)))


SELECTIVE_FAULTS = (
    step_off_by_one_token,
    rate_of_one_number_for_all,
    groups_dealt_the_other_way,
    segments_apart,
    gradient_of_the_last_state_dropped,
    gradient_of_the_step_through_the_decay_dropped,
)


@pytest.mark.parametrize("fault", SELECTIVE_FAULTS, ids=lambda fault: fault.__name__)
def test_faults_of_the_selective_scan_are_found(fault: SelectiveFault, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Chunked):
        name = "faulty"

        def selective_scan(self, inputs: SelectiveInputs, mode: Mode | None) -> Result:
            return fault(lambda x: Chunked.selective_scan(_SOUND, x, mode), inputs)

    monkeypatch.setitem(engine.BACKENDS, "faulty", Wrong())
    with pytest.raises(AssertionError):
        law_accuracy(Case(ENGINE["selective"]), FORM)
