"""RWKV-6 (Finch): a decay per token and channel, and a bonus for the token itself.

    S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T,    o_t = (S_{t-1} + Diag(u) k_t v_t^T)^T q_t

Source: Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", arXiv 2404.05892.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import engine
from linattn.layers.group_norm import GroupNorm
from linattn.layers.linear import Linear, einsum
from linattn.layers.low_rank import LowRank
from linattn.layers.mixer import Mixer, mask_gate, no_weight_decay
from linattn.layers.norms import promote
from linattn.layers.rwkv import block, bonus_start, decay_start, depth, start
from linattn.layers.sizes import default_heads, divide
from linattn.layers.token_shift import TimeMixState, channel_ramp, interpolate, token_shift
from linattn.recurrence import KEY, QUERY, VALUE, Argument, Decay, Domain, Read, Recurrence
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(decay=Decay.TOKEN_CHANNEL, read=Read.BEFORE, bonus=True)


def rwkv6(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    u: Tensor,
    *,
    scale: float = 1.0,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T, o_t = scale * (S_{t-1} + Diag(u) k_t v_t^T)^T q_t.

    Args:
        q, k: [B, T, G, K]; v: [B, T, H, V], G divides H. One floating dtype. q is RWKV's receptance r.
        g: [B, T, H, K], natural log of the decay, ≤ 0.
        u: [H, K], the bonus of the token that is read.
        scale: of the read, 1 as in the paper.
        state, cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns o [B, T, H, V] in v's dtype and the final state [N, H, K, V].
    Raises ValueError naming the argument that does not fit. Source: arXiv 2404.05892.
    """
    return engine.matrix(
        RECURRENCE, q, k, v, g=g, u=u,
        scale=scale, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
    )  # type: ignore[return-value]  # fmt: skip


class RWKV6(Mixer):
    """RWKV-6's time mix; y = W_o (GroupNorm(rwkv6(W_r x_r, W_k x_k, W_v x_v, g, u)) · silu(W_g x_g)), no biases.

    With x' the input before x and d = x' - x: x_j = x + d (μ_j + tanh((x + d μ) W_down)_j W_up,j) for j = w, k, v, r
    and g; then g = -exp(time_decay + W_up tanh(W_down x_w)) in float32. Initialisation as in RWKV-LM, with normal
    numbers in place of orthogonal matrices of the same variance; W_o and the W_down start at zero.

    Args:
        d_model: width of the input and output.
        num_heads: None takes heads of a size near 64.
        expand_k: width of receptances, keys and decays over d_model.
        mix_rank, decay_rank: widths of the two low-rank maps; None are the paper's 32 and 64, or d_model/8 and
            d_model/4 where that is less.
        group_norm_eps: of the norm on each head's output.

    The state is a :class:`TimeMixState`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2404.05892.
    """

    state_type = TimeMixState
    initialized = True

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        expand_k: float = 1.0,
        mix_rank: int | None = None,
        decay_rank: int | None = None,
        group_norm_eps: float = 64e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        self.num_heads = H = default_heads(d_model, 64) if num_heads is None else num_heads
        self.head_dim = divide("num_heads", H, d_model, "d_model")
        key_dim = round(d_model * expand_k)
        divide("num_heads", H, key_dim, "expand_k * d_model")
        mix_rank = min(32, max(d_model // 8, 1)) if mix_rank is None else mix_rank
        decay_rank = min(64, max(d_model // 4, 1)) if decay_rank is None else decay_rank
        deep, fall = depth(layer_index, num_layers)
        late, early = channel_ramp(d_model, fall), channel_ramp(d_model, fall / 2)
        self.shift_base = no_weight_decay(late.clone())
        ramps = [late, late, channel_ramp(d_model, fall, 0.3 * deep), early, early]
        self.shift_mix = no_weight_decay(torch.stack(ramps))  # of w, k, v, r, g
        self.shift_down = Linear(d_model, 5 * mix_rank, bias=False)
        self.shift_down.weight = no_weight_decay(torch.zeros(5 * mix_rank, d_model))
        self.shift_up = no_weight_decay(torch.empty(5, mix_rank, d_model).uniform_(-0.01, 0.01))
        self.decay = LowRank(d_model, decay_rank, key_dim, torch.tanh, decay_start(key_dim, -6, -1, deep))
        self.time_bonus = no_weight_decay(bonus_start(key_dim, deep).view(H, -1))
        self.receptance, self.key = (Linear(d_model, key_dim, bias=False) for _ in range(2))
        self.value, self.gate = (Linear(d_model, d_model, bias=False) for _ in range(2))
        self.norm = GroupNorm(H, self.head_dim, eps=group_norm_eps, start=((1 + layer_index) / num_layers) ** 0.7)
        self.output = Linear(d_model, d_model, bias=False)
        start((self.receptance, 1), (self.key, 0.1), (self.value, 1), (self.gate, 0.1), (self.output, 0))

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, TimeMixState]:
        shift, recurrent = (None, None) if state is None else state
        before, shift = token_shift(x, shift, mask=mask, cu_seqlens=cu_seqlens)
        base = interpolate(x, before, self.shift_base[None])[0]
        low = torch.tanh(self.shift_down(base)).unflatten(-1, (5, -1))
        moved = einsum("btjr,jrc->jbtc", low, self.shift_up.to(low.dtype))
        weight = self.shift_mix[:, None, None].to(moved.dtype) + moved
        xw, xk, xv, xr, xg = (x + (before - x) * weight).unbind()
        q, k, v = (
            project(y).unflatten(-1, (self.num_heads, -1))
            for project, y in ((self.receptance, xr), (self.key, xk), (self.value, xv))
        )
        g = -promote(self.decay(xw)).exp().unflatten(-1, (self.num_heads, -1))
        o, recurrent = rwkv6(
            q, mask_gate(k, mask), v, mask_gate(g, mask), promote(self.time_bonus),
            state=recurrent, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
        return self.output(self.norm(o) * F.silu(self.gate(xg))), TimeMixState(shift, recurrent)


register(
    Mechanism(
        name="rwkv6",
        aliases=("rwkv_6", "finch"),
        title="RWKV-6 (Finch)",
        recurrence=RECURRENCE,
        arguments=(
            QUERY,
            KEY,
            VALUE,
            Argument("g", "B T H K", Domain.LOG_DECAY, "decay of each key channel"),
            Argument("u", "H K", meaning="bonus of the token that is read"),
        ),
        function=rwkv6,
        layer=RWKV6,
        equation="S_t = Diag(e^{g_t}) S_{t-1} + k_t v_tᵀ,  o_t = scale · (S_{t-1} + Diag(u) k_t v_tᵀ)ᵀ q_t",
        paper="Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv 2404.05892",
        when="RWKV-6 checkpoints; gated linear attention with a token shift that looks at the data.",
        block=block("channel_mix", 3.5),
    )
)
