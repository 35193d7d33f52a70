"""What a model is, as data."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import linattn.mechanisms  # noqa: F401  (fills the registry)
from linattn import registry
from linattn._checks import fail, one_of

MLPS = ("swiglu", "channel_mix", "channel_mix_v7", "channel_mix_v7a")


def _default(value: Any) -> Any:
    """A field that is ``value`` unless the mechanism's family has another one."""
    return field(default=None, metadata={"default": value})


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: ``num_layers`` blocks of a mixer, chosen by ``pattern``, and an MLP.

    Where the pattern names one mechanism, fields that are not given take the values that its family's models have
    (``Mechanism.block``): LayerNorms and channel mixes around an RWKV, no MLP around a Mamba. Once made, a config holds
    the values themselves.

    Raises ValueError naming the field that does not fit, with the nearest known name where a name is unknown.
    """

    vocab_size: int = 256
    """Number of tokens; 256 is bytes."""
    d_model: int = 256
    """Width of the residual stream."""
    num_layers: int = 4
    """Number of blocks."""
    pattern: str = "gated_delta_rule"
    """Mechanisms of the blocks, see :func:`parse_pattern`: ``"gla"``, ``"3*gated_delta_rule,softmax_attention"``."""
    mixers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of the layers by mechanism: ``{"gla": {"num_heads": 2}}``."""
    mlp_ratio: float = _default(8 / 3)
    """Hidden width of the MLP over d_model, rounded up to a multiple of 32; 0 is no MLP."""
    norm_eps: float = _default(1e-6)
    """Of the norms between the blocks."""
    tie_embeddings: bool = _default(True)
    """Use the embedding as the head."""
    initializer_range: float | None = None
    """Standard deviation of the weights at the start, None is 0.5/√d_model; residual writes start smaller.
    With None, RWKV's layers, and the embedding before an ``embedding_norm``, have a start of their own."""
    mlp: str = _default("swiglu")
    """Kind of the MLP: swiglu; channel_mix (RWKV-4 to 6), channel_mix_v7, channel_mix_v7a (with DeepEmbed)."""
    mlp_hidden: int | None = None
    """Hidden width of the MLP itself; None follows mlp_ratio."""
    norm: str = _default("rms")
    """Norms between the blocks: rms, or layer (with a bias)."""
    embedding_norm: bool = _default(False)
    """A norm on the embedding, too."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "num_layers"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise fail(name, repr(value), "a positive integer")
        self._fill()
        for name in ("mlp_ratio", "norm_eps", "initializer_range"):
            value = getattr(self, name)
            if name == "initializer_range" and value is None:
                continue
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise fail(name, repr(value), "a number ≥ 0")
        if self.mlp_hidden is not None and (type(self.mlp_hidden) is not int or self.mlp_hidden < 0):
            raise fail("mlp_hidden", repr(self.mlp_hidden), "an integer ≥ 0")
        kinds = {"tie_embeddings": bool, "embedding_norm": bool, "mlp": str, "norm": str, "mixers": Mapping}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise fail(name, repr(getattr(self, name)), f"a {kind.__name__.lower()}")
        one_of("mlp", self.mlp, MLPS)
        one_of("norm", self.norm, ("rms", "layer"))
        for name, options in self.mixers.items():
            mechanism = registry.get(name)
            if not isinstance(options, Mapping):
                raise fail(f"mixers[{name!r}]", repr(options), "a mapping of options")
            known = list(inspect.signature(mechanism.layer).parameters)
            _known_keys(f"mixers[{name!r}]", options, set(known) - {"d_model", "layer_index", "num_layers", "first"})

    def _fill(self) -> None:
        """Check the pattern, and give every field that is None and has a default its value."""
        if not isinstance(self.pattern, str):
            raise fail("pattern", repr(self.pattern), "a str")
        mechanisms = set(parse_pattern(self.pattern, self.num_layers))
        block = registry.get(mechanisms.pop()).block if len(mechanisms) == 1 else {}
        for item in dataclasses.fields(self):
            if "default" in item.metadata and getattr(self, item.name) is None:
                object.__setattr__(self, item.name, block.get(item.name, item.metadata["default"]))

    @property
    def layers(self) -> tuple[str, ...]:
        """The mechanism of each block."""
        return parse_pattern(self.pattern, self.num_layers)

    @property
    def initial_std(self) -> float:
        """Standard deviation of the weights at the start."""
        return 0.5 / math.sqrt(self.d_model) if self.initializer_range is None else self.initializer_range

    @property
    def mlp_size(self) -> int:
        """Hidden width of the MLP; 0 is no MLP."""
        if self.mlp_hidden is not None:
            return self.mlp_hidden
        return math.ceil(self.mlp_ratio * self.d_model / 32) * 32

    def options(self, mechanism: str) -> dict[str, Any]:
        """The options of a mechanism's layers."""
        return {
            key: value
            for name, options in self.mixers.items()
            if registry.get(name).name == mechanism
            for key, value in options.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """The inverse of :meth:`to_dict`. Raises ValueError for a key that is no field."""
        _known_keys("config", data, {field.name for field in dataclasses.fields(cls)})
        return cls(**data)


def parse_pattern(pattern: str, num_layers: int) -> tuple[str, ...]:
    """The mechanism of each of ``num_layers`` blocks.

    A pattern is names or aliases separated by commas, each with an optional count, ``3*gated_delta_rule,softmax``; it
    is repeated as often as needed. Raises ValueError for an unknown name, a bad count, or more layers than there are.
    """
    cycle: list[str] = []
    for part in pattern.split(","):
        count, star, name = part.rpartition("*")
        if star and not (count.strip().isascii() and count.strip().isdigit() and int(count)):
            raise fail("pattern", repr(part.strip()), "a name with an optional count, such as 3*gated_delta_rule")
        if not name.strip():
            raise fail("pattern", repr(pattern), "names of mechanisms separated by commas")
        mechanism, repeats = registry.get(name.strip()).name, int(count) if star else 1
        if len(cycle) + repeats > num_layers:
            raise fail("pattern", f"{pattern!r}, longer than num_layers={num_layers}", "at most one layer a block")
        cycle += [mechanism] * repeats
    return tuple(cycle[layer % len(cycle)] for layer in range(num_layers))


def _known_keys(where: str, keys: Iterable[str], known: set[str]) -> None:
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise fail(where, f"unknown key {key!r}", f"{hint}one of {', '.join(sorted(known))}")
