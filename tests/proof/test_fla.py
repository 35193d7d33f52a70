"""flash-linear-attention's own models on a GPU against what linattn loads of their checkpoints."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from proof.judge import judge

import linattn

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

TOKENS = 48  # so few that fla runs its recurrent kernels, which take float32
COMMON = {
    "vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 192, "num_heads": 2,
    "use_cache": False, "fuse_cross_entropy": False,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "linear_attention": ("linear_attn", "LinearAttention", {}),
    "retention": ("retnet", "RetNet", {}),
    "gated_linear_attention": ("gla", "GLA", {}),
    "hgrn2": ("hgrn2", "HGRN2", {"num_heads": None, "expand_ratio": 32, "num_hidden_layers": 4}),
    "delta_rule": ("delta_net", "DeltaNet", {}),
    "gated_delta_rule": ("gated_deltanet", "GatedDeltaNet", {"head_dim": 48, "expand_v": 1.0}),
    "rwkv6": ("rwkv6", "RWKV6", {}),
    "rwkv7": ("rwkv7", "RWKV7", {"num_heads": None, "head_dim": 64, "num_hidden_layers": 3, "use_l2warp": False}),
}


@pytest.mark.parametrize("mechanism", FAMILIES)
def test_models_of_fla(mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")  # otherwise its products of float32 are tf32's
    pytest.importorskip("fla")
    module, prefix, options = FAMILIES[mechanism]
    models = importlib.import_module(f"fla.models.{module}")
    torch.manual_seed(0)
    config = {name: value for name, value in (COMMON | options).items() if value is not None}
    theirs = getattr(models, f"{prefix}ForCausalLM")(getattr(models, f"{prefix}Config")(**config))
    for parameter in theirs.parameters():  # nothing stays at 0 or 1, where a mistake would not show
        parameter.data = parameter.data.float() + 0.1 * torch.randn_like(parameter.data.float())
    theirs = theirs.cuda().eval()
    theirs.save_pretrained(tmp_path)
    ours = linattn.load(tmp_path, device="cuda").eval()
    ids = torch.randint(128, (2, TOKENS), device="cuda")
    with torch.no_grad():
        judge(mechanism, f"flash-linear-attention {prefix}ForCausalLM", "logits", ours(ids)[0], theirs(ids).logits)
