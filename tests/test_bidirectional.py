"""Both directions: against explicit N×N matrices in float64; packed = separate, padded = alone, turned = turned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import linattn
from linattn import Bidirectional, bidirectional, registry
from linattn.bidirectional import reverse
from linattn.testing import Case, Sizes, Subject

T = 9
RECURRENT = [name for name in registry.names() if name != "softmax_attention"]
every_mechanism = pytest.mark.parametrize("name", RECURRENT)


def drawn(name: str, B: int = 2, length: int = T, gates: str = "strong") -> dict[str, Tensor]:
    sizes = Sizes(B, length, G=2, H=4, K=4, V=3)
    return Case(Subject.of(name), sizes, torch.float64, gates).tensors()


def in_time(name: str) -> set[str]:
    return {x.name for x in registry.get(name).arguments if "T" in x.dims.split()}


def part(name: str, tensors: dict[str, Tensor], row: int, where: slice | Tensor) -> dict[str, Tensor]:
    """Those tokens of one row, alone."""
    timed = in_time(name)
    return {n: x[row : row + 1, where] if n in timed else x for n, x in tensors.items()}


def matrix_of(name: str, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The papers' weights of values, [B, H, T, T]: of earlier tokens and the token itself, of later ones and itself."""
    heads = x["v"].shape[2] if "v" in x else x["x"].shape[2]
    q, k = (x[n].repeat_interleave(heads // x[n].shape[2], 2) for n in (("C", "B") if name == "mamba2" else ("q", "k")))
    B, _, H, K = q.shape
    gate = torch.zeros(B, T, H, K, dtype=q.dtype)
    if name == "retention":
        gate = gate + x["decay"][:, None]
    elif name == "gated_linear_attention":
        gate = gate + x["g"]
    elif name == "mamba2":
        gate, k = gate + (x["dt"] * x["A"])[..., None], k * x["dt"][..., None]
    elif name == "gated_delta_rule":
        gate = gate + x["g"][..., None]
    scale = 1.0 if name == "mamba2" else K**-0.5
    both = []
    for times in (range(T), range(T - 1, -1, -1)):
        weights = torch.zeros(B, H, T, T, dtype=q.dtype)
        for b in range(B):
            for h in range(H):
                for s in times:
                    write = k[b, s, h]
                    if name == "gated_delta_rule":
                        write = x["beta"][b, s, h] * write
                    weights[b, h, s, s] = scale * q[b, s, h] @ write
                    for t in times[times.index(s) + 1 :]:
                        write = gate[b, t, h].exp() * write
                        if name == "gated_delta_rule":
                            key = k[b, t, h]
                            write = write - x["beta"][b, t, h] * key * (key @ write)
                        weights[b, h, t, s] = scale * q[b, t, h] @ write
        both.append(weights)
    return both[0], both[1]


@pytest.mark.parametrize("name", ["retention", "gated_linear_attention", "mamba2", "gated_delta_rule"])
@pytest.mark.parametrize("once", [True, False])
def test_the_matrix(name: str, once: bool) -> None:
    x = drawn(name)
    forwards, backwards = matrix_of(name, x)
    weights = forwards + backwards - once * torch.diag_embed(forwards.diagonal(dim1=-2, dim2=-1))
    values = x["x"] if name == "mamba2" else x["v"]
    wanted = torch.einsum("bhts,bshv->bthv", weights, values)
    if name == "mamba2":
        wanted = wanted + (2 - once) * x["D"][:, None] * values
    torch.testing.assert_close(bidirectional(name, **x, diagonal_once=once), wanted)


@pytest.mark.parametrize("name", ["retention", "gated_linear_attention"])
def test_the_decay_is_that_of_the_distance(name: str) -> None:
    x = drawn(name)
    decay = torch.tensor([-0.1, -0.2, -0.5, -2.0], dtype=torch.float64)
    gate = {"decay": decay} if name == "retention" else {"g": decay[:, None].expand(2, T, 4, 4)}
    distance = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    q, k = (x[n].repeat_interleave(2, 2) for n in "qk")
    weights = torch.einsum("bthk,bshk->bhts", q, k) / 2 * (decay[:, None, None] * distance).exp()
    wanted = torch.einsum("bhts,bshv->bthv", weights, x["v"])
    torch.testing.assert_close(bidirectional(name, **(x | gate), diagonal_once=True), wanted)


@pytest.mark.parametrize("normalize", [True, False])
def test_linear_attention_is_exact(normalize: bool) -> None:
    x = drawn("linear_attention")
    q, k = (F.elu(x[n]).repeat_interleave(2, 2) + 1 for n in "qk")
    weights = torch.einsum("bthk,bshk->bhts", q, k)
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights / 2
    wanted = torch.einsum("bhts,bshv->bthv", weights, x["v"])
    torch.testing.assert_close(bidirectional("linear", **x, normalize=normalize), wanted)
    mask = torch.tensor([[False] * 3 + [True] * 6, [True] * 9])
    padded = bidirectional("linear", **x, normalize=normalize, mask=mask)
    alone = bidirectional("linear", **part("linear_attention", x, 0, slice(3, T)), normalize=normalize)
    torch.testing.assert_close(padded[:1, 3:], alone)


@every_mechanism
def test_packed_equals_separate(name: str) -> None:
    lengths = [3, 0, 1, 5]
    x = drawn(name, B=1)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    o = bidirectional(name, **x, cu_seqlens=ends)
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        if end > start:
            torch.testing.assert_close(o[:, start:end], bidirectional(name, **part(name, x, 0, slice(start, end))))


@every_mechanism
def test_masked_equals_alone(name: str) -> None:
    """Padding on the left, and anywhere; what stands in it does not matter."""
    x = drawn(name, B=3)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [1, 0, 1, 1, 0, 0, 1, 1, 0]]).bool()
    spoilt = {
        n: t.masked_fill(~mask.view(3, T, *[1] * (t.dim() - 2)), torch.nan) if n in in_time(name) else t
        for n, t in x.items()
    }
    o = bidirectional(name, **spoilt, mask=mask)
    assert not o[~mask].any()
    for row in range(3):
        torch.testing.assert_close(o[row : row + 1, mask[row]], bidirectional(name, **part(name, x, row, mask[row])))


