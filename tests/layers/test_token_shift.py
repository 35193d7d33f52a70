"""The token shift and the channel mixes: every split, padding and packing gives the plain shift."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linattn.layers.channel_mix import ChannelMix
from linattn.layers.token_shift import channel_ramp, interpolate, token_shift

C = 3


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_each_token_sees_the_one_before_it() -> None:
    x, state = tokens(2, 5, C), tokens(2, C)
    before, last = token_shift(x, state)
    assert torch.equal(before, torch.stack([state, *x[:, :-1].unbind(1)], 1))
    assert torch.equal(last, x[:, -1])
    assert torch.equal(token_shift(x)[0][:, 0], torch.zeros(2, C))


def test_padding_is_skipped_wherever_it_stands() -> None:
    x, state = tokens(2, 6, C), tokens(2, C)
    mask = torch.tensor([[False, True, True, False, True, False], [False] * 6])
    before, last = token_shift(x, state, mask=mask)
    alone, end = token_shift(x[:1, mask[0]], state[:1])
    assert torch.equal(before[:1, mask[0]], alone)
    assert torch.equal(last, torch.cat([end, state[1:]]))


def test_packed_sequences_do_not_see_each_other() -> None:
    lengths = (2, 0, 1, 3, 0)
    x, state = tokens(1, sum(lengths), C), tokens(len(lengths), C)
    before, last = token_shift(x, state, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    parts = [token_shift(part, state[n : n + 1]) for n, part in enumerate(x.split(lengths, 1))]
    assert torch.equal(before, torch.cat([part for part, _ in parts], 1))
    assert torch.equal(last, torch.cat([end for _, end in parts]))


def test_the_state_keeps_nothing_else_alive_and_is_checked() -> None:
    _, last = token_shift(tokens(2, 50, C))
    assert last.untyped_storage().nbytes() == last.numel() * 8
    with pytest.raises(ValueError, match=r"state: got a shifted input \[1, 3\], wanted \[2, 3\]"):
        token_shift(tokens(2, 4, C), tokens(1, C))


def test_interpolation() -> None:
    x, before, weight = tokens(2, 4, C), tokens(2, 5, C)[:, 1:], tokens(4, C)
    mixed = interpolate(x, before, weight)
    torch.testing.assert_close(mixed[2], x + weight[2] * (before - x))
    assert channel_ramp(4, 1.0).tolist() == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("receptance", [True, False])
@pytest.mark.parametrize("vocab_size", [0, 11])
def test_channel_mix(receptance: bool, vocab_size: int) -> None:
    """The formula, in one piece and token by token."""
    torch.manual_seed(0)
    layer = ChannelMix(C, 8, receptance=receptance, vocab_size=vocab_size).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x, ids, embedding = tokens(2, 6, C), torch.arange(12).view(2, 6) % 11, tokens(2, 7, C)[:, 1:]
    mixed = [x + weight * (token_shift(x)[0] - x) for weight in layer.shift_mix]
    hidden = (mixed[0] @ layer.key.weight.T).relu() ** 2
    if layer.deep_embed is not None:
        d = layer.deep_embed
        E = (d.table.weight[ids] + embedding @ d.from_embedding.weight.T).view(2, 6, 32, 32)
        low = torch.einsum("btc,rc,btrs->bts", x, d.down.weight, E)
        hidden = hidden * (low @ d.up.weight.T + d.up.bias)
    wanted = hidden @ layer.value.weight.T
    if layer.receptance is not None:
        wanted = (mixed[1] @ layer.receptance.weight.T).sigmoid() * wanted
    shared = {"ids": ids, "embedding": embedding}
    y, end = layer(x, shared=shared)
    torch.testing.assert_close(y, wanted)
    outputs, state = [], None
    for t in range(6):
        now = {name: value[:, t : t + 1] for name, value in shared.items()}
        y, state = layer(x[:, t : t + 1], state, shared=now)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), wanted)
    torch.testing.assert_close(state, end)
    if vocab_size:
        with pytest.raises(ValueError, match="shared: got none"):
            layer(x)
