"""Run a small case of every GPU kernel under compute-sanitizer: memcheck and racecheck. Without the tool: nothing.

Everything is compiled before, side by side, so that the tool sees hardly anything but kernels.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from glob import glob
from itertools import product

import torch
from torch import Tensor

from linattn import testing
from linattn.backends._protocol import Request
from linattn.engine import BACKENDS
from linattn.layers import RMSNorm, ShortConvolution, SwiGLU
from linattn.layers.exponential_gate import stabilize
from linattn.testing import Case, Form, Sizes

PLACES = ("/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer", "/opt/nvidia/*", "/opt/nvidia/*/*")
FINDINGS = 9  # exit code of a check that has some
FORM = Form("triton", "chunkwise")
SMALL = Sizes(B=1, T=67, G=1, H=2, K=16, V=8)  # those of the laws, which have compiled them


def recurrences() -> Iterator[Callable[[], object]]:
    """Every kind of decay and of reading."""
    for subject in testing.recurrences():
        assert subject.recurrence is not None
        if BACKENDS["triton"].unsuited(Request(torch.device("cuda"), torch.float32, None, subject.recurrence)):
            continue
        for dtype in (torch.float32, torch.bfloat16):
            for gates in ("ordinary", "mixed") if subject.gated else ("ordinary",):
                yield partial(recurrence, Case(subject, SMALL, dtype, gates, device="cuda"))
            yield partial(recurrence, Case(subject, Sizes(B=2, T=1, G=1, H=2, K=20, V=60), dtype, device="cuda"))
        yield partial(recurrence, Case(subject, Sizes(B=1, T=67, G=2, H=2, K=16, V=8), device="cuda"))
        # two heads share their keys, for which bfloat16 has kernels of its own
        for dtype, H in ((torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 2)):
            yield partial(recurrence, Case(subject, SMALL, dtype, lengths=(3, 0, 1, 66), device="cuda"))
            cut = Case(subject, Sizes(B=1, T=300, G=1, H=H, K=16, V=8), dtype, device="cuda")
            yield partial(recurrence, cut, split=True)


def recurrence(case: Case, split: bool = False) -> None:
    """Output and gradients; with ``split`` of rows that are cut."""
    from linattn.backends.triton import launch

    before = launch.SHORTEST, launch._processors
    if split:
        launch.SHORTEST, launch._processors = 64, lambda device: 132  # type: ignore[assignment]
    testing.evaluate(case, testing.call(case, FORM, case.cu_seqlens), case.tensors(), case.state())
    launch.SHORTEST, launch._processors = before


def layers() -> Iterator[Callable[[], object]]:
    """What stands beside the recurrence: convolution, norms, gated unit, the running maximum of gates."""

    def x(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)

    for dtype, packed in product((torch.float32, torch.bfloat16), (False, True)):
        cu = torch.tensor([0, 3, 3, 67], device="cuda") if packed else None
        yield partial(gradients, ShortConvolution(48, 4).to("cuda", dtype), x(1, 67, 48), cu_seqlens=cu)
        yield partial(gradients, stabilize, x(1, 67, 3), x(1, 67, 3), cu_seqlens=cu)
        yield partial(gradients, RMSNorm(48).to("cuda", dtype), x(1, 67, 48), x(1, 67, 48))
        yield partial(gradients, SwiGLU(16, 48).to("cuda", dtype), x(1, 67, 16))


def gradients(function: Callable[..., object], *inputs: Tensor, **where: Tensor | None) -> None:
    """Of all that a function returns."""
    if function is stabilize:
        inputs = (-inputs[0].abs(), inputs[1])
    y = function(*inputs, **where)
    parts = [y] if isinstance(y, Tensor) else [t for t in y if isinstance(t, Tensor)]  # type: ignore[attr-defined]
    sum(t.float().sum() for t in parts).backward()  # type: ignore[union-attr]


def work(part: int, parts: int) -> None:
    """Every ``parts``-th case from ``part``."""
    for run in [*recurrences(), *layers()][part::parts]:
        run()
    torch.cuda.synchronize()


def sanitizer() -> str | None:
    """Where compute-sanitizer lies."""
    name = "compute-sanitizer"
    return shutil.which(name) or next((path for place in PLACES for path in sorted(glob(f"{place}/{name}"))), None)


SAME = re.compile(r"Race reported between Write access at (\S+) in (\S+)\n=+\s+and Write access at \1 in \2 ")


def found(said: list[str]) -> bool:
    """Whether racecheck says more than that threads which hold the same number put it in the same place at once, as
    Triton's change of layout has them do: one instruction, and nobody reads in between."""
    reports = "\n".join(said)
    return len(SAME.findall(reports)) < reports.count("Race reported") or "Race reported" not in reports


def clean(command: list[str], check: str, part: str, seconds: float) -> bool:
    """Whether a check finds nothing in a part; prints what it says."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that each tensor has bounds of its own
    try:
        run = subprocess.run([*command, part], env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"{check} {part}: not ready within {seconds:.0f} s", flush=True)
        return False
    said = [line for line in (run.stdout + run.stderr).splitlines() if line.startswith("=====")]
    print(f"{check} {part}: exit code {run.returncode}", *said[:40], *said[40:][-1:], sep="\n", flush=True)
    if run.returncode and len(said) < 3:
        print(run.stderr[-2000:], flush=True)
    return run.returncode == 0 or (run.returncode == FINDINGS and not found(said))


def main() -> int:
    """Compile, then check; 1 if a check finds something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", help="i/n: run every n-th case from the i-th, and nothing else")
    parser.add_argument("--checks", nargs="+", default=["memcheck", "racecheck"], help="tools of compute-sanitizer")
    parser.add_argument("--workers", type=int, default=8, help="processes side by side (default 8)")
    parser.add_argument("--seconds", type=float, default=300, help="time of a check of a part (default 300)")
    options = parser.parse_args()
    if options.work:
        work(*map(int, options.work.split("/")))
        return 0
    tool = sanitizer()
    if tool is None or not torch.cuda.is_available():
        print("no compute-sanitizer or no GPU here: left out")
        return 0
    command = [sys.executable, "-W", "ignore", __file__, "--work"]
    parts = [f"{i}/{options.workers}" for i in range(options.workers)]
    processes = [subprocess.Popen([*command, part]) for part in parts]
    codes = [process.wait() for process in processes]
    if any(codes):
        return 1

    def checked(pair: tuple[str, str]) -> bool:
        check, part = pair
        return clean([tool, f"--tool={check}", f"--error-exitcode={FINDINGS}", *command], check, part, options.seconds)

    pairs = [(check, part) for check in options.checks for part in parts]
    with ThreadPoolExecutor(options.workers) as pool:
        found = list(pool.map(checked, pairs))
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
