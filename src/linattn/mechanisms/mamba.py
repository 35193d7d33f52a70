"""Mamba (S6): a selective state space; every channel has a state of N numbers, a step of its own and N rates of decay.

    h_t = e^{dt_t A} * h_{t-1} + (dt_t x_t) B_t^T,    y_t = h_t C_t + D x_t      (h [D, N])

Source: Gu and Dao, "Mamba", arXiv 2312.00752.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import _checks, engine
from linattn.backends import _fused as fused
from linattn.layers.compiled import serves
from linattn.layers.convolution import ShortConvolution
from linattn.layers.linear import Linear, linear
from linattn.layers.mixer import Mixer, mask_gate, no_weight_decay, time_step_bias, time_steps
from linattn.layers.norms import RMSNorm, promote
from linattn.recurrence import Argument, Decay, Domain, Engine, Recurrence
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(Engine.SELECTIVE, Decay.TOKEN_CHANNEL)


def mamba(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """h_t = e^{dt_t A} * h_{t-1} + (dt_t x_t) B_t^T, y_t = h_t C_t + D x_t, each channel on its own.

    Args:
        x: [B, T, D]; B, C: [B, T, G, N], G divides D: neighbouring D/G channels share a map. One floating dtype.
        dt: [B, T, D] ≥ 0, the step after its softplus; 0 keeps the state. A: [D, N] < 0. D: [D], the skip, or None.
        state: [S, D, N], float32 (float64 for float64 inputs); S is B, or the number of packed sequences.
        cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns y [B, T, D] in x's dtype and the final state [S, D, N].
    Raises ValueError naming the argument that does not fit. Source: arXiv 2312.00752.
    """
    if D is not None:
        sizes: dict[str, int] = {}
        _checks.tensor("x", x, "B T D", sizes)
        _checks.tensor("D", D, "D", sizes)
        _checks.same_device({"x": x, "D": D})
    y, h = engine.selective_scan(x, dt, A, B, C, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend)
    if D is not None:
        y = y + (promote(D) * x).to(x.dtype)
    return y, h


class StepProjection(nn.Module):
    """softplus(W low + bias) in float32: from dt_rank numbers a token to the step of each channel.

    The bias is what softplus takes to steps drawn log-uniformly from [dt_min, dt_max], but no less than
    ``dt_init_floor``; the weight is uniform in ±dt_scale / √rank (``dt_init="random"``) or that number ("constant"). No
    ``nn.Linear``, so that a model's own start leaves it alone.
    """

    def __init__(
        self,
        rank: int,
        channels: int,
        dt_min: float,
        dt_max: float,
        dt_init: str,
        dt_scale: float,
        dt_init_floor: float,
    ) -> None:
        super().__init__()
        _checks.one_of("dt_init", dt_init, ("random", "constant"))
        if not 0 < dt_min <= dt_max:
            raise _checks.fail("dt_min", dt_min, f"0 < dt_min ≤ dt_max={dt_max:g}")
        bound = dt_scale / math.sqrt(rank)
        weight = torch.empty(channels, rank)
        self.weight = nn.Parameter(weight.uniform_(-bound, bound) if dt_init == "random" else weight.fill_(bound))
        self.bias = no_weight_decay(time_step_bias(channels, dt_min, dt_max, dt_init_floor))

    def forward(self, low: Tensor) -> Tensor:
        """[..., rank] -> [..., channels]."""
        return time_steps(linear(low, self.weight), self.bias)


def skip_and_gate(y: Tensor, x: Tensor, z: Tensor, D: Tensor) -> Tensor:
    """(y + D x) · silu(z) for y, x, z [..., D] and D [D], in y's dtype.

    On CPUs it is one compiled pass, in float32 inside, where the CPU backend has its library.
    """
    if y.dtype == x.dtype == z.dtype and serves("skip", y, x, z, D):
        return fused.skip(y, x, z, D)
    return (y + (promote(D) * x).to(y.dtype)) * F.silu(z)


class MambaState(NamedTuple):
    """Inputs that the short convolution still sees, [N, W-1, D], and h [N, D, d_state]."""

    conv: Tensor
    recurrent: Tensor


class Mamba(Mixer):
    """Mamba; y = W_o (mamba(x, dt, A, B, C, D) · silu(z)), with x, z = W_in u.

    x passes a short convolution with SiLU; then low, B, C = W_x x, dt = softplus(W_dt low + b_dt), A = -e^{A_log}.
    Parameters have the names, shapes and initialisation of mamba_ssm's Mamba: e^{A_log} is 1 … d_state in every channel
    (S4D-real), D one, the steps as :class:`StepProjection` says. With ``norm_dt_b_c`` it is FalconMamba's layer.

    Args:
        d_model: width of the input and output.
        d_state: numbers a channel (N).
        expand: inner width D over d_model.
        dt_rank: width of low; None is d_model / 16, rounded up.
        conv_size, conv_bias: width of the short convolution, and whether it has a bias.
        bias: of W_in and W_o.
        dt_min, dt_max, dt_init, dt_scale, dt_init_floor: the steps at the start.
        norm_dt_b_c, norm_eps: an RMSNorm without weight on low, B and C, and its eps.

    The state is a :class:`MambaState`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2312.00752; FalconMamba: arXiv 2410.05355.
    """

    state_type = MambaState

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        expand: float = 2.0,
        dt_rank: int | None = None,
        conv_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        norm_dt_b_c: bool = False,
        norm_eps: float = 1e-6,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        inner = round(d_model * expand)
        rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        for name, size in (("expand * d_model", inner), ("d_state", d_state), ("dt_rank", rank)):
            if size < 1:
                raise _checks.fail(name, size, "at least 1")
        self.sizes = (rank, d_state, d_state)
        self.in_proj = Linear(d_model, 2 * inner, bias=bias)
        self.conv1d = ShortConvolution(inner, conv_size, bias=conv_bias)
        self.x_proj = Linear(inner, sum(self.sizes), bias=False)
        self.dt_proj = StepProjection(rank, inner, dt_min, dt_max, dt_init, dt_scale, dt_init_floor)
        rates = torch.arange(1, d_state + 1, dtype=torch.float32)
        self.A_log = no_weight_decay(rates.log().repeat(inner, 1))
        self.D = no_weight_decay(torch.ones(inner))
        self.norms = nn.ModuleList(RMSNorm(size, eps=norm_eps, affine=False) for size in self.sizes * norm_dt_b_c)
        self.out_proj = Linear(inner, d_model, bias=bias)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, MambaState]:
        tail, recurrent = (None, None) if state is None else state
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x, tail = self.conv1d(x, tail, mask=mask, cu_seqlens=cu_seqlens)
        low, B, C = self.x_proj(x).split(self.sizes, dim=-1)
        if self.norms:
            low, B, C = (norm(part) for norm, part in zip(self.norms, (low, B, C), strict=True))
        y, recurrent = mamba(
            x, mask_gate(self.dt_proj(low), mask), -promote(self.A_log).exp(), B.unsqueeze(2), C.unsqueeze(2),
            state=recurrent, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
        return self.out_proj(skip_and_gate(y, x, z, self.D)), MambaState(tail, recurrent)


register(
    Mechanism(
        name="mamba",
        aliases=("mamba1", "mamba_1", "s6"),
        title="Mamba (S6)",
        recurrence=RECURRENCE,
        arguments=(
            Argument("x", "B T D", meaning="inputs"),
            Argument("dt", "B T D", Domain.NONNEGATIVE, "step of each channel, after its softplus"),
            Argument("A", "D N", Domain.NEGATIVE, "rates of decay of each channel"),
            Argument("B", "B T G N", meaning="input map, shared by groups of channels"),
            Argument("C", "B T G N", meaning="output map, shared by groups of channels"),
            Argument("D", "D", meaning="skip connection", optional=True),
        ),
        function=mamba,
        layer=Mamba,
        equation="h_t = e^{Δ_t A} ⊙ h_{t−1} + (Δ_t x_t) B_tᵀ,  y_t = h_t C_t + D x_t",
        paper="Mamba: Linear-Time Sequence Modeling with Selective State Spaces, arXiv 2312.00752",
        when="Models trained as Mamba or FalconMamba; small states, a decay of its own for every number of them.",
        block={"mlp_ratio": 0, "norm_eps": 1e-5},
    )
)
