"""RetNet, gated linear attention, DeltaNet and Gated DeltaNet against the maths of their papers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from proof.plainly import D, Parameters, T, convolved, householder, outer, prove, rms, unit
from torch import Tensor

from linattn import DeltaNet, GatedDeltaNet, GatedLinearAttention, Retention

H = 2


def retention_parts(p: Parameters, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k [T, H, K] turned, v, gate [T, H, V], γ [H]; arXiv 2307.08621, eq. 5 and 8."""
    q, k, v, gate = (t.unflatten(-1, (H, -1)) for t in (x @ p["in_proj.weight"].T).split((D, D, 2 * D, 2 * D), -1))
    size = D // H
    theta = 1 / 10000 ** torch.linspace(0, 1, size // 2, dtype=torch.float64)
    turns = torch.polar(torch.ones(1, dtype=torch.float64), torch.arange(T)[:, None, None] * theta)

    def turned(t: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)

    return turned(q), turned(k) * size**-0.5, v, gate, 1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))


def retention_recurrent(p: Parameters, x: Tensor, eps: float = 1e-6) -> Tensor:
    q, k, v, gate, gamma = retention_parts(p, x)
    S, rows = torch.zeros(H, D // H, 2 * D // H, dtype=torch.float64), []
    for t in range(T):
        S = gamma[:, None, None] * S + outer(k[t], v[t])
        rows.append(F.silu(gate[t]) * rms((q[t][:, None] @ S)[:, 0], eps))
    return torch.stack(rows).flatten(1) @ p["out_proj.weight"].T


def retention_parallel(p: Parameters, x: Tensor) -> Tensor:
    """With the paper's scalings: the decays by the root of their sum, the scores by the sum of their magnitudes."""
    q, k, v, gate, gamma = retention_parts(p, x)
    behind = torch.arange(T)[:, None] - torch.arange(T)
    decay = torch.where(behind >= 0, gamma[:, None, None] ** behind.clamp_min(0), 0)
    decay = decay / decay.sum(-1, keepdim=True).sqrt()
    scores = torch.einsum("nhk,mhk->hnm", q, k) * decay
    scores = scores / scores.detach().abs().sum(-1, keepdim=True).clamp_min(1)
    o = rms(torch.einsum("hnm,mhv->nhv", scores, v), 0.0)
    return (F.silu(gate) * o).flatten(1) @ p["out_proj.weight"].T


def test_retention() -> None:
    torch.manual_seed(0)
    prove("retention", "arXiv 2307.08621, recurrent", Retention(D, num_heads=H), retention_recurrent)


def test_retention_without_epsilon_is_the_scaled_parallel_form() -> None:
    torch.manual_seed(0)
    layer = Retention(D, num_heads=H, norm_eps=1e-14)
    prove("retention", "arXiv 2307.08621, parallel", layer, retention_parallel)


def gated_linear_attention(p: Parameters, x: Tensor) -> Tensor:
    q, k, v, gate, low = (x @ p["in_proj.weight"].T).split((D // 2, D // 2, D, D, 16), -1)
    alpha = (low @ p["gate_proj.weight"].T + p["gate_proj.bias"]).sigmoid() ** (1 / 16)
    q, k, v, gate, alpha = (t.unflatten(-1, (H, -1)) for t in (q, k, v, gate, alpha))
    S, rows = torch.zeros(H, D // 2 // H, D // H, dtype=torch.float64), []
    for t in range(T):
        S = alpha[t][..., None] * S + outer(k[t], v[t])
        o = rms((q[t][:, None] @ S)[:, 0] / (D // 2 // H) ** 0.5, 1e-5) * p["norm.weight"]
        rows.append(F.silu(gate[t]) * o)
    return torch.stack(rows).flatten(1) @ p["out_proj.weight"].T


def test_gated_linear_attention() -> None:
    torch.manual_seed(0)
    layer = GatedLinearAttention(D, num_heads=H)
    prove("gated_linear_attention", "arXiv 2312.06635", layer, gated_linear_attention)


@pytest.mark.parametrize("top", [1.0, 2.0])
def test_delta_net(top: float) -> None:
    def delta_net(p: Parameters, x: Tensor) -> Tensor:
        qkv, b = (x @ p["in_proj.weight"].T).split((3 * D, H), -1)
        q, k, v = (t.unflatten(-1, (H, -1)) for t in convolved(qkv, p["conv1d.weight"]).chunk(3, -1))
        q, k, beta = unit(q) * (D // H) ** -0.5, unit(k), top * b.sigmoid()
        S, rows = torch.zeros(H, D // H, D // H, dtype=torch.float64), []
        for t in range(T):
            S = householder(k[t], beta[t]) @ S + beta[t][:, None, None] * outer(k[t], v[t])
            rows.append(rms((q[t][:, None] @ S)[:, 0], 1e-5) * p["norm.weight"])
        return torch.stack(rows).flatten(1) @ p["out_proj.weight"].T

    torch.manual_seed(0)
    prove("delta_rule", "arXiv 2406.06484", DeltaNet(D, num_heads=H, allow_neg_eigval=top == 2), delta_net)


def test_gated_delta_net() -> None:
    """With values of more heads than keys."""
    K, V = 6, 10

    def gated_delta_net(p: Parameters, x: Tensor) -> Tensor:
        qkv, z, a, b = (x @ p["in_proj.weight"].T).split((2 * H * K + 2 * H * V, 2 * H * V, 2 * H, 2 * H), -1)
        q, k, v = convolved(qkv, p["conv1d.weight"]).split((H * K, H * K, 2 * H * V), -1)
        q, k = (unit(t.unflatten(-1, (H, K))).repeat_interleave(2, 1) for t in (q, k))
        v, z = (t.unflatten(-1, (2 * H, V)) for t in (v, z))
        alpha, beta = (-p["A_log"].exp() * F.softplus(a + p["dt_bias"])).exp(), b.sigmoid()
        S, rows = torch.zeros(2 * H, K, V, dtype=torch.float64), []
        for t in range(T):
            S = alpha[t][:, None, None] * (householder(k[t], beta[t]) @ S) + beta[t][:, None, None] * outer(k[t], v[t])
            rows.append(rms((q[t][:, None] @ S)[:, 0] * K**-0.5, 1e-5) * p["norm.weight"] * F.silu(z[t]))
        return torch.stack(rows).flatten(1) @ p["out_proj.weight"].T

    torch.manual_seed(0)
    layer = GatedDeltaNet(D, num_heads=H, num_v_heads=2 * H, head_dim=K, expand_v=V / K)
    prove("gated_delta_rule", "arXiv 2412.06464", layer, gated_delta_net)
