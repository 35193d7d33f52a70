"""The selective scan against its paper's formula, what it keeps in memory, and what it says of bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import linattn
from linattn import mamba, mamba2
from linattn.testing import Case, Form, Sizes, Subject, forms

SUBJECT = Subject.of("mamba")
FORMS = forms(SUBJECT, dtype=torch.float64)
BACKENDS = sorted({form.backend for form in forms(SUBJECT)})


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_mamba_is_a_discretised_state_space(form: Form, groups: int) -> None:
    """arXiv 2312.00752, eq. 2 and 4 with the paper's Euler step for B: Ā = exp(ΔA), B̄ = ΔB, one system a channel."""
    x = Case(SUBJECT, Sizes(B=2, T=70, G=groups, H=2, K=5, V=3), torch.float64).tensors()
    h = torch.zeros(2, 6, 5, dtype=torch.float64)
    y = torch.empty(2, 70, 6, dtype=torch.float64)
    for row in range(2):
        for channel in range(6):
            group = channel * groups // 6
            for t in range(70):
                dt, u = x["dt"][row, t, channel], x["x"][row, t, channel]
                A_bar, B_bar = torch.exp(dt * x["A"][channel]), dt * x["B"][row, t, group]
                h[row, channel] = A_bar * h[row, channel] + B_bar * u
                y[row, t, channel] = x["C"][row, t, group] @ h[row, channel] + x["D"][channel] * u
    got, state = mamba(**x, mode=form.mode, backend=form.backend)
    torch.testing.assert_close(got, y)
    torch.testing.assert_close(state, h)
    without, _ = mamba(**(x | {"D": None}), mode=form.mode, backend=form.backend)
    torch.testing.assert_close(got - without, x["D"] * x["x"])


@pytest.mark.parametrize("form", forms(SUBJECT), ids=str)
def test_with_one_rate_a_head_it_is_mamba2(form: Form) -> None:
    """Channels of a head that share step and rate are the columns of Mamba-2's state."""
    x = Case(Subject.of("mamba2"), Sizes(B=2, T=70, G=2, H=4, K=5, V=3)).tensors()
    wanted, S = mamba2(**x)
    dt, A, D = (x[name].repeat_interleave(3, -1) for name in ("dt", "A", "D"))
    rest = {"mode": form.mode, "backend": form.backend}
    y, h = mamba(x["x"].flatten(2), dt, A[:, None].expand(-1, 5), x["B"], x["C"], D=D, **rest)
    torch.testing.assert_close(y, wanted.flatten(2))
    torch.testing.assert_close(h, S.mT.flatten(1, 2))


@pytest.mark.parametrize("form", forms(SUBJECT), ids=str)
def test_a_step_of_zero_keeps_the_state(form: Form) -> None:
    """Exactly, whatever the rates."""
    x = Case(SUBJECT, gates="-1e4").tensors()
    state = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    _, after = mamba(**(x | {"dt": torch.zeros_like(x["dt"])}), state=state, mode=form.mode, backend=form.backend)
    assert torch.equal(after, state)


class _Largest(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // 4 for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return result


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "reference"])
def test_states_of_all_tokens_never_live_at_once(backend: str) -> None:
    """Forward and backward, no tensor is larger than the states of 64 tokens."""
    case = Case(SUBJECT, Sizes(B=1, T=512, G=1, H=4, K=16, V=8))
    x = {name: value.requires_grad_() for name, value in case.tensors().items()}
    with _Largest() as largest:
        y, state = mamba(**x, backend=backend)
        (y.sum() + state.sum()).backward()
    assert largest.numbers <= max(64 * 32 * 16, 512 * 32)


def at(value: float) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[3] = value
        return x

    return change


BAD: list[tuple[str, Callable[[dict[str, Tensor]], dict[str, Any]]]] = [
    ("x", lambda x: {"x": x["x"][0]}),
    ("x", lambda x: {"x": None}),
    ("dt", lambda x: {"dt": x["dt"][:, 1:]}),
    ("dt", lambda x: {"dt": x["dt"].long()}),
    ("dt", lambda x: {"dt": -x["dt"]}),
    ("dt", lambda x: {"dt": at(torch.nan)(x["dt"])}),
    ("dt", lambda x: {"dt": x["dt"].to("meta")}),
    ("A", lambda x: {"A": -x["A"]}),
    ("A", lambda x: {"A": at(-torch.inf)(x["A"])}),
    ("A", lambda x: {"A": at(torch.nan)(x["A"])}),
    ("A", lambda x: {"A": x["A"].T}),
    ("B", lambda x: {"B": x["B"][..., :7], "C": x["C"][..., :7]}),
    ("B", lambda x: {n: x[n].repeat(1, 1, 2, 1)[:, :, :3] for n in ("B", "C")}),
    ("B", lambda x: {"B": x["B"].double()}),
    ("C", lambda x: {"C": x["C"][:, :, :1]}),
    ("C", lambda x: {"C": x["C"].half()}),
    ("D", lambda x: {"D": x["D"][:3]}),
    ("D", lambda x: {"D": x["D"].to("meta")}),
    ("state", lambda x: {"state": torch.zeros(2, 16, 8)}),
    ("state", lambda x: {"state": torch.zeros(2, 20, 8).double()}),
    ("state", lambda x: {"state": torch.zeros(3, 20, 8)}),
    ("cu_seqlens", lambda x: {"cu_seqlens": torch.tensor([0, 6])}),
    ("mode", lambda x: {"mode": "fast"}),
    ("backend", lambda x: {"backend": "cuda"}),
    ("backend", lambda x: {"mode": "parallel"}),
    ("backend", lambda x: {"backend": "triton"}),
]


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("argument", "change"), BAD, ids=[f"{n}-{name}" for n, (name, _) in enumerate(BAD)])
def test_bad_input_is_named(argument: str, change: Any, backend: str, tokens: int) -> None:
    x = dict(Case(SUBJECT, Sizes(B=2, T=tokens, G=2, H=4, K=8, V=5)).tensors())
    with pytest.raises(ValueError, match=rf"^({argument}): (got|no backend)"):
        mamba(**{"backend": backend, **x, **change(x)})


def test_the_parallel_form_is_refused_with_a_reason() -> None:
    explanation = linattn.explain("mamba", mode="parallel")
    assert explanation.backend is None
    assert "no parallel form" in explanation.refusals["chunked"]
    assert linattn.explain("mamba", device="cuda", backend="triton").backend is None
