"""Sampling: what is kept, how likely it is drawn, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from linattn.generation import Sampler

P = torch.tensor([[0.5, 0.25, 0.15, 0.1], [0.1, 0.2, 0.3, 0.4]])
LOGITS = P.log() + 3


@pytest.mark.parametrize(
    ("sampler", "wanted"),
    [
        (Sampler(), P),
        (Sampler(temperature=0), [[1, 0, 0, 0], [0, 0, 0, 1]]),
        (Sampler(temperature=1e-30), [[1, 0, 0, 0], [0, 0, 0, 1]]),
        (Sampler(temperature=0.5), P**2 / (P**2).sum(-1, keepdim=True)),
        (Sampler(top_k=1), [[1, 0, 0, 0], [0, 0, 0, 1]]),
        (Sampler(top_k=2), [[2 / 3, 1 / 3, 0, 0], [0, 0, 3 / 7, 4 / 7]]),
        (Sampler(top_k=9), P),
        (Sampler(top_p=0.01), [[1, 0, 0, 0], [0, 0, 0, 1]]),
        (Sampler(top_p=0.6), [[2 / 3, 1 / 3, 0, 0], [0, 0, 3 / 7, 4 / 7]]),
        (Sampler(top_k=3, top_p=0.6), [[2 / 3, 1 / 3, 0, 0], [0, 0, 3 / 7, 4 / 7]]),
    ],
)
def test_probabilities(sampler: Sampler, wanted: Any) -> None:
    torch.testing.assert_close(sampler.probabilities(LOGITS), torch.as_tensor(wanted, dtype=torch.float32))


def test_top_k_keeps_k_of_equals() -> None:
    p = Sampler(top_k=2).probabilities(torch.zeros(3, 5))
    assert ((p > 0).sum(-1) == 2).all()


def test_draws_follow_the_probabilities() -> None:
    draws, sampler = 20_000, Sampler(top_k=3)
    tokens = sampler(LOGITS[:1].expand(draws, -1), torch.Generator().manual_seed(0))
    share = torch.bincount(tokens, minlength=4) / draws
    assert (share - sampler.probabilities(LOGITS[:1])[0]).abs().max() < 5 * 0.5 / math.sqrt(draws)
    assert share[3] == 0


def test_seed() -> None:
    logits = torch.zeros(3, 1000)
    a, b, c = (Sampler()(logits, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((50, 4), -math.inf)
    logits[:, 2] = 0
    assert (Sampler()(logits) == 2).all()
    assert (Sampler(temperature=0, top_p=0.5)(logits) == 2).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -1}, "temperature: got -1"),
        ({"temperature": math.nan}, "temperature: got nan"),
        ({"temperature": math.inf}, "temperature: got inf"),
        ({"top_k": -1}, "top_k: got -1"),
        ({"top_p": 0}, r"top_p: got 0, wanted a probability in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p: got 1.5"),
        ({"top_p": math.nan}, "top_p: got nan"),
    ],
)
def test_bad_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sampler(**settings)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_diverged_model_is_reported(bad: float, temperature: float) -> None:
    with pytest.raises(ValueError, match="logits: "):
        Sampler(temperature)(torch.tensor([[0.0, 0.0], [0.0, bad]]))
