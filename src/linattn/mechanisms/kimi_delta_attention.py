"""Kimi Delta Attention (KDA): a decay per token, head and key channel, then the delta rule.

    S_t = Diag(e^{g_t}) S_{t-1} + beta_t k_t (v_t - (Diag(e^{g_t}) S_{t-1})^T k_t)^T,    o_t = scale * S_t^T q_t

Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", arXiv 2510.26692.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn import _checks, engine
from linattn.layers.convolution import ShortConvolution
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer, mask_gate, no_weight_decay, time_step_bias, time_steps
from linattn.layers.norms import RMSNorm, l2_normalize, promote
from linattn.layers.sizes import default_heads, divide
from linattn.recurrence import BETA, QUERY, UNIT_KEY, VALUE, Argument, Decay, Domain, Recurrence, Write
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(decay=Decay.TOKEN_CHANNEL, write=Write.DELTA)


def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S_t = Diag(e^{g_t}) S_{t-1} + beta_t k_t (v_t - (Diag(e^{g_t}) S_{t-1})^T k_t)^T, o_t = scale * S_t^T q_t.

    Args:
        q, k: [B, T, G, K]; v: [B, T, H, V], G divides H. One floating dtype. Keys of norm 1 keep the state bounded.
        g: [B, T, H, K], natural log of the decay, ≤ 0.
        beta: [B, T, H] in [0, 2], after its sigmoid.
        scale, state, cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns o [B, T, H, V] in v's dtype and the final state [N, H, K, V].
    Raises ValueError naming the argument that does not fit. Source: arXiv 2510.26692.
    """
    return engine.matrix(
        RECURRENCE, q, k, v, g=g, beta=beta,
        scale=scale, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
    )  # type: ignore[return-value]  # fmt: skip


class KimiDeltaAttentionState(NamedTuple):
    """Inputs that the short convolution still sees, [N, W-1, C], and S [N, H, K, V]."""

    conv: Tensor
    recurrent: Tensor


