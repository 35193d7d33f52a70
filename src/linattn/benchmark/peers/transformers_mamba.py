"""transformers: its selective scan, its Mamba layer and its Mamba language model, all in torch on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linattn.benchmark.peers import Reader, Stepper
from linattn.checkpoints import save
from linattn.models import LanguageModel

PRECISIONS: Mapping[str, Any] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def selective_scan() -> Callable[..., Tensor]:
    """Its loop over tokens, with our scan's arguments."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    _hush()

    def run(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        """Its tensors end with the tokens."""
        y: Tensor = mamba_selective_scan(x.mT, dt.mT, A, B.squeeze(2).mT, C.squeeze(2).mT)
        return y.mT

    return run


def mixer(layer: nn.Module, d_model: int) -> nn.Module:
    """Its layer with the weights of our Mamba ``layer``, whose other sizes are the defaults."""
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    _hush()
    theirs: nn.Module = MambaMixer(MambaConfig(hidden_size=d_model), layer_idx=0)
    theirs.load_state_dict(layer.state_dict())
    return theirs


def reader(model: LanguageModel, folder: Path, precision: str) -> Reader:
    """Its language model with our weights."""
    from transformers import MambaForCausalLM

    _hush()
    checkpoint = folder / "transformers"
    if not checkpoint.exists():
        save(checkpoint, model, layout="transformers")
    theirs: Any = MambaForCausalLM.from_pretrained(checkpoint, dtype=PRECISIONS[precision]).eval()

    @torch.no_grad()
    def read(ids: Tensor, cache: Any = None) -> tuple[Tensor, Stepper]:
        out = theirs(ids, cache=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1], step_after(out.cache)

    def step_after(cache: Any) -> Stepper:
        return lambda ids: read(ids[:, None], cache)[0]  # the cache is changed in place

    return read


def _hush() -> None:
    """It warns of every kernel that a CPU cannot have, and draws bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
