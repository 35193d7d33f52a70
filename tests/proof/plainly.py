"""A layer in float32 beside its published maths, written out token by token in float64 from the same parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from proof.judge import judge
from torch import Tensor, nn

Parameters = dict[str, Tensor]
T, D = 37, 24


def prove(mechanism: str, oracle: str, layer: nn.Module, maths: Callable[[Parameters, Tensor], Tensor]) -> None:
    """Output, gradients of every parameter and of the input, and the output token by token.

    ``maths`` takes the layer's parameters by name and x [T, D] to y [T, D].
    """
    random = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=random)
    x, weight = (torch.randn(2, T, D, generator=random) for _ in range(2))

    leaf = x.clone().requires_grad_()
    y, _ = layer(leaf)
    (y * weight).sum().backward()
    got = {"input": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}

    leaf = x.double().requires_grad_()
    parameters = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    wanted = torch.stack([maths(parameters, row) for row in leaf])
    (wanted * weight.double()).sum().backward()
    gradients = {"input": leaf.grad, **{name: p.grad for name, p in parameters.items()}}

    judge(mechanism, oracle, "logits", y, wanted)
    judge(mechanism, oracle, "gradients", got, gradients)
    state, steps = None, []
    with torch.no_grad():
        for t in range(T):
            step, state = layer(x[:, t : t + 1], state)
            steps.append(step)
    judge(mechanism, oracle, "token by token", torch.cat(steps, 1), wanted)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """silu of Σ_j weight_j x_{t-W+1+j}; x [T, C], weight [C, 1, W]."""
    width = weight.shape[-1]
    rows = []
    for t in range(len(x)):
        terms = [weight[:, 0, j] * x[t - width + 1 + j] for j in range(width) if t - width + 1 + j >= 0]
        rows.append(F.silu(torch.stack(terms).sum(0)))
    return torch.stack(rows)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def householder(k: Tensor, beta: Tensor) -> Tensor:
    """I - β k kᵀ of every head: k [H, K], beta [H]."""
    return torch.eye(k.shape[-1], dtype=k.dtype) - beta[:, None, None] * k[:, :, None] * k[:, None, :]


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., :, None] * v[..., None, :]
