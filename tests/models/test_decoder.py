"""The language model: one call prefills, continues and steps, whatever the pattern."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from linattn import registry, state
from linattn.models import BlockState, LanguageModel, ModelConfig, count_parameters, state_bytes

PATTERNS = [*registry.names(), "2*gated_delta_rule,softmax_attention", "softmax_attention,2*rwkv7"]


def make(pattern: str, **fields: Any) -> LanguageModel:
    torch.manual_seed(0)
    fields = {"vocab_size": 50, "d_model": 16, "num_layers": 3, "pattern": pattern} | fields
    return awake(LanguageModel(ModelConfig(**fields)).double())


def awake(model: LanguageModel) -> LanguageModel:
    """The model with noise in the parameters that start at zero, as RWKV's outputs do, hiding all the others."""
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    return model


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


@pytest.mark.parametrize("mlp", ["channel_mix", "channel_mix_v7", "channel_mix_v7a"])
def test_blocks_with_a_channel_mix_have_two_states(mlp: str) -> None:
    """Around any mixer; the states of both go the way of every state."""
    model, ids = make("gla", mlp=mlp, norm="layer", embedding_norm=True), tokens(2, 9)
    whole, end = model(ids)
    _, now = model(ids[:, :5])
    assert all(isinstance(block, BlockState) for block in now)
    now = state.select(state.fork(state.detach(now)), torch.tensor([1, 0]))
    rest, _ = model(ids[:, 5:].flip(0), now)
    torch.testing.assert_close(rest.flip(0), whole[:, 5:])
    mask = torch.tensor([[False] * 4 + [True] * 5, [True] * 9])
    torch.testing.assert_close(model(ids, mask=mask)[0][:1, 4:], model(ids[:1, 4:])[0])
    with pytest.raises(ValueError, match=r"state: got .*, wanted a BlockState"):
        model(ids, tuple(block.mixer for block in end))


def test_values_of_the_first_layer_reach_the_others() -> None:
    """RWKV-7 hands them on within a forward pass; they are no state."""
    model, ids = make("rwkv7"), tokens(1, 6)
    given: list[torch.Tensor] = []
    first = model.blocks[0].mixer.value
    first.register_forward_hook(lambda module, args, out: given.append(out))
    before, _ = model(ids)
    with torch.no_grad():
        model.blocks[1].mixer.residual.bias.fill_(-1e4)  # layer 1 keeps its own
    after, _ = model(ids)
    assert (before - after).abs().max() > 1e-3
    layer = model.blocks[1].mixer
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], layer(x, shared={"v_first": given[0]})[0])
    torch.nn.init.zeros_(layer.residual.bias)
    assert (layer(x)[0] - layer(x, shared={"v_first": given[0]})[0]).abs().max() > 1e-6
    with pytest.raises(TypeError, match="shard"):
        layer(x, shard={})


def test_rwkv_starts_as_in_rwkv_lm() -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab_size=50, d_model=128, num_layers=4, pattern="rwkv7"))
    assert model.embedding.weight.abs().max() <= 1e-4
    for block in model.blocks:
        assert not block.mixer.output.weight.any()
        assert not block.mlp.value.weight.any()
        assert not block.mixer.decay.down.weight.any()
        assert block.mixer.key.weight.abs().max() <= 0.05 / math.sqrt(128)
    spared = {n for n, p in model.named_parameters() if p.dim() >= 2 and not getattr(p, "_no_weight_decay", False)}
    decayed = {"receptance", "key", "value", "output", "embedding", "head"}
    assert {name.removesuffix(".weight").rsplit(".", 1)[-1] for name in spared} == decayed
    wide = LanguageModel(ModelConfig(vocab_size=50, d_model=128, num_layers=2, pattern="rwkv7", initializer_range=0.1))
    assert wide.blocks[0].mixer.output.weight.std().item() == pytest.approx(0.1, rel=0.05)


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
