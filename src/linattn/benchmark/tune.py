"""`make tune`: time every sweep of the Triton backend in every candidate setting, and print the table of the fastest.

A candidate counts only if its result, on a smaller case, is as near to float64 as its dtype allows. The table is for
pasting into ``linattn/backends/triton/table.py``. ``--warm i/n`` only compiles every n-th candidate, to be run n times
side by side before.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from linattn.backends._protocol import MatrixInputs
from linattn.backends.triton import table
from linattn.backends.triton.table import Settings
from linattn.recurrence import Read, Write

ROLES = ("o", "dv", "dq", "dk")
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
CANDIDATES = [
    Settings(block, chunk, warps, stages)
    for block, chunk, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (1, 2, 3))
    if not (block == 128 and warps == 4) and not (chunk == 128 and warps == 4)
]
GATES = {"none": "", "scalar": "B T H", "vector": "B T H K"}


def draw(gate: str, dtype: torch.dtype, B: int, T: int, H: int, K: int, V: int) -> tuple[MatrixInputs, Tensor, Tensor]:
    """Random inputs, and gradients of the output and the final state."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    sizes = {"B": B, "T": T, "H": H, "K": K}
    g = None
    if gate:
        shape = [sizes[axis] for axis in gate.split()]
        g = torch.nn.functional.logsigmoid(torch.randn(shape, device="cuda")) / 16
        g = g.to(dtype) if len(shape) == 4 else g
    q, k, v, do = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V), normal(B, T, H, V)
    state, dS = (torch.randn(B, H, K, V, device="cuda") for _ in range(2))
    x = MatrixInputs(q, k, v, g, None, None, None, None, state, None, K**-0.5, Write.ADDITIVE, Read.AFTER)
    return x, do, dS


def sweeps(x: MatrixInputs, do: Tensor, dS: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Each sweep of a call by itself, as the backward runs it."""
    from linattn.backends.triton.launch import Call

    c = Call(x, x.scale)
    c.rows = c.rows._replace(length=c.rows.T, segments=1)
    o, dv, final = torch.empty_like(c.v), torch.empty_like(c.v), c.states()
    dq, dk = torch.empty_like(c.q), torch.empty_like(c.k)

    def run(role: str) -> Callable[[], Tensor]:
        def call() -> Tensor:
            if role == "o":
                c.sweep(c.q, c.k, c.v, c.state, outer=False, reverse=False, out=o, final=final)
                return o
            if role == "dv":
                c.sweep(c.k, c.q, do, dS, outer=False, reverse=True, out=dv, final=final)
                return dv
            moved, rest, dg = c.gate_scratch() if x.g is not None else (None, None, None)
            if role == "dq":
                c.sweep(
                    do, c.v, c.k, c.state, outer=True, reverse=False, mate=c.q, dS=dS, out=dq, moved=moved, rest=rest
                )
                return dq
            c.sweep(c.v, do, c.q, dS, outer=True, reverse=True, mate=c.k, out=dk, moved=moved, rest=rest, dg=dg)
            return dk

        return call

    return {role: run(role) for role in ROLES}


def truth(x: MatrixInputs, do: Tensor, dS: Tensor) -> dict[str, Tensor]:
    """Output and gradients in float64."""
    from linattn.backends.chunked import Chunked

    tensors = {name: None if t is None else t.double() for name, t in zip("qkvg", x[:4], strict=True)}
    for name in "qkv":
        tensors[name].requires_grad_()  # type: ignore[union-attr]
    y = x._replace(**tensors, state=None if x.state is None else x.state.double())  # type: ignore[arg-type]
    o, S = Chunked().matrix(y, None)
    dq, dk, dv = torch.autograd.grad((o, S), (y.q, y.k, y.v), (do.double(), dS.double()))
    return {"o": o.detach(), "dv": dv, "dq": dq, "dk": dk}


def error(value: Tensor, right: Tensor) -> float:
    """Euclidean norm of the difference over that of the truth."""
    return float((value.double() - right).norm() / right.norm())


def points(dtypes: list[torch.dtype]) -> Iterator[tuple[torch.dtype, str, int, str, Settings]]:
    """(dtype, gate, size, role, candidate) of everything that is timed."""
    for dtype, (gate, size) in itertools.product(dtypes, itertools.product(GATES, (64, 128, 256))):
        for role, candidate in itertools.product(ROLES, CANDIDATES):
            if candidate.block <= size:
                yield dtype, gate, size, role, candidate


def _set(dtype: torch.dtype, gate: str, size: int, role: str, candidate: Settings) -> None:
    table.TABLE[dtype][table.kind(len(GATES[gate].split()), role in ("dq", "dk")), size] = candidate


def main(argv: list[str] | None = None) -> int:
    """Time, compare, print."""
    from triton.testing import do_bench

    parser = argparse.ArgumentParser(prog="python -m linattn.benchmark.tune", description=__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], help="dtypes (default bfloat16)")
    parser.add_argument("--warm", help="i/n: compile every n-th candidate from the i-th, time nothing")
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 128, 256], help="head sizes")
    parser.add_argument("--rep", type=int, default=15, help="milliseconds a timing (default 15)")
    options = parser.parse_args(argv)
    every = [p for p in points([getattr(torch, name) for name in options.dtypes]) if p[2] in options.sizes]
    torch.manual_seed(0)
    if options.warm:
        i, n = map(int, options.warm.split("/"))
        every = every[i::n]
    best: dict[tuple[torch.dtype, str, int, str], list[tuple[float, Settings]]] = {}
    small = big = right = last = None
    for point in every:
        dtype, gate, size, role, candidate = point
        if (dtype, gate, size) != last:
            last = (dtype, gate, size)
            heads = 2048 // size
            small = draw(GATES[gate], dtype, 1, 200, heads, size, size)
            right = None if options.warm else truth(*small)
            big = None if options.warm else sweeps(*draw(GATES[gate], dtype, 8, 4096, heads, size, size))
        assert small is not None
        _set(*point)
        try:
            value = sweeps(*small)[role]()
            torch.cuda.synchronize()
            if options.warm:
                continue
            assert right is not None and big is not None
            off = error(value, right[role])
            ms = do_bench(big[role], warmup=5, rep=options.rep, return_mode="median")
            wrong = "" if off < TOLERANCE[dtype] else "  WRONG"
            if not wrong:
                best.setdefault((dtype, gate, size, role), []).append((ms, candidate))
            print(f"{dtype} {gate} {size} {role} {tuple(candidate)} {ms:.3f} ms, error {off:.1e}{wrong}", flush=True)
        except Exception as failure:  # out of shared memory or registers: not a candidate
            if not options.warm:
                print(f"{dtype} {gate} {size} {role} {tuple(candidate)} failed: {str(failure)[:80]}", flush=True)
    for key, timed in best.items():
        timed.sort()
        print(*key, " ".join(f"{ms:.3f}{tuple(s)}" for ms, s in timed[:4]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
