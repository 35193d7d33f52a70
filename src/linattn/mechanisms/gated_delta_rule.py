"""The gated delta rule (Gated DeltaNet): a decay per token and head, then the delta rule.

    S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T,    o_t = scale * S_t^T q_t

Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from linattn import engine
from linattn.layers.convolution import ShortConvolution
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer, log_decay, log_rates, mask_gate, no_weight_decay, time_step_bias
from linattn.layers.norms import RMSNorm, l2_normalize, promote
from linattn.layers.sizes import divide, three_quarter_heads
from linattn.recurrence import BETA, QUERY, UNIT_KEY, VALUE, Argument, Decay, Domain, Recurrence, Write
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(decay=Decay.TOKEN_HEAD, write=Write.DELTA)


def gated_delta_rule(
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
    """S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T, o_t = scale * S_t^T q_t.

    Args:
        q, k: [B, T, G, K]; v: [B, T, H, V], G divides H. One floating dtype. Keys of norm 1 keep the state bounded.
        g: [B, T, H], natural log of the decay, ≤ 0.
        beta: [B, T, H] in [0, 2], after its sigmoid.
        scale, state, cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns o [B, T, H, V] in v's dtype and the final state [N, H, K, V].
    Raises ValueError naming the argument that does not fit. Source: arXiv 2412.06464.
    """
    return engine.matrix(
        RECURRENCE, q, k, v, g=g, beta=beta,
        scale=scale, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
    )  # type: ignore[return-value]  # fmt: skip


class GatedDeltaNetState(NamedTuple):
    """Inputs that the short convolution still sees, [N, W-1, C], and S [N, H, K, V]."""

    conv: Tensor
    recurrent: Tensor


class GatedDeltaNet(Mixer):
    """Gated DeltaNet; y = W_o (RMSNorm(gated_delta_rule(q/‖q‖, k/‖k‖, v, g, β)) · silu(W_z x)), no biases.

    q, k, v = silu(conv(W x)); g = -e^{A_log} softplus(W_a x + dt_bias) in float32; β = σ(W_b x). At the start e^{A_log}
    is uniform in (0, 16) and softplus(dt_bias) log-uniform in [0.001, 0.1].

    Args:
        d_model: width of the input and output.
        num_heads: query and key heads; None: as many as make their width ¾ d_model, the paper's proportion.
        head_dim: size of a query or key head; None is d_model/4, at most the paper's 256 (or what num_heads leaves).
        expand_v: size of a value head over head_dim.
        num_v_heads: value heads, a multiple of num_heads; None is num_heads.
        allow_neg_eigval: β = 2σ(·), which lets a layer track states (arXiv 2411.12537).
        conv_size: width of the short convolution on q, k, v; 0 leaves it out.
        norm_eps: of the RMSNorm on each head's output.

    The state is a :class:`GatedDeltaNetState`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2412.06464.
    """

    state_type: ClassVar[type] = GatedDeltaNetState

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 2.0,
        num_v_heads: int | None = None,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        self.num_heads, self.head_dim = three_quarter_heads(d_model, num_heads, head_dim)
        self.num_v_heads = self.num_heads if num_v_heads is None else num_v_heads
        divide("num_heads", self.num_heads, self.num_v_heads, "num_v_heads")
        self.head_v_dim = round(self.head_dim * expand_v)
        key_dim, value_dim = self.num_heads * self.head_dim, self.num_v_heads * self.head_v_dim
        self.beta_max = 2.0 if allow_neg_eigval else 1.0
        self.conv_sizes = (key_dim, key_dim, value_dim)
        self.sizes = (sum(self.conv_sizes), value_dim, self.num_v_heads, self.num_v_heads)
        self.in_proj = Linear(d_model, sum(self.sizes), bias=False)
        self.conv1d = ShortConvolution(sum(self.conv_sizes), conv_size)
        # Not from 0, whose logarithm is no number to learn from.
        self.A_log = log_rates(self.num_v_heads, 1e-4)
        self.dt_bias = no_weight_decay(time_step_bias(self.num_v_heads))
        self.norm = RMSNorm(self.head_v_dim, eps=norm_eps)
        self.out_proj = Linear(value_dim, d_model, bias=False)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, GatedDeltaNetState]:
        tail, recurrent = (None, None) if state is None else state
        qkv, z, a, b = self.in_proj(x).split(self.sizes, dim=-1)
        qkv, tail = self.conv1d(qkv, tail, mask=mask, cu_seqlens=cu_seqlens)
        q, k, v = qkv.split(self.conv_sizes, dim=-1)
        q, k = (t.unflatten(-1, (self.num_heads, -1)) for t in (q, k))
        v, z = (t.unflatten(-1, (self.num_v_heads, -1)) for t in (v, z))
        g = log_decay(a, self.A_log, self.dt_bias)
        beta = self.beta_max * promote(b).sigmoid()
        o, recurrent = self.recur(
            x, l2_normalize(q), l2_normalize(k), v, mask_gate(g, mask), mask_gate(beta, mask),
            mask=mask, state=recurrent, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
        return self.out_proj(self.norm(o, z).flatten(2)), self.state_type(tail, recurrent)

    def recur(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        """The recurrence of the layer with input x, for layers built upon it; g and beta are masked already."""
        return gated_delta_rule(q, k, v, g, beta, **options)


register(
    Mechanism(
        name="gated_delta_rule",
        aliases=("gated_deltanet", "gated_delta_net", "gdn"),
        title="Gated delta rule (Gated DeltaNet)",
        recurrence=RECURRENCE,
        arguments=(
            QUERY,
            UNIT_KEY,
            VALUE,
            Argument("g", "B T H", Domain.LOG_DECAY, "decay of each head"),
            BETA,
        ),
        function=gated_delta_rule,
        layer=GatedDeltaNet,
        equation="S_t = e^{g_t} S_{t-1} + β_t k_t (v_t − e^{g_t} S_{t-1}ᵀ k_t)ᵀ,  o_t = scale · S_tᵀ q_t",
        paper="Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv 2412.06464",
        when="The strongest all-round choice: forgets and overwrites; the mixer of Qwen3-Next.",
    )
)
