"""From named tensors to a model: every tensor has its place and every place its tensor, or there is no model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from linattn.checkpoints.files import some
from linattn.models import LanguageModel, ModelConfig


def assemble(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    source: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> LanguageModel:
    """The model of ``config`` with these weights; no memory is spent on weights that would be replaced.

    Tensors keep their dtype, or take ``dtype``. Raises ValueError listing every tensor that is missing, left over, of
    another shape or not floating, and for a config whose sizes do not fit.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype: got {dtype}, wanted a floating dtype or None")
    with torch.device("meta"):
        model = LanguageModel(config)
    own = distinct_tensors(model)
    shared = own.keys() & tensors.keys()
    differences = {
        "missing": own.keys() - tensors.keys(),
        "left over": tensors.keys() - own.keys(),
        "other shapes:": {
            f"{name} {list(tensors[name].shape)} instead of {list(own[name].shape)}"
            for name in shared
            if tensors[name].shape != own[name].shape
        },
        "not floating:": {
            f"{name} {tensors[name].dtype}"
            for name in shared
            if own[name].is_floating_point() and not tensors[name].is_floating_point()
        },
    }
    if any(differences.values()):
        listed = "; ".join(f"{what} {some(sorted(names))}" for what, names in differences.items() if names)
        raise ValueError(f"{source}: not the weights of this config: {listed}")
    # A copy: tensors of a file are views of its pages, and the file may be deleted or replaced.
    filled: dict[int, Tensor] = {}
    for name, place in own.items():
        kind = dtype if dtype is not None and place.is_floating_point() else tensors[name].dtype
        filled[id(place)] = _in_place_of(place, tensors[name].to(device, kind, copy=True))
    for module in model.modules():
        for places in (module._parameters, module._buffers):
            places |= {name: filled[id(place)] for name, place in places.items() if place is not None}
    return model


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each once though the model may use it under several names."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (name, tensor))
    return dict(tensors.values())


def _in_place_of(place: Tensor, value: Tensor) -> Tensor:
    """``value`` as a parameter where ``place`` is one, with its marks (such as: no weight decay)."""
    if not isinstance(place, nn.Parameter):
        return value
    parameter = nn.Parameter(value, requires_grad=place.requires_grad)
    parameter.__dict__.update(place.__dict__)
    return parameter
