"""`linattn list`: the mechanisms and what each supports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from linattn import engine, registry
from linattn.cli.command import Command
from linattn.cli.output import Output
from linattn.models import state_size
from linattn.registry import Mechanism

MANY = 1 << 11  # tokens: more than a window holds


@dataclass(frozen=True, kw_only=True)
class List(Command):
    """List the mechanisms: equation, state, backends and when to use which."""

    d_model: int = 1024
    """Width of the layer whose state is weighed."""

    def run(self, output: Output) -> int:
        found = [_description(registry.get(name), self.d_model) for name in registry.names(composite=True)]
        output.emit({"d_model": self.d_model, "mechanisms": found})
        for entry in found:
            aliases = f" (also {', '.join(entry['aliases'])})" if entry["aliases"] else ""
            backends = "; ".join(f"{name}: {', '.join(modes)}" for name, modes in entry["backends"].items())
            output.say(f"{entry['name']}{aliases}", style="bold")
            output.say(f"  {entry['equation']}")
            state = _weight(entry["state_bytes"], entry["state_bytes_per_token"], self.d_model)
            for title, text in (
                ("state", state), *((name, entry[name]) for name in ("when", "paper")), ("backends", backends)
            ):  # fmt: skip
                if text:
                    output.say(f"  {title:9}{text}")
            output.say("")
        return 0


def _description(mechanism: Mechanism, d_model: int) -> dict[str, Any]:
    with torch.device("meta"):
        layer = mechanism.layer(d_model)
    some, twice = (state_size(layer, tokens=n) for n in (MANY, 2 * MANY))
    growth = (twice - some) // MANY
    return {
        "name": mechanism.name,
        "title": mechanism.title,
        "aliases": list(mechanism.aliases),
        "equation": mechanism.equation,
        "state_bytes": some - growth * MANY,
        "state_bytes_per_token": growth,
        "when": mechanism.when,
        "paper": mechanism.paper,
        "backends": _backends(mechanism),
    }


def _weight(size: int, growth: int, d_model: int) -> str:
    weight = f"{growth:,} bytes a token: it grows" if growth else f"{size:,} bytes, after any number of tokens"
    return f"{weight} (a sequence and layer, d_model={d_model}, float32)"


def _backends(mechanism: Mechanism) -> dict[str, list[str]]:
    if mechanism.composite:
        return {}
    if mechanism.recurrence is None:
        return {"torch": ["parallel", "recurrent"]}
    return {name: [mode.value for mode in modes] for name, modes in engine.forms(mechanism.recurrence).items()}
