"""How far a mechanism may be from an implementation that is not ours, and where the distances are written down."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

BOUND = 1e-5  # of the largest number of the tensor, in float32


def distance(got: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest number wanted."""
    assert got.shape == wanted.shape, f"shape {list(got.shape)}, wanted {list(wanted.shape)}"
    got, wanted = got.detach().double(), wanted.detach().double()
    scale = wanted.abs().max().item()
    return (got - wanted).abs().max().item() / (scale or 1.0)


def judge(
    mechanism: str,
    oracle: str,
    what: str,
    got: Tensor | Mapping[str, Tensor],
    wanted: Tensor | Mapping[str, Tensor],
    bound: float = BOUND,
) -> None:
    """Assert that every tensor is within ``bound`` of the oracle's; note the largest distance.

    ``what``: "logits", "gradients", "state", "token by token". With LINATTN_PROOF set, a line of JSON is added to the
    file of that name: ``make proof`` makes the table of it.
    """
    got = {"": got} if isinstance(got, Tensor) else got
    wanted = {"": wanted} if isinstance(wanted, Tensor) else wanted
    assert got.keys() == wanted.keys(), f"{sorted(got.keys() ^ wanted.keys())} on one side only"
    distances = {name: distance(got[name], wanted[name]) for name in wanted}
    worst = max(distances, key=lambda name: distances[name])
    if report := os.environ.get("LINATTN_PROOF"):
        line = {"mechanism": mechanism, "oracle": oracle, "what": what, "error": distances[worst]}
        with Path(report).open("a") as file:
            file.write(json.dumps(line) + "\n")
    assert distances[worst] <= bound, f"{mechanism} against {oracle}: {what} {worst} off by {distances[worst]:.1e}"
