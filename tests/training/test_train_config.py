"""The numbers of a training: checked, and the learning rate they make."""

from __future__ import annotations

from typing import Any

import pytest

from linattn.training import TrainConfig


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "steps, tokens, minutes: got none of them, wanted exactly one of them"),
        ({"steps": 1, "minutes": 1}, "got steps and minutes, wanted exactly one of them"),
        ({"steps": 0}, "steps: got 0, wanted a number above 0"),
        ({"minutes": -1.0}, r"minutes: got -1\.0"),
        ({"steps": 1, "batch_size": 0}, "batch_size: got 0"),
        ({"steps": 1, "learning_rate": 0.0}, "learning_rate: got 0"),
        ({"steps": 1, "learning_rate": float("nan")}, "learning_rate: got nan"),
        ({"steps": 1, "warmup": 1.0}, r"warmup: got 1\.0, wanted a part"),
        ({"steps": 1, "final_learning_rate": 2.0}, r"final_learning_rate: got 2\.0"),
        ({"steps": 1, "betas": (0.9, 1.0)}, r"betas: got \(0\.9, 1\.0\)"),
        ({"steps": 1, "seed": -1}, "seed: got -1"),
        ({"steps": 1, "gradient_accumulation": 3}, "gradient_accumulation: got 3, wanted a divisor of batch_size=16"),
        ({"steps": 1, "precision": "float8"}, "precision: got 'float8'"),
        ({"steps": 1, "device": "toaster"}, "device: got 'toaster'"),
        ({"steps": 1, "device": "cuda:99"}, "device: got 'cuda:99'"),
    ],
)
def test_a_wrong_number_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**arguments)


def test_tokens_are_rounded_up_to_steps() -> None:
    def config(tokens: int) -> TrainConfig:
        return TrainConfig(tokens=tokens, batch_size=4, sequence_length=25)

    assert [config(tokens).total_steps for tokens in (1, 100, 101, 1000)] == [1, 1, 2, 10]
    assert TrainConfig(steps=7).total_steps == 7
    assert TrainConfig(minutes=7).total_steps is None


def test_the_learning_rate_rises_then_falls() -> None:
    config = TrainConfig(steps=1, learning_rate=2.0, warmup=0.2, final_learning_rate=0.25)
    rates = [config.learning_rate_at(n / 100) for n in range(101)]
    assert rates[0] == 0.0
    assert rates[10] == pytest.approx(1.0)
    assert rates[20] == max(rates) == 2.0
    assert rates[60] == pytest.approx((2.0 + 0.5) / 2)
    assert rates[100] == pytest.approx(0.5) == config.learning_rate_at(1.5)
    assert rates[:21] == sorted(rates[:21])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert TrainConfig(steps=1, warmup=0.0).learning_rate_at(0.0) == TrainConfig(steps=1).learning_rate
