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
    beta: Tensor | None  # [B, T, H], with Write.DELTA; where the backend weighs, the weight of an additive write
    a: Tensor | None  # [B, T, H, K], with Write.LOW_RANK
    b: Tensor | None  # [B, T, H, K], with Write.LOW_RANK
    u: Tensor | None  # [H, K], with Read.BEFORE; where the backend weighs, [H], of v in the output, with Read.AFTER
    state: Tensor | None  # [N, H, K, V]
    cu_seqlens: Tensor | None  # [N + 1]
    scale: float
    write: Write
    read: Read


class Divisor(NamedTuple):
    """What the outputs o of a matrix recurrence with additive writes are divided by: d_t = max(|s_t|, e^{-m_t}) + eps.

    s_t = scale z_t^T q_t of the sum of keys z_t = e^{g_t} z_{t-1} + w_t k_t; S_t then writes w_t k_t v_t^T. Without m
    the divisor is max(|s_t|, eps). o, s and e^{-m} are thought to share a factor that m sets and that cancels in o / d:
    m has the gradient of -log e^{-m} with the ratio of the three held, which leaves eps's.
    """

    weight: Tensor | None  # [B, T, H], any float
    z: Tensor | None  # [N, H, K], the sum to begin with
    m: Tensor | None  # [B, T, H], any float
    eps: float


class Stabilized(NamedTuple):
    """h_t = e^{f_t} h_{t-1} + e^{i_t} x_t, written for h̃_t = e^{-m_t} h_t, whose decay and input gate are at most 1.

    g, j: [B, T, X] in the state's dtype, both ≤ 0: h̃_t = e^{g_t} h̃_{t-1} + e^{j_t} x_t.
    m_before, m: [B, T, X] in float64 (float32 where the device has none): the maximum before and after each token.
    final: [N, X] in the state's dtype: the maximum to continue from.
    rescale: [N, X], as exact as m: what the last h̃ must be multiplied by to go with ``final``, which is rounded.
    """

    g: Tensor
    j: Tensor
    m_before: Tensor
    m: Tensor
    final: Tensor
    rescale: Tensor


# The maximum of nothing: finite, so that no difference of two maxima is NaN, and a power of two, so that every dtype of
# a state holds it exactly. Whatever is added to it leaves it as it is.
EMPTY = -(2.0**100)
STEEPEST = -1e5  # e to this is 0 in every dtype; clamped to it, sums of decays stay finite


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

    def weighs(self, recurrence: Recurrence) -> bool:
        """Whether :meth:`matrix` takes weights of additive writes as ``beta``, and a skip connection [H] as ``u``."""
        return False

    @abstractmethod
    def matrix(self, inputs: MatrixInputs, mode: Mode | None) -> tuple[Tensor, Tensor]:
        """Output [B, T, H, V] in v's dtype and final state [N, H, K, V] in :func:`state_dtype`."""

    def normalized(self, inputs: MatrixInputs, by: Divisor, mode: Mode | None) -> tuple[Tensor, Tensor, Tensor]:
        """o / d [B, T, H, V] in v's dtype, the final S, and the final sum of keys z [N, H, K] in :func:`state_dtype`.

        Unless a backend knows better, z is one more value column, of ones, and all is done in :func:`state_dtype`, so
        that half inputs lose nothing in the ratio.
        """
        dtype, V, wide = inputs.v.dtype, inputs.v.shape[-1], state_dtype(inputs.v.dtype)
        q, k, v = (x.to(wide) for x in inputs[:3])
        v = torch.cat([v, v.new_ones(()).expand(*v.shape[:-1], 1)], -1)
        v = v if by.weight is None else v * by.weight.to(wide).unsqueeze(-1)
        S = None if inputs.state is None or by.z is None else torch.cat([inputs.state, by.z.unsqueeze(-1)], -1)
        o, S = self.matrix(inputs._replace(q=q, k=k, v=v, state=S), mode)
        o, size = o[..., :V], o[..., V].abs()
        if by.m is None:
            d = size.clamp_min(by.eps)
        else:
            m = by.m.detach()
            # Only by eps the result depends on m itself; its gradient is that of a factor of 1.
            d = torch.maximum(size, (-m).exp().to(wide)) + (by.eps * (by.m - m).exp()).to(wide)
        return (o / d.unsqueeze(-1)).to(dtype), S[..., :V], S[..., V]

    def stabilized(self, f: Tensor, i: Tensor, m: Tensor | None, cu_seqlens: Tensor | None) -> Stabilized | None:
        """f, i [B, T, X], m [N, X]: as :func:`linattn.layers.exponential_gate.stabilize` says, in values and gradients.

        None where the backend has nothing better than torch's operations.
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
