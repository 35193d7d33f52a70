"""The GPU kernels of layers against the layers' torch code. Without a GPU: in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from backends.cpu.test_fused_layers import PACKED, SUBJECTS, inputs_of, layer_of, results_of, standard

from linattn.backends import _fused
from linattn.backends.triton import fused
from linattn.testing import accurate

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if INTERPRETED:  # numpy's, of the interpreter
    pytestmark += [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("RuntimeWarning", "DeprecationWarning")]
BY_TORCH = ["norm", "norm without weight"]  # which has a kernel of its own
SERVED = [
    name
    for name in SUBJECTS
    if name not in BY_TORCH and not any(word in name for word in ("mixes", "padded", "steps", "skip"))
]


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels launched; where they are interpreted, they take the place of the CPU's."""
    names: list[str] = []
    launch = fused._launch

    def recorded(name: str, *rest: Any) -> None:
        names.append(name)
        launch(name, *rest)

    monkeypatch.setattr(fused, "_launch", recorded)
    if INTERPRETED:
        monkeypatch.setitem(_fused.KERNELS, "cpu", fused.KERNELS)
    return names


def found(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Outputs, and gradients of all but a state before, which the torch code has."""
    subject = SUBJECTS[name]
    where = {key: t.to(DEVICE) for key, t in subject.where.items()}
    x, *rest = (x.to(DEVICE) for x in inputs_of(subject, dtype))
    stateful = name.startswith(("convolution", "wide", "shorter", "width", "no activation", "packed"))

    def call(layer: Any, *inputs: Any, **_: Any) -> Any:
        first, *others = inputs
        others = [t.detach() if stateful else t for t in others]
        return subject.call(layer, first, *others, **where)

    results = results_of(subject, layer_of(subject).to(DEVICE), [x, *rest], call)
    names = [f"gradient {n + 1}" for n in range(len(rest) if stateful else 0)]
    return {key: t.cpu() for key, t in results.items() if key not in names}


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_torch_code(name: str, dtype: torch.dtype, launches: list[str]) -> None:
    results = found(name, dtype)
    assert len(launches) == (3 if "convolve" in launches else 2)
    right = standard(SUBJECTS[name], dtype)
    accurate(results, type(right)(*({key: part[key] for key in results} for part in right)), name)


@pytest.mark.parametrize("name", BY_TORCH)
def test_leaves_to_torch_what_it_has_a_kernel_for(name: str, launches: list[str]) -> None:
    found(name, torch.float32)
    assert not launches


@pytest.mark.parametrize("name", ["packed", "norm of groups, gate first", "gated unit"])
def test_the_same_bits_twice_and_in_one_graph(name: str) -> None:
    once, again = found(name, torch.float32), found(name, torch.float32)
    assert all(torch.equal(once[key], again[key]) for key in once)
    subject = SUBJECTS[name]
    where = {key: t.to(DEVICE) for key, t in subject.where.items()}
    layer, inputs = layer_of(subject).to(DEVICE), [x.to(DEVICE) for x in inputs_of(subject, torch.float32)]
    with torch.no_grad():
        plain = subject.call(layer, *inputs, **where)
        compiled = torch.compile(subject.call, fullgraph=True, backend="aot_eager")(layer, *inputs, **where)
    plain, compiled = (y if isinstance(y, tuple) else (y,) for y in (plain, compiled))
    assert all(map(torch.equal, plain, compiled))


def test_packed_equals_separate(launches: list[str]) -> None:
    """Bit for bit, the states too."""
    subject = SUBJECTS["packed"]
    layer, (x, state) = layer_of(subject).to(DEVICE), (t.to(DEVICE) for t in inputs_of(subject, torch.float32))
    with torch.no_grad():
        y, last = layer(x, state, cu_seqlens=PACKED.to(DEVICE))
        for n, part in enumerate(x.split(PACKED.diff().tolist(), 1)):
            if part.shape[1]:
                alone, tail = layer(part, state[n : n + 1])
                assert torch.equal(alone, y[:, int(PACKED[n]) : int(PACKED[n + 1])])
                assert torch.equal(tail[0], last[n])
            else:
                assert torch.equal(state[n], last[n])
    assert set(launches) == {"convolve"}
