"""Gated DeltaProduct: several delta steps for every token, after one decay.

    S_{t,0} = e^{g_t} S_{t-1},    S_{t,j} = S_{t,j-1} + beta_{t,j} k_{t,j} (v_{t,j} - S_{t,j-1}^T k_{t,j})^T,  j = 1 … R
    S_t = S_{t,R},                o_t = scale * S_t^T q_t

The state's transition is a product of R Householder reflections, which tracks what one cannot, such as permutations of
more things. It is the gated delta rule on R tokens for each one, of which the first decays and the last is read.

Source: Siems et al., "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products",
arXiv 2502.10297.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import _checks, engine
from linattn.layers.convolution import ShortConvolution
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer, log_decay, log_rates, mask_gate, no_weight_decay, time_step_bias
from linattn.layers.norms import RMSNorm, l2_normalize, promote
from linattn.layers.sizes import divide, three_quarter_heads
from linattn.recurrence import QUERY, Argument, Decay, Domain, Recurrence, Write
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(decay=Decay.TOKEN_HEAD, write=Write.DELTA)


def gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S_{t,0} = e^{g_t} S_{t-1}; S_{t,j} = S_{t,j-1} + beta_{t,j} k_{t,j} (v_{t,j} - S_{t,j-1}^T k_{t,j})^T, j = 1 … R.

    The state after the token is S_{t,R}, and o_t = scale * S_{t,R}^T q_t.

    Args:
        q: [B, T, G, K]; k: [B, T, R, G, K]; v: [B, T, R, H, V], G divides H. One floating dtype. Keys of norm 1 keep
            the state bounded.
        g: [B, T, H], natural log of the decay, ≤ 0; None is no decay (DeltaProduct).
        beta: [B, T, R, H] in [0, 2], after its sigmoid.
        scale, state, cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns o [B, T, H, V] in v's dtype and the final state [N, H, K, V].
    Raises ValueError naming the argument that does not fit. Source: arXiv 2502.10297.
    """
    sizes: dict[str, int] = {}
    _checks.tensor("v", v, "B T R H V", sizes)
    _checks.tensor("q", q, "B T G K", sizes, v.dtype)
    _checks.tensor("k", k, "B T R G K", sizes, v.dtype)
    _checks.tensor("beta", beta, "B T R H", sizes)
    if g is not None:
        _checks.tensor("g", g, "B T H", sizes)
        g = F.pad(g.unsqueeze(2), (0, 0, 0, sizes["R"] - 1)).flatten(1, 2)
    if cu_seqlens is not None:
        _checks.cu_seqlens_form(cu_seqlens, sizes["B"])
        if not torch.compiler.is_compiling():  # before they count R times as many tokens
            _checks.boundaries(cu_seqlens, sizes["T"])
        cu_seqlens = cu_seqlens * sizes["R"]
    steps = sizes["R"]
    _checks.same_device({"v": v, "q": q, "k": k, "g": g, "beta": beta})
    q = F.pad(q.unsqueeze(2), (0, 0, 0, 0, steps - 1, 0))
    o, S = engine.matrix(
        RECURRENCE if g is not None else Recurrence(write=Write.DELTA), *(t.flatten(1, 2) for t in (q, k, v)), g=g,
        beta=beta.flatten(1, 2), scale=scale, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
    )  # fmt: skip
    return o[:, steps - 1 :: steps], S  # type: ignore[return-value]


class GatedDeltaProductState(NamedTuple):
    """Inputs that the short convolution still sees, [N, W-1, C], and S [N, H, K, V]."""

    conv: Tensor
    recurrent: Tensor


