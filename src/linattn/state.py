"""The state as a value: a tree of tensors whose first axis is the sequence.

A mechanism's state is a tensor or a named tuple of tensors, a model's state a tuple of its layers' states. No function
changes the state it is given.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

State = TypeVar("State")


def fork(state: State) -> State:
    """A copy that shares no memory."""
    return pytree.tree_map_only(Tensor, lambda t: t.clone(), state)


def detach(state: State) -> State:
    """The same values without their history, for truncated backpropagation through time."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach(), state)


def select(state: State, rows: Tensor) -> State:
    """The sequences ``rows`` (int64 [M], repeats allowed): reorder beams, drop finished rows, fan one prompt out."""
    if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype != torch.int64:
        came = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"rows: got {came}, wanted an int64 tensor [M]")
    return pytree.tree_map_only(Tensor, lambda t: t.index_select(0, rows.to(t.device)), state)


def nbytes(state: object) -> int:
    """Bytes that the state's tensors occupy."""
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(state) if isinstance(t, Tensor))


def combine(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Join two neighbouring segments, each given as (M, S_ext) with S_out = M S_in + S_ext.

    (M2, X2) after (M1, X1) is (M2 M1, M2 X1 + X2). M may be a matrix [.., K, K] or, where the write is additive, the
    decay alone [.., K]. Associative, so segments may be reduced in any grouping.
    """
    (M1, X1), (M2, X2) = first, second
    if M1.dim() != M2.dim():
        raise ValueError(f"second: got a map with {M2.dim()} axes, wanted {M1.dim()} as in first")
    if M2.dim() == X2.dim():
        return M2 @ M1, M2 @ X1 + X2
    return M2 * M1, M2.unsqueeze(-1) * X1 + X2
