"""`python -m linattn.benchmark`: the CPU benchmark. Prints its tables and writes them to benchmarks/results/."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from linattn import registry
from linattn.benchmark.compare import compare
from linattn.benchmark.cpu import ERROR_TOKENS, KindRow, measure_kinds
from linattn.benchmark.measure import machine
from linattn.benchmark.report import notes, table, write_csv


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m linattn.benchmark", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="length of the sequences (default 4096)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that medians are taken of (default 7)")
    parser.add_argument("--threads", type=int, help="threads that torch may use (default: its own choice)")
    parser.add_argument("--budget", type=float, default=120, help="seconds for the table of mechanisms (default 120)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the CSV files")
    options = parser.parse_args(argv)
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print("the benchmark's tables need the package 'rich': pip install 'linattn[cli]'", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 110)
    if options.threads:
        torch.set_num_threads(options.threads)
    here = machine()
    console.print(f"{here}\n", highlight=False)
    kinds = measure_kinds(tokens=options.tokens, rounds=options.rounds)
    console.print(
        f"Batch 1, {kinds[0].heads} heads, T={options.tokens}, float32. 'vs softmax': how many times faster than "
        f"causal scaled_dot_product_attention in the same run. 'of GEMM': operations of the plain recurrence a second, "
        f"beside the {kinds[0].gemm_gflops:.0f} GFLOP/s of a matrix product here. Errors over {ERROR_TOKENS} tokens.\n",
        highlight=False,
    )
    console.print(_kinds_table(kinds))
    rows = list(compare(registry.names(), (min(1024, options.tokens), options.tokens), heads=8, budget=options.budget))
    console.print("\nEvery mechanism, 8 heads of 64×64:\n", highlight=False)
    console.print(table(rows))
    for note in notes(rows):
        console.print(note, highlight=False)
    for name, written in ((f"{here.slug}.csv", kinds), (f"{here.slug}-mechanisms.csv", rows)):
        write_csv(options.out / name, written, here)
        console.print(f"written: {options.out / name}", highlight=False, soft_wrap=True)
    return 0


def _kinds_table(rows: list[KindRow]) -> object:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("decay")
    for title in ("K = V", "forward\nms", "vs softmax", "fwd + bwd\nms", "vs softmax", "fwd + bwd\nover fwd", "chunked\nover fwd", "chunked over\nfwd + bwd", "of GEMM", "error"):  # fmt: skip  # noqa: E501
        shown.add_column(title, justify="right")
    for row in rows:
        shown.add_row(
            row.kind,
            str(row.key_size),
            f"{row.forward_ms:.1f}",
            f"{row.forward_ratio:.1f}×",
            f"{row.training_ms:.1f}",
            f"{row.training_ratio:.1f}×",
            f"{row.training_over_forward:.1f}",
            f"{row.chunked_forward_ms / row.forward_ms:.1f}×",
            f"{row.chunked_training_ms / row.training_ms:.1f}×",
            f"{row.of_gemm:.0%}",
            f"{row.error:.0e}",
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
