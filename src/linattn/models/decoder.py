"""The language model: embedding, blocks, norm, head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from linattn import registry, state
from linattn._checks import fail
from linattn.layers import RMSNorm, SwiGLU
from linattn.models.config import ModelConfig

ModelState = tuple[Any, ...]
"""The states of the blocks' mixers, in order."""


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        mechanism = registry.get(config.layers[layer])
        self.mixer_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.mixer = mechanism.layer(
            config.d_model, **config.options(mechanism.name), layer_index=layer, num_layers=config.num_layers
        )
        self.mlp_norm = RMSNorm(config.d_model, eps=config.norm_eps) if config.mlp_size else None
        self.mlp = SwiGLU(config.d_model, config.mlp_size) if config.mlp_size else None

    def forward(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """x [B, T, d_model] -> the same, and the mixer's state; options as in a mixer's forward."""
        y, state = self.mixer(self.mixer_norm(x), state, **options)
        x = x + y
        if self.mlp is not None and self.mlp_norm is not None:
            x = x + self.mlp(self.mlp_norm(x))
        return x, state


class LanguageModel(nn.Module):
    """A decoder of tokens: embedding, blocks, RMSNorm, head (the embedding itself where they are tied).

    Weights start normal with the config's ``initial_std``; those that write to the residual stream are divided by
    the root of the number of such writes, as in GPT-2. Decay rates, time steps and convolutions keep what their layers
    gave them. Raises ValueError for a config whose sizes do not fit.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self._initialize()

    def _initialize(self) -> None:
        writes = self.config.num_layers * (2 if self.config.mlp_size else 1)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith("out_proj")
                scale = 1 / math.sqrt(writes) if residual else 1.0
                nn.init.normal_(module.weight, std=self.config.initial_std * scale)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        mode: str = "auto",
        backend: str = "auto",
    ) -> tuple[Tensor, ModelState]:
        """Read ids [B, T] int64; return logits [B, T, vocab_size] and the state after them.

        The same call prefills, continues (with a ``state``) and steps (with one token). ``mask``: bool [B, T], False at
        padding. ``cu_seqlens``: int [N+1], N sequences packed into one row. ``mode`` and ``backend``: as in the
        mechanisms' functions. Raises ValueError for input that does not fit.
        """
        hidden, state = self.features(ids, state, mask=mask, cu_seqlens=cu_seqlens, mode=mode, backend=backend)
        return self.head(hidden), state

    def features(self, ids: Tensor, state: ModelState | None = None, **options: Any) -> tuple[Tensor, ModelState]:
        """What the head reads: [B, T, d_model], and the state. Options as in :meth:`forward`.

        For callers that need the logits of some tokens only: ``model.head(hidden[:, -1])``.
        """
        self._check(ids, state)
        x = self.embedding(ids)
        states = []
        for block, before in zip(self.blocks, state or (None,) * len(self.blocks), strict=True):
            x, after = block(x, before, **options)
            states.append(after)
        return self.norm(x), tuple(states)

    def _check(self, ids: Tensor, state: ModelState | None) -> None:
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype != torch.int64 or ids.shape[1] == 0:
            came = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise fail("ids", came, "an int64 tensor [B, T] of at least one token")
        if state is not None and (not isinstance(state, tuple) or len(state) != len(self.blocks)):
            came = f"{len(state)} states" if isinstance(state, tuple) else type(state).__name__
            raise fail("state", came, f"a tuple of {len(self.blocks)}, one a block")
        # Elsewhere a look at the data would wait for the device.
        if ids.device.type == "cpu" and not torch.compiler.is_compiling():
            check_vocabulary(ids, self.config.vocab_size)


def check_vocabulary(ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError if a token is not in [0, vocab_size)."""
    if ids.numel():
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise fail("ids", f"token {low if low < 0 else high}", f"0 … {vocab_size - 1} (vocab_size={vocab_size})")


def count_parameters(model: nn.Module) -> int:
    """Numbers to learn; what is used twice (a tied head) counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def state_bytes(model_state: ModelState) -> list[int]:
    """Bytes of each block's state."""
    return [state.nbytes(layer) for layer in model_state]
