"""The stabiliser of exponential gates against its definition, and against the recurrence that it stabilises."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from linattn.layers.exponential_gate import EMPTY, Stabilized, stabilize

B, T, X = 2, 9, 5
INF = float("inf")


def drawn(batch: int = B, length: int = T, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    f, i = torch.randn(2, batch, length, X, generator=random, dtype=torch.float64)
    return -f.exp(), 4 * i


def maxima(f: Tensor, i: Tensor, start: Tensor | None = None) -> Tensor:
    """[T, X] -> [T+1, X]: the definition, token by token; nothing is -inf."""
    m = [torch.full((X,), -INF, dtype=torch.float64) if start is None else start]
    for f_t, i_t in zip(f, i, strict=True):
        m.append(torch.maximum(f_t + m[-1], i_t))
    return torch.stack(m)


def holds(s: Stabilized, row: slice, n: int, f: Tensor, i: Tensor, start: Tensor | None = None) -> None:
    """Row ``row`` of s is what the definition says; ``n`` is its sequence."""
    wanted = maxima(f, i, start)
    something = wanted[:-1] > -INF
    g = torch.where(something, f + wanted[:-1] - wanted[1:], 0)
    torch.testing.assert_close(s.g[0, row], g)
    torch.testing.assert_close(s.j[0, row], torch.where(wanted[1:] > -INF, i - wanted[1:], -INF))
    torch.testing.assert_close(s.m_before[0, row], wanted[:-1].clamp(min=EMPTY))
    torch.testing.assert_close(s.m[0, row], wanted[1:].clamp(min=EMPTY))
    torch.testing.assert_close(s.final[n], wanted[-1].clamp(min=EMPTY))
    assert (s.g <= 0).all()
    assert (s.j <= 0).all()


def rows(s: Stabilized, n: int) -> Stabilized:
    return Stabilized(*(x[n : n + 1] for x in s))


@pytest.mark.parametrize("continued", [False, True])
def test_the_definition(continued: bool) -> None:
    f, i = drawn()
    f[0, 6], f[1, :, 2], i[0, :4], i[1, 5, 1] = -INF, 0, -INF, -INF
    start = torch.randn(B, X, dtype=torch.float64) if continued else None
    for f_given in (f, f[0, 0]):
        s = stabilize(f_given, i, start)
        for n in range(B):
            holds(rows(s, n), slice(None), 0, f_given.expand_as(f)[n], i[n], None if start is None else start[n])


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("lengths", [(3, 0, 1, 5), (0, 0, 2), (4, 0), (0,), (0, 0)])
def test_packed_sequences(lengths: tuple[int, ...], continued: bool) -> None:
    f, i = drawn(1, sum(lengths))
    i[0, :1] = -INF
    start = torch.randn(len(lengths), X, dtype=torch.float64) if continued else None
    ends = list(itertools.accumulate(lengths, initial=0))
    s = stabilize(f, i, start, torch.tensor(ends, dtype=torch.int32))
    for n, (a, b) in enumerate(itertools.pairwise(ends)):
        holds(s, slice(a, b), n, f[0, a:b], i[0, a:b], None if start is None else start[n])


def test_no_tokens() -> None:
    start = torch.randn(B, X)
    s = stabilize(torch.zeros(B, 0, X), torch.zeros(B, 0, X), start)
    assert torch.equal(s.final, start)
    assert torch.equal(s.rescale, torch.ones(B, X))
    assert (stabilize(torch.zeros(B, 0, X), torch.zeros(B, 0, X)).final == EMPTY).all()


def test_nothing_stays_nothing() -> None:
    """Padding, then another call: EMPTY is carried and the first input starts afresh."""
    f, i = drawn(1)
    s = stabilize(f, torch.full_like(i, -INF))
    assert (s.final == EMPTY).all()
    assert (s.g == 0).all()
    assert (s.j == -INF).all()
    holds(stabilize(f, i, s.final), slice(None), 0, f[0], i[0])
    holds(stabilize(f, i, torch.full_like(s.final, -INF)), slice(None), 0, f[0], i[0])


def scan(f: Tensor, i: Tensor, x: Tensor, h: Tensor, m: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """The true h of every token, by the scaled recurrence, and the state."""
    s = stabilize(f, i, m, cu_seqlens)
    ends = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, finals = [], []
    for n, (a, b) in enumerate(itertools.pairwise(ends)):
        scaled = h if cu_seqlens is None else h[n : n + 1]
        for t in range(a, b):
            scaled = s.g[:, t].exp() * scaled + s.j[:, t].exp() * x[:, t]
            outputs.append(scaled * s.m[:, t].detach().exp())
        finals.append(scaled)
    return torch.stack(outputs, 1), torch.cat(finals) * s.rescale, s.final


@pytest.mark.parametrize("packed", [False, True])
def test_gradients(packed: bool) -> None:
    """Of every token, of the state returned, of the state given."""
    torch.manual_seed(0)
    f, i = drawn(1 if packed else B, 5)
    i /= 4  # finite differences do not reach far
    i[0, 0] = i[0, 3, 2] = -INF  # padding, without a gradient
    f[0, 1, 1] = -INF
    x, i0, f0 = torch.randn_like(i), i.isinf(), f.isinf()
    cu_seqlens = torch.tensor([0, 2, 2, 5]) if packed else None
    h, m = torch.randn(2, 3 if packed else B, X, dtype=torch.float64)

    def call(f: Tensor, i: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return scan(f.masked_fill(f0, -INF), i.masked_fill(i0, -INF), *rest, cu_seqlens)  # type: ignore[call-arg]

    finite = (f.masked_fill(f0, -1.0), i.masked_fill(i0, 0.0), x, h, m)
    torch.autograd.gradcheck(call, [t.requires_grad_() for t in finite])


def test_no_nan_in_gradients() -> None:
    f, i = (t.float() for t in drawn(1))
    f[:, ::2], i[:, :3], i[:, 6] = -INF, -INF, -INF
    f.requires_grad_(), i.requires_grad_()
    s = stabilize(f, i)
    (s.g.exp().sum() + s.j.exp().sum() + s.m.sum() + s.final.sum() + s.rescale.sum()).backward()
    assert f.grad is not None
    assert i.grad is not None
    assert f.grad.isfinite().all()
    assert i.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_huge_gates_in_low_precision(dtype: torch.dtype) -> None:
    """Inputs beyond e^88, a sum of decays of -10^7: what h̃ e^m is, final and rescale say exactly."""
    f = torch.full((1, 1000, X), -1e4, dtype=dtype)
    i = (300 * torch.randn(1, 1000, X)).to(dtype)
    s = stabilize(f, i)
    holds(Stabilized(*(x.double() for x in s)), slice(None), 0, f[0].double(), i[0].double())
    assert s.g.dtype == s.j.dtype == s.final.dtype == torch.float32
    third = torch.full((1, 1, X), 1 / 3, dtype=torch.float64)
    s = stabilize(torch.zeros(1, 1, X), 1000 + third.float())
    torch.testing.assert_close(s.final.double() + s.rescale.double().log(), (1000 + third.float()).double()[:, 0])


def test_a_nan_stays_where_it_is() -> None:
    f, i = drawn()
    spoilt = i.clone()
    spoilt[0, 4] = torch.nan
    s, wanted = stabilize(f, spoilt), stabilize(f, i)
    assert s.g.isfinite().all()
    assert s.j[0, 4].isnan().all()
    assert torch.equal(s.j[1], wanted.j[1])


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_whole(packed: bool) -> None:
    f, i = drawn(1)
    cu_seqlens = torch.tensor([0, 4, 4, 9]) if packed else None
    compiled = torch.compile(stabilize, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(f, i, None, cu_seqlens), stabilize(f, i, None, cu_seqlens))


def test_bad_input() -> None:
    f, i = drawn()
    with pytest.raises(ValueError, match=r"f: got shape \[2, 8, 5\]"):
        stabilize(f[:, 1:], i)
    with pytest.raises(ValueError, match="f: got a log-decay of 1"):
        stabilize(torch.ones(X), i)
    with pytest.raises(ValueError, match=r"m: got shape \[5\]"):
        stabilize(f, i, i[0, 0])
    with pytest.raises(ValueError, match="cu_seqlens"):
        stabilize(f, i, None, torch.tensor([0, 9]))
