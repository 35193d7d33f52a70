"""linattn: linear attention, practical. Every mechanism is one small recurrence, run by one engine."""

from linattn import recurrence, state
from linattn._version import __version__
from linattn.bidirectional import Bidirectional, bidirectional
from linattn.checkpoints import load, load_tokenizer
from linattn.engine import BACKENDS, Explanation, NormalizedState, explain, matrix, scan, selective_scan, summary
from linattn.mechanisms import *  # noqa: F403
from linattn.mechanisms import __all__ as _mechanisms
from linattn.registry import get, names

__all__ = [
    "BACKENDS",
    "Bidirectional",
    "Explanation",
    "NormalizedState",
    "__version__",
    "bidirectional",
    "explain",
    "get",
    "load",
    "load_tokenizer",
    "matrix",
    "names",
    "recurrence",
    "scan",
    "selective_scan",
    "state",
    "summary",
    *_mechanisms,
]
