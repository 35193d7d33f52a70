"""A layer of linattn in the place of one of a transformers model, and the two models side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from proof.judge import BOUND, judge
from torch import Tensor, nn

Parameters = dict[str, Tensor]


class Transplant(nn.Module):
    """The interface of transformers' mixers around ``layer``. It keeps the state itself, where there is a cache."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.state: Any = None

    def forward(
        self, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        mask = None if attention_mask is None else attention_mask.bool()
        y, state = self.layer(hidden_states, None if cache is None else self.state, mask=mask)
        self.state = state if cache is not None else None
        return y


def shaken(model: nn.Module) -> nn.Module:
    """``model`` with noise in every parameter: none is left at a value that would hide a mistake."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@contextmanager
def within(dtype: torch.dtype) -> Iterator[None]:
    """For float64: makes transformers' casts to float32 casts to float64, in which its rounding does not count."""
    if dtype != torch.float64:
        yield
        return
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(Tensor, "float", Tensor.double),
    ):
        yield


def prove(
    mechanism: str,
    oracle: str,
    theirs: nn.Module,
    place: str,
    build: Callable[[], nn.Module],
    convert: Callable[[Parameters], Parameters],
    dtype: torch.dtype,
    *,
    theirs_in: torch.dtype = torch.float64,
    layers: str = "model.layers",
    kind: str = "linear_attention",
    graft: type[Transplant] = Transplant,
    padding: bool = True,
    make_cache: Callable[[], Any] = lambda: None,
) -> None:
    """Logits and all gradients, with left padding too, and logits token by token; for float64 to ten digits.

    Ours is in ``dtype``; theirs in float64, for in float32 its own rounding is often the larger. ``place``: the
    attribute of a decoder layer (of ``layers``) that is replaced, where the config calls it ``kind``, by a ``graft``
    around what ``build`` makes. ``convert`` takes the parameters of their mixer (or the gradients of these) to ours.
    ``make_cache``: for models that make none of their own, or don't return it.
    """
    ours = copy.deepcopy(theirs)
    chosen = [n for n, given in enumerate(theirs.config.layer_types) if given == kind]
    for n in chosen:
        layer = build()
        layer.load_state_dict(convert(dict(theirs.get_submodule(f"{layers}.{n}.{place}").named_parameters())))
        setattr(ours.get_submodule(f"{layers}.{n}"), place, graft(layer))
    ours, theirs = ours.to(dtype), theirs.to(theirs_in)
    oracle, bound = (oracle, BOUND) if dtype == torch.float32 else (f"{oracle}, float64", 1e-10)

    random = torch.Generator().manual_seed(1)
    x = torch.randn(2, 70, theirs.config.hidden_size, generator=random)
    real = torch.ones(2, 70, dtype=torch.int64)
    real[1, :9] = 0
    weight = torch.randn(2, 70, theirs.config.vocab_size, generator=random) * real[..., None]

    def run(model: nn.Module, mask: Tensor | None) -> tuple[Tensor, Parameters]:
        leaf = x.to(next(model.parameters()).dtype, copy=True).requires_grad_()
        model.zero_grad()
        logits = model(inputs_embeds=leaf, attention_mask=mask, use_cache=False).logits
        (logits * weight).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return logits.detach() * real[..., None], {"input": leaf.grad * real[..., None], **gradients}

    for mask in (None, real) if padding else (None,):
        with within(theirs_in):
            wanted, gradients = run(theirs, mask)
        with within(dtype):
            got, got_gradients = run(ours, mask)
        for n in chosen:
            prefix = f"{layers}.{n}.{place}."
            inner = {name: gradients.pop(name) for name in list(gradients) if name.startswith(prefix)}
            converted = convert({name.removeprefix(prefix): grad for name, grad in inner.items()})
            gradients |= {f"{prefix}layer.{name}": grad for name, grad in converted.items()}
        judge(mechanism, oracle, "logits", got, wanted, bound)
        judge(mechanism, oracle, "gradients", got_gradients, gradients, bound)

    with torch.no_grad():
        with within(theirs_in):
            whole = theirs(inputs_embeds=x[:, :24].to(theirs_in), use_cache=False).logits
        cache, steps = make_cache(), []
        with within(dtype):
            for start, end in [(0, 5), *((t, t + 1) for t in range(5, 24))]:
                output = ours(inputs_embeds=x[:, start:end].to(dtype), cache=cache, use_cache=True)
                cache = getattr(output, "cache", None) or cache
                steps.append(output.logits)
    judge(mechanism, oracle, "token by token", torch.cat(steps, 1), whole, bound)
