"""Parallel heads: the sum of two layers, whatever the linear one is; in a model, and where it has no function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linattn
from linattn import ParallelHeads, SoftmaxAttention, registry, state
from linattn.benchmark import compare
from linattn.models import LanguageModel, ModelConfig

LINEAR = [name for name in registry.names() if registry.get(name).recurrence is not None]


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def projection(layer: nn.Module, weight: Tensor) -> None:
    name = "out_proj" if hasattr(layer, "out_proj") else "output"
    getattr(layer, name).weight.data = weight


@pytest.mark.parametrize("name", LINEAR)
def test_it_is_the_sum_of_two_layers(name: str) -> None:
    """W_o [norm(a), norm(b)], from the two layers themselves with identities for their output projections."""
    torch.manual_seed(0)
    layer = ParallelHeads(16, linear=name, window=3, attention_options={"num_kv_heads": 1}).double()
    for norm in (layer.linear_norm, layer.attention_norm):
        nn.init.normal_(norm.weight)
    parts = [registry.get(name).layer(16).double(), SoftmaxAttention(16, window=3, num_kv_heads=1).double()]
    widths = [layer.linear_norm.size, layer.attention_norm.size]
    x, wanted = torch.randn(2, 7, 16, dtype=torch.float64), torch.zeros(2, 7, 16, dtype=torch.float64)
    inner = (layer.linear, layer.attention)
    norms = (layer.linear_norm, layer.attention_norm)
    weights = layer.out_proj.weight.split(widths, 1)
    for part, own, norm, weight, width in zip(parts, inner, norms, weights, widths, strict=True):
        part.load_state_dict(own.state_dict(), strict=False)
        projection(part, torch.eye(width, dtype=torch.float64))
        wanted = wanted + (rms(part(x)[0]) * norm.weight) @ weight.T
    torch.testing.assert_close(layer(x)[0], wanted)


def test_the_state_does_not_grow() -> None:
    layer, x = ParallelHeads(16, window=3), torch.randn(1, 50, 16)
    _, now = layer(x[:, :10])
    _, later = layer(x[:, 10:], now)
    assert state.nbytes(later) == state.nbytes(now)


def test_a_model_of_it() -> None:
    """Named in a pattern like any mechanism; RWKV-7 inside hands its first values on."""
    options = {"linear": "rwkv7", "window": 4, "linear_options": {"num_heads": 2}}
    config = ModelConfig(32, d_model=16, num_layers=3, pattern="hymba,hymba,gla", mixers={"parallel_heads": options})
    model, ids = LanguageModel(config), torch.arange(10)[None]
    whole, end = model(ids)
    _, now = model(ids[:, :6])
    rest, last = model(ids[:, 6:], now)
    torch.testing.assert_close(rest, whole[:, 6:])
    assert state.nbytes(last) == state.nbytes(end)
    whole.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_it_has_no_function() -> None:
    mechanism = linattn.get("parallel_heads")
    assert mechanism.composite
    assert not mechanism.grows
    assert linattn.get("softmax").grows
    assert mechanism.name in registry.names(composite=True)
    assert mechanism.name not in registry.names()
    for call in (mechanism.function, lambda: linattn.explain("parallel_heads")):
        with pytest.raises(ValueError, match=r"^mechanism: got 'parallel_heads', a layer of"):
            call()
    with pytest.raises(ValueError, match=r"^mechanisms: got 'parallel_heads', a layer of several"):
        compare(["parallel_heads"], (16,))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"linear": "softmax"}, "linear: got 'softmax', wanted a mechanism with a recurrence"),
        ({"linear": "parallel_heads"}, "linear: "),
        ({"linear": "glaa"}, "mechanism: unknown name 'glaa'; did you mean 'gla'"),
        ({"window": 0}, "window: got 0"),
        ({"num_heads": 7}, "num_heads: got 7"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        ParallelHeads(16, **options)
