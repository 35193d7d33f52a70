"""RWKV-4 (Dove): an average of the values, weighed by e^k and by the distance, for every channel on its own.

    n_t = e^g n_{t-1} + e^{k_t} v_t,    d_t = e^g d_{t-1} + e^{k_t}
    o_t = (n_{t-1} + e^{u + k_t} v_t) / (d_{t-1} + e^{u + k_t})

Source: Peng et al., "RWKV: Reinventing RNNs for the Transformer Era", arXiv 2305.13048.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn import _checks, engine
from linattn.layers.exponential_gate import stabilize
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer, mask_gate, no_weight_decay
from linattn.layers.norms import promote
from linattn.layers.rwkv import block, decay_start, depth, start
from linattn.layers.token_shift import TimeMixState, channel_ramp, token_mix, token_shift
from linattn.recurrence import Argument, Decay, Domain, Engine, Read, Recurrence
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(Engine.SCAN, Decay.CHANNEL, read=Read.BEFORE, bonus=True)


class RWKV4State(NamedTuple):
    """Numerator and denominator divided by e^maximum, and the maximum of the exponents so far; each [N, V]."""

    numerator: Tensor
    denominator: Tensor
    maximum: Tensor


def rwkv4(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    u: Tensor,
    *,
    state: RWKV4State | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, RWKV4State]:
    """n_t = e^g n_{t-1} + e^{k_t} v_t, d_t likewise of ones, o_t = (n_{t-1} + e^{u+k_t} v_t) / (d_{t-1} + e^{u+k_t}).

    Any k is safe: numerator and denominator are kept divided by the exponential of a running maximum.

    Args:
        k, v: [B, T, V], one floating dtype. k may be -inf: such a token is not written.
        g: [V], or [B, T, V] where tokens differ: natural log of the decay, ≤ 0.
        u: [V], the bonus of the token that is read.
        state: what an earlier call returned: a :class:`RWKV4State` of tensors [N, V]; N is B, or the number of packed
            sequences.
        cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns o [B, T, V] in v's dtype and the final state, float32 (float64 for float64 inputs).
    Raises ValueError naming the argument that does not fit. Source: arXiv 2305.13048.
    """
    sizes: dict[str, int] = {}
    _checks.tensor("v", v, "B T V", sizes)
    _checks.tensor("k", k, "B T V", sizes, v.dtype)
    _checks.tensor("g", g, "V" if isinstance(g, Tensor) and g.dim() == 1 else "B T V", sizes)
    _checks.tensor("u", u, "V", sizes)
    if cu_seqlens is not None:
        _checks.cu_seqlens_form(cu_seqlens, v.shape[0])
    before, m = None, None
    if state is not None:
        if not isinstance(state, tuple) or len(state) != 3:
            raise _checks.fail("state", type(state).__name__, "a RWKV4State(numerator, denominator, maximum)")
        sizes["N"] = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        for name, part in zip(RWKV4State._fields, state, strict=True):
            _checks.tensor(f"state.{name}", part, "N V", sizes, promote(v).dtype)
        numerator, denominator, m = state
        before = torch.cat([numerator, denominator], -1)
    _checks.same_device({"v": v, "k": k, "g": g, "u": u, "state": before, "cu_seqlens": cu_seqlens})
    fused = engine.average(k, v, g, u, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend)
    if fused is not None:
        return fused[0], RWKV4State(*fused[1])
    stable = stabilize(g, k, m, cu_seqlens, backend)
    weight, value = stable.j.exp(), promote(v)
    written = torch.cat([weight * value, weight], -1)
    h, end = engine.scan(
        written, torch.cat([stable.g, stable.g], -1), state=before, cu_seqlens=cu_seqlens, mode=mode, backend=backend
    )
    h, _ = token_shift(h, before, cu_seqlens=cu_seqlens)
    own = (promote(u) + promote(k)).to(stable.m_before.dtype)
    top = torch.maximum(stable.m_before, own).detach()
    past, now = ((x - top).exp().to(value.dtype) for x in (stable.m_before, own))
    numerator, denominator = h.chunk(2, -1)
    numerator, denominator = past * numerator + now * value, past * denominator + now
    o = numerator / torch.where(denominator == 0, 1, denominator)  # 0 where there is nothing to read
    numerator, denominator = (end * stable.rescale.repeat(1, 2)).to(end.dtype).chunk(2, -1)
    return o.to(v.dtype), RWKV4State(numerator.contiguous(), denominator.contiguous(), stable.final)


class RWKV4(Mixer):
    """RWKV-4's time mix; y = W_o (σ(W_r x_r) · rwkv4(W_k x_k, W_v x_v, g, u)), no biases.

    x_j = x + μ_j (x' - x) for j = r, k, v, where x' is the input before x; g = -e^{time_decay}. Initialisation as in
    RWKV-LM: all projections but W_v start at zero.

    Args:
        d_model: width of the input and output, and of the state: the channels are independent.

    The state is a :class:`TimeMixState` of the last input and a :class:`RWKV4State`.
    Raises ValueError naming the argument that does not fit. Source: arXiv 2305.13048.
    """

    state_type = TimeMixState
    initialized = True

    def __init__(self, d_model: int, *, layer_index: int = 0, num_layers: int = 1) -> None:
        super().__init__(d_model, layer_index, num_layers)
        deep, fall = depth(layer_index, num_layers)
        ramps = [channel_ramp(d_model, fall / 2), channel_ramp(d_model, fall), channel_ramp(d_model, fall, 0.3 * deep)]
        self.shift_mix = no_weight_decay(torch.stack(ramps))  # of r, k, v
        self.time_decay = no_weight_decay(decay_start(d_model, -5, 3, deep))
        zigzag = 0.5 * ((torch.arange(d_model) + 1) % 3 - 1)
        self.time_bonus = no_weight_decay(math.log(0.3) + zigzag)
        self.receptance, self.key, self.value, self.output = (Linear(d_model, d_model, bias=False) for _ in range(4))
        start((self.receptance, 0), (self.key, 0), (self.value, 1), (self.output, 0))

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, TimeMixState]:
        shift, recurrent = (None, None) if state is None else state
        (xr, xk, xv), shift = token_mix(x, self.shift_mix, shift, mask=mask, cu_seqlens=cu_seqlens)
        r, k, v = self.receptance(xr), self.key(xk), self.value(xv)
        g = -promote(self.time_decay).exp()
        if mask is not None:  # padding neither decays the state nor writes to it
            k = k.masked_fill(~mask[..., None], -torch.inf)
            g = mask_gate(g.expand(*mask.shape, -1), mask)
        o, recurrent = rwkv4(
            k, v, g, self.time_bonus, state=recurrent, cu_seqlens=cu_seqlens, mode=mode, backend=backend
        )
        return self.output(r.sigmoid() * o), TimeMixState(shift, recurrent)


register(
    Mechanism(
        name="rwkv4",
        aliases=("rwkv_4", "rwkv"),
        title="RWKV-4",
        recurrence=RECURRENCE,
        arguments=(
            Argument("k", "B T V", meaning="keys, the logarithms of the weights"),
            Argument("v", "B T V", meaning="values"),
            Argument("g", "V", Domain.LOG_DECAY, "decay of each channel"),
            Argument("u", "V", meaning="bonus of the token that is read"),
        ),
        function=rwkv4,
        layer=RWKV4,
        equation="o_t = (n_{t-1} + e^{u+k_t} v_t) / (d_{t-1} + e^{u+k_t}),  "
        "n_t = e^g n_{t-1} + e^{k_t} v_t,  d_t = e^g d_{t-1} + e^{k_t}",
        paper="RWKV: Reinventing RNNs for the Transformer Era, arXiv 2305.13048",
        when="RWKV-4 checkpoints; the smallest state of all, one average a channel.",
        block=block("channel_mix", 4.0),
    )
)
