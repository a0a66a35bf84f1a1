"""Lays out build/docs for mkdocs: the pages as they lie in the repository, and the files that they link to.

python tools/site.py            then mkdocs build --strict

Pages link by relative paths that work in a checkout and on a forge; here they keep working, because nothing moves.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "docs"
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def pages() -> list[Path]:
    """Every page people read, by the rule of the tests that follow links."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    return sorted([*found, *(ROOT / "compat").glob("*.md"), *(ROOT / "examples").rglob("*.md")])


def linked(page: Path) -> set[Path]:
    """Files that are no pages: pictures, programs, recipes."""
    targets = (target for target in LINK.findall(page.read_text()) if not re.match(r"\w+:", target))
    files = ((page.parent / target).resolve() for target in targets)
    return {path for path in files if path.is_file() and path.suffix != ".md"}


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    everything = pages()
    for path in [*everything, *sorted(set().union(*map(linked, everything)))]:
        target = OUT / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    print(f"{len(everything)} pages in {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
