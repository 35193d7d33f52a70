"""The vocabulary: what a linear attention is, as frozen data.

Per sequence and head, with q_t, k_t in R^K, v_t in R^V and a state S_t in R^{KxV}::

    S_t = Diag(e^{g_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T        (matrix engine)
    o_t = scale * S_t^T q_t                                              (read after the update)
    o_t = scale * (S_{t-1} + Diag(u) k_t v_t^T)^T q_t                    (read before it, with bonus u)

    h_t = e^{g_t} * h_{t-1} + x_t                                        (scan engine, elementwise)

Each of D channels with N numbers of its own, a step dt_t in R^D, rates A in R^{DxN}, B_t and C_t in R^N::

    h_t = e^{dt_t A} * h_{t-1} + (dt_t x_t) B_t^T,    y_t = h_t C_t      (selective engine)

A :class:`Recurrence` says which of these terms a mechanism has. It is read by the backends, the tests, the
documentation and the command line; it holds no computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class _Word(Enum):
    """Hashed by identity, as members are compared; Enum hashes their names, which takes longer."""

    __hash__ = object.__hash__


class Engine(_Word):
    """Which of the recurrences: a matrix state, an elementwise one, or the selective scan of a state space."""

    MATRIX = "matrix"
    SCAN = "scan"
    SELECTIVE = "selective"


class Decay(_Word):
    """The kind of decay; its value spells the dimensions of the gate ``g``."""

    NONE = ""
    HEAD = "H"
    CHANNEL = "H K"
    TOKEN_HEAD = "B T H"
    TOKEN_CHANNEL = "B T H K"

    @property
    def fixed(self) -> bool:
        """True when the gate does not depend on the token."""
        return self in (Decay.HEAD, Decay.CHANNEL)


class Write(_Word):
    """How a token changes the state besides decaying it."""

    ADDITIVE = "additive"  # k v^T
    DELTA = "delta"  # beta k (v - (Diag(e^g) S)^T k)^T: a = -e^g * k, b = write key = beta * k
    LOW_RANK = "low_rank"  # b (a^T S) + k v^T


class Read(_Word):
    """Whether a token reads the state after or before its own write."""

    AFTER = "after"
    BEFORE = "before"


class Normalizer(_Word):
    """What the output is divided by."""

    NONE = "none"
    SUM = "sum"  # max(|z^T q|, eps) with z_t = Diag(e^g) z_{t-1} + k_t


class Mode(_Word):
    """The three forms of one recurrence; all give the same result."""

    RECURRENT = "recurrent"
    CHUNKWISE = "chunkwise"
    PARALLEL = "parallel"


class Domain(_Word):
    """The values an argument may take; tests draw from it and validation refers to it."""

    REAL = "any real number"
    UNIT = "vectors of Euclidean norm 1"
    NONNEGATIVE = "≥ 0"
    POSITIVE = "> 0"
    NEGATIVE = "< 0"
    LOG_DECAY = "natural log of a decay, ≤ 0 (−inf allowed)"
    BETA = "0 … 2"
    UNIT_INTERVAL = "0 … 1"


@dataclass(frozen=True)
class Argument:
    """One tensor argument of a mechanism's function.

    ``dims`` names the axes: B batch, T tokens, H value heads, G query/key heads (G divides H), K key and V value size;
    of a selective scan D channels (G divides D) and N numbers a channel; R writes a token, P pairs of key channels.
    """

    name: str
    dims: str
    domain: Domain = Domain.REAL
    meaning: str = ""
    optional: bool = False


QUERY = Argument("q", "B T G K", meaning="queries")
KEY = Argument("k", "B T G K", meaning="keys")
UNIT_KEY = Argument("k", "B T G K", Domain.UNIT, "keys, of norm 1")
VALUE = Argument("v", "B T H V", meaning="values")
BETA = Argument("beta", "B T H", Domain.BETA, "strength of the delta write, after its sigmoid")


@dataclass(frozen=True)
class Recurrence:
    """A point of the design space.

    ``bonus`` adds Diag(u) to the token's own write when it reads before the update (RWKV).
    """

    engine: Engine = Engine.MATRIX
    decay: Decay = Decay.NONE
    write: Write = Write.ADDITIVE
    read: Read = Read.AFTER
    normalizer: Normalizer = Normalizer.NONE
    bonus: bool = False

    def __post_init__(self) -> None:
        if self.bonus and self.read is not Read.BEFORE:
            raise ValueError("bonus: needs read=Read.BEFORE, got read=Read.AFTER")
        if self.normalizer is not Normalizer.NONE and self.write is not Write.ADDITIVE:
            raise ValueError(f"normalizer: needs write=Write.ADDITIVE, got write={self.write}")

    def state_shape(self, heads: int, key_size: int, value_size: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the state tensors of one sequence, without the batch axis."""
        if self.engine is Engine.SCAN:
            return ((heads * value_size,),)
        if self.engine is Engine.SELECTIVE:
            return ((heads * value_size, key_size),)
        shapes: tuple[tuple[int, ...], ...] = ((heads, key_size, value_size),)
        return (*shapes, (heads, key_size)) if self.normalizer is Normalizer.SUM else shapes
