"""Mamba, Mamba-2 and FalconMamba as ``transformers`` stores them (``model_type`` mamba, mamba2, falcon_mamba)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from linattn.checkpoints.layout import Config, Layout, Rule, demand, same
from linattn.models import LanguageModel, ModelConfig

MIXER = {
    "mamba": ("x_proj.weight", "dt_proj.weight", "dt_proj.bias", "A_log", "D"),
    "mamba2": ("dt_bias", "A_log", "D", "norm.weight"),
}


def mixer_names(mechanism: str, bias: bool, conv_bias: bool) -> Iterable[str]:
    """The tensors of a mixer, which have one name in mamba_ssm, in transformers and here."""
    for projection in ("in_proj", "out_proj"):
        yield f"{projection}.weight"
        if bias:
            yield f"{projection}.bias"
    yield "conv1d.weight"
    if conv_bias:
        yield "conv1d.bias"
    yield from MIXER[mechanism]


UNLIMITED = ([0.0, math.inf], (0.0, math.inf))
"""The range of a time step that bounds nothing, as JSON and Python have it."""


def backbone(embedding: str, mixer: Iterable[str], num_layers: int, tied: bool) -> Iterable[Rule]:
    """The rules of a stack of ``x + mixer(norm(x))``; only the embedding's name differs between libraries."""
    yield Rule("embedding.weight", (f"backbone.{embedding}.weight",))
    for layer in range(num_layers):
        yield Rule(f"blocks.{layer}.mixer_norm.weight", (f"backbone.layers.{layer}.norm.weight",))
        for rule in same(*mixer):
            yield rule.within(f"blocks.{layer}.mixer.", f"backbone.layers.{layer}.mixer.")
    yield Rule("norm.weight", ("backbone.norm_f.weight",))
    if not tied:
        yield Rule("head.weight", ("lm_head.weight",))


def _rules(mechanism: str, config: Config) -> Iterable[Rule]:
    names = tuple(mixer_names(mechanism, config["use_bias"], config["use_conv_bias"]))
    return backbone("embeddings", names, config["num_hidden_layers"], config["tie_word_embeddings"])


def _copies(config: Config) -> Mapping[str, str]:
    return {"lm_head.weight": "backbone.embeddings.weight"} if config["tie_word_embeddings"] else {}


def _model(config: Config, mechanism: str, **options: Any) -> ModelConfig:
    demand(config, hidden_act=("silu", "swish"))
    return ModelConfig(
        vocab_size=config["vocab_size"],
        d_model=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        pattern=mechanism,
        mixers={mechanism: options},
        mlp_ratio=0,
        norm_eps=config["layer_norm_epsilon"],
        tie_embeddings=config["tie_word_embeddings"],
    )


def _describe(model: LanguageModel, model_type: str, architecture: str, **rest: Any) -> dict[str, Any]:
    config = model.config
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "layer_norm_epsilon": config.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        **rest,
    }


def _read_mamba2(config: Config) -> ModelConfig:
    demand(config, use_bias=False, use_conv_bias=True)
    demand(config, time_step_limit=UNLIMITED)
    return _model(
        config,
        "mamba2",
        num_heads=config["num_heads"],
        d_state=config["state_size"],
        expand=config["expand"],
        num_groups=config["n_groups"],
        conv_size=config["conv_kernel"],
        norm_eps=config["layer_norm_epsilon"],
    )


def _write_mamba2(model: LanguageModel) -> dict[str, Any]:
    mixer: Any = model.blocks[0].mixer
    return _describe(
        model,
        "mamba2",
        "Mamba2ForCausalLM",
        num_heads=mixer.num_heads,
        head_dim=mixer.head_dim,
        state_size=mixer.d_state,
        expand=expansion(mixer.sizes[0], mixer.d_model),
        n_groups=mixer.conv_sizes[1] // mixer.d_state,
        conv_kernel=mixer.conv1d.width,
        use_bias=False,
        use_conv_bias=True,
    )


def _read_mamba(norm_dt_b_c: bool, config: Config) -> ModelConfig:
    rank = config["time_step_rank"]
    eps = {"norm_dt_b_c": True, "norm_eps": config["mixer_rms_eps"]} if norm_dt_b_c else {}
    return _model(
        config,
        "mamba",
        d_state=config["state_size"],
        expand=config["expand"],
        dt_rank=None if rank == "auto" else rank,
        conv_size=config["conv_kernel"],
        conv_bias=config["use_conv_bias"],
        bias=config["use_bias"],
        **eps,
    )


def _write_mamba(norm_dt_b_c: bool, model: LanguageModel) -> dict[str, Any]:
    mixer: Any = model.blocks[0].mixer
    name = "falcon_mamba" if norm_dt_b_c else "mamba"
    eps = {"mixer_rms_eps": mixer.norms[0].eps} if norm_dt_b_c and mixer.norms else {}
    return _describe(
        model,
        name,
        "FalconMambaForCausalLM" if norm_dt_b_c else "MambaForCausalLM",
        state_size=mixer.sizes[1],
        expand=expansion(mixer.out_proj.in_features, mixer.d_model),
        time_step_rank=mixer.sizes[0],
        conv_kernel=mixer.conv1d.width,
        use_bias=mixer.in_proj.bias is not None,
        use_conv_bias=mixer.conv1d.bias is not None,
        **eps,
    )


def expansion(inner: int, width: int) -> int | float:
    """inner / width, whole where it is: transformers accepts no other."""
    return inner // width if inner % width == 0 else inner / width


COMMON = {
    "hidden_act": "silu", "layer_norm_epsilon": 1e-5, "expand": 2, "conv_kernel": 4, "use_bias": False,
    "use_conv_bias": True,
}  # fmt: skip

MAMBA2 = Layout(
    name="transformers' Mamba2",
    mechanism="mamba2",
    defaults={
        **COMMON, "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
        "state_size": 128, "n_groups": 8, "time_step_limit": [0.0, math.inf], "tie_word_embeddings": False,
    },
    read=_read_mamba2,
    write=_write_mamba2,
    rules=partial(_rules, "mamba2"),
    copies=_copies,
)  # fmt: skip


def _mamba(name: str, norm_dt_b_c: bool) -> Layout:
    return Layout(
        name=f"transformers' {name}",
        mechanism="mamba",
        defaults={
            **COMMON, "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 32, "state_size": 16,
            "time_step_rank": "auto", "mixer_rms_eps": 1e-6, "tie_word_embeddings": True,
        },
        read=partial(_read_mamba, norm_dt_b_c),
        write=partial(_write_mamba, norm_dt_b_c),
        rules=partial(_rules, "mamba"),
        copies=_copies,
    )  # fmt: skip


MAMBA, FALCON_MAMBA = _mamba("Mamba", False), _mamba("FalconMamba", True)

LAYOUTS: dict[str, Layout] = {"mamba": MAMBA, "falcon_mamba": FALCON_MAMBA, "mamba2": MAMBA2}
"""By ``model_type``."""
