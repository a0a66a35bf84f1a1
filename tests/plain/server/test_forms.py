"""Forms: parts as httpx and other clients write them, and what is refused before work is done with it."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from quire.schema.errors import InputError
from quire.server import forms
from quire.server.forms import FormParts, boundary_of, read_form, read_parts
from quire.server.openai.speech_protocol import LISTS, TranscriptionRequest


def sent(data: dict[str, Any], files: dict[str, Any]) -> tuple[bytes, str]:
    """As httpx sends them."""
    request = httpx.Request("POST", "http://h/", data=data, files=files)
    return request.read(), request.headers["content-type"]


def parsed(body: bytes, content_type: str) -> FormParts:
    return read_parts(body, boundary_of(content_type))


def test_what_httpx_sends_is_read() -> None:
    audio = bytes(range(256)) * 50 + b"\r\n--" + b"\r\n\r\n"
    fields = {"model": "m", "temperature": "0.5", "timestamp_granularities[]": ["word", "segment"], "prompt": "Ü\r\nx"}
    parts = parsed(*sent(fields, {"file": ('a "b".wav', audio, "audio/wav")}))
    assert parts.fields == {
        "model": ["m"], "temperature": ["0.5"], "timestamp_granularities": ["word", "segment"], "prompt": ["Ü\r\nx"],
    }  # fmt: skip
    assert bytes(parts.files["file"].data) == audio


def test_the_file_is_a_view_of_the_body() -> None:
    body, content_type = sent({}, {"file": ("a", b"x" * 1000)})
    data = parsed(body, content_type).files["file"].data
    assert data.obj is body


def test_fields_become_the_wire_type() -> None:
    fields = {"stream": "true", "top_k": "5", "seed": "7", "language": "", "vllm_xargs": '{"a": 1}', "unknown": "u"}
    body, content_type = sent(fields, {"file": ("a", b"x")})
    request = read_form(TranscriptionRequest, LISTS, body, boundary_of(content_type))
    assert request.stream is True and request.top_k == 5 and request.seed == 7 and request.language is None
    assert request.vllm_xargs == {"a": 1} and request.response_format == "json" and request.temperature == 0.0
    with pytest.raises(ValidationError, match="file"):
        read_form(TranscriptionRequest, LISTS, *_no_file())
    for wrong in ({"stream": "maybe"}, {"temperature": "nan"}, {"response_format": "xml"}, {"vllm_xargs": "{"},
                  {"vllm_xargs": '{"a": "\\ud800"}'}, {"vllm_xargs": '{"a":' + "[" * 9999},
                  {"vllm_xargs": '{"a": NaN}'}, {"timestamp_granularities": "year"}, {"file": "text"}):  # fmt: skip
        files = {} if "file" in wrong else {"file": ("a", b"x")}
        body, content_type = sent(wrong, files or {"other": ("o", b"")})
        with pytest.raises(ValidationError):
            read_form(TranscriptionRequest, LISTS, body, boundary_of(content_type))


def _no_file() -> tuple[bytes, bytes]:
    body, content_type = sent({"model": "m"}, {"other": ("a", b"x")})
    return body, boundary_of(content_type)


def part(head: str, data: bytes = b"v") -> bytes:
    return b"--b\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n"


NAME = 'Content-Disposition: form-data; name="a"'


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "no parts"),
        (b"x" * 10_000 + b"\r\n--b--", "no parts"),
        (b"--bxx\r\n", "no line ends"),
        (b"--b", "no line ends"),
        (b"--b\r\n" + NAME.encode(), "has a head"),
        (part(NAME)[:-2], "no end"),
        (part("X: y") + b"--b--", "no name"),
        (part('Content-Disposition: form-data; name=""') + b"--b--", "no name"),
        (part(NAME + "\r\nX: " + "y" * forms.MOST_HEAD), "has a head"),
        (part(NAME, b"x" * (forms.MOST_FIELD + 1)) + b"--b--", "limit of a field"),
        (part(NAME, b"\xff") + b"--b--", "not UTF-8"),
        (part(NAME) * (forms.MOST_PARTS + 1) + b"--b--", "more than 128 parts"),
        (part(NAME + '; filename="x"') * 2 + b"--b--", "two files"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(InputError, match=why):
        read_parts(body, b"--b")


def test_types_and_boundaries() -> None:
    assert boundary_of("multipart/form-data; boundary=abc") == b"--abc"
    assert boundary_of('Multipart/Form-Data; charset=utf-8; boundary="a b"; x=y') == b"--a b"
    for wrong in ("multipart/form-data", "multipart/form-data; boundary=" + "x" * 71, "multipart/form-data; boundary="):
        with pytest.raises(InputError, match="boundary"):
            boundary_of(wrong)
    with pytest.raises(HTTPException, match="multipart"):
        boundary_of("application/json")


def test_any_bytes_are_read_or_refused() -> None:
    """Whatever the bytes, an answer or an InputError; and the work is linear in them."""
    chance = random.Random(7)
    pieces = [b"--b", b"\r\n", b"--", b"\r\n\r\n", NAME.encode(), b'; filename="f"', b"x", b'"', b"\\", b"\xff"]
    for _ in range(3000):
        body = b"".join(chance.choice(pieces) for _ in range(chance.randrange(30)))
        with contextlib.suppress(InputError):
            read_parts(body, b"--b")


def test_an_empty_part_ends_at_once() -> None:
    parts = read_parts(b"--b\r\n" + NAME.encode() + b"\r\n\r\n\r\n--b--", b"--b")
    assert parts.fields == {"a": [""]}


def test_a_file_where_text_belongs() -> None:
    """The refusal tells what came, not where in memory it lies."""
    body, content_type = sent({}, {"file": ("a", b"x"), "prompt": ("b", b"yy")})
    with pytest.raises(ValidationError, match="a file of 2 bytes") as caught:
        read_form(TranscriptionRequest, LISTS, body, boundary_of(content_type))
    assert " at 0x" not in str(caught.value)


def test_a_file_that_nobody_reads_is_forgotten() -> None:
    body, content_type = sent({}, {"file": ("a", b"x"), "other": ("b", b"yy")})
    request = read_form(TranscriptionRequest, LISTS, body, boundary_of(content_type))
    assert bytes(request.file.data) == b"x" and request.model_extra is not None
    assert request.model_extra["other"].name == "b" and not request.model_extra["other"].data
