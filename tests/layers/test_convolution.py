"""The short convolution against torch's own, with padding and packing of every kind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.layers import ShortConvolution

C = 5


def conv(width: int = 4, bias: bool = True) -> ShortConvolution:
    torch.manual_seed(0)
    return ShortConvolution(C, width, bias=bias).double()


def plain(layer: ShortConvolution, x: Tensor) -> Tensor:
    """x [T, C]: torch's convolution after W-1 zeros."""
    assert layer.weight is not None
    padded = F.pad(x.T[None], (layer.width - 1, 0))
    return F.silu(F.conv1d(padded, layer.weight, layer.bias, groups=C))[0].T


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_equals_torch(width: int, length: int) -> None:
    layer, x = conv(width), torch.randn(2, length, C, dtype=torch.float64)
    y, state = layer(x)
    torch.testing.assert_close(y, torch.stack([plain(layer, row) for row in x]))
    assert state.shape == (2, width - 1, C)
    torch.testing.assert_close(state, F.pad(x, (0, 0, width, 0))[:, -(width - 1) or length + width :])


def test_gradients() -> None:
    layer = conv()
    x, tail = (torch.randn(2, n, C, dtype=torch.float64, requires_grad=True) for n in (6, 3))
    mask = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    cu_seqlens = torch.tensor([0, 1, 1, 4, 6])
    tails = torch.randn(4, 3, C, dtype=torch.float64, requires_grad=True)
    weights = tuple(layer.parameters())

    def call(x: Tensor, tail: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x, tail)

    torch.autograd.gradcheck(call, (x, tail, *weights))
    torch.autograd.gradcheck(lambda x, tail, *_: layer(x, tail, mask=mask), (x, tail, *weights))
    torch.autograd.gradcheck(lambda x, tail, *_: layer(x[:1], tail, cu_seqlens=cu_seqlens), (x, tails, *weights))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_padding_anywhere_is_skipped(width: int) -> None:
    """Left, right, in between, all of a row: the same as the real tokens alone, in pieces with the state carried."""
    layer = conv(width)
    masks = torch.tensor(
        [[0, 0, 0, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]
    ).bool()
    x, state = torch.randn(3, 5, 6, C, dtype=torch.float64), None
    outputs: list[list[Tensor]] = [[] for _ in masks]
    for part in x:
        y, state = layer(part, state, mask=masks)
        assert (y[~masks] == 0).all()
        for n, mask in enumerate(masks):
            outputs[n].append(y[n, mask])
    for n, mask in enumerate(masks):
        real = torch.cat([part[n, mask] for part in x])
        if len(real):
            torch.testing.assert_close(torch.cat(outputs[n]), plain(layer, real))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_packed_sequences_do_not_mix(width: int) -> None:
    layer, state = conv(width), None
    sequences: list[list[Tensor]] = [[] for _ in range(5)]
    outputs: list[list[Tensor]] = [[] for _ in range(5)]
    for lengths in ((1, 0, 5, 2, 3), (0, 2, 1, 3, 1), (4, 4, 0, 1, 2)):
        x = torch.randn(1, sum(lengths), C, dtype=torch.float64)
        y, state = layer(x, state, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
        for n, (part, out) in enumerate(zip(x[0].split(lengths), y[0].split(lengths), strict=True)):
            sequences[n].append(part)
            outputs[n].append(out)
    for sequence, output in zip(sequences, outputs, strict=True):
        torch.testing.assert_close(torch.cat(output), plain(layer, torch.cat(sequence)))


def test_width_zero_is_the_activation() -> None:
    x = torch.randn(2, 3, C)
    y, state = ShortConvolution(C, 0)(x)
    torch.testing.assert_close(y, F.silu(x))
    assert state.shape == (2, 0, C)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="conv_size: got -1"):
        ShortConvolution(C, -1)
    with pytest.raises(ValueError, match=r"state: .*\[2, 2, 5\].*\[2, 3, 5\]"):
        conv()(torch.zeros(2, 4, C, dtype=torch.float64), torch.zeros(2, 2, C))


# torch.compile makes an instance of every autograd.Function, which torch warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_whole_with_gradients() -> None:
    layer, x = conv(), torch.randn(2, 6, C, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    for arguments in ({}, {"mask": mask}):
        y, _ = layer(x, **arguments)
        compiled, _ = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, **arguments)
        torch.testing.assert_close(compiled, y)
        (wanted,) = torch.autograd.grad(y.square().sum(), x)
        (got,) = torch.autograd.grad(compiled.square().sum(), x)
        torch.testing.assert_close(got, wanted)
