"""Where a command's words go: text for people, or JSON for machines and nothing else."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from rich.console import Console, RenderableType


class Output:
    """One of two voices. ``say`` speaks to people, ``emit`` to machines; each is silent in the other's mode."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        reconfigure = getattr(sys.stdout, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="replace")  # a terminal that cannot show a character shows another
        width = None if sys.stdout.isatty() else 100
        self.console = Console(highlight=False, markup=False, quiet=as_json, width=width)

    def quietly(self) -> Output:
        """The same, but silent where it would emit: for a part of a command whose result comes as a whole."""
        part = Output(as_json=False)
        part.console = self.console
        return part

    @property
    def live(self) -> bool:
        """Whether lines may be redrawn."""
        return self.console.is_terminal and not self.console.quiet

    def say(self, *things: RenderableType, style: str | None = None) -> None:
        """Print for people."""
        # A terminal's lines are wrapped between words; lines of a file stay whole.
        self.console.print(*things, style=style, soft_wrap=not self.console.is_terminal)

    def emit(self, value: dict[str, Any]) -> None:
        """Print one JSON object on a line of its own."""
        if self.as_json:
            print(json.dumps(_plain(value)), flush=True)

    def aside(self, text: str) -> None:
        """Print on stderr for people: what is not the result."""
        if not self.as_json:
            sys.stdout.flush()
            print(text, file=sys.stderr, flush=True)


def _plain(value: Any) -> Any:
    """Data that strict JSON can hold: paths as text, infinity and NaN as null."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
