"""Gated linear attention (GLA): a data-dependent decay for every key channel.

    S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T,    o_t = scale * S_t^T q_t

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", arXiv 2312.06635.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from linattn import engine
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer, mask_gate
from linattn.layers.norms import RMSNorm, promote
from linattn.layers.sizes import divide
from linattn.recurrence import KEY, QUERY, VALUE, Argument, Decay, Domain, Recurrence
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(decay=Decay.TOKEN_CHANNEL)


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T, o_t = scale * S_t^T q_t.

    Args:
        q, k: [B, T, G, K]; v: [B, T, H, V], G divides H. One floating dtype.
        g: [B, T, H, K], natural log of the decay, ≤ 0.
        scale: None is K^-0.5.
        state: [N, H, K, V] to continue from, float32 (float64 for float64 inputs).
        cu_seqlens: int [N+1], the boundaries of N sequences packed into one row (B = 1).
        mode: "auto", "chunkwise", "recurrent" or "parallel".
        backend: "auto", "triton", "cpu", "chunked" or "reference"; :func:`linattn.explain` says what auto takes.

    Returns o [B, T, H, V] in v's dtype and the final state [N, H, K, V].
    Raises ValueError naming the argument that does not fit. Source: arXiv 2312.06635.
    """
    return engine.matrix(
        RECURRENCE, q, k, v, g=g, scale=scale, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend
    )  # type: ignore[return-value]


class GatedLinearAttentionState(NamedTuple):
    """S [N, H, K, V]."""

    recurrent: Tensor


class GatedLinearAttention(Mixer):
    """Gated linear attention; y = W_o (RMSNorm(gla(W_q x, W_k x, W_v x, g)) · silu(W_z x)), no biases but the gate's.

    The gate is of low rank, g = log σ(W_2 W_1 x + b) / gate_logit_normalizer.

    Args:
        d_model: width of the input and output.
        num_heads: None is the paper's 4 (fewer where 4 does not divide the widths).
        expand_k, expand_v: widths of keys and values over d_model.
        gate_low_rank_dim: rank of the gate.
        gate_logit_normalizer: the larger, the longer the memory at the start of training.
        norm_eps: of the RMSNorm on each head's output.

    The state is a :class:`GatedLinearAttentionState`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2312.06635.
    """

    state_type = GatedLinearAttentionState

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        gate_low_rank_dim: int = 16,
        gate_logit_normalizer: float = 16.0,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        key_dim, value_dim = round(d_model * expand_k), round(d_model * expand_v)
        fit = next(n for n in (4, 3, 2, 1) if key_dim % n == value_dim % n == 0)
        self.num_heads = fit if num_heads is None else num_heads
        self.head_dim = divide("num_heads", self.num_heads, key_dim, "expand_k * d_model")
        self.head_v_dim = divide("num_heads", self.num_heads, value_dim, "expand_v * d_model")
        self.gate_logit_normalizer = gate_logit_normalizer
        self.sizes = (key_dim, key_dim, value_dim, value_dim, gate_low_rank_dim)
        self.in_proj = Linear(d_model, sum(self.sizes), bias=False)
        self.gate_proj = Linear(gate_low_rank_dim, key_dim)
        self.norm = RMSNorm(self.head_v_dim, eps=norm_eps)
        self.out_proj = Linear(value_dim, d_model, bias=False)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, GatedLinearAttentionState]:
        *qkvz, low = self.in_proj(x).split(self.sizes, dim=-1)
        g = F.logsigmoid(promote(self.gate_proj(low))) / self.gate_logit_normalizer
        q, k, v, z, g = (t.unflatten(-1, (self.num_heads, -1)) for t in (*qkvz, mask_gate(g, mask)))
        o, recurrent = gated_linear_attention(
            q, k, v, g,
            state=None if state is None else state[0], cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
        return self.out_proj(self.norm(o, z).flatten(2)), GatedLinearAttentionState(recurrent)


register(
    Mechanism(
        name="gated_linear_attention",
        aliases=("gla",),
        title="Gated linear attention (GLA)",
        recurrence=RECURRENCE,
        arguments=(QUERY, KEY, VALUE, Argument("g", "B T H K", Domain.LOG_DECAY, "decay of each key channel")),
        function=gated_linear_attention,
        layer=GatedLinearAttention,
        equation="S_t = Diag(e^{g_t}) S_{t-1} + k_t v_tᵀ,  o_t = scale · S_tᵀ q_t",
        paper="Gated Linear Attention Transformers with Hardware-Efficient Training, arXiv 2312.06635",
        when="General language modelling; forgets per channel, extrapolates beyond the training length.",
    )
)
