"""The fenced blocks of the docs, page by page, and which of them are run by which test.

A block that cannot run says why in a line before it: `<!-- fragment: needs a checkpoint -->`. Every other block of
Python runs as it stands (tests/engine/test_docs_examples.py), or against a server if it asks one, as do commands that
begin with curl (tests/server/test_docs_endpoints.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SERVER = "http://localhost:8000"
_FENCE = re.compile(r"(?:^<!-- fragment: ([^\n]+) -->\n)?^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    page: str  # relative to the repository
    number: int  # among the blocks of its page
    language: str
    code: str
    why_not: str  # why it cannot run; empty if it does

    @property
    def name(self) -> str:
        return f"{Path(self.page).stem}-{self.number}"


def pages() -> list[Path]:
    written = (ROOT / "docs/reference").glob("*.md")  # by tools/reference.py, with signatures in place of programs
    found = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")} - {*written}
    return sorted([*found, *(ROOT / "compat").glob("*.md"), *(ROOT / "examples").rglob("*.md")])


def blocks() -> list[Block]:
    found = []
    for page in pages():
        for number, one in enumerate(_FENCE.finditer(page.read_text())):
            why, language, code = one.groups()
            found.append(Block(page.relative_to(ROOT).as_posix(), number, language, code, why or ""))
    return found


def programs() -> list[Block]:
    """Python that needs no server."""
    return [
        block for block in blocks() if block.language == "python" and not block.why_not and SERVER not in block.code
    ]


def asking() -> list[Block]:
    """Python and commands that ask a server."""
    return [
        block for block in blocks() if block.language in ("python", "sh") and not block.why_not and SERVER in block.code
    ]
