"""Published sizes by name: ``preset("rwkv7-0.1b")``."""

from __future__ import annotations

import difflib
from typing import Any

from linattn._checks import fail
from linattn.models.config import ModelConfig

Fields = dict[str, Any]

WORLD = 65536  # RWKV's own vocabulary; its Pile models have that of GPT-NeoX


def _sizes(pattern: str, vocab_size: int, table: dict[str, tuple[int, int]], **fields: Any) -> dict[str, Fields]:
    """Fields of models that differ in (d_model, num_layers) alone."""
    common = {"pattern": pattern, "vocab_size": vocab_size, **fields}
    return {name: {**common, "d_model": width, "num_layers": layers} for name, (width, layers) in table.items()}


def _options(pattern: str, **options: Any) -> Fields:
    return {"mixers": {pattern: options}}


# decay and rate, value, gate: the ranks of the published files, which RWKV-LM's later formula does not give.
_RWKV7_RANKS = {768: (64, 32, 128), 1024: (64, 32, 128), 2048: (96, 64, 256), 2560: (96, 64, 320), 4096: (128, 96, 480)}


def _rwkv7(width: int, layers: int) -> Fields:
    rank, value_rank, gate_rank = _RWKV7_RANKS[width]
    ranks = {"decay_rank": rank, "rate_rank": rank, "value_rank": value_rank, "gate_rank": gate_rank}
    return {**_sizes("rwkv7", WORLD, {"": (width, layers)})[""], **_options("rwkv7", **ranks)}


def _fla(width: int, mlp_hidden: int, **fields: Any) -> Fields:
    """As in fla's training configurations: the MLP is a multiple of 256 wide."""
    common = {"vocab_size": 32000, "num_layers": 24, "norm_eps": 1e-6, "tie_embeddings": False}
    return {"d_model": width, "mlp_hidden": mlp_hidden, **common, **fields}


PRESETS: dict[str, Fields] = {
    # RWKV-LM; RWKV-4 of the Pile, the others of the World.
    **_sizes(
        "rwkv4", 50277,
        {
            "rwkv4-169m": (768, 12), "rwkv4-430m": (1024, 24), "rwkv4-1.5b": (2048, 24), "rwkv4-3b": (2560, 32),
            "rwkv4-7b": (4096, 32), "rwkv4-14b": (5120, 40),
        },
    ),
    **_sizes(
        "rwkv5", WORLD,
        {"rwkv5-0.4b": (1024, 24), "rwkv5-1.5b": (2048, 24), "rwkv5-3b": (2560, 32), "rwkv5-7b": (4096, 32)},
    ),
    **_sizes("rwkv6", WORLD, {"rwkv6-1.6b": (2048, 24), "rwkv6-3b": (2560, 32)}),
    **_sizes(
        "rwkv6", WORLD, {"rwkv6-7b": (4096, 32), "rwkv6-14b": (4096, 61)},
        **_options("rwkv6", mix_rank=64, decay_rank=128),
    ),
    "rwkv7-0.1b": _rwkv7(768, 12),
    "rwkv7-0.4b": _rwkv7(1024, 24),
    "rwkv7-1.5b": _rwkv7(2048, 24),
    "rwkv7-2.9b": _rwkv7(2560, 32),
    "rwkv7-7.2b": _rwkv7(4096, 32),
    "rwkv7-13.3b": _rwkv7(4096, 61),
    # mamba_ssm; the vocabulary of GPT-NeoX, filled up to multiples of 8 and 16.
    **_sizes(
        "mamba", 50280,
        {
            "mamba-130m": (768, 24), "mamba-370m": (1024, 48), "mamba-790m": (1536, 48), "mamba-1.4b": (2048, 48),
            "mamba-2.8b": (2560, 64),
        },
    ),
    **_sizes(
        "mamba2", 50288,
        {
            "mamba2-130m": (768, 24), "mamba2-370m": (1024, 48), "mamba2-780m": (1536, 48), "mamba2-1.3b": (2048, 48),
            "mamba2-2.7b": (2560, 64),
        },
    ),
    # The sizes at which the papers of 2023 to 2025 compare, as flash-linear-attention configures them.
    "gla-340m": _fla(1024, 2816, pattern="gated_linear_attention", **_options("gated_linear_attention", num_heads=4)),
    "gla-1.3b": _fla(2048, 5632, pattern="gated_linear_attention", **_options("gated_linear_attention", num_heads=4)),
    "retnet-340m": _fla(1024, 1536, pattern="retention", **_options("retention", num_heads=4)),
    "retnet-1.3b": _fla(2048, 2816, pattern="retention", **_options("retention", num_heads=8)),
    "deltanet-340m": _fla(1024, 2816, pattern="delta_rule", **_options("delta_rule", num_heads=8)),
    "deltanet-1.3b": _fla(2048, 5632, pattern="delta_rule", **_options("delta_rule", num_heads=16)),
    "gated-deltanet-340m": _fla(
        1024, 2816, pattern="gated_delta_rule", num_layers=21, **_options("gated_delta_rule", num_heads=3, head_dim=256)
    ),
    "gated-deltanet-1.3b": _fla(
        2048, 5632, pattern="gated_delta_rule", num_layers=21, **_options("gated_delta_rule", num_heads=6, head_dim=256)
    ),
}  # fmt: skip
"""Fields of :class:`ModelConfig` by name."""


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The configuration of a published size, with fields of :class:`ModelConfig` changed by ``overrides``.

    Raises ValueError for an unknown name, with the nearest, and for a field that does not fit.
    """
    key = name.strip().lower().replace("_", "-")
    if key not in PRESETS:
        near = difflib.get_close_matches(key, PRESETS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise fail("preset", f"unknown name {name!r}", f"{hint}one of {', '.join(PRESETS)}")
    return ModelConfig.from_dict({**PRESETS[key], **overrides})
