"""mLSTM in the place of the mLSTM layers of transformers' xLSTM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from proof.transplant import Parameters, Transplant, prove, shaken
from torch import Tensor

from linattn import MLSTM, MLSTMState
from linattn.mechanisms.mlstm import MLSTMLayerState

transformers = pytest.importorskip("transformers")

HEADS = 4


class Graft(Transplant):
    """xLSTM's layers take their state from the model and give it back."""

    def forward(self, x: Tensor, state: Any = None) -> Any:
        if state is not None:
            state = MLSTMLayerState(MLSTMState(state[0], state[1], state[2].squeeze(-1)))
        y, after = self.layer(x, state)
        C, n, m = after.recurrent
        return y, (C, n, m.unsqueeze(-1))


def config() -> Any:
    config = transformers.xLSTMConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=2, num_heads=HEADS, qk_dim_factor=1.0, chunk_size=16,
        gate_soft_cap=7.0, max_inference_chunksize=1024,
    )  # fmt: skip
    config.layer_types = ["linear_attention"] * 2
    return config


def convert(theirs: Parameters) -> Parameters:
    return {
        "in_proj.weight": torch.cat([theirs[f"{part}.weight"] for part in ("q", "k", "v", "ogate_preact")]),
        **{
            f"gate_{kind}": torch.cat([theirs[f"{gate}gate_preact.{kind}"] for gate in "if"])
            for kind in ("weight", "bias")
        },
        "norm.weight": theirs["multihead_norm.weight"],
        "out_proj.weight": theirs["out_proj.weight"],
    }


def test_mlstm() -> None:
    torch.manual_seed(0)
    theirs = transformers.xLSTMForCausalLM(config())
    for name, parameter in theirs.named_parameters():
        if "gate" in name and name.endswith("bias"):
            parameter.data.normal_(1, 2)  # as they start, the input gates are shut and the denominator is 1
    theirs = shaken(theirs)
    prove(
        "mlstm", "transformers xLSTMForCausalLM", theirs, "mlstm_layer",
        lambda: MLSTM(64, num_heads=HEADS, expand_k=1.0, gate_soft_cap=7.0), convert, torch.float32,
        layers="backbone.blocks", theirs_in=torch.float32, graft=Graft, padding=False,
    )  # fmt: skip
