"""`python -m linattn.benchmark`: the CPU benchmark. Prints its tables and writes them to benchmarks/results/."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from linattn import registry
from linattn.benchmark import kernels, models, report
from linattn.benchmark.compare import compare
from linattn.benchmark.contest import Contest, Line, hold
from linattn.benchmark.measure import Conditions, machine
from linattn.benchmark.peers import versions

TRAINED = ("gated_linear_attention", "mamba2", "gated_delta_rule")
OF_MECHANISMS = 0.3
"""Part of the budget that the table of mechanisms may take."""


def contests(tokens: int) -> Iterator[Contest]:
    """All of them, the recurrences over ``tokens`` tokens."""
    yield from kernels.recurrences(64, tokens=tokens)
    yield from kernels.recurrences(128, tokens=tokens)
    yield from kernels.recurrences(64, tokens=tokens, training=True)
    yield kernels.selective()
    yield kernels.layer()
    yield from models.mamba()
    yield from models.rwkv7()
    for mechanism in TRAINED:
        yield models.training(mechanism)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m linattn.benchmark", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="length of the recurrences' sequences (default 4096)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that medians are taken of (default 7)")
    parser.add_argument("--threads", type=int, help="threads that torch may use (default: its own choice)")
    parser.add_argument(
        "--budget", type=float, default=330, help="seconds for everything; what they leave out is named (default 330)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="contests in whose name one of the words is; nothing is written"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the CSV files")
    options = parser.parse_args(argv)
    for name in ("tokens", "rounds", "threads", "budget"):
        if (value := getattr(options, name)) is not None and not value > 0:
            parser.error(f"argument --{name}: got {value:g}, wanted a positive number")
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print("the benchmark's tables need the package 'rich': pip install 'linattn[cli]'", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    if options.threads:
        torch.set_num_threads(options.threads)
    end = time.perf_counter() + options.budget
    here = Conditions.of(machine(), ", ".join(f"{name} {version or '–'}" for name, version in versions().items()))
    console.print(str(here))
    rows = []
    if not options.only:
        budget = OF_MECHANISMS * options.budget
        rows = list(compare(registry.names(), (min(1024, options.tokens), options.tokens), heads=8, budget=budget))
        console.print("\nEvery mechanism, 8 heads of 64×64:\n")
        console.print(report.table(rows))
        for note in report.notes(rows):
            console.print(note)
    console.print(
        "\nOurs beside peers, in turn in every round; 'ratio': how many times faster ours is. 'matrix product' and "
        "'read bandwidth': as many operations or bytes at the machine's rate. Errors are relative, against float64."
    )
    chosen = (c for c in contests(options.tokens) if _named(c, options.only))
    lines: list[Line] = []
    for held in hold(chosen, budget=max(end - time.perf_counter(), 1e-9), rounds=options.rounds):
        for line in held:
            if not lines or lines[-1].title != line.title:
                console.print(f"\n{line.title}, {line.rate}\n{report.LINES}", style="bold")
            lines.append(line)
            console.print(report.line(line), soft_wrap=True)
    for name, written in ((f"{here.slug}-peers.csv", lines), (f"{here.slug}-mechanisms.csv", rows)):
        if not options.only:
            report.write_csv(options.out / name, written, here)
            console.print(f"written: {options.out / name}", soft_wrap=True)
    return 0


def _named(contest: Contest, words: list[str] | None) -> bool:
    return not words or any(word in f"{contest.title}, {contest.work}" for word in words)


if __name__ == "__main__":
    sys.exit(main())
