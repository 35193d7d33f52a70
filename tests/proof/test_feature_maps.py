"""Linear attention's feature maps against the papers' attention matrices, written out in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from proof.judge import judge
from torch import Tensor

from linattn import linear_attention
from linattn.layers import FeatureMap
from linattn.layers.feature_maps import NAMES, Favor, create

B, T, H, K, V = 2, 13, 3, 6, 5
Weights = Callable[[FeatureMap, Tensor, Tensor, int, int], Tensor]
OPTIONS = {
    "favor": {"features": 20, "seed": 3},
    "cosformer": {"max_length": 20},
    "dpfp": {"nu": 2},
    "t2r": {"features": 7},
}


def elu(phi: FeatureMap, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    """arXiv 2006.16236, eq. 7."""
    a, b = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    return (a * b).sum(-1)


def relu(phi: FeatureMap, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    return (q.clamp(min=0) * k.clamp(min=0)).sum(-1)


def squared_relu(phi: FeatureMap, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    return (q.clamp(min=0) ** 2 * k.clamp(min=0) ** 2).sum(-1)


def identity(phi: FeatureMap, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    return (q * k).sum(-1)


def favor(phi: FeatureMap, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    """arXiv 2009.14794, lemma 1: the mean over ω of e^{ω·q − ‖q‖²/2} e^{ω·k − ‖k‖²/2}, q and k over d^{1/4}."""
    a, b = q / K**0.25, k / K**0.25
    exponents = (a + b) @ phi.omega.double().T - ((a * a + b * b).sum(-1) / 2)[..., None]
    return torch.exp(exponents).sum(-1) / len(phi.omega)


def cosformer(phi: FeatureMap, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    """arXiv 2202.08791, eq. 9."""
    return relu(phi, q, k, i, j) * math.cos(math.pi / 2 * (i - j) / 20)


def taylor(phi: FeatureMap, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    """arXiv 2402.18668, section 3.1."""
    y = (q * k).sum(-1) / math.sqrt(K)
    return 1 + y + y**2 / 2


def dpfp(phi: FeatureMap, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    """arXiv 2102.11174, eq. 37: a feature for each of 2d places and nu neighbours, in a circle."""
    a, b = ([*x.clamp(min=0).unbind(-1), *(-x).clamp(min=0).unbind(-1)] for x in (q, k))
    pairs = [(p, (p + step) % (2 * K)) for step in (1, 2) for p in range(2 * K)]
    return torch.stack([a[p] * a[r] * b[p] * b[r] for p, r in pairs]).sum(0)


def rebased(phi: FeatureMap, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    """arXiv 2402.10644: the square of the product of what an affine map makes of normalised q and k."""
    made = []
    for x, side in ((q, 0), (k, 1)):
        centred = x - x.mean(-1, keepdim=True)
        unit = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)
        made.append(unit * phi.gamma[side].double() + phi.beta[side].double())
    return (made[0] * made[1]).sum(-1) ** 2 / K


def t2r(phi: FeatureMap, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    """arXiv 2103.13076, eq. 4."""
    made = [
        torch.stack([x[:, h] @ phi.weight[side, h].double() + phi.bias[side, h].double() for h in range(H)], 1)
        for x, side in ((q, 0), (k, 1))
    ]
    return relu(phi, *made, i, j)


def hedgehog(phi: FeatureMap, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    """arXiv 2402.04347, eq. 6, with each half normalised over its features."""
    made = []
    for x, side in ((q, 0), (k, 1)):
        y = torch.stack([x[:, h] @ phi.weight[side, h].double() for h in range(H)], 1)
        halves = [z.exp() / z.exp().sum(-1, keepdim=True) for z in (y, -y)]
        made.append(torch.cat(halves, -1))
    return (made[0] * made[1]).sum(-1)


def product(phi: FeatureMap, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    """Two affine maps of each, multiplied channel by channel."""
    made = []
    for x, side in ((q, 0), (k, 1)):
        y = torch.stack([x[:, h] @ phi.weight[side, h].double() + phi.bias[side, h].double() for h in range(H)], 1)
        made.append(y[..., :K] * y[..., K:])
    return (made[0] * made[1]).sum(-1)


ORACLES: dict[str, Weights] = {
    f.__name__: f
    for f in (elu, relu, squared_relu, identity, favor, cosformer, taylor, dpfp, rebased, t2r, product, hedgehog)
}


def drawn(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, H, V)}
    x = {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}
    x["k"][:, 0] = x["q"][:, 0]  # no row of weights near zero, whose ratios would be ill-conditioned
    return {name: y.requires_grad_() for name, y in x.items()}


def made(name: str) -> FeatureMap:
    torch.manual_seed(1)
    phi = create(name, H, K, **OPTIONS.get(name, {}))
    if isinstance(phi, FeatureMap):  # away from the start, where γ = 1, β = 0, W = 1
        for parameter in phi.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape)
    return phi


def attention(
    oracle: Weights, phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, *, normalize: bool, causal: bool
) -> Tensor:
    q, k, v = (x.double() for x in (q, k, v))
    rows = []
    for i in range(T):
        seen = range(i + 1) if causal else range(T)
        weights = torch.stack([oracle(phi, q[:, i], k[:, j], i, j) for j in seen], 1)  # [B, S, H]
        o = (weights[..., None] * v[:, : len(seen)]).sum(1)
        rows.append(o / weights.sum(1)[..., None].clamp(min=1e-6) if normalize else o)
    return torch.stack(rows, 1)


def gradients(o: Tensor, x: dict[str, Tensor], phi: FeatureMap) -> dict[str, Tensor]:
    parameters = dict(phi.named_parameters()) if isinstance(phi, FeatureMap) else {}
    wanted = x | parameters
    random = torch.randn(o.shape, generator=torch.Generator().manual_seed(5)).to(o.dtype)
    return dict(zip(wanted, torch.autograd.grad(o, list(wanted.values()), random), strict=True))


def test_every_map_has_its_formula_here() -> None:
    assert set(ORACLES) == set(NAMES)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("name", "normalize"), [(name, n) for name in NAMES for n in (True, False)])
def test_the_matrix_of_the_paper(name: str, normalize: bool, causal: bool) -> None:
    if name in ("identity", "product") and normalize:
        return  # denominators of either sign: no weighted mean, and ill-conditioned
    x, phi = drawn(), made(name)
    wanted = attention(ORACLES[name], phi, **x, normalize=normalize, causal=causal)
    options = {"feature_map": phi, "normalize": normalize, "causal": causal, "scale": None if normalize else 1.0}
    o, _ = linear_attention(**x, **options)
    what, oracle = f"linear attention, {name}", "formula in float64"
    judge(what, oracle, "logits", o, wanted)
    judge(what, oracle, "gradients", gradients(o, x, phi), gradients(wanted, x, phi))
    if causal:
        outputs, state = [], None
        for t in range(T):
            now = {n: y[:, t : t + 1] for n, y in x.items()}
            o, state = linear_attention(**now, **options, state=state, position=torch.full((B, 1), t))
            outputs.append(o)
        judge(what, oracle, "token by token", torch.cat(outputs, 1), wanted)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(K)
    weights = weights.masked_fill(~torch.ones(T, T).tril().bool(), -math.inf).softmax(-1)
    return torch.einsum("bhts,bshv->bthv", weights, v)


def test_favor_is_unbiased() -> None:
    """The mean estimate of e^{q·k/√d} over many draws of ω lies within four standard errors; orthogonal ω vary less."""
    x = drawn(torch.float64)
    q, k = (0.5 * x[name][:1, :4].detach() for name in "qk")  # of larger ones the estimate has a long tail
    wanted = torch.exp(torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(K))
    phi = Favor(H, K, features=K).double()
    estimates = []
    for seed in range(1000):
        phi.redraw(seed)
        a, b = phi(q, k, normalized=False)
        estimates.append(torch.einsum("bthf,bshf->bhts", a, b))
    samples = torch.stack(estimates)
    error = (samples.mean(0) - wanted).abs()
    assert (error <= 4 * samples.std(0) / math.sqrt(len(samples))).all()
    independent = torch.randn(1000, K, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, b = q / K**0.25, k / K**0.25
    sums = (a[:, :, None] + b[:, None]).movedim(-2, 1)
    exponents = torch.einsum("smk,bhtuk->sbhtum", independent, sums)
    halves = ((a * a).sum(-1)[:, :, None] + (b * b).sum(-1)[:, None]).movedim(-1, 1) / 2
    iid = torch.exp(exponents - halves[..., None]).mean(-1)
    assert samples.std(0).mean() < iid.std(0).mean()


def test_favor_becomes_softmax_as_features_grow() -> None:
    x = {name: y.detach() * (0.5 if name != "v" else 1) for name, y in drawn(torch.float64).items()}
    wanted = softmax(**x)
    errors = []
    for features in (16, 256, 4096):
        squares = []
        for seed in range(4):
            phi = Favor(H, K, features=features, seed=seed).double()
            squares.append((linear_attention(**x, feature_map=phi)[0] - wanted).square().mean())
        errors.append(math.sqrt(float(sum(squares)) / 4))
    assert errors[0] > 2 * errors[1] > 4 * errors[2]  # 1/√m would be fourfold
    assert errors[2] < 0.02
    again = linear_attention(**x, feature_map=Favor(H, K, features=4096, seed=0).double())[0]
    assert torch.equal(again, linear_attention(**x, feature_map=Favor(H, K, features=4096).double())[0])


def test_taylor_is_near_softmax_where_products_are_small() -> None:
    x = {name: y.detach() * (0.25 if name != "v" else 1) for name, y in drawn(torch.float64).items()}
    o, _ = linear_attention(**x, feature_map="taylor")
    assert (o - softmax(**x)).abs().max() < 2e-3
