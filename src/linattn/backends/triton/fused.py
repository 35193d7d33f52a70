"""What layers do beside the recurrence (:mod:`linattn.backends._fused`) on a GPU: convolution, norm and gated unit.

``triton`` is imported at the first call only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn.backends._fused import Kernels, as_output, fits, laid, norm_layout, rows_of_tokens

TYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 4096  # numbers of a program's tile
CHANNELS = 64  # of a convolution's
LONGEST = 8192  # numbers that a norm divides by one size, at most
PROGRAMS = 1024  # of a norm's backward, about


def serves(
    op: str,
    x: Tensor,
    *tensors: Tensor | None,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    torch_has_one: bool = False,
) -> bool:
    """Whether the kernels do these: floats of up to 32 bits, some of them; no padding, no gradient of a state. Where
    torch has a kernel of its own, that is the faster one."""
    if torch_has_one:
        return False
    given = [t for t in (x, *tensors) if t is not None]
    if x.numel() == 0 or any(t.dtype not in TYPES or t.device != x.device for t in given):
        return False
    if mask is not None or (state is not None and state.requires_grad and torch.is_grad_enabled()):
        return False
    return op != "norm" or x.shape[-1] <= LONGEST


def _launch(name: str, programs: int, tensors: tuple[Any, ...], numbers: tuple[Any, ...], *constants: Any) -> None:
    from linattn.backends.triton import launch, layer_kernels

    with launch._on(tensors[0]):
        launch._launch(getattr(layer_kernels, name), programs, tensors, numbers, constants, 4, 2)


class _Sequences:
    """Rows of T tokens, or N sequences between boundaries ``cu``."""

    def __init__(self, x: Tensor, channels: int, cu_seqlens: Tensor | None) -> None:
        self.B, self.T = rows_of_tokens(x, channels)
        self.cu = None if cu_seqlens is None else cu_seqlens.contiguous()
        self.N = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """As the kernels take them."""
        return self.T, self.B * self.T, self.N, self.N.bit_length()

    def last(self, past: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The last ``past`` tokens of each sequence; which of them there are; their places in what came before."""
        cu = torch.arange(0, (self.B + 1) * self.T, self.T, device=device) if self.cu is None else self.cu
        begins = cu[:-1, None]
        token = cu[1:, None] + torch.arange(-past, 0, device=device)
        there = token >= begins
        before = (token - begins + past).clamp(0, max(past - 1, 0))
        return torch.where(there, token, 0), there, before


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None, mask: Tensor | None,
    cu_seqlens: Tensor | None, activation: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    C, W = weight.shape[0], weight.shape[-1]
    s = _Sequences(x, C, cu_seqlens)
    fits("state", tail, s.N, W - 1, C)
    (x, row), tail = laid(x), None if tail is None else tail.contiguous()
    y = x.new_empty(x.shape)
    tensors = (x, weight.contiguous(), bias, tail, s.cu, y)
    programs = -(-s.B * s.T // (TILE // CHANNELS)) * -(-C // CHANNELS)
    _launch("convolve", programs, tensors, s.numbers, row, C, W, activation, TILE // CHANNELS, CHANNELS)
    past = W - 1
    if cu_seqlens is None and past <= s.T:
        return y, x[:, s.T - past :].clone(memory_format=torch.contiguous_format)
    if cu_seqlens is None:
        before = x.new_zeros(s.B, past, C) if tail is None else tail
        return y, torch.cat([before[:, s.T :], x], 1)
    token, there, place = s.last(past, x.device)
    new = x[0][token]
    old = torch.zeros_like(new) if tail is None else tail.gather(1, place[..., None].expand_as(new))
    return y, torch.where(there[..., None], new, old)


def _convolution_backward(
    dy: Tensor, d_new: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None,
    mask: Tensor | None, cu_seqlens: Tensor | None, activation: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    C, W = weight.shape[0], weight.shape[-1]
    s = _Sequences(x, C, cu_seqlens)
    (x, row), (dy, dy_row) = laid(x), laid(dy.to(x.dtype))
    tail = None if tail is None else tail.contiguous()
    size = TILE // CHANNELS
    tiles = -(-s.B * s.T // size)
    dx, da = x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.float32)
    sums = x.new_empty(tiles, W + 1, C, dtype=torch.float32)
    programs, weight_rows = tiles * -(-C // CHANNELS), weight.contiguous()
    tensors = (x, weight_rows, bias, tail, s.cu, dy, da, sums)
    _launch("convolve_slope", programs, tensors, s.numbers, row, dy_row, C, W, activation, size, CHANNELS)
    _launch("convolve_back", programs, (da, weight_rows, s.cu, dx), s.numbers, C, W, size, CHANNELS)
    if d_new is not None:
        token, there, _ = s.last(W - 1, x.device)
        dx.view(-1, C).index_add_(
            0, token.flatten(), torch.where(there[..., None], d_new, 0).to(dx.dtype).flatten(0, 1)
        )
    total = sums.sum(0)
    dweight = total[:W].t().reshape(weight.shape)
    return dx, as_output(dweight, weight, x), as_output(total[W], bias, x), x.new_empty(0)


def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, groups: int, centred: bool,
    gate_first: bool, mean: bool, eps: float,
) -> Tensor:  # fmt: skip
    for name, numbers in (("weight", weight), ("bias", bias)):
        fits(name, numbers, x.shape[-1])
    fits("gate", gate, *x.shape)
    x, gate, (R, M, N, row, gate_row) = norm_layout(x, gate, groups)
    y = x.new_empty(x.shape)
    tiles, constants = _tiles(weight, gate, R, M, N, centred, gate_first)
    _launch("norm", tiles * M, (x, weight, bias, gate, y), (R, 1 / N if mean else 1.0, eps), row, gate_row, *constants)
    return y


def _tiles(
    weight: Tensor | None, gate: Tensor | None, R: int, M: int, N: int, centred: bool, gate_first: bool
) -> tuple[int, tuple[Any, ...]]:
    """Tiles of rows, and the kernels' constants."""
    size = max(16, 1 << (N - 1).bit_length())
    rows = max(TILE // size, 1)
    gated = 0 if gate is None else 1 if gate_first else 2
    return -(-R // rows), (M, N, M * N if weight is None else weight.numel(), centred, gated, rows, size)


def _norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, groups: int,
    centred: bool, gate_first: bool, mean: bool, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    x, gate, (R, M, N, row, gate_row) = norm_layout(x, gate, groups)
    dy = dy.to(x.dtype).contiguous()
    tiles, constants = _tiles(weight, gate, R, M, N, centred, gate_first)
    walk = max(-(-tiles * M // PROGRAMS), 1)
    places = -(-tiles // walk)
    dx, dgate = x.new_empty(x.shape), None if gate is None else gate.new_empty(gate.shape)
    dweight, dbias = (None if t is None else x.new_empty(places, M * N, dtype=torch.float32) for t in (weight, bias))
    tensors = (x, weight, bias, gate, dy, dx, dgate, dweight, dbias)
    numbers = (R, 1 / N if mean else 1.0, eps, walk)
    _launch("norm_gradient", places * M, tensors, numbers, row, gate_row, *constants)
    sums = [
        None if t is None or p is None else t.view(-1, p.numel()).sum(0) for t, p in ((dweight, weight), (dbias, bias))
    ]
    pairs = ((dx, x), (sums[0], weight), (sums[1], bias), (dgate, gate))
    return tuple(as_output(grad, like, x) for grad, like in pairs)


def _glu(x: Tensor) -> Tensor:
    x, row = laid(x)
    N = x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], N)
    _launch("glu", *_pieces(y.numel() // N, N, (x, None, y), row, 0))
    return y


def _glu_backward(dy: Tensor, x: Tensor) -> Tensor:
    (x, row), (dy, dy_row) = laid(x), laid(dy.to(x.dtype))
    N, dx = x.shape[-1] // 2, x.new_empty(x.shape)
    _launch("glu", *_pieces(dy.numel() // N, N, (x, dy, dx), row, dy_row))
    return dx


def _pieces(R: int, N: int, tensors: tuple[Any, ...], row: int, dy_row: int) -> tuple[Any, ...]:
    """What the kernel of gated units is launched with."""
    size = min(max(16, 1 << (N - 1).bit_length()), 1024)
    rows = max(TILE // 2 // size, 1)
    return -(-R // rows) * -(-N // size), tensors, (R,), row, dy_row, N, rows, size


KERNELS = Kernels(
    "triton",
    serves,
    {
        "convolution": _convolution,
        "convolution_backward": _convolution_backward,
        "norm": _norm,
        "norm_backward": _norm_backward,
        "glu": _glu,
        "glu_backward": _glu_backward,
    },
)
