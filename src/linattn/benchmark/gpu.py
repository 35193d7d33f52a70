"""`make gpu-check`, after the tests: the Triton backend's times on this GPU beside its peers', in benchmarks/results/.

Times are medians of runs that clear the cache, in milliseconds; errors are Euclidean norms relative to float64, over
shorter rows, of the output and, with the backward, the worst of the gradients. The floor is the bytes that must move at
the bandwidth of a device copy measured in the same run.

Peers are those of :mod:`linattn.benchmark.gpu_peers` that are installed. Each is tried in a process of its own first,
all of them side by side: there it compiles, fails or takes too long without harm. What is left is timed here, right
after ours, one after the other.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import engine
from linattn._version import __version__
from linattn.benchmark.gpu_peers import PEERS, Peer, first, shorten_autotuning
from linattn.mechanisms.hgrn2 import hgrn2
from linattn.mechanisms.linear_attention import linear_attention
from linattn.mechanisms.mamba2 import mamba2
from linattn.mechanisms.mlstm import mlstm
from linattn.recurrence import Decay, Read, Recurrence

DEVICE = "cuda"
ERROR_TOKENS = 512
COLD = ("scalar decay", "vector decay (GLA)")  # cases whose very first call is timed

Tensors = dict[str, Tensor]


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def _positive(*shape: int) -> Tensor:
    return torch.rand(shape, device=DEVICE, dtype=torch.bfloat16)


def _float(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def _gate(*shape: int) -> Tensor:
    return F.logsigmoid(_float(*shape)) / 16


def _half_gate(*shape: int) -> Tensor:
    return _gate(*shape).bfloat16()


def _step(*shape: int) -> Tensor:
    return F.softplus(_float(*shape) - 4)


def _forget(*shape: int) -> Tensor:
    return _float(*shape) + 3


def _rate(*shape: int) -> Tensor:
    return -torch.rand(shape, device=DEVICE).exp()


def _one(*shape: int) -> Tensor:
    return torch.ones(shape, device=DEVICE)


Drawn = Mapping[str, tuple[str, Callable[..., Tensor]]]
QKV: Drawn = {"q": ("B T H K", _normal), "k": ("B T H K", _normal), "v": ("B T H V", _normal)}


@dataclass(frozen=True)
class Case:
    """A function of tensors, by name: their axes and how they are drawn; G query/key heads.

    ``constant``: tensors that get no gradient. ``trains``: whether the backward is timed, too.
    """

    name: str
    function: Callable[..., tuple[Tensor, Any]]
    tensors: Drawn
    B: int = 8
    T: int = 4096
    H: int = 16
    K: int = 128
    V: int = 128
    G: int = 1
    constant: tuple[str, ...] = ()
    trains: bool = True

    @property
    def shape(self) -> str:
        """For people."""
        return f"B{self.B} T{self.T} H{self.H} K{self.K} V{self.V}"

    @property
    def leaves(self) -> list[str]:
        """Tensors that get a gradient."""
        return [name for name in self.tensors if name not in self.constant]

    def inputs(self) -> Tensors:
        """Random inputs."""
        sizes = {axis: getattr(self, axis) for axis in "BTHKVG"}
        return {name: draw(*map(sizes.__getitem__, dims.split())) for name, (dims, draw) in self.tensors.items()}


def _recurrence(decay: Decay = Decay.NONE, **fields: Any) -> Callable[..., tuple[Tensor, Any]]:
    return partial(engine.matrix, Recurrence(decay=decay, **fields))


def _mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, backend: str) -> tuple[Tensor, Any]:
    return mlstm(q, k, v, i, F.logsigmoid(f), backend=backend)


SCALAR, VECTOR = _recurrence(Decay.TOKEN_HEAD), _recurrence(Decay.TOKEN_CHANNEL)
BEFORE: dict[str, Any] = {"read": Read.BEFORE, "bonus": True}
SCALARS: Drawn = {**QKV, "g": ("B T H", _gate)}
VECTORS: Drawn = {**QKV, "g": ("B T H K", _half_gate)}
HEADS: Drawn = {**QKV, "g": ("H", _gate)}
BONUS: Drawn = {"u": ("H K", _float)}
STEP: Drawn = {**SCALARS, "state": ("B H K V", _float)}
POSITIVE: Drawn = {**QKV, "q": ("B T H K", _positive), "k": ("B T H K", _positive)}
MAMBA2: Drawn = {
    "x": ("B T H V", _normal), "dt": ("B T H", _step), "A": ("H", _rate), "B": ("B T G K", _normal),
    "C": ("B T G K", _normal), "D": ("H", _one),
}  # fmt: skip
MLSTM: Drawn = {**QKV, "i": ("B T H", _float), "f": ("B T H", _forget)}

CASES = (
    Case("no decay", _recurrence(), QKV),
    Case("linear attention, normalised", partial(linear_attention, feature_map="identity"), POSITIVE),
    Case("fixed decay (RetNet)", _recurrence(Decay.HEAD), HEADS, constant=("g",)),
    Case("scalar decay", SCALAR, SCALARS),
    Case("Mamba-2", mamba2, MAMBA2, H=32, V=64, constant=("D",)),
    Case("vector decay (GLA)", VECTOR, VECTORS),
    Case("GLA, 4 heads of 128 and 256", VECTOR, VECTORS, H=4, V=256),
    Case("HGRN2", hgrn2, {name: VECTORS[name] for name in "qvg"}),
    Case("RWKV-6", _recurrence(Decay.TOKEN_CHANNEL, **BEFORE), {**VECTORS, **BONUS}, H=32, K=64, V=64),
    Case("RWKV-5", _recurrence(Decay.CHANNEL, **BEFORE), {**QKV, "g": ("H K", _gate), **BONUS}, H=32, K=64, V=64),
    Case("mLSTM", _mlstm, MLSTM),
    Case("mLSTM, 4 heads of 256 and 512", _mlstm, MLSTM, H=4, K=256, V=512),
    Case("long, scalar decay", SCALAR, SCALARS, B=1, T=131072),
    Case("small, scalar decay", SCALAR, SCALARS, B=4, T=2048),
    Case("small, vector decay", VECTOR, VECTORS, B=4, T=2048),
    Case("prompt of 16", SCALAR, STEP, B=1, T=16, trains=False),
    Case("block of 16, batch 64", SCALAR, STEP, B=64, T=16, trains=False),
    Case("step, batch 1", SCALAR, STEP, B=1, T=1, trains=False),
    Case("step, batch 128", SCALAR, STEP, B=128, T=1, trains=False),
)


@dataclass(frozen=True)
class Row:
    """One line of the table: ``work`` is "forward", "forward + backward", "host" (the time that the caller waits) or
    "first call". What was not measured is None; ``note`` says why, and which backend served where Triton refused.

    ``ratio``: how many times faster ours is. ``of_floor``: the floor over our time.
    """

    case: str
    shape: str
    work: str
    ours_ms: float
    of_floor: float | None = None
    error: float | None = None
    peer: str = ""
    peer_ms: float | None = None
    ratio: float | None = None
    peer_error: float | None = None
    peer_version: str = ""
    note: str = ""


@dataclass(frozen=True)
class Entrant:
    """Ours or a peer, at work on one case: its function and how it turns tensors; ``note`` as in Row."""

    call: Callable[..., Tensor]
    layout: Callable[[Mapping[str, Tensor]], Tensors]
    turned: Callable[[Tensor], Tensor]
    trains: bool = True
    note: str = ""


def ours(case: Case) -> Entrant:
    """Triton, or the engine's own choice where Triton refuses."""
    backend, note = "triton", ""
    try:
        with torch.no_grad():
            case.function(**replace(case, B=0, T=1).inputs(), backend=backend)  # launches nothing
    except ValueError as refusal:
        backend = "auto"
        note = f"ours not on Triton: {re.sub('.*does not: ', '', str(refusal).split(';')[1])}"

    def layout(tensors: Mapping[str, Tensor]) -> Tensors:
        return {name: x.detach().clone() for name, x in tensors.items()}

    return Entrant(lambda **t: case.function(**t, backend=backend)[0], layout, lambda x: x, case.trains, note)


