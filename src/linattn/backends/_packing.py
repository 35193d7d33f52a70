"""Packed sequences as a few padded batches, for kernels that know only batches.

Sequences of similar length share a batch, so that padding adds at most a quarter to the work. A padded token has
k = v = g = beta = a = b = 0: it neither writes nor decays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bucket:
    """Sequences ``rows``; ``index`` [R, L] points into the packed row, ``real`` [R, L] is False at padding."""

    rows: Tensor
    index: Tensor
    real: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """[1, T, ...] -> [R, L, ...], zero at padding (selected, not multiplied: gates may be -inf)."""
        y = x[0].index_select(0, self.index.flatten()).unflatten(0, tuple(self.index.shape))
        return torch.where(self.real.reshape(*self.real.shape, *[1] * (x.dim() - 2)), y, y.new_zeros(()))

    def scatter(self, target: Tensor, y: Tensor) -> None:
        """[R, L, ...] -> its places in target [1, T, ...]."""
        target[0, self.index[self.real]] = y[self.real].to(target.dtype)


def _rounded(length: int) -> int:
    """Up to the next integer of three significant bits: at most a quarter longer."""
    drop = max(length.bit_length() - 3, 0)
    return -(-length >> drop) << drop


def buckets(ends: list[int], device: torch.device) -> Iterator[Bucket]:
    """The non-empty sequences between the boundaries ``ends``, grouped by rounded length."""
    groups: dict[int, list[int]] = {}
    for n, (start, end) in enumerate(pairwise(ends)):
        if end > start:
            groups.setdefault(_rounded(end - start), []).append(n)
    for rows in groups.values():
        starts = torch.tensor([ends[n] for n in rows])
        lengths = torch.tensor([ends[n + 1] for n in rows]) - starts
        offset = torch.arange(int(lengths.max()))
        real = offset < lengths[:, None]
        index = torch.where(real, starts[:, None] + offset, starts[:, None])
        yield Bucket(torch.tensor(rows, device=device), index.to(device), real.to(device))
