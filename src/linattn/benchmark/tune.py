"""`make tune`: time every sweep of the Triton backend in every candidate setting, and print the table of the fastest.

The output is for pasting into ``linattn/backends/triton/table.py``. A candidate counts only if all its results, on a
smaller case, are as near to float64 as its dtype allows. The best one of a row of the table is the one that comes out
first on average over its sweeps and over a large, a small and a long batch, each relative to the fastest there.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.backends._protocol import Divisor, MatrixInputs
from linattn.backends.triton import LARGEST, table
from linattn.backends.triton.table import Settings
from linattn.benchmark.launches import Launch, draw, recorded
from linattn.recurrence import Decay

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
CHUNKS = {torch.bfloat16: (64, 128), torch.float16: (32, 64), torch.float32: (32, 64)}
# Decay and strength of the gates. Those of channels are divided out of all sweeps before, unless they are steep.
# Summed: with a sum normaliser.
GATES = {
    "none": (Decay.NONE, 0.0),
    "scalar": (Decay.TOKEN_HEAD, 1 / 16),
    "summed": (Decay.TOKEN_HEAD, 1 / 16),
    "vector": (Decay.TOKEN_CHANNEL, 1 / 16),
    "steep": (Decay.TOKEN_CHANNEL, 16.0),
}
BATCHES = ((8, 4096), (4, 1024), (1, 32768))  # then no more programs than processors; and rows that are cut
CHECKED = (1, 1600)  # so long that rows are cut

Row = tuple[torch.dtype, str, int]
"""Of the table: dtype, kind, size up to."""
Times = dict[Settings, list[tuple[bool, float]]]
"""Of each candidate, in the same order: whether there were no more programs than processors, milliseconds."""


class Point(NamedTuple):
    """What is compiled and timed at once: all sweeps of a training step, in one setting."""

    dtype: torch.dtype
    gates: str
    size: int
    settings: Settings


def candidates(dtype: torch.dtype, gates: str, size: int) -> Iterator[Settings]:
    """Settings that may suit."""
    from linattn.backends.triton import launch

    divides = GATES[gates][0] is Decay.TOKEN_CHANNEL
    for block, chunk, warps, stages in itertools.product((64, 128), CHUNKS[dtype], (4, 8), (1, 2, 3)):
        small = block == 64 and chunk <= 64
        if block <= size and (warps == 8 or small) and (chunk == launch.CHUNK or not divides):
            yield Settings(block, chunk, warps, stages, deep=stages)


def points(dtypes: list[torch.dtype], sizes: list[int]) -> Iterator[Point]:
    """Every candidate of every row."""
    for dtype, gates, size in itertools.product(dtypes, GATES, sizes):
        if size <= LARGEST[dtype]:
            yield from (Point(dtype, gates, size, settings) for settings in candidates(dtype, gates, size))


def inputs(point: Point, B: int, T: int) -> tuple[MatrixInputs, Divisor | None, Tensor, Tensor]:
    """Random ones, of 2048 channels, what divides the output, and gradients of output and state."""
    decay, strength = GATES[point.gates]
    sizes = {"B": B, "T": T, "H": 2048 // point.size, "K": point.size, "V": point.size}
    return inputs_of(decay, point.dtype, sizes, "cuda", point.gates == "summed", strength)


def inputs_of(
    decay: Decay, dtype: torch.dtype, sizes: dict[str, int], device: str, summed: bool, strength: float
) -> tuple[MatrixInputs, Divisor | None, Tensor, Tensor]:
    """The same of any sizes."""
    x, do, dS = draw(decay, dtype, sizes, device=device, strength=strength)
    if not summed:
        return x, None, do, dS
    # of keys and queries above 0, so that the sums are far from it
    x, one = x._replace(q=x.q.abs(), k=x.k.abs()), torch.ones(do.shape[:-1], device=device)
    return x, Divisor(one, torch.ones_like(dS[..., 0]), torch.zeros_like(one), 1e-6), do, dS


def step(x: MatrixInputs, by: Divisor | None, do: Tensor, dS: Tensor) -> dict[str, Tensor]:
    """Output and gradients by the Triton backend, with the gates' where there are any."""
    from linattn.backends.triton import launch

    grads: Iterable[Tensor | None]
    if by is None:
        o, *_ = launch.forward(x)
        grads = launch.backward(x, do, dS, x.g is not None)
    else:
        o, sums, _, z = launch.forward_divided(x, by)
        grads = launch.backward_divided(x, by, o, sums, do, dS, torch.zeros_like(z), x.g is not None)
    return {"o": o} | {name: grad for name, grad in zip("qkvg", grads, strict=False) if grad is not None}


def truth(x: MatrixInputs, by: Divisor | None, do: Tensor, dS: Tensor) -> dict[str, Tensor]:
    """The same in float64."""
    from linattn.backends.chunked import Chunked

    given = {name: t.double().requires_grad_() for name, t in zip("qkvg", x[:4], strict=True) if t is not None}
    assert x.state is not None
    x = x._replace(**given, state=x.state.double())  # type: ignore[arg-type]
    if by is None:
        o, S = Chunked().matrix(x, None)
    else:
        assert by.z is not None
        o, S, _ = Chunked().normalized(x, by._replace(z=by.z.double()), None)
    grads = torch.autograd.grad((o, S), list(given.values()), (do.double(), dS.double()))
    return {"o": o.detach(), **dict(zip(given, grads, strict=True))}


