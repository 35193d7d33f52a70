"""Head counts and sizes: sensible defaults, and errors that name the nearest legal value."""

from __future__ import annotations

import math

from linattn._checks import fail


def divide(name: str, parts: int, total: int, total_name: str, *, even: bool = False) -> int:
    """The size of one of ``parts`` equal parts of ``total``.

    Raises ValueError, naming the nearest legal number of parts, if they don't divide it (or leave an odd size).
    """
    if total < 1:
        raise fail(total_name, total, "at least 1")
    step = 2 if even else 1
    if parts < 1 or total % (parts * step):
        legal = [n for n in range(1, total + 1) if total % (n * step) == 0]
        size = " into even sizes" if even else ""
        near = min(legal, key=lambda n: (abs(n - parts), n), default=None)
        hint = "" if near is None else f"; the nearest is {near}"
        raise fail(name, parts, f"a number that divides {total_name}={total}{size}{hint}")
    return total // parts


def default_heads(total: int, size: int) -> int:
    """The number of heads that divides ``total`` into even sizes as near to ``size`` (in ratio) as can be, or 1."""
    legal = [n for n in range(1, total // 2 + 1) if total % (2 * n) == 0]
    return min(legal, key=lambda n: abs(math.log(total / n / size)), default=1)