class GatedDeltaProduct(Mixer):
    """Gated DeltaProduct; y = W_o (RMSNorm(gated_delta_product(q/‖q‖, k/‖k‖, v, g, β)) · silu(W_z x)), no biases.

    q, k, v = silu(conv(W x)), with keys and values of their own for each delta step; g = -e^{A_log} softplus(W_a x +
    dt_bias) in float32; β = 2σ(W_b x). At the start e^{A_log} is uniform in (0, 16) and softplus(dt_bias) log-uniform
    in [0.001, 0.1].

    Args:
        d_model: width of the input and output.
        num_heads: query and key heads; None: as many as make their width ¾ d_model, the reference's proportion.
        head_dim: size of a query or key head; None is d_model/4, at most 256 (or what num_heads leaves).
        expand_v: size of a value head over head_dim.
        num_v_heads: value heads, a multiple of num_heads; None is num_heads.
        num_householder: delta steps a token, R.
        forget_gate: whether the state decays; without it the layer is DeltaProduct.
        allow_neg_eigval: β = 2σ(·), which tracking states needs (arXiv 2411.12537); False is β = σ(·).
        conv_size: width of the short convolution on q, k, v; 0 leaves it out.
        norm_eps: of the RMSNorm on each head's output.

    The state is a :class:`GatedDeltaProductState`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2502.10297.
    """

    state_type = GatedDeltaProductState

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 2.0,
        num_v_heads: int | None = None,
        num_householder: int = 2,
        forget_gate: bool = True,
        allow_neg_eigval: bool = True,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        if num_householder < 1:
            raise _checks.fail("num_householder", num_householder, "at least 1")
        self.num_heads, self.head_dim = three_quarter_heads(d_model, num_heads, head_dim)
        self.num_v_heads = self.num_heads if num_v_heads is None else num_v_heads
        divide("num_heads", self.num_heads, self.num_v_heads, "num_v_heads")
        self.head_v_dim, self.num_householder = round(self.head_dim * expand_v), num_householder
        key_dim, value_dim = self.num_heads * self.head_dim, self.num_v_heads * self.head_v_dim
        self.forget_gate, self.beta_max = forget_gate, 2.0 if allow_neg_eigval else 1.0
        self.conv_sizes = (key_dim, num_householder * key_dim, num_householder * value_dim)
        steps, gates = num_householder * self.num_v_heads, self.num_v_heads * forget_gate
        self.sizes = (sum(self.conv_sizes), value_dim, steps, gates)
        self.in_proj = Linear(d_model, sum(self.sizes), bias=False)
        self.conv1d = ShortConvolution(sum(self.conv_sizes), conv_size)
        if forget_gate:
            # Not from 0, whose logarithm is no number to learn from.
            self.A_log = log_rates(self.num_v_heads, 1e-4)
            self.dt_bias = no_weight_decay(time_step_bias(self.num_v_heads))
        self.norm = RMSNorm(self.head_v_dim, eps=norm_eps)
        self.out_proj = Linear(value_dim, d_model, bias=False)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, GatedDeltaProductState]:
        tail, recurrent = (None, None) if state is None else state
        qkv, z, b, a = self.in_proj(x).split(self.sizes, dim=-1)
        qkv, tail = self.conv1d(qkv, tail, mask=mask, cu_seqlens=cu_seqlens)
        q, k, v = qkv.split(self.conv_sizes, dim=-1)
        q, z = q.unflatten(-1, (self.num_heads, -1)), z.unflatten(-1, (self.num_v_heads, -1))
        k = k.unflatten(-1, (self.num_householder, self.num_heads, -1))
        v = v.unflatten(-1, (self.num_householder, self.num_v_heads, -1))
        beta = self.beta_max * promote(b).sigmoid().unflatten(-1, (self.num_householder, -1))
        g = mask_gate(log_decay(a, self.A_log, self.dt_bias), mask) if self.forget_gate else None
        o, recurrent = gated_delta_product(
            l2_normalize(q), l2_normalize(k), v, g, mask_gate(beta, mask),
            state=recurrent, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
        return self.out_proj(self.norm(o, z).flatten(2)), GatedDeltaProductState(tail, recurrent)


register(
    Mechanism(
        name="gated_delta_product",
        aliases=("deltaproduct", "delta_product", "gated_deltaproduct"),
        title="Gated DeltaProduct",
        recurrence=RECURRENCE,
        arguments=(
            QUERY,
            Argument("k", "B T R G K", Domain.UNIT, "keys of the delta steps, of norm 1"),
            Argument("v", "B T R H V", meaning="values of the delta steps"),
            Argument("g", "B T H", Domain.LOG_DECAY, "decay of each head, before the first step"),
            Argument("beta", "B T R H", Domain.BETA, "strength of each delta write, after its sigmoid"),
        ),
        function=gated_delta_product,
        layer=GatedDeltaProduct,
        equation="S_t = H_{t,R} … H_{t,1} e^{g_t} S_{t-1} + writes,  H_{t,j} = I − β_{t,j} k_{t,j} k_{t,j}ᵀ,  "
        "o_t = scale · S_tᵀ q_t",
        paper="DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products, arXiv 2502.10297",
        when="Tracking of states that one reflection a token cannot follow, at R times the recurrence's work.",
    )
)
