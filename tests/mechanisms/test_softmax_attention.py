"""softmax_attention against an explicit softmax: cache, window, mask, packing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linattn import KVCache, SoftmaxAttention, softmax_attention
from linattn.testing import Case, Sizes, Subject


def drawn(B: int = 2, T: int = 20, G: int = 2, H: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    tensors = Case(Subject.of("softmax_attention"), Sizes(B, T, G, H, K=8, V=6), torch.float64).tensors()
    return tensors["q"], tensors["k"], tensors["v"]


def formula(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float | None = None) -> Tensor:
    """Weights [B, H, T, S] by hand; ``allowed`` broadcasts to them."""
    heads = q.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    logits = torch.einsum("bthk,bshk->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = logits.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshv->bthv", weights, v)


def behind(T: int, S: int) -> Tensor:
    return torch.arange(S - T, S)[:, None] - torch.arange(S)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_formula(causal: bool, window: int | None, scale: float | None) -> None:
    q, k, v = drawn()
    o, cache = softmax_attention(q, k, v, causal=causal, window=window, scale=scale)
    distance = behind(20, 20)
    allowed = (distance >= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        allowed = allowed & (distance.abs() < window)
    torch.testing.assert_close(o, formula(q, k, v, allowed, scale))
    assert torch.equal(cache.k, k)
    assert torch.equal(cache.v, v)


@pytest.mark.parametrize("window", [None, 4])
def test_the_cache(window: int | None) -> None:
    """Prefill, several tokens, then one by one."""
    q, k, v = drawn()
    whole, _ = softmax_attention(q, k, v, window=window)
    outputs, cache = [], None
    for start, end in [(0, 7), (7, 12), *((t, t + 1) for t in range(12, 20))]:
        o, cache = softmax_attention(q[:, start:end], k[:, start:end], v[:, start:end], window=window, state=cache)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)


@pytest.mark.parametrize("window", [None, 4])
def test_left_padded_equals_alone(window: int | None) -> None:
    q, k, v = drawn()
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :6] = False
    o, cache = softmax_attention(q, k, v, mask=mask, window=window)
    alone, _ = softmax_attention(q[1:, 6:], k[1:, 6:], v[1:, 6:], window=window)
    full, _ = softmax_attention(q[:1], k[:1], v[:1], window=window)
    torch.testing.assert_close(o[1:, 6:], alone)
    torch.testing.assert_close(o[:1], full)
    assert o.isfinite().all()
    q1, k1, v1 = (x[:, :1].flip(2) for x in (q, k, v))  # and one more token
    step, _ = softmax_attention(q1, k1, v1, state=cache, window=window)
    longer = [torch.cat([x[1:, 6:], y[1:]], 1) for x, y in ((q, q1), (k, k1), (v, v1))]
    torch.testing.assert_close(step[1:], softmax_attention(*longer, window=window)[0][:, -1:])


def test_packed_equals_separate_also_after_more_tokens() -> None:
    q, k, v = drawn(B=1)
    ends = [0, 5, 5, 6, 20]
    o, cache = softmax_attention(q, k, v, cu_seqlens=torch.tensor(ends))
    more = drawn(B=1, T=6)
    more_ends = [0, 1, 3, 3, 6]
    o2, cache2 = softmax_attention(*more, state=cache, cu_seqlens=torch.tensor(more_ends))
    assert cache2.k.shape[0] == 4
    for n in range(4):
        one, two = slice(ends[n], ends[n + 1]), slice(more_ends[n], more_ends[n + 1])
        joined = [torch.cat([x[:, one], y[:, two]], 1) for x, y in zip((q, k, v), more, strict=True)]
        if joined[0].shape[1]:
            alone, whole = softmax_attention(*joined)
            torch.testing.assert_close(torch.cat([o[:, one], o2[:, two]], 1), alone)
            assert cache2.mask is not None
            torch.testing.assert_close(cache2.k[n][cache2.mask[n]], whole.k[0])


def test_a_packed_cache_goes_on_as_a_batch() -> None:
    q, k, v = drawn(B=1)
    _, cache = softmax_attention(q, k, v, cu_seqlens=torch.tensor([0, 5, 20]))
    step = drawn(B=2, T=1)
    o, _ = softmax_attention(*step, state=cache)
    for n, part in enumerate((slice(0, 5), slice(5, 20))):
        joined = [torch.cat([x[:, part], y[n : n + 1]], 1) for x, y in zip((q, k, v), step, strict=True)]
        torch.testing.assert_close(o[n : n + 1], softmax_attention(*joined)[0][:, -1:])


def test_no_tokens() -> None:
    q, k, v = drawn()
    _, cache = softmax_attention(q, k, v)
    o, same = softmax_attention(q[:, :0], k[:, :0], v[:, :0], state=cache)
    assert o.shape == (2, 0, 4, 6)
    assert torch.equal(same.k, cache.k)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"backend": "chunked"}, "backend"),
        ({"mode": "recurrent"}, "mode"),
        ({"window": 0}, "window"),
        ({"mask": torch.ones(2, 20)}, "mask"),
        ({"mask": torch.ones(2, 19, dtype=torch.bool)}, "mask"),
        ({"state": (torch.zeros(1), torch.zeros(1))}, "state"),
        ({"state": KVCache(torch.zeros(2, 3, 2, 8), torch.zeros(2, 3, 2, 6))}, "state.k"),
        ({"k": torch.zeros(2, 20, 3, 8, dtype=torch.float64)}, "v"),
        ({"q": torch.zeros(2, 20, 3, 8, dtype=torch.float64)}, "k"),
        ({"q": torch.zeros(2, 20, 4, 8)}, "q"),
        ({"cu_seqlens": torch.tensor([0, 20])}, "cu_seqlens"),
    ],
)
def test_bad_input(change: dict[str, object], name: str) -> None:
    q, k, v = drawn()
    with pytest.raises(ValueError, match=f"^{name}: got "):
        softmax_attention(**({"q": q, "k": k, "v": v} | change))  # type: ignore[arg-type]


def test_without_positions_only_the_set_of_earlier_tokens_counts() -> None:
    """NoPE: the last token's output does not change with the order of those before it; with any rotation it does."""
    torch.manual_seed(0)
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    mixed = torch.cat([x[:, :7].flip(1), x[:, 7:]], 1)
    for fraction, same in ((0.0, True), (0.25, False), (1.0, False)):
        layer = SoftmaxAttention(16, num_heads=2, rope_fraction=fraction).double()
        assert torch.allclose(layer(x)[0][:, -1], layer(mixed)[0][:, -1], rtol=0, atol=1e-12) == same


def test_a_size_of_heads_of_its_own() -> None:
    layer = SoftmaxAttention(16, head_dim=6)
    assert (layer.num_heads, layer.head_dim, layer.out_proj.in_features) == (2, 6, 12)
    assert layer(torch.randn(1, 3, 16))[0].shape == (1, 3, 16)
    assert SoftmaxAttention(15, num_heads=5, rope_fraction=0).head_dim == 3  # odd sizes where nothing is turned


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rope_fraction": 0.6, "head_dim": 5}, "rope_fraction: got 0.6, wanted an even part of head_dim=5"),
        ({"rope_fraction": 1.5}, "rope_fraction: "),
        ({"rope_fraction": -0.5}, "rope_fraction: "),
        ({"head_dim": 0}, "head_dim: got 0"),
        ({"head_dim": 4, "num_heads": 0}, "num_heads: got 0"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads: got 3"),
    ],
)
def test_bad_options_of_the_layer(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        SoftmaxAttention(16, **options)
