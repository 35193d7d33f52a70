"""Without a direction: a recurrence run over time both ways, for encoders, images, graphs.

    o_t = forwards(x_1 … x_t) + backwards(x_T … x_t)

Token t reads token s with the decay of the tokens between them, e^{g_{s+1} + … + g_t} of the earlier and
e^{g_t + … + g_{s-1}} of the later ones: with fixed gates the decay of retention or GLA in |t − s|.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from linattn import _checks, registry
from linattn.layers.mixer import Mixer
from linattn.layers.sequences import left_justify, sequence_of_token, take
from linattn.mechanisms.linear_attention import linear_attention
from linattn.mechanisms.softmax_attention import SoftmaxAttention, softmax_attention
from linattn.recurrence import Engine, Normalizer, Recurrence
from linattn.registry import Mechanism

_BLOCK = 1024  # tokens whose own shares are computed at once, each with a state


def bidirectional(
    mechanism: str | Mechanism | Callable[..., Any],
    *tensors: Any,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    diagonal_once: bool = False,
    **arguments: Any,
) -> Tensor:
    """A mechanism's function run forwards and backwards, the outputs added: ``bidirectional("gla", q, k, v, g)``.

    Linear attention has an exact form of its own, sums over the whole sequence, and takes it: every pair counts once,
    and a normalised output is divided by one sum of weights.

    Args:
        mechanism: name, alias, registered function, or a Mechanism of one's own.
        tensors, arguments: what its function takes, by place or by name (no ``state``: nothing is before the sequence
            that is not in it).
        mask: bool [B, T], True at real tokens, wherever they are; o is zero at the others.
        cu_seqlens: int [N+1], N packed sequences (B = 1), each read both ways on its own.
        diagonal_once: count what a token reads of itself (of its own write, of a bonus or a skip) once, not in both
            directions.

    Returns o [B, T, H, V].
    Raises ValueError naming the argument that does not fit, for softmax attention (causal=False is its own form), and
    with ``diagonal_once`` for mechanisms whose outputs are ratios: what a token adds to one is no share of the other.
    """
    found = _found(mechanism)
    bound = inspect.signature(found.function).bind(*tensors, **arguments)
    if bound.arguments.get("state") is not None:
        raise _checks.fail("state", "a state", "none: both directions start at an end of the sequence")
    timed = {x.name for x in found.arguments if x.dims.split()[:2] == ["B", "T"]}
    given = {name: x for name, x in bound.arguments.items() if name in timed and x is not None}
    rest = {name: x for name, x in bound.arguments.items() if name not in given}
    first = next(iter(given.values()))
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[:2] != first.shape[:2]:
            came = f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise _checks.fail(name, came, "a tensor [B, T, ...] of the same B and T as the others")
    batch, length = first.shape[:2]
    if cu_seqlens is not None:
        _checks.cu_seqlens_form(cu_seqlens, batch)
        _checks.boundaries(cu_seqlens, length)
    if mask is not None:
        if cu_seqlens is not None:
            raise _checks.fail("mask", "both mask and cu_seqlens", "one of them: packed sequences have no padding")
        if mask.dtype != torch.bool or mask.shape != first.shape[:2]:
            raise _checks.fail("mask", f"{mask.dtype} {list(mask.shape)}", f"torch.bool {[batch, length]}")
        # The real tokens of all rows, packed: padding is then not there at all.
        given = {name: x[mask][None] for name, x in given.items()}
        cu_seqlens = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    o = _both(found, given, rest, cu_seqlens, diagonal_once)
    if mask is None:
        return o
    return o.new_zeros(batch, length, *o.shape[2:]).masked_scatter(mask.view(batch, length, *[1] * (o.dim() - 2)), o)


def _found(mechanism: str | Mechanism | Callable[..., Any]) -> Mechanism:
    if isinstance(mechanism, str):
        mechanism = registry.get(mechanism)
    if not isinstance(mechanism, Mechanism):
        known = [registry.get(name) for name in registry.names()]
        named = [found for found in known if found.function is mechanism]
        if not named:
            wanted = "a registered mechanism, whose table of arguments says which of them have a time axis"
            raise _checks.fail("mechanism", getattr(mechanism, "__name__", type(mechanism).__name__), wanted)
        mechanism = named[0]
    if mechanism.function is softmax_attention:
        raise _checks.fail(
            "mechanism", repr(mechanism.name), "a recurrence: softmax attention has causal=False instead"
        )
    if mechanism.recurrence is None:
        raise _checks.fail("mechanism", repr(mechanism.name), "a mechanism with a recurrence")
    return mechanism


def _both(
    found: Mechanism, given: dict[str, Tensor], rest: dict[str, Any], cu_seqlens: Tensor | None, once: bool
) -> Tensor:
    if found.function is linear_attention:
        everything: dict[str, Any] = {**given, **rest, "causal": False}
        return linear_attention(**everything, cu_seqlens=cu_seqlens)[0]
    assert found.recurrence is not None
    if once and _ratio(found.recurrence):
        raise _checks.fail("diagonal_once", f"True for {found.name!r}", "False for outputs that are ratios")
    o = found.function(**given, **rest, cu_seqlens=cu_seqlens)[0]
    turned = {name: reverse(x, cu_seqlens=cu_seqlens) for name, x in given.items()}
    o = o + reverse(found.function(**turned, **rest, cu_seqlens=cu_seqlens)[0], cu_seqlens=cu_seqlens)
    return o - _own(found, given, rest, cu_seqlens).view_as(o) if once else o


def _ratio(recurrence: Recurrence) -> bool:
    """Whether outputs are divided by a sum of weights: by a normaliser, or as RWKV-4's scan with a bonus."""
    return recurrence.normalizer is not Normalizer.NONE or (recurrence.engine is Engine.SCAN and recurrence.bonus)


