"""The selective scan in plain torch: segments of 64 tokens, whose states exist only while they are worked on.

    h_t = e^{dt_t A} * h_{t-1} + u_t B_t^T,   y_t = h_t C_t,   u_t = dt_t x_t     (h [D, N], each channel on its own)

With X_t the gradient of h_t, all later uses included (X_t = dy_t C_t^T + e^{dt_{t+1} A} * X_{t+1})::

    du_t = X_t B_t,  dB_t = X_t^T u_t,  dC_t = h_t^T dy_t,  and through the exponent E_t = X_t * e^{dt_t A} * h_{t-1}:
    d(dt)_t = sum_n A * E_t,  dA = sum_t dt_t E_t

The backward walks each segment again from the state kept before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from linattn.backends._boundary import SelectiveGrads, SelectiveKernel
from linattn.backends._elementwise import elementwise
from linattn.backends._packing import Bucket, buckets
from linattn.backends._protocol import SelectiveInputs, check_steps, repeat_heads, state_dtype
from linattn.recurrence import Mode

SEGMENT = 64


def one_token(x: SelectiveInputs) -> tuple[Tensor, Tensor]:
    """Generation: plain differentiable torch, no op boundary."""
    if not torch.compiler.is_compiling():
        check_steps(x)
    D, dtype = x.A.shape[0], state_dtype(x.x.dtype)
    with torch.autocast(x.x.device.type, enabled=False):
        A, dt, u = x.A.to(dtype), x.dt[:, 0].to(dtype).unsqueeze(-1), x.x[:, 0].to(dtype).unsqueeze(-1)
        B, C = (repeat_heads(t[:, 0], D, 1).to(dtype) for t in (x.B, x.C))
        h = dt * u * B
        if x.state is not None:
            h = torch.addcmul(h, (dt * A).exp(), x.state)
        return (h * C).sum(-1).to(x.x.dtype).unsqueeze(1), h


class _Segment:
    """Tokens [B, L] in the compute dtype, channels by groups: x, dt, u [B, L, G, P], B, C [B, L, G, N], A [G, P, N]."""

    def __init__(self, x: SelectiveInputs, start: int) -> None:
        dtype, G = state_dtype(x.x.dtype), x.B.shape[2]
        self.x, self.dt = (t[:, start : start + SEGMENT].to(dtype).unflatten(2, (G, -1)) for t in (x.x, x.dt))
        self.B, self.C = (t[:, start : start + SEGMENT].to(dtype) for t in (x.B, x.C))
        self.A = x.A.to(dtype).unflatten(0, (G, -1))
        self.u = self.dt * self.x
        self.decay = (self.dt.unsqueeze(-1) * self.A).exp_()

    def states(self, h: Tensor, width: int | None) -> Tensor:
        """Every state [B, L, G, P, N] after h [B, G, P, N]."""
        return elementwise(self.u.unsqueeze(-1) * self.B.unsqueeze(3), self.decay, h, width)

    def backward(
        self, before: Tensor, h: Tensor, dy: Tensor, dh: Tensor, width: int | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients by name, and that of the state ``before``, given that of the last of the states ``h``."""
        read = dy.unsqueeze(-1) * self.C.unsqueeze(3)
        read[:, -1] += dh
        late = torch.cat([self.decay[:, 1:], torch.zeros_like(self.decay[:, :1])], 1)
        X = elementwise(read.flip(1), late.flip(1), torch.zeros_like(before), width).flip(1)
        du = (X @ self.B.unsqueeze(-1)).squeeze(-1)
        grads = {
            "x": self.dt * du,
            "B": (self.u.unsqueeze(-2) @ X).squeeze(-2),
            "C": (dy.unsqueeze(-2) @ h).squeeze(-2),
        }
        X *= self.decay
        first = X[:, 0].clone()
        X *= torch.cat([before.unsqueeze(1), h[:, :-1]], 1)
        grads["dt"] = self.x * du + (X * self.A).sum(-1)
        grads["A"] = (X * self.dt.unsqueeze(-1)).sum((0, 1))
        return grads, first


