"""What an earlier run of a batch has answered already, read from its output file.

In: the output of a run that was interrupted, and the input it belongs to. Out: the custom_ids that need no second
request, and how to cut the file back to their lines. An answer is a line with status 200; a line that failed and a last
line that was torn are dropped and asked again. Must not know: routes, engines.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import msgspec

from quire.schema.errors import InputError, counted

LONGEST_ANSWER = 1 << 30  # bytes of a line; a file with a longer one is not the output of a batch
NAMES_COMPARED = 1 << 20  # of an input that may be larger than memory
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
INVALID = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # no JSON, not UTF-8, nested too deep


class _Response(msgspec.Struct):
    status_code: int


class _OutputLine(msgspec.Struct):
    """What tells an answered line from a failed one; the rest of the line is skipped."""

    custom_id: str | None
    response: _Response


class _InputLine(msgspec.Struct):
    custom_id: Any = None


class InputLines(NamedTuple):
    """What the lines of an input are, before any is asked. `repeated`: those whose custom_id an earlier line has."""

    total: int
    repeated: int = 0
    first_repeated: str = ""


@dataclass
class Earlier:
    """The answers of an earlier run. `whole`: every line is kept as it stands, so that the file only grows."""

    place: str
    done: set[str] = field(default_factory=set)
    dropped: int = 0
    whole: bool = True

    def cut_back(self) -> None:
        """Leaves the kept lines in the file, each with its line end. At no time is a kept answer missing from it."""
        if self.whole or not os.path.exists(self.place):
            return
        target = os.path.realpath(self.place)
        number, path = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".run-batch-")
        try:
            with os.fdopen(number, "wb") as copy, open(target, "rb") as source:
                for raw, answered in _read_answers(self.place, source):
                    if answered in self.done:
                        copy.write(raw.rstrip(b"\r\n") + b"\n")
                copy.flush()
                os.fsync(copy.fileno())
            shutil.copymode(target, path)
            os.replace(path, target)
        except BaseException:
            os.unlink(path)
            raise
        self.whole = True


def read_earlier(place: str) -> Earlier:
    """The output file of an earlier run; one that does not exist has no answers."""
    earlier = Earlier(place)
    try:
        source = open(place, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return earlier
    with source:
        for raw, answered in _read_answers(place, source):
            earlier.whole = earlier.whole and answered is not None and raw.endswith(b"\n")
            if answered is None:
                earlier.dropped += 1
            elif answered in earlier.done:
                raise _refused(f"{place} has two answers for custom_id {answered[:200]!r}")
            else:
                earlier.done.add(answered)
    return earlier


def check_input(earlier: Earlier, source: IO[bytes], longest: int) -> InputLines:
    """Each answer must belong to exactly one line of the input."""
    missing, seen = set(earlier.done), set[int]()
    total, repeated, first_repeated = 0, 0, ""
    for _, raw in read_lines(source, longest):
        total += 1
        name = None if raw is None else custom_id_of(raw)
        if name is None:
            continue
        if name in missing:
            missing.discard(name)
        elif name in earlier.done:
            raise _refused(f"custom_id {name[:200]!r} occurs twice in the input: whose answer there is cannot be told")
        if hash(name) in seen:
            repeated, first_repeated = repeated + 1, first_repeated or name
        elif len(seen) < NAMES_COMPARED:
            seen.add(hash(name))
    source.seek(0)
    if missing:
        raise _refused(
            f"{earlier.place} has {counted(len(missing), 'answer')} that the input does not ask for, such as custom_id "
            f"{min(missing)[:200]!r}: it belongs to another input file"
        )
    return InputLines(total, repeated, first_repeated)


def read_lines(source: IO[bytes], longest: int) -> Iterator[tuple[int, bytes | None]]:
    """(number, line) of every line that is not blank, without a byte order mark; None: one longer than allowed."""
    number = 0
    while raw := source.readline(longest + 1):
        number += 1
        if number == 1:
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
        if len(raw) > longest and not raw.endswith(b"\n"):
            while (rest := source.readline(longest)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif raw.strip():
            yield number, raw


def custom_id_of(raw: bytes) -> str | None:
    """The name of a line, also of one that is otherwise wrong, if it has one."""
    try:
        name = msgspec.json.decode(raw, type=_InputLine).custom_id
    except INVALID:
        return None
    return name if isinstance(name, str) else None


def _read_answers(place: str, source: IO[bytes]) -> Iterator[tuple[bytes, str | None]]:
    """(line, custom_id of its answer) of every line; None for one that failed and for a last one that is torn."""
    for number, raw in read_lines(source, LONGEST_ANSWER):
        if raw is None:
            raise _refused(f"line {number} of {place} is longer than {LONGEST_ANSWER} bytes")
        try:
            line = msgspec.json.decode(raw, type=_OutputLine)
        except INVALID as wrong:
            if raw.endswith(b"\n"):
                raise _refused(f"line {number} of {place} is not the output of a batch: {wrong}") from None
            yield raw, None
            return
        yield raw, line.custom_id if line.response.status_code == 200 else None


def _refused(words: str) -> InputError:
    return InputError(f"--resume: {words}", param="resume")
