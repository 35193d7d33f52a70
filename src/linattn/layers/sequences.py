"""Where tokens sit: positions in batches that are padded, packed or continued."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_of_token(cu_seqlens: Tensor, length: int) -> Tensor:
    """[N+1] boundaries -> [T]: the packed sequence that each token belongs to; empty sequences own none."""
    return torch.searchsorted(cu_seqlens[1:], torch.arange(length, device=cu_seqlens.device), right=True)


def positions(
    x: Tensor, offset: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Each token's number in its sequence, and the length of every sequence after these tokens.

    ``x`` is [B, T, ...]; ``offset`` [N] int64 counts the tokens read before, None meaning none. Padding is not counted.
    Returns int64 [1 or B, T] and [N].
    """
    batch, length = x.shape[:2]
    count = torch.arange(length, device=x.device)
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff().long()
        offset = torch.zeros_like(lengths) if offset is None else offset
        return (count + (offset - cu_seqlens[:-1])[sequence_of_token(cu_seqlens, length)])[None], offset + lengths
    if mask is not None:
        offset = count.new_zeros(batch) if offset is None else offset
        return (mask.cumsum(1) - 1).clamp(min=0) + offset[:, None], offset + mask.sum(1)
    if offset is None:
        return count[None], count.new_full((batch,), length)
    return count + offset[:, None], offset + length


def left_justify(mask: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, T] -> the permutation that moves padding to the front of each row, and its inverse, int64 [B, T].

    ``order[b, i]`` is the token that comes i-th, ``place[b, t]`` is where token t goes. Both keep the order among
    real tokens and among padding.
    """
    padding = ~mask
    place = torch.where(mask, padding.sum(1, keepdim=True) + mask.cumsum(1), padding.cumsum(1)) - 1
    token = torch.arange(mask.shape[1], device=mask.device).expand_as(place)
    return torch.empty_like(place).scatter_(1, place, token), place


def take(x: Tensor, index: Tensor) -> Tensor:
    """x [B, T, ...], index [B, S] -> [B, S, ...]: tokens gathered row by row."""
    flat = index + torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
    return x.flatten(0, 1).index_select(0, flat.flatten()).view(*index.shape, *x.shape[2:])
