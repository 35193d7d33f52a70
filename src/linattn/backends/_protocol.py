"""What a backend is given and what it must offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from linattn import _checks
from linattn.recurrence import Mode, Read, Recurrence, Write


class MatrixInputs(NamedTuple):
    """A matrix recurrence, validated. G query/key heads divide the H value heads; states are [N, H, K, V].

    ``scale``, ``write`` and ``read`` complete the tensors; N is B, or the number of packed sequences.
    """

    q: Tensor  # [B, T, G, K]
    k: Tensor  # [B, T, G, K]
    v: Tensor  # [B, T, H, V]
    g: Tensor | None  # None, [H], [H, K], [B, T, H] or [B, T, H, K]
    beta: Tensor | None  # [B, T, H], with Write.DELTA
    a: Tensor | None  # [B, T, H, K], with Write.LOW_RANK
    b: Tensor | None  # [B, T, H, K], with Write.LOW_RANK
    u: Tensor | None  # [H, K], with Read.BEFORE
    state: Tensor | None  # [N, H, K, V]
    cu_seqlens: Tensor | None  # [N + 1]
    scale: float
    write: Write
    read: Read


class SumInputs(NamedTuple):
    """A matrix recurrence with additive writes, a decay of heads or none, read after, and its sum of keys, validated.

    o_t = scale S_t^T q_t and s_t = scale z_t^T q_t with S_t = e^{g_t} S_{t-1} + w_t k_t v_t^T, z_t likewise of w_t k_t.
    """

    q: Tensor  # [B, T, G, K]
    k: Tensor  # [B, T, G, K]
    v: Tensor  # [B, T, H, V]
    g: Tensor | None  # None, [H] or [B, T, H]
    weight: Tensor | None  # [B, T, H], float32
    S: Tensor | None  # [N, H, K, V]
    z: Tensor | None  # [N, H, K]
    cu_seqlens: Tensor | None  # [N + 1]
    scale: float


class SelectiveInputs(NamedTuple):
    """A selective scan, validated. G input and output maps divide the D channels; states are [S, D, N].

    S is B, or the number of packed sequences.
    """

    x: Tensor  # [B, T, D]
    dt: Tensor  # [B, T, D]
    A: Tensor  # [D, N]
    B: Tensor  # [B, T, G, N]
    C: Tensor  # [B, T, G, N]
    state: Tensor | None  # [S, D, N]
    cu_seqlens: Tensor | None  # [S + 1]


class AverageInputs(NamedTuple):
    """An average weighed by exponentials, validated: o_t = (n_{t-1} + e^{u+k_t} v_t) / (d_{t-1} + e^{u+k_t}) with
    n_t = e^{g_t} n_{t-1} + e^{k_t} v_t and d_t likewise of ones.

    The state is n and d, divided by e^m, and m, the maximum of their exponents.
    """

    k: Tensor  # [B, T, V]
    v: Tensor  # [B, T, V]
    g: Tensor  # [V] or [B, T, V]
    u: Tensor  # [V]
    state: tuple[Tensor, Tensor, Tensor] | None  # each [N, V]
    cu_seqlens: Tensor | None  # [N + 1]


class Request(NamedTuple):
    """What a call asks of a backend, known before there are tensors; a size is None where it is not yet known."""

    device: torch.device
    dtype: torch.dtype
    mode: Mode | None  # None: the backend's own choice
    recurrence: Recurrence
    key_size: int | None = None
    value_size: int | None = None


class Backend(ABC):
    """One way to run the recurrences. Differentiable in every tensor, the initial state included."""

    name: str
    modes: tuple[Mode, ...]

    def refuses(self, request: Request) -> str | None:
        """Why this backend can't serve, or None if it can."""
        return self.unavailable(request.device) or self.unsuited(request)

    def unavailable(self, device: torch.device) -> str | None:
        """What this machine or device lacks, if anything."""
        return None

    def unsuited(self, request: Request) -> str | None:
        """What is asked that this backend can't do on any machine, if anything."""
        return None

    @abstractmethod
    def matrix(self, inputs: MatrixInputs, mode: Mode | None) -> tuple[Tensor, Tensor]:
        """Output [B, T, H, V] in v's dtype and final state [N, H, K, V] in :func:`state_dtype`."""

    def sums(self, inputs: SumInputs) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """o [B, T, H, V], s [B, T, H], the final S and z. All tensors but the gates are of one :func:`state_dtype`.

        None where the backend has nothing better than one more value column, of ones.
        """
        return None

    def scan(
        self, x: Tensor, g: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, mode: Mode | None
    ) -> tuple[Tensor, Tensor]:
        """All states h [B, T, D] in x's dtype and the final state [N, D] in :func:`state_dtype`.

        Optional: a backend without it refuses the recurrence in :meth:`unsuited`.
        """
        raise NotImplementedError(f"the {self.name} backend refuses elementwise recurrences")

    def average(self, inputs: AverageInputs, mode: Mode | None) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None:
        """Output [B, T, V] in v's dtype and the final state in :func:`state_dtype`.

        None where the backend has nothing better than two of its scans.
        """
        return None

    def selective_scan(self, inputs: SelectiveInputs, mode: Mode | None) -> tuple[Tensor, Tensor]:
        """Output [B, T, D] in x's dtype and final state [S, D, N] in :func:`state_dtype`.

        Optional, as :meth:`scan`.
        """
        raise NotImplementedError(f"the {self.name} backend refuses selective scans")


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """States and everything between input and output are float32; float64 stays float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_values(g: Tensor | None, cu_seqlens: Tensor | None, length: int) -> list[int] | None:
    """The checks that must look at the data, and the boundaries of packed sequences."""
    _checks.log_decay(g)
    return None if cu_seqlens is None else _checks.boundaries(cu_seqlens, length)


def check_steps(x: SelectiveInputs) -> list[int] | None:
    """As :func:`check_values`, of a selective scan."""
    _checks.steps(x.dt)
    _checks.rates(x.A)
    return None if x.cu_seqlens is None else _checks.boundaries(x.cu_seqlens, x.x.shape[1])


def repeat_heads(x: Tensor, heads: int, dim: int = 2) -> Tensor:
    """[.., G, ..] -> [.., H, ..]: each query/key head serves H/G neighbouring value heads."""
    return x if x.shape[dim] == heads else x.repeat_interleave(heads // x.shape[dim], dim)
