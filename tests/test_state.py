"""The state as a value, and a segment of the sequence as an affine map of it."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

import linattn
from linattn import engine, recurrence
from linattn import state as states
from linattn.models import LanguageModel, ModelConfig, state_size
from linattn.recurrence import Decay, Recurrence, Write
from linattn.testing import REFERENCE, Case, Sizes, Standard, Subject, accurate, forms, law_run, recurrences, standard

SIZES = Sizes(B=2, T=60, G=1, H=2, K=16, V=5)
POINTS = [Recurrence(decay=decay, write=write) for decay, write in itertools.product(Decay, Write)]


def subject_of(point: Recurrence) -> Subject:
    name = "+".join([point.decay.name, point.write.name, "after"]).lower()
    return next(subject for subject in recurrences() if subject.name == name)


@pytest.mark.parametrize("backend", sorted({form.backend for form in forms(Subject.of("retention"))}))
@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point.decay.name}-{point.write.name}")
@pytest.mark.parametrize("cuts", [(), (25,), (1, 25, 26)], ids=len)
def test_segments_combine_to_the_whole(point: Recurrence, backend: str, cuts: tuple[int, ...]) -> None:
    """S_out = M S_in + S_ext for every piece, and joined pieces do what the whole does."""
    case = Case(subject_of(point), SIZES)

    def run(tensors: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        o, _ = case.subject.function(**tensors, state=state, backend=backend)
        maps = []
        for start, end in itertools.pairwise((0, *cuts, SIZES.T)):
            part = case.cut(tensors, "T", start, end)
            maps.append(linattn.summary(point, **{n: x for n, x in part.items() if n != "q"}, backend=backend))
        M, S_ext = functools.reduce(states.combine, maps)
        return o, M @ state + S_ext

    law_run(case, lambda _: run, backend, cuts, gradients=False)


def test_combine_is_associative_and_knows_diagonal_maps() -> None:
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    one, two, three = ((draw(2, 4, 4), draw(2, 4, 3)) for _ in range(3))
    left = states.combine(states.combine(one, two), three)
    right = states.combine(one, states.combine(two, three))
    torch.testing.assert_close(left, right)
    diagonal = [(draw(2, 4), draw(2, 4, 3)) for _ in range(2)]
    M, X = states.combine(*diagonal)
    full_M, full_X = states.combine(*((torch.diag_embed(m), x) for m, x in diagonal))
    torch.testing.assert_close(torch.diag_embed(M), full_M)
    torch.testing.assert_close(X, full_X)
    with pytest.raises(ValueError, match=r"^second: "):
        states.combine(one, diagonal[0])


@pytest.mark.parametrize("name", linattn.names())
def test_a_state_forks_selects_and_is_counted(name: str) -> None:
    case = Case(Subject.of(name), Sizes(B=3))
    state = case.state()
    leaves = [state] if isinstance(state, Tensor) else [x for x in state if x is not None]
    copy = states.fork(state)
    assert type(copy) is type(state)
    assert states.nbytes(copy) == states.nbytes(state) == sum(x.nbytes for x in leaves)
    for x in [copy] if isinstance(copy, Tensor) else [x for x in copy if x is not None]:
        x.zero_()
    assert all(x.count_nonzero() for x in leaves)
    rows = torch.tensor([2, 0, 0, 1])
    chosen = states.select(state, rows)
    first = chosen if isinstance(chosen, Tensor) else chosen[0]
    assert torch.equal(first, leaves[0][rows])
    # and rows chosen go on as they would have
    tensors = case.tensors()
    picked = {
        n: x[rows] if a.dims.startswith("B") else x
        for a, (n, x) in zip(case.subject.arguments, tensors.items(), strict=True)
    }
    o, _ = case.subject.function(**tensors, state=state)
    o_rows, _ = case.subject.function(**picked, state=chosen)
    wanted = standard(case, gradients=False)
    accurate({"output": o_rows}, Standard({"output": wanted.truth["output"][rows]}, wanted.allowed), name)
    accurate({"output": o}, wanted, name)


def test_select_wants_row_numbers() -> None:
    for bad in (torch.tensor([0.0]), torch.tensor([[0]]), [0], torch.tensor([True])):
        with pytest.raises(ValueError, match=r"^rows: "):
            states.select(torch.zeros(2, 3), bad)  # type: ignore[arg-type]


def test_detach_cuts_the_history() -> None:
    case = Case(Subject.of("linear_attention"))
    tensors = {name: x.requires_grad_() for name, x in case.tensors().items()}
    _, state = case.subject.function(**tensors)
    assert state.S.requires_grad
    assert not states.detach(state).S.requires_grad
    assert type(states.detach(state)) is linattn.NormalizedState


@pytest.mark.parametrize("name", [name for name in linattn.names() if linattn.get(name).recurrence])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_shapes_and_dtypes_that_are_promised(name: str, dtype: torch.dtype) -> None:
    mechanism = linattn.get(name)
    assert mechanism.recurrence is not None
    case = Case(Subject.of(name), dtype=dtype)
    for form in (REFERENCE, ("auto", "auto")):
        o, state = case.subject.function(**case.tensors(), backend=form[0], mode=form[1])
        leaves = (state,) if isinstance(state, Tensor) else tuple(state)
        if isinstance(state, Tensor | linattn.NormalizedState):  # the engine's own, not a mechanism's
            axes = {axis for argument in mechanism.arguments for axis in argument.dims.split()}
            heads = case.sizes.H if axes & {"H", "D"} else 1
            shapes = mechanism.recurrence.state_shape(heads, case.sizes.K, case.sizes.V)
            assert tuple(x.shape for x in leaves) == tuple((case.sizes.B, *shape) for shape in shapes)
        assert {len(x) for x in leaves} == {case.sizes.B}
        wanted = torch.float64 if dtype == torch.float64 else torch.float32
        assert {x.dtype for x in leaves if x.is_floating_point()} == {wanted}
        assert o.dtype == dtype


def test_a_scan_is_not_a_matrix() -> None:
    with pytest.raises(ValueError, match=r"^recurrence: "):
        engine.matrix(Recurrence(recurrence.Engine.SCAN), *(torch.zeros(1, 2, 1, 3) for _ in range(3)))


class Pair(NamedTuple):
    """A state of one's own."""

    one: Tensor
    other: Tensor | None


