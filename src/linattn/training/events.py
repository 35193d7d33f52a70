"""What a training reports while it runs, and the file in which it is remembered."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from linattn.evaluation import Evaluation

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Step:
    """One step of the optimizer.

    Attributes:
        step: Steps done, this one included.
        tokens: Tokens trained on so far.
        loss: Cross entropy of the step's batch, nats per token.
        bits_per_byte: The same in bits per byte of text.
        learning_rate: The step's.
        gradient_norm: Before clipping.
        tokens_per_second: Of the latest steps.
        elapsed: Seconds of training, those before an interruption included.
        seconds_left: Seconds to go, as far as can be told.
        progress: Part of the training done, 0 to 1.
    """

    step: int
    tokens: int
    loss: float
    bits_per_byte: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    elapsed: float
    seconds_left: float
    progress: float


@dataclass(frozen=True)
class Evaluated:
    """The model after ``step`` steps predicted the validation text."""

    step: int
    evaluation: Evaluation


@dataclass(frozen=True)
class Saved:
    """The checkpoint of ``step`` is on the disk."""

    step: int
    folder: Path


@dataclass(frozen=True)
class Interrupted:
    """Ctrl-C came: the training stopped after ``step``, saved, and ``Trainer.resume(run)`` continues it exactly."""

    step: int
    folder: Path
    run: Path


@dataclass(frozen=True)
class Finished:
    """The training is complete; the last evaluation and checkpoint."""

    step: int
    folder: Path
    evaluation: Evaluation


Event = Step | Evaluated | Saved | Interrupted | Finished


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, or of the one in a run folder, oldest first.

    Each has "event": "step" with the attributes of ``Step``, or "evaluation" with "step" and those of ``Evaluation``.
    A last line that was cut off is left out. Raises ValueError naming the file if it is missing or something else.
    """
    file = Path(path) / METRICS if Path(path).is_dir() else Path(path)
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


class MetricsFile:
    """Appends steps and evaluations to the metrics file of a run."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, event: Event) -> None:
        """One line; other events are not written."""
        if isinstance(event, Step):
            line: dict[str, Any] = {"event": "step", **asdict(event)}
        elif isinstance(event, Evaluated):
            line = {"event": "evaluation", "step": event.step, **asdict(event.evaluation)}
        else:
            return
        self._stream.write(json.dumps(line) + "\n")


@contextmanager
def metrics_file(run: Path, step: int) -> Iterator[MetricsFile]:
    """The metrics file of a run that stands at ``step``: what a lost continuation had written after it is dropped.

    Raises ValueError if the disk refuses.
    """
    file, staging = run / METRICS, run / f".{METRICS}.new"
    try:
        run.mkdir(parents=True, exist_ok=True)
        known = read_metrics(file) if file.exists() and step else []
        staging.write_text("".join(json.dumps(line) + "\n" for line in known if line["step"] <= step), encoding="utf-8")
        os.replace(staging, file)
        with file.open("a", encoding="utf-8", buffering=1) as stream:
            yield MetricsFile(stream)
    except OSError as error:
        raise ValueError(f"{file}: cannot write: {error.strerror or error}; checkpoints are untouched") from error
