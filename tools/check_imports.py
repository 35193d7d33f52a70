"""Hold the modules of linattn to one import direction: a module imports only from those to its left in ORDER.

Backends never import each other; what they share lives in backends/_*.py, which in turn imports no backend.
Imports inside functions and under TYPE_CHECKING count too. Prints every breach and exits 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "linattn"
# fmt: off
ORDER = [
    "_version", "_checks", "recurrence", "registry", "state", "backends", "engine", "layers", "mechanisms",
    "bidirectional", "testing", "models", "checkpoints", "evaluation", "generation", "training", "benchmark", "cli",
    "__init__", "__main__",
]
# fmt: on


def imported(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, list[str]]]:
    """(line, path below the top package) of everything imported from the package that ``package`` lies in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            top, *path = name.split(".")
            if top == package[0]:
                yield node.lineno, path


def breach(importer: list[str], target: list[str]) -> str | None:
    """Why the module ``importer`` may not import ``target`` (paths below the top package), or None if it may."""
    here, there = importer[0], target[0] if target else "__init__"
    if there not in ORDER:
        return f"linattn.{there} has no place in ORDER (or is a name of the top package: import it where it is defined)"
    if here != there:
        return None if ORDER.index(there) < ORDER.index(here) else f"{here} may not import {there}"
    if here == "backends" and importer[1] != "__init__":
        other = target[1] if len(target) > 1 else ""
        if other != importer[1] and not other.startswith("_"):
            return f"backends/{importer[1]} may not import backends/{other}"
    return None


def main(package: Path = PACKAGE) -> int:
    """Check every file below ``package``."""
    breaches = []
    for file in sorted(package.rglob("*.py")):
        importer = list(file.relative_to(package).with_suffix("").parts)
        if importer[0] not in ORDER:
            breaches.append(f"{file}:1: {importer[0]} has no place in ORDER")
            continue
        for line, target in imported(ast.parse(file.read_text("utf-8")), [package.name, *importer[:-1]]):
            if why := breach(importer, target):
                breaches.append(f"{file}:{line}: {why}")
    print("\n".join(breaches) or "imports: every module imports only downward")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
