"""How things are measured: medians of repeated runs, the peak of what torch allocates, the largest relative error."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import profiler

from linattn._version import __version__


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call, and how many calls it is the median of."""

    seconds: float
    runs: int


def timed(call: Callable[[], object], *, seconds: float, max_runs: int = 15, warm: bool = False) -> Timing:
    """Call repeatedly for about ``seconds``, at least once; the median. ``warm`` False calls once more, unmeasured."""
    if not warm:
        call()
    times: list[float] = []
    begin = time.perf_counter()
    while not times or (len(times) < max_runs and time.perf_counter() - begin < seconds):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    return Timing(statistics.median(times), len(times))


def synchronize() -> None:
    """Wait for the accelerator, if one has been used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that torch's tensors occupy at the peak of a call, beyond those that lived before it.

    On CUDA the allocator's own count; elsewhere the running sum of every allocation that torch's profiler reports,
    temporaries inside operators included. What a library such as MKL allocates for itself is in neither.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler otherwise reports its own start and stop on stderr
    with profiler.profile(profile_memory=True) as profile:
        call()
    assert profile.kineto_results is not None
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def reading() -> tuple[Callable[[], Tensor], int]:
    """A call that reads from memory with all threads, far more than a cache holds, and the bytes that it reads."""
    numbers = torch.ones(8192, 8192)
    return lambda: numbers.sum(1), 4 * numbers.numel()


def multiplying(size: int = 1024) -> tuple[Callable[[], Tensor], int]:
    """A call that multiplies float32 matrices, and its additions and multiplications."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return lambda: a @ b, 2 * size**3


def relative_error(value: Tensor, truth: Tensor) -> float:
    """max |value − truth| / max |truth|."""
    return float((value.double() - truth.double()).abs().max() / truth.double().abs().max())


@dataclass(frozen=True)
class Machine:
    """Where numbers were measured."""

    processor: str
    cores: int
    threads: int
    torch: str
    python: str
    linattn: str

    @property
    def slug(self) -> str:
        """A file name."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.processor} {self.threads} threads".lower()).strip("-")

    def __str__(self) -> str:
        return (
            f"{self.processor}, {self.cores} cores, {self.threads} threads, torch {self.torch}, "
            f"Python {self.python}, linattn {self.linattn}"
        )


@dataclass(frozen=True)
class Conditions(Machine):
    """A machine, how fast it multiplied float32 matrices and read memory on that day, and what else is installed."""

    gemm_gflops: float
    read_gb_s: float
    packages: str

    @classmethod
    def of(cls, machine: Machine, packages: str) -> Conditions:
        """As they are now."""
        gemm, read = (
            1e-9 * amount / timed(call, seconds=0.5, max_runs=25).seconds for call, amount in (multiplying(), reading())
        )
        return cls(**vars(machine), gemm_gflops=gemm, read_gb_s=read, packages=packages)

    def __str__(self) -> str:
        rates = f"{self.gemm_gflops:.0f} GFLOP/s multiplying float32 matrices, {self.read_gb_s:.1f} GB/s reading memory"
        return f"{super().__str__()}\n{rates}; {self.packages}"


def machine(device: str | torch.device = "cpu") -> Machine:
    """This machine: its GPU if ``device`` is one, otherwise its CPU."""
    device = torch.device(device)
    return Machine(
        torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        torch.get_num_threads(),
        torch.__version__,
        platform.python_version(),
        __version__,
    )


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
