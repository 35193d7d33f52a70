"""`linattn train`: train a language model on text."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from linattn import registry
from linattn.checkpoints import HuggingFaceTokenizer
from linattn.cli.command import INTERRUPTED, Command, new_folder
from linattn.cli.output import Output
from linattn.cli.progress import watch
from linattn.engine import explain
from linattn.models import LanguageModel, ModelConfig, count_parameters, parse_pattern, preset
from linattn.training import Corpus, Interrupted, TrainConfig, Trainer, load_corpus, plot_loss

SIZES = ("mechanism", "pattern", "d_model", "num_layers", "num_heads")  # options that a preset answers
KEPT = {"json", "threads", "resume", "device"}  # options that a resumed training may be given anew


@dataclass(frozen=True, kw_only=True)
class Train(TrainConfig, Command):
    """Train a language model. How long: one of --steps, --tokens and --minutes.

    The run folder receives metrics.jsonl, loss.png and checkpoints. Ctrl-C saves and says how to resume.
    """

    mechanism: str | None = None
    """The mixer of every layer (linattn list shows them); gated_delta_rule if neither this nor --pattern is given."""
    pattern: str | None = None
    """Mixers of the layers in turn, such as "3*gated_delta_rule,softmax_attention"."""
    d_model: int = 256
    """Width of the model."""
    num_layers: int = 4
    """Number of layers."""
    num_heads: int | None = None
    """Heads of every mixer; by default each mechanism's own choice."""
    preset: str | None = None
    """A published size, such as gla-340m or mamba2-370m, instead of the options above; the vocabulary is the text's."""
    data: str | None = None
    """A file, a folder or a glob pattern of UTF-8 text; by default the source of Python's standard library."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer.json; by default bytes."""
    out: Path | None = None
    """The run folder, which must be new; by default runs/ and the pattern, numbered."""
    resume: Path | None = None
    """Go on with the training of this run folder, with its own settings."""

    def __post_init__(self) -> None:
        """Checked when the training begins: a resumed one has its own settings."""

    def run(self, output: Output) -> int:
        trainer = self._begin() if self.resume is None else self._resume(self.resume)
        announce(trainer, output)
        return train(trainer, output)

    def _begin(self) -> Trainer:
        config = TrainConfig(**{field.name: getattr(self, field.name) for field in fields(TrainConfig)})
        model = self._model()
        name = self.preset or model.pattern
        run = new_folder(self.out, Path("runs") / re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-"))
        tokenizer = HuggingFaceTokenizer(self.tokenizer) if self.tokenizer else None
        return begin(load_corpus(self.data, tokenizer=tokenizer), model, config, run)

    def _model(self) -> ModelConfig:
        if self.preset is not None:
            given = self._given(SIZES)
            if given:
                raise ValueError(f"preset: {self.preset} has its own sizes, got {given} beside it")
            return preset(self.preset)
        if self.mechanism is not None and self.pattern is not None:
            raise ValueError("mechanism, pattern: got both, wanted one of them")
        pattern = registry.get(self.mechanism).name if self.mechanism else self.pattern or "gated_delta_rule"
        mechanisms = parse_pattern(pattern, self.num_layers)
        heads = {} if self.num_heads is None else {name: {"num_heads": self.num_heads} for name in mechanisms}
        return ModelConfig(d_model=self.d_model, num_layers=self.num_layers, pattern=pattern, mixers=heads)

    def _given(self, names: Collection[str]) -> str:
        """Those of the options that do not have their default value."""
        default = {field.name: field.default for field in fields(self) if field.name in names}
        given = [name for name, value in default.items() if getattr(self, name) != value]
        return ", ".join(f"--{name.replace('_', '-')}" for name in given)

    def _resume(self, run: Path) -> Trainer:
        given = self._given({field.name for field in fields(self)} - KEPT)
        if given:
            raise ValueError(f"resume: the run {run} has its own settings, got {given} beside it")
        return Trainer.resume(run, device=None if self.device == "auto" else self.device)


def begin(corpus: Corpus, model: ModelConfig, config: TrainConfig, run: Path) -> Trainer:
    """A new training: fit the vocabulary to the tokenizer and initialise the model from the seed."""
    described = ModelConfig.from_dict({**model.to_dict(), "vocab_size": corpus.tokenizer.vocab_size})
    torch.manual_seed(config.seed)
    return Trainer(LanguageModel(described), corpus, config, run)


def announce(trainer: Trainer, output: Output) -> None:
    """Say what is about to be trained on what."""
    model, corpus = trainer.model, trainer.corpus
    parameters = count_parameters(model)
    output.emit(
        {
            "event": "begin",
            "run": trainer.folder,
            "step": trainer.step,
            "parameters": parameters,
            "model": model.config.to_dict(),
            "config": asdict(trainer.config),
            "data": corpus.source,
            "training_bytes": corpus.training.bytes,
            "validation_bytes": corpus.validation.bytes,
        }
    )
    output.say(
        f"{model.config.pattern}, {model.config.num_layers} layers of width {model.config.d_model}: "
        f"{parameters / 1e6:.2f} million parameters. Text: {corpus.source or 'the source of Python itself'}, "
        f"{corpus.training.bytes / 1e6:.1f} MB, and {corpus.validation.bytes / 1e6:.1f} MB to validate on."
    )
    mixers = {name for name in model.config.layers if not registry.get(name).composite}
    served = sorted({explain(name, device=trainer.device).backend or "none" for name in mixers})
    output.say(f"Device: {trainer.device}. Backend: {', '.join(served) or 'several'}.")
    if trainer.step:
        output.say(f"Resumed after step {trainer.step:,}.")


def train(trainer: Trainer, output: Output) -> int:
    """Train to the end and say where everything lies; the exit code."""
    end = watch(trainer.run(), output)
    if isinstance(end, Interrupted):
        output.say(f"Interrupted after step {end.step:,} and saved. Go on with: linattn train --resume {end.run}")
    else:
        bits = end.evaluation.bits_per_byte
        output.say(f"Finished after step {end.step:,}: {bits:.3f} bits per byte on the validation text.")
        output.say(f"checkpoint  {end.folder}")
        output.say(f"metrics     {trainer.folder / 'metrics.jsonl'}")
    if end.step:
        try:
            plot_loss(trainer.folder, trainer.folder / "loss.png")
            output.say(f"loss curve  {trainer.folder / 'loss.png'}")
        except ModuleNotFoundError as error:
            output.aside(f"linattn: no loss curve: {error}")
    return INTERRUPTED if isinstance(end, Interrupted) else 0
