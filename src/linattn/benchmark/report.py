"""A comparison written down: CSV, JSON and a picture."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linattn import registry
from linattn.benchmark.compare import Row
from linattn.benchmark.contest import Line
from linattn.benchmark.measure import Machine
from linattn.training import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table


def write_csv(file: str | Path, rows: Sequence[Any], machine: Machine) -> None:
    """Write dataclasses of one kind, a line each, the machine's columns at the end. Replaces the file at once.

    Raises ValueError if it cannot be written.
    """
    records = [{**asdict(row), **asdict(machine)} for row in rows]
    names = list(dict.fromkeys(name for record in records for name in record))
    file = Path(file)
    staging = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with staging.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, names)
            writer.writeheader()
            writer.writerows({name: _short(value) for name, value in record.items()} for record in records)
        staging.replace(file)
    except OSError as error:
        raise ValueError(f"{file}: cannot write: {error.strerror or error}") from error


def write_json(file: str | Path, rows: Sequence[Any], machine: Machine) -> None:
    """Write ``{"machine": {...}, "rows": [...]}``. Raises ValueError if it cannot be written."""
    value = {"machine": asdict(machine), "rows": [asdict(row) for row in rows]}
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file}: cannot write: {error.strerror or error}") from error


def picture(file: str | Path, rows: Sequence[Row], machine: Machine) -> None:
    """Draw time, memory, time per token and bytes of state over the number of tokens, as PNG.

    Raises:
        ValueError: no rows, or the file cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if not rows:
        raise ValueError("rows: got none, wanted at least one")
    figure = _figure(11, 8)
    panels = figure.subplots(2, 2)
    first = rows[0]
    _panel(panels[0, 0], rows, "Training: forward + backward", "ms", "training_ms")
    _panel(panels[0, 1], rows, "Training: peak memory beyond the inputs", "MB", "training_bytes", 1e-6)
    _panel(panels[1, 0], rows, "Generation: one more token", "µs", "token_us")
    _panel(panels[1, 1], rows, "Generation: KV cache or state", "MB", "state_bytes", 1e-6)
    panels[0, 0].legend(loc="upper left")  # where no curve passes
    figure.suptitle(
        f"batch {first.batch}, {first.heads} heads of {first.key_size}×{first.value_size}, {first.dtype}, "
        f"{first.device}\n{machine}",
        fontsize="small",
    )
    _save(figure, file)


def loss_picture(file: str | Path, runs: Mapping[str, Path]) -> None:
    """Draw bits per byte over the tokens trained on, a line a run folder, as PNG; errors as in :func:`picture`."""
    figure = _figure(8, 4.5)
    axes = figure.add_subplot()
    for name, run in runs.items():
        lines = [line for line in read_metrics(run) if line["event"] == "step"]
        bits = [line["bits_per_byte"] for line in lines]
        smooth = [sum(bits[max(0, i - 9) : i + 1]) / min(10, i + 1) for i in range(len(bits))]
        axes.plot([line["tokens"] for line in lines], smooth, label=name, linewidth=1.2)
    axes.set(xlabel="tokens", ylabel="training bits per byte, mean of 10 steps")
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, file)


def table(rows: Sequence[Row]) -> Table:
    """The comparison for a terminal. Raises ModuleNotFoundError if rich is not installed."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    shown.add_column("")
    for title in "forward", "forward +\nbackward", "memory", "with\nbackward", "next\ntoken", "cache /\nstate", "error":
        shown.add_column(title, justify="right", no_wrap=True)
    before = None
    for row in rows:
        if row.tokens != before:
            shown.add_row(f"N = {row.tokens:,}", style="bold")
            before = row.tokens
        shown.add_row(
            row.mechanism,
            *(_cell(value, "{:.1f} ms") for value in (row.forward_ms, row.training_ms)),
            *(size(value) for value in (row.forward_bytes, row.training_bytes)),
            _cell(row.token_us, "{:.0f} µs"),
            size(row.state_bytes),
            f"{row.error:.0e}",
            style="yellow" if registry.get(row.mechanism).recurrence is None else None,
        )
    return shown


LINES = f"{'':34} {'beside':18} {'ours':>9} {'theirs':>9} {'ratio':>8} {'target':>8} {'error':>8} {'theirs':>8}"
"""The head of what :func:`line` prints."""


def line(line: Line) -> str:
    """A pair of a contest, as text for a terminal."""
    theirs = _cell(line.theirs, "{:.4g}") if line.theirs is not None else f"– {line.note}"
    shown = f"{line.work:34} {line.peer:18} {_cell(line.ours, '{:.4g}'):>9} {theirs:>9}"
    if line.ratio is not None:
        target = f"≥ {line.target:g}×" if line.target else ""
        errors = (_cell(error, "{:.0e}") for error in (line.error, line.peer_error))
        shown += f" {f'{line.ratio:.3g}×':>8} {target:>8} {' '.join(f'{error:>8}' for error in errors)}"
    return shown


def notes(rows: Sequence[Row]) -> list[str]:
    """Why cells are empty, a line a reason."""
    found: dict[str, dict[int, list[str]]] = {}
    for row in rows:
        if row.note:
            found.setdefault(row.note, {}).setdefault(row.tokens, []).append(row.mechanism)
    return [
        "; ".join(f"N = {tokens:,}, {', '.join(names)}" for tokens, names in places.items()) + f": {note}"
        for note, places in found.items()
    ]


def size(count: float | None) -> str:
    """Bytes for people: 65536 is 65.5 kB."""
    if count is None:
        return "–"
    power = 0
    while count >= 999.5 and power < 4:
        count, power = count / 1000, power + 1
    return f"{count:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the picture needs the package 'matplotlib' (pip install 'linattn[cli]')") from error
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, file: str | Path) -> None:
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=150, format="png")
    except OSError as error:
        raise ValueError(f"{file}: cannot write: {error.strerror or error}") from error


def _panel(axes: Axes, rows: Sequence[Row], title: str, unit: str, quantity: str, factor: float = 1.0) -> None:
    assert quantity in {field.name for field in fields(Row)}
    for name in dict.fromkeys(row.mechanism for row in rows):
        mechanism = registry.get(name)
        points = [
            (row.tokens, factor * value)
            for row in rows
            if row.mechanism == name and (value := getattr(row, quantity)) is not None
        ]
        softmax = mechanism.recurrence is None
        axes.plot(
            [n for n, _ in points],
            [value for _, value in points],
            "o--" if softmax else "o-",
            color="black" if softmax else None,
            markersize=4,
            label=mechanism.title,
        )
    lengths = sorted({row.tokens for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter("")
    axes.set(title=title, xlabel="tokens N", ylabel=unit)
    axes.grid(alpha=0.3, which="both")


def _short(value: object) -> object:
    """Four digits are more than a timing is good for."""
    return f"{value:.4g}" if isinstance(value, float) else value