def entrant(case: Case, peer: Peer | None) -> Entrant:
    """Of the benchmark: ours (None) or a peer."""
    if peer is None:
        return ours(case)
    call = peer.load()
    return Entrant(lambda **t: first(call(**t)), peer.layout, peer.turned, case.trains and peer.trains)


def trained(case: Case, who: Entrant, tensors: Mapping[str, Tensor], do: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A call: the output, and its gradients for ``do``, which is in the case's layout."""
    turned = who.layout(tensors)
    leaves = [turned[name].requires_grad_() for name in case.leaves]
    do = who.turned(do).contiguous()

    def call() -> tuple[Tensor, ...]:
        o = who.call(**turned)
        return (o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype)))

    return call


class Errors:
    """Of an entrant's output and gradients over a few tokens, against float64."""

    def __init__(self, case: Case) -> None:
        self.case = replace(case, B=min(case.B, 2), T=min(case.T, ERROR_TOKENS))
        self.tensors = self.case.inputs()
        double = {name: x.double() for name, x in self.tensors.items()}
        exact = Entrant(
            lambda **t: case.function(**t, backend="chunked")[0],
            lambda tensors: {name: x.detach().clone() for name, x in tensors.items()},
            lambda x: x,
        )
        self.do = _normal(self.case.B, self.case.T, case.H, case.V)
        self.truth = trained(self.case, exact, double, self.do)()

    def of(self, who: Entrant) -> Iterator[tuple[str, float]]:
        """("output", error), then the same of each gradient where the entrant has a backward."""
        with torch.no_grad():
            o = who.call(**who.layout(self.tensors))
        yield "output", self._off(who, o, self.truth[0])
        if who.trains:
            _, *grads = trained(self.case, who, self.tensors, self.do)()
            for name, grad, right in zip(self.case.leaves, grads, self.truth[1:], strict=True):
                yield name, self._off(who, grad, right)

    @staticmethod
    def _off(who: Entrant, value: Tensor, right: Tensor) -> float:
        return float((who.turned(value).double() - right).norm() / right.norm())