def _width(mode: str) -> int | None:
    return 1 if mode == Mode.RECURRENT.value else None


class Segments(SelectiveKernel):
    """The kernel behind the ops."""

    def states_shape(self, x: SelectiveInputs) -> list[int]:
        if x.cu_seqlens is not None:  # packed: the backward walks each bucket again
            return [0]
        B, T, _ = x.x.shape
        return [-(-T // SEGMENT), B, *x.A.shape]

    def _first_state(self, x: SelectiveInputs, rows: int) -> Tensor:
        if x.state is not None:
            return x.state.to(state_dtype(x.x.dtype), copy=True)
        return x.x.new_zeros(rows, *x.A.shape, dtype=state_dtype(x.x.dtype))

    def _buckets(self, x: SelectiveInputs, ends: list[int]) -> Iterator[tuple[Bucket, SelectiveInputs]]:
        """Packed sequences as padded batches: a step of 0 keeps the state."""
        for bucket in buckets(ends, x.x.device):
            tokens: dict[str, Any] = {name: bucket.gather(getattr(x, name)) for name in ("x", "dt", "B", "C")}
            state = None if x.state is None else x.state[bucket.rows]
            yield bucket, x._replace(**tokens, state=state, cu_seqlens=None)

    def forward(
        self, x: SelectiveInputs, ends: list[int] | None, mode: str, save: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.x.shape
        y = torch.empty(x.x.shape, dtype=x.x.dtype, device=x.x.device)
        if ends is not None:
            final = self._first_state(x, len(ends) - 1)
            for bucket, part in self._buckets(x, ends):
                y_part, final[bucket.rows], _ = self.forward(part, None, mode, False)
                bucket.scatter(y, y_part)
            return y, final, final.new_empty(0)
        h = self._first_state(x, B)
        states = h.new_empty(self.states_shape(x) if save else [0])
        for i, start in enumerate(range(0, T, SEGMENT)):
            if save:
                states[i] = h
            s = _Segment(x, start)
            every = s.states(h.view(B, *s.A.shape), _width(mode))
            y[:, start : start + SEGMENT] = (every @ s.C.unsqueeze(-1)).flatten(2)
            h = every[:, -1].reshape(h.shape).clone()
        return y, h, states

    def backward(
        self, x: SelectiveInputs, ends: list[int] | None, mode: str, states: Tensor, dy: Tensor, dh: Tensor
    ) -> SelectiveGrads:
        tokens = {name: getattr(x, name) for name in ("x", "dt", "B", "C")}
        grads = {name: torch.empty(t.shape, dtype=t.dtype, device=t.device) for name, t in tokens.items()}
        dA = dh.new_zeros(x.A.shape)
        dh = dh.clone()
        if ends is not None:
            for bucket, part in self._buckets(x, ends):
                kept = self.forward(part, None, mode, True)[2]
                piece = self.backward(part, None, mode, kept, bucket.gather(dy), dh[bucket.rows])
                dh[bucket.rows] = piece.state
                dA += piece.A
                for name, target in grads.items():
                    bucket.scatter(target, getattr(piece, name))
        else:
            for start in reversed(range(0, x.x.shape[1], SEGMENT)):
                s, end = _Segment(x, start), start + SEGMENT
                before = states[start // SEGMENT].unflatten(1, s.A.shape[:2])
                dy_s = dy[:, start:end].to(dh.dtype).view(s.x.shape)
                got, first = s.backward(
                    before, s.states(before, _width(mode)), dy_s, dh.view(before.shape), _width(mode)
                )
                dh = first.view(dh.shape)
                dA += got.pop("A").view(dA.shape)
                for name, value in got.items():
                    grads[name][:, start:end] = value.view(grads[name][:, start:end].shape)
        return SelectiveGrads(grads["x"], grads["dt"], dA.to(x.A.dtype), grads["B"], grads["C"], dh)
