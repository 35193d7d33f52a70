"""Gated DeltaProduct against its paper: products of generalised Householder matrices, gated and not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from proof.plainly import D, Parameters, T, convolved, householder, outer, prove, rms, unit
from torch import Tensor

from linattn import GatedDeltaProduct

H, K, V = 2, 6, 10


@pytest.mark.parametrize(("steps", "gated", "top"), [(1, True, 1.0), (2, True, 2.0), (3, False, 2.0)])
def test_gated_delta_product(steps: int, gated: bool, top: float) -> None:
    """arXiv 2502.10297: H_t = α_t Π_j (I − β_{t,j} k_{t,j} k_{t,j}ᵀ), the last step applied last."""

    def maths(p: Parameters, x: Tensor) -> Tensor:
        sizes = (H * K * (1 + steps) + H * V * steps, H * V, H * steps, H * gated)
        qkv, z, b, a = (x @ p["in_proj.weight"].T).split(sizes, -1)
        q, k, v = convolved(qkv, p["conv1d.weight"]).split((H * K, H * K * steps, H * V * steps), -1)
        q, z = unit(q.unflatten(-1, (H, K))) * K**-0.5, z.unflatten(-1, (H, V))
        k, v = unit(k.unflatten(-1, (steps, H, K))), v.unflatten(-1, (steps, H, V))
        beta = top * b.sigmoid().unflatten(-1, (steps, H))
        alpha = torch.ones(T, H, dtype=x.dtype)
        if gated:
            alpha = (-p["A_log"].exp() * F.softplus(a + p["dt_bias"])).exp()
        S, rows = torch.zeros(H, K, V, dtype=x.dtype), []
        for t in range(T):
            transition, write = alpha[t][:, None, None] * torch.eye(K, dtype=x.dtype), torch.zeros_like(S)
            for j in range(steps):
                reflection = householder(k[t, j], beta[t, j])
                transition = reflection @ transition
                write = reflection @ write + beta[t, j][:, None, None] * outer(k[t, j], v[t, j])
            S = transition @ S + write
            rows.append(rms((q[t][:, None] @ S)[:, 0], 1e-5) * p["norm.weight"] * F.silu(z[t]))
        return torch.stack(rows).flatten(1) @ p["out_proj.weight"].T

    torch.manual_seed(0)
    layer = GatedDeltaProduct(
        D, num_heads=H, head_dim=K, expand_v=V / K, num_householder=steps, forget_gate=gated, allow_neg_eigval=top == 2
    )
    prove("gated_delta_product", f"arXiv 2502.10297, {'gated' if gated else 'plain'}", layer, maths)
