"""The laws that every mechanism's layer keeps, over the registry: split = whole, padded = alone, packed = separate, ...

Values are compared in float64 to half its digits: rounding takes far fewer, a mistake far more.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from linattn import MLSTM, registry, state

D = 16
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in registry.names(composite=True)),
    ("softmax_attention", {"num_heads": 4, "num_kv_heads": 2, "window": 3, "qk_norm": True}),
    ("softmax_attention", {"num_heads": 2, "window": 1}),
    ("softmax_attention", {"head_dim": 8, "rope_fraction": 0.25, "output_gate": True, "qk_norm": True, "window": 4}),
    ("softmax_attention", {"rope_fraction": 0.0}),
    ("linear_attention", {"feature_map": "relu", "normalize": False, "conv_size": 0}),
    ("linear_attention", {"feature_map": "favor", "feature_map_options": {"features": 12}}),
    ("linear_attention", {"feature_map": "cosformer", "feature_map_options": {"max_length": 32}, "num_heads": 2}),
    ("linear_attention", {"feature_map": "taylor", "head_k_dim": 3}),
    ("linear_attention", {"feature_map": "dpfp", "normalize": False}),
    ("linear_attention", {"feature_map": "rebased", "head_k_dim": 3}),
    ("linear_attention", {"feature_map": "t2r", "num_heads": 2}),
    ("linear_attention", {"feature_map": "hedgehog", "num_heads": 2}),
    ("parallel_heads", {"linear": "mamba2", "window": 3, "attention_options": {"num_kv_heads": 1}}),
    ("mamba", {"d_state": 5, "dt_rank": 3, "bias": True, "conv_bias": False, "norm_dt_b_c": True}),
    ("mamba2", {"num_heads": 4, "num_groups": 2, "d_state": 8}),
    ("delta_rule", {"allow_neg_eigval": True, "conv_size": 2}),
    ("gated_delta_rule", {"num_heads": 2, "num_v_heads": 4, "head_dim": 4}),
    ("rwkv5", {"version": "5.0", "num_heads": 2}),
    ("rwkv5", {"version": "5.1", "num_heads": 4}),
    ("rwkv6", {"num_heads": 2, "mix_rank": 3, "decay_rank": 5}),
    ("rwkv7", {"num_heads": 2, "decay_rank": 3, "gate_rank": 5}),
    ("gated_delta_product", {"num_householder": 3, "forget_gate": False, "num_heads": 2, "num_v_heads": 4}),
    ("kimi_delta_attention", {"num_heads": 2, "num_v_heads": 4, "head_dim": 4, "expand_v": 2, "lower_bound": -5.0}),
    ("mlstm", {"num_heads": 2, "input_gate": "sigmoid", "gate_soft_cap": None}),
    ("hgrn", {"conv_size": 3, "layer_index": 1, "num_layers": 2}),
    ("hgrn2", {"num_heads": 4, "conv_size": 3, "layer_index": 1, "num_layers": 2}),
    ("rg_lru", {"num_heads": 4, "expand": 1.5, "conv_size": 2}),
    ("lightning_attention", {"num_heads": 4, "head_dim": 6, "layer_index": 1, "num_layers": 3}),
    ("mamba3", {"num_heads": 4, "num_groups": 2, "d_state": 10, "rope_fraction": 1.0, "heavy_tail": True}),
    ("mamba3", {"num_heads": 4, "d_state": 8, "mimo_rank": 3, "out_norm": True}),
]
IDS = [name + "".join(f"-{key}={value}" for key, value in options.items()) for name, options in VARIANTS]
every_layer = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)


def make(name: str, options: dict[str, Any], d_model: int = D) -> nn.Module:
    torch.manual_seed(0)
    layer: nn.Module = registry.get(name).layer(d_model, **options).double()
    return awake(layer)


def awake(layer: nn.Module) -> nn.Module:
    """The layer with noise in the parameters that start at zero, as RWKV's output does: it would hide the others."""
    for parameter in layer.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    if isinstance(layer, MLSTM):  # its input gates start shut, where the denominator is 1 and n of no effect
        nn.init.constant_(layer.gate_bias[: layer.num_heads], 2)
    return layer


def tokens(batch: int, length: int, d_model: int = D) -> Tensor:
    generator = torch.Generator().manual_seed(batch * 1000 + length)
    return torch.randn(batch, length, d_model, dtype=torch.float64, generator=generator)


def assert_close(got: Any, wanted: Any) -> None:
    """Trees of tensors agree to half the digits of their dtype."""
    got, wanted = pytree.tree_leaves(got), pytree.tree_leaves(wanted)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        if isinstance(b, Tensor) and b.is_floating_point():
            assert a.shape == b.shape
            bound = torch.finfo(b.dtype).eps ** 0.5
            assert (a - b).abs().max().item() <= bound * b.abs().max().item() if b.numel() else True
        else:
            assert torch.equal(a, b) if isinstance(b, Tensor) else a == b


