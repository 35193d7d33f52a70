"""Model configurations: the pattern grammar, exact round trips, errors that name the nearest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from linattn import registry
from linattn.models import LanguageModel, ModelConfig, parse_pattern


@pytest.mark.parametrize(
    ("pattern", "layers", "wanted"),
    [
        ("gla", 2, ("gated_linear_attention",) * 2),
        ("mamba2", 1, ("mamba2",)),
        ("3*gated_delta_rule,softmax_attention", 4, ("gated_delta_rule",) * 3 + ("softmax_attention",)),
        ("2*gdn,softmax", 7, (("gated_delta_rule",) * 2 + ("softmax_attention",)) * 2 + ("gated_delta_rule",)),
        (" 1 * retnet , linear ", 3, ("retention", "linear_attention", "retention")),
    ],
)
def test_pattern(pattern: str, layers: int, wanted: tuple[str, ...]) -> None:
    assert parse_pattern(pattern, layers) == wanted


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("gated_delta_rul", "did you mean 'gated_delta_rule'"),
        ("", "pattern: "),
        ("gla,,gla", "pattern: "),
        ("0*gla", "pattern: .*0"),
        ("-1*gla", "pattern: "),
        ("x*gla", "pattern: .*'x\\*gla'"),
        ("3*", "pattern: "),
        ("99999999999*gla", "num_layers=4"),
        ("4*gla,softmax", "num_layers=4"),
    ],
)
def test_bad_pattern(pattern: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig(pattern=pattern)


def test_round_trip_through_json() -> None:
    config = ModelConfig(
        vocab_size=300, d_model=32, num_layers=3, pattern="2*gla,softmax", mlp_ratio=2, tie_embeddings=False,
        mixers={"gla": {"num_heads": 2, "expand_k": 1.0}, "softmax_attention": {"window": 8}},
    )  # fmt: skip
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert ModelConfig.from_dict({}) == ModelConfig()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"d_modle": 3}, "unknown key 'd_modle'.*did you mean 'd_model'"),
        ({"d_model": 0}, "d_model: got 0"),
        ({"d_model": "256"}, "d_model: got '256'"),
        ({"num_layers": 1.5}, "num_layers: got 1.5"),
        ({"vocab_size": True}, "vocab_size: got True"),
        ({"mlp_ratio": -1}, "mlp_ratio: got -1"),
        ({"mlp_ratio": float("nan")}, "mlp_ratio: got nan"),
        ({"tie_embeddings": "yes"}, "tie_embeddings: got 'yes'"),
        ({"pattern": 3}, "pattern: got 3"),
        ({"mixers": []}, r"mixers: got \[\], wanted a mapping"),
        ({"mixers": {"gla": 3}}, r"mixers\['gla'\]: got 3"),
        ({"mixers": {"glaa": {}}}, "did you mean 'gla'"),
        ({"mixers": {"gla": {"heads": 2}}}, "mixers.*unknown key 'heads'.*did you mean 'num_heads'"),
        ({"mixers": {"gla": {"layer_index": 2}}}, "unknown key 'layer_index'"),
        ({"mlp": "channel_mix_v8"}, "mlp: got 'channel_mix_v8'"),
        ({"mlp_hidden": -1}, "mlp_hidden: got -1"),
        ({"norm": "batch"}, "norm: got 'batch'"),
        ({"embedding_norm": 1}, "embedding_norm: got 1"),
    ],
)
def test_bad_fields(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_dict(fields)


def test_options_reach_the_layers() -> None:
    config = ModelConfig(d_model=64, num_layers=2, pattern="gla,gdn", mixers={"gated_deltanet": {"num_heads": 2}})
    model = LanguageModel(config)
    assert [block.mixer.num_heads for block in model.blocks] == [4, 2]
    assert [block.mixer.layer_index for block in model.blocks] == [0, 1]
    with pytest.raises(ValueError, match="num_heads: got 7"):
        LanguageModel(ModelConfig(d_model=64, mixers={"mamba2": {"num_heads": 7}}, pattern="mamba2"))


def test_a_family_brings_its_blocks() -> None:
    """Where the pattern names one mechanism, and only for fields that are not given."""
    config = ModelConfig(pattern="rwkv6")
    assert (config.norm, config.mlp, config.mlp_ratio, config.embedding_norm) == ("layer", "channel_mix", 3.5, True)
    assert not config.tie_embeddings
    assert ModelConfig(pattern="mamba2").mlp_size == 0
    assert ModelConfig(pattern="mamba2", mlp_ratio=2).mlp_size == 512
    mixed = ModelConfig(pattern="rwkv6,mamba2")
    assert (mixed.norm, mixed.mlp, mixed.mlp_ratio, mixed.tie_embeddings) == ("rms", "swiglu", 8 / 3, True)
    assert ModelConfig(pattern="gla", mlp_hidden=100).mlp_size == 100
    for name in registry.names():
        assert registry.get(name).block.keys() <= ModelConfig().to_dict().keys()
        config = ModelConfig(pattern=name)
        assert None not in {config.norm, config.mlp, config.mlp_ratio, config.embedding_norm, config.norm_eps}
        assert ModelConfig.from_dict(config.to_dict()) == config


def test_configs_of_the_first_version_mean_what_they_meant() -> None:
    """They name every field of that time; a family's blocks must not change what they leave open."""
    first = {
        "vocab_size": 256, "d_model": 256, "num_layers": 4, "pattern": "mamba2", "mixers": {}, "mlp_ratio": 8 / 3,
        "norm_eps": 1e-6, "tie_embeddings": True, "initializer_range": None,
    }  # fmt: skip
    old = ("gated_delta_rule", "mamba2", "gla", "retention", "delta_rule", "linear_attention", "softmax_attention")
    for pattern in old:
        config = ModelConfig.from_dict({**first, "pattern": pattern})
        assert (config.mlp_size, config.norm_eps, config.tie_embeddings) == (704, 1e-6, True)
        assert (config.norm, config.mlp, config.embedding_norm) == ("rms", "swiglu", False)
