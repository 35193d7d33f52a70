"""Measured comparisons: time, memory and error of any mechanisms on this machine."""

from linattn.benchmark.compare import Row, compare
from linattn.benchmark.inputs import draw
from linattn.benchmark.measure import Machine, machine, peak_memory, relative_error, timed
from linattn.benchmark.report import picture, write_csv, write_json

__all__ = [
    "Machine",
    "Row",
    "compare",
    "draw",
    "machine",
    "peak_memory",
    "picture",
    "relative_error",
    "timed",
    "write_csv",
    "write_json",
]
