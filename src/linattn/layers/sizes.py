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


def three_quarter_heads(d_model: int, num_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """The number and size of key heads that together are ¾ d_model wide, the proportion of Gated DeltaNet.

    What is given is kept. A size of one's own choice is d_model/4, at most the paper's 256. Raises ValueError for a
    number below 1.
    """
    if num_heads is not None and num_heads < 1:
        raise fail("num_heads", num_heads, "at least 1")
    if head_dim is None:
        head_dim = min(max(d_model // 4, 1), 256) if num_heads is None else max(3 * d_model // 4 // num_heads, 1)
    return max(3 * d_model // 4 // head_dim, 1) if num_heads is None else num_heads, head_dim
