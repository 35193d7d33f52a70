"""Write docs/mechanisms/ from the registry: a page a mechanism and an index. `--check` only compares, for CI."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args, get_type_hints

from linattn import engine, registry
from linattn.recurrence import Argument, Decay, Domain, Engine, Mode, Normalizer, Read, Write
from linattn.registry import Mechanism

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "mechanisms"
GENERATED = "<!-- Written by `make docs` from the registry; edit the mechanism's file instead. -->"

DECAY = {
    Decay.NONE: "none: nothing is forgotten",
    Decay.HEAD: "fixed, one a head",
    Decay.CHANNEL: "fixed, one a head and key channel",
    Decay.TOKEN_HEAD: "from the data, one a token and head",
    Decay.TOKEN_CHANNEL: "from the data, one a token, head and key channel",
}
WRITE = {
    Write.ADDITIVE: "additive: k vᵀ is added",
    Write.DELTA: "delta: what the key k holds is moved towards v by β",
    Write.LOW_RANK: "low rank: b (aᵀ S) + k vᵀ is added",
}
READ = {Read.AFTER: "after the token's own write", Read.BEFORE: "before the token's own write"}
NORMALIZER = {Normalizer.NONE: "none", Normalizer.SUM: "the sum z of the keys, read by the same query"}
ENGINE = {
    Engine.MATRIX: "matrix state",
    Engine.SCAN: "elementwise state",
    Engine.SELECTIVE: "selective scan: N numbers a channel",
}


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def dims(argument: str) -> str:
    """`B T H` as `[B, T, H]`."""
    return f"`[{', '.join(argument.split())}]`"


def signature(title: str, function: Callable[..., Any], keyword: str) -> str:
    """The signature as it stands in the source, one parameter a line."""
    lines: list[str] = []
    parsed = inspect.signature(function)
    for parameter in parsed.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*," not in lines:
            lines.append("*,")
        name = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
        value = json.dumps(parameter.default) if isinstance(parameter.default, str) else repr(parameter.default)
        default = "" if parameter.default is parameter.empty else f" = {value}"
        lines.append(f"{name}: {parameter.annotation}{default},")
    result = "" if keyword == "class" else f" -> {parsed.return_annotation}"
    return "\n".join([f"{keyword} {title}(", *(f"    {line}" for line in lines), f"){result}"])


def docstring(thing: object) -> str:
    """The docstring as written, in a block of its own; cross-references become plain names."""
    return "```text\n" + re.sub(r":\w+:`~?([^`]+)`", r"\1", inspect.getdoc(thing) or "") + "\n```"


def argument_row(argument: Argument) -> tuple[str, ...]:
    """One line of the table of arguments."""
    optional = " (optional)" if argument.optional else ""
    return f"`{argument.name}`", dims(argument.dims), argument.domain.value, argument.meaning + optional


def recurrence_section(mechanism: Mechanism) -> str:
    """The properties of the recurrence, or that there is none."""
    recurrence = mechanism.recurrence
    if recurrence is None:
        return "None: every token reads all earlier tokens, so time grows as N² and the cache as N."
    if recurrence.engine is Engine.SELECTIVE:
        rows = [
            ("engine", ENGINE[recurrence.engine]),
            ("decay", "from the data, e^{dt A}, one a token, channel and number of its state"),
            ("write", "additive: (dt x) Bᵀ is added"),
            ("read", READ[recurrence.read]),
        ]
        return table(("property", "value"), rows)
    given = [argument.dims for argument in mechanism.arguments if argument.domain is Domain.LOG_DECAY]
    gate = (given or [recurrence.decay.value])[0]
    gate = f", {dims(gate)}" if gate else ""
    rows = [
        ("engine", ENGINE[recurrence.engine]),
        ("decay", DECAY[recurrence.decay] + gate),
        ("write", WRITE[recurrence.write]),
        ("read", READ[recurrence.read] + (", plus the bonus Diag(u) k vᵀ" if recurrence.bonus else "")),
        ("normaliser", NORMALIZER[recurrence.normalizer]),
    ]
    return table(("property", "value"), rows)


def own_state(mechanism: Mechanism) -> type | None:
    """The named tuple that a mechanism's function returns as its state, unless the state is that of the recurrence."""
    returned = get_args(get_type_hints(mechanism.function)["return"])[1]
    kinds = [kind for kind in (returned, *get_args(returned)) if isinstance(kind, type) and issubclass(kind, tuple)]
    return next((kind for kind in kinds if kind is not engine.NormalizedState), None)


