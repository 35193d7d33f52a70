"""`linattn compare`: mechanisms side by side, measured here and now."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.live import Live
from rich.table import Table

from linattn import registry
from linattn.benchmark import Row, compare, machine, report
from linattn.cli.command import INTERRUPTED, Command, new_folder, present
from linattn.cli.output import Output
from linattn.cli.progress import watch
from linattn.cli.train import begin
from linattn.models import ModelConfig, count_parameters
from linattn.training import Interrupted, TrainConfig, load_corpus

SHOWN = ("softmax_attention", "linear_attention", "gated_linear_attention", "gated_delta_rule")


@dataclass(frozen=True, kw_only=True)
class Compare(Command):
    """Measure mechanisms side by side for growing numbers of tokens N: time, memory, time per generated token, bytes of
    KV cache or state, error. Writes compare.csv, compare.json and compare.png; with --train also losses.
    """

    mechanisms: Annotated[tuple[str, ...], tyro.conf.Positional] = SHOWN
    """Names or aliases."""
    tokens: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    """The lengths N."""
    heads: int = 4
    """Heads."""
    head_size: int = 64
    """Size of keys and values, a head."""
    batch: int = 1
    """Sequences."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the inputs."""
    device: str = "cpu"
    """Where to measure."""
    budget: float = 60.0
    """Seconds for the table; what would not fit is left out and the output says so."""
    train: int = 0
    """Also train a small language model with each mechanism for this many steps: same text, same batches."""
    data: str | None = None
    """Text to train on, as in linattn train."""
    seed: int = 0
    """Of the inputs and of the trainings."""
    out: Path | None = None
    """Folder for the results, which must be new; by default runs/compare, numbered."""

    def run(self, output: Output) -> int:
        if self.train < 0:
            raise ValueError(f"train: got {self.train}, wanted a number of steps, or 0 for no training")
        folder = new_folder(self.out, Path("runs/compare"))
        names = list(dict.fromkeys(registry.get(name).name for name in self.mechanisms))
        corpus = load_corpus(self.data) if self.train else None
        rows = measure(
            names, self.tokens, folder, output,
            batch=self.batch, heads=self.heads, key_size=self.head_size, dtype=getattr(torch, self.dtype),
            device=present(self.device), seed=self.seed, budget=self.budget,
        )  # fmt: skip
        result = {"machine": asdict(machine(self.device)), "rows": [asdict(row) for row in rows], "folder": folder}
        if corpus is not None:
            learned: list[dict[str, object]] = []
            for name in names:
                output.say(f"\nTraining {name} …")
                config = TrainConfig(steps=self.train, seed=self.seed, device=self.device, checkpoint_every=0)
                model = ModelConfig(d_model=128, num_layers=2, pattern=name)
                trainer = begin(corpus, model, config, folder / name)
                end = watch(trainer.run(), output.quietly())
                if isinstance(end, Interrupted):
                    return INTERRUPTED
                learned.append(
                    {
                        "mechanism": name,
                        "parameters": count_parameters(trainer.model),
                        "steps": end.step,
                        "tokens_per_second": trainer.tokens / trainer.elapsed,
                        **asdict(end.evaluation),
                    }
                )
            output.say("")
            output.say(_losses(learned))
            report.loss_picture(folder / "losses.png", {name: folder / name for name in names})
            output.say(f"\nwritten: {folder / 'losses.png'}")
            result["training"] = learned
        output.emit(result)
        return 0


def measure(names: Sequence[str], tokens: Sequence[int], folder: Path, output: Output, **sizes: Any) -> list[Row]:
    """Measure, show the table as it grows and write it; ``sizes`` as in :func:`linattn.benchmark.compare`."""
    here, rows, measured = machine(sizes["device"]), [], compare(names, tokens, **sizes)
    dtype = str(sizes["dtype"]).removeprefix("torch.")
    output.say(f"{here}. Batch {sizes['batch']}, {sizes['heads']} heads of {sizes['key_size']}, {dtype}.\n")
    with Live(console=output.console, auto_refresh=False) if output.live else nullcontext() as live:
        for row in measured:
            rows.append(row)
            if live is not None:
                live.update(report.table(rows), refresh=True)
    if not output.live:
        output.say(report.table(rows))
    for note in report.notes(rows):
        output.say(note, style="dim")
    report.write_csv(folder / "compare.csv", rows, here)
    report.write_json(folder / "compare.json", rows, here)
    try:
        report.picture(folder / "compare.png", rows, here)
    except ModuleNotFoundError as error:
        output.aside(f"linattn: no picture: {error}")
    output.say("\nwritten: " + ", ".join(str(file) for file in sorted(folder.glob("compare.*"))))
    return rows


def _losses(learned: Sequence[dict[str, Any]]) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    shown.add_column("")
    for title in ("parameters", "steps", "tokens/s", "validation\nbits per byte"):
        shown.add_column(title, justify="right")
    for row in sorted(learned, key=lambda row: row["bits_per_byte"]):
        numbers = (f"{row['parameters']:,}", str(row["steps"]), f"{row['tokens_per_second']:,.0f}")
        shown.add_row(row["mechanism"], *numbers, f"{row['bits_per_byte']:.3f}")
    return shown