def error(found: dict[str, Tensor], right: dict[str, Tensor], gates: str) -> float:
    """The worst Euclidean norm of a difference over that of the truth; NaN counts as infinite."""
    # What steep gates leave is so little that rounding hides their gradient.
    names = [name for name in right if not (name == "g" and gates == "steep")]
    off = [float((found[name].double() - right[name]).norm() / right[name].norm()) for name in names]
    return max(value if value == value else float("inf") for value in off)


def sweeps(point: Point, B: int, T: int) -> list[Launch]:
    """A training step's launches that the table has a row for."""
    given = inputs(point, B, T)
    with recorded(run=True) as found:
        step(*given)
    return [each for each in found if each.kernel.__name__ == "sweep"]


def row(each: Launch, point: Point) -> Row:
    """The row of the table that a sweep's settings come from."""
    named = each.named
    states = named["out"] is None
    size, kind = named["DX"], table.kind(named["DECAY"], named["OUTER"], point.gates == "summed", states)
    return point.dtype, kind, 64 if size <= 64 else 128 if size <= 128 else 256


def apply(settings: Settings) -> None:
    """To the whole table."""
    from linattn.backends.triton import launch

    for rows in table.TABLE.values():
        rows.update(dict.fromkeys(rows, settings))
    launch._how.cache_clear()


def compile_all(options: argparse.Namespace) -> None:
    """Every candidate, by as many processes as there are workers."""
    command = [sys.executable, "-W", "ignore", "-m", "linattn.benchmark.tune", "--dtypes", *options.dtypes]
    command += ["--sizes", *map(str, options.sizes), "--part"]
    processes = [
        subprocess.Popen([*command, f"{i}/{options.workers}"], stderr=subprocess.DEVNULL)
        for i in range(options.workers)
    ]
    for process in processes:
        process.wait()


def fastest(timed: Times) -> Settings:
    """The least sum of times, each over the least of its column; ``deep`` is chosen by itself where it counts."""
    least = [min(ms for _, ms in column) for column in zip(*timed.values(), strict=True)]

    def cost(settings: Settings, few: bool) -> float:
        columns = zip(timed[settings], least, strict=True)
        return sum(ms / low for (deep, ms), low in columns if deep == few)

    def best(few: bool, like: Settings) -> Settings:
        return min((s for s in timed if s[:3] == like[:3]), key=lambda s: cost(s, few))

    pairs = [(best(False, s), best(True, s)) for s in timed]
    whole, part = min(pairs, key=lambda pair: cost(pair[0], False) + cost(pair[1], True))
    return whole._replace(deep=part.deep)


def main(argv: list[str] | None = None) -> int:
    """Compile, compare, time, print."""
    parser = argparse.ArgumentParser(prog="python -m linattn.benchmark.tune", description=__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"], help="default: all three")
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 128, 256], help="head sizes (default 64 128 256)")
    parser.add_argument("--rep", type=float, default=10, help="milliseconds a timing (default 10)")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile (default 14)")
    parser.add_argument("--part", help="i/n: only compile every n-th candidate from the i-th; what the workers do")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    every = list(points([getattr(torch, name) for name in options.dtypes], options.sizes))
    if options.part:
        i, n = map(int, options.part.split("/"))
        for point in every[i::n]:
            apply(point.settings)
            try:
                step(*inputs(point, *CHECKED))
            except Exception as failure:  # too little shared memory, say; told when it is this candidate's turn
                del failure
        return 0
    compile_all(options)
    from triton.testing import do_bench

    from linattn.backends.triton import launch

    timed: dict[Row, Times] = defaultdict(dict)
    for case, group in itertools.groupby(every, lambda point: point[:3]):
        right, small = None, None
        for point in group:
            apply(point.settings)
            if small is None or right is None:
                small = inputs(point, *CHECKED)
                right, device = truth(*small), small[-1].device
            try:
                off = error(step(*small), right, point.gates)
                if off > TOLERANCE[point.dtype]:
                    print(*case, tuple(point.settings), f"WRONG: error {off:.1e}", flush=True)
                    continue
                times: dict[Row, list[tuple[bool, float]]] = defaultdict(list)
                for B, T in BATCHES:
                    for each in sweeps(point, B, T):
                        ms = do_bench(partial(launch._launch, *each), warmup=options.rep / 4, rep=options.rep)
                        few = each.programs <= launch._processors(device)
                        times[row(each, point)].append((few, ms))
            except Exception as failure:
                print(*case, tuple(point.settings), f"failed: {str(failure)[:80]}", flush=True)
                continue
            for key, found in times.items():
                states = key[1] != "states" or point.gates == "scalar"  # of two that have it
                if states and ("divided" in key[1]) == (point.gates == "vector"):  # the other kind ends at once
                    timed[key].setdefault(point.settings, []).extend(found)
                shown = " ".join(f"{ms:.3f}" for _, ms in found)
                print(*case, tuple(point.settings), key[1], f"{shown} ms, error {off:.1e}", flush=True)
    print("\n# (kind of decay, size of x up to): Settings(channels, tokens, warps, stages, deep)")
    for dtype, rows in itertools.groupby(timed, lambda key: key[0]):
        print(f"{dtype}: {{")
        for key in rows:
            print(f'    ("{key[1]}", {key[2]}): Settings{tuple(fastest(timed[key]))},')
        print("},")
    return 0


if __name__ == "__main__":
    sys.exit(main())
