"""`linattn list`: the mechanisms and what each supports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linattn import engine, registry
from linattn.cli.command import Command
from linattn.cli.output import Output
from linattn.recurrence import Engine, Normalizer
from linattn.registry import Mechanism


@dataclass(frozen=True, kw_only=True)
class List(Command):
    """List the mechanisms: equation, state, backends and when to use which."""

    def run(self, output: Output) -> int:
        found = [_description(registry.get(name)) for name in registry.names()]
        output.emit({"mechanisms": found})
        for entry in found:
            aliases = f" (also {', '.join(entry['aliases'])})" if entry["aliases"] else ""
            backends = "; ".join(f"{name}: {', '.join(modes)}" for name, modes in entry["backends"].items())
            output.say(f"{entry['name']}{aliases}", style="bold")
            output.say(f"  {entry['equation']}")
            for title, text in (*((name, entry[name]) for name in ("state", "when", "paper")), ("backends", backends)):
                output.say(f"  {title:9}{text}")
            output.say("")
        return 0


def _description(mechanism: Mechanism) -> dict[str, Any]:
    return {
        "name": mechanism.name,
        "title": mechanism.title,
        "aliases": list(mechanism.aliases),
        "equation": mechanism.equation,
        "state": _state(mechanism),
        "when": mechanism.when,
        "paper": mechanism.paper,
        "backends": {"torch": ["parallel", "recurrent"]}
        if mechanism.recurrence is None
        else {name: [mode.value for mode in modes] for name, modes in engine.forms(mechanism.recurrence).items()},
    }


def _state(mechanism: Mechanism) -> str:
    recurrence = mechanism.recurrence
    if recurrence is None:
        return "N · G · (K + V) numbers after N tokens: it grows"
    if recurrence.engine is Engine.SCAN:
        return "D numbers in float32, after any number of tokens"
    size = "H · K · (V + 1)" if recurrence.normalizer is Normalizer.SUM else "H · K · V"
    return f"{size} numbers in float32, after any number of tokens"