def copy_bandwidth() -> float:
    """Bytes a millisecond of a large device copy, read plus written."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE).random_()
    y = torch.empty_like(x)
    return 2 * x.numel() / median(lambda: y.copy_(x))


def median(call: Callable[[], object]) -> float:
    """Milliseconds."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=20, rep=80, return_mode="median"))


def nbytes(*tensors: Tensor) -> int:
    """Bytes that the tensors occupy."""
    return sum(t.numel() * t.element_size() for t in tensors)


def floor(case: Case, tensors: Tensors, do: Tensor) -> tuple[int, int]:
    """Bytes that must move, forward and forward with backward: inputs read, output and state written; then inputs and
    the output's gradient read again, gradients written."""
    state = nbytes(*(x for name, x in tensors.items() if name == "state"))
    inputs, grads = nbytes(*tensors.values()), nbytes(*(tensors[name] for name in case.leaves))
    return inputs + state + nbytes(do), 2 * inputs + grads + 2 * nbytes(do)


def times(case: Case, who: Entrant, tensors: Tensors, do: Tensor) -> Iterator[tuple[str, float]]:
    """("forward", ms), then ("forward + backward", ms) where there is one."""
    turned = who.layout(tensors)
    with torch.no_grad():
        yield "forward", median(lambda: who.call(**turned))
    if who.trains:
        del turned
        yield "forward + backward", median(trained(case, who, tensors, do))


def measure(case: Case, bandwidth: float, peers: Mapping[Peer, str]) -> Iterator[Row]:
    """The case's rows, with the peers that it has; one that has not passed its trial comes with the reason."""
    errors, us = Errors(case), ours(case)
    off = dict(errors.of(us))
    tensors, do = case.inputs(), _normal(case.B, case.T, case.H, case.V)
    moved = dict(zip(("forward", "forward + backward"), floor(case, tensors, do), strict=True))
    rows = [
        Row(case.name, case.shape, work, ms, moved[work] / bandwidth / ms, worst(off, work), note=us.note)
        for work, ms in times(case, us, tensors, do)
    ]
    if not peers:
        yield from rows
    for peer, trouble in peers.items():
        found: dict[str, float] = {}
        theirs: dict[str, float] = {}
        if not trouble:
            them = entrant(case, peer)
            found, trouble = until_failure(times(case, them, tensors, do))
            theirs = until_failure(errors.of(them))[0] if peer.same else {}
        for row in rows:
            ms = found.get(row.work)
            note = "" if ms is not None else f"peer: {trouble or 'has no backward'}"
            yield replace(
                row, peer=peer.name, peer_ms=ms, ratio=ms and ms / row.ours_ms, peer_error=worst(theirs, row.work),
                peer_version=peer.version, note="; ".join(filter(None, (row.note, note))),
            )  # fmt: skip
    if case.T == 1:
        yield Row(case.name, case.shape, "host", host(us, tensors), note=us.note)