HYBRID = ModelConfig(d_model=32, num_layers=4, pattern="gla,softmax,log_linear_mamba2,linear")


def hybrid() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(HYBRID)


@torch.no_grad()
def test_a_model_goes_on_from_a_file(tmp_path: Path) -> None:
    model, ids = hybrid(), torch.randint(256, (2, 12))
    _, now = model(ids[:, :7])
    states.save(now, tmp_path / "prompt.safetensors")
    loaded = states.load(tmp_path / "prompt.safetensors")
    assert pytree.tree_structure(loaded) == pytree.tree_structure(now)
    assert torch.equal(model(ids[:, 7:], loaded)[0], model(ids[:, 7:], now)[0])
    assert [file.name for file in tmp_path.iterdir()] == ["prompt.safetensors"]


def test_a_file_holds_what_was_given(tmp_path: Path) -> None:
    """Views, repeats, integers, nothing, numbers of every kind; and loading leaves no tie to the file."""
    file, x = tmp_path / "state.safetensors", torch.arange(12.0).view(3, 4)
    tree = (Pair(x.T, None), (), None, (x, x), x.bfloat16()[1:], torch.tensor([2**40]), torch.zeros(2, 0), x > 5)
    states.save(tree, file)
    loaded = states.load(str(file))
    states.save(Pair(-x, x), file)
    assert type(loaded) is tuple
    assert type(loaded[0]) is Pair
    leaves, structure = pytree.tree_flatten(loaded)
    wanted, as_given = pytree.tree_flatten(tree)
    assert structure == as_given
    for a, b in zip(leaves, wanted, strict=True):
        assert a is b is None or (a.dtype == b.dtype and torch.equal(a, b))


