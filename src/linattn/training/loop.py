"""The training loop: an iterator of events over one model, one corpus and one run folder."""

from __future__ import annotations

import math
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from linattn.checkpoints.files import read_json, read_tensors, replacing, write_json, write_tensors
from linattn.checkpoints.native import load_tokenizer, read_model, step_folder, steps, write_model
from linattn.evaluation import Evaluation, evaluate, next_token_loss
from linattn.models import LanguageModel
from linattn.training.config import TrainConfig
from linattn.training.corpus import Corpus, Sampler, load_corpus
from linattn.training.events import Evaluated, Event, Finished, Interrupted, Saved, Step, metrics_file

PROGRESS, MEMORY = "training.json", "training.safetensors"


class Trainer:
    """Trains a language model on a corpus.

        for event in Trainer(model, corpus, TrainConfig(minutes=1), "runs/first").run():
            ...

    The run folder receives ``metrics.jsonl`` and checkpoints ``step-00000100``, from which ``Trainer.resume`` continues
    as if nothing had happened: same weights, bit for bit, on the same machine and number of threads.

    Args:
        model: Is moved to the config's device. Initialise it after ``torch.manual_seed`` for the same training twice.
        corpus: From ``load_corpus``.
        config: How to train.
        run: The run folder; must not hold a training.

    Raises:
        ValueError: the run folder holds a training; the corpus is shorter than one sequence; the model's vocabulary
            is smaller than the tokenizer's.
    """

    def __init__(self, model: LanguageModel, corpus: Corpus, config: TrainConfig, run: str | Path) -> None:
        if steps(Path(run)):
            raise ValueError(f"run {run}: already holds a training; resume it or choose another folder")
        self._prepare(model, corpus, config, Path(run))

    @classmethod
    def resume(cls, run: str | Path, *, corpus: Corpus | None = None, device: str | None = None) -> Trainer:
        """Continue the training of a run folder from its newest checkpoint.

        Args:
            run: The run folder.
            corpus: The corpus, where it cannot be read from where it was; its text must be the same.
            device: Another device than before.

        Raises:
            ValueError: no checkpoint there, a file missing or damaged, or another text than before.
        """
        found = steps(Path(run))
        if not found:
            raise ValueError(f"run {run}: holds no checkpoint step-... to resume from")
        folder = found[max(found)]
        progress, memory = read_json(folder / PROGRESS), read_tensors(folder / MEMORY)
        trainer = cls.__new__(cls)
        try:
            config = TrainConfig(**progress["config"] | ({} if device is None else {"device": device}))
            if corpus is None:
                corpus = load_corpus(progress["source"], tokenizer=load_tokenizer(folder))
            if corpus.fingerprint() != progress["fingerprint"]:
                raise ValueError(f"data {corpus.source or 'built in'}: not the text that the run {run} was begun with")
            trainer._prepare(read_model(folder, config.torch_device()), corpus, config, Path(run))
            trainer._restore(progress, memory)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder}: its training state does not fit: {error!r}") from error
        return trainer

    def _prepare(self, model: LanguageModel, corpus: Corpus, config: TrainConfig, run: Path) -> None:
        corpus.require(config.sequence_length)
        if model.config.vocab_size < corpus.tokenizer.vocab_size:
            wanted = f"at least the tokenizer's {corpus.tokenizer.vocab_size}"
            raise ValueError(f"model: got a vocabulary of {model.config.vocab_size}, wanted {wanted}")
        self.device = config.torch_device()
        self.model, self.corpus, self.config, self.folder = model.to(self.device), corpus, config, run
        if config.compile:
            for block in self.model.blocks:
                block.compile()
        self.step = 0
        self.evaluated: Evaluated | None = None
        self._before = 0.0  # seconds trained before the clock was started
        self._started: float | None = None
        self._saved: int | None = None
        self._begun = 0  # the step that the clock was started at
        self._seconds_a_step = 0.0
        self._bits_per_nat = len(corpus.training.tokens) / (max(corpus.training.bytes, 1) * math.log(2))
        self._fingerprint = corpus.fingerprint()
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizer = _adamw(list(self._parameters.values()), config)
        self._sampler = Sampler(
            corpus.training.tokens,
            batch_size=config.batch_size,
            sequence_length=config.sequence_length,
            seed=config.seed,
        )

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.step * self.config.batch_size * self.config.sequence_length

    @property
    def elapsed(self) -> float:
        """Seconds of training so far."""
        return self._before + (0.0 if self._started is None else perf_counter() - self._started)

    @property
    def progress(self) -> float:
        """Part of the training done, 0 to 1."""
        total = self.config.total_steps
        if total is not None:
            return self.step / total
        return min(self.elapsed / (60 * self._minutes), 1.0)

    @property
    def _minutes(self) -> float:
        assert self.config.minutes is not None, "a budget of steps or tokens needs no clock"
        return self.config.minutes

    def run(self) -> Iterator[Event]:
        """Train to the end, or to Ctrl-C: it stops after the step under way, saves and yields ``Interrupted``.

        (In the main thread; a second Ctrl-C interrupts at once.) A training that is complete yields ``Finished``.

        Raises:
            ValueError: the disk refuses; existing checkpoints are whole.
            FloatingPointError: the loss or the gradient is no longer finite; existing checkpoints are good.
        """
        with metrics_file(self.folder, self.step) as metrics, _interrupt() as interrupted:
            for staging in self.folder.glob(".step-*.new"):  # of a writer that was killed
                shutil.rmtree(staging, ignore_errors=True)
            try:
                for event in self._events(interrupted):
                    metrics.write(event)
                    yield event
            except ValueError as error:
                if not self._finite():  # a mechanism that refuses gates which are not numbers was first to notice
                    raise self._diverged(str(error)) from error
                raise
            finally:
                self._before, self._started = self.elapsed, None

    def _events(self, interrupted: threading.Event) -> Iterator[Event]:
        config = self.config
        self.model.train()
        self._started, self._begun = perf_counter(), self.step
        while self.progress < 1:
            if interrupted.is_set():
                yield Interrupted(self.step, self.save(), self.folder)
                return
            yield self._train()
            if config.evaluate_every and self.step % config.evaluate_every == 0:
                yield self._evaluate()
            if config.checkpoint_every and self.step % config.checkpoint_every == 0 and self.progress < 1:
                yield Saved(self.step, self.save())
        if self.evaluated is None or self.evaluated.step != self.step:
            yield self._evaluate()
        assert self.evaluated is not None
        if self._saved != self.step:
            yield Saved(self.step, self.save())
        yield Finished(self.step, self.save(), self.evaluated.evaluation)

    def _train(self) -> Step:
        config, total = self.config, self.config.total_steps
        begin = perf_counter()
        rate = config.learning_rate_at(self.progress if total is None else (self.step + 1) / total)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss = torch.zeros((), device=self.device)
        for part in self._sampler.draw().to(self.device).chunk(config.gradient_accumulation):
            with torch.autocast(self.device.type, config.autocast) if config.autocast else nullcontext():
                share = next_token_loss(self.model, part) / config.gradient_accumulation
            share.backward()
            loss += share.detach()
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), config.gradient_clip or math.inf)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        loss_value, norm_value = torch.stack((loss, norm)).tolist()  # the one wait for the device in a step
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            raise self._diverged(f"the loss is {loss_value} and the norm of its gradient {norm_value}")
        seconds = perf_counter() - begin
        # The first step makes kernels ready, too, which no later one does.
        self._seconds_a_step += (seconds - self._seconds_a_step) * (0.1 if self.step - self._begun > 2 else 1.0)
        left = self._seconds_a_step * (total - self.step) if total is not None else 60 * self._minutes - self.elapsed
        return Step(
            step=self.step,
            tokens=self.tokens,
            loss=loss_value,
            bits_per_byte=loss_value * self._bits_per_nat,
            learning_rate=rate,
            gradient_norm=norm_value,
            tokens_per_second=config.batch_size * config.sequence_length / self._seconds_a_step,
            elapsed=self.elapsed,
            seconds_left=max(left, 0.0),
            progress=self.progress,
        )

    def _evaluate(self) -> Evaluated:
        config, text = self.config, self.corpus.validation
        result = evaluate(
            self.model,
            text.tokens,
            text.byte_counts,
            sequence_length=config.sequence_length,
            batch_size=max(config.batch_size // config.gradient_accumulation, 1),
            max_tokens=config.evaluation_tokens,
            autocast=config.autocast,
        )
        self.evaluated = Evaluated(self.step, result)
        self._saved = None  # a checkpoint remembers its evaluation
        return self.evaluated

    def save(self) -> Path:
        """Write a checkpoint of the present step, if there is none yet, and keep the newest ``keep_checkpoints``.

        Raises ValueError if the disk refuses, FloatingPointError rather than write weights that are not finite.
        """
        folder = step_folder(self.folder, self.step)
        if self._saved == self.step:
            return folder
        if not self._finite():
            raise self._diverged("weights are not finite")
        with replacing(folder) as staging:
            write_model(staging, self.model, self.corpus.tokenizer)
            write_tensors(staging / MEMORY, self._memory())
            write_json(
                staging / PROGRESS,
                {
                    "step": self.step,
                    "elapsed": self.elapsed,
                    "config": asdict(self.config),
                    "source": self.corpus.source,
                    "fingerprint": self._fingerprint,
                    "evaluated": self.evaluated and asdict(self.evaluated),
                },
            )
        self._saved = self.step
        found = steps(self.folder)
        for step in sorted(found)[: -self.config.keep_checkpoints]:
            shutil.rmtree(found[step], ignore_errors=True)
        return folder

    def _memory(self) -> dict[str, Tensor]:
        """Everything but the weights that the next step depends on."""
        memory = {"random.sampler": self._sampler.state, "random.torch": torch.get_rng_state()}
        if self.device.type == "cuda":
            memory["random.cuda"] = torch.cuda.get_rng_state(self.device)
        state = self._optimizer.state
        for name, parameter in self._parameters.items():
            memory |= {f"optimizer.{name}.{key}": value for key, value in state.get(parameter, {}).items()}
        return memory

    def _restore(self, progress: dict[str, Any], memory: dict[str, Tensor]) -> None:
        self.step = self._saved = progress["step"]
        self._before = progress["elapsed"]
        if progress["evaluated"]:
            self.evaluated = Evaluated(progress["evaluated"]["step"], Evaluation(**progress["evaluated"]["evaluation"]))
        self._sampler.state = memory["random.sampler"]
        torch.set_rng_state(memory["random.torch"])
        if self.device.type == "cuda" and "random.cuda" in memory:
            torch.cuda.set_rng_state(memory["random.cuda"], self.device)
        of_name: dict[str, dict[str, Tensor]] = {}
        for place, value in memory.items():
            if place.startswith("optimizer."):
                name, key = place.removeprefix("optimizer.").rsplit(".", 1)
                of_name.setdefault(name, {})[key] = value.clone()
        own = self._optimizer.state_dict()
        order = {id(parameter): name for name, parameter in self._parameters.items()}
        names = [order[id(parameter)] for group in self._optimizer.param_groups for parameter in group["params"]]
        own["state"] = {index: of_name[name] for index, name in enumerate(names) if name in of_name}
        self._optimizer.load_state_dict(own)

    def _finite(self) -> bool:
        return all(bool(parameter.isfinite().all()) for parameter in self._parameters.values())

    def _diverged(self, what: str) -> FloatingPointError:
        found = steps(self.folder)
        last = f"the last good checkpoint is {found[max(found)]}" if found else "no checkpoint had been written yet"
        advice = "a lower learning_rate or a longer warmup may help"
        return FloatingPointError(f"after step {self.step}: {what}; {last}; {advice}")


def _adamw(parameters: list[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    spared = [p.dim() < 2 or getattr(p, "_no_weight_decay", False) for p in parameters]
    groups: list[dict[str, Any]] = [
        {"params": [p for p, spare in zip(parameters, spared, strict=True) if not spare]},
        {"params": [p for p, spare in zip(parameters, spared, strict=True) if spare], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=parameters[0].device.type in ("cpu", "cuda"),
    )


@contextmanager
def _interrupt() -> Iterator[threading.Event]:
    """While open, the first Ctrl-C sets the event that is yielded; the next one interrupts as ever."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested  # Python delivers signals to the main thread only
        return

    def handle(number: int, frame: object) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    former = signal.signal(signal.SIGINT, handle)
    try:
        yield requested
    finally:
        signal.signal(signal.SIGINT, former if former is not None else signal.default_int_handler)
