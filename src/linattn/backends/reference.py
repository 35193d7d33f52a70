"""The definition of right: a loop over tokens that interprets the recurrence.

Runs anywhere torch does, in float64 for float64 inputs and in float32 otherwise; autograd differentiates it.
It is meant to be read and compared with, not to be fast.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from linattn.backends._protocol import (
    Backend,
    MatrixInputs,
    Request,
    SelectiveInputs,
    check_steps,
    check_values,
    repeat_heads,
    state_dtype,
)
from linattn.backends._token import token
from linattn.recurrence import Mode


def _matrix(x: MatrixInputs) -> tuple[Tensor, Tensor]:
    """Sequences of equal length, states [B, H, K, V]."""
    (B, T, H, V), K = x.v.shape, x.k.shape[-1]
    dtype = state_dtype(x.v.dtype)
    q, k = (repeat_heads(t, H).to(dtype) for t in (x.q, x.k))
    S = x.v.new_zeros(B, H, K, V, dtype=dtype) if x.state is None else x.state.to(dtype)
    decay = None if x.g is None else x.g.to(dtype).exp()
    if decay is not None and decay.dim() % 2:  # one decay a head: give it a channel axis to broadcast over
        decay = decay.unsqueeze(-1)
    outputs = []
    for t in range(T):

        def at(y: Tensor | None, t: int = t) -> Tensor | None:
            return None if y is None else y[:, t].to(dtype)

        o, S = token(
            S, q[:, t], k[:, t], x.v[:, t].to(dtype), decay[:, t] if decay is not None and decay.dim() == 4 else decay,
            at(x.beta), at(x.a), at(x.b), None if x.u is None else x.u.to(dtype), x.write, x.read,
        )  # fmt: skip
        outputs.append(x.scale * o)
    o = torch.stack(outputs, 1) if outputs else x.v.new_zeros(B, 0, H, V, dtype=dtype)
    return o.to(x.v.dtype), S


def _selective(x: SelectiveInputs) -> tuple[Tensor, Tensor]:
    """Sequences of equal length, states [B, D, N]."""
    (B, T, D), dtype = x.x.shape, state_dtype(x.x.dtype)
    A, dt, u = (t.to(dtype) for t in (x.A, x.dt, x.x))
    B_map, C_map = (repeat_heads(t, D).to(dtype) for t in (x.B, x.C))
    h = u.new_zeros(B, *A.shape) if x.state is None else x.state.to(dtype)
    outputs = []
    for t in range(T):
        step = dt[:, t].unsqueeze(-1)
        h = (step * A).exp() * h + step * u[:, t].unsqueeze(-1) * B_map[:, t]
        outputs.append((h * C_map[:, t]).sum(-1))
    y = torch.stack(outputs, 1) if outputs else u.new_zeros(B, 0, D)
    return y.to(x.x.dtype), h


def _part(y: Tensor | None, start: int, end: int) -> Tensor | None:
    return y if y is None or y.dim() < 3 else y[:, start:end]


class Reference(Backend):
    """Token by token, as the equations say."""

    name = "reference"
    modes = (Mode.RECURRENT,)

    def unsuited(self, request: Request) -> str | None:
        if request.mode not in (None, Mode.RECURRENT):
            return f"it runs mode='recurrent' only, not {request.mode.value!r}"
        return None

    def matrix(self, inputs: MatrixInputs, mode: Mode | None) -> tuple[Tensor, Tensor]:
        x, ends = inputs, check_values(inputs.g, inputs.cu_seqlens, inputs.v.shape[1])
        with torch.autocast(x.v.device.type, enabled=False):
            if ends is None:
                return _matrix(x)
            rows = []
            for n, (start, end) in enumerate(pairwise(ends)):
                cut: dict[str, Any] = {
                    name: _part(getattr(x, name), start, end) for name in ("q", "k", "v", "g", "beta", "a", "b")
                }
                rows.append(_matrix(x._replace(**cut, state=None if x.state is None else x.state[n : n + 1])))
            return torch.cat([o for o, _ in rows], 1), torch.cat([S for _, S in rows])

    def scan(
        self, x: Tensor, g: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, mode: Mode | None
    ) -> tuple[Tensor, Tensor]:
        B, T, D = x.shape
        ends = check_values(g, cu_seqlens, T) or [0, T]
        dtype = state_dtype(x.dtype)
        decay = g.to(dtype).exp()
        states, finals = [], []
        for n, (start, end) in enumerate(pairwise(ends)):
            if state is None:
                h = x.new_zeros(B, D, dtype=dtype)
            else:
                h = (state if cu_seqlens is None else state[n : n + 1]).to(dtype)
            for t in range(start, end):
                h = (decay if g.dim() == 1 else decay[:, t]) * h + x[:, t].to(dtype)
                states.append(h)
            finals.append(h)
        out = torch.stack(states, 1) if states else x.new_zeros(B, 0, D, dtype=dtype)
        return out.to(x.dtype), torch.cat(finals)

    def selective_scan(self, inputs: SelectiveInputs, mode: Mode | None) -> tuple[Tensor, Tensor]:
        x, ends = inputs, check_steps(inputs)
        with torch.autocast(x.x.device.type, enabled=False):
            if ends is None:
                return _selective(x)
            rows = []
            for n, (start, end) in enumerate(pairwise(ends)):
                cut: dict[str, Any] = {name: getattr(x, name)[:, start:end] for name in ("x", "dt", "B", "C")}
                rows.append(_selective(x._replace(**cut, state=None if x.state is None else x.state[n : n + 1])))
            return torch.cat([y for y, _ in rows], 1), torch.cat([h for _, h in rows])
