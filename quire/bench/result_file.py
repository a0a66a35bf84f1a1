"""Where a result goes: a place that cannot be written is refused before the measurement, which may take hours.

In: the option that names a file, and its path. Out: an error of one line, before the run and after it; the JSON file.
Must not know: what is measured.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.schema.errors import InputError


def check_place(option: str, path: str | None) -> None:
    """Fail before the run, not after it. None: no file is wanted."""
    if path is None:
        return
    folder = os.path.dirname(path) or "."
    reason = ""
    if not os.path.isdir(folder):
        reason = f"there is no folder {folder!r}"
    elif os.path.isdir(path):
        reason = "it is a folder"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        reason = "not writable"
    if reason:
        raise InputError(f"{option} {path!r}: {reason}", param=_param(option), value=path)


@contextmanager
def written_to(option: str, path: object) -> Iterator[None]:
    """What fails while the file or folder at `path` is made or written, in one line."""
    try:
        yield
    except OSError as wrong:
        raise InputError(f"{option} {str(path)!r}: {wrong.strerror or wrong}", param=_param(option)) from None


def write_json(path: str | None, result: dict[str, Any]) -> None:
    """For --output-json."""
    if path is None:
        return
    with written_to("--output-json", path), open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(result, indent=4) + "\n")
    print(f"wrote {path}", file=sys.stderr)


def _param(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")