@every_mechanism
def test_a_turned_sequence_gives_a_turned_output_and_its_gradients(name: str) -> None:
    x = {n: t.requires_grad_() for n, t in drawn(name).items()}
    turned = {n: t.flip(1) if n in in_time(name) else t for n, t in x.items()}
    o, back = bidirectional(name, **x), bidirectional(name, **turned).flip(1)
    torch.testing.assert_close(back, o)
    random = torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(0))
    grads = [torch.autograd.grad(y, list(x.values()), random, allow_unused=True) for y in (o, back)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@every_mechanism
def test_what_a_token_reads_of_itself_counts_once(name: str) -> None:
    """Its value's weight in its own output is that of one direction; ratios can't be shared out and say so."""
    x = drawn(name)
    value = "v" if "v" in x else "x"
    x[value].requires_grad_()
    if name in ("mlstm", "rwkv4"):
        with pytest.raises(ValueError, match=r"^diagonal_once: "):
            bidirectional(name, **x, diagonal_once=True)
    elif name != "linear_attention":
        one_way, both = registry.get(name).function(**x)[0], bidirectional(name, **x, diagonal_once=True)
        for t in (0, 4, T - 1):
            weights = [
                torch.autograd.grad(o[:, t].sum(), x[value], retain_graph=True)[0][:, t] for o in (one_way, both)
            ]
            torch.testing.assert_close(*weights)
        packed = {n: y[:1].detach() if n in in_time(name) else y for n, y in x.items()}
        ends = torch.tensor([0, 1, 1, T])
        alone = [bidirectional(name, **part(name, packed, 0, s), diagonal_once=True) for s in (slice(1), slice(1, T))]
        torch.testing.assert_close(
            bidirectional(name, **packed, cu_seqlens=ends, diagonal_once=True), torch.cat(alone, 1)
        )


def test_a_function_and_arguments_by_place() -> None:
    x = drawn("gated_linear_attention")
    wanted = bidirectional("gla", **x)
    assert torch.equal(bidirectional(linattn.gated_linear_attention, *x.values()), wanted)
    assert torch.equal(bidirectional(linattn.get("gla"), *x.values(), backend="chunked", mode="chunkwise"), wanted)


@pytest.mark.parametrize(
    ("mechanism", "change", "words"),
    [
        ("softmax", {}, "mechanism: .*causal=False"),
        (linattn.softmax_attention, {}, "mechanism: .*causal=False"),
        ("parallel_heads", {}, "mechanism: .*recurrence"),
        (F.relu, {}, "mechanism: got relu"),
        ("gla", {"state": torch.zeros(2, 4, 4, 3)}, "state: "),
        ("gla", {"mask": torch.ones(2, T)}, "mask: "),
        ("gla", {"mask": torch.ones(2, T + 1, dtype=torch.bool)}, "mask: "),
        ("gla", {"cu_seqlens": torch.tensor([0, T])}, "cu_seqlens: "),
        ("gla", {"k": torch.zeros(2, T - 1, 2, 4)}, "k: "),
        ("gla", {"g": None}, "g: "),
    ],
)
def test_bad_input(mechanism: Any, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bidirectional(mechanism, **(drawn("gated_linear_attention") | change))
    with pytest.raises(TypeError, match="sclae"):
        bidirectional("gla", **drawn("gated_linear_attention"), sclae=1.0)


def tokens(batch: int, length: int = T) -> Tensor:
    return torch.randn(batch, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["gated_delta_rule", "mamba2", "linear_attention", "retention", "parallel_heads"])
def test_the_layer(name: str, shared: bool) -> None:
    layer, x = Bidirectional(name, 16, shared_weights=shared).double(), tokens(2)
    assert (layer.forwards is layer.backwards) == shared
    y = layer(x)
    torch.testing.assert_close(y, layer.forwards(x)[0] + layer.backwards(x.flip(1))[0].flip(1))
    mask = torch.tensor([[False] * 4 + [True] * 5, [True] * 9])
    padded = layer(x.masked_fill(~mask[..., None], torch.nan), mask=mask)
    torch.testing.assert_close(padded[:1, 4:], layer(x[:1, 4:]))
    torch.testing.assert_close(padded[1:], y[1:])
    packed = layer(x[:1], cu_seqlens=torch.tensor([0, 3, 3, 9]))
    torch.testing.assert_close(packed, torch.cat([layer(x[:1, :3]), layer(x[:1, 3:])], 1))
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())


def test_the_layer_of_ones_own_class_and_what_it_refuses() -> None:
    layer = Bidirectional(linattn.DeltaNet, 16, num_heads=2)
    assert isinstance(layer.backwards, linattn.DeltaNet)
    assert layer.backwards.num_heads == 2
    for softmax in ("softmax_attention", linattn.SoftmaxAttention):
        with pytest.raises(ValueError, match=r"layer: .*causal=False"):
            Bidirectional(softmax, 16)
    with pytest.raises(TypeError, match="state"):
        layer(tokens(1).float(), state=None)


def test_reverse_leaves_padding_where_it_is() -> None:
    x, mask = torch.arange(10).view(2, 5), torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 0, 1]]).bool()
    assert reverse(x, mask=mask).tolist() == [[0, 1, 4, 3, 2], [9, 6, 7, 8, 5]]
    assert reverse(x[:1], cu_seqlens=torch.tensor([0, 2, 2, 5])).tolist() == [[1, 0, 4, 3, 2]]
    assert reverse(x).tolist() == [[4, 3, 2, 1, 0], [9, 8, 7, 6, 5]]
