"""`linattn demo`: the whole library in a few minutes: train, generate, compare."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.rule import Rule

from linattn.checkpoints import load, load_tokenizer
from linattn.cli.command import Command, new_folder
from linattn.cli.compare import SHOWN, measure
from linattn.cli.generate import continue_text
from linattn.cli.output import Output
from linattn.cli.train import announce, begin, train
from linattn.engine import explain
from linattn.models import ModelConfig
from linattn.training import TrainConfig, load_corpus

PROMPT = "def "
MIXERS = ("gated_delta_rule", "gated_linear_attention")


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Train a small byte-level language model, let it write, and measure linear against softmax attention.

    About three minutes on two CPU cores.
    """

    mechanism: str = "auto"
    """The mixer of every layer; auto: the gated delta rule, or gated linear attention where only that has kernels."""
    minutes: float = 1.0
    """Minutes to train."""
    max_tokens: int = 600
    """Tokens to generate."""
    budget: float = 60.0
    """Seconds for the comparison."""
    data: str | None = None
    """Text to train on; by default the source of Python's standard library."""
    out: Path | None = None
    """Folder for everything, which must be new; by default runs/demo, numbered."""

    def run(self, output: Output) -> int:
        folder = new_folder(self.out, Path("runs/demo"))
        config = TrainConfig(minutes=self.minutes, batch_size=4, sequence_length=256)
        pattern = compiled(config.torch_device()) if self.mechanism == "auto" else self.mechanism
        model = ModelConfig(pattern=pattern, d_model=128)
        heading(output, "1. Train")
        output.say(
            "A language model that reads and writes bytes. Instead of attending to all earlier tokens, every layer "
            "keeps a state of fixed size and updates it with each token.\n"
        )
        trainer = begin(load_corpus(self.data), model, config, folder)
        announce(trainer, output)
        code = train(trainer, output)
        if code:
            return code
        heading(output, "2. Generate")
        output.say(
            "The checkpoint, read back, continues a prompt. Each token costs the same however long the text has grown, "
            "because only the state is kept.\n"
        )
        if not output.as_json:
            output.console.print(PROMPT, end="", style="bold")
        code = continue_text(
            load(folder, device=trainer.device), load_tokenizer(folder), PROMPT, output,
            max_tokens=self.max_tokens, temperature=1.0, top_p=0.95, top_k=0, seed=0,
        )  # fmt: skip
        if code:
            return code
        heading(output, "3. Compare")
        output.say(
            "The attention alone, measured on this machine. Softmax attention's time grows as N² and its cache as N, a "
            "linear attention's time as N and its state not at all. (Memory in training grows as N for both: torch's "
            "softmax never stores its N×N matrix.)\n"
        )
        rows = measure(
            SHOWN, (512, 1024, 2048, 4096, 8192, 16384), folder, output,
            batch=1, heads=4, key_size=64, dtype=torch.float32, device=trainer.device, budget=self.budget,
        )  # fmt: skip
        output.emit({"event": "compared", "rows": [asdict(row) for row in rows], "folder": folder})
        output.say(f"\nEverything is in {folder}. Try next:")
        output.say(f'  linattn generate {folder} --prompt "class "\n  linattn list\n  linattn train --help')
        return 0


def compiled(device: torch.device) -> str:
    """The first of MIXERS that a backend of compiled kernels serves on a device; the first where none does."""
    return next((name for name in MIXERS if explain(name, device=device).backend != "chunked"), MIXERS[0])


def heading(output: Output, title: str) -> None:
    """Begin a part."""
    output.say("")
    output.say(Rule(title, align="left"))
    output.say("")
