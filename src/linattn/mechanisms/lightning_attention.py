"""Lightning attention (TransNormer, MiniMax): a fixed decay for each head, weaker in higher layers.

    S_t = e^{-s_h} S_{t-1} + k_t v_t^T,    o_t = scale * S_t^T q_t

Source: Qin et al., "Lightning Attention-2", arXiv 2401.04658; MiniMax, "MiniMax-01", arXiv 2501.08313.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import _checks, engine
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer, mask_gate
from linattn.layers.norms import RMSNorm
from linattn.layers.sizes import default_heads, divide
from linattn.mechanisms.retention import RECURRENCE, retention
from linattn.recurrence import KEY, QUERY, VALUE, Argument, Decay, Domain, Recurrence
from linattn.registry import Mechanism, register

MASKED = Recurrence(decay=Decay.TOKEN_HEAD)  # padding must not decay the state


def slope_decay(heads: int, layer_index: int = 0, num_layers: int = 1, device: torch.device | None = None) -> Tensor:
    """-2^{-8 (h+1) / heads} (1 - layer_index / (num_layers - 1 + 1e-5) + 1e-5), h = 0 … heads-1: float32 [heads].

    The slopes of ALiBi, falling to almost nothing in the last layer, as MiniMax has them.
    """
    slope = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64, device=device) / heads)
    return (-slope * (1 - layer_index / (num_layers - 1 + 1e-5) + 1e-5)).to(torch.float32)


def lightning_attention(
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
        decay: [H], natural log, ≤ 0; None is that of a first layer, :func:`slope_decay`.
        scale, state, cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns o [B, T, H, V] in v's dtype and the final state [N, H, K, V].
    Raises ValueError naming the argument that does not fit. Source: arXiv 2401.04658.
    """
    if decay is None:
        _checks.tensor("v", v, "B T H V", {})
        decay = slope_decay(v.shape[2], device=v.device)
    return retention(q, k, v, decay, scale=scale, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend)


class LightningAttentionState(NamedTuple):
    """S [N, H, K, K]."""

    recurrent: Tensor


class LightningAttention(Mixer):
    """MiniMax-01's linear layer; y = W_o (RMSNorm(lightning(silu(W_q x), silu(W_k x), silu(W_v x))) · σ(W_z x)).

    No biases, no scale; the norm is over all heads; the decay is :func:`slope_decay` of the layer.

    Args:
        d_model: width of the input and output.
        num_heads: None takes heads of a size near d_model/4, at least 32 and at most MiniMax's 128.
        head_dim: None is d_model / num_heads.
        norm_eps: of the RMSNorm.

    The state is a :class:`LightningAttentionState`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2501.08313.
    """

    state_type = LightningAttentionState

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        norm_eps: float = 1e-6,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        size = min(max(d_model // 4, 32), 128)
        self.num_heads = default_heads(d_model, size) if num_heads is None else num_heads
        if self.num_heads < 1:
            raise _checks.fail("num_heads", num_heads, "at least 1")
        self.head_dim = divide("num_heads", self.num_heads, d_model, "d_model") if head_dim is None else head_dim
        width = self.num_heads * self.head_dim
        self.in_proj = Linear(d_model, 4 * width, bias=False)
        self.norm = RMSNorm(width, eps=norm_eps)
        self.out_proj = Linear(width, d_model, bias=False)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, LightningAttentionState]:
        q, k, v, z = self.in_proj(x).chunk(4, dim=-1)
        q, k, v = (F.silu(t).unflatten(-1, (self.num_heads, -1)) for t in (q, k, v))
        decay, recurrence = slope_decay(self.num_heads, self.layer_index, self.num_layers, x.device), RECURRENCE
        if mask is not None:
            decay, recurrence = mask_gate(decay.expand(*mask.shape, -1), mask), MASKED
        o, recurrent = engine.matrix(
            recurrence, q, k, v, g=decay, scale=1.0,
            state=None if state is None else state[0], cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
        assert isinstance(recurrent, Tensor)
        return self.out_proj(self.norm(o.flatten(2)) * z.sigmoid()), LightningAttentionState(recurrent)


register(
    Mechanism(
        name="lightning_attention",
        aliases=("lightning", "minimax"),
        title="Lightning attention (MiniMax)",
        recurrence=RECURRENCE,
        arguments=(
            QUERY,
            KEY,
            VALUE,
            Argument("decay", "H", Domain.LOG_DECAY, "fixed decay of each head", optional=True),
        ),
        function=lightning_attention,
        layer=LightningAttention,
        equation="S_t = e^{−s_h} S_{t-1} + k_t v_tᵀ,  o_t = scale · S_tᵀ q_t",
        paper="MiniMax-01: Scaling Foundation Models with Lightning Attention, arXiv 2501.08313",
        when="Fixed memory lengths from a few tokens to the whole text; seven of eight layers of MiniMax-01.",
    )
)
