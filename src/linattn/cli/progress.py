"""A training as it happens: redrawn on a terminal, a line now and then elsewhere, JSON lines for machines."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict
from time import monotonic

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from linattn.cli.output import Output
from linattn.training import Evaluated, Event, Finished, Interrupted, Saved, Step

REDRAW_SECONDS, LINE_SECONDS = 0.1, 5.0


def watch(events: Iterable[Event], output: Output) -> Finished | Interrupted:
    """Show the events of a training; return the last."""
    last: Event | None = None
    step: Step | None = None
    validation, shown = "", float("-inf")
    with Live(console=output.console, auto_refresh=False) if output.live else nullcontext() as live:
        for event in events:
            last = event
            output.emit(_record(event))
            if isinstance(event, Step):
                step = event
            elif isinstance(event, Evaluated):
                bits = event.evaluation.bits_per_byte
                validation = f"validation after step {event.step:,}: {bits:.3f} bits per byte"
            if isinstance(event, Step) and monotonic() - shown < (REDRAW_SECONDS if live else LINE_SECONDS):
                continue
            shown = monotonic()
            if live is not None and step is not None:
                live.update(_panel(step, validation), refresh=True)
            elif isinstance(event, Step):
                output.say(_line(event))
            elif isinstance(event, Evaluated):
                output.say(validation)
    assert isinstance(last, Finished | Interrupted)
    return last


def _record(event: Event) -> dict[str, object]:
    """A line of JSON, in the words of the metrics file."""
    if isinstance(event, Evaluated):
        return {"event": "evaluation", "step": event.step, **asdict(event.evaluation)}
    name = {Step: "step", Saved: "saved", Interrupted: "interrupted", Finished: "finished"}[type(event)]
    return {"event": name, **asdict(event)}


def _panel(step: Step, validation: str) -> Table:
    shown = Table.grid(padding=(0, 2))
    shown.add_row(ProgressBar(total=1.0, completed=step.progress, width=30), Text(f"{_clock(step.seconds_left)} left"))
    outer = Table.grid()
    outer.add_row(shown)
    outer.add_row(Text(_numbers(step)))
    outer.add_row(Text(validation, style="bold"))
    return outer


def _line(step: Step) -> str:
    return f"{step.progress:4.0%}  {_numbers(step)}  {_clock(step.seconds_left)} left"


def _numbers(step: Step) -> str:
    return (
        f"step {step.step:,}  loss {step.loss:.3f}  {step.bits_per_byte:.3f} bits per byte  "
        f"{step.tokens_per_second:,.0f} tokens/s"
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
