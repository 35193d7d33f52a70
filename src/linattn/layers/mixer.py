"""The frame that every mechanism's layer fills."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import _checks
from linattn.backends import _fused as fused
from linattn.layers.compiled import serves
from linattn.layers.norms import promote


class Mixer(nn.Module):
    """A layer that mixes tokens: [B, T, d_model] -> [B, T, d_model] and the state to continue from.

    The state is a named tuple of tensors, each with the batch (or packed sequence) as its first axis. It is a value: a
    layer never changes the one it was given. Reading T tokens, then one with the state, equals reading T+1 tokens.
    """

    state_type: ClassVar[type]
    shares: ClassVar[bool] = False
    """Whether ``mix`` takes ``shared``, a dict by which the layers of one forward pass hand values to later ones, and
    the layer itself ``first``, whether it is the first of its mechanism in the model."""
    initialized: ClassVar[bool] = False
    """Whether a model leaves the layer's own start alone."""

    def __init__(self, d_model: int, layer_index: int, num_layers: int) -> None:
        super().__init__()
        if d_model < 1:
            raise _checks.fail("d_model", d_model, "a positive number")
        self.d_model, self.layer_index, self.num_layers = d_model, layer_index, num_layers

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        mode: str = "auto",
        backend: str = "auto",
        **shared: Any,
    ) -> tuple[Tensor, Any]:
        """Read x [B, T, d_model]; return y of the same shape and dtype, and the state after it.

        ``mask``: bool [B, T], True for real tokens, padding on the left; a padded row equals the row alone, and its y
        means nothing where it is padded. ``cu_seqlens``: int [N+1], packed sequences in one row (B=1); the state's
        first axis is then N. ``mode`` and ``backend`` as in the mechanism's function; ``shared=`` for layers
        that declare it. Raises ValueError for input that does not fit.
        """
        self._check(x, state, mask, cu_seqlens)
        if mask is not None:
            # Projections without bias keep these tokens zero; gates are masked by each layer.
            x = x.masked_fill(~mask[..., None], 0)
        return self.mix(x, state, mask, cu_seqlens, mode, backend, **shared)

    @abstractmethod
    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, Any]:
        """What the mechanism does with checked input; x is zero where masked."""

    def _check(self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        if x.dim() != 3 or x.shape[2] != self.d_model:
            raise _checks.fail("x", f"shape {list(x.shape)}", f"[B, T, d_model={self.d_model}]")
        if mask is not None:
            if cu_seqlens is not None:
                raise _checks.fail("mask", "both mask and cu_seqlens", "one of them: packed sequences have no padding")
            if mask.dtype != torch.bool or mask.shape != x.shape[:2]:
                raise _checks.fail("mask", f"{mask.dtype} {list(mask.shape)}", f"torch.bool {list(x.shape[:2])}")
        if cu_seqlens is not None:
            _checks.cu_seqlens_form(cu_seqlens, x.shape[0])
            if not torch.compiler.is_compiling():
                _checks.boundaries(cu_seqlens, x.shape[1])
        if state is not None:
            if not isinstance(state, self.state_type):
                raise _checks.fail("state", type(state).__name__, f"a {self.state_type.__name__}")
            first: Any = state
            while not isinstance(first, Tensor):
                first = first[0]
            sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            if first.shape[0] != sequences:
                raise _checks.fail("state", f"one of {first.shape[0]} sequences", str(sequences))


def mask_gate(gate: Tensor, mask: Tensor | None) -> Tensor:
    """``gate`` [B, T, ...] with zero at padding: a log-decay of 0 keeps the state, a β or Δ of 0 writes nothing."""
    return gate if mask is None else gate.masked_fill(~mask.view(*mask.shape, *[1] * (gate.dim() - 2)), 0)


def no_weight_decay(value: Tensor) -> nn.Parameter:
    """A parameter that optimisers should not decay, such as a decay rate or a time step."""
    parameter = nn.Parameter(value)
    parameter._no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


def log_rates(heads: int, low: float) -> nn.Parameter:
    """[heads]: A_log, logarithms of rates of decay drawn uniformly from [low, 16], as Mamba-2 initialises them."""
    return no_weight_decay(torch.empty(heads).uniform_(low, 16).log())


def log_decay(z: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g = -e^{A_log} softplus(z + dt_bias) for z [B, T, H], in float32 (float64 for float64)."""
    return -promote(A_log).exp() * time_steps(z, dt_bias)


def time_steps(z: Tensor, bias: Tensor) -> Tensor:
    """softplus(z + bias) for z [..., N] and bias [N], in float32 (float64 for float64).

    On CPUs it is one compiled pass, where the CPU backend has its library.
    """
    return fused.softplus(z, bias) if serves("softplus", z, bias) else F.softplus(promote(z) + bias)


def time_step_bias(heads: int, low: float = 1e-3, high: float = 1e-1, floor: float = 0.0) -> Tensor:
    """[heads]: what softplus takes to a time step drawn log-uniformly from [low, high], as Mamba initialises it.

    No step is less than ``floor``.
    """
    step = torch.empty(heads).uniform_(math.log(low), math.log(high)).exp().clamp_min(floor)
    return step + torch.log(-torch.expm1(-step))
