"""`make gpu-check`, after the tests: the Triton backend's times on this GPU, written to benchmarks/results/.

Times are medians of runs that clear the cache, in milliseconds; errors are Euclidean norms relative to float64, over
shorter rows. The floor is the bytes that must move at the bandwidth of a device copy measured in the same run.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import engine
from linattn._version import __version__
from linattn.recurrence import Decay, Read, Recurrence

ERROR_TOKENS = 512


@dataclass(frozen=True)
class Case:
    """A recurrence and its sizes; G query/key heads."""

    name: str
    recurrence: Recurrence
    B: int = 8
    T: int = 4096
    H: int = 16
    K: int = 128
    V: int = 128
    G: int = 0

    def inputs(self, B: int, T: int) -> dict[str, Tensor]:
        """Random bfloat16 inputs."""
        sizes = {"B": B, "T": T, "H": self.H, "K": self.K}

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        groups = self.G or self.H
        tensors = {
            "q": normal(B, T, groups, self.K),
            "k": normal(B, T, groups, self.K),
            "v": normal(B, T, self.H, self.V),
        }
        decay = self.recurrence.decay
        if decay is not Decay.NONE:
            g = F.logsigmoid(torch.randn([sizes[axis] for axis in decay.value.split()], device="cuda")) / 16
            tensors["g"] = g.bfloat16() if decay is Decay.TOKEN_CHANNEL else g
        if self.recurrence.bonus:
            tensors["u"] = torch.randn(self.H, self.K, device="cuda")
        return tensors


GATED = Recurrence(decay=Decay.TOKEN_HEAD)
VECTOR = Recurrence(decay=Decay.TOKEN_CHANNEL)
RWKV = Recurrence(decay=Decay.TOKEN_CHANNEL, read=Read.BEFORE, bonus=True)
CASES = (
    Case("no decay", Recurrence()),
    Case("fixed decay", Recurrence(decay=Decay.HEAD)),
    Case("scalar decay", GATED),
    Case("Mamba-2, one group", GATED, H=32, V=64, G=1),
    Case("vector decay (GLA)", VECTOR),
    Case("RWKV-6", RWKV, H=32, K=64, V=64),
    Case("RWKV-5", Recurrence(decay=Decay.CHANNEL, read=Read.BEFORE, bonus=True), H=32, K=64, V=64),
    Case("long, scalar decay", GATED, B=1, T=131072),
    Case("small, scalar decay", GATED, B=4, T=2048),
    Case("small, vector decay", VECTOR, B=4, T=2048),
)


@dataclass(frozen=True)
class Row:
    """One line of the table; what was not measured is empty."""

    case: str
    shape: str
    forward_ms: float
    forward_of_floor: float
    training_ms: float | None
    training_of_floor: float | None
    host_us: float | None
    error_output: float | None
    error_q: float | None
    error_k: float | None
    error_v: float | None
    error_g: float | None


def copy_bandwidth() -> float:
    """Bytes a millisecond of a large device copy, read plus written."""
    from triton.testing import do_bench

    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    y = torch.empty_like(x)
    return 2 * x.numel() / float(do_bench(lambda: y.copy_(x), return_mode="median"))


def median(call: Callable[[], object]) -> float:
    """Milliseconds."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=20, rep=80, return_mode="median"))


def nbytes(*tensors: Tensor) -> int:
    """Bytes that the tensors occupy."""
    return sum(t.numel() * t.element_size() for t in tensors)


def errors(case: Case) -> dict[str, float]:
    """Of the output and the gradients, against float64."""
    tensors = {name: x.requires_grad_() for name, x in case.inputs(1, ERROR_TOKENS).items()}
    double = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    results = []
    do = torch.randn(1, ERROR_TOKENS, case.H, case.V, device="cuda", dtype=torch.bfloat16)
    for given, backend in ((tensors, "triton"), (double, "chunked")):
        o, _ = engine.matrix(case.recurrence, **given, backend=backend)  # type: ignore[arg-type]
        grads = torch.autograd.grad(o, list(given.values()), do.to(o.dtype))
        results.append({"output": o.detach(), **dict(zip(given, grads, strict=True))})
    ours, right = results
    return {name: float((ours[name].double() - x).norm() / x.norm()) for name, x in right.items()}


