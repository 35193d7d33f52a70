"""RWKV-7 (Goose): a decay per token and channel, and a delta rule whose strength is learnt per channel.

    S_t = Diag(e^{g_t}) S_{t-1} - (a_t * kappa_t) (S_{t-1}^T kappa_t)^T + k_t v_t^T,    o_t = S_t^T q_t

Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", arXiv 2503.14456.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import _checks, engine
from linattn.layers.group_norm import GroupNorm
from linattn.layers.linear import Linear
from linattn.layers.low_rank import LowRank
from linattn.layers.mixer import Mixer, mask_gate, no_weight_decay
from linattn.layers.norms import promote
from linattn.layers.rwkv import block, depth
from linattn.layers.sizes import default_heads, divide
from linattn.layers.token_shift import TimeMixState, channel_ramp, token_mix
from linattn.recurrence import KEY, QUERY, VALUE, Argument, Decay, Domain, Recurrence, Write
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(decay=Decay.TOKEN_CHANNEL, write=Write.LOW_RANK)


def rwkv7(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    kappa: Tensor,
    a: Tensor,
    *,
    scale: float = 1.0,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S_t = Diag(e^{g_t}) S_{t-1} - (a_t * kappa_t) (S_{t-1}^T kappa_t)^T + k_t v_t^T, o_t = scale * S_t^T q_t.

    Args:
        q, k: [B, T, G, K]; v: [B, T, H, V], G divides H. One floating dtype. q is RWKV's receptance r.
        g: [B, T, H, K], natural log of the decay, ≤ 0.
        kappa: [B, T, H, K], the key that is erased. Of norm 1, or the state may grow.
        a: [B, T, H, K] in [0, 1], how much of it each channel forgets: the learning rate in context.
        scale: of the read, 1 as in the paper.
        state, cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns o [B, T, H, V] in v's dtype and the final state [N, H, K, V].
    Raises ValueError naming the argument that does not fit. Source: arXiv 2503.14456.
    """
    sizes: dict[str, int] = {}
    _checks.tensor("kappa", kappa, "B T H K", sizes)
    _checks.tensor("a", a, "B T H K", sizes)
    _checks.same_device({"kappa": kappa, "a": a})
    return engine.matrix(
        RECURRENCE, q, k, v, g=g, a=-kappa, b=kappa * a,
        scale=scale, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
    )  # type: ignore[return-value]  # fmt: skip


def _rank(factor: float, d_model: int) -> int:
    return max(32, round(factor * math.sqrt(d_model) / 32) * 32)