def until_failure(pairs: Iterator[tuple[str, float]]) -> tuple[dict[str, float], str]:
    """What comes until an exception, whichever it is, and the exception in a line."""
    found: dict[str, float] = {}
    try:
        found.update(pairs)
    except Exception as error:
        return found, why(error)
    return found, ""


def worst(off: Mapping[str, float], work: str) -> float | None:
    """The output's error, or that of the worst gradient."""
    if work == "forward":
        return off.get("output")
    return max((value for name, value in off.items() if name != "output"), default=None)


def why(error: Exception) -> str:
    """One line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:160]


def host(who: Entrant, tensors: Tensors) -> float:
    """Milliseconds that a caller waits for a call."""
    best = math.inf
    with torch.no_grad():
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                who.call(**tensors)
            best = min(best, (time.perf_counter() - start) / 100)
            torch.cuda.synchronize()
    return best * 1e3


def attempt(case: Case, peer: Peer | None) -> float:
    """One forward and backward; their seconds, imports included. Raises what comes, but for a peer that won't train."""
    if peer is not None:
        shorten_autotuning(1)
    tensors, do = case.inputs(), _normal(case.B, case.T, case.H, case.V)
    torch.cuda.synchronize()
    start = time.perf_counter()
    who = entrant(case, peer)
    with torch.no_grad():
        who.call(**who.layout(tensors))
    if who.trains:
        try:
            trained(case, who, tensors, do)()
        except Exception as error:
            print(why(error))
            if peer is None:
                raise
    torch.cuda.synchronize()  # raises if a kernel went astray
    return time.perf_counter() - start


def alone(case: Case, peer: Peer | None, seconds: float, **environment: str) -> str | float:
    """:func:`attempt` in a process of its own: its seconds, or what went wrong."""
    name = "ours" if peer is None else peer.name
    command = [sys.executable, "-W", "ignore", "-m", "linattn.benchmark.gpu", "--attempt", case.name, name]
    try:
        run = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"not ready within {seconds:.0f} s"
    if run.returncode == 0:
        return float(run.stdout.splitlines()[-1])
    lines = [line for line in run.stderr.splitlines() if "Error" in line and not line.startswith(" ")]
    return f"failed: {lines[0][:160] if lines else f'exit code {run.returncode}'}"


def trials(cases: list[Case], peers: Mapping[str, tuple[Peer, ...]], seconds: float) -> dict[tuple[str, str], str]:
    """Try everything side by side: (case, peer) -> what went wrong, or nothing. Ours is compiled on the way, first.

    ``seconds`` are for all of it: who waits for a free core has less.
    """
    pairs: list[tuple[Case, Peer | None]] = [(case, None) for case in cases]
    pairs += [(case, peer) for case in cases for peer in peers[case.name]]
    deadline = time.monotonic() + seconds

    def attempted(pair: tuple[Case, Peer | None]) -> str | float:
        case, peer = pair
        left = max(1.0, deadline - time.monotonic())
        return alone(case, peer, left, FLA_CACHE_RESULTS="0")  # settings chosen on a busy GPU are not to be kept

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    with ThreadPoolExecutor(max(1, cores - 2)) as pool:
        found = list(pool.map(attempted, pairs))
    for (case, peer), result in zip(pairs, found, strict=True):
        took = result if isinstance(result, str) else f"ready after {result:.0f} s"
        print(f"  {case.name:30} {peer.name if peer else 'ours':32} {took}", flush=True)
    return {
        (case.name, peer.name): result if isinstance(result, str) else ""
        for (case, peer), result in zip(pairs, found, strict=True)
        if peer is not None
    }


def cold(case: Case) -> Row:
    """The very first forward and backward, nothing compiled yet."""
    with tempfile.TemporaryDirectory() as empty:
        took = alone(case, None, 600, TRITON_CACHE_DIR=empty)
    if isinstance(took, str):
        return Row(case.name, case.shape, "first call", math.nan, note=took)
    return Row(case.name, case.shape, "first call", took * 1e3)


