"""The short causal convolution in front of a recurrence."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.backends import _fused as fused
from linattn.layers.compiled import serves
from linattn.layers.sequences import left_justify, sequence_of_token, take


class _Depthwise(torch.autograd.Function):
    """[B, S+T, C] * [C, W] -> [B, T, C] with S = W-1, as W shifted multiply-adds.

    Channels stay innermost, which F.conv1d does not allow. On a CPU, forward and backward take about 0.4 of F.conv1d's
    time and 0.6 of the same sum under autograd, which fills a whole gradient tensor for each of the W slices.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        length = x.shape[1] - weight.shape[1] + 1
        y = x[:, :length] * weight[:, 0]
        for shift in range(1, weight.shape[1]):
            y = y.addcmul_(x[:, shift : shift + length], weight[:, shift])
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        slices = [x[:, shift : shift + grad.shape[1]] for shift in range(weight.shape[1])]
        grad_weight = torch.stack([(grad * part).sum((0, 1)) for part in slices], dim=1)
        grad_x = torch.zeros_like(x, dtype=grad.dtype)
        for shift in range(weight.shape[1]):
            grad_x[:, shift : shift + grad.shape[1]].addcmul_(grad, weight[:, shift])
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


class ShortConvolution(nn.Module):
    """y_t = silu(bias + Σ_j weight_j · x_{t-W+1+j}), each channel on its own, over the last W tokens of its sequence.

    The state is the last W-1 inputs, [N, W-1, C] in x's dtype: a value that is exact for pieces of any length, shorter
    than W-1 too. The weight has the shape [C, 1, W] and the initialisation of ``nn.Conv1d``. ``width=0`` is no
    convolution, the activation alone.

    It is one pass, in float32 inside, where a backend has a kernel for it.
    """

    def __init__(self, channels: int, width: int = 4, *, bias: bool = False, activation: bool = True) -> None:
        super().__init__()
        if width < 0:
            raise ValueError(f"conv_size: got {width}, wanted 0 (no convolution) or a positive width")
        self.channels, self.width, self.activation = channels, width, activation
        bound = 1 / math.sqrt(max(width, 1))
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-bound, bound)) if width else None
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias and width else None

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, C] -> y [B, T, C] in x's dtype and the state.

        ``mask`` [B, T] True for real tokens: padding is skipped wherever it stands, its y is zero. ``cu_seqlens``
        [N+1] for packed sequences in one row. Raises ValueError if the state is of another shape.
        """
        batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        wanted = (batch, max(self.width - 1, 0), self.channels)
        if state is not None and state.shape != wanted:
            raise ValueError(f"state: got a convolution state {list(state.shape)}, wanted {list(wanted)}")
        state = None if state is None else state.to(x.dtype)
        if (
            self.weight is not None
            and self.width <= fused.WIDEST
            and serves("convolution", x, self.weight, self.bias, state=state, mask=mask)
        ):
            return fused.convolution(x, self.weight, self.bias, state, mask, cu_seqlens, self.activation)
        state = x.new_zeros(wanted) if state is None else state
        if self.weight is None:
            y = x
        elif cu_seqlens is not None:
            y, state = self._packed(x, state, cu_seqlens)
        elif mask is not None:
            y, state = self._masked(x, state, mask)
        else:
            context = torch.cat([state, x], dim=1)
            # A slice would keep the whole context alive.
            y, state = self._convolve(context), context[:, x.shape[1] :].clone()
        if self.bias is not None:
            y = y + self.bias
        y = (F.silu(y) if self.activation else y).to(x.dtype)
        return y if mask is None else y.masked_fill(~mask[..., None], 0), state

    def _convolve(self, context: Tensor) -> Tensor:
        assert self.weight is not None
        # apply costs as much as the sums of one token; without gradients it is not needed.
        depthwise = _Depthwise.apply if torch.is_grad_enabled() else _Depthwise.forward
        y: Tensor = depthwise(context, self.weight[:, 0])
        return y

    def _packed(self, x: Tensor, state: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Put each sequence's state before its tokens; then one convolution serves the whole row."""
        (sequences, past, channels), length = state.shape, x.shape[1]
        number, token = (torch.arange(n, device=x.device) for n in (sequences, length))
        first = (cu_seqlens[:-1] + number * past)[:, None] + torch.arange(past, device=x.device)
        last = first + cu_seqlens.diff()[:, None]
        place = token + (sequence_of_token(cu_seqlens, length) + 1) * past
        order = torch.empty(sequences * past + length, dtype=torch.int64, device=x.device)
        order = order.scatter_(0, torch.cat([first.flatten(), place]), torch.arange(len(order), device=x.device))
        context = torch.cat([state.reshape(-1, channels), x[0]]).index_select(0, order)
        y = self._convolve(context[None]).index_select(1, place - past)
        return y, context.index_select(0, last.flatten()).view_as(state)

    def _masked(self, x: Tensor, state: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Move padding in front of the state, so that real tokens follow each other."""
        batch, past, _ = state.shape
        real = torch.cat([mask.new_ones(batch, past), mask], dim=1)
        order, place = left_justify(real)
        context = take(torch.cat([state, x], dim=1), order)
        y = take(self._convolve(context), (place[:, past:] - past).clamp(min=0))
        return y, context[:, x.shape[1] :].clone()
