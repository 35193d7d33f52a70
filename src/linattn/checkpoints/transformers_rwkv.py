"""RWKV-4 as ``transformers`` stores it (``model_type`` rwkv)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from linattn.checkpoints.layout import Config, Layout, Rule, demand, renamed, same
from linattn.models import LanguageModel, ModelConfig


def _read(config: Config) -> ModelConfig:
    width = config["hidden_size"]
    demand(config, attention_hidden_size=(None, width))
    return ModelConfig(
        vocab_size=config["vocab_size"],
        d_model=width,
        num_layers=config["num_hidden_layers"],
        pattern="rwkv4",
        mlp="channel_mix",
        mlp_hidden=4 * width if config["intermediate_size"] is None else config["intermediate_size"],
        norm="layer",
        embedding_norm=True,
        norm_eps=config["layer_norm_epsilon"],
        tie_embeddings=config["tie_word_embeddings"],
    )


def _write(model: LanguageModel) -> dict[str, Any]:
    config = model.config
    return {
        "model_type": "rwkv",
        "architectures": ["RwkvForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "attention_hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.mlp_size,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _lerps(*names: str) -> Rule:
    """Theirs weigh the token itself, ours the one before."""
    theirs = tuple(f"time_mix_{name}" for name in names)
    return Rule("shift_mix", theirs, (1,) * len(names), lambda t: 1 - t.flatten(0, 1), lambda t: (1 - t)[:, None])


def _rules(config: Config) -> Iterable[Rule]:
    yield Rule("embedding.weight", ("rwkv.embeddings.weight",))
    yield from renamed("embedding_norm", "rwkv.blocks.0.pre_ln", "weight", "bias")
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"blocks.{layer}.", f"rwkv.blocks.{layer}."
        yield from renamed(f"{ours}mixer_norm", f"{theirs}ln1", "weight", "bias")
        yield from renamed(f"{ours}mlp_norm", f"{theirs}ln2", "weight", "bias")
        yield _lerps("receptance", "key", "value").within(f"{ours}mixer.", f"{theirs}attention.")
        mixer = (Rule("time_decay", ("time_decay",)), Rule("time_bonus", ("time_first",)))
        for rule in (*mixer, *same("receptance.weight", "key.weight", "value.weight", "output.weight")):
            yield rule.within(f"{ours}mixer.", f"{theirs}attention.")
        for rule in (_lerps("key", "receptance"), *same("key.weight", "receptance.weight", "value.weight")):
            yield rule.within(f"{ours}mlp.", f"{theirs}feed_forward.")
    yield from renamed("norm", "rwkv.ln_out", "weight", "bias")
    if not config["tie_word_embeddings"]:
        yield Rule("head.weight", ("head.weight",))


def _copies(config: Config) -> Mapping[str, str]:
    return {"head.weight": "rwkv.embeddings.weight"} if config["tie_word_embeddings"] else {}


RWKV = Layout(
    name="transformers' Rwkv",
    mechanism="rwkv4",
    defaults={
        "vocab_size": 50277, "hidden_size": 4096, "num_hidden_layers": 32, "attention_hidden_size": None,
        "intermediate_size": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
    },
    read=_read,
    write=_write,
    rules=_rules,
    copies=_copies,
)  # fmt: skip