def same_bits(case: Case, repeats: int) -> bool:
    """Whether output and gradients come out the same, bit for bit, every time."""
    call = trained(case, ours(case), case.inputs(), _normal(case.B, case.T, case.H, case.V))
    before = call()
    return all(all(map(torch.equal, before, call())) for _ in range(repeats - 1))


def show(row: Row) -> None:
    """A line for people."""
    line = f"{row.case:30} {row.shape:28} {row.work:18} {row.ours_ms:9.4f}"
    line += " " * 6 if row.of_floor is None else f" ({row.of_floor:4.0%})"
    line += " " * 14 if row.error is None else f" error {row.error:.1e}"
    if row.peer_ms is not None:
        line += f"  {row.peer} {row.peer_ms:.4f}, {row.ratio:.2f} times ours"
        line += "" if row.peer_error is None else f", error {row.peer_error:.1e}"
    print(line + (f"  [{row.note}]" if row.note else ""), flush=True)


def write(file: Path, rows: list[Row]) -> None:
    """As CSV. What an earlier run wrote of other cases stays."""
    import triton

    columns = [*(field.name for field in fields(Row)), "linattn", "torch", "triton"]
    lines: list[list[object]] = []
    for row in rows:
        values = [f"{x:.4g}" if isinstance(x, float) else "" if x is None else x for x in asdict(row).values()]
        lines.append([*values, __version__, torch.__version__, triton.__version__])
    if file.exists():
        header, *before = csv.reader(file.read_text(encoding="utf-8").splitlines())
        measured = {row.case for row in rows}
        lines += [[*line] for line in before if header == columns and line[0] not in measured]
    order = [case.name for case in CASES]
    lines.sort(key=lambda line: order.index(str(line[0])) if line[0] in order else len(order))
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as handle:
        csv.writer(handle, lineterminator="\n").writerows([columns, *lines])


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m linattn.benchmark.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the CSV file")
    parser.add_argument("--only", nargs="*", metavar="CASE", help="names of cases, or parts of names")
    parser.add_argument("--peers", nargs="*", metavar="NAME", help="peers, or parts of names (default: all installed)")
    parser.add_argument("--no-peers", dest="peers", action="store_const", const=[], help="ours alone")
    parser.add_argument("--seconds", type=float, default=300, help="time for all to get ready (default 300)")
    parser.add_argument("--repeats", type=int, default=30, help="runs that must agree bit for bit (default 30)")
    parser.add_argument("--attempt", nargs=2, metavar=("CASE", "PEER"), help="run one case once; what trials do")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    if options.attempt:
        case = next(case for case in CASES if case.name == options.attempt[0])
        peer = next((p for p in PEERS.get(case.name, ()) if p.name == options.attempt[1]), None)
        print(attempt(case, peer))
        return 0
    import triton

    def wanted(name: str, parts: list[str] | None) -> bool:
        return parts is None or any(part in name for part in parts)

    cases = [case for case in CASES if wanted(case.name, options.only)]
    peers = {
        case.name: tuple(p for p in PEERS.get(case.name, ()) if p.installed and wanted(p.name, options.peers))
        for case in cases
    }
    rows = [cold(case) for case in cases if case.name in COLD]
    print(f"trials, up to {options.seconds:.0f} s, side by side:", flush=True)
    trouble = trials(cases, peers, options.seconds)
    shorten_autotuning(20)
    bandwidth = copy_bandwidth()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}, copy {bandwidth / 1e9:.2f} TB/s")
    file = options.out / f"{re.sub('[^a-z0-9]+', '-', device.lower())}.csv"
    for row in rows:
        show(row)
    failed = []
    for case in cases:
        try:
            for row in measure(case, bandwidth, {p: trouble[case.name, p.name] for p in peers[case.name]}):
                rows.append(row)
                show(row)
        except Exception as error:  # ours fails; the other cases are still to be measured
            failed.append(case)
            print(f"{case.name:30} FAILED {why(error)}", flush=True)
        torch.cuda.empty_cache()
        write(file, rows)  # at once, so that a run which is cut short leaves something
    wide = [replace(case, B=64, T=256) for case in cases if case.trains and case not in failed]
    differing = [case.name for case in wide if not same_bits(case, options.repeats)]
    print(f"{options.repeats} repeats of 64 rows, other bits: {', '.join(differing) or 'none'}")
    print(f"written: {file}")
    return 1 if differing or failed else 0


if __name__ == "__main__":
    sys.exit(main())
