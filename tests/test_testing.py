"""The laws as a third party uses them: a mechanism of its own passes, a wrong one does not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import linattn
from linattn import testing
from linattn.recurrence import VALUE, Argument, Decay, Domain, Recurrence

RECURRENCE = Recurrence(decay=Decay.TOKEN_CHANNEL)
HGRN2 = dataclasses.replace(
    linattn.get("gated_linear_attention"),
    name="hgrn2",
    aliases=(),
    recurrence=RECURRENCE,
    arguments=(Argument("q", "B T H K"), Argument("g", "B T H K", Domain.LOG_DECAY), VALUE),
)


def hgrn2(q: Tensor, g: Tensor, v: Tensor, **options: object) -> tuple[Tensor, object]:
    """The key is what the decay leaves: 1 - e^g."""
    return linattn.matrix(RECURRENCE, q, -torch.expm1(g), v, g=g, **options)  # type: ignore[arg-type]


def backwards(q: Tensor, g: Tensor, v: Tensor, **options: object) -> tuple[Tensor, object]:
    o, state = hgrn2(q, g, v, **options)
    return o + 1e-3 * o.mean(1, keepdim=True), state


def ignoring_its_state(q: Tensor, g: Tensor, v: Tensor, **options: object) -> tuple[Tensor, object]:
    return hgrn2(q, g, v, **(options | {"state": None}))


def test_a_right_mechanism_passes() -> None:
    testing.check(dataclasses.replace(HGRN2, function=hgrn2))


@pytest.mark.parametrize("function", [backwards, ignoring_its_state])
def test_a_wrong_mechanism_does_not(function: object) -> None:
    with pytest.raises(AssertionError):
        testing.check(dataclasses.replace(HGRN2, function=function))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("name", linattn.names())
def test_every_mechanism_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strong gates, whose gradients are an identity's there, have laws of their own in backends/triton."""
    monkeypatch.setattr(testing, "GATES", dict.fromkeys(("ordinary", "mixed"), testing.GATES["ordinary"]))
    testing.check(name, device="cuda")


@pytest.mark.parametrize("gates", testing.GATES)
def test_draws_keep_to_their_domains(gates: str) -> None:
    sizes = dataclasses.asdict(testing.Sizes(B=3, T=40, H=4, K=8))
    random = torch.Generator().manual_seed(1)

    def draw(domain: Domain, dims: str = "B T H K") -> Tensor:
        return testing.draw(Argument("x", dims, domain), sizes, gates, random)

    for dims in ("H", "H K", "B T H", "B T H K"):
        assert draw(Domain.LOG_DECAY, dims).le(0).all()
    rates = draw(Domain.NEGATIVE, "H")
    assert rates.lt(0).all()
    assert rates.isfinite().all()
    assert draw(Domain.NONNEGATIVE).ge(0).all()
    assert draw(Domain.POSITIVE).gt(0).all()
    beta = draw(Domain.BETA)
    assert beta.min() >= 0
    assert 1 < beta.max() <= 2
    torch.testing.assert_close(draw(Domain.UNIT).norm(dim=-1), torch.ones(3, 40, 4, dtype=torch.float64))


def test_mixed_gates_reach_every_kind() -> None:
    for dims in ("H", "H K", "B T H", "B T H K"):
        case = testing.Case(
            testing.Subject("gate", lambda: None, (Argument("g", dims, Domain.LOG_DECAY),), None), gates="mixed"
        )
        assert case.tensors()["g"].min() <= -1e4
    assert case.tensors()["g"].isneginf().any()
    assert case.tensors()["g"].amin(-1).isneginf().any()


def test_a_case_draws_the_same_every_time() -> None:
    for subject in (*testing.mechanisms(), *testing.recurrences()):
        case = testing.Case(subject)
        assert all(torch.equal(x, y) for x, y in zip(case.tensors().values(), case.tensors().values(), strict=True))


def test_an_error_says_what_was_measured() -> None:
    case = testing.Case(testing.Subject.of("retention"))
    wanted = testing.standard(case)
    testing.accurate(wanted.truth, wanted)
    worse = {name: wanted.truth[name] + 3 * wanted.allowed[name] for name in wanted.truth}
    worse |= {"final state": wanted.truth["final state"][:1], "gradient of q": wanted.truth["gradient of q"] / 0}
    with pytest.raises(AssertionError, match="here") as caught:
        testing.accurate(worse, wanted, "here")
    assert "output: 3 of the error allowed" in str(caught.value)
    assert "final state: not finite, or of another shape" in str(caught.value)
    assert "gradient of q: not finite" in str(caught.value)


def test_an_unlucky_draw_is_excused_and_a_fault_is_not() -> None:
    case = testing.Case(testing.Subject.of("retention"))

    def off_by(*errors: float) -> None:
        def measure(case: testing.Case) -> tuple[dict[str, Tensor], testing.Standard]:
            wanted = testing.standard(case, gradients=False)
            error = errors[case.seed] * wanted.allowed["output"]
            return {"output": wanted.truth["output"] + error}, wanted

        testing.judge(case, measure)

    off_by(0.9)
    off_by(1.3, 0.5, 0.5)
    for errors in ((1.3, 1.3, 0.9), (4.0, 0.0, 0.0), (float("nan"), 0.0, 0.0)):
        with pytest.raises(AssertionError, match=r"of the error allowed|not finite"):
            off_by(*errors)
