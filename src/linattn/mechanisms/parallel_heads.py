"""Parallel heads: a linear mechanism and sliding-window softmax attention side by side in one layer.

    y = W_o [norm(linear(x)), norm(attention(x))]

The one remembers all of the past in a state of fixed size, the other the last tokens exactly. It is a layer made of
two, with no recurrence of its own; its function would be theirs.
Sources: Dong et al., "Hymba: A Hybrid-head Architecture for Small Language Models", arXiv 2411.13676 (each branch
normalised, one output projection); Zuo et al., "Falcon-H1", arXiv 2507.22448.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linattn import _checks, registry
from linattn.layers.linear import Linear
from linattn.layers.mixer import Mixer
from linattn.layers.norms import RMSNorm
from linattn.mechanisms.softmax_attention import AttentionState, SoftmaxAttention
from linattn.registry import Mechanism, register


def _function(**arguments: Any) -> Any:
    raise _checks.fail("mechanism", "'parallel_heads', a layer of two mechanisms", "one that has a function")


class ParallelHeadsState(NamedTuple):
    """The states of the two layers."""

    linear: Any
    attention: AttentionState


class ParallelHeads(Mixer):
    """y = W_o [RMSNorm(linear(x)), RMSNorm(attention(x))] = W_1 RMSNorm(linear(x)) + W_2 RMSNorm(attention(x)).

    Both read the same x and are what their layers compute before their output projections; each norm's weight is the
    learnt scale of its branch.

    Args:
        d_model: width of the input and output.
        linear: name of the linear mechanism.
        window: attention sees the last ``window`` tokens.
        num_heads: query heads of the attention; None takes heads of a size near 64.
        linear_options, attention_options: further options of the two layers, by name.
        norm_eps: of the RMSNorms on the branches.
        first: whether it is the first such layer, for a linear layer that asks (RWKV-7).

    The state is a :class:`ParallelHeadsState`; it does not grow once the window is full. Raises ValueError naming the
    argument that does not fit. Source: arXiv 2411.13676.
    """

    state_type = ParallelHeadsState
    shares = True

    def __init__(
        self,
        d_model: int,
        *,
        linear: str = "gated_delta_rule",
        window: int = 1024,
        num_heads: int | None = None,
        linear_options: Mapping[str, Any] | None = None,
        attention_options: Mapping[str, Any] | None = None,
        norm_eps: float = 1e-6,
        first: bool | None = None,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__(d_model, layer_index, num_layers)
        place: dict[str, Any] = {"layer_index": layer_index, "num_layers": num_layers}
        mechanism = registry.get(linear)
        if mechanism.recurrence is None:
            raise _checks.fail("linear", repr(linear), "a mechanism with a recurrence")
        order = {"first": first} if mechanism.layer.shares else {}
        self.linear = mechanism.layer(d_model, **(linear_options or {}), **order, **place)
        self.attention = SoftmaxAttention(
            d_model, window=window, num_heads=num_heads, **(attention_options or {}), **place
        )
        self.num_heads = self.attention.num_heads
        widths = [_open(layer) for layer in (self.linear, self.attention)]
        self.linear_norm, self.attention_norm = (RMSNorm(width, eps=norm_eps) for width in widths)
        self.out_proj = Linear(sum(widths), d_model, bias=False)

    def mix(
        self,
        x: Tensor,
        state: Any,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        mode: str,
        backend: str,
        shared: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, ParallelHeadsState]:
        linear, attention = (None, None) if state is None else state
        options: dict[str, Any] = {"mask": mask, "cu_seqlens": cu_seqlens, "mode": mode, "backend": backend}
        given = {"shared": shared} if self.linear.shares else {}
        o, linear = self.linear(x, linear, **options, **given)
        p, attention = self.attention(x, attention, **options)
        y = self.out_proj(torch.cat([self.linear_norm(o), self.attention_norm(p)], -1))
        return y, ParallelHeadsState(linear, attention)


def _open(layer: nn.Module) -> int:
    """Take the output projection off a layer; the width of what it then gives."""
    name = "out_proj" if hasattr(layer, "out_proj") else "output"
    width: int = getattr(layer, name).in_features
    setattr(layer, name, nn.Identity())
    return width


register(
    Mechanism(
        name="parallel_heads",
        aliases=("hymba",),
        title="Parallel heads (a linear mechanism beside sliding-window attention)",
        recurrence=None,
        arguments=(),
        function=_function,
        layer=ParallelHeads,
        equation="y = W_o [norm(linear(x)), norm(attention(x))]",
        paper="Hymba: A Hybrid-head Architecture for Small Language Models, arXiv 2411.13676",
        when="A hybrid within each layer: exact recall of the last tokens, a state of fixed size for all before.",
        composite=True,
    )
)
