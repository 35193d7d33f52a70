"""Checkpoints that transformers wrote give the logits that transformers computes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from proof.judge import judge

import linattn

transformers = pytest.importorskip("transformers")
IDS = torch.randint(96, (2, 37), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2}


def theirs(name: str, seed: int = 0, **options: Any) -> Any:
    """A random model of theirs, its vectors away from zero and one so that each of them matters."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


CASES = {
    "mamba": ("Mamba", {"state_size": 8}),
    "mamba with biases, untied": (
        "Mamba",
        {"state_size": 4, "use_bias": True, "time_step_rank": 5, "tie_word_embeddings": False},
    ),
    "falcon_mamba": ("FalconMamba", {"state_size": 8, "mixer_rms_eps": 1e-3}),
    "rwkv": ("Rwkv", {"context_length": 64}),
    "mamba2 of one group": (
        "Mamba2",
        {"state_size": 16, "num_heads": 6, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    ),
    "mamba2 of two groups, untied": (
        "Mamba2",
        {"state_size": 16, "num_heads": 6, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    ),
    "mamba2, tied": (
        "Mamba2",
        {"state_size": 16, "num_heads": 12, "head_dim": 8, "n_groups": 1, "tie_word_embeddings": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shards", [False, True])
def test_what_transformers_saved(tmp_path: Path, case: str, shards: bool) -> None:
    name, options = CASES[case]
    model = theirs(name, **options)
    model.save_pretrained(tmp_path / "m", **({"max_shard_size": "20KB"} if shards else {}))
    assert (tmp_path / "m" / "model.safetensors.index.json").exists() == shards
    ours = linattn.load(tmp_path / "m")
    with torch.no_grad():
        judge(ours.config.pattern, f"transformers {name}, its files loaded", "logits", ours(IDS)[0], model(IDS).logits)
