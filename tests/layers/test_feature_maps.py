"""Feature maps: sizes, extremes, random features, positions, what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linattn import LinearAttention, NormalizedState, linear_attention
from linattn.layers import FeatureMap
from linattn.layers.feature_maps import MODULES, NAMES, CosFormer, Favor, apply, create, orthogonal_normal, pairs
from linattn.models import LanguageModel, ModelConfig

WEIGHING = [name for name in NAMES if name not in ("identity", "product")]  # weights ≥ 0
every_map = pytest.mark.parametrize("name", NAMES)


def drawn(dtype: torch.dtype = torch.float64, T: int = 40, K: int = 8, size: float = 1.0) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(0)
    q, k = (size * torch.randn(2, T, 3, K, generator=random, dtype=torch.float64) for _ in range(2))
    return q.to(dtype), k.to(dtype), torch.randn(2, T, 3, 5, generator=random, dtype=torch.float64).to(dtype)


def made(name: str, dtype: torch.dtype = torch.float64, K: int = 8) -> Any:
    torch.manual_seed(0)
    phi = create(name, 3, K)
    return phi.to(dtype) if isinstance(phi, nn.Module) else phi


@pytest.mark.parametrize(
    ("name", "options", "features"),
    [
        ("taylor", {}, 1 + 8 + 36),
        ("rebased", {}, 36),
        ("dpfp", {}, 48),
        ("dpfp", {"nu": 1}, 16),
        ("favor", {}, 16),
        ("favor", {"features": 11}, 11),
        ("t2r", {"features": 5}, 5),
        ("hedgehog", {}, 16),
        ("cosformer", {}, 16),
    ],
)
def test_the_number_of_features(name: str, options: dict[str, Any], features: int) -> None:
    q, k, _ = drawn(torch.float32)
    a, b = apply(create(name, 3, 8, **options), q, k, torch.arange(40)[None])
    assert a.shape == b.shape == (2, 40, 3, features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WEIGHING)
@pytest.mark.parametrize("size", [0.0, 1.0, 30.0])
def test_any_input_gives_a_mean_of_values(name: str, dtype: torch.dtype, size: float) -> None:
    """Nothing, the ordinary and the huge: finite outputs no larger than the values, finite gradients."""
    q, k, v = (x.requires_grad_() for x in drawn(dtype, size=size))
    o, state = linear_attention(q, k, v, feature_map=made(name, dtype))
    assert isinstance(state, NormalizedState)
    assert o.dtype == dtype
    assert o.isfinite().all()
    assert o.abs().max() <= v.abs().max() * (1 + 16 * torch.finfo(dtype).eps)
    for grad in torch.autograd.grad(o.float().square().sum(), (q, k, v)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("K", [1, 64, 256])
def test_favor_weighs_a_lone_token_whole(K: int) -> None:
    """Whatever its query: no denominator is lost below the smallest, even where q·k is far below zero."""
    direction = torch.nn.functional.normalize(drawn(torch.float32, T=1, K=K)[0], dim=-1)
    v = drawn(torch.float32, T=1)[2]
    for length in (0.1, 3.0, 7.0):
        q, k = (sign * length * K**0.25 * direction for sign in (1, -1))
        o, _ = linear_attention(q, k, v, feature_map=create("favor", 3, K))
        torch.testing.assert_close(o, v, rtol=1e-5, atol=1e-6)


def test_favor_holds_a_key_that_lies_along_a_direction() -> None:
    """The largest feature there is, e^{‖ω‖²/2}, beyond float32 for 256 channels."""
    phi = Favor(1, 256)
    phi.omega *= 14 / phi.omega.norm(dim=1, keepdim=True)
    k = phi.omega[:1].view(1, 1, 1, 256).repeat(1, 3, 1, 1) * 256**0.25
    v = drawn(torch.float32, T=3)[2][:1, :, :1]
    o, state = linear_attention(k, k, v, feature_map=phi)
    assert all(x.isfinite().all() for x in (o, *state))
    assert (o.abs() <= v.abs().amax() * (1 + 1e-5)).all()


def test_random_directions() -> None:
    """Orthogonal in blocks, of the lengths of normal vectors, drawn from the seed alone."""
    omega = orthogonal_normal(20, 8, 0)
    for block in omega.split(8):
        product = block @ block.T
        torch.testing.assert_close(product, torch.diag(product.diagonal()), rtol=0, atol=1e-12)
    lengths = torch.cat([orthogonal_normal(64, 8, seed).square().sum(1) for seed in range(40)])
    assert abs(float(lengths.mean()) - 8) < 4 * math.sqrt(16 / len(lengths))  # χ² with 8 degrees of freedom
    flat = torch.cat([orthogonal_normal(8, 8, seed).flatten() for seed in range(400)])
    assert abs(float(flat.mean())) < 4 / math.sqrt(len(flat))
    assert not torch.equal(omega, orthogonal_normal(20, 8, 1))


def test_redraw_takes_other_directions_and_comes_back() -> None:
    phi = Favor(1, 4, seed=5)
    first = phi.omega.clone()
    phi.redraw(6)
    assert not torch.equal(phi.omega, first)
    assert torch.equal(phi.omega, Favor(1, 4, seed=6).omega)
    phi.redraw(5)
    assert torch.equal(phi.omega, first)
    assert "omega" in phi.state_dict()
    assert not list(phi.parameters())


def test_pairs_square_the_product() -> None:
    q, k, _ = drawn()
    torch.testing.assert_close((pairs(q) * pairs(k)).sum(-1), (q * k).sum(-1).square())


def test_cosformer_counts_positions_and_ends() -> None:
    q, k, v = drawn(T=10)
    phi = CosFormer(3, 8, max_length=10)
    whole, _ = linear_attention(q, k, v, feature_map=phi)
    _, state = linear_attention(q[:, :4], k[:, :4], v[:, :4], feature_map=phi)
    rest = {"feature_map": phi, "state": state}
    o, _ = linear_attention(q[:, 4:], k[:, 4:], v[:, 4:], **rest, position=torch.arange(4, 10)[None])
    torch.testing.assert_close(o, whole[:, 4:])
    shifted, _ = linear_attention(q[:, :5], k[:, :5], v[:, :5], feature_map=phi, position=torch.arange(5, 10)[None])
    torch.testing.assert_close(shifted, whole[:, :5])  # distances alone count
    with pytest.raises(ValueError, match=r"^position: got none, .*continue"):
        linear_attention(q[:, 4:], k[:, 4:], v[:, 4:], **rest)
    with pytest.raises(ValueError, match=r"^position: got 10, wanted below max_length=10"):
        linear_attention(q, k, v, feature_map=phi, position=torch.arange(1, 11)[None])
    packed, _ = linear_attention(*(x[:1] for x in (q, k, v)), feature_map=phi, cu_seqlens=torch.tensor([0, 6, 6, 10]))
    torch.testing.assert_close(packed[:, :6], whole[:1, :6])
    layer = LinearAttention(16, feature_map="cosformer", feature_map_options={"max_length": 6})
    x = torch.randn(2, 6, 16)
    _, end = layer(x)
    assert end.position.tolist() == [6, 6]
    with pytest.raises(ValueError, match=r"^position: got 6"):
        layer(x[:, :1], end)


@every_map
def test_a_compiled_map_is_the_map(name: str) -> None:
    torch.compiler.reset()
    phi, (q, k, _) = made(name), drawn(T=6)
    position = torch.arange(6)[None]

    def mapped(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return apply(phi, q, k, position)

    compiled = torch.compile(mapped, fullgraph=True, backend="eager")
    for a, b in zip(compiled(q, k), mapped(q, k), strict=True):
        torch.testing.assert_close(a, b)


@every_map
def test_a_model_of_it_learns_and_its_config_is_plain_data(name: str) -> None:
    options = {"feature_map": name, "num_heads": 2, "normalize": name in WEIGHING}
    config = ModelConfig(32, d_model=16, num_layers=1, pattern="linear_attention", mixers={"linear": options})
    assert ModelConfig.from_dict(config.to_dict()) == config
    torch.manual_seed(0)
    model, ids = LanguageModel(config), torch.arange(8)[None]
    start = torch.nn.functional.cross_entropy(model(ids)[0][0, :-1], ids[0, 1:])
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(ids)[0][0, :-1], ids[0, 1:])
        loss.backward()
        optimizer.step()
    assert loss < start


def test_bad_input() -> None:
    q, k, v = drawn()
    for name in MODULES:
        phi = create(name, 3, 8)
        if isinstance(phi, FeatureMap) and list(phi.parameters()):
            with pytest.raises(ValueError, match=rf"^feature_map: got '{name}', which learns"):
                linear_attention(q, k, v, feature_map=name)
        else:
            linear_attention(q, k, v, feature_map=name)
    for name, q_like in (("favor", q[..., :6]), ("t2r", q[..., :6]), ("t2r", q[:, :, :1])):
        with pytest.raises(ValueError, match=r"^feature_map: got one made for \d (heads|channels), wanted one for the"):
            linear_attention(q_like, q_like, v, feature_map=made(name))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"feature_map": "performer"}, "feature_map: got 'performer', wanted one of .*'favor'"),
        (
            {"feature_map": "favor", "feature_map_options": {"feature": 3}},
            "feature_map_options: got 'feature'.*features",
        ),
        ({"feature_map": "elu", "feature_map_options": {"seed": 3}}, "feature_map_options: got 'seed'.*none"),
        ({"feature_map": torch.relu, "feature_map_options": {"seed": 3}}, "feature_map_options: "),
        ({"feature_map": "favor", "feature_map_options": {"features": 0}}, "features: got 0"),
        ({"feature_map": "t2r", "feature_map_options": {"features": 0}}, "features: got 0"),
        ({"feature_map": "dpfp", "feature_map_options": {"nu": 0}}, "nu: got 0"),
        ({"feature_map": "cosformer", "feature_map_options": {"max_length": 0}}, "max_length: got 0"),
        ({"head_k_dim": 0}, "head_k_dim: got 0"),
    ]
    for options, words in cases:
        with pytest.raises(ValueError, match=rf"^{words}"):
            LinearAttention(16, **options)(torch.zeros(1, 2, 16))
