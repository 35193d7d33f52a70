"""Generation: greedy equals recomputing everything, batches equal rows alone, streams keep nothing but the state."""

from __future__ import annotations

import gc
import importlib
from itertools import islice
from typing import Any

import pytest
import torch

from linattn import registry, state
from linattn.generation import generate, stream
from linattn.models import LanguageModel, ModelConfig

PATTERNS = [*registry.names(), "gated_delta_rule,softmax_attention"]


def make(pattern: str) -> LanguageModel:
    """A model whose logits are far apart, so that rounding decides no greedy choice."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=40, d_model=32, num_layers=2, pattern=pattern, initializer_range=0.3)
    return LanguageModel(config).double()


def prompts(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(40, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_greedy_equals_full_recompute(pattern: str) -> None:
    model, (prompt,) = make(pattern), prompts(5)
    ids = prompt
    with torch.no_grad():
        for _ in range(12):
            logits, _ = model(ids[None])
            ids = torch.cat([ids, logits[0, -1].argmax()[None]])
    (row,) = generate(model, [prompt], max_new_tokens=12, temperature=0)
    assert row.tolist() == ids[5:].tolist()
    assert list(stream(model, prompt, max_new_tokens=12, temperature=0)) == row.tolist()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_batched_equals_alone(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of different lengths, read whole or in pieces of three."""
    model, rows = make(pattern), prompts(7, 1, 4)
    alone = [generate(model, [row], max_new_tokens=6, temperature=0)[0].tolist() for row in rows]
    assert [row.tolist() for row in generate(model, rows, max_new_tokens=6, temperature=0)] == alone
    monkeypatch.setattr(importlib.import_module("linattn.generation.generate"), "PREFILL", 3)
    assert [row.tolist() for row in generate(model, rows, max_new_tokens=6, temperature=0)] == alone
    assert list(stream(model, rows[0], max_new_tokens=6, temperature=0)) == alone[0]


def test_seeded() -> None:
    model, (prompt,) = make("gla"), prompts(3)
    batch = prompt.expand(2, -1)
    first, second = generate(model, batch, max_new_tokens=20, seed=0)
    assert first.tolist() != second.tolist()
    again = generate(model, batch, max_new_tokens=20, seed=0)
    assert [row.tolist() for row in again] == [first.tolist(), second.tolist()]
    one, same, other = (list(stream(model, prompt, max_new_tokens=20, seed=seed)) for seed in (5, 5, 6))
    assert one == same != other
    assert generate(model, [prompt], max_new_tokens=20, seed=5)[0].tolist() == one
    torch.manual_seed(7)
    a = list(stream(model, prompt, max_new_tokens=20))
    torch.manual_seed(7)
    assert list(stream(model, prompt, max_new_tokens=20)) == a


def test_stop() -> None:
    model, rows = make("gla"), prompts(3, 5)
    free = [row.tolist() for row in generate(model, rows, max_new_tokens=10, seed=0)]
    stop = {free[0][4], free[1][2]}

    def cut(row: list[int]) -> list[int]:
        return row[: next((n + 1 for n, token in enumerate(row) if token in stop), 10)]

    assert [row.tolist() for row in generate(model, rows, max_new_tokens=10, seed=0, stop=stop)] == list(map(cut, free))
    alone = list(stream(model, rows[0], max_new_tokens=10, seed=0))
    assert list(stream(model, rows[0], seed=0, stop={alone[3]})) == alone[: alone.index(alone[3]) + 1]


def test_nothing_to_do() -> None:
    model, (prompt,) = make("gla"), prompts(3)
    assert [row.tolist() for row in generate(model, [prompt], max_new_tokens=0)] == [[]]
    assert generate(model, [], max_new_tokens=3) == []
    assert list(stream(model, prompt, max_new_tokens=0)) == []


@pytest.mark.parametrize("pattern", [name for name in registry.names() if name != "softmax_attention"])
def test_a_stream_keeps_nothing_but_the_state(pattern: str) -> None:
    """Tensors alive and bytes of the state are the same after 10 and after 300 tokens."""
    tokens = stream(make(pattern), prompts(4)[0], seed=0)

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    list(islice(tokens, 10))
    count, size = alive(), state.nbytes(tokens.state)
    list(islice(tokens, 290))
    assert state.nbytes(tokens.state) == size
    assert alive() <= count


def test_the_state_of_a_stream_continues_it() -> None:
    model, (prompt,) = make("gla"), prompts(4)
    tokens = stream(model, prompt, max_new_tokens=5, temperature=0)
    assert tokens.state is None
    seen = list(tokens)
    with torch.inference_mode():
        logits, _ = model(torch.tensor([[seen[-1]]]), tokens.state)
    assert int(logits[0, -1].argmax()) == list(stream(model, prompt, max_new_tokens=6, temperature=0))[-1]


def test_generation_leaves_no_graph() -> None:
    model, (prompt,) = make("gla"), prompts(3)
    assert not generate(model, [prompt], max_new_tokens=2)[0].requires_grad
    model(prompt[None])[0].sum().backward()


@pytest.mark.parametrize(
    ("bad", "settings", "words"),
    [
        (torch.tensor([], dtype=torch.int64), {}, "prompt: got no token"),
        (torch.tensor([1, 40]), {}, r"ids: got token 40, wanted 0 … 39"),
        (torch.tensor([-1]), {}, "ids: got token -1"),
        (torch.tensor([1.0]), {}, "prompt: got torch.float32"),
        (torch.tensor([[[1]]]), {}, "prompt"),
        ("text", {}, "prompt"),
        (torch.tensor([1]), {"max_new_tokens": -1}, "max_new_tokens: got -1"),
        (torch.tensor([1]), {"top_p": 0}, "top_p: "),
        (torch.tensor([1]), {"stop": [40]}, "stop: got token 40"),
    ],
)
def test_bad_input(bad: Any, settings: dict[str, Any], words: str) -> None:
    model, settings = make("gla"), {"max_new_tokens": 1} | settings
    for call in (lambda: generate(model, [bad], **settings), lambda: stream(model, bad, **settings)):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("bad", [torch.tensor([1, 2]), "text", 3])
def test_prompts_of_the_wrong_kind(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"prompts?: got"):
        generate(make("gla"), bad, max_new_tokens=1)
