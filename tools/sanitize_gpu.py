"""Run a small case of every GPU kernel under compute-sanitizer: memcheck, then racecheck. Without the tool: nothing.

Everything is compiled before, side by side, so that the tool sees hardly anything but kernels.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from glob import glob

import torch

from linattn import testing
from linattn.backends._protocol import Request
from linattn.engine import BACKENDS
from linattn.testing import Case, Form, Sizes

PLACES = ("/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer", "/opt/nvidia/*", "/opt/nvidia/*/*")
FORM = Form("triton", "chunkwise")
SMALL = Sizes(B=1, T=67, G=1, H=2, K=16, V=8)  # those of the laws, which have compiled them


def cases() -> Iterator[tuple[Case, bool]]:
    """Every kind of decay and of reading; and whether rows are to be split."""
    for subject in testing.recurrences():
        assert subject.recurrence is not None
        if BACKENDS["triton"].unsuited(Request(torch.device("cuda"), torch.float32, None, subject.recurrence)):
            continue
        for dtype in (torch.float32, torch.bfloat16):
            for gates in ("ordinary", "mixed") if subject.gated else ("ordinary",):
                yield Case(subject, SMALL, dtype, gates, device="cuda"), False
            yield Case(subject, Sizes(B=2, T=1, G=1, H=2, K=20, V=60), dtype, device="cuda"), False
        yield Case(subject, SMALL, lengths=(3, 0, 1, 66), device="cuda"), False
        yield Case(subject, Sizes(B=1, T=200, G=1, H=1, K=16, V=8), device="cuda"), True


def work(part: int, parts: int) -> None:
    """Output and gradients of every ``parts``-th case from ``part``."""
    from linattn.backends.triton import launch

    shortest, processors = launch.SHORTEST, launch._processors
    for case, split in list(cases())[part::parts]:
        launch.SHORTEST = 64 if split else shortest
        launch._processors = (lambda device: 132) if split else processors  # type: ignore[assignment]
        testing.evaluate(case, testing.call(case, FORM, case.cu_seqlens), case.tensors(), case.state())
    torch.cuda.synchronize()


def sanitizer() -> str | None:
    """Where compute-sanitizer lies."""
    name = "compute-sanitizer"
    return shutil.which(name) or next((path for place in PLACES for path in sorted(glob(f"{place}/{name}"))), None)


def clean(tool: str, check: str, command: list[str], seconds: float) -> bool:
    """Whether a check finds nothing; prints what it says."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that each tensor has bounds of its own
    command = [tool, f"--tool={check}", "--error-exitcode=1", *command, "0/1"]
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"{check}: not ready within {seconds:.0f} s")
        return False
    said = [line for line in (run.stdout + run.stderr).splitlines() if line.startswith("=====")]
    print(f"{check}: exit code {run.returncode}", *said[:40], *said[40:][-1:], sep="\n")
    if run.returncode and len(said) < 3:
        print(run.stderr[-2000:])
    return run.returncode == 0


def main() -> int:
    """Compile, then check; 1 if a check finds something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", help="i/n: run every n-th case from the i-th, and nothing else")
    parser.add_argument("--checks", nargs="+", default=["memcheck", "racecheck"], help="tools of compute-sanitizer")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile (default 8)")
    parser.add_argument("--seconds", type=float, default=300, help="a check's time (default 300)")
    options = parser.parse_args()
    if options.work:
        part, parts = map(int, options.work.split("/"))
        work(part, parts)
        return 0
    tool = sanitizer()
    if tool is None or not torch.cuda.is_available():
        print("no compute-sanitizer or no GPU here: left out")
        return 0
    command = [sys.executable, "-W", "ignore", __file__, "--work"]
    processes = [subprocess.Popen([*command, f"{i}/{options.workers}"]) for i in range(options.workers)]
    codes = [process.wait() for process in processes]
    if any(codes):
        return 1
    found = [check for check in options.checks if not clean(tool, check, command, options.seconds)]
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
