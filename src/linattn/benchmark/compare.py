"""Mechanisms side by side in one run, for growing numbers of tokens: time, memory, time per token, bytes of state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linattn import engine, registry, state
from linattn._checks import fail
from linattn.benchmark.inputs import cut, draw
from linattn.benchmark.measure import peak_memory, relative_error, timed
from linattn.mechanisms.softmax_attention import KVCache
from linattn.registry import Mechanism
from linattn.testing import Sizes

ERROR_TOKENS = 256  # the float64 reference goes token by token
TRIAL_TOKENS = 1024  # where all lengths are longer, this one is tried first, to foresee their times
STEPS = 10  # one-token steps timed as one run


@dataclass(frozen=True)
class Row:
    """What was measured of one mechanism at ``tokens`` tokens; None where ``note`` says why it wasn't.

    Times are medians of ``runs`` runs (the fewest of the row). ``forward_bytes`` and ``training_bytes``: the peak of
    memory beyond the inputs, forward alone and forward + backward. ``token_us``: one more token after a context of
    ``tokens``. ``state_bytes``: all that generation keeps after that context. ``error``: largest relative error of the
    output against the float64 reference, over the first ``ERROR_TOKENS`` tokens.
    """

    mechanism: str
    backend: str
    tokens: int
    batch: int
    heads: int
    key_size: int
    value_size: int
    dtype: str
    device: str
    threads: int
    error: float
    forward_ms: float | None = None
    training_ms: float | None = None
    forward_bytes: int | None = None
    training_bytes: int | None = None
    token_us: float | None = None
    state_bytes: int | None = None
    runs: int | None = None
    note: str = ""


def compare(
    mechanisms: Sequence[str] = ("softmax_attention", "gated_linear_attention", "gated_delta_rule"),
    tokens: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384),
    *,
    batch: int = 1,
    heads: int = 4,
    key_size: int = 64,
    value_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    budget: float = 60.0,
) -> Iterator[Row]:
    """Measure each mechanism's function at each number of tokens; rows come as soon as they are measured.

    Args:
        mechanisms: names or aliases. Softmax attention is measured last at each length, since it may use the time up.
        tokens: the lengths N, measured in rising order.
        batch, heads, key_size, value_size: sizes of the inputs; value_size None is key_size.
        budget: seconds for the whole comparison. What would not fit is left out, and the row's note says so.

    Raises ValueError for an unknown mechanism or a size that is not positive.
    """
    chosen = list(dict.fromkeys(registry.get(name).name for name in mechanisms))
    for name in chosen:
        if registry.get(name).composite:
            raise fail("mechanisms", f"{name!r}, a layer of several", "mechanisms with a function of their own")
    chosen.sort(key=lambda name: registry.get(name).recurrence is None)  # what costs most comes last, a length
    lengths = sorted(set(tokens))
    value_size = key_size if value_size is None else value_size
    sizes = Sizes(B=batch, G=heads, H=heads, K=key_size, V=value_size).axes()
    given = {"batch": batch, "heads": heads, "key_size": key_size, "value_size": value_size}
    for name, value in {**given, "tokens": min(lengths, default=0), "budget": budget}.items():
        if not value > 0:
            raise fail(name, value, "a positive number")
    if not chosen:
        raise fail("mechanisms", "none", "at least one")

    def draw_for(name: str, length: int) -> tuple[Mechanism, dict[str, Tensor]]:
        mechanism = registry.get(name)
        return mechanism, draw(mechanism, {**sizes, "T": length}, dtype=dtype, device=device, seed=seed)

    def rows() -> Iterator[Row]:
        begun = []
        for name in chosen:
            row = Row(
                name, engine.explain(name, device=device, dtype=dtype).backend or "none", 0, batch, heads, key_size,
                value_size, str(dtype).removeprefix("torch."), str(torch.device(device)), torch.get_num_threads(),
                error_of(*draw_for(name, ERROR_TOKENS)),
            )  # fmt: skip
            begun.append(row)
        deadline = _Deadline(budget, 5 * len(chosen) * len(lengths))
        for length in lengths if lengths[0] <= TRIAL_TOKENS else [TRIAL_TOKENS, *lengths]:
            for row in begun:
                measured = _measure(*draw_for(row.mechanism, length), replace(row, tokens=length), deadline)
                if length in lengths:
                    yield measured

    return rows()


class _Deadline:
    """Shares the budget out: foresees how long a measurement takes from the one before and refuses what won't fit."""

    def __init__(self, budget: float, shares: int) -> None:
        self._end = time.perf_counter() + budget
        self.budget = budget
        self.share = budget / shares
        self._seen: dict[tuple[str, str], tuple[int, float]] = {}

    def refuses(self, mechanism: Mechanism, quantity: str, tokens: int, *, calls: int, order: int) -> bool:
        """Whether ``calls`` calls, whose time grows as tokens^order, should not be made."""
        left = self._end - time.perf_counter()
        before, seconds = self._seen.get((mechanism.name, quantity), (tokens, 0.0))
        return calls * seconds * (tokens / before) ** order >= left

    def saw(self, mechanism: Mechanism, quantity: str, tokens: int, seconds: float) -> None:
        """Remember how long a call took."""
        self._seen[mechanism.name, quantity] = (tokens, seconds)


