"""HGRN2: gated linear attention whose keys are what the forget gate leaves.

    S_t = Diag(e^{g_t}) S_{t-1} + (1 - e^{g_t}) v_t^T,    o_t = scale * S_t^T q_t

Source: Qin et al., "HGRN2: Gated Linear RNNs with State Expansion", arXiv 2404.07904.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import _checks, engine
from linattn.layers.convolution import ShortConvolution
from linattn.layers.forget_gate import LowerBoundedGate
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer, mask_gate
from linattn.layers.norms import RMSNorm
from linattn.layers.sizes import default_heads, divide
from linattn.recurrence import VALUE, Argument, Decay, Domain, Recurrence
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(decay=Decay.TOKEN_CHANNEL)


def hgrn2(
    q: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T with k_t = 1 - e^{g_t}, o_t = scale * S_t^T q_t.

    Args:
        q: [B, T, H, K]; v: [B, T, H, V]. One floating dtype.
        g: [B, T, H, K], natural log of the forget gate, ≤ 0.
        scale, state, cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns o [B, T, H, V] in v's dtype and the final state [N, H, K, V].
    Raises ValueError naming the argument that does not fit. Source: arXiv 2404.07904.
    """
    sizes: dict[str, int] = {}
    _checks.tensor("v", v, "B T H V", sizes)
    _checks.tensor("q", q, "B T H K", sizes, v.dtype)
    _checks.tensor("g", g, "B T H K", sizes)
    k = -torch.expm1(g.to(torch.promote_types(v.dtype, torch.float32))).to(v.dtype)
    return engine.matrix(
        RECURRENCE, q, k, v, g=g, scale=scale, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend
    )  # type: ignore[return-value]


class HGRN2State(NamedTuple):
    """Inputs that the short convolution still sees, [N, W-1, C], and S [N, H, K, V]."""

    conv: Tensor
    recurrent: Tensor


class HGRN2(Mixer):
    """HGRN2; y = W_o RMSNorm(hgrn2(silu(W_q x), W_i x, g)), g = log(β + (1 - β) σ(W_f x)), no biases.

    β rises with the layer (:class:`linattn.layers.forget_gate.LowerBoundedGate`). The norm is over all heads.

    Args:
        d_model: width of the input and output.
        num_heads: None takes heads of a size near the paper's 128.
        conv_size: width of the short convolution on q, f, i; 0 leaves it out.
        norm_eps: of the RMSNorm.

    The state is an :class:`HGRN2State`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2404.07904.
    """

    state_type = HGRN2State

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        conv_size: int = 0,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        self.num_heads = default_heads(d_model, 128) if num_heads is None else num_heads
        self.head_dim = divide("num_heads", self.num_heads, d_model, "d_model")
        self.in_proj = Linear(d_model, 3 * d_model, bias=False)
        self.conv1d = ShortConvolution(3 * d_model, conv_size, activation=False)
        self.forget_gate = LowerBoundedGate(d_model, layer_index, num_layers)
        self.norm = RMSNorm(d_model, eps=norm_eps)
        self.out_proj = Linear(d_model, d_model, bias=False)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, HGRN2State]:
        tail, recurrent = (None, None) if state is None else state
        qfi, tail = self.conv1d(self.in_proj(x), tail, mask=mask, cu_seqlens=cu_seqlens)
        q, f, i = qfi.chunk(3, dim=-1)
        g = mask_gate(self.forget_gate(f), mask)
        q, v, g = (t.unflatten(-1, (self.num_heads, -1)) for t in (F.silu(q), i, g))
        o, recurrent = hgrn2(q, v, g, state=recurrent, cu_seqlens=cu_seqlens, mode=mode, backend=backend)
        return self.out_proj(self.norm(o.flatten(2))), HGRN2State(tail, recurrent)


register(
    Mechanism(
        name="hgrn2",
        title="HGRN2",
        recurrence=RECURRENCE,
        arguments=(
            Argument("q", "B T H K", meaning="queries"),
            VALUE,
            Argument("g", "B T H K", Domain.LOG_DECAY, "log of the forget gate, whose rest is the key"),
        ),
        function=hgrn2,
        layer=HGRN2,
        equation="S_t = Diag(e^{g_t}) S_{t-1} + (1 − e^{g_t}) v_tᵀ,  o_t = scale · S_tᵀ q_t",
        paper="HGRN2: Gated Linear RNNs with State Expansion, arXiv 2404.07904",
        when="As gated linear attention with a projection less: what a channel writes is what it forgets.",
    )
)
