"""RWKV-5 (Eagle): a learnt decay a channel, and a bonus for the token itself.

    S_t = Diag(e^g) S_{t-1} + k_t v_t^T,    o_t = (S_{t-1} + Diag(u) k_t v_t^T)^T q_t

Source: Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", arXiv 2404.05892.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import _checks, engine
from linattn.layers.group_norm import GroupNorm
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer, mask_gate, no_weight_decay
from linattn.layers.norms import promote
from linattn.layers.rwkv import block, bonus_start, decay_start, depth, start
from linattn.layers.sizes import default_heads, divide
from linattn.layers.token_shift import TimeMixState, channel_ramp, token_mix
from linattn.recurrence import KEY, QUERY, VALUE, Argument, Decay, Domain, Read, Recurrence
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(decay=Decay.CHANNEL, read=Read.BEFORE, bonus=True)
OF_HEAD = Recurrence(decay=Decay.HEAD, read=Read.BEFORE, bonus=True)
MASKED = Recurrence(decay=Decay.TOKEN_CHANNEL, read=Read.BEFORE, bonus=True)
VERSIONS = ("5.0", "5.1", "5.2")


def rwkv5(
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
    """S_t = Diag(e^g) S_{t-1} + k_t v_t^T, o_t = scale * (S_{t-1} + Diag(u) k_t v_t^T)^T q_t.

    Args:
        q, k: [B, T, G, K]; v: [B, T, H, V], G divides H. One floating dtype. q is RWKV's receptance r.
        g: [H, K], or [H] for all channels of a head: natural log of the decay, ≤ 0.
        u: [H, K], the bonus of the token that is read.
        scale: of the read, 1 as in the paper.
        state, cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns o [B, T, H, V] in v's dtype and the final state [N, H, K, V].
    Raises ValueError naming the argument that does not fit. Source: arXiv 2404.05892.
    """
    recurrence = OF_HEAD if isinstance(g, Tensor) and g.dim() == 1 else RECURRENCE
    return engine.matrix(
        recurrence, q, k, v, g=g, u=u,
        scale=scale, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
    )  # type: ignore[return-value]  # fmt: skip


class RWKV5(Mixer):
    """RWKV-5's time mix; y = W_o (GroupNorm(rwkv5(W_r x_r, W_k x_k, W_v x_v, g, u)) · silu(W_g x_g)), no biases.

    x_j = x + μ_j (x' - x), where x' is the input before x; g = -e^{time_decay}. Initialisation as in RWKV-LM, with
    normal numbers in place of orthogonal matrices of the same variance; W_o starts at zero.

    Args:
        d_model: width of the input and output.
        num_heads: None takes heads of a size near 64.
        version: "5.2" has a decay and a bonus u = time_bonus for each channel; "5.1" one for each head, with
            u = e^{time_bonus}; "5.0" is 5.1 without the gate W_g.
        group_norm_eps: of the norm on each head's output. Some checkpoints want 1e-5, and do not say so.

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
        version: str = "5.2",
        group_norm_eps: float = 64e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        _checks.one_of("version", version, VERSIONS)
        self.version = version
        self.num_heads = H = default_heads(d_model, 64) if num_heads is None else num_heads
        self.head_dim = divide("num_heads", H, d_model, "d_model")
        deep, fall = depth(layer_index, num_layers)
        ramps = [channel_ramp(d_model, fall / 2), channel_ramp(d_model, fall), channel_ramp(d_model, fall, 0.3 * deep)]
        if version != "5.0":
            ramps.append(channel_ramp(d_model, fall / 2))
        self.shift_mix = no_weight_decay(torch.stack(ramps))  # of r, k, v, g
        if version == "5.2":
            self.time_decay = no_weight_decay(decay_start(d_model, -6, -1, deep).view(H, -1))
            self.time_bonus = no_weight_decay(bonus_start(d_model, deep).view(H, -1))
        else:
            self.time_decay = no_weight_decay(decay_start(H, -8, -1, deep)[:, None])
            self.time_bonus = no_weight_decay(torch.full((H, 1), -3.0))
        self.receptance, self.key, self.value = (Linear(d_model, d_model, bias=False) for _ in range(3))
        self.gate = None if version == "5.0" else Linear(d_model, d_model, bias=False)
        self.norm = GroupNorm(H, self.head_dim, eps=group_norm_eps, start=((1 + layer_index) / num_layers) ** 0.7)
        self.output = Linear(d_model, d_model, bias=False)
        start((self.receptance, 1), (self.key, 0.1), (self.value, 1), (self.gate, 0.1), (self.output, 0))

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, TimeMixState]:
        shift, recurrent = (None, None) if state is None else state
        (xr, xk, xv, *xg), shift = token_mix(x, self.shift_mix, shift, mask=mask, cu_seqlens=cu_seqlens)
        q, k, v = (
            project(y).unflatten(-1, (self.num_heads, -1))
            for project, y in ((self.receptance, xr), (self.key, xk), (self.value, xv))
        )
        g, u = -promote(self.time_decay).exp(), promote(self.time_bonus)
        u = (u if self.version == "5.2" else u.exp()).expand(-1, self.head_dim)
        recurrence = RECURRENCE
        if mask is not None:  # padding neither decays the state nor writes to it
            g, recurrence = mask_gate(g.expand(*mask.shape, -1, self.head_dim), mask), MASKED
        elif self.version != "5.2":
            g, recurrence = g[:, 0], OF_HEAD
        o, recurrent = engine.matrix(
            recurrence, q, mask_gate(k, mask), v, g=g, u=u, scale=1.0,
            state=recurrent, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
        assert isinstance(recurrent, Tensor)
        y = self.norm(o)
        if self.gate is not None:
            y = y * F.silu(self.gate(xg[0]))
        return self.output(y), TimeMixState(shift, recurrent)


register(
    Mechanism(
        name="rwkv5",
        aliases=("rwkv_5", "eagle"),
        title="RWKV-5 (Eagle)",
        recurrence=RECURRENCE,
        arguments=(
            QUERY,
            KEY,
            VALUE,
            Argument("g", "H K", Domain.LOG_DECAY, "decay of each channel"),
            Argument("u", "H K", meaning="bonus of the token that is read"),
        ),
        function=rwkv5,
        layer=RWKV5,
        equation="S_t = Diag(e^g) S_{t-1} + k_t v_tᵀ,  o_t = scale · (S_{t-1} + Diag(u) k_t v_tᵀ)ᵀ q_t",
        paper="Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, arXiv 2404.05892",
        when="RWKV-5 checkpoints; where a decay that does not look at the data is enough.",
        block=block("channel_mix", 3.5),
    )
)
