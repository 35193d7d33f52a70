"""Mamba-3 against its paper: a complex state space under the trapezoidal rule, with one input and with several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from proof.plainly import D, Parameters, T, prove, rms
from torch import Tensor

from linattn import Mamba3

H, K = 4, 8
V = 2 * D // H


def maths(p: Parameters, x: Tensor, *, ranks: int, groups: int, pairs: int, heavy_tail: bool, norm: bool) -> Tensor:
    """arXiv 2603.15569; each pair of channels is one complex number, those beyond ``pairs`` do not turn.

    h_t = e^{Δ(A − iθ)} (h_{t−1} + (1−λ) Δ Σ_r B_{t−1,r} x_{t−1,r}ᵀ) + λ Δ Σ_r B_{t,r} x_{t,r}ᵀ
    y_{t,r} = Re(C_{t,r}* h_t) + D x_{t,r}
    """
    maps = ranks * groups * K
    z, u, B, C, dt, A, trap, theta = (x @ p["in_proj.weight"].T).split((2 * D, 2 * D, maps, maps, H, H, H, pairs), -1)
    dt, lam = F.softplus(dt + p["dt_bias"]), trap.sigmoid()
    A = -(torch.where(A >= 0, 1 + A, 1 / (1 - A.clamp_max(0))) if heavy_tail else F.softplus(A)).clamp_min(1e-4)
    theta = F.pad(torch.pi * theta.tanh(), (0, K // 2 - pairs))

    def mapped(t: Tensor, name: str) -> Tensor:
        """[T, R, H, K/2], complex."""
        t = rms(t.unflatten(-1, (ranks, groups, K)), 1e-5) * p[f"{name}_norm.weight"]
        t = t.repeat_interleave(H // groups, 2) + p[f"{name}_bias"].transpose(0, 1)
        return torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())

    B, C = mapped(B, "B"), mapped(C, "C")
    u, z = (t.unflatten(-1, (1, H, V)) for t in (u, z))
    if ranks > 1:
        u, z = (t * p[name].transpose(0, 1) for t, name in ((u, "mimo_x"), (z, "mimo_z")))
    h = torch.zeros(H, K // 2, V, dtype=torch.complex128)
    before, rows = torch.zeros_like(h), []
    for t in range(T):
        now = sum(B[t, r][:, :, None] * u[t, r][:, None, :] for r in range(ranks))
        step = torch.exp(torch.complex((dt[t] * A[t])[:, None].expand(-1, K // 2), -dt[t][:, None] * theta[t]))
        start, end = ((share * dt[t])[:, None, None] for share in (1 - lam[t], lam[t]))
        h = step[:, :, None] * (h + start * before) + end * now
        before = now
        y = torch.stack([(C[t, r].conj()[:, :, None] * h).real.sum(1) for r in range(ranks)])
        y = y + p["D"][:, None] * u[t]
        if norm:
            y = rms(y, 1e-5) * p["norm.weight"].view(H, V)
        y = y * F.silu(z[t])
        rows.append((y * p["mimo_o"].transpose(0, 1)).sum(0) if ranks > 1 else y[0])
    return torch.stack(rows).flatten(1) @ p["out_proj.weight"].T


@pytest.mark.parametrize(
    ("options", "oracle"),
    [
        ({}, "arXiv 2603.15569"),
        ({"num_groups": 2, "rope_fraction": 1.0, "heavy_tail": True, "out_norm": True}, "arXiv 2603.15569"),
        ({"mimo_rank": 3}, "arXiv 2603.15569, MIMO"),
        ({"mimo_rank": 2, "num_groups": 2, "out_norm": True}, "arXiv 2603.15569, MIMO"),
    ],
    ids=str,
)
def test_mamba3(options: dict[str, Any], oracle: str) -> None:
    ranks, groups = options.get("mimo_rank", 1), options.get("num_groups", 1)
    pairs = int(K * options.get("rope_fraction", 0.5)) // 2
    rest = {"heavy_tail": options.get("heavy_tail", False), "norm": options.get("out_norm", False)}
    torch.manual_seed(0)
    layer = Mamba3(D, num_heads=H, d_state=K, **options)
    prove("mamba3", oracle, layer, lambda p, x: maths(p, x, ranks=ranks, groups=groups, pairs=pairs, **rest))
