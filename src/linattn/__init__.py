"""linattn: linear attention, practical. Every mechanism is one small recurrence, run by one engine."""

from linattn import recurrence, state
from linattn._version import __version__
from linattn.engine import BACKENDS, Explanation, NormalizedState, explain, matrix, scan, summary
from linattn.mechanisms import *  # noqa: F403
from linattn.mechanisms import __all__ as _mechanisms
from linattn.registry import get, names

__all__ = [
    "BACKENDS",
    "Explanation",
    "NormalizedState",
    "__version__",
    "explain",
    "get",
    "matrix",
    "names",
    "recurrence",
    "scan",
    "state",
    "summary",
    *_mechanisms,
]
