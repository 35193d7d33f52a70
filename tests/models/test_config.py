"""Model configurations: the pattern grammar, exact round trips, errors that name the nearest."""

from __future__ import annotations

import json
from typing import Any

import pytest

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
