"""Linear attention: softmax(Q K^T) V with the softmax replaced by a product of features.

    S_t = S_{t-1} + phi(k_t) v_t^T,  z_t = z_{t-1} + phi(k_t),  o_t = S_t^T phi(q_t) / (z_t^T phi(q_t))

Non-causal: the same with the sums over the whole sequence, Q (K^T V) / Q (K^T 1).
Source: Katharopoulos et al., "Transformers are RNNs", arXiv 2006.16236.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn import _checks, engine
from linattn.engine import NormalizedState
from linattn.layers.convolution import ShortConvolution
from linattn.layers.feature_maps import AnyMap, FeatureMap, apply, create
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer, mask_gate
from linattn.layers.norms import RMSNorm
from linattn.layers.sequences import positions
from linattn.layers.sizes import default_heads, divide
from linattn.recurrence import KEY, QUERY, VALUE, Normalizer, Recurrence
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(normalizer=Normalizer.SUM)
PLAIN = Recurrence()


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | AnyMap = "elu",
    normalize: bool = True,
    causal: bool = True,
    scale: float | None = None,
    position: Tensor | None = None,
    state: Tensor | NormalizedState | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor | NormalizedState]:
    """o_t = S_t^T phi(q_t) / max(|z_t^T phi(q_t)|, 1e-6), S_t and z_t the sums of phi(k) v^T and phi(k) up to t.

    Args:
        q, k: [B, T, G, K]; v: [B, T, H, V], G divides H. One floating dtype.
        feature_map: phi: "elu" (elu(x) + 1), "relu", "squared_relu", "identity", "taylor", "dpfp", "favor" or
            "cosformer"; a :class:`linattn.layers.FeatureMap` (those that learn have no name here); or a function of the
            last axis, which may change its size.
        normalize: divide by z. With features ≥ 0 every output is then a weighted mean of values and can't blow up.
        causal: False lets every token read the whole sequence (and the state it continues from).
        scale: only without ``normalize``, where it would cancel; None is K^-0.5, K the number of features.
        position: int64 [1 or B, T], each token's number in its sequence, for maps that need it ("cosformer"). None
            counts from 0, which a ``state`` forbids.
        state: [N, H, K, V], or NormalizedState(S, z) when normalised; K is the number of features.
        cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns o [B, T, H, V] in v's dtype and the final state.
    Raises ValueError naming the argument that does not fit. Source: arXiv 2006.16236.
    """
    if normalize and scale is not None:
        raise _checks.fail("scale", scale, "None with normalize=True, which would cancel it")
    sizes: dict[str, int] = {}
    _checks.tensor("v", v, "B T H V", sizes)
    _checks.tensor("q", q, "B T G K", sizes, v.dtype)
    _checks.tensor("k", k, "B T G K", sizes, v.dtype)
    phi = _feature_map(feature_map, sizes["G"], sizes["K"])
    if isinstance(phi, FeatureMap) and phi.positional and position is None:
        if state is not None:
            raise _checks.fail("position", "none", "the number of each token, to continue from a state")
        position, _ = positions(q, None, None, cu_seqlens)
    q, k = apply(phi, q, k, position, normalized=normalize)
    return _attend(q, k, v, normalize, causal, scale, state, cu_seqlens, mode, backend)


def _feature_map(feature_map: str | AnyMap, heads: int, size: int) -> AnyMap:
    """What the function is given, by name only where there is nothing to learn."""
    if not isinstance(feature_map, str):
        return feature_map
    phi = create(feature_map, heads, size)
    if isinstance(phi, FeatureMap) and list(phi.parameters()):
        raise _checks.fail(
            "feature_map",
            f"{feature_map!r}, which learns",
            f"a module that keeps its weights: linattn.layers.feature_maps.create({feature_map!r}, {heads}, {size})",
        )
    return phi


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normalize: bool,
    causal: bool,
    scale: float | None,
    state: Tensor | NormalizedState | None,
    cu_seqlens: Tensor | None,
    mode: str,
    backend: str,
) -> tuple[Tensor, Tensor | NormalizedState]:
    """Attention with q and k mapped. Features in float32 stay so where the engine divides in float32 anyway."""
    dtype = v.dtype
    if q.dtype != dtype:
        q, k, v = (q, k, v.to(q.dtype)) if normalize else (q.to(dtype), k.to(dtype), v)
    recurrence = RECURRENCE if normalize else PLAIN
    if causal:
        o, state = engine.matrix(
            recurrence, q, k, v, scale=1.0 if normalize else scale,
            state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
    else:
        o, state = _whole(recurrence, q, k, v, scale, state, cu_seqlens, mode, backend)
    return o.to(dtype), state


def _whole(
    recurrence: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    state: Tensor | NormalizedState | None,
    cu_seqlens: Tensor | None,
    mode: str,
    backend: str,
) -> tuple[Tensor, Tensor | NormalizedState]:
    """Non-causal: one pass for the final state, then every query reads it."""
    normalize = recurrence is RECURRENCE
    _, final = engine.matrix(
        recurrence, q, k, v, scale=1.0, state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend
    )
    S = torch.cat([final.S, final.z.unsqueeze(-1)], -1) if isinstance(final, NormalizedState) else final
    (B, T, G, K), H = q.shape, v.shape[2]
    queries = q.to(S.dtype).unflatten(2, (G, 1)).expand(B, T, G, H // G, K)
    rows = S.unflatten(1, (G, H // G))
    with torch.autocast(v.device.type, enabled=False):  # the state is float32 and is read in float32
        if cu_seqlens is None:
            o = torch.einsum("btgrk,bgrkv->btgrv", queries, rows).flatten(2, 3)
        else:
            cuts = enumerate(pairwise(_checks.boundaries(cu_seqlens, T)))
            parts = [torch.einsum("tgrk,grkv->tgrv", queries[0, start:end], rows[n]) for n, (start, end) in cuts]
            o = torch.cat(parts).flatten(1, 2).unsqueeze(0)
    if normalize:
        o = o[..., :-1] / o[..., -1:].abs().clamp_min(engine.EPSILON)
    else:
        o = o * (K**-0.5 if scale is None else scale)
    return o.to(v.dtype), final


class LinearAttentionState(NamedTuple):
    """Inputs that the short convolution still sees, [N, W-1, C], and the sums over the past.

    ``position`` [N] counts the tokens read, for feature maps that need it; None for others.
    """

    conv: Tensor
    recurrent: Tensor | NormalizedState
    position: Tensor | None = None


class LinearAttention(Mixer):
    """Linear attention; y = W_o RMSNorm(linear_attention(φ(q), φ(k), v)) with q, k, v = conv(W x), no biases.

    The mechanism of 2020 alone does not know the order of tokens; the short convolution gives it that of the nearest.

    Args:
        d_model: width of the input and output.
        num_heads: None takes heads of a size near 64.
        feature_map: φ: "elu" (elu(x) + 1), "relu", "squared_relu", "identity", "taylor" (Based), "dpfp", "favor"
            (Performer), "cosformer", "rebased", "t2r", "product", "hedgehog" (see :mod:`linattn.layers.feature_maps`),
            or a map of one's own.
        feature_map_options: options of the map, by name: ``{"features": 128}``.
        head_k_dim: size of a query or key head; None is that of a value head, for maps onto pairs of channels
            ("taylor", "rebased") at most the papers' 16.
        normalize: divide by the sum of weights.
        conv_size: width of the short convolution on q, k, v; 0 leaves it out.
        norm_eps: of the RMSNorm on each head's output.

    The state is a :class:`LinearAttentionState`. Raises ValueError naming the argument that does not fit.
    Source: arXiv 2006.16236; the norm on the output arXiv 2210.10340.
    """

    state_type = LinearAttentionState

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        feature_map: str | AnyMap = "elu",
        feature_map_options: Mapping[str, Any] | None = None,
        head_k_dim: int | None = None,
        normalize: bool = True,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        self.num_heads = default_heads(d_model, 64) if num_heads is None else num_heads
        self.head_dim = divide("num_heads", self.num_heads, d_model, "d_model")
        if head_k_dim is None:
            head_k_dim = min(self.head_dim, 16) if feature_map in ("taylor", "rebased") else self.head_dim
        if head_k_dim < 1:
            raise _checks.fail("head_k_dim", head_k_dim, "at least 1")
        self.head_k_dim, self.normalize = head_k_dim, normalize
        self.feature_map: AnyMap
        if isinstance(feature_map, str):
            self.feature_map = create(feature_map, self.num_heads, head_k_dim, **(feature_map_options or {}))
        elif feature_map_options:
            raise _checks.fail("feature_map_options", feature_map_options, "none for a map of one's own")
        else:
            self.feature_map = feature_map
        self.sizes = (self.num_heads * head_k_dim, self.num_heads * head_k_dim, d_model)
        self.in_proj = Linear(d_model, sum(self.sizes), bias=False)
        self.conv1d = ShortConvolution(sum(self.sizes), conv_size, activation=False)
        self.norm = RMSNorm(self.head_dim, eps=norm_eps)
        self.out_proj = Linear(d_model, d_model, bias=False)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, LinearAttentionState]:
        tail, recurrent, offset = (None, None, None) if state is None else state
        qkv, tail = self.conv1d(self.in_proj(x), tail, mask=mask, cu_seqlens=cu_seqlens)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in qkv.split(self.sizes, dim=-1))
        position = None
        if isinstance(self.feature_map, FeatureMap) and self.feature_map.positional:
            position, offset = positions(x, offset, mask, cu_seqlens)
        q, k = apply(self.feature_map, q, k, position, normalized=self.normalize)
        # Features of zero need not be zero, so padding is masked after the map.
        o, recurrent = _attend(
            q, mask_gate(k, mask), v, self.normalize, True, None, recurrent, cu_seqlens, mode, backend
        )
        return self.out_proj(self.norm(o).flatten(2)), LinearAttentionState(tail, recurrent, offset)


register(
    Mechanism(
        name="linear_attention",
        aliases=("linear",),
        title="Linear attention",
        recurrence=RECURRENCE,
        arguments=(QUERY, KEY, VALUE),
        function=linear_attention,
        layer=LinearAttention,
        equation="S_t = S_{t-1} + φ(k_t) v_tᵀ,  z_t = z_{t-1} + φ(k_t),  o_t = S_tᵀ φ(q_t) / z_tᵀ φ(q_t)",
        paper="Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention, arXiv 2006.16236",
        when="The plain formula, any feature map; non-causal use (images, graphs); memory without forgetting.",
    )
)