def _measure(mechanism: Mechanism, inputs: dict[str, Tensor], row: Row, deadline: _Deadline) -> Row:
    """Fill the row."""
    refused: list[str] = []
    measured: dict[str, Any] = {}
    runs: list[int] = []
    order = 2 if mechanism.recurrence is None else 1

    def time_of(quantity: str, order: int, call: Callable[[], object], memory: str | None = None) -> float | None:
        """Seconds of a call, unless there is no time for it; its first run measures the memory."""
        if deadline.refuses(mechanism, quantity, row.tokens, calls=2, order=order):
            refused.append(quantity)
            return None
        if memory:
            measured[memory] = peak_memory(call, torch.device(row.device))
        timing = timed(call, seconds=deadline.share, warm=memory is not None)
        deadline.saw(mechanism, quantity, row.tokens, timing.seconds)
        runs.append(timing.runs)
        return timing.seconds

    if seconds := time_of("forward", order, lambda: forward(mechanism, inputs), "forward_bytes"):
        measured["forward_ms"] = 1e3 * seconds
    if seconds := time_of("forward + backward", order, forward_backward(mechanism, inputs), "training_bytes"):
        measured["training_ms"] = 1e3 * seconds
    context: Any = None
    if mechanism.recurrence is None:
        context = KVCache(inputs["k"], inputs["v"])  # what a prefill leaves, without paying for it
    elif "forward_ms" in measured:
        context = forward(mechanism, inputs)[1]
    if context is not None:
        measured["state_bytes"] = state.nbytes(context)
        if seconds := time_of("next token", order - 1, stepper(mechanism, cut(mechanism, inputs, 1), context)):
            measured["token_us"] = 1e6 * seconds / STEPS
    note = f"{', '.join(refused)} not measured: the budget of {deadline.budget:g} s is too short" if refused else ""
    return replace(row, **measured, runs=min(runs, default=None), note=note)


@torch.no_grad()
def forward(mechanism: Mechanism, inputs: Mapping[str, Tensor]) -> Any:
    """(output, state), without history."""
    return mechanism.function(**inputs)


def forward_backward(mechanism: Mechanism, inputs: Mapping[str, Tensor]) -> Callable[[], object]:
    """A call that computes the output and the gradient of every input."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}

    def call() -> object:
        output = mechanism.function(**leaves)[0]
        return torch.autograd.grad(output, list(leaves.values()), torch.ones_like(output))

    return call


def stepper(mechanism: Mechanism, token: Mapping[str, Tensor], context: Any) -> Callable[[], None]:
    """A call that makes ``STEPS`` one-token steps, each from the same context."""

    @torch.no_grad()
    def step() -> None:
        for _ in range(STEPS):
            mechanism.function(**token, state=context)

    return step


def error_of(mechanism: Mechanism, inputs: Mapping[str, Tensor]) -> float:
    """Largest relative error of the output against the token-by-token reference in float64."""
    exact = {name: value.double() for name, value in inputs.items()}
    backend = "auto" if mechanism.recurrence is None else "reference"
    with torch.no_grad():
        return relative_error(mechanism.function(**inputs)[0], mechanism.function(**exact, backend=backend)[0])