def row(tree: Any, n: int) -> Any:
    return state.select(tree, torch.tensor([n]))


@every_layer
def test_any_split_equals_the_whole(name: str, options: dict[str, Any]) -> None:
    layer, x = make(name, options), tokens(2, 9)
    whole, end = layer(x)
    for split in range(1, 9):
        first, middle = layer(x[:, :split])
        second, last = layer(x[:, split:], middle)
        assert_close(torch.cat([first, second], 1), whole)
        assert_close(last, end)


@every_layer
def test_one_token_at_a_time_equals_the_whole(name: str, options: dict[str, Any]) -> None:
    layer, x = make(name, options), tokens(2, 9)
    whole, end = layer(x)
    outputs, now = [], None
    for t in range(9):
        y, now = layer(x[:, t : t + 1], now)
        outputs.append(y)
    assert_close(torch.cat(outputs, 1), whole)
    assert_close(now, end)


@every_layer
def test_padded_equals_alone(name: str, options: dict[str, Any]) -> None:
    """From nothing, and from the state of other padded rows; what stands in the padding does not matter."""
    layer, lengths = make(name, options), ((7, 3, 1), (2, 5, 4))
    alone: list[Any] = [None] * 3
    padded: Any = None
    for part in lengths:
        longest = max(part)
        x = tokens(3, longest)
        mask = torch.arange(longest) >= longest - torch.tensor(part)[:, None]
        y, padded = layer(x.masked_fill(~mask[..., None], torch.nan), padded, mask=mask)
        for n, length in enumerate(part):
            y_alone, alone[n] = layer(x[n : n + 1, longest - length :], alone[n])
            assert_close(y[n : n + 1, longest - length :], y_alone)
    x = tokens(3, 1)
    y, _ = layer(x, padded)
    assert_close(y, torch.cat([layer(x[n : n + 1], alone[n])[0] for n in range(3)]))


@every_layer
def test_packed_equals_separate(name: str, options: dict[str, Any]) -> None:
    layer, lengths = make(name, options), ((5, 1, 0, 3, 2), (1, 0, 4, 2, 2))
    alone: list[Any] = [None] * 5
    packed: Any = None
    for part in lengths:
        x = tokens(1, sum(part))
        cu_seqlens = torch.tensor([0, *part]).cumsum(0)
        y, packed = layer(x, packed, cu_seqlens=cu_seqlens)
        for n, length in enumerate(part):
            if length:
                start = int(cu_seqlens[n])
                y_alone, alone[n] = layer(x[:, start : start + length], alone[n])
                assert_close(y[:, start : start + length], y_alone)
    for n in range(5):
        x = tokens(1, 2)
        assert_close(layer(x, row(packed, n))[0], layer(x, alone[n])[0])


@every_layer
def test_the_future_does_not_leak(name: str, options: dict[str, Any]) -> None:
    layer, x = make(name, options), tokens(1, 8).requires_grad_()
    y, _ = layer(x)
    other = torch.cat([x[:, :5], tokens(2, 3)[1:]], 1)
    assert_close(layer(other)[0][:, :5], y[:, :5])
    (grad,) = torch.autograd.grad(y[:, :5].square().sum(), x)
    assert grad[:, 5:].abs().max() == 0
    assert grad[:, :5].abs().sum(-1).min() > 0


@every_layer
def test_rows_do_not_depend_on_their_neighbours(name: str, options: dict[str, Any]) -> None:
    layer, x = make(name, options), tokens(3, 6)
    y, end = layer(x)
    for n in range(3):
        y_alone, alone = layer(x[n : n + 1])
        assert_close(y[n : n + 1], y_alone)
        assert_close(row(end, n), alone)


@every_layer
def test_the_state_is_a_value(name: str, options: dict[str, Any]) -> None:
    """No call changes the state it is given, and a state keeps no more memory alive than it needs."""
    layer = make(name, options)
    _, before = layer(tokens(2, 6))
    copy = state.fork(before)
    layer(tokens(2, 3), before)
    layer(tokens(2, 1), before)
    pairs = zip(pytree.tree_leaves(before), pytree.tree_leaves(copy), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
    memory = {t.untyped_storage() for t in pytree.tree_leaves(before) if isinstance(t, Tensor)}
    held = {storage.data_ptr(): storage.nbytes() for storage in memory}
    assert sum(held.values()) <= state.nbytes(before)


@every_layer
def test_gradients_reach_every_parameter_input_and_state(name: str, options: dict[str, Any]) -> None:
    layer, x = make(name, options), tokens(2, 7).requires_grad_()
    _, middle = layer(tokens(2, 5))
    middle = pytree.tree_map(
        lambda t: t.detach().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t, middle
    )
    leaves = [t for t in pytree.tree_leaves(middle) if isinstance(t, Tensor) and t.requires_grad and t.numel()]
    y, _ = layer(x, middle)
    y.square().sum().backward()
    for label, tensor in [("x", x), *layer.named_parameters(), *((f"state {n}", t) for n, t in enumerate(leaves))]:
        assert tensor.grad is not None, label
        assert tensor.grad.isfinite().all(), label
        assert tensor.grad.abs().max() > 0, label


@every_layer
def test_half_precision(name: str, options: dict[str, Any]) -> None:
    """Cast to bfloat16 or under autocast: near the float32 layer, recurrent states in float32."""
    layer, x = make(name, options).float(), tokens(2, 9).float()
    wanted, end = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast, _ = layer(x)
    under_autocast.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in layer.parameters())
    y, half = layer.bfloat16()(x.bfloat16())
    bound = torch.finfo(torch.bfloat16).eps ** 0.5 * wanted.abs().max()
    assert y.dtype == torch.bfloat16
    assert (under_autocast - wanted).abs().max() <= bound
    assert (y - wanted).abs().max() <= bound
    for a, b in zip(pytree.tree_leaves(half), pytree.tree_leaves(end), strict=True):
        cached = name in ("softmax_attention", "parallel_heads")
        if isinstance(a, Tensor) and a.is_floating_point() and a.dim() == 4 and not cached:
            assert a.dtype == b.dtype == torch.float32


