"""The engine by kind of recurrence: milliseconds beside softmax attention and beside what the cores can do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn import engine
from linattn.benchmark.measure import relative_error, timed
from linattn.recurrence import Decay, Recurrence, Write

KINDS = {
    "none": Recurrence(),
    "scalar": Recurrence(decay=Decay.TOKEN_HEAD),
    "vector": Recurrence(decay=Decay.TOKEN_CHANNEL),
    "gated delta": Recurrence(decay=Decay.TOKEN_HEAD, write=Write.DELTA),
}
ERROR_TOKENS = 512


@dataclass(frozen=True)
class KindRow:
    """One kind of recurrence at one size, batch 1, float32.

    ``forward_ms``, ``training_ms`` (forward + backward): medians of ``runs`` rounds, in each of which every kind and
    causal softmax attention (``softmax_*``, torch's own) took its turn; the ratios are softmax over this.
    ``chunked_*``: the same recurrence by the chunked backend, torch's matrix products, in the same rounds. ``of_gemm``:
    the part of the forward's time that its operations would take at the rate of this machine's matrix product, which
    reached ``gemm_gflops`` in the same run. ``error``: largest relative error against the float64 reference.
    """

    kind: str
    tokens: int
    heads: int
    key_size: int
    value_size: int
    forward_ms: float
    training_ms: float
    training_over_forward: float
    softmax_forward_ms: float
    softmax_training_ms: float
    forward_ratio: float
    training_ratio: float
    of_gemm: float
    gemm_gflops: float
    error: float
    backend: str
    chunked_forward_ms: float
    chunked_training_ms: float
    runs: int


def measure_kinds(
    sizes: Sequence[int] = (64, 128), *, tokens: int = 4096, heads: int = 8, rounds: int = 7
) -> list[KindRow]:
    """Measure every kind at every head size K = V."""
    return [row for size in sizes for row in _measure(size, tokens, heads, rounds)]


def _measure(size: int, tokens: int, heads: int, rounds: int) -> list[KindRow]:
    gemm = gemm_rate()
    inputs = _inputs(tokens, heads, size)
    calls: dict[str, Callable[..., Tensor]] = {
        f"{name}{suffix}": lambda recurrence=recurrence, backend=backend, **x: _run(recurrence, x, backend)
        for name, recurrence in KINDS.items()
        for suffix, backend in (("", "auto"), (" chunked", "chunked"))
    }
    calls["softmax"] = lambda q, k, v, **_: F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    ).transpose(1, 2)
    times: dict[tuple[str, str], list[float]] = {}
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            for quantity, measured in (("forward", _forward(call, inputs)), ("training", _training(call, inputs))):
                seconds = timed(measured, seconds=0, warm=True).seconds
                if round_:  # the first warms up
                    times.setdefault((name, quantity), []).append(1e3 * seconds)
    ms = {key: statistics.median(values) for key, values in times.items()}
    rows = []
    for name, recurrence in KINDS.items():
        forward, training = ms[name, "forward"], ms[name, "training"]
        rows.append(
            KindRow(
                name, tokens, heads, size, size, forward, training, training / forward,
                ms["softmax", "forward"], ms["softmax", "training"],
                ms["softmax", "forward"] / forward, ms["softmax", "training"] / training,
                operations(recurrence, tokens, heads, size) / (gemm * forward * 1e-3), gemm / 1e9,
                _error(recurrence, heads, size), engine.explain("gated_delta_rule").backend or "none",
                ms[f"{name} chunked", "forward"], ms[f"{name} chunked", "training"], rounds,
            )
        )  # fmt: skip
    return rows


def operations(recurrence: Recurrence, tokens: int, heads: int, size: int) -> float:
    """Multiplications and additions of the plain recurrence: write and read 2KV each, decay KV, delta's read 2KV."""
    a_token = 4 + (recurrence.decay is not Decay.NONE) + 2 * (recurrence.write is Write.DELTA)
    return float(a_token * size * size * heads * tokens)


def gemm_rate(size: int = 1024) -> float:
    """Operations a second of a float32 matrix product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / timed(lambda: a @ b, seconds=1, max_runs=25).seconds


def _inputs(tokens: int, heads: int, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, gates = (torch.randn(1, tokens, heads, size, generator=generator) for _ in range(4))
    return {"q": q, "k": F.normalize(k, dim=-1), "v": v, "g": F.logsigmoid(gates) / 16, "beta": gates[..., 0].sigmoid()}


def _run(recurrence: Recurrence, x: dict[str, Tensor], backend: str = "auto") -> Tensor:
    gate = {Decay.NONE: None, Decay.TOKEN_HEAD: x["g"][..., 0], Decay.TOKEN_CHANNEL: x["g"]}[recurrence.decay]
    beta = x["beta"] if recurrence.write is Write.DELTA else None
    return engine.matrix(recurrence, x["q"], x["k"], x["v"], g=gate, beta=beta, backend=backend)[0]


def _forward(call: Callable[..., Tensor], inputs: dict[str, Tensor]) -> Callable[[], object]:
    return torch.no_grad()(lambda: call(**inputs))


def _training(call: Callable[..., Tensor], inputs: dict[str, Tensor]) -> Callable[[], object]:
    leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}

    def run() -> object:
        output = call(**leaves)
        return torch.autograd.grad(output, list(leaves.values()), torch.ones_like(output), allow_unused=True)

    return run


def _error(recurrence: Recurrence, heads: int, size: int) -> float:
    inputs = _inputs(ERROR_TOKENS, heads, size)
    exact = {name: value.double() for name, value in inputs.items()}
    with torch.no_grad():
        return relative_error(_run(recurrence, inputs), _run(recurrence, exact, "reference"))
