"""Softmax attention: the O(N²) baseline, by torch's scaled_dot_product_attention, with a cache of keys and values.

    o_t = sum_s softmax_s(scale * q_t^T k_s) v_s,    s ≤ t when causal

Source: Vaswani et al., "Attention Is All You Need", arXiv 1706.03762.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import _checks
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer
from linattn.layers.norms import RMSNorm
from linattn.layers.rotary import Rotary
from linattn.layers.sequences import left_justify, positions, take
from linattn.layers.sizes import default_heads, divide
from linattn.recurrence import KEY, Argument
from linattn.registry import Mechanism, register


class KVCache(NamedTuple):
    """Keys [B, S, G, K] and values [B, S, G, V] of the S tokens so far; ``mask`` [B, S] is False at padding."""

    k: Tensor
    v: Tensor
    mask: Tensor | None = None

    @classmethod
    def concatenate(cls, caches: Sequence[KVCache]) -> KVCache:
        """The rows of several caches, those of fewer tokens padded on the left."""
        longest = max(cache.k.shape[1] for cache in caches)

        def padded(rows: list[Tensor]) -> Tensor:
            return torch.cat([F.pad(x, (0, 0) * (x.dim() - 2) + (longest - x.shape[1], 0)) for x in rows])

        k, v = padded([cache.k for cache in caches]), padded([cache.v for cache in caches])
        if all(cache.mask is None and cache.k.shape[1] == longest for cache in caches):
            return cls(k, v)
        seen = [x.k.new_ones(x.k.shape[:2], dtype=torch.bool) if x.mask is None else x.mask for x in caches]
        return cls(k, v, padded(seen))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool, window: int | None
) -> Tensor:
    """q [B, T, Hq, K] are the last T of the S tokens of k, v; mask [B, S] is True at real tokens."""
    T, S = q.shape[1], k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if mask is None and window is None and (not causal or T == 1 or S == T):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal and T > 1, scale=scale, enable_gqa=grouped)
        return o.transpose(1, 2)
    behind = torch.arange(S - T, S, device=q.device)[:, None] - torch.arange(S, device=q.device)
    allowed = torch.ones_like(behind, dtype=torch.bool)
    if causal:
        allowed = allowed & (behind >= 0)
    if window is not None:
        allowed = allowed & (behind.abs() < window)
    if mask is not None:  # a padded query still sees itself: a row of nothing would be NaN
        allowed = (allowed & mask[:, None, None, :]) | (behind == 0)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=grouped)
    return o.transpose(1, 2)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    state: KVCache | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, KVCache]:
    """o_t = sum_s softmax_s(scale * q_t^T k_s) v_s.

    Args:
        q: [B, T, Hq, K]; k: [B, T, G, K]; v: [B, T, G, V]; G divides Hq. One floating dtype.
        causal: s ≤ t. window: only |t - s| < window.
        mask: bool [B, T], True at real tokens; padded tokens are never attended to.
        scale: None is K^-0.5.
        state: the cache to continue from; it grows with every token. cu_seqlens: int [N+1], N packed sequences (B = 1).
        mode, backend: only "auto": torch's own kernels run it.

    Returns o [B, T, Hq, V] and the new cache (of packed sequences: N rows, padded on the left).
    Raises ValueError naming the argument that does not fit. Source: arXiv 1706.03762.
    """
    _checks.one_of("mode", mode, ("auto",))
    _checks.one_of("backend", backend, ("auto",))
    sizes: dict[str, int] = {}
    _checks.tensor("k", k, "B T G K", sizes)
    _checks.tensor("q", q, "B T Hq K", sizes, k.dtype)
    _checks.tensor("v", v, "B T G V", sizes, k.dtype)
    _checks.grouped("k", sizes["G"], sizes["Hq"])
    _checks.same_device({"k": k, "q": q, "v": v, "mask": mask, "cu_seqlens": cu_seqlens})
    if window is not None and window < 1:
        raise _checks.fail("window", window, "at least 1 token")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != k.shape[:2]):
        raise _checks.fail("mask", f"{mask.dtype} {list(mask.shape)}", f"bool {list(k.shape[:2])}")
    if cu_seqlens is not None:
        _checks.cu_seqlens_form(cu_seqlens, k.shape[0])
        if mask is not None:
            raise _checks.fail("mask", "a tensor", "none with cu_seqlens: packed rows have no padding")
        return _packed(q, k, v, causal, window, scale, state, cu_seqlens)
    if state is not None:
        _check_cache(state, k, v, k.shape[0])
        if state.mask is not None or mask is not None:
            parts = [(state.mask, state.k), (mask, k)]
            mask = torch.cat([m if m is not None else x.new_ones(x.shape[:2], dtype=torch.bool) for m, x in parts], 1)
        k, v = torch.cat([state.k, k], 1), torch.cat([state.v, v], 1)
    return _attend(q, k, v, mask, scale, causal, window), KVCache(k, v, mask)


def _check_cache(state: KVCache, k: Tensor, v: Tensor, rows: int) -> None:
    if not isinstance(state, KVCache):
        raise _checks.fail("state", type(state).__name__, "a KVCache")
    sizes = {"N": rows, "G": k.shape[2], "K": k.shape[3], "V": v.shape[3]}
    _checks.tensor("state.k", state.k, "N S G K", sizes, k.dtype)
    _checks.tensor("state.v", state.v, "N S G V", sizes, k.dtype)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None,
    state: KVCache | None, cu_seqlens: Tensor,
) -> tuple[Tensor, KVCache]:  # fmt: skip
    ends = _checks.boundaries(cu_seqlens, k.shape[1])
    if state is not None:
        _check_cache(state, k, v, len(ends) - 1)
    outputs, keys, values = [], [], []
    for n, (start, end) in enumerate(pairwise(ends)):
        kn, vn = k[:, start:end], v[:, start:end]
        if state is not None:
            seen = slice(None) if state.mask is None else state.mask[n]
            kn, vn = torch.cat([state.k[n][seen][None], kn], 1), torch.cat([state.v[n][seen][None], vn], 1)
        outputs.append(
            _attend(q[:, start:end], kn, vn, None, scale, causal, window) if end > start else q[:, :0, :, :0]
        )
        keys.append(kn[0])
        values.append(vn[0])
    longest = max(x.shape[0] for x in keys)
    pad = [(longest - x.shape[0], x.shape[0]) for x in keys]
    real = torch.tensor([[False] * p + [True] * n for p, n in pad], device=k.device)
    k, v = (torch.stack([F.pad(x, (0, 0, 0, 0, longest - x.shape[0], 0)) for x in xs]) for xs in (keys, values))
    return torch.cat([o for o in outputs if o.shape[1]], 1), KVCache(k, v, real)


class AttentionState(NamedTuple):
    """The cache, of the last window - 1 tokens where there is a window, and the tokens read by each sequence, [N]."""

    cache: KVCache
    position: Tensor


class SoftmaxAttention(Mixer):
    """Softmax attention with rotary embedding; y = W_o Attention(rope(W_q x), rope(W_k x), W_v x), no biases.

    With ``output_gate`` y = W_o (Attention(...) ⊙ σ(W_g x)). Qwen3-Next's layers are qk_norm, output_gate, head_dim 256
    and rope_fraction 0.25.

    Args:
        d_model: width of the input and output.
        num_heads: query heads; None takes heads of a size near 64, or as many of size head_dim as fill d_model.
        num_kv_heads: key and value heads, a divisor of num_heads (grouped-query attention); None is num_heads.
        head_dim: size of a head; None is d_model / num_heads.
        window: attend to the last ``window`` tokens only; None to all.
        qk_norm: RMSNorm on each query and key head before the rotation.
        output_gate: multiply what each head gives by a gate of its own for every channel (arXiv 2505.06708).
        rope_base: base of the rotary frequencies.
        rope_fraction: the part of each head, its first channels, that is rotated; 0 is no position at all (NoPE).
        norm_eps: of the RMSNorms of qk_norm.

    The state is an :class:`AttentionState`. ``mode`` and ``backend`` say how recurrences run; there is none here.
    Raises ValueError naming the argument that does not fit. Source: arXiv 1706.03762; RoPE arXiv 2104.09864.
    """

    state_type = AttentionState

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
        qk_norm: bool = False,
        output_gate: bool = False,
        rope_base: float = 10000.0,
        rope_fraction: float = 1.0,
        norm_eps: float = 1e-6,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        if head_dim is None:
            self.num_heads = default_heads(d_model, 64) if num_heads is None else num_heads
            self.head_dim = divide("num_heads", self.num_heads, d_model, "d_model", even=rope_fraction == 1)
        else:
            self.num_heads = max(d_model // max(head_dim, 1), 1) if num_heads is None else num_heads
            self.head_dim = head_dim
        for name, value in (("head_dim", self.head_dim), ("num_heads", self.num_heads)):
            if value < 1:
                raise _checks.fail(name, value, "at least 1")
        self.rotary_dim = round(self.head_dim * rope_fraction)
        if not 0 <= rope_fraction <= 1 or self.rotary_dim % 2:
            raise _checks.fail("rope_fraction", rope_fraction, f"an even part of head_dim={self.head_dim}, from 0 to 1")
        self.num_kv_heads = self.num_heads if num_kv_heads is None else num_kv_heads
        divide("num_kv_heads", self.num_kv_heads, self.num_heads, "num_heads")
        if window is not None and window < 1:
            raise _checks.fail("window", window, "at least 1 token")
        self.window = window
        self.split = (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads * output_gate)
        self.in_proj = Linear(d_model, sum(self.split) * self.head_dim, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else None
        self.rotary = Rotary(self.rotary_dim, rope_base) if self.rotary_dim else None
        self.out_proj = Linear(self.num_heads * self.head_dim, d_model, bias=False)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, AttentionState]:
        cache, offset = (None, None) if state is None else state
        q, k, v, gate = self.in_proj(x).unflatten(-1, (-1, self.head_dim)).split(self.split, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        position, offset = positions(x, offset, mask, cu_seqlens)
        if self.rotary is not None:
            q, k = self._rotate(position, q, k)
        if self.window is not None and cache is not None and cu_seqlens is None:
            cache, k, v, mask = _close_gaps(cache, k, v, mask)
        k, v = k.contiguous(), v.contiguous()  # no views into the projection, which the cache would keep alive
        o, cache = softmax_attention(q, k, v, window=self.window, mask=mask, state=cache, cu_seqlens=cu_seqlens)
        if self.window is not None:
            start = max(cache.k.shape[1] - self.window + 1, 0)
            seen = None if cache.mask is None else cache.mask[:, start:].clone()
            cache = KVCache(cache.k[:, start:].clone(), cache.v[:, start:].clone(), seen)
        if gate.shape[2]:
            o = o * gate.sigmoid()
        return self.out_proj(o.flatten(2)), AttentionState(cache, offset)

    def _rotate(self, position: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        assert self.rotary is not None
        if self.rotary_dim == self.head_dim:
            return self.rotary(position, *tensors)
        parts = [x.split((self.rotary_dim, self.head_dim - self.rotary_dim), dim=-1) for x in tensors]
        turned = self.rotary(position, *(first for first, _ in parts))
        return tuple(torch.cat([x, rest], -1) for x, (_, rest) in zip(turned, parts, strict=True))


def _close_gaps(
    cache: KVCache, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[KVCache, Tensor, Tensor, Tensor | None]:
    """Move padding to the left of cached tokens, for a window counts places, not tokens."""
    if mask is None:
        return cache, k, v, None
    past = cache.k.shape[1]
    seen = mask.new_ones(mask.shape[0], past) if cache.mask is None else cache.mask
    order, _ = left_justify(torch.cat([seen, mask], 1))
    keys, values, real = (take(torch.cat(pair, 1), order) for pair in ((cache.k, k), (cache.v, v), (seen, mask)))
    return KVCache(keys[:, :past], values[:, :past], real[:, :past]), keys[:, past:], values[:, past:], real[:, past:]


register(
    Mechanism(
        name="softmax_attention",
        aliases=("softmax", "attention"),
        title="Softmax attention (baseline)",
        recurrence=None,
        arguments=(
            Argument("q", "B T H K", meaning="queries"),
            KEY,
            Argument("v", "B T G V", meaning="values"),
        ),
        function=softmax_attention,
        layer=SoftmaxAttention,
        equation="o_t = Σ_s softmax_s(scale · q_tᵀ k_s) v_s,  s ≤ t",
        paper="Attention Is All You Need, arXiv 1706.03762",
        when="The baseline, and the few layers of a hybrid that need exact long-range retrieval; O(N²), growing cache.",
    )
)
