"""The table of mechanisms, filled by each mechanism's own file."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from linattn.recurrence import Argument, Recurrence


@dataclass(frozen=True)
class Mechanism:
    """Everything the tests, benchmarks, documentation and command line need to know of a mechanism.

    ``recurrence`` is None for softmax attention, which is no recurrence, and for what is composite. ``layer`` is the
    ``nn.Module`` class with
    ``forward(x, state=None, *, mask=None, cu_seqlens=None, mode="auto", backend="auto") -> (y, state)``.
    ``block`` is what the family's models have around it: fields of a ``ModelConfig`` all of whose layers are this one.
    ``composite``: a layer made of others' layers, with no recurrence, arguments or function of its own (its
    ``function`` says so in a ValueError).
    """

    name: str
    title: str
    recurrence: Recurrence | None
    arguments: tuple[Argument, ...]
    function: Callable[..., Any]
    layer: type[Any]
    equation: str
    paper: str
    when: str
    aliases: tuple[str, ...] = ()
    block: Mapping[str, Any] = field(default_factory=dict)
    composite: bool = False

    @property
    def grows(self) -> bool:
        """Whether its state grows with every token (where no window bounds it)."""
        return self.recurrence is None and not self.composite


_MECHANISMS: dict[str, Mechanism] = {}
_NAMES: dict[str, str] = {}


def register(mechanism: Mechanism) -> Mechanism:
    """Add a mechanism. Raises ValueError if its name or an alias is taken."""
    for name in (mechanism.name, *mechanism.aliases):
        if name in _NAMES:
            raise ValueError(f"name: {name!r} is already registered by {_NAMES[name]!r}")
    for name in (mechanism.name, *mechanism.aliases):
        _NAMES[name] = mechanism.name
    _MECHANISMS[mechanism.name] = mechanism
    return mechanism


def names(*, composite: bool = False) -> list[str]:
    """The registered mechanisms, in order of registration; with ``composite`` the layers made of several, too."""
    return [name for name, mechanism in _MECHANISMS.items() if composite or not mechanism.composite]


def get(name: str) -> Mechanism:
    """The mechanism of that name or alias. Raises ValueError naming the nearest one."""
    key = _NAMES.get(name) or _NAMES.get(name.strip().lower().replace("-", "_"))
    if key is None:
        near = difflib.get_close_matches(name.lower(), _NAMES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"mechanism: unknown name {name!r}; {hint}known: {', '.join(names(composite=True))}")
    return _MECHANISMS[key]
