"""Norms, rotary embedding, MLP, positions and head counts against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from linattn.layers import RMSNorm, Rotary, SwiGLU, l2_normalize
from linattn.layers.mixer import time_step_bias
from linattn.layers.sequences import left_justify, positions, sequence_of_token
from linattn.layers.sizes import default_heads, divide


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("gate_first", [False, True])
def test_rms_norm(groups: int, gate_first: bool) -> None:
    norm = RMSNorm(12, eps=1e-3, groups=groups, gate_first=gate_first).double()
    x, z = torch.randn(2, 3, 5, 12, dtype=torch.float64)
    torch.nn.init.uniform_(norm.weight, 0.5, 2)
    before, after = (F.silu(z), 1.0) if gate_first else (1.0, F.silu(z))
    parts = (x * before).view(3, 5, groups, -1)
    wanted = (parts / (parts.square().mean(-1, keepdim=True) + 1e-3).sqrt()).view(3, 5, 12) * norm.weight * after
    torch.testing.assert_close(norm(x, z), wanted)


def test_l2_normalize() -> None:
    x = torch.randn(100, 16)
    torch.testing.assert_close(l2_normalize(x).norm(dim=-1), torch.ones(100))
    assert l2_normalize(x.bfloat16()).dtype == torch.bfloat16
    zero = torch.zeros(2, 4, requires_grad=True)
    l2_normalize(zero).sum().backward()
    assert zero.grad is not None
    assert zero.grad.isfinite().all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inclusive", [False, True])
def test_rotary_turns_pairs(interleaved: bool, inclusive: bool) -> None:
    x, position = torch.randn(2, 3, 4, 8, dtype=torch.float64), torch.tensor([[0, 1, 70_000], [5, 6, 7]])
    (y,) = Rotary(8, 10000.0, interleaved=interleaved, inclusive=inclusive)(position, x)
    frequency = torch.tensor([10000.0 ** (-j / 3 if inclusive else -2 * j / 8) for j in range(4)], dtype=torch.float64)

    def pairs(t: torch.Tensor) -> torch.Tensor:
        return torch.complex(t[..., ::2], t[..., 1::2]) if interleaved else torch.complex(t[..., :4], t[..., 4:])

    angle = position[:, :, None, None] * frequency
    torch.testing.assert_close(pairs(y), pairs(x) * torch.polar(torch.ones_like(angle), angle))


def test_rotary_sees_the_distance_only() -> None:
    """Far out too: float32 inputs at position 10^6 keep float32 accuracy."""
    q, k = torch.randn(2, 1, 1, 1, 64)
    near, far = (
        (rotary(torch.tensor([[start + 3]]), q)[0] * rotary(torch.tensor([[start]]), k)[0]).sum()
        for start, rotary in ((0, Rotary(64)), (1_000_000, Rotary(64)))
    )
    assert (near - far).abs() <= 64 * torch.finfo(torch.float32).eps * q.norm() * k.norm()


def test_rotary_needs_an_even_size() -> None:
    with pytest.raises(ValueError, match="head size: got 7"):
        Rotary(7)


def test_swiglu() -> None:
    mlp, x = SwiGLU(4, 6), torch.randn(2, 3, 4)
    gate, up = mlp.in_proj.weight.split(6)
    torch.testing.assert_close(mlp(x), (F.silu(x @ gate.T) * (x @ up.T)) @ mlp.out_proj.weight.T)


def test_positions() -> None:
    x = torch.zeros(2, 4, 1)
    offset, mask = torch.tensor([10, 20]), torch.tensor([[False, False, True, True], [True] * 4])
    for arguments, wanted, after in (
        ((None, None, None), [[0, 1, 2, 3]], [4, 4]),
        ((offset, None, None), [[10, 11, 12, 13], [20, 21, 22, 23]], [14, 24]),
        ((None, mask, None), [[0, 0, 0, 1], [0, 1, 2, 3]], [2, 4]),
        ((offset, mask, None), [[10, 10, 10, 11], [20, 21, 22, 23]], [12, 24]),
    ):
        position, end = positions(x, *arguments)
        assert position.tolist() == wanted
        assert end.tolist() == after
    cu_seqlens = torch.tensor([0, 1, 1, 4], dtype=torch.int32)
    position, end = positions(x[:1], torch.tensor([7, 8, 9]), None, cu_seqlens)
    assert position.tolist() == [[7, 9, 10, 11]]
    assert end.tolist() == [8, 8, 12]
    assert sequence_of_token(cu_seqlens, 4).tolist() == [0, 2, 2, 2]


def test_left_justify_is_a_stable_permutation() -> None:
    mask = torch.rand(20, 9) < torch.linspace(0, 1, 20)[:, None]
    order, place = left_justify(mask)
    assert torch.equal(order.gather(1, place), torch.arange(9).expand(20, 9))
    assert torch.equal(order, mask.int().argsort(dim=1, stable=True))


def test_divide_names_the_nearest() -> None:
    assert divide("num_heads", 4, 64, "d_model") == 16
    with pytest.raises(ValueError, match=r"num_heads: got 5, wanted .* divides d_model=64; the nearest is 4"):
        divide("num_heads", 5, 64, "d_model")
    with pytest.raises(ValueError, match=r"into even sizes; the nearest is 32"):
        divide("num_heads", 64, 64, "d_model", even=True)
    with pytest.raises(ValueError, match=r"divides d_model=65 into even sizes$"):
        divide("num_heads", 1, 65, "d_model", even=True)


def test_default_heads() -> None:
    assert [default_heads(total, 64) for total in (64, 96, 128, 100, 2048, 65)] == [1, 2, 2, 2, 32, 1]


def test_time_steps_are_log_uniform() -> None:
    step = F.softplus(time_step_bias(20_000))
    assert step.min() >= 1e-3 * (1 - 1e-4)
    assert step.max() <= 1e-1 * (1 + 1e-4)
    middle = math.log(1e-2)
    assert abs(step.log().mean().item() - middle) < 5 * math.log(100) / math.sqrt(12 * 20_000)
