"""What a state weighs, known before anything runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from linattn import state
from linattn._checks import fail
from linattn.models.config import ModelConfig
from linattn.models.decoder import LanguageModel


def state_size(
    of: ModelConfig | nn.Module, batch: int = 1, *, tokens: int = 1, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes of the state of ``batch`` sequences of ``tokens`` tokens, as :func:`linattn.state.nbytes` counts them.

    ``of``: a config, a model or a layer (one on the meta device will do), as if in ``dtype``. The tokens are read by
    shapes alone: neither weights nor states take any memory. Only the caches of softmax attention grow with ``tokens``.
    Raises ValueError for fewer than one sequence or token.
    """
    for name, value in (("batch", batch), ("tokens", tokens)):
        if value < 1:
            raise fail(name, value, "at least 1")
    with FakeTensorMode(), torch.no_grad(), torch.device("cpu"):
        module = LanguageModel(of) if isinstance(of, ModelConfig) else of
        weights = {
            name: torch.empty(t.shape, dtype=dtype if t.is_floating_point() else t.dtype)
            for name, t in [*module.named_parameters(), *module.named_buffers()]
        }
        options: dict[str, Any] = {"backend": "chunked"}  # the one that looks at no data
        if isinstance(module, LanguageModel):
            x = torch.zeros(batch, tokens, dtype=torch.int64)
        else:
            width: Any = module.d_model
            x = torch.zeros(batch, tokens, width, dtype=dtype)
            options |= {"shared": {"embedding": x}} if getattr(module, "shares", False) else {}
        _, after = torch.func.functional_call(module, weights, (x,), options)
        return state.nbytes(after)
