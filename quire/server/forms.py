"""Bodies of type multipart/form-data: from their bytes to a wire type, with limits before work.

Fields are text, one is a file. A body is bounded before it is here (middleware.py); what is counted here is its parts,
their heads and the length of fields. The file is a view of the body, never a copy. Must not know: routes, what fields
mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel
from starlette.exceptions import HTTPException

from quire.schema.errors import InputError

MOST_PARTS = 128
MOST_HEAD = 1 << 12  # bytes of the headers of one part
MOST_FIELD = 1 << 16  # bytes of a field
_FORM = "multipart/form-data"
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;",]{1,70}))(?:\s*;|\s*$)', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename)\*?=(?:"((?:[^"\\\r\n]|\\.)*+)"|([^\s;"]*+))', re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"
Form = TypeVar("Form", bound=BaseModel)


@dataclass(frozen=True)
class FormFile:
    name: str  # that the client's file has; nothing is opened by it
    data: memoryview

    def __repr__(self) -> str:
        """As refusals show it."""
        return f"a file of {len(self.data)} bytes"


@dataclass
class FormParts:
    fields: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, FormFile] = field(default_factory=dict)


def boundary_of(content_type: str) -> bytes:
    """What separates the parts. 415 for a body of another type."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != _FORM:
        raise HTTPException(415, f"the body must be sent as Content-Type: {_FORM}, not {kind[:100]!r}")
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise InputError(f"Content-Type: {_FORM} needs a boundary of 1 to 70 characters", param="body")
    return b"--" + (match[1] or match[2]).encode("latin-1")


def read_parts(body: bytes | bytearray, boundary: bytes) -> FormParts:
    """One pass over the body."""
    view, parts, num = memoryview(body), FormParts(), 0
    place = 0 if body.startswith(boundary) else body.find(b"\r\n" + boundary, 0, MOST_HEAD) + 2
    if place == 1:
        raise InputError(
            f"the form has no parts: its boundary is not in the first {min(len(body), MOST_HEAD)} bytes", param="body"
        )
    while True:
        place += len(boundary)
        if body[place : place + 2] == b"--":
            return parts
        begin = body.find(b"\r\n", place, place + MOST_HEAD)
        if begin < 0 or body[place:begin].strip(b" \t"):
            raise InputError("the form has a boundary that no line ends", param="body")
        num += 1
        if num > MOST_PARTS:
            raise InputError(f"the form has more than {MOST_PARTS} parts", param="body")
        head_end = body.find(_HEAD_END, begin, begin + MOST_HEAD)
        if head_end < 0:
            raise InputError(f"part {num} of the form has a head of more than {MOST_HEAD} bytes, or none", param="body")
        end = body.find(b"\r\n" + boundary, head_end + 2)
        if end < 0:
            raise InputError(f"part {num} of the form has no end", param="body")
        start = head_end + len(_HEAD_END)
        _take(parts, bytes(body[begin:head_end]), view[start : max(start, end)], num)
        place = end + 2


def _take(parts: FormParts, head: bytes, data: memoryview, num: int) -> None:
    name, filename = _names(head, num)
    if filename is not None:
        if name in parts.files:
            raise InputError(f"the form has two files named {name!r:.60}", param=name[:60])
        parts.files[name] = FormFile(filename, data)
        return
    if len(data) > MOST_FIELD:
        raise InputError(f"{name[:60]} has {len(data)} bytes; the limit of a field is {MOST_FIELD}", param=name[:60])
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError as wrong:
        raise InputError(f"{name[:60]} is not UTF-8: {wrong.reason}", param=name[:60]) from None
    parts.fields.setdefault(name.removesuffix("[]"), []).append(text)


def _names(head: bytes, num: int) -> tuple[str, str | None]:
    """(name, file name or None) of a part."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            found_names = {match[1].lower(): match[2] or match[3] or "" for match in _PARAMETER.finditer(value)}
            if found_names.get("name"):
                return found_names["name"], found_names.get("filename")
    raise InputError(f"part {num} of the form has no name in its Content-Disposition", param="body")


def read_form(wire: type[Form], lists: frozenset[str], body: bytes | bytearray, boundary: bytes) -> Form:
    """`lists`: the fields that may come several times; of any other the last one counts."""
    parts = read_parts(body, boundary)
    values: dict[str, object] = {
        name: texts if name in lists else texts[-1] for name, texts in parts.fields.items() if any(texts)
    }
    for name, file in parts.files.items():  # one that nobody reads would keep the whole body in memory
        values[name] = file if name in wire.model_fields else FormFile(file.name, memoryview(b""))
    return wire.model_validate(values)
