"""Bits per byte: the definition, every token once, whatever the tokenizer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linattn.evaluation import evaluate, next_token_loss
from linattn.models import LanguageModel, ModelConfig


def uniform(vocab_size: int = 256) -> LanguageModel:
    """A model that holds every next token for equally likely."""
    model = LanguageModel(ModelConfig(vocab_size=vocab_size, d_model=8, num_layers=1, tie_embeddings=False))
    nn.init.zeros_(model.head.weight)
    return model


class Bigram(nn.Module):
    """A model that looks one token back and remembers what it was shown."""

    def __init__(self, vocab_size: int = 256) -> None:
        super().__init__()
        self.config = ModelConfig(vocab_size=vocab_size)
        self.table = nn.Embedding(vocab_size, vocab_size)
        self.head = nn.Identity()
        self.seen: list[Tensor] = []

    def features(self, ids: Tensor) -> tuple[Tensor, None]:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.seen.append(ids)
        return self.table(ids), None


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_every_token_counts_once_whatever_the_batch(batch_size: int) -> None:
    torch.manual_seed(0)
    model, tokens = Bigram(), torch.randint(256, (71,), dtype=torch.uint8)
    result = evaluate(model, tokens, sequence_length=10, batch_size=batch_size)
    ids = tokens.long()
    expected = F.cross_entropy(model.table(ids[:-1]), ids[1:], reduction="sum").item()
    assert torch.equal(torch.cat(model.seen).flatten(), ids[:-1])
    assert (result.tokens, result.bytes) == (70, 70)
    assert result.loss == pytest.approx(expected / 70, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(expected / 70 / math.log(2), rel=1e-5)
    assert model.training


def test_a_uniform_guess_of_bytes_takes_eight_bits_each() -> None:
    tokens = torch.arange(100, dtype=torch.uint8)
    assert evaluate(uniform(), tokens, sequence_length=9, batch_size=4).bits_per_byte == pytest.approx(8)


def test_bytes_of_the_predicted_tokens_are_counted() -> None:
    tokens, counts = torch.arange(21, dtype=torch.int32), torch.arange(21, dtype=torch.int32)
    result = evaluate(uniform(1024), tokens, counts, sequence_length=5, batch_size=3)
    assert result.bytes == sum(range(1, 21))
    assert result.bits_per_byte == pytest.approx(10 * 20 / result.bytes)


def test_a_part_of_the_text_is_spread_over_all_of_it() -> None:
    model, tokens = Bigram(), torch.arange(101, dtype=torch.uint8)
    result = evaluate(model, tokens, sequence_length=10, batch_size=2, max_tokens=35)
    assert result.tokens == 30
    assert torch.cat(model.seen)[:, 0].tolist() == [0, 30, 60]


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens: got 10 tokens, wanted at least 11"):
        evaluate(Bigram(), torch.arange(10), sequence_length=10, batch_size=2)


def test_the_loss_is_computed_in_float32() -> None:
    model = LanguageModel(ModelConfig(d_model=32, num_layers=1)).bfloat16()
    assert next_token_loss(model, torch.arange(20).view(2, 10)).dtype == torch.float32


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_logits_in_parts_change_neither_the_loss_nor_its_gradients(
    monkeypatch: pytest.MonkeyPatch, reduction: str
) -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(d_model=32, num_layers=1)).double()
    ids = torch.randint(256, (3, 12))
    results = []
    for limit in (1 << 24, 7 * 256):
        monkeypatch.setattr("linattn.evaluation.bits_per_byte.LOGITS", limit)
        loss = next_token_loss(model, ids, reduction=reduction)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    expected = F.cross_entropy(model(ids[:, :-1])[0].float().flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)
    torch.testing.assert_close(results[0][0], expected)
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)
