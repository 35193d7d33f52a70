"""Linear attention: softmax(Q K^T) V with the softmax replaced by a product of features.

    S_t = S_{t-1} + phi(k_t) v_t^T,  z_t = z_{t-1} + phi(k_t),  o_t = S_t^T phi(q_t) / (z_t^T phi(q_t))

Non-causal: the same with the sums over the whole sequence, Q (K^T V) / Q (K^T 1).
Source: Katharopoulos et al., "Transformers are RNNs", arXiv 2006.16236.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import _checks, engine
from linattn.engine import NormalizedState
from linattn.layers.convolution import ShortConvolution
from linattn.layers.mixer import Mixer, mask_gate
from linattn.layers.norms import RMSNorm
from linattn.layers.sizes import default_heads, divide
from linattn.recurrence import KEY, QUERY, VALUE, Normalizer, Recurrence
from linattn.registry import Mechanism, register

RECURRENCE = Recurrence(normalizer=Normalizer.SUM)
PLAIN = Recurrence()

FeatureMap = Callable[[Tensor], Tensor]
FEATURE_MAPS: dict[str, FeatureMap] = {
    "identity": lambda x: x,
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}


def feature_map_of(feature_map: str | FeatureMap) -> FeatureMap:
    """The function of that name ("elu" is elu(x) + 1), or the callable itself."""
    if not isinstance(feature_map, str):
        return feature_map
    _checks.one_of("feature_map", feature_map, tuple(FEATURE_MAPS))
    return FEATURE_MAPS[feature_map]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | FeatureMap = "elu",
    normalize: bool = True,
    causal: bool = True,
    scale: float | None = None,
    state: Tensor | NormalizedState | None = None,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor | NormalizedState]:
    """o_t = S_t^T phi(q_t) / max(|z_t^T phi(q_t)|, 1e-6), S_t and z_t the sums of phi(k) v^T and phi(k) up to t.

    Args:
        q, k: [B, T, G, K]; v: [B, T, H, V], G divides H. One floating dtype.
        feature_map: phi: "elu" (elu(x) + 1), "relu", "squared_relu", "identity" or a function of the last axis (which
            may change its size).
        normalize: divide by z. With features ≥ 0 every output is then a weighted mean of values and can't blow up.
        causal: False lets every token read the whole sequence (and the state it continues from).
        scale: only without ``normalize``, where it would cancel; None is K^-0.5, K the number of features.
        state: [N, H, K, V], or NormalizedState(S, z) when normalised.
        cu_seqlens, mode, backend: as in :func:`linattn.gated_linear_attention`.

    Returns o [B, T, H, V] in v's dtype and the final state.
    Raises ValueError naming the argument that does not fit. Source: arXiv 2006.16236.
    """
    if normalize and scale is not None:
        raise _checks.fail("scale", scale, "None with normalize=True, which would cancel it")
    phi = feature_map_of(feature_map)
    q, k = phi(q), phi(k)
    recurrence = RECURRENCE if normalize else PLAIN
    if causal:
        return engine.matrix(
            recurrence, q, k, v, scale=1.0 if normalize else scale,
            state=state, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
    return _whole(recurrence, q, k, v, scale, state, cu_seqlens, mode, backend)


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
    """Inputs that the short convolution still sees, [N, W-1, C], and the sums over the past."""

    conv: Tensor
    recurrent: Tensor | NormalizedState


class LinearAttention(Mixer):
    """Linear attention; y = W_o RMSNorm(linear_attention(φ(q), φ(k), v)) with q, k, v = conv(W x), no biases.

    The mechanism of 2020 alone does not know the order of tokens; the short convolution gives it that of the nearest.

    Args:
        d_model: width of the input and output.
        num_heads: None takes heads of a size near 64.
        feature_map: φ: "elu" (elu(x) + 1), "relu", "squared_relu" or "identity".
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
        feature_map: str = "elu",
        normalize: bool = True,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        self.num_heads = default_heads(d_model, 64) if num_heads is None else num_heads
        self.head_dim = divide("num_heads", self.num_heads, d_model, "d_model")
        self.feature_map, self.normalize = feature_map_of(feature_map), normalize
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.conv1d = ShortConvolution(3 * d_model, conv_size, activation=False)
        self.norm = RMSNorm(self.head_dim, eps=norm_eps)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def mix(
        self, x: Tensor, state: Any, mask: Tensor | None, cu_seqlens: Tensor | None, mode: str, backend: str
    ) -> tuple[Tensor, LinearAttentionState]:
        tail, recurrent = (None, None) if state is None else state
        qkv, tail = self.conv1d(self.in_proj(x), tail, mask=mask, cu_seqlens=cu_seqlens)
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).chunk(3, dim=2)
        # Features of zero need not be zero, so padding is masked after the map.
        q, k = self.feature_map(q), mask_gate(self.feature_map(k), mask)
        o, recurrent = linear_attention(
            q, k, v, feature_map="identity", normalize=self.normalize,
            state=recurrent, cu_seqlens=cu_seqlens, mode=mode, backend=backend,
        )  # fmt: skip
        return self.out_proj(self.norm(o).flatten(2)), LinearAttentionState(tail, recurrent)


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
        when="The plain formula; non-causal use (images, graphs, encoders); memory without forgetting.",
    )
)
