"""The gated delta rule with a past in O(log T) states (log-linear Gated DeltaNet).

    o_t = scale * Σ_ℓ λ_t^{(ℓ)} S_t^{(ℓ)T} q_t,
    S_t^{(ℓ)} = Σ_s (Π_{s<u≤t} e^{g_u} (1 - β_u k_u k_u^T)) β_s k_s v_s^T over s with level(t, s) = ℓ

level(t, s) is the bit length of t xor s. How it is computed: :mod:`linattn.layers.log_linear`.

Source: Guo et al., "Log-Linear Attention", arXiv 2506.04761; host: arXiv 2412.06464.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from linattn.layers.log_linear import LEVEL_WEIGHTS, LevelWeights, LogLinearState, log_linear
from linattn.mechanisms.gated_delta_rule import RECURRENCE, GatedDeltaNet
from linattn.recurrence import BETA, QUERY, UNIT_KEY, VALUE, Argument, Domain
from linattn.registry import Mechanism, register


def log_linear_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lam: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    state: LogLinearState | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, LogLinearState]:
    """o_t = scale * Σ_ℓ λ_t^{(ℓ)} S_t^{(ℓ)T} q_t, where S^{(ℓ)} is written by the tokens of level ℓ alone.

    Args:
        q, k, v, g, beta: as in :func:`linattn.gated_delta_rule`.
        lam: [B, T, H, L], L ≥ 2: λ of the token itself, of the nearest bucket, ... Of the past 2^{L-2} tokens at
            least are told apart by level; the last level takes all that is older.
        mask: bool [B, T], True at real tokens; padding is not counted in positions, nor read, nor written.
        scale, cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`. state: a LogLinearState.

    Returns o [B, T, H, V] in v's dtype and the LogLinearState. With all λ = 1 it is the gated delta rule.
    Raises ValueError naming the argument that does not fit. Source: arXiv 2506.04761.
    """
    return log_linear(
        RECURRENCE, q, k, v, lam, g=g, beta=beta,
        mask=mask, scale=scale, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
    )  # fmt: skip


class LogLinearGatedDeltaNetState(NamedTuple):
    """Inputs that the short convolution still sees, [N, W-1, C], and the LogLinearState."""

    conv: Tensor
    recurrent: LogLinearState


class LogLinearGatedDeltaNet(GatedDeltaNet):
    """Log-linear Gated DeltaNet: a :class:`GatedDeltaNet` whose past is weighed by level, λ = softplus(L · W_l x).

    L starts at one. The read is not scaled, as in the authors' code: the norm of the output takes care of it.

    Args:
        max_levels: number of levels; 15 tell the past 16,384 positions apart, the last takes all that is older.
        d_model, num_heads, head_dim, expand_v, num_v_heads, allow_neg_eigval, conv_size, norm_eps: of the host.

    The state is a :class:`LogLinearGatedDeltaNetState`, with max_levels - 1 states of the host.
    Raises ValueError naming the argument that does not fit. Source: arXiv 2506.04761.
    """

    state_type: ClassVar[type] = LogLinearGatedDeltaNetState

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 2.0,
        num_v_heads: int | None = None,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        max_levels: int = 15,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(
            d_model, num_heads=num_heads, head_dim=head_dim, expand_v=expand_v, num_v_heads=num_v_heads,
            allow_neg_eigval=allow_neg_eigval, conv_size=conv_size, norm_eps=norm_eps,
            layer_index=layer_index, num_layers=num_layers,
        )  # fmt: skip
        self.levels = LevelWeights(d_model, self.num_v_heads, max_levels)

    def recur(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, LogLinearState]:
        """The recurrence of the layer; λ is read off its input."""
        return log_linear_gated_delta_rule(q, k, v, g, beta, self.levels(x), mask=mask, scale=1.0, **options)


register(
    Mechanism(
        name="log_linear_gated_delta_rule",
        aliases=("log_linear_gated_deltanet", "log_linear_gdn"),
        title="Log-linear gated delta rule",
        recurrence=RECURRENCE,
        arguments=(
            QUERY,
            UNIT_KEY,
            VALUE,
            Argument("g", "B T H", Domain.LOG_DECAY, "decay of each head"),
            BETA,
            LEVEL_WEIGHTS,
        ),
        function=log_linear_gated_delta_rule,
        layer=LogLinearGatedDeltaNet,
        equation="o_t = scale · Σ_ℓ λ_t^{(ℓ)} S_t^{(ℓ)ᵀ} q_t,  S^{(ℓ)} the gated delta rule of the tokens of level ℓ",
        paper="Log-Linear Attention, arXiv 2506.04761",
        when="Recall further back than one state holds, for O(T log T) time and O(log T) states.",
    )
)
