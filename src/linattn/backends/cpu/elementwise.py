"""Recurrences of single numbers, the scan and the exponentially weighted average, laid out for the library.

    linattn::elementwise_forward   -> output, final state (h, d, m), and the states that the backward keeps
    linattn::elementwise_backward  -> gradients of x, v, g, u and of the state

A scan has x, g and h alone; what it has not is empty.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn import _checks
from linattn.backends._ops import call, define, differentiable
from linattn.backends._protocol import AverageInputs, check_values
from linattn.backends.cpu.layout import floats, plain, threads_for, type_of
from linattn.backends.cpu.library import BLOCK, address, elementwise_problem, loaded

_WORK = 32  # multiplications that a token's number is worth, with its exponentials


class _Inputs(NamedTuple):
    """x, v [B, T, D]; g [D] or [B, T, D]; u [D]; the state h, d, m, each [N, D]."""

    x: Tensor
    v: Tensor | None
    g: Tensor
    u: Tensor | None
    h: Tensor | None
    d: Tensor | None
    m: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def rows(self) -> int:
        return self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def state_shapes(self) -> list[list[int]]:
        shape = [self.rows, self.x.shape[2]]
        return [shape, *[[0] if self.v is None else shape] * 2]

    def kept_shape(self, save: bool) -> list[int]:
        """A state before every BLOCK tokens of every sequence, or room for as many."""
        B, T, D = self.x.shape
        slots = B * (-(-T // BLOCK)) if self.cu_seqlens is None else T // BLOCK + self.rows
        return [slots, 1 if self.v is None else 4, D] if save else [0]


def _call(x: _Inputs, outputs: list[Tensor | None]) -> tuple[bytes, list[Tensor | None]]:
    """The problem, and what must outlive the call."""
    fixed = x.g.dim() == 1
    rows = [plain(t) for t in (x.x, x.v, x.g.float() if fixed else x.g)]
    rest = [None if t is None else t.detach().float().contiguous() for t in (x.u, x.h, x.d, x.m)]
    ends = None if x.cu_seqlens is None else x.cu_seqlens.to(torch.int64).contiguous()
    (B, T, D), tensors = x.x.shape, [*rows, *rest, ends]
    sizes = [x.rows, T, D, type_of(rows[0]), type_of(rows[2]), int(fixed), threads_for(_WORK * B * T * D)]
    return elementwise_problem([address(t) for t in (*tensors, *outputs)], sizes), tensors


def _forward(*args: Any) -> tuple[Tensor, ...]:
    *tensors, save = args
    x = _Inputs(*tensors)
    check_values(None, x.cu_seqlens, x.x.shape[1])
    y = torch.empty(x.x.shape, dtype=x.x.dtype, device="cpu")
    state, kept = [floats(*shape) for shape in x.state_shapes()], floats(*x.kept_shape(save))
    problem, _alive = _call(x, [y, *state, kept if save else None, *[None] * 11])
    if not loaded().elementwise_forward(problem):
        _checks.log_decay(x.g)
    return y, *state, kept


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    *tensors, save = args
    x = _Inputs(*tensors)
    shapes = [*x.state_shapes(), x.kept_shape(save)]
    return x.x.new_empty(x.x.shape), *(x.x.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _backward(dy: Tensor, dh: Tensor | None, dd: Tensor | None, dm: Tensor | None, kept: Tensor, *args: Any) -> Any:
    x = _Inputs(*args)
    average, fixed = x.v is not None, x.g.dim() == 1
    given = [None if t is None else t.float().contiguous() for t in (dh, dd, dm)]
    dx, *dv = (torch.empty(x.x.shape, dtype=x.x.dtype, device="cpu") for _ in range(1 + average))
    row = [x.rows, x.x.shape[2]]
    dg = floats(*row) if fixed else torch.empty(x.g.shape, dtype=x.g.dtype, device="cpu")
    du, state = floats(*row) if average else floats(0), [floats(*shape) for shape in x.state_shapes()]
    outputs = [dy.to(x.x.dtype).contiguous(), *given, dx, dv[0] if dv else None, dg, du, *state]
    problem, _alive = _call(x, [*[None] * 4, kept.contiguous(), *outputs])
    loaded().elementwise_backward(problem)
    dg = dg.sum(0).to(x.g.dtype) if fixed else dg
    du = du if x.u is None else du.sum(0).to(x.u.dtype)
    return dx, dv[0] if dv else floats(0), dg, du, *state


def _backward_fake(dy: Tensor, dh: Any, dd: Any, dm: Any, kept: Tensor, *args: Any) -> tuple[Tensor, ...]:
    x = _Inputs(*args)
    empty = functools.partial(dy.new_empty, dtype=torch.float32)
    inputs = (empty(0) if t is None else t.new_empty(t.shape) for t in (x.x, x.v, x.g, x.u))
    return *inputs, *(empty(shape) for shape in x.state_shapes())


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:-1], output[-1])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dy: Tensor | None, dh: Any, dd: Any, dm: Any, _: None) -> tuple[Tensor | None, ...]:
    *tensors, kept = ctx.saved_tensors
    dy = torch.zeros_like(tensors[0]) if dy is None else dy
    grads = call("elementwise_backward", dy, dh, dd, dm, kept, *tensors)
    wanted = zip(grads, tensors, ctx.needs_input_grad, strict=False)
    return (*(grad if need and given is not None else None for grad, given, need in wanted), None, None)


_INPUTS = "Tensor x, Tensor? v, Tensor g, Tensor? u, Tensor? h, Tensor? d, Tensor? m, Tensor? cu_seqlens"
define(
    "elementwise_forward", f"({_INPUTS}, bool save) -> ({', '.join(['Tensor'] * 5)})",
    _forward, _forward_fake, _setup, _gradient,
)  # fmt: skip
define(
    "elementwise_backward",
    f"(Tensor dy, Tensor? dh, Tensor? dd, Tensor? dm, Tensor kept, {_INPUTS}) -> ({', '.join(['Tensor'] * 7)})",
    _backward, _backward_fake,
)  # fmt: skip


def _traced_token(x: Tensor, cu_seqlens: Tensor | None) -> bool:
    """One token that is traced stays in torch's own operations, of which programs are made."""
    return x.shape[1] == 1 and cu_seqlens is None and (torch.compiler.is_compiling() or not _checks.has_values(x))


def _run(x: _Inputs) -> tuple[Tensor, ...]:
    out: tuple[Tensor, ...] = call("elementwise_forward", *x, differentiable(x))
    return out


def scan(x: Tensor, g: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """h_t = e^{g_t} * h_{t-1} + x_t: every h and the final one."""
    if _traced_token(x, cu_seqlens):
        last = x[:, 0].float() if state is None else x[:, 0].float() + g.float().exp().view(-1, x.shape[2]) * state
        return last.to(x.dtype, copy=True).unsqueeze(1), last
    h, final, *_ = _run(_Inputs(x, None, g, None, state, None, None, cu_seqlens))
    return h, final


def average(x: AverageInputs) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None:
    """The weighted average and its final state."""
    if _traced_token(x.v, x.cu_seqlens):
        return None
    n, d, m = (None, None, None) if x.state is None else x.state
    o, *state, _ = _run(_Inputs(x.k, x.v, x.g, x.u, n, d, m, x.cu_seqlens))
    return o, (state[0], state[1], state[2])