@pytest.mark.parametrize("name", registry.names(composite=True))
@pytest.mark.parametrize("d_model", [64, 72, 80, 96, 100, 128, 192, 256, 320, 512, 768, 1000, 1024, 2048])
def test_defaults_fit_every_width(name: str, d_model: int) -> None:
    with torch.device("meta"):
        layer = registry.get(name).layer(d_model)
    inner = sum(p.numel() for p in layer.parameters()) / d_model**2
    assert 3 <= inner <= 12  # 4 d² are softmax attention's
    assert getattr(layer, "num_heads", 1) >= 1


@pytest.mark.parametrize("name", registry.names(composite=True))
@pytest.mark.parametrize("d_model", [1, 2, 7, 65, 100])
def test_defaults_run_or_say_what_is_wrong(name: str, d_model: int) -> None:
    try:
        layer = make(name, {}, d_model)
    except ValueError as error:
        assert any(word in str(error) for word in ("num_heads: ", "expand_k * d_model: "))  # noqa: PT017
        assert d_model % 2
    else:
        y, _ = layer(tokens(1, 3, d_model))
        assert y.isfinite().all()


@every_layer
def test_bad_input_is_named(name: str, options: dict[str, Any]) -> None:
    layer, x = make(name, options), tokens(2, 4)
    _, end = layer(x)
    mask, cu_seqlens = torch.ones(2, 4, dtype=torch.bool), torch.tensor([0, 4])
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((x[..., :-1],), {}, "x: .*d_model=16"),
        ((x[0],), {}, "x: "),
        ((x,), {"mask": mask.long()}, "mask: "),
        ((x,), {"mask": mask[:, :3]}, "mask: "),
        ((x,), {"cu_seqlens": cu_seqlens}, "cu_seqlens: "),
        ((x[:1],), {"cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens: .*T=4"),
        ((x[:1],), {"cu_seqlens": torch.tensor([0, 3, 2, 4])}, "cu_seqlens: got 2 after 3"),
        ((x[:1],), {"cu_seqlens": cu_seqlens, "mask": mask[:1]}, "mask: "),
        ((x, x), {}, "state: got Tensor"),
        ((x[:1], end), {}, "state: .*2 sequences, wanted 1"),
    ]
    for positional, named, words in cases:
        with pytest.raises(ValueError, match=words):
            layer(*positional, **named)


HEADED = [
    name
    for name in registry.names(composite=True)
    if "num_heads" in inspect.signature(registry.get(name).layer).parameters
]


# Their heads need not fill d_model.
FREE_HEADS = ("gated_delta_rule", "gated_delta_product", "log_linear_gated_delta_rule")


@pytest.mark.parametrize("name", HEADED)
def test_sizes_that_do_not_divide_name_the_nearest(name: str) -> None:
    if name not in FREE_HEADS:
        with pytest.raises(ValueError, match=r"num_heads: got 7, .*; the nearest is 8"):
            registry.get(name).layer(64, num_heads=7)
    with pytest.raises(ValueError, match="num_heads: got 0"):
        registry.get(name).layer(64, num_heads=0)


# torch.compile makes an instance of every autograd.Function, which torch warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "compiler"),
    [
        *((name, "aot_eager") for name in registry.names(composite=True)),
        pytest.param("gated_delta_rule", "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiles_whole(name: str, compiler: str) -> None:
    torch.compiler.reset()  # layers share the code of a mixer's forward, and a graph a code object is limited
    layer, x = make(name, {}), tokens(2, 9).requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend=compiler)
    y, end = layer(x)
    got, got_end = compiled(x)
    assert_close(got, y)
    assert_close(got_end, end)
    (wanted,) = torch.autograd.grad(y.square().sum(), x)
    (grad,) = torch.autograd.grad(got.square().sum(), x)
    assert_close(grad, wanted)
