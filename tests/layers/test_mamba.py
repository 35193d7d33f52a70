"""The layer of Mamba: the paper's formula, mamba_ssm's parameters and their start, the variant of FalconMamba."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import Mamba
from linattn.models import LanguageModel, ModelConfig


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("falcon", [False, True])
def test_the_formula(falcon: bool) -> None:
    layer = Mamba(16, d_state=5, dt_rank=3, bias=True, norm_dt_b_c=falcon).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    u = torch.randn(7, 16, dtype=torch.float64)
    x, z = (u @ layer.in_proj.weight.T + layer.in_proj.bias).chunk(2, -1)
    assert layer.conv1d.weight is not None
    x = F.silu(F.conv1d(F.pad(x.T, (3, 0)), layer.conv1d.weight, layer.conv1d.bias, groups=32).T)
    low, B, C = (x @ layer.x_proj.weight.T).split((3, 5, 5), -1)
    if falcon:
        low, B, C = rms(low), rms(B), rms(C)
    dt = F.softplus(low @ layer.dt_proj.weight.T + layer.dt_proj.bias)
    h, outputs = torch.zeros(32, 5, dtype=torch.float64), []
    for t in range(7):
        h = torch.exp(-dt[t, :, None] * layer.A_log.exp()) * h + (dt[t] * x[t])[:, None] * B[t]
        outputs.append(h @ C[t] + layer.D * x[t])
    y = (torch.stack(outputs) * F.silu(z)) @ layer.out_proj.weight.T + layer.out_proj.bias
    torch.testing.assert_close(layer(u[None])[0][0], y)


def test_parameters_of_mamba_ssm() -> None:
    shapes = {name: list(p.shape) for name, p in Mamba(72).state_dict().items()}
    assert shapes == {
        "in_proj.weight": [288, 72], "conv1d.weight": [144, 1, 4], "conv1d.bias": [144], "x_proj.weight": [5 + 32, 144],
        "dt_proj.weight": [144, 5], "dt_proj.bias": [144], "A_log": [144, 16], "D": [144], "out_proj.weight": [72, 144],
    }  # fmt: skip
    biased = Mamba(32, bias=True, conv_bias=False).state_dict()
    assert {"in_proj.bias", "out_proj.bias"} <= biased.keys()
    assert "conv1d.bias" not in biased
    assert Mamba(32, norm_dt_b_c=True).state_dict().keys() == Mamba(32).state_dict().keys()
    marked = {name for name, p in Mamba(32).named_parameters() if hasattr(p, "_no_weight_decay")}
    assert marked == {"A_log", "D", "dt_proj.bias"}


def test_the_start_of_mamba_ssm() -> None:
    """A model's own start leaves it alone."""
    options: dict[str, Any] = {"dt_min": 1e-5, "dt_max": 1e-2, "dt_init_floor": 1e-4, "dt_scale": 2.0}
    model = LanguageModel(ModelConfig(d_model=64, num_layers=1, pattern="mamba", mixers={"mamba": options}))
    assert model.config.mlp_size == 0
    layer: Any = model.blocks[0].mixer
    torch.testing.assert_close(layer.A_log.exp(), torch.arange(1.0, 17).expand(128, 16))
    assert torch.equal(layer.D, torch.ones(128))
    step = F.softplus(layer.dt_proj.bias)
    assert step.min() >= 1e-4 * 0.999
    assert (step < 1.01e-4).sum() > 10  # at the floor
    assert 3e-3 < step.max() < 1.001e-2
    bound = 2 / math.sqrt(4)
    assert 0.9 * bound < layer.dt_proj.weight.abs().max() <= bound
    assert (Mamba(64, dt_init="constant").dt_proj.weight == 0.5).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dt_rank": 0}, "dt_rank: got 0"),
        ({"d_state": 0}, "d_state: got 0"),
        ({"expand": 0}, r"expand \* d_model: got 0"),
        ({"dt_init": "zeros"}, "dt_init: got 'zeros', wanted one of 'random', 'constant'"),
        ({"dt_min": 0.2}, "dt_min: got 0.2"),
        ({"conv_size": -1}, "conv_size: got -1"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Mamba(32, **options)
