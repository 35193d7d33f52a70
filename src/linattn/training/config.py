"""How to train: the numbers, checked, and the learning rate that follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from linattn._checks import fail, one_of


@dataclass(frozen=True)
class TrainConfig:
    """A training. Exactly one of ``steps``, ``tokens`` and ``minutes`` says how long.

    AdamW (Loshchilov and Hutter, arXiv 1711.05101) with a learning rate that rises linearly and falls as a cosine.
    Weight decay spares everything one-dimensional (norms, biases, decays of heads) and parameters that carry a true
    attribute ``_no_weight_decay``.

    Attributes:
        steps: Steps of the optimizer.
        tokens: Tokens to train on, rounded up to whole steps.
        minutes: Time, evaluations and checkpoints included; the learning rate then follows the clock, and a resumed
            training is not the same bit for bit.
        batch_size: Sequences a step.
        sequence_length: Tokens a sequence.
        gradient_accumulation: The batch is run in this many equal parts, one after another: less memory, same step.
        learning_rate: The highest one.
        warmup: Part of the training in which the learning rate rises.
        final_learning_rate: The last learning rate, as a part of the highest.
        weight_decay: Decay of the weights a step, times the learning rate.
        betas: Memory of AdamW's mean gradient and mean square.
        gradient_clip: The gradient's highest norm; 0 leaves it alone.
        precision: Compute in this dtype (bfloat16 by autocast); weights and optimizer stay in float32.
        compile: Run the model's blocks through torch.compile: a wait at the start, faster steps on a GPU.
        seed: Of the batches drawn.
        evaluate_every: Steps between evaluations on the validation text; 0: only at the end. There always is one at
            the end.
        evaluation_tokens: Tokens of validation text an evaluation predicts.
        checkpoint_every: Steps between checkpoints; 0: only at the end. There always is one at the end.
        keep_checkpoints: The newest checkpoints kept.
        device: A torch device; "auto" takes the first GPU if there is one.

    Raises:
        ValueError: naming the argument, what came and what was wanted.
    """

    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None
    batch_size: int = 16
    sequence_length: int = 256
    gradient_accumulation: int = 1
    learning_rate: float = 2e-3
    warmup: float = 0.05
    final_learning_rate: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    gradient_clip: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    seed: int = 0
    evaluate_every: int = 250
    evaluation_tokens: int = 65536
    checkpoint_every: int = 250
    keep_checkpoints: int = 2
    device: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # a list, where it comes from JSON
        budget = [name for name in ("steps", "tokens", "minutes") if getattr(self, name) is not None]
        if len(budget) != 1:
            raise fail("steps, tokens, minutes", " and ".join(budget) or "none of them", "exactly one of them")
        counts = ("batch_size", "sequence_length", "gradient_accumulation", "evaluation_tokens", "keep_checkpoints")
        for name in (*budget, *counts, "learning_rate"):
            self._within(name, getattr(self, name) > 0, "a number above 0")
        for name in ("weight_decay", "gradient_clip", "evaluate_every", "checkpoint_every", "seed"):
            self._within(name, getattr(self, name) >= 0, "a number of at least 0")
        self._within("warmup", 0 <= self.warmup < 1, "a part of the training, at least 0 and below 1")
        self._within("final_learning_rate", 0 <= self.final_learning_rate <= 1, "a part of the highest, 0 to 1")
        self._within("betas", len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "two numbers in [0, 1)")
        one_of("precision", self.precision, ("float32", "bfloat16"))
        divides = self.batch_size % self.gradient_accumulation == 0
        self._within("gradient_accumulation", divides, f"a divisor of batch_size={self.batch_size}")
        self.torch_device()

    def _within(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise fail(name, repr(getattr(self, name)), wanted)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole training; None where the clock decides."""
        if self.tokens is not None:
            return math.ceil(self.tokens / (self.batch_size * self.sequence_length))
        return self.steps

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast, None without."""
        return torch.bfloat16 if self.precision == "bfloat16" else None

    def torch_device(self) -> torch.device:
        """The device meant."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            return torch.empty(0, device=self.device).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise fail("device", repr(self.device), f'"auto" or a device that torch finds here ({reason})') from error

    def learning_rate_at(self, progress: float) -> float:
        """The learning rate when ``progress`` (0 to 1) of the training is done."""
        if progress < self.warmup:
            return self.learning_rate * progress / self.warmup
        fall = (min(progress, 1.0) - self.warmup) / (1 - self.warmup)
        low = self.final_learning_rate
        return self.learning_rate * (low + (1 - low) * (1 + math.cos(math.pi * fall)) / 2)
