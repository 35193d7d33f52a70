"""The language model: one call prefills, continues and steps, whatever the pattern."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from linattn import registry, state
from linattn.models import LanguageModel, ModelConfig, count_parameters, state_bytes

PATTERNS = [*registry.names(), "2*gated_delta_rule,softmax_attention"]


def make(pattern: str, **fields: Any) -> LanguageModel:
    torch.manual_seed(0)
    fields = {"vocab_size": 50, "d_model": 16, "num_layers": 3, "pattern": pattern} | fields
    return LanguageModel(ModelConfig(**fields)).double()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_prefill_continue_step(pattern: str) -> None:
    model, ids = make(pattern), tokens(2, 9)
    whole, end = model(ids)
    assert whole.shape == (2, 9, 50)
    first, now = model(ids[:, :5])
    second, now = model(ids[:, 5:8], now)
    third, now = model(ids[:, 8:], now)
    torch.testing.assert_close(torch.cat([first, second, third], 1), whole)
    assert state.nbytes(now) == state.nbytes(end)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_padded_and_packed_equal_alone(pattern: str) -> None:
    model, ids = make(pattern), tokens(2, 7)
    mask = torch.tensor([[False] * 4 + [True] * 3, [True] * 7])
    padded, _ = model(ids, mask=mask)
    packed, _ = model(torch.cat([ids[:1, 4:], ids[1:]], 1), cu_seqlens=torch.tensor([0, 3, 10]))
    for alone, other, third in (
        (model(ids[:1, 4:])[0], padded[:1, 4:], packed[:, :3]),
        (model(ids[1:])[0], padded[1:], packed[:, 3:]),
    ):
        torch.testing.assert_close(other, alone)
        torch.testing.assert_close(third, alone)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("fields", [{}, {"mlp_ratio": 0, "tie_embeddings": False}])
def test_every_parameter_learns(pattern: str, fields: dict[str, Any]) -> None:
    model, ids = make(pattern, **fields), tokens(2, 8)
    logits, _ = model(ids[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_features_and_head_make_the_logits() -> None:
    model, ids = make("gla"), tokens(2, 5)
    hidden, _ = model.features(ids)
    torch.testing.assert_close(model.head(hidden), model(ids)[0])


def test_counts() -> None:
    model = make("softmax", d_model=32, num_layers=2, mlp_ratio=8 / 3)
    attention, mlp, norms = 4 * 32**2, 3 * 32 * 96, 2 * 32
    assert count_parameters(model) == 50 * 32 + 2 * (attention + mlp + norms) + 32
    untied = make("softmax", d_model=32, num_layers=2, tie_embeddings=False)
    assert count_parameters(untied) == count_parameters(model) + 50 * 32


def test_state_bytes_by_layer() -> None:
    model = make("gla,softmax", num_layers=2).float()
    sizes = [state_bytes(model(tokens(3, n))[1]) for n in (1, 10, 20)]
    heads, keys, values = 4, 2, 4
    assert [gla for gla, _ in sizes] == [3 * heads * keys * values * 4] * 3
    assert [softmax for _, softmax in sizes] == [3 * n * 2 * 16 * 4 + 3 * 8 for n in (1, 10, 20)]


def test_weights_at_the_start() -> None:
    model = make("gla", d_model=128, num_layers=8)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            wanted = 0.5 / math.sqrt(128) / (math.sqrt(16) if "out_proj" in name else 1)
            assert parameter.std().item() == pytest.approx(wanted, rel=5 / math.sqrt(parameter.numel()))
    bits, _ = model(tokens(1, 20))
    assert bits.log_softmax(-1).min() > -2 * math.log(50)


def test_same_seed_same_model() -> None:
    a, b = make("mamba2"), make("mamba2")
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_bad_input() -> None:
    model, ids = make("gla"), tokens(2, 4)
    _, end = model(ids)
    for bad, words in (
        (ids.int(), "ids: got torch.int32"),
        (ids[0], "ids: "),
        (ids[:, :0], "ids: "),
        ([[1]], "ids: got list"),
        (ids + 50, "ids: got token .*vocab_size=50"),
        (ids - 50, "ids: got token -"),
    ):
        with pytest.raises(ValueError, match=words):
            model(bad)
    for bad_state, words in ((end[:2], "state: got 2 states, wanted a tuple of 3"), (list(end), "state: got list")):
        with pytest.raises(ValueError, match=words):
            model(ids, bad_state)
    with pytest.raises(ValueError, match="backend"):
        model(ids, backend="chunkd")
    with pytest.raises(ValueError, match="mode"):
        model(ids, mode="chunk")
