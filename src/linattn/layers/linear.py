"""Products with weights, no slower in half precision than in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.layers.compiled import plain

FEW = 8  # rows from which on widening a weight takes less time than torch's product of half precision loses
SLICE = 1 << 20  # numbers of a weight that are widened at a time


def _without_instructions() -> tuple[torch.dtype, ...]:
    """The dtypes that this machine's CPU can't multiply matrices of."""
    if not torch.backends.mkldnn.is_available():
        return torch.bfloat16, torch.float16
    ops = torch.ops.mkldnn
    known = {torch.bfloat16: ops._is_mkldnn_bf16_supported(), torch.float16: ops._is_mkldnn_fp16_supported()}
    return tuple(dtype for dtype, multiplied in known.items() if not multiplied)


WIDENED = _without_instructions()


class Linear(nn.Linear):
    """y = x Wᵀ + b: an ``nn.Linear`` in all but how half precision is computed, see :func:`linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ + b, as ``F.linear``, autocast included: x [..., in], weight [out, in], bias [out] of one dtype.

    A CPU without instructions for products of bfloat16 (or float16) takes several times as long for them as for
    float32. There, x and W are widened, W piece by piece, and y is rounded once; the backward does the same. A few rows
    alone, other tensors than plain ones and the transforms of torch.func take torch's own product.
    """
    given = (x, weight) if bias is None else (x, weight, bias)
    narrow = _narrow(*given) if x.numel() >= FEW * x.shape[-1] else ()
    if not narrow:
        return F.linear(*given)
    if torch.compiler.is_compiling():  # which plans for itself what is kept
        with torch.autocast("cpu", enabled=False):
            return F.linear(*(t.float() for t in narrow)).to(narrow[0].dtype)
    # apply takes time, too; without gradients it is not needed
    run = _Widened.apply if torch.is_grad_enabled() else _Widened.forward
    y: Tensor = run(*narrow, *[None] * (3 - len(narrow)))
    return y


def einsum(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """``torch.einsum`` of two tensors of one dtype, computed as :func:`linear` says, however few the rows."""
    narrow = _narrow(x, y)
    if not narrow:
        return torch.einsum(equation, x, y)
    with torch.autocast("cpu", enabled=False):
        return torch.einsum(equation, *(t.float() for t in narrow)).to(narrow[0].dtype)


def _narrow(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands of a product that is to be widened, in the dtype that it is of; none where torch's own is taken."""
    cast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if cast else tensors[0].dtype
    if dtype not in WIDENED or not plain(tensors[0]):
        return ()
    if cast and all(t.dtype != torch.float64 for t in tensors):
        tensors = tuple(t.to(dtype) for t in tensors)
    ordinary = (type(t) in (Tensor, nn.Parameter) and t.dtype == dtype and t.device.type == "cpu" for t in tensors)
    return tensors if all(ordinary) else ()


def _slices(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows of a weight in float32, in equal parts."""
    parts = -(-weight.numel() // SLICE) or 1
    rows = -(-len(weight) // parts) or 1
    for low in range(0, len(weight), rows):
        part = slice(low, low + rows)
        yield part, weight[part].float()


class _Widened(torch.autograd.Function):
    """The product in float32. What is kept is in half precision."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y, wide = x.new_empty(*x.shape[:-1], len(weight)), x.float()
        with torch.autocast("cpu", enabled=False):
            for part, w in _slices(weight):
                y[..., part] = F.linear(wide, w, None if bias is None else bias[part].float())
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        dy = grads[0].flatten(0, -2).float()
        dx = dweight = None
        with torch.autocast("cpu", enabled=False):
            if need_x:
                wide = dy.new_zeros(len(dy), weight.shape[1])
                for part, w in _slices(weight):
                    wide = wide.addmm_(dy[:, part], w)
                dx = wide.view(x.shape).to(x.dtype)
            if need_weight:
                dweight = (dy.t() @ x.flatten(0, -2).float()).to(weight.dtype)
        return dx, dweight, dy.sum(0).to(weight.dtype) if need_bias else None
