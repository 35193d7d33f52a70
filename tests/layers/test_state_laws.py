"""The laws that every layer's state keeps as a value: saved, reordered, joined, gone back to, known in size before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layers.test_layer_laws import D, assert_close, every_layer, make, row, tokens
from torch import Tensor
from torch.utils import _pytree as pytree

from linattn import registry, state
from linattn.models import state_size


def same(got: Any, wanted: Any) -> bool:
    """The same types and dtypes, and the same bits."""
    got_leaves, got_tree = pytree.tree_flatten(got)
    leaves, tree = pytree.tree_flatten(wanted)
    return got_tree == tree and all(
        a is b is None or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in zip(got_leaves, leaves, strict=True)
    )


@every_layer
@torch.no_grad()
def test_saved_equals_never_stopped(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    layer, x = make(name, options).bfloat16(), tokens(2, 9).bfloat16()
    _, before = layer(x[:, :5])
    state.save(before, tmp_path / "state.safetensors")
    loaded = state.load(tmp_path / "state.safetensors")
    assert same(loaded, before)
    on, end = layer(x[:, 5:], before)
    again, end_again = layer(x[:, 5:], loaded)
    assert torch.equal(again, on)
    assert same(end_again, end)


@every_layer
def test_beams_reordered_are_rows_reordered(name: str, options: dict[str, Any]) -> None:
    layer, x, rows = make(name, options), tokens(3, 5), torch.tensor([2, 0, 0, 1])
    _, before = layer(x)
    nexts = tokens(4, 3)
    y, end = layer(nexts, state.select(before, rows))
    for n, source in enumerate(rows.tolist()):
        y_alone, alone = layer(nexts[n : n + 1], layer(x[source : source + 1])[1])
        assert_close(y[n : n + 1], y_alone)
        assert_close(row(end, n), alone)


@every_layer
def test_going_back_equals_having_run_only_so_far(name: str, options: dict[str, Any]) -> None:
    layer, x, others = make(name, options), tokens(2, 7), tokens(2, 3)
    history: state.History[Any] = state.History()
    now = None
    for t in range(7):
        _, now = layer(x[:, t : t + 1], now)
        history.keep(t + 1, now)
    for position in (6, 4, 1):
        y, end = layer(others, history.back(position))
        whole, whole_end = layer(torch.cat([x[:, :position], others], 1))
        assert_close(y, whole[:, position:])
        assert_close(end, whole_end)
    assert list(history) == [1]


@every_layer
def test_prompts_read_alone_go_on_as_one_batch(name: str, options: dict[str, Any]) -> None:
    layer, x = make(name, options), tokens(3, 3)
    alone = [layer(tokens(1, length))[1] for length in (4, 1, 6)]
    batch = state.concatenate(alone)
    y, end = layer(x, batch)
    y, end = torch.cat([y, (more := layer(x, end))[0]], 1), more[1]
    for n, part in enumerate(state.split(batch)):
        wanted, _ = layer(torch.cat([x[n : n + 1]] * 2, 1), alone[n])
        assert_close(y[n : n + 1], wanted)
        assert_close(layer(x[n : n + 1], part)[0], wanted[:, :3])
    assert len(state.split(end)) == 3


@every_layer
@torch.no_grad()
def test_the_size_is_known_before(name: str, options: dict[str, Any]) -> None:
    layer = make(name, options).bfloat16()
    _, end = layer(tokens(2, 9).bfloat16())
    assert state_size(layer, 2, tokens=9, dtype=torch.bfloat16) == state.nbytes(end)


@pytest.mark.parametrize("name", registry.names(composite=True))
@torch.no_grad()
def test_one_token_is_enough_to_know_it(name: str) -> None:
    _, end = registry.get(name).layer(D)(torch.randn(1, 1, D))
    with torch.device("meta"):
        layer = registry.get(name).layer(D)
    assert state_size(layer) == state.nbytes(end)


@pytest.mark.parametrize("name", registry.names(composite=True))
def test_the_size_grows_for_softmax_attention_alone(name: str) -> None:
    with torch.device("meta"):
        layer = registry.get(name).layer(64)
    some, more = (state_size(layer, tokens=tokens) for tokens in (1100, 1101))  # beyond any window
    assert (more > some) == registry.get(name).grows


@pytest.mark.parametrize("name", registry.names(composite=True))
def test_the_state_of_another_layer_is_refused(name: str) -> None:
    """Of another width and of another dtype: told, not computed with."""
    layer, x = make(name, {}), tokens(1, 2)
    _, wider = make(name, {}, 2 * D)(tokens(1, 2, 2 * D))
    with pytest.raises(ValueError, match=r"state|cache"):
        layer(x, wider)
    _, own = layer(x)
    if any(isinstance(t, Tensor) and t.dtype == torch.float64 and t.dim() == 4 for t in pytree.tree_leaves(own)):
        with pytest.raises(ValueError, match=r"state|cache"):
            layer(x, state.to(own, dtype=torch.float16))
