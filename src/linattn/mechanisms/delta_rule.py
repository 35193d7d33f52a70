"""The delta rule (DeltaNet): write the difference between a value and what the state already answers.

    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,    o_t = scale * S_t^T q_t

Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", arXiv 2406.06484;
beta up to 2: Grazzi et al., arXiv 2411.12537.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from linattn import engine
from linattn.layers.convolution import ShortConvolution
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer, mask_gate
from linattn.layers.norms import RMSNorm, l2_normalize, promote
from linattn.layers.sizes import default_heads, divide
from linattn.recurrence import BETA, QUERY, UNIT_KEY, VALUE, Recurrence, Write
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(write=Write.DELTA)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T, o_t = scale * S_t^T q_t.

    Args:
        q, k: [B, T, G, K]; v: [B, T, H, V], G divides H. One floating dtype. Keys of norm 1 keep the state bounded.
        beta: [B, T, H] in [0, 2], after its sigmoid; values above 1 give negative eigenvalues (state tracking).
        scale, state, cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns o [B, T, H, V] in v's dtype and the final state [N, H, K, V].
    Raises ValueError naming the argument that does not fit. Source: arXiv 2406.06484.
    """
    return engine.matrix(
        RECURRENCE, q, k, v, beta=beta, scale=scale, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend
    )  # type: ignore[return-value]


class DeltaNetState(NamedTuple):
    """Inputs that the short convolution still sees, [N, W-1, C], and S [N, H, K, V]."""

    conv: Tensor
    recurrent: Tensor


class DeltaNet(Mixer):
    """DeltaNet; y = W_o RMSNorm(delta_rule(q/‖q‖, k/‖k‖, v, β)), q, k, v = silu(conv(W x)), β = σ(W_b x), no biases.

    Args:
        d_model: width of the input and output.
        num_heads: None takes heads of a size near d_model/4, at least 32 and at most the paper's 128.
        allow_neg_eigval: β = 2σ(·), which lets a layer track states (arXiv 2411.12537).
        conv_size: width of the short convolution on q, k, v; 0 leaves it out.
        norm_eps: of the RMSNorm on each head's output.

    The state is a :class:`DeltaNetState`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2406.06484.
    """

    state_type = DeltaNetState

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        size = min(max(d_model // 4, 32), 128)
        self.num_heads = default_heads(d_model, size) if num_heads is None else num_heads
        self.head_dim = divide("num_heads", self.num_heads, d_model, "d_model")
        self.beta_max = 2.0 if allow_neg_eigval else 1.0
        self.sizes = (3 * d_model, self.num_heads)
        self.in_proj = Linear(d_model, sum(self.sizes), bias=False)
        self.conv1d = ShortConvolution(3 * d_model, conv_size)
        self.norm = RMSNorm(self.head_dim, eps=norm_eps)
        self.out_proj = Linear(d_model, d_model, bias=False)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, DeltaNetState]:
        tail, recurrent = (None, None) if state is None else state
        qkv, b = self.in_proj(x).split(self.sizes, dim=-1)
        qkv, tail = self.conv1d(qkv, tail, mask=mask, cu_seqlens=cu_seqlens)
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).chunk(3, dim=2)
        beta = mask_gate(self.beta_max * promote(b).sigmoid(), mask)
        o, recurrent = delta_rule(
            l2_normalize(q), l2_normalize(k), v, beta,
            state=recurrent, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
        return self.out_proj(self.norm(o).flatten(2)), DeltaNetState(tail, recurrent)


register(
    Mechanism(
        name="delta_rule",
        aliases=("deltanet", "delta_net", "delta"),
        title="Delta rule (DeltaNet)",
        recurrence=RECURRENCE,
        arguments=(QUERY, UNIT_KEY, VALUE, BETA),
        function=delta_rule,
        layer=DeltaNet,
        equation="S_t = S_{t-1} + β_t k_t (v_t − S_{t-1}ᵀ k_t)ᵀ,  o_t = scale · S_tᵀ q_t",
        paper="Parallelizing Linear Transformers with the Delta Rule over Sequence Length, arXiv 2406.06484",
        when="Exact recall and overwriting of key-value pairs; with β up to 2, state tracking.",
    )
)