def measure(case: Case, bandwidth: float) -> Row:
    """Forward, and forward with backward."""
    off = errors(case)
    tensors = case.inputs(case.B, case.T)
    with torch.no_grad():
        forward = median(lambda: engine.matrix(case.recurrence, **tensors, backend="triton"))  # type: ignore[arg-type]
    for x in tensors.values():
        x.requires_grad_()
    do = torch.randn(case.B, case.T, case.H, case.V, device="cuda", dtype=torch.bfloat16)

    def training() -> None:
        o, _ = engine.matrix(case.recurrence, **tensors, backend="triton")  # type: ignore[arg-type]
        torch.autograd.grad(o, list(tensors.values()), do)

    both = median(training)
    once = nbytes(*tensors.values())
    out = nbytes(do)
    return Row(
        case.name, f"B{case.B} T{case.T} H{case.H} K{case.K} V{case.V}",
        forward, (once + out) / bandwidth / forward, both, (3 * once + 2 * out) / bandwidth / both, None,
        off["output"], off["q"], off["k"], off["v"], off.get("g"),
    )  # fmt: skip


def step(B: int, bandwidth: float) -> Row:
    """One token with a state, and the host's time for a call."""
    case = Case("step", GATED, B=B, T=1)
    tensors = case.inputs(B, 1)
    state = torch.randn(B, case.H, case.K, case.V, device="cuda")

    def call() -> object:
        return engine.matrix(GATED, **tensors, state=state, backend="triton")  # type: ignore[arg-type]

    with torch.no_grad():
        ms = median(call)
        host = float("inf")
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            host = min(host, (time.perf_counter() - start) / 100)
            torch.cuda.synchronize()
    floor = 2 * nbytes(state) / bandwidth
    shape = f"B{B} T1 H{case.H} K{case.K} V{case.V}"
    return Row(f"step, B{B}", shape, ms, floor / ms, None, None, host * 1e6, None, None, None, None, None)


def same_bits(case: Case, repeats: int) -> bool:
    """Whether output and gradients come out the same, bit for bit, every time."""
    tensors = {name: x.requires_grad_() for name, x in case.inputs(case.B, case.T).items()}
    do = torch.randn(case.B, case.T, case.H, case.V, device="cuda", dtype=torch.bfloat16)
    first: list[Tensor] = []
    for _ in range(repeats):
        o, S = engine.matrix(case.recurrence, **tensors, backend="triton")  # type: ignore[arg-type]
        assert isinstance(S, Tensor)
        results = [
            o.detach(),
            S.detach(),
            *torch.autograd.grad((o, S), list(tensors.values()), (do, torch.ones_like(S))),
        ]
        first = first or results
        if not all(torch.equal(a, b) for a, b in zip(first, results, strict=True)):
            return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m linattn.benchmark.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the CSV file")
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--repeats", type=int, default=30, help="runs that must agree bit for bit (default 30)")
    options = parser.parse_args(argv)
    import triton

    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}, copy {bandwidth / 1e9:.2f} TB/s")
    rows = []
    for case in CASES:
        if options.only and case.name not in options.only:
            continue
        row = measure(case, bandwidth)
        rows.append(row)
        gate = "" if row.error_g is None else f" g {row.error_g:.1e}"
        print(
            f"{row.case:22} {row.shape:28} forward {row.forward_ms:7.3f} ({row.forward_of_floor:4.0%})  with backward "
            f"{row.training_ms:7.3f} ({row.training_of_floor:4.0%})  errors {row.error_output:.1e} q {row.error_q:.1e} "
            f"k {row.error_k:.1e} v {row.error_v:.1e}{gate}",
            flush=True,
        )
    for B in (1, 128):
        row = step(B, bandwidth)
        rows.append(row)
        took = f"{row.forward_ms:.4f} ms ({row.forward_of_floor:.0%}), host {row.host_us:.0f} us"
        print(f"{row.case:22} {row.shape:28} {took}")
    wide = 1024 // 16
    differing = [
        case.name for case in CASES
        if not same_bits(Case(case.name, case.recurrence, wide, 256, case.H, case.K, case.V, case.G), options.repeats)
    ]  # fmt: skip
    print(f"{options.repeats} repeats of {wide * 16} heads and more, other bits: {', '.join(differing) or 'none'}")
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{re.sub('[^a-z0-9]+', '-', device.lower())}.csv"
    with file.open("w", newline="") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow([*(field.name for field in fields(Row)), "linattn", "torch", "triton"])
        for row in rows:
            values = [f"{x:.4g}" if isinstance(x, float) else "" if x is None else x for x in asdict(row).values()]
            writer.writerow([*values, __version__, torch.__version__, triton.__version__])
    print(f"written: {file}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
