"""RWKV's feed-forward layers, which see the token before."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from linattn._checks import fail
from linattn.layers.linear import Linear, einsum
from linattn.layers.mixer import no_weight_decay
from linattn.layers.token_shift import channel_ramp, token_mix


class DeepEmbed(nn.Module):
    """A factor of every hidden channel that depends on the token itself (RWKV-7a).

    factor = bias + W_up E(token)ᵀ W_down h, with E(token) = table[token] + W_e e as a matrix [rank, rank], where e is
    the token's embedding. At the start E is zero and the factor one.
    """

    def __init__(self, vocab_size: int, d_model: int, hidden: int, *, rank: int = 32) -> None:
        super().__init__()
        self.rank = rank
        self.table = nn.Embedding(vocab_size, rank**2, _weight=torch.zeros(vocab_size, rank**2))
        self.from_embedding = Linear(d_model, rank**2, bias=False)
        self.down = Linear(d_model, rank, bias=False)
        self.up = Linear(rank, hidden)
        nn.init.zeros_(self.from_embedding.weight)
        self.down.weight = no_weight_decay(torch.randn(rank, d_model) * (0.1 * d_model**-0.5))
        self.up.weight = no_weight_decay(torch.randn(hidden, rank) * (0.1 * hidden**-0.5))
        nn.init.ones_(self.up.bias)

    def forward(self, h: Tensor, ids: Tensor, embedding: Tensor) -> Tensor:
        """h, embedding [B, T, d_model]; ids [B, T] -> [B, T, hidden]."""
        E = (self.table(ids) + self.from_embedding(embedding)).unflatten(-1, (self.rank, self.rank))
        factor: Tensor = self.up(einsum("btr,btrs->bts", self.down(h), E))
        return factor


class ChannelMix(nn.Module):
    """y = W_v relu(W_k x_k)², where x_k = x + μ_k (x' - x) mixes x with the input x' before it.

    The state is that input, [N, d_model]. At the start W_v (and W_r) are zero, as in RWKV-LM.

    Args:
        d_model, hidden: widths.
        receptance: y is multiplied by σ(W_r x_r), as in RWKV-4 to 6; RWKV-7 has none.
        vocab_size: not 0: the hidden channels are multiplied by :class:`DeepEmbed`, as in RWKV-7a.

    Source: RWKV, arXiv 2305.13048; RWKV-7, arXiv 2503.14456.
    """

    initialized = True

    def __init__(
        self,
        d_model: int,
        hidden: int,
        *,
        receptance: bool = True,
        vocab_size: int = 0,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        fall = 1 - layer_index / num_layers
        ramp = channel_ramp(d_model, fall if receptance else fall**4)
        self.shift_mix = no_weight_decay(ramp.repeat(2 if receptance else 1, 1))
        self.key = Linear(d_model, hidden, bias=False)
        self.value = Linear(hidden, d_model, bias=False)
        self.receptance = Linear(d_model, d_model, bias=False) if receptance else None
        self.deep_embed = DeepEmbed(vocab_size, d_model, hidden) if vocab_size else None
        if receptance:
            nn.init.normal_(self.key.weight, std=d_model**-0.5)
        else:
            bound = 0.5 * d_model**-0.5
            nn.init.uniform_(self.key.weight, -bound, bound)
        for zero in (self.value, self.receptance):
            if zero is not None:
                nn.init.zeros_(zero.weight)

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        shared: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, d_model] -> y of the same shape, and the state; ``mask`` and ``cu_seqlens`` as in a mixer's forward.

        ``shared`` holds the token ``ids`` and their ``embedding``, for DeepEmbed. Raises ValueError without them.
        """
        mixed, state = token_mix(x, self.shift_mix, state, mask=mask, cu_seqlens=cu_seqlens)
        hidden = self.key(mixed[0]).relu().square()
        if self.deep_embed is not None:
            if shared is None:
                raise fail("shared", "none", "the token ids and their embedding, for DeepEmbed")
            hidden = hidden * self.deep_embed(x, shared["ids"], shared["embedding"])
        y: Tensor = self.value(hidden)
        return y if self.receptance is None else self.receptance(mixed[1]).sigmoid() * y, state
