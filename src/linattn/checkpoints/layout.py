"""Another library's checkpoint as data: which of its tensors make up each of ours, and how its config is ours.

From one list of rules follow both directions, the check that nothing is missing and nothing left over, and the
messages that say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linattn._checks import fail
from linattn.checkpoints.assemble import distinct_tensors
from linattn.checkpoints.files import some
from linattn.models import LanguageModel, ModelConfig

Config = Mapping[str, Any]
"""What stands in a ``config.json``."""

Renew = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""What gives tensors of an older version their present names."""


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Rule:
    """Our tensor ``ours`` is ``theirs`` one after another along the first axis, ``sizes`` long (one needs no size).

    Where that is not ours yet, ``turn`` makes it so, and ``turn_back`` undoes it.
    """

    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    turn: Callable[[Tensor], Tensor] = _as_it_is
    turn_back: Callable[[Tensor], Tensor] = _as_it_is

    def to_ours(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our tensor from theirs."""
        parts = [tensors[name] for name in self.theirs]
        return {self.ours: self.turn(torch.cat(parts) if len(parts) > 1 else parts[0])}

    def to_theirs(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their tensors from ours."""
        tensor = self.turn_back(own[self.ours].detach())
        parts = tensor.split(self.sizes) if self.sizes else (tensor,)
        return dict(zip(self.theirs, parts, strict=True))

    def within(self, ours: str, theirs: str) -> Rule:
        """The same rule with names that begin so."""
        return replace(self, ours=ours + self.ours, theirs=tuple(theirs + name for name in self.theirs))


@dataclass(frozen=True)
class Spread:
    """Our tensors ``ours`` are the rows that ``turn`` makes of ``theirs``; ``turn_back`` undoes it."""

    ours: tuple[str, ...]
    theirs: tuple[str]
    turn: Callable[[Tensor], Tensor]
    turn_back: Callable[[Tensor], Tensor]

    def to_ours(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our tensors from theirs."""
        return dict(zip(self.ours, self.turn(tensors[self.theirs[0]]), strict=True))

    def to_theirs(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their tensor from ours. Raises ValueError if there are none."""
        if not self.ours:
            raise fail("model", f"no layer with a part of {self.theirs[0]}", "at least one")
        return {self.theirs[0]: self.turn_back(torch.stack([own[name].detach() for name in self.ours]))}


def same(*names: str) -> Iterable[Rule]:
    """Rules for tensors that have one name in both libraries."""
    return (Rule(name, (name,)) for name in names)


def renamed(ours: str, theirs: str, *parts: str) -> Iterable[Rule]:
    """Rules for the parts of a module that has another name with them."""
    return (Rule(f"{ours}.{part}", (f"{theirs}.{part}",)) for part in parts)


@dataclass(frozen=True)
class Layout:
    """One family of checkpoints.

    ``defaults`` are the values of the keys that a ``config.json`` may leave out; ``read`` makes our config of theirs,
    ``write`` theirs of a model, ``rules`` lists what makes up our tensors for a config of theirs. A tensor of
    ``copies`` may be stored again under another name, as tied heads are; ``renew`` gives tensors of an older version
    their present names.
    """

    name: str
    mechanism: str
    defaults: Config
    read: Callable[[Config], ModelConfig]
    write: Callable[[LanguageModel], dict[str, Any]]
    rules: Callable[[Config], Iterable[Rule | Spread]]
    copies: Callable[[Config], Mapping[str, str]] = lambda config: {}
    renew: Renew = lambda tensors: tensors

    def from_theirs(self, config: Config, tensors: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
        """Our config and tensors. Raises ValueError for a config that we have no equal of, and for wrong names."""
        config, tensors = {**self.defaults, **config}, self.renew(tensors)
        ours, rules, copies = self.read(config), list(self.rules(config)), self.copies(config)
        wanted = {name for rule in rules for name in rule.theirs}
        missing, left = wanted - tensors.keys(), tensors.keys() - wanted - copies.keys()
        left |= {name for name in copies.keys() & tensors.keys() if not _same(tensors, name, copies[name])}
        if missing or left:
            listed = [
                f"{what} {some(sorted(which))}" for what, which in (("missing", missing), ("left over", left)) if which
            ]
            raise ValueError(f"not the tensors of {self.name}: {'; '.join(listed)}")
        own: dict[str, Tensor] = {}
        for rule in rules:
            try:
                own |= rule.to_ours(tensors)
            except (RuntimeError, IndexError, ValueError) as error:
                shapes = ", ".join(f"{name} {list(tensors[name].shape)}" for name in rule.theirs)
                raise ValueError(f"shapes that do not go together: {shapes}") from error
        return ours, own

    def to_theirs(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Their config and tensors. Raises ValueError for a model that they have no equal of."""
        config = self.write(model)
        full = {**self.defaults, **config}
        with torch.device("meta"):
            reread = LanguageModel(self.read(full))
        if differing := difference(model, reread):
            raise fail("model", differing, f"what a config of {self.name} can say")
        own, rules = distinct_tensors(model), list(self.rules(full))
        expected = {name for rule in rules for name in ([rule.ours] if isinstance(rule, Rule) else rule.ours)}
        if foreign := own.keys() ^ expected:
            raise fail("model", some(sorted(foreign)), f"the tensors that {self.name} has")
        return config, {name: tensor for rule in rules for name, tensor in rule.to_theirs(own).items()}


def _same(tensors: Mapping[str, Tensor], copy: str, original: str) -> bool:
    return original in tensors and torch.equal(tensors[copy], tensors[original])


def difference(model: nn.Module, other: nn.Module) -> str:
    """What ``model`` computes in another way than ``other``, tensors aside; empty if nothing."""
    here = _settings(model)
    return some(sorted({f"{name}={value!r}" for name, value in (here ^ _settings(other)) & here}))


def _settings(model: nn.Module) -> set[tuple[str, Any]]:
    """What, besides its tensors, decides what a model computes: the plain attributes of its modules."""
    found: set[tuple[str, Any]] = set()

    def note(name: str, thing: object) -> None:
        for key, value in vars(thing).items():
            if key.startswith("_") or isinstance(value, ModelConfig):
                continue
            if isinstance(value, Hashable):
                if type(value).__module__.startswith("linattn"):
                    note(f"{name}.{key}", value)
                else:
                    found.add((f"{name}.{key}", _comparable(value)))

    for name, module in model.named_modules():
        note(name, module)
    return found - {(f"{name}.training", flag) for name, _ in model.named_modules() for flag in (True, False)}


def _comparable(value: Hashable) -> Hashable:
    """The value itself, or for a partial function what it does: two of them are never equal."""
    return (value.func, value.args, tuple(value.keywords.items())) if isinstance(value, partial) else value


def demand(config: Config, **wanted: Any) -> None:
    """Each key has the wanted value, or one of a tuple of them. Raises ValueError naming the key that differs."""
    for key, value in wanted.items():
        allowed = value if isinstance(value, tuple) else (value,)
        if config.get(key) not in allowed:
            raise fail(key, repr(config.get(key)), " or ".join(map(repr, allowed)) + ": linattn has no other")


def whole(key: str, value: float) -> int:
    """A size that a config gives as a product. Raises ValueError if it is no whole number."""
    if not math.isclose(value, round(value)):
        raise fail(key, value, "a whole number")
    return round(value)
