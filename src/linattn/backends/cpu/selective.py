"""The selective scan laid out for the library."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.backends._boundary import SelectiveGrads, SelectiveKernel
from linattn.backends._protocol import SelectiveInputs, check_steps
from linattn.backends.cpu.layout import floats, parts_for, plain, scratch, threads_for, type_of
from linattn.backends.cpu.library import BLOCK, Library, address, loaded, selective_problem

PAD = 4  # numbers of a channel are filled up to a multiple of it


class _Call:
    def __init__(self, x: SelectiveInputs, native: Library) -> None:
        (self.B, self.T, self.D), (self.G, self.N) = x.x.shape, x.B.shape[2:]
        self.native = native
        self.x, self.dt, self.in_map, self.out_map = (plain(t) for t in (x.x, x.dt, x.B, x.C))
        self.A = x.A.detach().float().contiguous()
        self.state = None if x.state is None else x.state.detach().float().contiguous()
        self.ends = None if x.cu_seqlens is None else x.cu_seqlens.to(torch.int64).contiguous()
        self.rows = self.B if self.ends is None else self.ends.shape[0] - 1
        self.threads = threads_for(8 * self.B * self.T * self.D * self.N)  # an exponential is worth several
        blocks = -(-self.D // max(self.G, 1) // native.lanes)
        self.parts = parts_for(self.rows * self.G, self.threads, max(blocks, 1))

    def problem(self, outputs: list[Tensor | None]) -> tuple[bytes, Tensor]:
        """The problem, and its scratch, which must outlive the call."""
        inputs = (self.x, self.dt, self.in_map, self.out_map, self.A, self.state, self.ends)
        pointers = [address(t) for t in (*inputs, *outputs)]
        sizes = [
            self.rows, self.T, self.B * self.T, self.D, self.G, self.N,
            type_of(self.x), type_of(self.dt), self.parts, self.threads,
        ]  # fmt: skip
        memory, start = scratch(self.threads, self.native.selective_scratch(selective_problem([*pointers, 0], sizes)))
        return selective_problem([*pointers, start], sizes), memory


class Selective(SelectiveKernel):
    """The kernel behind the ops."""

    reads_gates = False  # the library finds steps and rates out of range by itself, while it reads them

    def states_shape(self, x: SelectiveInputs) -> list[int]:
        (B, T, D), (G, N) = x.x.shape, x.B.shape[2:]
        slots = B * (-(-T // BLOCK)) if x.cu_seqlens is None else T // BLOCK + x.cu_seqlens.shape[0] - 1
        lanes = loaded().lanes  # before every BLOCK tokens of every sequence, or room for as many; as the library packs
        return [slots, G, -(-D // max(G * lanes, 1)) * lanes, -(-N // PAD) * PAD]

    def forward(
        self, x: SelectiveInputs, ends: list[int] | None, mode: str, save: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = _Call(x, loaded())
        y, h = torch.empty(x.x.shape, dtype=x.x.dtype, device="cpu"), floats(call.rows, call.D, call.N)
        states = floats(*self.states_shape(x)) if save else None
        problem, _scratch = call.problem([y, h, states, *[None] * 8])
        if not call.native.selective_forward(problem):
            check_steps(x)
        return y, h, floats(0) if states is None else states

    def backward(
        self, x: SelectiveInputs, ends: list[int] | None, mode: str, states: Tensor, dy: Tensor, dh: Tensor
    ) -> SelectiveGrads:
        if x.x.numel() == 0 or x.A.numel() == 0:
            return SelectiveGrads._make([*(torch.zeros_like(t) for t in x[:5] if t is not None), dh.clone()])
        call = _Call(x, loaded())
        assert call.dt is not None
        dy, dh, states = dy.to(x.x.dtype).contiguous(), dh.contiguous(), states.contiguous()
        dx = torch.empty(x.x.shape, dtype=x.x.dtype, device="cpu")
        ddt, dA, dstate = torch.empty_like(call.dt), floats(call.rows, *x.A.shape), torch.empty_like(dh)
        dB, dC = (floats(call.parts, *x.B.shape) for _ in range(2))
        problem, _scratch = call.problem([None, None, states, dy, dh, dx, ddt, dA, dB, dC, dstate])
        call.native.selective_backward(problem)
        dA, dB, dC = (grad.sum(0).to(like.dtype) for grad, like in ((dA, x.A), (dB, x.B), (dC, x.C)))
        return SelectiveGrads(dx, ddt.to(x.dt.dtype), dA, dB, dC, dstate)
