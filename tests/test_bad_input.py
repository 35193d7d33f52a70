"""One ValueError that names the argument, what came and what was wanted."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import linattn
from linattn import engine
from linattn.backends._protocol import MatrixInputs
from linattn.backends.chunked import Chunked
from linattn.recurrence import Decay, Mode, Normalizer, Read, Recurrence, Write
from linattn.testing import Case, Sizes, Subject, forms

SIZES = Sizes(B=2, T=6, G=2, H=4, K=8, V=5)
BACKENDS = sorted({form.backend for form in forms(Subject.of("retention"))})
Change = Callable[[dict[str, Any]], dict[str, Any]]


def good(name: str) -> dict[str, Any]:
    return dict(Case(Subject.of(name), SIZES).tensors())


def put(**values: Any) -> Change:
    return lambda x: values


def alter(name: str, change: Callable[[Tensor], Any]) -> Change:
    return lambda x: {name: change(x[name])}


def packed(*ends: int, dtype: torch.dtype = torch.int64) -> Change:
    """One row of six tokens and those boundaries."""
    return lambda x: (
        {n: t[:1] if t.dim() > 2 else t for n, t in x.items()} | {"cu_seqlens": torch.tensor(ends, dtype=dtype)}
    )


def at(value: float) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[3] = value
        return x

    return change


ANY = [  # for a mechanism with q, k, v
    ("v", put(v=None)),
    ("v", put(v=[1.0])),
    ("v", alter("v", lambda v: v[0])),
    ("v", alter("v", lambda v: v.long())),
    ("q", alter("q", lambda q: q.squeeze().sum(-1))),
    ("q", alter("q", lambda q: q[:, :5])),
    ("q", alter("q", lambda q: q[:1])),
    ("q", alter("q", lambda q: q.double())),
    ("q", alter("q", lambda q: q.to("meta"))),
    ("k", alter("k", lambda k: k[..., :7])),
    ("k", alter("k", lambda k: k[:, :, :1])),
    ("k", alter("k", lambda k: k.half())),
    ("k", alter("k", lambda k: k.to("meta"))),
    ("k", lambda x: {n: x[n].repeat(1, 1, 2, 1)[:, :, :3] for n in ("q", "k")}),
    ("k", lambda x: {n: x[n][:, :, :0] for n in ("q", "k")}),
    ("state", put(state=torch.zeros(2, 4, 8, 4))),
    ("state", put(state=torch.zeros(3, 4, 8, 5))),
    ("state", put(state=torch.zeros(2, 8, 5))),
    ("state", put(state=torch.zeros(2, 4, 8, 5, dtype=torch.float64))),
    ("state", put(state=torch.zeros(2, 4, 8, 5, dtype=torch.bfloat16))),
    ("state", put(state=torch.zeros(2, 4, 8, 5, device="meta"))),
    ("state", put(state="none")),
    ("cu_seqlens", put(cu_seqlens=torch.tensor([0, 6]))),  # B = 2
    ("cu_seqlens", packed(0, 4, 3, 6)),
    ("cu_seqlens", packed(0, 4)),
    ("cu_seqlens", packed(0, 7)),
    ("cu_seqlens", packed(1, 6)),
    ("cu_seqlens", packed(6)),
    ("cu_seqlens", packed(0, 6, dtype=torch.int16)),
    ("cu_seqlens", packed(0, 6, dtype=torch.float32)),
    ("cu_seqlens", put(cu_seqlens=[0, 6])),
    ("cu_seqlens", lambda x: packed()(x) | {"cu_seqlens": torch.tensor([[0, 6]])}),
    ("mode", put(mode="fast")),
    ("backend", put(backend="cuda")),
    ("backend", put(backend="reference", mode="chunkwise")),
    ("backend", put(backend="reference", mode="parallel")),
]
OWN = {
    "retention": [
        ("decay", put(decay=torch.zeros(3))),
        ("decay", put(decay=-0.1)),
        ("decay", put(decay=torch.zeros(4, dtype=torch.int64))),
        ("decay|g", put(decay=torch.full((4,), 0.1))),
        ("decay|g", put(decay=torch.full((4,), torch.nan))),
        ("decay|g", put(decay=torch.zeros(4, device="meta"))),
    ],
    "mlstm": [
        ("i", put(i=None)),
        ("i", alter("i", lambda i: i[..., :3])),
        ("i", alter("i", lambda i: i.to("meta"))),
        ("f", alter("f", lambda f: f.unsqueeze(-1))),
        ("f", alter("f", at(1e-3))),
        ("f", alter("f", at(torch.nan))),
        ("f", alter("f", lambda f: f.int())),
        ("state", put(state=(torch.zeros(2, 4, 8, 5), torch.zeros(2, 4, 8)))),
    ],
    "lightning_attention": [
        ("decay", put(decay=torch.zeros(3))),
        ("decay|g", put(decay=torch.full((4,), 0.1))),
    ],
    "kimi_delta_attention": [
        ("g", alter("g", lambda g: g[..., 0])),
        ("g", alter("g", lambda g: -g)),
        ("beta", alter("beta", lambda beta: beta[:, :5])),
    ],
    "gated_linear_attention": [
        ("g", alter("g", lambda g: g[..., 0])),
        ("g", alter("g", lambda g: g[..., :7])),
        ("g", alter("g", lambda g: g[:, :, :2])),
        ("g", alter("g", at(1e-3))),
        ("g", alter("g", at(torch.nan))),
        ("g", alter("g", at(torch.inf))),
        ("g", alter("g", lambda g: g.int())),
        ("g", alter("g", lambda g: g.to("meta"))),
        ("g", put(g=None)),
    ],
    "delta_rule": [
        ("beta", put(beta=None)),
        ("beta", alter("beta", lambda beta: beta.unsqueeze(-1))),
        ("beta", alter("beta", lambda beta: beta[:, :5])),
        ("beta", alter("beta", lambda beta: beta[:, :, :2])),
        ("beta", alter("beta", lambda beta: beta.bool())),
        ("beta", alter("beta", lambda beta: beta.to("meta"))),
    ],
    "gated_delta_rule": [
        ("g", alter("g", lambda g: g.unsqueeze(-1))),
        ("g", alter("g", lambda g: -g)),
        ("g", alter("g", at(torch.nan))),
        ("beta", alter("beta", lambda beta: beta[:1])),
    ],
}
CASES = [(name, argument, change) for name, own in OWN.items() for argument, change in [*own, *ANY]]


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize(("name", "argument", "change"), CASES, ids=[f"{n}-{a}" for n, a, _ in CASES])
def test_mechanisms(name: str, argument: str, change: Change, backend: str) -> None:
    arguments = good(name) | {"backend": backend}
    arguments |= change({n: x for n, x in arguments.items() if isinstance(x, Tensor)})
    with pytest.raises(ValueError, match=rf"^({argument}): (got|no backend)"):
        linattn.get(name).function(**arguments)


@pytest.mark.parametrize(("argument", "change"), ANY, ids=[f"{n}-{a}" for n, (a, _) in enumerate(ANY)])
def test_a_good_call_before_hides_nothing(argument: str, change: Change) -> None:
    """Checks that passed are remembered by shapes, dtypes and devices."""
    function, arguments = linattn.get("gated_linear_attention").function, good("gated_linear_attention")
    for _ in range(2):
        function(**arguments)
        with pytest.raises(ValueError, match=rf"^({argument}): (got|no backend)"):
            function(**(arguments | change(arguments)))


def test_what_is_remembered_keeps_no_tensor_and_follows_the_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Here(Chunked):
        calls = 0

        def matrix(self, inputs: MatrixInputs, mode: Mode | None) -> tuple[Tensor, Tensor]:
            self.calls += 1
            return super().matrix(inputs, mode)

    arguments = good("gated_linear_attention")
    alive = weakref.ref(arguments["q"])
    first, second = Here(), Here()
    for backend in (first, second):
        monkeypatch.setattr(engine, "BACKENDS", {"here": backend})
        for _ in range(2):
            linattn.gated_linear_attention(**arguments)
        assert backend.calls == 2
    del arguments
    assert alive() is None


MAMBA2 = [
    ("x", alter("x", lambda x: x[0])),
    ("dt", alter("dt", lambda dt: dt[:, :5])),
    ("dt", alter("dt", lambda dt: dt.unsqueeze(-1))),
    ("A", put(A=torch.zeros(3))),
    ("A", put(A=torch.zeros(4, 8))),
    ("B", alter("B", lambda B: B[:1])),
    ("B", alter("B", lambda B: B.double())),
    ("B", lambda x: {n: x[n].repeat(1, 1, 2, 1)[:, :, :3] for n in ("B", "C")}),
    ("C", alter("C", lambda C: C[..., :7])),
    ("C", alter("C", lambda C: C[:, :, :1])),
    ("D", put(D=torch.zeros(3))),
    ("A|dt|g", alter("A", lambda A: -A)),
    ("A|dt|g", alter("dt", at(torch.nan))),
    ("A", alter("A", lambda A: A.to("meta"))),
    ("dt", alter("dt", lambda dt: dt.to("meta"))),
    ("B", alter("B", lambda B: B.to("meta"))),
    ("C", alter("C", lambda C: C.to("meta"))),
    ("D", alter("D", lambda D: D.to("meta"))),
    ("state", put(state=torch.zeros(2, 4, 5, 8))),
    ("cu_seqlens", put(cu_seqlens=torch.tensor([0, 6]))),
    ("mode", put(mode="scan")),
]


@pytest.mark.parametrize(("argument", "change"), MAMBA2, ids=[f"{n}-{a}" for n, (a, _) in enumerate(MAMBA2)])
def test_mamba2(argument: str, change: Change) -> None:
    """Complaints name mamba2's own arguments, not the engine's."""
    arguments = good("mamba2")
    with pytest.raises(ValueError, match=rf"^({argument}): got "):
        linattn.get("mamba2").function(**(arguments | change(arguments)))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("state", put(state=torch.zeros(2, 4, 8, 5))),
        ("state.S", put(state=linattn.NormalizedState(torch.zeros(2, 4, 8, 4), torch.zeros(2, 4, 8)))),
        ("state.z", put(state=linattn.NormalizedState(torch.zeros(2, 4, 8, 5), torch.zeros(2, 4, 7)))),
        ("state.z", put(state=linattn.NormalizedState(torch.zeros(2, 4, 8, 5), torch.zeros(2, 4, 8).double()))),
        ("feature_map", put(feature_map="exp")),
        ("scale", put(scale=1.0)),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_linear_attention(argument: str, change: Change, causal: bool) -> None:
    arguments = good("linear_attention")
    with pytest.raises(ValueError, match=rf"^{argument}: got "):
        linattn.linear_attention(**(arguments | change(arguments)), causal=causal)


@pytest.mark.parametrize(
    ("recurrence", "argument", "change"),
    [
        (Recurrence(), "g", put(g=torch.zeros(4))),
        (Recurrence(), "beta", put(beta=torch.zeros(2, 6, 4))),
        (Recurrence(), "u", put(u=torch.zeros(4, 8))),
        (Recurrence(decay=Decay.HEAD), "g", put()),
        (Recurrence(decay=Decay.CHANNEL), "g", put(g=torch.zeros(4))),
        (Recurrence(write=Write.DELTA), "beta", put()),
        (Recurrence(write=Write.LOW_RANK), "a", put(b=torch.zeros(2, 6, 4, 8))),
        (Recurrence(write=Write.LOW_RANK), "b", put(a=torch.zeros(2, 6, 4, 8), b=torch.zeros(2, 6, 2, 8))),
        (Recurrence(read=Read.BEFORE, bonus=True), "u", put(u=torch.zeros(8))),
        (Recurrence(normalizer=Normalizer.SUM), "state", put(state=(torch.zeros(1),))),
    ],
)
def test_the_engine(recurrence: Recurrence, argument: str, change: Change) -> None:
    arguments = good("linear_attention")
    with pytest.raises(ValueError, match=rf"^{argument}: got "):
        linattn.matrix(recurrence, **(arguments | change(arguments)))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("x", put(x=torch.zeros(2, 6))),
        ("g", put(g=torch.zeros(6, 5))),
        ("g", put(g=torch.zeros(4))),
        ("g", put(g=torch.ones(5))),
        ("g", put(g=torch.full((2, 6, 5), torch.nan))),
        ("g", put(g=None)),
        ("g", put(g=torch.zeros(5, device="meta"))),
        ("state", put(state=torch.zeros(2, 4))),
        ("state", put(state=torch.zeros(2, 5).double())),
        ("cu_seqlens", put(cu_seqlens=torch.tensor([0, 6]))),
        ("cu_seqlens", lambda x: {"x": x["x"][:1], "cu_seqlens": torch.tensor([0, 5])}),
        ("mode", put(mode="slow")),
        ("backend", put(backend="gpu")),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scan(argument: str, change: Change, backend: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(2, 6, 5), "g": torch.zeros(5), "backend": backend}
    with pytest.raises(ValueError, match=rf"^{argument}: got "):
        linattn.scan(**(arguments | change(arguments)))


def test_a_typo_is_not_swallowed() -> None:
    for name in linattn.names():
        with pytest.raises(TypeError):
            linattn.get(name).function(**good(name), sclae=1.0)
