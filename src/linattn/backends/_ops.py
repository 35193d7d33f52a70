"""Ops registered with torch, and their calls: as an op where torch must see one, else what stands behind it at once.

Torch's dispatcher takes longer than a small kernel. A backward is refused a derivative of its own; an op returns an
empty tensor where what stands behind it returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library

_library = Library("linattn", "DEF")
_REFUSAL = "the kernels have no second derivative; LINATTN_BACKEND=reference has"


class Op(NamedTuple):
    """What an op runs, and to autograd: ``setup(ctx, inputs, output)`` keeps, ``gradient(ctx, *grads)`` gives."""

    run: Callable[..., Any]
    setup: Callable[..., None]
    gradient: Callable[..., tuple[Tensor | None, ...]] | None = None


OPS: dict[str, Op] = {}


class Node(torch.autograd.Function):
    """An op, given last, as a node of autograd's alone."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *inputs, op = args
        output = op.run(*inputs)
        op.setup(ctx, inputs, output)
        ctx.gradient = op.gradient
        return output if isinstance(output, Tensor) else tuple(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return *ctx.gradient(ctx, *grads), None
        with torch.no_grad():
            found: list[Any] = [*ctx.gradient(ctx, *grads), None]
        refused: Any = torch._C._functions.DelayedError(_REFUSAL.encode(), len(found))
        return tuple(refused(*(None if t is None else t.detach().requires_grad_() for t in found)))


def _first(values: Sequence[Any]) -> Tensor:
    """The tensor by which a call is judged."""
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, list):
            return _first(value)
    raise TypeError("an op without a tensor")


def _filled(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with empty tensors for None."""

    def op(*values: Any) -> Any:
        found = run(*values)
        if isinstance(found, Tensor):
            return found
        tensors = [_first(values).new_empty(0) if t is None else t for t in found]
        return tensors if isinstance(found, list) else tuple(tensors)

    return op


def _nothing(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    """A backward keeps nothing for one of its own."""


def _refuse(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
    raise RuntimeError(_REFUSAL)


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    setup: Callable[..., None] = _nothing,
    gradient: Callable[..., tuple[Tensor | None, ...]] | None = None,
) -> None:
    """Register ``linattn::name``; ``fake`` gives the shapes of what ``run`` gives. Without a gradient, no setup."""
    OPS[name] = Op(run, setup, gradient)
    found, setup = (gradient, setup) if gradient is not None else (_refuse, _nothing)
    one_list = schema.endswith("-> Tensor[]")  # whose gradients come as one
    _library.define(name + schema)
    _library.impl(name, _filled(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"linattn::{name}", _filled(fake), lib=_library)
    torch.library.register_autograd(
        f"linattn::{name}", (lambda ctx, grads: found(ctx, *grads)) if one_list else found, setup_context=setup,
        lib=_library,
    )  # fmt: skip


def traced(x: Tensor) -> bool:
    """Whether torch must see an op: in torch.compile, tensor subclasses (as fake ones), torch.func, dispatch modes."""
    return (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, torch.nn.Parameter)
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
    )


def differentiable(values: Sequence[Any]) -> bool:
    """Whether autograd is to see a call with these."""
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in values)


def call(name: str, *values: Any) -> Any:
    """The op's result."""
    if traced(_first(values)):
        return getattr(torch.ops.linattn, name)(*values)
    op = OPS[name]
    return Node.apply(*values, op) if op.gradient is not None and differentiable(values) else op.run(*values)
