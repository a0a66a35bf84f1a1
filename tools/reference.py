"""Writes the reference pages under docs/reference from the declarations in the code, or checks that they are current.

python tools/reference.py            writes
python tools/reference.py --check    exits 1 and names the pages that are out of date
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from quire.base import env
from quire.config.flags import help_text
from quire.config.option import describe
from quire.config.table import Flat, table
from quire.observe.metrics import TABLE

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- Written by tools/reference.py from the code; edit there and run `make reference`. -->\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("%%", "%")


def options() -> str:
    """Every engine option: flag, keyword and file key are the same name."""
    lines = [
        "# Engine options",
        "",
        "Each option is a keyword of `LLM`, `EngineArgs` and `AsyncEngineArgs`, a flag of the command line (with dashes",
        "or underscores), and a key of a `--config` file. An option that is *not available yet* is refused by name.",
    ]
    for group, rows in groupby(sorted(table().values(), key=lambda flat: flat.group), key=lambda flat: flat.group):
        lines += ["", f"## {group}", "", "| option | value | what it does |", "|---|---|---|"]
        lines += [option_row(flat) for flat in rows]
    return "\n".join(lines) + "\n"


def option_row(flat: Flat) -> str:
    kind = cell(describe(flat.declared.given))
    return f"| `{flat.name}` | {kind} | {cell(help_text(flat.declared.option))} |"


def variables() -> str:
    lines = [
        "# Environment variables",
        "",
        "A variable is read as `QUIRE_NAME`, then as `VLLM_NAME`; the first reading is kept. The last ones are read as",
        "they are.",
        "",
        "| variable | default | what it does |",
        "|---|---|---|",
    ]
    for variable in sorted(env.ALL.values(), key=lambda v: (len(v.spellings) == 1, v.name)):
        choices = f" One of {', '.join(variable.choices)}." if variable.choices else ""
        default = "unset" if variable.default is None else f"`{variable.default}`"
        lines.append(f"| `{variable.spellings[0]}` | {default} | {cell(variable.doc + choices)} |")
    return "\n".join(lines) + "\n"


def metrics() -> str:
    lines = [
        "# Metrics",
        "",
        "What `LLM.get_metrics()` returns when `disable_log_stats=False`. Every metric has the labels `model_name` and",
        "`engine`. Names and buckets are vLLM's.",
        "",
        "| metric | kind | further label | meaning |",
        "|---|---|---|---|",
    ]
    for entry in TABLE:
        label = f"`{entry.label}`: {', '.join(entry.values)}" if entry.label else ""
        lines.append(f"| `{entry.name}` | {entry.kind} | {label} | {cell(entry.doc)} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    made = {"options.md": options(), "environment.md": variables(), "metrics.md": metrics()}
    return {FOLDER / name: NOTE + text for name, text in made.items()}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    if check and stale:
        print(f"out of date: {', '.join(path.name for path in stale)}; run  make reference")
        return 1
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages()[path])
        print(f"wrote {path.relative_to(FOLDER.parents[1])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