def state_section(mechanism: Mechanism) -> str:
    """Shape of the function's state and its bytes a sequence."""
    state = None if mechanism.recurrence is None else own_state(mechanism)
    if state is not None:
        fields = ", ".join(f"`{name}`" for name in inspect.get_annotations(state))
        return f"A `{state.__name__}` of {fields}:\n\n{docstring(state)}"
    recurrence = mechanism.recurrence
    if recurrence is None:
        sizes = {argument.name: argument.dims.split()[2:] for argument in mechanism.arguments}
        shapes = [f"`{name}` `[N, S, {', '.join(sizes[name])}]`" for name in ("k", "v")]
        terms = " + ".join(" · ".join(sizes[name]) for name in ("k", "v"))
        return (
            f"The keys and values of all S tokens so far, in their own dtype: {' and '.join(shapes)}. "
            f"S · ({terms}) · bytes per number, for each sequence: it grows with every token."
        )
    if recurrence.engine is Engine.SCAN:
        return "`[N, D]`: 4 · D bytes a sequence in float32, however long it is."
    if recurrence.engine is Engine.SELECTIVE:
        return (
            "`[S, D, N]`, float32 (float64 for float64 inputs); S is B, or the number of packed sequences. "
            "4 · D · N bytes a sequence in float32, however long it is."
        )
    normalized = recurrence.normalizer is Normalizer.SUM
    shapes_ = "`S` `[N, H, K, V]`" + (" and `z` `[N, H, K]`" if normalized else "")
    size = "4 · H · K · (V + 1)" if normalized else "4 · H · K · V"
    return (
        f"{shapes_}, float32 (float64 for float64 inputs); N is B, or the number of packed sequences. "
        f"{size} bytes a sequence in float32, however long it is."
    )


def backend_section(mechanism: Mechanism) -> str:
    """Which backend serves which mode; for softmax attention, what runs instead."""
    if mechanism.recurrence is None:
        return "torch's own kernels; the backends run recurrences."
    rows = [
        (f"`{name}`", *("yes" if mode in modes else "no" for mode in Mode))
        for name, modes in engine.forms(mechanism.recurrence).items()
    ]
    note = (
        "`auto` takes the first that serves the call and that the machine has; `linattn.explain` says which and why "
        "not the others."
    )
    return table(("backend", *(f"`{mode.value}`" for mode in Mode)), rows) + "\n\n" + note


def function_sections(mechanism: Mechanism) -> list[str]:
    """What there is to say of a recurrence and its function."""
    if mechanism.composite:
        return ["A layer made of the layers of other mechanisms: it has no recurrence or function of its own."]
    function = mechanism.function
    query_heads = mechanism.recurrence is None
    heads = "H query heads, G key and value heads" if query_heads else "H value heads, G query and key heads"
    axes = f"{heads} (G divides H), K key size, V value size"
    used = {axis for argument in mechanism.arguments for axis in argument.dims.split()}
    more = {"R": "R writes a token", "P": "P pairs of key channels", "L": "L levels"}
    axes = ", ".join([axes, *(meaning for axis, meaning in more.items() if axis in used)])
    if mechanism.recurrence is not None and mechanism.recurrence.engine is Engine.SELECTIVE:
        axes = "D channels, G groups of them (G divides D), N numbers a channel"
    return [
        "## Recurrence",
        recurrence_section(mechanism),
        "## State",
        state_section(mechanism),
        "## Backends",
        backend_section(mechanism),
        "## Function",
        table(("argument", "shape", "domain", "meaning"), map(argument_row, mechanism.arguments)),
        f"B batch, T tokens, {axes}.",
        f"```python\n{signature(function.__name__, function, 'def')}\n```",
        docstring(function),
    ]


def page(mechanism: Mechanism) -> str:
    """The page of one mechanism."""
    aliases = ", ".join(f"`{alias}`" for alias in mechanism.aliases)
    layer = mechanism.layer
    sections = [
        f"# {mechanism.title}",
        GENERATED,
        f"```text\n{mechanism.equation}\n```",
        f"**When:** {mechanism.when}",
        f"**Paper:** {mechanism.paper}",
        f"**Name:** `{mechanism.name}`" + (f" (also {aliases})" if aliases else ""),
        *function_sections(mechanism),
        "## Layer",
        f"```python\n{signature(layer.__name__, layer, 'class')}\n```",
        docstring(layer),
        f"Its state is a named tuple `{layer.state_type.__name__}({', '.join(layer.state_type._fields)})`:",
        docstring(layer.state_type),
    ]
    return "\n\n".join(sections) + "\n"


def index(mechanisms: list[Mechanism]) -> str:
    """The table of all mechanisms."""
    rows = [
        (
            f"[{m.title}]({m.name}.md)", "–" if m.composite else f"`{m.function.__name__}`", f"`{m.layer.__name__}`",
            m.equation, m.when,
        )
        for m in mechanisms
    ]  # fmt: skip
    header = ("mechanism", "function", "layer", "equation", "when")
    return "\n\n".join(["# Mechanisms", GENERATED, table(header, rows)]) + "\n"


def main() -> int:
    """Write the pages, or with --check say which are not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not current")
    check = parser.parse_args().check
    mechanisms = [registry.get(name) for name in sorted(registry.names(composite=True))]
    pages = {"README.md": index(mechanisms)} | {f"{m.name}.md": page(m) for m in mechanisms}
    stale = []
    FOLDER.mkdir(parents=True, exist_ok=True)
    present = {file.name: file.read_text("utf-8") for file in FOLDER.glob("*.md")}
    for name in sorted(pages.keys() | present.keys()):
        if pages.get(name) == present.get(name):
            continue
        stale.append(name)
        if not check:
            file = FOLDER / name
            file.write_text(pages[name], "utf-8") if name in pages else file.unlink()
    if stale:
        print(f"docs/mechanisms: {'not current, run `make docs`' if check else 'written'}: {', '.join(stale)}")
    else:
        print(f"docs/mechanisms: {len(pages)} pages, all current")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
