"""Retention (RetNet): a fixed decay for each head.

    S_t = gamma_h S_{t-1} + k_t v_t^T,    o_t = scale * S_t^T q_t,    gamma_h = 1 - 2^{-5-h}

Source: Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models", arXiv 2307.08621.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn import _checks, engine
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer, mask_gate
from linattn.layers.norms import RMSNorm
from linattn.layers.rotary import Rotary
from linattn.layers.sequences import positions
from linattn.layers.sizes import default_heads, divide
from linattn.recurrence import KEY, QUERY, VALUE, Argument, Decay, Domain, Recurrence
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(decay=Decay.HEAD)


def default_decay(heads: int, device: torch.device | None = None) -> Tensor:
    """log(1 - 2^{-5-h}) for h = 0 … heads-1: float32 [heads]."""
    return torch.log1p(-(2.0 ** (-5 - torch.arange(heads, dtype=torch.float64, device=device)))).to(torch.float32)


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S_t = e^{decay_h} S_{t-1} + k_t v_t^T, o_t = scale * S_t^T q_t.

    Args:
        q, k: [B, T, G, K]; v: [B, T, H, V], G divides H. One floating dtype.
        decay: [H], natural log, ≤ 0; None is log(1 - 2^{-5-h}).
        scale, state, cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns o [B, T, H, V] in v's dtype and the final state [N, H, K, V].
    Raises ValueError naming the argument that does not fit. Source: arXiv 2307.08621.
    """
    sizes: dict[str, int] = {}
    _checks.tensor("v", v, "B T H V", sizes)
    if decay is None:
        decay = default_decay(v.shape[2], v.device)
    _checks.tensor("decay", decay, "H", sizes)
    return engine.matrix(
        RECURRENCE, q, k, v, g=decay, scale=scale, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend
    )  # type: ignore[return-value]


class RetentionState(NamedTuple):
    """S [N, H, K, V] and the tokens read by each sequence, [N]."""

    recurrent: Tensor
    position: Tensor


class Retention(Mixer):
    """Multi-scale retention; y = W_o (RMSNorm(retention(rope(W_q x), rope(W_k x), W_v x)) · silu(W_g x)), no biases.

    Args:
        d_model: width of the input and output.
        num_heads: None takes heads of a size near d_model/4, at least 32 and at most the paper's 256.
        expand_v: width of the values over d_model.
        rope: turn the channels by RoPE's frequencies 10000^(-2j/K) in pairs (j, j+K/2), as flash-linear-attention
            does, instead of the paper's 10000^(-j/(K/2-1)) in pairs (2j, 2j+1).
        norm_affine: give the RMSNorm on each head's output a weight, which the paper's has not.
        norm_eps: of that RMSNorm.

    The state is a :class:`RetentionState`.
    Raises ValueError naming the argument that does not fit. Source: arXiv 2307.08621.
    """

    state_type = RetentionState

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        expand_v: float = 2.0,
        rope: bool = False,
        norm_affine: bool = False,
        norm_eps: float = 1e-6,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        size = min(max(d_model // 4, 32), 256)
        self.num_heads = default_heads(d_model, size) if num_heads is None else num_heads
        value_dim = round(d_model * expand_v)
        self.head_dim = divide("num_heads", self.num_heads, d_model, "d_model", even=True)
        self.head_v_dim = divide("num_heads", self.num_heads, value_dim, "expand_v * d_model")
        self.sizes = (d_model, d_model, value_dim, value_dim)
        self.in_proj = Linear(d_model, sum(self.sizes), bias=False)
        self.rotary = Rotary(self.head_dim, interleaved=not rope, inclusive=not rope)
        self.norm = RMSNorm(self.head_v_dim, eps=norm_eps, affine=norm_affine)
        self.out_proj = Linear(value_dim, d_model, bias=False)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, RetentionState]:
        recurrent, offset = (None, None) if state is None else state
        q, k, v, gate = (t.unflatten(-1, (self.num_heads, -1)) for t in self.in_proj(x).split(self.sizes, dim=-1))
        position, offset = positions(x, offset, mask, cu_seqlens)
        q, k = self.rotary(position, q, k)
        decay, recurrence = default_decay(self.num_heads, x.device), RECURRENCE
        if mask is not None:  # padding must not decay the state
            decay, recurrence = mask_gate(decay.expand(*mask.shape, -1), mask), Recurrence(decay=Decay.TOKEN_HEAD)
        o, recurrent = engine.matrix(
            recurrence, q, k, v, g=decay, state=recurrent, cu_seqlens=cu_seqlens, mode=mode, backend=backend
        )
        assert isinstance(recurrent, Tensor)
        return self.out_proj(self.norm(o, gate).flatten(2)), RetentionState(recurrent, offset)


register(
    Mechanism(
        name="retention",
        aliases=("retnet",),
        title="Retention (RetNet)",
        recurrence=RECURRENCE,
        arguments=(
            QUERY,
            KEY,
            VALUE,
            Argument("decay", "H", Domain.LOG_DECAY, "fixed decay of each head", optional=True),
        ),
        function=retention,
        layer=Retention,
        equation="S_t = γ_h S_{t-1} + k_t v_tᵀ,  o_t = scale · S_tᵀ q_t,  γ_h = 1 − 2^{−5−h}",
        paper="Retentive Network: A Successor to Transformer for Large Language Models, arXiv 2307.08621",
        when="A simple baseline with fixed memory lengths; cheap, no gates to learn.",
    )
)
