"""The pages docs/reference/options.md and environment.md, from the declarations. Written by reference.py.

`python tools/options_page.py [--check]` writes these two alone; --check only compares and names what is stale.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from quire.base import env
from quire.base.unread import UNREAD
from quire.config.args import AsyncOptions
from quire.config.engine import EngineConfig
from quire.config.option import INERT, LATER, READY, OptionField, declarations, limits, parts
from quire.config.server import ServerConfig
from quire.config.table import group_of
from quire.config.unavailable import all_rows

NOTE = "<!-- Written by tools/reference.py from the code; edit there and run `make reference`. -->\n"
_WORDS = {
    READY: "**available**: works in this version",
    LATER: "**not yet**: refused by name, unless the value is one of those listed",
    INERT: "**no effect**: accepted and named in the log: it holds already, or tunes what Quire does not have",
}


class Row(NamedTuple):
    name: str  # how it is written
    declared: OptionField
    later: bool  # the mapping it is a key of cannot be given yet

    @property
    def usable(self) -> bool:
        return self.declared.option.status is not LATER and not self.later


def options_page() -> str:
    """Every option, a table per group."""
    sections = list(_sections())
    single = [row for _, _, rows in sections for row in rows if group_of(row.declared.type) is None]
    ready = sum(row.usable for row in single)
    lines = [
        "# Options",
        "",
        f"{len(single)} options, {ready} of them usable in this version. One declaration makes the keyword of",
        "`LLM(...)` and `EngineArgs(...)`, the command-line flag (`--max-num-seqs`, underscores work too), the key in",
        "a `--config` file, and the row below. A name with a dot is a key of a mapping:",
        "`compilation_config={'mode': 0}` or `--compilation-config.mode 0`.",
        "",
        *(f"- {words}" for words in _WORDS.values()),
        "",
        *_documented(),
        "",
    ]
    for title, doc, rows in sections:
        lines += [f"## {title}", "", doc, "", "| option | values | default | meaning | |", "|---|---|---|---|---|"]
        lines += [_row(row) for row in rows] + [""]
    return "\n".join(lines)


def _documented() -> list[str]:
    """Since when vLLM has had what is not available here."""
    rows = [row for rows in all_rows().values() for row in rows]
    at = Counter(row.since for row in rows)
    return [
        f"{len(rows)} options of vLLM are not available or have no effect: `quire/config/unavailable.txt` says why.",
        f"vLLM's documentation has {at['0.13']} of them at 0.13, {at['<0.32']} more by a page between then and 0.32,",
        f"and {at['0.32']} more at 0.32.",
    ]


def _sections() -> Iterator[tuple[str, str, list[Row]]]:
    yield from _walk(EngineConfig, "", False)
    for name, options in (("AsyncEngineArgs", AsyncOptions), ("ServerConfig", ServerConfig)):
        rows = [Row(mine.option.name or field, mine, False) for field, mine in declarations(options).items()]
        yield name, options.__doc__ or "", rows


def _walk(group: type[Any], mapping: str, later: bool) -> Iterator[tuple[str, str, list[Row]]]:
    """`mapping` is the option whose keys these are, '' where a group is only a heading."""
    declared = declarations(group)
    names = {name: _name(mine, mapping) for name, mine in declared.items()}
    rows = [Row(names[name], mine, later) for name, mine in declared.items() if names[name]]
    if rows:
        yield group.__name__, (group.__doc__ or "").strip(), rows
    for field in dataclasses.fields(group):
        inner = group_of(field.type)
        if inner is not None:
            whole = declared.get(field.name)
            unmade = later or (whole is not None and whole.option.status is LATER)
            yield from _walk(inner, names.get(field.name, ""), unmade)


def _name(mine: OptionField, mapping: str) -> str:
    """How a user writes it; '' if it can only be set in Python, on the group itself."""
    if mine.option.flat:
        return mine.option.name or mine.field
    return f"{mapping}.{mine.field}" if mapping else ""


def _row(row: Row) -> str:
    o = row.declared.option
    name = f"`{row.name}`"
    if o.flags:
        name += " " + " ".join(f"`{flag}`" for flag in o.flags)
    values = " or ".join(dict.fromkeys(_values(part) for part in parts(row.declared.accepted) if part is not NoneType))
    if o.choices:
        values = ", ".join(f"`{choice}`" for choice in o.choices)
    if bounds := limits(o):
        values += f", {bounds}"
    state = LATER.value if row.later else o.status.value
    if state == READY.value and group_of(row.declared.type) is not None:
        state = "its keys are below"
    if o.status is LATER and o.ready:
        state += f" (works: {', '.join(f'`{value}`' for value in (o.unset, *o.ready) if value is not None)})"
    if o.hints:
        state += f" (no effect: {', '.join(f'`{value}`' for value in o.hints)})"
    if o.why and (o.status is not LATER or o.ready):
        state += f": {o.why}"
    default = "unset" if o.unset is None else f"`{o.unset!r}`"
    cells = (name, values, default, o.doc, state)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _values(part: Any) -> str:
    origin = get_origin(part)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(part))
    if origin is tuple:
        return "list"
    if origin is dict or group_of(part) is not None:
        return "mapping"
    return {int: "integer", float: "number", str: "text", bool: "true or false"}.get(part, "any")


def environment_page() -> str:
    """Every environment variable: those that are read, and vLLM's that are known and are not."""
    read = [f"VLLM_{name}" for name, variable in env.ALL.items() if f"VLLM_{name}" in variable.spellings]
    lines = [
        "# Environment variables",
        "",
        f"{len(env.ALL)} variables are read, {len(read)} of them under vLLM's prefix too. {len(UNREAD)} further ones",
        "of vLLM are known and have no effect: a start names those that are set, with the reason, in one warning. Any",
        "other name that begins with `QUIRE_` or `VLLM_` is in a second warning, or with",
        "`--fail-on-environ-validation` an error.",
        "",
        "## Read",
        "",
        "Each is read once, at first use. Where two spellings are given, the first wins.",
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
    ]
    for variable in env.ALL.values():
        names = " or ".join(f"`{spelling}`" for spelling in variable.spellings)
        default = "unset" if variable.default is None else f"`{variable.default}`"
        choices = f" One of {', '.join(variable.choices)}." if variable.choices else ""
        lines.append(f"| {names} | {default} | {variable.doc}{choices} |".replace("\n", " "))
    lines += ["", "## Known, without effect", "", "| variable | why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in sorted(UNREAD.items())]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tools/options_page.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is stale")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "docs" / "reference", help="folder of the pages"
    )
    args = parser.parse_args(argv)
    stale = 0
    for name, text in (("options.md", options_page()), ("environment.md", environment_page())):
        page = args.out / name
        if page.exists() and page.read_text(encoding="utf-8") == NOTE + text:
            continue
        if args.check:
            sys.stderr.write(f"{page} is stale: run  make reference\n")
            stale += 1
        else:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(NOTE + text, encoding="utf-8")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
