"""Mamba-2 (SSD): a scalar decay per token and head from a state-space model; input and output maps shared by groups.

    S_t = e^{dt_t A} S_{t-1} + B_t (dt_t x_t)^T,    y_t = S_t^T C_t + D x_t

Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from linattn import _checks, engine
from linattn.layers.convolution import ShortConvolution
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer, log_rates, mask_gate, no_weight_decay, time_step_bias, time_steps
from linattn.layers.norms import RMSNorm, promote
from linattn.layers.sizes import default_heads, divide
from linattn.recurrence import Argument, Decay, Domain, Recurrence
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(decay=Decay.TOKEN_HEAD)
ARGUMENTS = (
    Argument("x", "B T H V", meaning="inputs"),
    Argument("dt", "B T H", Domain.NONNEGATIVE, "step, after its softplus"),
    Argument("A", "H", Domain.NEGATIVE, "rate of decay of each head"),
    Argument("B", "B T G K", meaning="input map (the key), shared by groups of heads"),
    Argument("C", "B T G K", meaning="output map (the query), shared by groups of heads"),
    Argument("D", "H", meaning="skip connection", optional=True),
)


def mamba2(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    scale: float = 1.0,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S_t = e^{dt_t A} S_{t-1} + B_t (dt_t x_t)^T, y_t = scale * S_t^T C_t + D x_t.

    Args:
        x: [B, T, H, V]; B, C: [B, T, G, K], G divides H (the groups). One floating dtype.
        dt: [B, T, H] ≥ 0, the step after its softplus. A: [H] < 0. D: [H], the skip, or None.
        scale: of the read, 1 as in the paper.
        state, cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns y [B, T, H, V] in x's dtype and the final state [N, H, K, V].
    Raises ValueError naming the argument that does not fit. Source: arXiv 2405.21060.
    """
    step, g = _discretised(x, dt, A, B, C, D)
    return engine.matrix(  # type: ignore[return-value]
        RECURRENCE, C, B, x, g=g, weight=step, skip=D, scale=scale, state=state, cu_seqlens=cu_seqlens, mode=mode,
        backend=backend,
    )  # fmt: skip


def discretise(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments of :func:`mamba2`, checked -> values dt x in x's dtype, log-decays dt A, and the skip D x."""
    step, g = _discretised(x, dt, A, B, C, D)
    return engine.weighed(step, x), g, None if D is None else engine.weighed(D, x)


def _discretised(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> tuple[Tensor, Tensor]:
    """The arguments of :func:`mamba2`, checked -> steps, which are the weights of writes, and log-decays."""
    _checks.remembered(_check, (), x, dt, A, B, C, D)
    step = dt.to(torch.promote_types(dt.dtype, torch.float32))
    return step, step * A.to(step.dtype)


def _check(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> None:
    sizes: dict[str, int] = {}
    _checks.tensor("x", x, "B T H V", sizes)
    _checks.tensor("dt", dt, "B T H", sizes)
    _checks.tensor("A", A, "H", sizes)
    _checks.tensor("B", B, "B T G K", sizes, x.dtype)
    _checks.tensor("C", C, "B T G K", sizes, x.dtype)
    _checks.grouped("B", B.shape[2], x.shape[2])
    if D is not None:
        _checks.tensor("D", D, "H", sizes)
    _checks.same_device({"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D})


class Mamba2State(NamedTuple):
    """Inputs that the short convolution still sees, [N, W-1, C], and S [N, H, d_state, head_dim]."""

    conv: Tensor
    recurrent: Tensor


class Mamba2(Mixer):
    """Mamba-2; y = W_o RMSNorm(mamba2(x, dt, A, B, C, D) · silu(z)), with z, x, B, C, dt = W_in u.

    x, B and C pass a short convolution with SiLU; dt = softplus(dt + dt_bias), A = -e^{A_log}. Parameters have the
    names, shapes and initialisation of mamba_ssm's Mamba2: e^{A_log} uniform in [1, 16], softplus(dt_bias) log-uniform
    in [0.001, 0.1], D one.

    Args:
        d_model: width of the input and output.
        num_heads: None takes heads of a size near 64; they divide expand * d_model.
        d_state: size of the state of a channel (K).
        expand: inner width over d_model.
        num_groups: heads that share B and C; divides num_heads.
        conv_size: width of the short convolution.
        norm_eps: of the RMSNorm, which works on each group.

    The state is a :class:`Mamba2State`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2405.21060.
    """

    state_type: ClassVar[type] = Mamba2State

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        d_state: int = 128,
        expand: float = 2.0,
        num_groups: int = 1,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        inner = round(d_model * expand)
        self.num_heads = default_heads(inner, 64) if num_heads is None else num_heads
        self.head_dim = divide("num_heads", self.num_heads, inner, "expand * d_model")
        divide("num_groups", num_groups, self.num_heads, "num_heads")
        self.d_state = d_state
        groups = num_groups * d_state
        self.sizes = (inner, inner + 2 * groups, self.num_heads)
        self.conv_sizes = (inner, groups, groups)
        self.in_proj = Linear(d_model, sum(self.sizes), bias=False)
        self.conv1d = ShortConvolution(inner + 2 * groups, conv_size, bias=True)
        self.A_log = log_rates(self.num_heads, 1)
        self.dt_bias = no_weight_decay(time_step_bias(self.num_heads))
        self.D = no_weight_decay(torch.ones(self.num_heads))
        self.norm = RMSNorm(inner, eps=norm_eps, groups=num_groups, gate_first=True)
        self.out_proj = Linear(inner, d_model, bias=False)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, Mamba2State]:
        tail, recurrent = (None, None) if state is None else state
        z, xBC, dt = self.in_proj(x).split(self.sizes, dim=-1)
        xBC, tail = self.conv1d(xBC, tail, mask=mask, cu_seqlens=cu_seqlens)
        u, B, C = xBC.split(self.conv_sizes, dim=-1)
        dt = mask_gate(time_steps(dt, self.dt_bias), mask)
        y, recurrent = self.recur(
            x, u.unflatten(-1, (self.num_heads, -1)), dt, -promote(self.A_log).exp(),
            B.unflatten(-1, (-1, self.d_state)), C.unflatten(-1, (-1, self.d_state)),
            D=self.D, mask=mask, state=recurrent, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
        return self.out_proj(self.norm(y.flatten(2), z)), self.state_type(tail, recurrent)

    def recur(
        self, x: Tensor, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        """The recurrence of the layer with input x, for layers built upon it; dt is masked already."""
        return mamba2(u, dt, A, B, C, **options)


register(
    Mechanism(
        name="mamba2",
        aliases=("mamba_2", "ssd"),
        title="Mamba-2 (SSD)",
        recurrence=RECURRENCE,
        arguments=ARGUMENTS,
        function=mamba2,
        layer=Mamba2,
        equation="S_t = e^{Δ_t A} S_{t-1} + B_t (Δ_t x_t)ᵀ,  y_t = S_tᵀ C_t + D x_t",
        paper="Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space "
        "Duality, arXiv 2405.21060",
        when="Language modelling with few parameters in the gates; large states shared by groups of heads.",
        block={"mlp_ratio": 0, "norm_eps": 1e-5},
    )
)
