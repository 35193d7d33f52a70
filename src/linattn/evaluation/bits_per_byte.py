"""How well a model predicts a text: bits it would need for each byte of it."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from linattn._checks import fail
from linattn.models import LanguageModel

LOGITS = 1 << 24


@dataclass(frozen=True)
class Evaluation:
    """The result of ``evaluate``.

    Attributes:
        loss: Cross entropy, nats per token.
        bits_per_byte: Bits per byte of UTF-8, comparable between tokenizers.
        tokens, bytes: How much text was predicted.
    """

    loss: float
    bits_per_byte: float
    tokens: int
    bytes: int


def next_token_loss(model: LanguageModel, ids: Tensor, *, reduction: str = "mean") -> Tensor:
    """Cross entropy, in float32, of ids [B, T+1] from the second token on, given those before it in its row.

    ``reduction`` is "mean" or "sum" over the B·T tokens. Of a large vocabulary only ``LOGITS`` logits exist at a time;
    the backward computes them again.
    """
    hidden, _ = model.features(ids[:, :-1])
    hidden, targets = hidden.flatten(0, 1), ids[:, 1:].flatten()
    size = max(LOGITS // model.config.vocab_size, 1)
    if len(targets) <= size:
        total = _cross_entropy(model.head, hidden, targets)
    else:
        parts = [
            checkpoint(_cross_entropy, model.head, *part, use_reentrant=False, preserve_rng_state=False)
            for part in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        total = torch.stack(parts).sum()
    return total / len(targets) if reduction == "mean" else total


def _cross_entropy(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum")


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    tokens: Tensor,
    byte_counts: Tensor | None = None,
    *,
    sequence_length: int,
    batch_size: int,
    max_tokens: int | None = None,
    autocast: torch.dtype | None = None,
) -> Evaluation:
    """Predict a text in windows of ``sequence_length`` tokens that follow one another.

        bits per byte = Σ −log₂ p(token | the tokens before it in its window) / Σ bytes of the predicted tokens

    Args:
        model: Is put back into the mode, training or not, that it came in.
        tokens: [N] integers. Every token is predicted but the first, and a last window that is not full.
        byte_counts: [N] integers, the bytes that each token stands for; None: one each.
        sequence_length, batch_size: T and B of the windows.
        max_tokens: Predict no more than about this many tokens, in windows spread evenly over the text.
        autocast: Run the model under autocast to this dtype.

    Raises:
        ValueError: the text is shorter than one window and its next token.
    """
    available = (len(tokens) - 1) // sequence_length
    if available < 1:
        raise fail("tokens", f"{len(tokens)} tokens", f"at least {sequence_length + 1}, one window and its next token")
    windows = available if max_tokens is None else max(1, min(available, max_tokens // sequence_length))
    begins = torch.arange(windows) * available // windows * sequence_length
    span = torch.arange(sequence_length + 1)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    nats, size = 0.0, 0
    try:
        with torch.autocast(device.type, autocast) if autocast else nullcontext():
            for chosen in begins.split(batch_size):
                places = chosen[:, None] + span
                nats += float(next_token_loss(model, tokens[places].long().to(device), reduction="sum"))
                size += places[:, 1:].numel() if byte_counts is None else int(byte_counts[places[:, 1:]].sum())
    finally:
        model.train(was_training)
    count = windows * sequence_length
    return Evaluation(nats / count, nats / math.log(2) / max(size, 1), count, size)
