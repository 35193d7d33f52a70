"""Layers against their papers' formulas, written out token by token from the parameters alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import DeltaNet, GatedDeltaNet, GatedLinearAttention, LinearAttention, Mamba2, Retention, SoftmaxAttention

D, T = 16, 7


def inputs() -> Tensor:
    return torch.randn(1, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def conv(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, C]."""
    return F.conv1d(F.pad(x.T[None], (weight.shape[-1] - 1, 0)), weight, groups=x.shape[1])[0].T


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def turn(x: Tensor, frequency: Tensor, interleaved: bool) -> Tensor:
    """x [T, H, K]."""
    half = x.shape[-1] // 2
    pair = x.unflatten(-1, (half, 2)) if interleaved else torch.stack([x[..., :half], x[..., half:]], -1)
    angle = torch.arange(len(x))[:, None, None] * frequency
    turned = torch.view_as_real(torch.view_as_complex(pair.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    return turned.flatten(-2) if interleaved else torch.cat([turned[..., 0], turned[..., 1]], -1)


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None) -> Tensor:
    """q, k [T, H, K]; v [T, H, V]; decay [T, H, K or 1] -> [T, H, V]."""
    S, outputs = torch.zeros(q.shape[1], q.shape[2], v.shape[2], dtype=q.dtype), []
    for t in range(len(q)):
        S = decay[t, :, :, None] * S
        write = v[t] if beta is None else beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
        S = S + torch.einsum("hk,hv->hkv", k[t], write)
        outputs.append(torch.einsum("hkv,hk->hv", S, q[t]))
    return torch.stack(outputs)


def test_softmax_attention() -> None:
    layer = SoftmaxAttention(D, num_heads=4, num_kv_heads=2, window=3).double()
    x = inputs()
    q, k, v = (x[0] @ layer.in_proj.weight.T).unflatten(-1, (-1, 4)).split((4, 2, 2), 1)
    frequency = 10000.0 ** (-torch.arange(0, 4, 2, dtype=torch.float64) / 4)
    q, k = (turn(t, frequency, interleaved=False) for t in (q, k))
    scores = torch.einsum("thk,shk->hts", q, k.repeat_interleave(2, 1)) / 2
    behind = torch.arange(T)[:, None] - torch.arange(T)
    weights = scores.masked_fill((behind < 0) | (behind >= 3), -torch.inf).softmax(-1)
    o = torch.einsum("hts,shv->thv", weights, v.repeat_interleave(2, 1))
    torch.testing.assert_close(layer(x)[0][0], o.flatten(1) @ layer.out_proj.weight.T)


def test_linear_attention() -> None:
    layer, x = LinearAttention(D, num_heads=2).double(), inputs()
    assert layer.conv1d.weight is not None
    q, k, v = conv(x[0] @ layer.in_proj.weight.T, layer.conv1d.weight).unflatten(-1, (-1, 8)).chunk(3, 1)
    weights = torch.einsum("thk,shk->hts", F.elu(q) + 1, F.elu(k) + 1).tril()
    o = torch.einsum("hts,shv->thv", weights / weights.sum(-1, keepdim=True), v)
    torch.testing.assert_close(layer(x)[0][0], rms(o, 1e-5).flatten(1) @ layer.out_proj.weight.T)


def test_retention() -> None:
    layer, x = Retention(D, num_heads=2).double(), inputs()
    q, k, v, z = (t.unflatten(-1, (2, -1)) for t in (x[0] @ layer.in_proj.weight.T).split((D, D, 2 * D, 2 * D), -1))
    frequency = 1 / 10000.0 ** torch.linspace(0, 1, 4, dtype=torch.float64)
    q, k = turn(q, frequency, interleaved=True), turn(k, frequency, interleaved=True) / 8**0.5
    decay = torch.tensor([1 - 2**-5, 1 - 2**-6], dtype=torch.float64).expand(T, 2)[..., None]
    o = rms(recurrence(q, k, v, decay), 1e-6) * F.silu(z)
    wanted = o.flatten(1) @ layer.out_proj.weight.T
    # the layer's decays are float32
    torch.testing.assert_close(layer(x)[0][0], wanted, rtol=T * torch.finfo(torch.float32).eps, atol=1e-6)


def test_gated_linear_attention() -> None:
    layer, x = GatedLinearAttention(D).double(), inputs()
    q, k, v, z, low = (x[0] @ layer.in_proj.weight.T).split((8, 8, 16, 16, 16), -1)
    alpha = (low @ layer.gate_proj.weight.T + layer.gate_proj.bias).sigmoid() ** (1 / 16)
    q, k, v, z, alpha = (t.unflatten(-1, (4, -1)) for t in (q, k, v, z, alpha))
    o = rms(recurrence(q, k / 2**0.5, v, alpha), 1e-5) * F.silu(z)
    torch.testing.assert_close(layer(x)[0][0], o.flatten(1) @ layer.out_proj.weight.T)


def test_mamba2() -> None:
    layer, x = Mamba2(D, num_heads=4, num_groups=2, d_state=6).double(), inputs()
    torch.nn.init.uniform_(layer.D)
    assert layer.conv1d.weight is not None
    z, xBC, dt = (x[0] @ layer.in_proj.weight.T).split((32, 32 + 24, 4), -1)
    xBC = F.silu(conv(xBC, layer.conv1d.weight) + layer.conv1d.bias)
    u, B, C = xBC[:, :32].view(T, 4, 8), xBC[:, 32:44].view(T, 2, 6), xBC[:, 44:].view(T, 2, 6)
    B, C = (t.repeat_interleave(2, 1) for t in (B, C))
    dt = F.softplus(dt + layer.dt_bias)
    decay = (-dt * layer.A_log.exp()).exp()[..., None]
    y = recurrence(C, B, u * dt[..., None], decay) + layer.D[:, None] * u
    y = rms((y.flatten(1) * F.silu(z)).view(T, 2, 16), 1e-5).flatten(1) * layer.norm.weight
    torch.testing.assert_close(layer(x)[0][0], y @ layer.out_proj.weight.T)


def test_delta_net() -> None:
    layer, x = DeltaNet(D, num_heads=2, allow_neg_eigval=True).double(), inputs()
    assert layer.conv1d.weight is not None
    projected = x[0] @ layer.in_proj.weight.T
    qkv, b = projected[:, : 3 * D], projected[:, 3 * D :]
    q, k, v = F.silu(conv(qkv, layer.conv1d.weight)).unflatten(-1, (-1, 8)).chunk(3, 1)
    o = recurrence(unit(q) / 8**0.5, unit(k), v, torch.ones(T, 2, 1, dtype=torch.float64), 2 * b.sigmoid())
    torch.testing.assert_close(layer(x)[0][0], rms(o, 1e-5).flatten(1) @ layer.out_proj.weight.T)


def test_gated_delta_net() -> None:
    layer, x = GatedDeltaNet(D, num_heads=2, num_v_heads=4, head_dim=4).double(), inputs()
    assert layer.conv1d.weight is not None
    qkv, z, a, b = (x[0] @ layer.in_proj.weight.T).split((8 + 8 + 32, 32, 4, 4), -1)
    q, k, v = F.silu(conv(qkv, layer.conv1d.weight)).split((8, 8, 32), -1)
    q, k = (unit(t.view(T, 2, 4)).repeat_interleave(2, 1) for t in (q, k))
    decay = (-layer.A_log.exp() * F.softplus(a + layer.dt_bias)).exp()[..., None]
    o = rms(recurrence(q / 2, k, v.view(T, 4, 8), decay, b.sigmoid()), 1e-5) * F.silu(z.view(T, 4, 8))
    torch.testing.assert_close(layer(x)[0][0], o.flatten(1) @ layer.out_proj.weight.T)


def test_parameters_that_are_not_to_decay_are_marked() -> None:
    for layer, names in ((Mamba2(D), {"A_log", "dt_bias", "D"}), (GatedDeltaNet(D), {"A_log", "dt_bias"})):
        assert {name for name, p in layer.named_parameters() if hasattr(p, "_no_weight_decay")} == names


def test_mamba2_has_the_names_of_mamba_ssm() -> None:
    shapes = {name: list(p.shape) for name, p in Mamba2(64).state_dict().items()}
    assert shapes == {
        "A_log": [2], "D": [2], "dt_bias": [2], "in_proj.weight": [2 * 128 + 2 * 128 + 2, 64], "norm.weight": [128],
        "conv1d.weight": [128 + 2 * 128, 1, 4], "conv1d.bias": [128 + 2 * 128], "out_proj.weight": [64, 128],
    }  # fmt: skip
