"""Mamba-3: a state space discretised by the trapezoidal rule, whose state turns in complex planes.

    S_t = e^{dt_t A_t} S_{t-1} + (1-λ_t) dt_t e^{dt_t A_t} k_{t-1} x_{t-1}^T + λ_t dt_t k_t x_t^T
    y_t = S_t^T q_t + D x_t,    k_t = R_t B_t,  q_t = R_t C_t,    R_t: pairs of channels turned by Σ_{s≤t} dt_s θ_s

A token's write comes in two parts, one now and one, with its own share and decay, at the next token. The engine
makes one of both: at token t it writes the token before with all that this one will weigh in later states, and what a
token adds to the state that it reads itself is added here. So it runs the plain recurrence with a scalar decay.

With several inputs and outputs (MIMO) each token has R keys, queries and inputs, which share the decay and the state.

Source: "Mamba-3: Improved Sequence Modeling using State Space Principles", arXiv 2603.15569.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import _checks, engine
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer, mask_gate, no_weight_decay, time_step_bias, time_steps
from linattn.layers.norms import RMSNorm, promote
from linattn.layers.rotary import exact_dtype, turn
from linattn.layers.sequences import sequence_of_token
from linattn.layers.sizes import default_heads, divide
from linattn.layers.token_shift import token_shift
from linattn.recurrence import Argument, Decay, Domain, Recurrence
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(decay=Decay.TOKEN_HEAD)


class Mamba3State(NamedTuple):
    """The angles turned so far, [N, H, P], in [-π, π]; S [N, H, K, V]; the last keys and inputs, [N, R, H, K or V]."""

    angle: Tensor
    recurrent: Tensor
    key: Tensor
    value: Tensor


def mamba3(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    trap: Tensor,
    angles: Tensor,
    *,
    D: Tensor | None = None,
    scale: float = 1.0,
    state: Mamba3State | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Mamba3State]:
    """S_t = e^{dt_t A_t} (S_{t-1} + (1-λ_t) dt_t k_{t-1} x_{t-1}^T) + λ_t dt_t k_t x_t^T.

    The output is y_t = scale * S_t^T q_t + D x_t; k_t and q_t are B_t and C_t with their channels (2j, 2j+1) turned by
    Σ_{s≤t} dt_s angles_s[j].

    Args:
        x: [B, T, H, V]; B, C: [B, T, G, K], G divides H (the groups). One floating dtype. With an axis R after T in
            all three the writes and reads are R a token (MIMO).
        dt: [B, T, H] ≥ 0, the step after its softplus. A: [B, T, H] < 0. D: [H], the skip, or None.
        trap: [B, T, H], λ in [0, 1]: the share of the step's end in the trapezoidal rule; 1 is Mamba-2's rule.
        angles: [B, T, H, P], how far a unit of time turns each of P pairs of channels, in radians; 2P is at most K.
        scale: of the read, 1 as in the paper.
        state: a :class:`Mamba3State` to continue from, float32 (float64 for float64 inputs).
        cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns y in x's shape and dtype and the final state.
    Raises ValueError naming the argument that does not fit. Source: arXiv 2603.15569.
    """
    if not isinstance(x, Tensor) or x.dim() != 5:
        sizes: dict[str, int] = {}
        _checks.tensor("x", x, "B T H V", sizes)
        _checks.tensor("B", B, "B T G K", sizes)
        _checks.tensor("C", C, "B T G K", sizes)
        x, B, C = (t.unsqueeze(2) for t in (x, B, C))
        y, new = _mamba3(x, dt, A, B, C, trap, angles, D, scale, state, None, cu_seqlens, mode, backend)
        return y.squeeze(2), new
    return _mamba3(x, dt, A, B, C, trap, angles, D, scale, state, None, cu_seqlens, mode, backend)


def _mamba3(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    trap: Tensor,
    angles: Tensor,
    D: Tensor | None,
    scale: float,
    state: Mamba3State | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    mode: str,
    backend: str,
) -> tuple[Tensor, Mamba3State]:
    """As :func:`mamba3` with an axis R. ``mask`` [B, T] True for real tokens; dt is zero elsewhere."""
    _check(x, dt, A, B, C, trap, angles, D, state, cu_seqlens)
    (ranks, heads), wide = x.shape[2:4], torch.promote_types(x.dtype, torch.float32)
    packed: dict[str, Any] = {"mask": mask, "cu_seqlens": cu_seqlens}
    S, key, value = (None, None, None) if state is None else state[1:]
    with torch.autocast(x.device.type, enabled=False):
        step, trap = promote(dt), promote(trap)
        g, late, early = step * A, trap * step, (1 - trap) * step
        turned, angle = _turned(angles, step, None if state is None else state.angle, cu_seqlens)
        B, C = (t if t.shape[3] == heads else t.repeat_interleave(heads // t.shape[3], 3) for t in (B, C))
        cos, sin = (t.unsqueeze(2) for t in (turned.cos().to(wide), turned.sin().to(wide)))
        q, k = (_turn(t, cos, sin) for t in (C, B))

        k_before, key = _before(k, key, packed)
        x_before, value = _before(x, value, packed)
        late_before, last = token_shift(late, **packed)
        weight = mask_gate((late_before + early) * g.exp(), mask)
        write = (weight[:, :, None, :, None] * x_before).to(x.dtype)
        o, total = engine.matrix(
            RECURRENCE, *(t.flatten(1, 2) for t in (q, k_before, write)),
            g=F.pad(g.unsqueeze(2), (0, 0, 0, ranks - 1)).flatten(1, 2), scale=scale, state=S,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens * ranks, mode=mode, backend=backend,
        )  # fmt: skip
        assert isinstance(total, Tensor)
        key, value = key.to(wide), value.to(wide)
        total = total + (key.unsqueeze(-1) * (value * last[:, None, :, None]).unsqueeze(-2)).sum(1)

        own = _within(promote(C), promote(B), promote(x)) * late[:, :, None, :, None]
        if ranks > 1:  # the r-th read comes before the token's writes after the r-th
            own = own + _within(promote(q), promote(k_before), promote(write), later=True)
        y = o.unflatten(1, (-1, ranks)) + scale * own
        if D is not None:
            y = y + D.unsqueeze(-1) * promote(x)
    return y.to(x.dtype), Mamba3State(angle, total, key, value)


def _check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    trap: Tensor,
    angles: Tensor,
    D: Tensor | None,
    state: Mamba3State | None,
    cu_seqlens: Tensor | None,
) -> None:
    sizes: dict[str, int] = {}
    _checks.tensor("x", x, "B T R H V", sizes)
    for name, value in (("dt", dt), ("A", A), ("trap", trap)):
        _checks.tensor(name, value, "B T H", sizes)
    _checks.tensor("B", B, "B T R G K", sizes, x.dtype)
    _checks.tensor("C", C, "B T R G K", sizes, x.dtype)
    _checks.grouped("B", sizes["G"], sizes["H"])
    _checks.tensor("angles", angles, "B T H P", sizes)
    if 2 * sizes["P"] > sizes["K"]:
        raise _checks.fail("angles", f"{sizes['P']} pairs", f"at most {sizes['K'] // 2} of K={sizes['K']} channels")
    if D is not None:
        _checks.tensor("D", D, "H", sizes)
    tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "trap": trap, "angles": angles, "D": D}
    if cu_seqlens is not None:
        _checks.cu_seqlens_form(cu_seqlens, sizes["B"])
        if not torch.compiler.is_compiling():
            _checks.boundaries(cu_seqlens, sizes["T"])
    if state is not None:
        if not isinstance(state, Mamba3State):
            raise _checks.fail("state", type(state).__name__, "a Mamba3State")
        sizes["N"] = sizes["B"] if cu_seqlens is None else cu_seqlens.numel() - 1
        wide = torch.promote_types(x.dtype, torch.float32)
        for (name, value), dims in zip(
            state._asdict().items(), ("N H P", "N H K V", "N R H K", "N R H V"), strict=True
        ):
            _checks.tensor(f"state.{name}", value, dims, sizes, wide)
            tensors[f"state.{name}"] = value
    _checks.same_device({**tensors, "cu_seqlens": cu_seqlens})


def _turned(angles: Tensor, step: Tensor, start: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The angle at every token, [B, T, H, P] in the finest dtype, and at the end of every sequence, [N, H, P]."""
    exact = exact_dtype(angles.device)
    turns = angles.to(exact) * step.to(exact).unsqueeze(-1)
    sequences = angles.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    begin = turns.new_zeros(sequences, *turns.shape[2:]) if start is None else start.to(exact)
    if cu_seqlens is None:
        total = torch.cat([begin.unsqueeze(1), turns], 1).cumsum(1)
        turned, end = total[:, 1:], total[:, -1]
    else:
        total = F.pad(turns[0].cumsum(0), (0, 0, 0, 0, 1, 0))
        begin = begin - total[cu_seqlens[:-1]]
        turned = (total[1:] + begin[sequence_of_token(cu_seqlens, turns.shape[1])]).unsqueeze(0)
        end = total[cu_seqlens[1:]] + begin
    end = end - 2 * math.pi * (end / (2 * math.pi)).round()
    return turned, end.to(step.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with its first pairs of channels turned."""
    size = 2 * cos.shape[-1]
    return torch.cat([turn(x[..., :size], cos, sin, interleaved=True), x[..., size:]], -1)


def _before(x: Tensor, state: Tensor | None, packed: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """x [B, T, R, H, .] -> that of the token before, and the last of each sequence."""
    shape = x.shape[2:]
    before, last = token_shift(x.flatten(2), None if state is None else state.flatten(1), **packed)
    return before.unflatten(-1, shape), last.unflatten(-1, shape)


def _within(q: Tensor, k: Tensor, x: Tensor, *, later: bool = False) -> Tensor:
    """Σ_s (q_r · k_s) x_s over the ranks s of each token, or only those after r. No matrix products: autocast."""
    total, ranks = torch.zeros_like(x), x.shape[2]
    for s in range(1 if later else 0, ranks):
        reads = q[:, :, :s] if later else q
        part = (reads * k[:, :, s : s + 1]).sum(-1, keepdim=True) * x[:, :, s : s + 1]
        total = total + F.pad(part, (0, 0, 0, 0, 0, ranks - part.shape[2]))
    return total


class Mamba3(Mixer):
    """Mamba-3; y = W_o (mamba3(x, dt, A, B, C, λ, θ, D) · silu(z)), with z, x, B, C, dt, A, λ, θ = W_in u.

    B and C pass an RMSNorm and get a learnt bias for each head; dt = softplus(dt + dt_bias), A = -softplus(A),
    λ = σ(λ), θ = π tanh(θ), the same for all heads. There is no convolution. Parameters have the names, shapes and
    initialisation of mamba_ssm's Mamba3: softplus(dt_bias) log-uniform in [0.001, 0.1], the biases and D one.

    Args:
        d_model: width of the input and output.
        num_heads: None takes heads of a size near 64; they divide expand * d_model.
        d_state: size of the state of a channel (K).
        expand: inner width over d_model.
        num_groups: heads that share B and C; divides num_heads.
        rope_fraction: share of the state that turns.
        mimo_rank: R, the inputs and outputs a token; above 1, x and z are multiplied by learnt weights for each of
            them, and y is their weighted sum. (The reference's kernels turn pairs (j, j + K/2) there: a permutation of
            channels.)
        heavy_tail: A = -(1 + a) for a ≥ 0 and -1 / (1 - a) below, instead of -softplus(a), as newer mamba_ssm has it.
        out_norm: an RMSNorm of each head before the gate, as hybrids have it.
        A_floor: the least rate of decay.
        norm_eps: of all the RMSNorms.

    The state is a :class:`Mamba3State`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2603.15569.
    """

    state_type = Mamba3State

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        d_state: int = 128,
        expand: float = 2.0,
        num_groups: int = 1,
        rope_fraction: float = 0.5,
        mimo_rank: int = 1,
        heavy_tail: bool = False,
        out_norm: bool = False,
        A_floor: float = 1e-4,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        if mimo_rank < 1:
            raise _checks.fail("mimo_rank", mimo_rank, "at least 1")
        if not 0 <= rope_fraction <= 1:
            raise _checks.fail("rope_fraction", rope_fraction, "a share between 0 and 1")
        inner = round(d_model * expand)
        self.num_heads = default_heads(inner, 64) if num_heads is None else num_heads
        self.head_dim = divide("num_heads", self.num_heads, inner, "expand * d_model")
        divide("num_groups", num_groups, self.num_heads, "num_heads")
        self.d_state, self.mimo_rank, self.heavy_tail, self.A_floor = d_state, mimo_rank, heavy_tail, A_floor
        maps, pairs = mimo_rank * num_groups * d_state, int(d_state * rope_fraction) // 2
        self.sizes = (inner, inner, maps, maps, self.num_heads, self.num_heads, self.num_heads, pairs)
        self.in_proj = Linear(d_model, sum(self.sizes), bias=False)
        self.dt_bias = no_weight_decay(time_step_bias(self.num_heads))
        self.B_norm, self.C_norm = (RMSNorm(d_state, eps=norm_eps) for _ in range(2))
        bias = torch.ones(self.num_heads, mimo_rank, d_state)
        self.B_bias, self.C_bias = (no_weight_decay(bias.clone()) for _ in range(2))
        if mimo_rank > 1:
            ones = torch.ones(self.num_heads, mimo_rank, self.head_dim)
            self.mimo_x, self.mimo_z, self.mimo_o = (nn.Parameter(ones / n) for n in (mimo_rank, 1, mimo_rank))
        self.D = no_weight_decay(torch.ones(self.num_heads))
        self.norm = RMSNorm(inner, eps=norm_eps, groups=self.num_heads) if out_norm else None
        self.out_proj = Linear(inner, d_model, bias=False)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, Mamba3State]:
        z, x, B, C, dt, A, trap, angles = self.in_proj(x).split(self.sizes, dim=-1)
        z, x = (t.unflatten(-1, (1, self.num_heads, -1)) for t in (z, x))
        if self.mimo_rank > 1:
            z, x = (t * w.transpose(0, 1).to(t.dtype) for t, w in ((z, self.mimo_z), (x, self.mimo_x)))
        dt = mask_gate(time_steps(dt, self.dt_bias), mask)
        angles = (math.pi * promote(angles).tanh()).unsqueeze(2).expand(-1, -1, self.num_heads, -1)
        B, C = self._map(B, self.B_norm, self.B_bias), self._map(C, self.C_norm, self.C_bias)
        y, state = _mamba3(
            x, dt, self._rate(promote(A)), B, C, promote(trap).sigmoid(), angles, self.D, 1.0,
            state, mask, cu_seqlens, mode, backend,
        )  # fmt: skip
        y = y * F.silu(z) if self.norm is None else self.norm(y.flatten(3), z.flatten(3)).unflatten(-1, y.shape[3:])
        if self.mimo_rank > 1:
            y = (y * self.mimo_o.transpose(0, 1).to(y.dtype)).sum(2, keepdim=True)
        return self.out_proj(y.flatten(2)), state

    def _rate(self, a: Tensor) -> Tensor:
        """A [B, T, H] < 0."""
        rate = a.clamp_min(0) + 1 / (1 - a.clamp_max(0)) if self.heavy_tail else F.softplus(a)
        return -rate.clamp_min(self.A_floor)

    def _map(self, x: Tensor, norm: RMSNorm, bias: Tensor) -> Tensor:
        """B or C of the groups, normalised, with the bias of each head: [B, T, R, H, K]."""
        x = norm(x.unflatten(-1, (self.mimo_rank, -1, self.d_state)))
        heads = x.repeat_interleave(self.num_heads // x.shape[3], 3) if x.shape[3] < self.num_heads else x
        return (heads + bias.transpose(0, 1)).to(x.dtype)


register(
    Mechanism(
        name="mamba3",
        aliases=("mamba_3",),
        title="Mamba-3",
        recurrence=RECURRENCE,
        arguments=(
            Argument("x", "B T H V", meaning="inputs"),
            Argument("dt", "B T H", Domain.NONNEGATIVE, "step, after its softplus"),
            Argument("A", "B T H", Domain.NEGATIVE, "rate of decay of each head"),
            Argument("B", "B T G K", meaning="input map (the key), shared by groups of heads"),
            Argument("C", "B T G K", meaning="output map (the query), shared by groups of heads"),
            Argument("trap", "B T H", Domain.UNIT_INTERVAL, "λ, the share of the step's end in the trapezoidal rule"),
            Argument("angles", "B T H P", meaning="how far a unit of time turns each pair of channels, in radians"),
            Argument("D", "H", meaning="skip connection", optional=True),
        ),
        function=mamba3,
        layer=Mamba3,
        equation="S_t = e^{Δ_t A_t} (S_{t-1} + (1−λ_t) Δ_t k_{t-1} x_{t-1}ᵀ) + λ_t Δ_t k_t x_tᵀ,  "
        "y_t = S_tᵀ q_t + D x_t,  k_t, q_t = R_t B_t, R_t C_t",
        paper="Mamba-3: Improved Sequence Modeling using State Space Principles, arXiv 2603.15569",
        when="Mamba-2 without its convolution, and able to track states such as parity by turning its own.",
    )
)
