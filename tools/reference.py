"""Writes the reference pages under docs/reference from the declarations in the code, or checks that they are current.

python tools/reference.py            writes
python tools/reference.py --check    exits 1 and names the pages that are out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from quire.config.docs import NOTE, environment_page, options_page
from quire.observe.metrics import TABLE

FOLDER = Path(__file__).parents[1] / "docs" / "reference"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("%%", "%")


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
    made = {"options.md": options_page(), "environment.md": environment_page(), "metrics.md": metrics()}
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
