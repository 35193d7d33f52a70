"""The state as a value: a tree of tensors whose first axis is the sequence.

A mechanism's state is a tensor or a named tuple of tensors, a model's state a tuple of its layers' states; where there
is nothing to keep stands None. No function changes the state it is given, so keeping one keeps a moment:

- :func:`select` reorders beams, drops finished rows, fans one prompt out; :func:`concatenate` makes a batch of prompts
  that were read one by one, and :func:`split` takes it apart.
- :func:`save` and :func:`load` stop and go on elsewhere; a prompt read once is a file.
- :class:`History` goes back: to where a draft was right (speculative decoding), to a prefix that many prompts share.

What a state weighs before there is one: :func:`linattn.models.state_size`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor
from torch.utils import _pytree as pytree

from linattn import _checks

State = TypeVar("State")

FORMAT = "linattn.state/1"


def fork(state: State) -> State:
    """A copy that shares no memory."""
    return pytree.tree_map_only(Tensor, lambda t: t.clone(), state)


def detach(state: State) -> State:
    """The same values without their history, for truncated backpropagation through time."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach(), state)


def to(state: State, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> State:
    """The state on another device, its floating tensors in another dtype.

    A layer takes back only the dtypes it gave: recurrent states are float32, or float64 in a layer of float64.
    """
    return pytree.tree_map_only(
        Tensor, lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None), state
    )


def select(state: State, rows: Tensor) -> State:
    """The sequences ``rows`` (int64 [M], repeats allowed): reorder beams, drop finished rows, fan one prompt out."""
    if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype != torch.int64:
        came = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"rows: got {came}, wanted an int64 tensor [M]")
    return pytree.tree_map_only(Tensor, lambda t: t.index_select(0, rows.to(t.device)), state)


def concatenate(states: Sequence[State]) -> State:
    """The sequences of several states as those of one.

    A state type whose tensors grow with the sequence says itself how to join them, by a class method ``concatenate``.
    Raises ValueError for states of different layers.
    """
    if not states:
        raise _checks.fail("states", "none", "at least one")
    joined: State = _join(list(states), "states")
    return joined


def _join(parts: list[Any], place: str) -> Any:
    first = parts[0]
    if first is None and all(part is None for part in parts):
        return None
    if not all(type(part) is type(first) for part in parts):
        raise _checks.fail(place, " and ".join(sorted({type(part).__name__ for part in parts})), "states of one layer")
    if isinstance(first, Tensor):
        shapes = {tuple(part.shape[1:]) for part in parts}
        if len(shapes) > 1:
            raise _checks.fail(place, f"sizes {' and '.join(map(str, sorted(shapes)))}", "states of one layer")
        return torch.cat(parts)
    if not isinstance(first, tuple) or len({len(part) for part in parts}) > 1:
        raise _checks.fail(place, type(first).__name__, "states of one layer or model")
    if hasattr(first, "concatenate"):
        return first.concatenate(parts)
    fields = getattr(first, "_fields", range(len(first)))
    children = [
        _join(list(column), f"{place}.{name}") for name, column in zip(fields, zip(*parts, strict=True), strict=True)
    ]
    return type(first)(*children) if hasattr(first, "_fields") else tuple(children)


def split(state: State) -> list[State]:
    """The inverse of :func:`concatenate`: a state of one sequence for each."""
    count = next((len(leaf) for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)), 0)
    return [select(state, torch.tensor([row])) for row in range(count)]


def nbytes(state: object) -> int:
    """Bytes that the state's tensors occupy."""
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(state) if isinstance(t, Tensor))


class History(Generic[State]):
    """States by the number of tokens that led to them, the last ``limit`` of them (None: all), to go back to.

    Nothing is copied, for states are values. Speculative decoding keeps one after each token of the draft and goes back
    to the last that was right; a prefix cache keeps one after each part of a prompt that may come again.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise _checks.fail("limit", limit, "at least 1 state, or None")
        self.limit = limit
        self._states: dict[int, State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[int]:
        """The positions kept, in order."""
        return iter(self._states)

    @property
    def nbytes(self) -> int:
        """Bytes of all states kept, those that they share counted once."""
        memory = {
            t.data_ptr(): t for s in self._states.values() for t in pytree.tree_leaves(s) if isinstance(t, Tensor)
        }
        return nbytes(tuple(memory.values()))

    def keep(self, position: int, state: State) -> None:
        """Remember the ``state`` after ``position`` tokens. Raises ValueError for an earlier one than the last."""
        last = next(reversed(self._states), -1)
        if position <= last:
            raise _checks.fail("position", position, f"more than {last}, the last one kept")
        self._states[position] = state
        if self.limit is not None and len(self._states) > self.limit:
            del self._states[next(iter(self._states))]

    def back(self, position: int) -> State:
        """The state after ``position`` tokens; what came later is forgotten. Raises ValueError if it was not kept."""
        if position not in self._states:
            raise _checks.fail("position", position, f"one that was kept: {', '.join(map(str, self)) or 'none was'}")
        for later in [kept for kept in self._states if kept > position]:
            del self._states[later]
        return self._states[position]


def save(state: object, path: str | os.PathLike[str]) -> None:
    """Write a state as safetensors, its dtypes kept; named tuples, tuples and None are described in the metadata.

    The file is written beside and renamed: at ``path`` there is the old one or the new one, whole. Raises ValueError
    for anything but tensors in named tuples, tuples and None, and when the disk refuses.
    """
    path, tensors = Path(path), {}

    def describe(node: Any, place: str) -> Any:
        if node is None:
            return None
        if isinstance(node, Tensor):
            tensors[place] = node.detach().clone(memory_format=torch.contiguous_format)
            return place
        if isinstance(node, tuple):
            fields = getattr(node, "_fields", range(len(node)))
            parts = {str(n): describe(part, f"{place}.{n}") for n, part in zip(fields, node, strict=True)}
            return {"type": f"{type(node).__module__}:{type(node).__qualname__}", "fields": parts}
        raise _checks.fail(place, type(node).__name__, "a tensor, a named tuple, a tuple or None")

    tree = describe(state, "state")
    beside = path.with_name(f".{path.name}.new")
    try:
        with beside.open("wb") as file:
            file.write(serialise(tensors, {"format": FORMAT, "tree": json.dumps(tree)}))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ValueError(f"{path}: cannot write the state: {error.strerror or error}") from error


def load(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Any:
    """Read what :func:`save` wrote, as the same types. Nothing in a file is run.

    Raises ValueError naming the file if it is missing, truncated or holds no state, or a state of a type that no
    loaded module knows. Whether a state fits a layer shows when the layer is given it.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path}: got format {metadata.get('format')!r}, wanted {FORMAT!r}, as linattn.state.save writes"
        )

    def build(node: Any) -> Any:
        if node is None:
            return None
        if isinstance(node, str):
            return tensors[node].to(device, copy=True)  # not a view of the file, which may change
        kind, fields = node["type"], node["fields"]
        parts = {name: build(part) for name, part in fields.items()}
        return tuple(parts.values()) if kind == "builtins:tuple" else _state_type(kind, tuple(parts))(**parts)

    try:
        return build(json.loads(metadata["tree"]))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: the description of its state is damaged: {error!r}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _state_type(name: str, fields: tuple[str, ...]) -> Any:
    """The named tuple of that name in a module that is loaded already, if it has these fields."""
    module, _, kind = name.partition(":")
    found = getattr(sys.modules.get(module), kind, None)
    if not (isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == fields):
        raise _checks.fail("type", f"{name} of {', '.join(fields)}", "the named tuple of a module that is loaded")
    return found


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
