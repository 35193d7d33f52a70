"""HGRN and HGRN2 against their papers' equations, written out token by token in float64 with the weights of fla's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from proof.judge import BOUND, judge
from torch import Tensor, nn

from linattn import HGRN, HGRN2

D, HEADS, LAYERS, W, T = 12, 3, 3, 3, 20
Parameters = dict[str, Tensor]


def drawn(names: str) -> Parameters:
    """As flash-linear-attention names and shapes them; the lower bounds are the model's, shared by its layers."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    projections = {f"{name}_proj.weight": normal(D, D) / D**0.5 for name in names}
    convolutions = {f"{name}_conv1d.weight": normal(D, 1, W) for name in names}
    return {**projections, **convolutions, "g_norm.weight": 1 + 0.2 * normal(D), "lower_bounds": normal(LAYERS, D)}


def beta(p: Parameters, layer: int) -> Tensor:
    """γ = softmax over the layers, β_l the sum of those below, less the first: 0 in the first layer."""
    gamma = p["lower_bounds"].exp() / p["lower_bounds"].exp().sum(0)
    return gamma[1 : layer + 1].sum(0)


def projected(p: Parameters, name: str, x: Tensor, width: int) -> Tensor:
    """W x, and the sum of its last ``width`` values weighed (none with 0)."""
    y = x @ p[f"{name}_proj.weight"].T
    if not width:
        return y
    weight = p[f"{name}_conv1d.weight"]
    return torch.stack([sum(weight[:, 0, W - 1 - s] * y[:, t - s] for s in range(min(t + 1, W))) for t in range(T)], 1)


def normed(p: Parameters, o: Tensor) -> Tensor:
    return o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["g_norm.weight"]


def hgrn(p: Parameters, x: Tensor, layer: int, width: int) -> Tensor:
    """f = β + (1 - β) σ(W_f x), h_t = f_t h_{t-1} + (1 - f_t) silu(W_i x_t), y = W_o (norm(h) silu(W_g x))."""
    i, f = (projected(p, name, x, width) for name in "if")
    f = beta(p, layer) + (1 - beta(p, layer)) / (1 + (-f).exp())
    h, outputs = torch.zeros_like(x[:, 0]), []
    for t in range(T):
        h = f[:, t] * h + (1 - f[:, t]) * i[:, t] / (1 + (-i[:, t]).exp())
        outputs.append(h)
    z = x @ p["g_proj.weight"].T
    return (normed(p, torch.stack(outputs, 1)) * z / (1 + (-z).exp())) @ p["o_proj.weight"].T


def hgrn2(p: Parameters, x: Tensor, layer: int, width: int) -> Tensor:
    """S_t = Diag(f_t) S_{t-1} + (1 - f_t) i_tᵀ, o_t = S_tᵀ silu(W_q x) / √K for each head, y = W_o norm(o)."""
    q, f, i = (projected(p, name, x, width) for name in "qfi")
    f = beta(p, layer) + (1 - beta(p, layer)) / (1 + (-f).exp())
    q, f, i = (y.view(2, T, HEADS, -1) for y in (q / (1 + (-q).exp()), f, i))
    S, outputs = x.new_zeros(2, HEADS, D // HEADS, D // HEADS), []
    for t in range(T):
        S = f[:, t, :, :, None] * S + (1 - f[:, t, :, :, None]) * i[:, t, :, None, :]
        outputs.append((S * q[:, t, :, :, None]).sum(-2).flatten(1) / (D // HEADS) ** 0.5)
    return normed(p, torch.stack(outputs, 1)) @ p["o_proj.weight"].T


def convert(p: Parameters, layer: int, width: int, projections: str, convolved: str) -> Parameters:
    b = beta(p, layer)
    return {
        "in_proj.weight": torch.cat([p[f"{name}_proj.weight"] for name in projections]),
        **({"conv1d.weight": torch.cat([p[f"{name}_conv1d.weight"] for name in convolved])} if width else {}),
        **({"forget_gate.bound": b.log() - (1 - b).log()} if layer else {}),
        "norm.weight": p["g_norm.weight"],
        "out_proj.weight": p["o_proj.weight"],
    }


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., nn.Module], str, str, str]] = {
    "hgrn": (hgrn, HGRN, "ifgo", "ifg", "if"),
    "hgrn2": (hgrn2, lambda *a, **o: HGRN2(*a, num_heads=HEADS, **o), "qfio", "qfi", "qfi"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("layer", "width"), [(0, 0), (2, W)])
@pytest.mark.parametrize("name", CASES)
def test_the_paper(name: str, layer: int, width: int, dtype: torch.dtype) -> None:
    plain, build, names, projections, convolved = CASES[name]
    p = drawn(names)
    random = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 2, T, D, generator=random, dtype=torch.float64)
    ours = build(D, conv_size=width, layer_index=layer, num_layers=LAYERS).to(dtype)
    oracle, bound = ("the paper in float64", BOUND) if dtype == torch.float32 else ("float64 on both sides", 1e-10)

    def gradients(y: Tensor, leaves: Parameters) -> Parameters:
        grads = torch.autograd.grad(
            (y * weight).sum(), list(leaves.values()), materialize_grads=True, allow_unused=True
        )
        return dict(zip(leaves, grads, strict=True))

    leaves = {key: value.requires_grad_() for key, value in {**p, "input": x}.items()}
    wanted = plain(p, x, layer, width)
    weights = {key: value.to(dtype) for key, value in convert(p, layer, width, projections, convolved).items()}
    got, _ = torch.func.functional_call(ours, weights, (x.to(dtype),))
    judge(name, oracle, "logits", got, wanted, bound)
    judge(name, oracle, "gradients", gradients(got, leaves), gradients(wanted, leaves), bound)
    state, steps = None, []
    for t in range(T):
        y, state = torch.func.functional_call(ours, weights, (x[:, t : t + 1].to(dtype), state))
        steps.append(y)
    judge(name, oracle, "token by token", torch.cat(steps, 1), wanted, bound)


def test_where_the_bounds_start() -> None:
    """fla's bounds start at zero: β of layer l is l over the number of layers, in ours too."""
    for layer in range(1, LAYERS):
        wanted = beta({"lower_bounds": torch.zeros(LAYERS, D)}, layer)
        bound = HGRN2(D, layer_index=layer, num_layers=LAYERS).forget_gate.bound
        assert bound is not None
        torch.testing.assert_close(bound.sigmoid(), wanted)
