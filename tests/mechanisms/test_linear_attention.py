"""linear_attention against the formula Q(KᵀV) / Q(Kᵀ1), written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import NormalizedState, linear_attention
from linattn.testing import Case, Form, Sizes, Subject, evaluate, forms

FEATURES = {
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x) ** 2,
    "identity": lambda x: x,
}
FORMS = forms(Subject.of("linear_attention"), dtype=torch.float64)


def drawn(B: int = 2, T: int = 50, G: int = 2, H: int = 4, K: int = 12, V: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    tensors = Case(Subject.of("linear_attention"), Sizes(B, T, G, H, K, V), torch.float64).tensors()
    return tensors["q"], tensors["k"], tensors["v"]


def formula(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, normalize: bool) -> Tensor:
    """softmax(Q Kᵀ) V without the softmax: the whole matrix of weights, head by head."""
    heads = v.shape[2]
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    weights = torch.einsum("bthk,bshk->bhts", q, k)
    if causal:
        weights = weights.tril()
    o = torch.einsum("bhts,bshv->bthv", weights, v)
    return o / weights.sum(-1).transpose(1, 2).unsqueeze(-1) if normalize else o * q.shape[-1] ** -0.5


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
# normalised identity features have denominators of either sign: the formula itself is ill-conditioned
@pytest.mark.parametrize(
    ("features", "normalize"), [*((name, True) for name in list(FEATURES)[:3]), *((name, False) for name in FEATURES)]
)
def test_the_formula(form: Form, causal: bool, normalize: bool, features: str) -> None:
    q, k, v = drawn()
    if features != "identity":  # the first token alone must give a denominator above zero
        k[:, 0] = k[:, 0].abs() + 0.1
        q = q.abs() + 0.1
    phi = FEATURES[features]
    o, _ = linear_attention(
        q, k, v, feature_map=features, causal=causal, normalize=normalize, mode=form.mode, backend=form.backend
    )
    torch.testing.assert_close(o, formula(phi(q), phi(k), v, causal=causal, normalize=normalize))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_denominators_of_zero(form: Form, causal: bool, dtype: torch.dtype) -> None:
    """relu features that are all zero: nothing is attended to, the output and every gradient are zero, not NaN."""
    q, k, v = (x.to(dtype) for x in drawn())
    subject = Subject.of("linear_attention", feature_map="relu", causal=causal)
    case = Case(subject, dtype=dtype)

    def run(tensors: dict[str, Tensor], state: object) -> tuple[Tensor, object]:
        return subject.function(**tensors, state=state, mode=form.mode, backend=form.backend)

    for dead in ({"q": -q.abs(), "k": k, "v": v}, {"q": q, "k": -k.abs(), "v": v}):
        results = evaluate(case, run, dead, None)
        assert all(x.isfinite().all() for x in results.values())
        assert not results["output"].count_nonzero()


def test_outputs_stay_within_the_values() -> None:
    """With features ≥ 0 every output is a weighted mean of the values seen so far."""
    q, k, v = drawn()
    for features in ("elu", "relu", "squared_relu"):
        o, _ = linear_attention(8 * q, 8 * k, v, feature_map=features)
        assert o.abs().max() <= v.abs().max() * (1 + 1e-12)


@pytest.mark.parametrize("normalize", [True, False])
def test_without_mask_a_state_and_packing_count(normalize: bool) -> None:
    q, k, v = drawn(B=1)
    whole, final = linear_attention(q, k, v, causal=False, normalize=normalize)
    _, first = linear_attention(q[:, :20], k[:, :20], v[:, :20], causal=False, normalize=normalize)
    rest, last = linear_attention(q[:, 20:], k[:, 20:], v[:, 20:], causal=False, normalize=normalize, state=first)
    torch.testing.assert_close(rest, whole[:, 20:])  # the rest has seen everything
    torch.testing.assert_close(last, final)
    cu_seqlens = torch.tensor([0, 20, 20, 50])
    packed, states = linear_attention(q, k, v, causal=False, normalize=normalize, cu_seqlens=cu_seqlens)
    for n, part in ((0, slice(0, 20)), (2, slice(20, 50))):
        alone, state = linear_attention(q[:, part], k[:, part], v[:, part], causal=False, normalize=normalize)
        torch.testing.assert_close(packed[:, part], alone)
        for packed_leaf, leaf in zip(_leaves(states), _leaves(state), strict=True):
            torch.testing.assert_close(packed_leaf[n], leaf[0])


def _leaves(state: Tensor | NormalizedState) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else tuple(state)


def test_autocast_leaves_the_read_without_a_mask_in_float32() -> None:
    q, k, v = (x.float() for x in drawn())
    plain, _ = linear_attention(q, k, v, causal=False)
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = linear_attention(q, k, v, causal=False)
    assert torch.equal(plain, cast)


def test_feature_maps_of_ones_own_may_change_the_number_of_features() -> None:
    q, k, v = drawn()

    def both_signs(x: Tensor) -> Tensor:
        return torch.cat([F.relu(x), F.relu(-x)], -1)

    o, state = linear_attention(q, k, v, feature_map=both_signs, normalize=False)
    torch.testing.assert_close(o, formula(both_signs(q), both_signs(k), v, causal=True, normalize=False))
    assert isinstance(state, Tensor)
    assert state.shape[-2] == 2 * q.shape[-1]


def test_scale_would_cancel() -> None:
    q, k, v = drawn()
    with pytest.raises(ValueError, match=r"^scale: "):
        linear_attention(q, k, v, scale=0.5)
    with pytest.raises(ValueError, match=r"^feature_map: .*'softplus'"):
        linear_attention(q, k, v, feature_map="softplus")