class RWKV7(Mixer):
    """RWKV-7's time mix; y = W_o ((GroupNorm(rwkv7(r, k, v, g, κ, a)) + (Σ r · k · r_k) v) · gate), no biases.

    x_j = x + μ_j (x' - x) for j = r, w, k, v, a, g, where x' is the input before x, and r, k, v = W x. With a low-rank
    map L for each: g = -e^{-1/2} σ(L_w(x_w)) with a tanh inside, a = σ(L_a(x_a)), gate = W σ(W x_g),
    κ = k · k_k / ‖k · k_k‖, then k · (1 + (a - 1) k_a) for k. In all layers but the first,
    v + (v_first - v) σ(L_v(x_v)) stands for v, where v_first is the same token's v in the first such layer: it comes in
    ``shared``; without it v stays. Initialisation as in RWKV-LM: W_o and the inner matrices of L start at zero.

    Args:
        d_model: width of the input and output.
        num_heads: None takes heads of a size near 64.
        decay_rank, rate_rank, value_rank, gate_rank: widths of L_w, L_a, L_v and the gate; None are RWKV-LM's
            2.5, 2.5, 1.7 and 5 times √d_model, rounded to multiples of 32.
        group_norm_eps: of the norm on each head's output.
        first: whether this is the first such layer, which has no L_v; None: where ``layer_index`` is 0.

    The state is a :class:`TimeMixState`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2503.14456.
    """

    state_type = TimeMixState
    shares = True
    initialized = True

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        decay_rank: int | None = None,
        rate_rank: int | None = None,
        value_rank: int | None = None,
        gate_rank: int | None = None,
        group_norm_eps: float = 64e-5,
        first: bool | None = None,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        C = d_model
        self.num_heads = H = default_heads(C, 64) if num_heads is None else num_heads
        self.head_dim = divide("num_heads", H, C, "d_model")
        deep, fall = depth(layer_index, num_layers)
        ramps = [channel_ramp(C, power * fall) for power in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)]
        self.shift_mix = no_weight_decay(torch.stack(ramps))  # of r, w, k, v, a, g
        line = torch.linspace(-0.5, 0.5, C)
        zigzag = torch.linspace(-1, 1, self.head_dim).repeat(H)
        zigzag = zigzag * zigzag.abs()
        decay = -6 + 6 * torch.linspace(0, 1, C) ** (1 + deep**0.3) + 0.5 + 2.5 * zigzag
        self.decay = LowRank(C, _rank(2.5, C) if decay_rank is None else decay_rank, C, torch.tanh, decay)
        rate = -0.19 + 0.3 * zigzag + 0.4 * line
        self.rate = LowRank(C, _rank(2.5, C) if rate_rank is None else rate_rank, C, nn.Identity(), rate)
        self.residual = None
        if not (layer_index == 0 if first is None else first):
            rank = _rank(1.7, C) if value_rank is None else value_rank
            self.residual = LowRank(C, rank, C, nn.Identity(), 0.73 - 0.4 * line)
        self.gate = LowRank(C, _rank(5, C) if gate_rank is None else gate_rank, C, torch.sigmoid)
        self.k_k = no_weight_decay((0.71 - 0.1 * line).view(H, -1))
        self.k_a = no_weight_decay(torch.full((H, self.head_dim), 1.02))
        self.r_k = no_weight_decay(torch.full((H, self.head_dim), -0.04))
        self.receptance, self.key, self.value, self.output = (Linear(C, C, bias=False) for _ in range(4))
        for projection, bound in ((self.receptance, 0.5), (self.key, 0.05), (self.value, 0.5), (self.output, 0.0)):
            nn.init.uniform_(projection.weight, -bound * C**-0.5, bound * C**-0.5)
        self.norm = GroupNorm(H, self.head_dim, eps=group_norm_eps, start=((1 + layer_index) / num_layers) ** 0.7)

    def mix(
        self,
        x: Tensor,
        state: Any,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        mode: str,
        backend: str,
        shared: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, TimeMixState]:
        shift, recurrent = (None, None) if state is None else state
        (xr, xw, xk, xv, xa, xg), shift = token_mix(x, self.shift_mix, shift, mask=mask, cu_seqlens=cu_seqlens)
        r, k, v = self.receptance(xr), self.key(xk), self.value(xv)
        if shared is not None:
            first = shared.setdefault("v_first", v)
            if self.residual is not None:
                v = torch.lerp(v, first, self.residual(xv).sigmoid().to(v.dtype))
        r, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in (r, k, v))
        g, a = (promote(t).unflatten(-1, (self.num_heads, -1)).sigmoid() for t in (self.decay(xw), self.rate(xa)))
        kappa = F.normalize(promote(k) * self.k_k, dim=-1, eps=1e-12)
        k = (k * (1 + (a - 1) * self.k_a)).to(v.dtype)
        o, recurrent = rwkv7(
            r, mask_gate(k, mask), v, mask_gate(-math.exp(-0.5) * g, mask), kappa, mask_gate(a, mask),
            state=recurrent, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
        bonus = (r * k * self.r_k).sum(-1, keepdim=True) * v
        return self.output((self.norm(o) + bonus.flatten(2)) * self.gate(xg)), TimeMixState(shift, recurrent)


register(
    Mechanism(
        name="rwkv7",
        aliases=("rwkv_7", "goose"),
        title="RWKV-7 (Goose)",
        recurrence=RECURRENCE,
        arguments=(
            QUERY,
            KEY,
            VALUE,
            Argument("g", "B T H K", Domain.LOG_DECAY, "decay of each key channel"),
            Argument("kappa", "B T H K", Domain.UNIT, "key that is erased, of norm 1"),
            Argument("a", "B T H K", Domain.UNIT_INTERVAL, "how much of it each channel forgets"),
        ),
        function=rwkv7,
        layer=RWKV7,
        equation="S_t = Diag(e^{g_t}) S_{t-1} − (a_t ⊙ κ_t) (S_{t-1}ᵀ κ_t)ᵀ + k_t v_tᵀ,  o_t = scale · S_tᵀ q_t",
        paper="RWKV-7 Goose with Expressive Dynamic State Evolution, arXiv 2503.14456",
        when="RWKV-7 checkpoints; tracks states like the delta rule, with gates for every channel.",
        block=block("channel_mix_v7", 4.0),
    )
)
