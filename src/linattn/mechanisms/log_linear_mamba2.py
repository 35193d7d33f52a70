"""Mamba-2 with a past in O(log T) states (log-linear Mamba-2).

    y_t = scale * Σ_ℓ λ_t^{(ℓ)} S_t^{(ℓ)T} C_t + D x_t,
    S_t^{(ℓ)} = Σ_s e^{Σ_{s<u≤t} dt_u A} B_s (dt_s x_s)^T over s with level(t, s) = ℓ

level(t, s) is the bit length of t xor s. How it is computed: :mod:`linattn.layers.log_linear`.

Source: Guo et al., "Log-Linear Attention", arXiv 2506.04761; host: arXiv 2405.21060.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from linattn.layers.log_linear import LEVEL_WEIGHTS, LevelWeights, LogLinearState, log_linear
from linattn.mechanisms.mamba2 import ARGUMENTS, RECURRENCE, Mamba2, discretise
from linattn.registry import Mechanism, register


def log_linear_mamba2(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    lam: Tensor,
    *,
    D: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float = 1.0,
    state: LogLinearState | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, LogLinearState]:
    """y_t = scale * Σ_ℓ λ_t^{(ℓ)} S_t^{(ℓ)T} C_t + D x_t, where S^{(ℓ)} is written by the tokens of level ℓ alone.

    Args:
        x, dt, A, B, C, D, scale: as in :func:`linattn.mamba2`.
        lam: [B, T, H, L], L ≥ 2: λ of the token itself, of the nearest bucket, ... Of the past 2^{L-2} tokens at
            least are told apart by level; the last level takes all that is older.
        mask: bool [B, T], True at real tokens; padding is not counted in positions, nor read, nor written.
        cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`. state: a LogLinearState.

    Returns y [B, T, H, V] in x's dtype and the LogLinearState. With all λ = 1 it is Mamba-2.
    Raises ValueError naming the argument that does not fit. Source: arXiv 2506.04761.
    """
    v, g, skip = discretise(x, dt, A, B, C, D)
    y, state = log_linear(
        RECURRENCE, C, B, v, lam, g=g,
        mask=mask, scale=scale, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
    )  # fmt: skip
    return y if skip is None else y + skip, state


class LogLinearMamba2State(NamedTuple):
    """Inputs that the short convolution still sees, [N, W-1, C], and the LogLinearState."""

    conv: Tensor
    recurrent: LogLinearState


class LogLinearMamba2(Mamba2):
    """Log-linear Mamba-2: a :class:`Mamba2` whose past is weighed by level, λ = softplus(L · W_l x).

    L starts at one.

    Args:
        max_levels: number of levels; 15 tell the past 16,384 positions apart, the last takes all that is older.
        d_model, num_heads, d_state, expand, num_groups, conv_size, norm_eps: of the host.

    The state is a :class:`LogLinearMamba2State`, with max_levels - 1 states of the host.
    Raises ValueError naming the argument that does not fit. Source: arXiv 2506.04761.
    """

    state_type: ClassVar[type] = LogLinearMamba2State

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        d_state: int = 128,
        expand: float = 2.0,
        num_groups: int = 1,
        conv_size: int = 4,
        max_levels: int = 15,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(
            d_model, num_heads=num_heads, d_state=d_state, expand=expand, num_groups=num_groups, conv_size=conv_size,
            norm_eps=norm_eps, layer_index=layer_index, num_layers=num_layers,
        )  # fmt: skip
        self.levels = LevelWeights(d_model, self.num_heads, max_levels)

    def recur(
        self, x: Tensor, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, LogLinearState]:
        """The recurrence of the layer; λ is read off its input."""
        return log_linear_mamba2(u, dt, A, B, C, self.levels(x), mask=mask, **options)


register(
    Mechanism(
        name="log_linear_mamba2",
        aliases=("log_linear_mamba_2", "log_linear_ssd"),
        title="Log-linear Mamba-2",
        recurrence=RECURRENCE,
        arguments=(*ARGUMENTS, LEVEL_WEIGHTS),
        function=log_linear_mamba2,
        layer=LogLinearMamba2,
        equation="y_t = Σ_ℓ λ_t^{(ℓ)} S_t^{(ℓ)ᵀ} C_t + D x_t,  S^{(ℓ)} the Mamba-2 of the tokens of level ℓ",
        paper="Log-Linear Attention, arXiv 2506.04761",
        when="Mamba-2 that recalls further back than one state holds, for O(T log T) time and O(log T) states.",
    )
)
