"""Mamba and Mamba-2 as ``mamba_ssm`` stores them: a ``config.json`` with d_model and n_layer, ``pytorch_model.bin``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from linattn._checks import fail
from linattn.checkpoints.layout import Config, Layout, Rule, demand
from linattn.checkpoints.transformers_mamba import UNLIMITED, backbone, expansion, mixer_names
from linattn.models import LanguageModel, ModelConfig

INITIAL = {
    "A_init_range", "dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "conv_init", "chunk_size",
    "use_mem_eff_path", "use_fast_path",
}  # fmt: skip
"""Options of a mixer that do not change what it computes."""


def layout(config: Config) -> Layout:
    """The layout of a config, which names its mixer in ``ssm_cfg``."""
    kind = _mixer(config).get("layer", "Mamba1")
    if kind not in BY_LAYER:
        raise fail("ssm_cfg.layer", repr(kind), " or ".join(map(repr, BY_LAYER)))
    return BY_LAYER[kind]


def _mixer(config: Config) -> dict[str, Any]:
    options = config.get("ssm_cfg") or {}
    if not isinstance(options, Mapping):
        raise fail("ssm_cfg", repr(options), "an object")
    return dict(options)


def _padded(config: Config) -> int:
    """The vocabulary with the rows that fill it up to a multiple."""
    size, multiple = config["vocab_size"], config["pad_vocab_size_multiple"] or 1
    return -(-size // multiple) * multiple


def _rules(mechanism: str, config: Config) -> Iterable[Rule]:
    options = _mixer(config)
    names = tuple(mixer_names(mechanism, options.get("bias", False), options.get("conv_bias", True)))
    return backbone("embedding", names, config["n_layer"], config["tie_embeddings"])


def _copies(config: Config) -> Mapping[str, str]:
    return {"lm_head.weight": "backbone.embedding.weight"} if config["tie_embeddings"] else {}


def _model(config: Config, mechanism: str, options: dict[str, Any], left: dict[str, Any]) -> ModelConfig:
    demand(config, rms_norm=True, d_intermediate=0, attn_layer_idx=([], None))
    if unknown := sorted(left.keys() - INITIAL - {"layer"}):
        raise fail("ssm_cfg", f"unknown {', '.join(unknown)}", f"options of mamba_ssm's {mechanism} that linattn has")
    return ModelConfig(
        vocab_size=_padded(config),
        d_model=config["d_model"],
        num_layers=config["n_layer"],
        pattern=mechanism,
        mixers={mechanism: options},
        mlp_ratio=0,
        norm_eps=1e-5,
        tie_embeddings=config["tie_embeddings"],
    )


def _describe(model: LanguageModel, ssm_cfg: dict[str, Any]) -> dict[str, Any]:
    config = model.config
    return {
        "d_model": config.d_model,
        "d_intermediate": 0,
        "n_layer": config.num_layers,
        "vocab_size": config.vocab_size,
        "ssm_cfg": ssm_cfg,
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": config.tie_embeddings,
    }


def _read_mamba2(config: Config) -> ModelConfig:
    mixer = _mixer(config)
    fixed = {
        "bias": False, "conv_bias": True, "rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False,
        "d_ssm": None, "dt_limit": UNLIMITED,
    }  # fmt: skip
    demand({**fixed, "dt_limit": [0.0, math.inf], **mixer}, **fixed)
    mixer = {key: value for key, value in mixer.items() if key not in fixed}
    expand = mixer.pop("expand", 2)
    options = {
        "num_heads": round(config["d_model"] * expand) // mixer.pop("headdim", 64),
        "d_state": mixer.pop("d_state", 128),
        "expand": expand,
        "num_groups": mixer.pop("ngroups", 1),
        "conv_size": mixer.pop("d_conv", 4),
        "norm_eps": 1e-5,
    }
    return _model(config, "mamba2", options, mixer)


def _write_mamba2(model: LanguageModel) -> dict[str, Any]:
    mixer: Any = model.blocks[0].mixer
    return _describe(
        model,
        {
            "layer": "Mamba2",
            "d_state": mixer.d_state,
            "d_conv": mixer.conv1d.width,
            "expand": expansion(mixer.sizes[0], mixer.d_model),
            "headdim": mixer.head_dim,
            "ngroups": mixer.conv_sizes[1] // mixer.d_state,
        },
    )


def _read_mamba(config: Config) -> ModelConfig:
    mixer = _mixer(config)
    rank = mixer.pop("dt_rank", "auto")
    options = {
        "d_state": mixer.pop("d_state", 16),
        "expand": mixer.pop("expand", 2),
        "dt_rank": None if rank == "auto" else rank,
        "conv_size": mixer.pop("d_conv", 4),
        "conv_bias": mixer.pop("conv_bias", True),
        "bias": mixer.pop("bias", False),
    }
    return _model(config, "mamba", options, mixer)


def _write_mamba(model: LanguageModel) -> dict[str, Any]:
    mixer: Any = model.blocks[0].mixer
    return _describe(
        model,
        {
            "layer": "Mamba1",
            "d_state": mixer.sizes[1],
            "d_conv": mixer.conv1d.width,
            "expand": expansion(mixer.out_proj.in_features, mixer.d_model),
            "dt_rank": mixer.sizes[0],
            "conv_bias": mixer.conv1d.bias is not None,
            "bias": mixer.in_proj.bias is not None,
        },
    )


DEFAULTS = {
    "d_model": 2560, "d_intermediate": 0, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {}, "attn_layer_idx": [],
    "rms_norm": True, "pad_vocab_size_multiple": 8, "tie_embeddings": True,
}  # fmt: skip

MAMBA2 = Layout(
    name="mamba_ssm's Mamba-2",
    mechanism="mamba2",
    defaults=DEFAULTS,
    read=_read_mamba2,
    write=_write_mamba2,
    rules=partial(_rules, "mamba2"),
    copies=_copies,
)

MAMBA = Layout(
    name="mamba_ssm's Mamba",
    mechanism="mamba",
    defaults=DEFAULTS,
    read=_read_mamba,
    write=_write_mamba,
    rules=partial(_rules, "mamba"),
    copies=_copies,
)

BY_LAYER: dict[str, Layout] = {"Mamba1": MAMBA, "Mamba2": MAMBA2}
