"""The language model: embedding, blocks, norm, head."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linattn import registry, state
from linattn._checks import fail, has_values
from linattn.layers import RMSNorm, SwiGLU
from linattn.layers.channel_mix import ChannelMix
from linattn.layers.linear import Linear
from linattn.models.config import ModelConfig

ModelState = tuple[Any, ...]
"""The states of the blocks, in order: of their mixers, or a :class:`BlockState` where the MLP has one, too."""


class BlockState(NamedTuple):
    """The states of a block's mixer and of its channel mix."""

    mixer: Any
    mlp: Tensor


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layer":
        return nn.LayerNorm(config.d_model, eps=config.norm_eps)
    return RMSNorm(config.d_model, eps=config.norm_eps)


def _mlp(config: ModelConfig, layer: int) -> SwiGLU | ChannelMix | None:
    if not config.mlp_size:
        return None
    if config.mlp == "swiglu":
        return SwiGLU(config.d_model, config.mlp_size)
    return ChannelMix(
        config.d_model,
        config.mlp_size,
        receptance=config.mlp == "channel_mix",
        vocab_size=config.vocab_size if config.mlp == "channel_mix_v7a" else 0,
        layer_index=layer,
        num_layers=config.num_layers,
    )


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        mechanism = registry.get(config.layers[layer])
        self.mixer_norm = _norm(config)
        shares = getattr(mechanism.layer, "shares", False)
        place = {"first": config.layers.index(mechanism.name) == layer} if shares else {}
        self.mixer = mechanism.layer(
            config.d_model, **config.options(mechanism.name), layer_index=layer, num_layers=config.num_layers, **place
        )
        self.mlp_norm = _norm(config) if config.mlp_size else None
        self.mlp = _mlp(config, layer)

    def forward(self, x: Tensor, state: Any, shared: dict[str, Tensor], **options: Any) -> tuple[Tensor, Any]:
        """x [B, T, d_model] -> the same, and the state; options as in a mixer's forward.

        ``shared`` is of this forward pass: the token ``ids``, their ``embedding``, and what layers that declare it
        (``Mixer.shares``) hand to later ones.
        """
        mlp_state = None
        if isinstance(self.mlp, ChannelMix) and state is not None:
            if not isinstance(state, BlockState):
                raise fail("state", type(state).__name__, "a BlockState")
            state, mlp_state = state
        given = {"shared": shared} if getattr(self.mixer, "shares", False) else {}
        y, state = self.mixer(self.mixer_norm(x), state, **options, **given)
        x = x + y
        if self.mlp is None or self.mlp_norm is None:
            return x, state
        h = self.mlp_norm(x)
        if not isinstance(self.mlp, ChannelMix):
            return x + self.mlp(h), state
        where = {name: options.get(name) for name in ("mask", "cu_seqlens")}
        y, mlp_state = self.mlp(h, mlp_state, shared=shared, **where)
        return x + y, BlockState(state, mlp_state)


class LanguageModel(nn.Module):
    """A decoder of tokens: embedding, blocks, norm, head (the embedding itself where they are tied).

    Weights start normal with the config's ``initial_std``; those that write to the residual stream are divided by
    the root of the number of such writes, as in GPT-2. Decay rates, time steps and convolutions keep what their layers
    gave them, and so do all weights of layers that are ``initialized``, unless the config names an
    ``initializer_range``. An embedding that is normalised starts uniform in ±1e-4, as in RWKV.
    Raises ValueError for a config whose sizes do not fit.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.embedding_norm = _norm(config) if config.embedding_norm else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = _norm(config)
        self.head = Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self._initialize()

    def _initialize(self) -> None:
        writes = self.config.num_layers * (2 if self.config.mlp_size else 1)
        own = self.config.initializer_range is None
        started = {
            inner
            for module in self.modules()
            if own and getattr(module, "initialized", False)
            for inner in module.modules()
        }
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) and module not in started:
                residual = name.endswith("out_proj")
                scale = 1 / math.sqrt(writes) if residual else 1.0
                nn.init.normal_(module.weight, std=self.config.initial_std * scale)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        if own and self.embedding_norm is not None and not self.config.tie_embeddings:
            nn.init.uniform_(self.embedding.weight, -1e-4, 1e-4)

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
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        shared = {"ids": ids, "embedding": x}
        states = []
        for block, before in zip(self.blocks, state or (None,) * len(self.blocks), strict=True):
            x, after = block(x, before, shared, **options)
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
    if has_values(ids):
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise fail("ids", f"token {low if low < 0 else high}", f"0 … {vocab_size - 1} (vocab_size={vocab_size})")


def count_parameters(model: nn.Module) -> int:
    """Numbers to learn; what is used twice (a tied head) counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def state_bytes(model_state: ModelState) -> list[int]:
    """Bytes of each block's state."""
    return [state.nbytes(layer) for layer in model_state]
