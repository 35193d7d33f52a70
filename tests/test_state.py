"""The state as a value, and a segment of the sequence as an affine map of it."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

import linattn
from linattn import engine, recurrence
from linattn import state as states
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
        shapes = mechanism.recurrence.state_shape(case.sizes.H, case.sizes.K, case.sizes.V)
        assert tuple(x.shape for x in leaves) == tuple((case.sizes.B, *shape) for shape in shapes)
        wanted = torch.float64 if dtype == torch.float64 else torch.float32
        assert {x.dtype for x in leaves} == {wanted}
        assert o.dtype == dtype


def test_a_scan_is_not_a_matrix() -> None:
    with pytest.raises(ValueError, match=r"^recurrence: "):
        engine.matrix(Recurrence(recurrence.Engine.SCAN), *(torch.zeros(1, 2, 1, 3) for _ in range(3)))