class KimiDeltaAttention(Mixer):
    """Kimi Delta Attention; y = W_o (RMSNorm(kda(q/‖q‖, k/‖k‖, v, g, β)) · σ(W_g2 W_g1 x)), no biases but the decay's.

    q, k, v = silu(conv(W x)); β = σ(W_b x); the decay is of low rank, with z = W_f2 W_f1 x + dt_bias in float32:
    g = -e^{A_log} softplus(z) or, with ``lower_bound``, g = lower_bound · σ(e^{A_log} z). At the start
    softplus(dt_bias) is log-uniform in [0.001, 0.1] and e^{A_log} uniform in [1, 16], with ``lower_bound`` 1.

    Args:
        d_model: width of the input and output.
        num_heads: query and key heads; None takes heads of a size near d_model/4, at least 32 and at most the
            paper's 128.
        head_dim: size of a query or key head; None is d_model / num_heads.
        expand_v: size of a value head over head_dim.
        num_v_heads: value heads, a multiple of num_heads; None is num_heads.
        allow_neg_eigval: β = 2σ(·), which lets a layer track states (arXiv 2411.12537).
        lower_bound: the strongest log-decay, such as -5; None leaves it unbounded, as in the paper.
        gate_bias: whether the output gate has a bias, W_g2 W_g1 x + b, as flash-linear-attention's has.
        conv_size: width of the short convolution on q, k, v; 0 leaves it out.
        norm_eps: of the RMSNorm on each head's output.

    The state is a :class:`KimiDeltaAttentionState`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2510.26692; the bounded decay: Kimi K3, arXiv 2607.24653.
    """

    state_type = KimiDeltaAttentionState

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 1.0,
        num_v_heads: int | None = None,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
        gate_bias: bool = False,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        if num_heads is None:
            fit = default_heads(d_model, min(max(d_model // 4, 32), 128))
            num_heads = fit if head_dim is None else max(d_model // head_dim, 1)
        if num_heads < 1:
            raise _checks.fail("num_heads", num_heads, "at least 1")
        if lower_bound is not None and not lower_bound < 0:
            raise _checks.fail("lower_bound", lower_bound, "a log-decay < 0, such as -5, or None")
        self.num_heads, self.num_v_heads = num_heads, num_heads if num_v_heads is None else num_v_heads
        divide("num_heads", self.num_heads, self.num_v_heads, "num_v_heads")
        self.head_dim = divide("num_heads", num_heads, d_model, "d_model") if head_dim is None else head_dim
        self.head_v_dim = round(self.head_dim * expand_v)
        key_dim, value_dim = self.num_heads * self.head_dim, self.num_v_heads * self.head_v_dim
        gate_dim, rank = self.num_v_heads * self.head_dim, self.head_v_dim
        self.beta_max, self.lower_bound = 2.0 if allow_neg_eigval else 1.0, lower_bound
        self.conv_sizes = (key_dim, key_dim, value_dim)
        self.sizes = (sum(self.conv_sizes), rank, rank, self.num_v_heads)
        self.in_proj = Linear(d_model, sum(self.sizes), bias=False)
        self.conv1d = ShortConvolution(sum(self.conv_sizes), conv_size)
        self.decay_proj = Linear(rank, gate_dim, bias=False)
        self.gate_proj = Linear(rank, value_dim, bias=gate_bias)
        rate = torch.empty(self.num_v_heads).uniform_(1, 16) if lower_bound is None else torch.ones(self.num_v_heads)
        self.A_log = no_weight_decay(rate.log())
        self.dt_bias = no_weight_decay(time_step_bias(gate_dim))
        self.norm = RMSNorm(self.head_v_dim, eps=norm_eps)
        self.out_proj = Linear(value_dim, d_model, bias=False)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, KimiDeltaAttentionState]:
        tail, recurrent = (None, None) if state is None else state
        qkv, decay, gate, b = self.in_proj(x).split(self.sizes, dim=-1)
        qkv, tail = self.conv1d(qkv, tail, mask=mask, cu_seqlens=cu_seqlens)
        q, k, v = qkv.split(self.conv_sizes, dim=-1)
        q, k = (t.unflatten(-1, (self.num_heads, -1)) for t in (q, k))
        v, gate = (t.unflatten(-1, (self.num_v_heads, -1)) for t in (v, self.gate_proj(gate)))
        beta = self.beta_max * promote(b).sigmoid()
        o, recurrent = kimi_delta_attention(
            l2_normalize(q), l2_normalize(k), v, mask_gate(self._log_decay(decay), mask), mask_gate(beta, mask),
            state=recurrent, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
        return self.out_proj((self.norm(o) * gate.sigmoid()).flatten(2)), KimiDeltaAttentionState(tail, recurrent)

    def _log_decay(self, low: Tensor) -> Tensor:
        """[B, T, rank] -> g [B, T, H, K]."""
        z, heads = self.decay_proj(low), (self.num_v_heads, -1)
        rate = promote(self.A_log).exp().unsqueeze(-1)
        if self.lower_bound is None:
            return -rate * time_steps(z, self.dt_bias).unflatten(-1, heads)
        return self.lower_bound * (rate * (promote(z) + self.dt_bias).unflatten(-1, heads)).sigmoid()


register(
    Mechanism(
        name="kimi_delta_attention",
        aliases=("kda", "kimi_linear", "kimi"),
        title="Kimi Delta Attention (KDA)",
        recurrence=RECURRENCE,
        arguments=(
            QUERY,
            UNIT_KEY,
            VALUE,
            Argument("g", "B T H K", Domain.LOG_DECAY, "decay of each key channel"),
            BETA,
        ),
        function=kimi_delta_attention,
        layer=KimiDeltaAttention,
        equation="S_t = Diag(e^{g_t}) S_{t-1} + β_t k_t (v_t − (Diag(e^{g_t}) S_{t-1})ᵀ k_t)ᵀ,  o_t = scale · S_tᵀ q_t",
        paper="Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv 2510.26692",
        when="Overwriting with the finest forgetting: each key channel fades at its own pace; Kimi Linear's mixer.",
    )
)
