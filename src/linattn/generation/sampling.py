"""Choosing the next token from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn._checks import fail


@dataclass(frozen=True)
class Sampler:
    """Divide the logits by ``temperature``, keep the ``top_k`` likeliest tokens, of these the fewest whose probability
    reaches ``top_p``, and draw one. Raises ValueError naming the setting that does not fit.
    """

    temperature: float = 1.0
    """≥ 0; 0 takes the likeliest token."""
    top_k: int = 0
    """≥ 0; 0 keeps all."""
    top_p: float = 1.0
    """In (0, 1]; 1 keeps all."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise fail("temperature", self.temperature, "a finite number ≥ 0")
        if self.top_k < 0:
            raise fail("top_k", self.top_k, "0 (all) or a positive number of tokens")
        if not 0 < self.top_p <= 1:
            raise fail("top_p", self.top_p, "a probability in (0, 1]")

    def probabilities(self, logits: Tensor) -> Tensor:
        """logits [B, V] -> float32 [B, V]: what each token is drawn with. Raises ValueError for NaN or all −∞."""
        logits = logits.float()
        if not logits.amax(-1).isfinite().all():
            raise fail("logits", "NaN or infinity", "finite numbers: the model has diverged")
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        # The largest becomes 0, so that a tiny temperature can't overflow.
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, logits.topk(self.top_k).indices, True)
            logits = logits.masked_fill(~kept, -math.inf)
        p = logits.softmax(-1)
        if self.top_p < 1:
            ordered, index = p.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            p = p.masked_fill((before >= self.top_p).scatter(-1, index, before >= self.top_p), 0)
            p = p / p.sum(-1, keepdim=True)
        return p

    def __call__(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """logits [B, V] -> int64 [B]: one token a row, drawn with ``generator`` (None: torch's global one)."""
        p = self.probabilities(logits)
        return p.argmax(-1) if self.temperature == 0 else torch.multinomial(p, 1, generator=generator).squeeze(-1)