def test_a_file_that_is_no_state_is_named(tmp_path: Path) -> None:
    file, x = tmp_path / "file.safetensors", torch.zeros(2, 3)
    states.save(Pair(x, None), file)
    whole = file.read_bytes()
    for length in (0, 4, 20, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"file.safetensors: cannot be read"):
            states.load(file)
    file.write_text("words")
    with pytest.raises(ValueError, match=r"file.safetensors: cannot be read"):
        states.load(file)
    with pytest.raises(ValueError, match=r"nowhere: cannot be read"):
        states.load(tmp_path / "nowhere")
    save_file({"state": x}, file)
    with pytest.raises(ValueError, match=r"file.safetensors: got format None"):
        states.load(file)
    here = f"{Pair.__module__}:Pair"
    for tree, words in [
        ({"type": "os:system", "fields": {}}, "type: got os:system"),
        ({"type": "nowhere:Pair", "fields": {"one": "state", "other": None}}, "type: got nowhere:Pair"),
        ({"type": here, "fields": {"one": "state"}}, "type: got .* of one, wanted"),
        ({"type": here, "fields": {"one": "state", "other": "lost"}}, "damaged"),
        ({"fields": {}}, "damaged"),
        (3, "damaged"),
    ]:
        save_file({"state": x}, file, {"format": states.FORMAT, "tree": json.dumps(tree)})
        with pytest.raises(ValueError, match=f"file.safetensors: .*{words}"):
            states.load(file)


def test_a_state_that_cannot_be_saved_is_told(tmp_path: Path) -> None:
    """And what was there before stays."""
    file, x = tmp_path / "state.safetensors", torch.zeros(2, 3)
    states.save(x, file)
    with pytest.raises(ValueError, match=r"^state\.0\.other: got float"):
        states.save((Pair(x, 1.0),), file)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nowhere.*cannot write the state"):
        states.save(x, tmp_path / "nowhere" / "state.safetensors")
    assert torch.equal(states.load(file), x)
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]


def test_history_goes_back() -> None:
    history: states.History[Tensor] = states.History(limit=3)
    x = torch.zeros(2, 3)
    for position in (1, 2, 5, 9):
        history.keep(position, x if position < 9 else x + position)
    assert list(history) == [2, 5, 9]
    assert len(history) == 3
    assert history.nbytes == 2 * x.nbytes  # one tensor was kept twice
    assert history.back(9).unique().tolist() == [9]
    assert history.back(5) is x
    assert list(history) == [2, 5]
    for wrong in (5, 3):
        with pytest.raises(ValueError, match=r"^position: got .*, wanted more than 5"):
            history.keep(wrong, x)
    for gone in (9, 1):
        with pytest.raises(ValueError, match=r"^position: got .*, wanted one that was kept: 2, 5"):
            history.back(gone)
    with pytest.raises(ValueError, match=r"^limit: "):
        states.History(0)


def test_concatenate_wants_states_of_one_layer() -> None:
    x = torch.zeros(1, 3)
    assert states.concatenate([Pair(x, None), Pair(x, None)]).one.shape == (2, 3)
    cases: list[tuple[list[Any], str]] = [
        ([], "states: got none"),
        ([Pair(x, None), x], "states: got Pair and Tensor"),
        ([Pair(x, None), Pair(x, x)], "states.other: got NoneType and Tensor"),
        ([Pair(x, None), Pair(x[:, :2], None)], "states.one: got sizes"),
        ([(x,), (x, x)], "states: got tuple"),
        ([1.0, 2.0], "states: got float"),
    ]
    for bad, words in cases:
        with pytest.raises(ValueError, match=f"^{words}"):
            states.concatenate(bad)


@torch.no_grad()
def test_a_models_state_is_split_joined_and_moved() -> None:
    _, now = hybrid()(torch.randint(256, (2, 9)))
    back = states.concatenate(states.split(now))
    for a, b in zip(pytree.tree_leaves(back), pytree.tree_leaves(now), strict=True):
        assert a is b is None or torch.equal(a, b)
    wide = states.to(now, "cpu", torch.float64)
    assert {a.dtype for a in pytree.tree_leaves(wide) if isinstance(a, Tensor)} == {torch.float64, torch.int64}
    assert states.nbytes(now) == state_size(HYBRID, 2, tokens=9) == state_size(hybrid(), 2, tokens=9)


def test_the_size_of_a_huge_model_costs_no_memory() -> None:
    huge = ModelConfig(d_model=16384, num_layers=2, pattern="gdn", vocab_size=1_000_000)  # 64 GB of weights
    assert state_size(huge, 8, tokens=10**6, dtype=torch.bfloat16) == state_size(huge, 8, dtype=torch.bfloat16)
    for bad in ({"batch": 0}, {"tokens": 0}):
        with pytest.raises(ValueError, match=r"^(batch|tokens): got 0"):
            state_size(HYBRID, **bad)