def _own(found: Mechanism, given: dict[str, Tensor], rest: dict[str, Any], cu_seqlens: Tensor | None) -> Tensor:
    """What the run backwards reads of each token itself, [B T, 1, ...]: a step from a state of nothing.

    Where the run starts it is a start, which some mechanisms (RG-LRU) treat apart.
    """
    batch, length = next(iter(given.values())).shape[:2]
    lone = {name: x.flatten(0, 1).unsqueeze(1) for name, x in given.items()}

    def step(tokens: Tensor, started: bool) -> Tensor:
        of = {name: x.index_select(0, tokens) for name, x in lone.items()}
        state = None
        if started:
            _, state = found.function(**{name: x[:1] for name, x in of.items()}, **rest)
            state = pytree.tree_map_only(Tensor, lambda x: x.new_zeros(len(tokens), *x.shape[1:]), state)
        o: Tensor = found.function(**of, **rest, state=state)[0]
        return o

    token = torch.arange(batch * length, device=next(iter(given.values())).device)
    own = torch.cat([step(block, started=len(block) > 0) for block in token.split(_BLOCK)])
    ends = torch.arange(1, batch + 1, device=token.device) * length if cu_seqlens is None else cu_seqlens[1:]
    starts = ends[ends.diff(prepend=ends.new_zeros(1)) > 0] - 1
    return own.index_copy(0, starts, step(starts, started=False))


def reverse(x: Tensor, *, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """x [B, T, ...] with the time of each sequence reversed; padding stays where it is."""
    if cu_seqlens is not None:
        row = sequence_of_token(cu_seqlens, x.shape[1])
        ends = cu_seqlens[:-1] + cu_seqlens[1:] - 1
        return x.index_select(1, ends[row] - torch.arange(x.shape[1], device=x.device))
    if mask is not None:
        order, place = left_justify(mask)
        length = mask.shape[1]
        opposite = ((~mask).sum(1, keepdim=True) + length - 1 - place).clamp(max=length - 1)
        return take(x, torch.where(mask, order.gather(1, opposite), torch.arange(length, device=x.device)))
    return x.flip(1)


class Bidirectional(nn.Module):
    """A mechanism's layer run over time both ways: y = layer(x) + reversed(other layer(reversed x)).

    Each direction is the whole layer: backwards, the short convolution reads the tokens after.

    Args:
        layer: name of a mechanism, or a Mixer class.
        d_model: width of the input and output.
        shared_weights: one layer serves both directions; otherwise each has its own.
        options: of the layer.

    There is no state: nothing can be continued that has read its end. Raises ValueError for softmax attention, whose
    function has causal=False, and for options that do not fit.
    """

    def __init__(
        self,
        layer: str | type[Mixer],
        d_model: int,
        *,
        shared_weights: bool = False,
        layer_index: int = 0,
        num_layers: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        kind = registry.get(layer).layer if isinstance(layer, str) else layer
        if issubclass(kind, SoftmaxAttention):
            raise _checks.fail(
                "layer", kind.__name__, "that of a recurrence: softmax attention has causal=False instead"
            )
        place = {"layer_index": layer_index, "num_layers": num_layers}
        self.forwards = kind(d_model, **options, **place)
        self.backwards = self.forwards if shared_weights else kind(d_model, **options, **place)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        mode: str = "auto",
        backend: str = "auto",
    ) -> Tensor:
        """x [B, T, d_model] -> y of the same shape and dtype; arguments and errors as in :meth:`Mixer.forward`."""
        options: dict[str, Any] = {"mask": mask, "cu_seqlens": cu_seqlens, "mode": mode, "backend": backend}
        y, _ = self.forwards(x, **options)
        back, _ = self.backwards(reverse(x, mask=mask, cu_seqlens=cu_seqlens), **options)
        return y + reverse(back, mask=mask, cu_seqlens=cu_seqlens)
