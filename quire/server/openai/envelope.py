"""Envelope: what all chunks and answers of a call have in common, encoded once; and its usage.

In: the call's id, model, options, and the counts of its tokens as they grow. Out: chunks and whole answers around the
choices of a dialect. All bytes are those of the dialect's wire types; streaming costs are paid per chunk, so whatever
can be encoded beforehand is. Must not know: choices.
"""

from __future__ import annotations

import functools
import time
from functools import cached_property
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from quire.config.server import ServerConfig
from quire.server.openai.params import Opened
from quire.server.openai.protocol import GenerateRequest, PromptTokensDetails, Usage
from quire.server.served import ServedModel

encode = msgspec.json.Encoder().encode
Wire = TypeVar("Wire", bound=BaseModel)


def to_json(value: BaseModel) -> bytes:
    """The fields that were set, in the order in which the type has them."""
    encoded: bytes = value.__pydantic_serializer__.to_json(value, exclude_unset=True)
    return encoded


class WireTemplate:
    """The bytes of a wire value in which some values are left open: `holes` stand for them, in the type's order."""

    def __init__(self, value: BaseModel, *holes: object) -> None:
        self._parts: list[bytes] = []
        rest = to_json(value)
        for hole in holes:
            part, mark, rest = rest.partition(encode(hole))
            assert mark, hole
            self._parts.append(part)
        self._rest = rest

    def fill(self, *values: object) -> bytes:
        pieces: list[bytes] = []
        for part, value in zip(self._parts, values, strict=True):
            pieces += (part, encode(value))
        return b"".join([*pieces, self._rest])


@functools.cache
def _head(chunk: type[BaseModel]) -> WireTemplate:
    empty = chunk(id="<id>", object=_object_of(chunk), created=-1, model="<model>", choices=[])
    return WireTemplate(empty, "<id>", -1, "<model>")


class Envelope:
    def __init__(
        self, options: ServerConfig, model: ServedModel, request: GenerateRequest, opened: Opened, public_id: str,
        chunk: type[BaseModel],
    ) -> None:  # fmt: skip
        """`chunk`: the wire type of a stream's events."""
        self._common = {"id": public_id, "created": int(time.time()), "model": model.name}
        self._chunk = chunk
        self._fingerprint = model.fingerprint
        self._num_prompt_tokens = opened.num_prompt_tokens
        self._details = options.enable_prompt_tokens_details
        self._cached: dict[str, int] = {}
        streaming = request.stream_options
        self.include_usage = bool((streaming and streaming.include_usage) or options.enable_force_include_usage)
        self.continuous = bool(streaming and streaming.include_usage and streaming.continuous_usage_stats)

    @cached_property
    def head(self) -> bytes:
        """An event up to its first choice."""
        common = self._common
        return b"data: " + _head(self._chunk).fill(common["id"], common["created"], common["model"])[: -len(b"]}")]

    def event(self, choice: BaseModel, usage: Usage | None = None, **further: Any) -> bytes:
        """A chunk with one choice; `further` fields stand behind it."""
        if usage is not None:
            further = {"usage": usage, **further}
        if not further:
            return self.head + to_json(choice) + b"]}\n\n"
        return b"data: " + to_json(self._around(choices=[choice], **further)) + b"\n\n"

    def note_cached(self, request_id: str, num_cached_tokens: int | None) -> None:
        self._cached[request_id] = num_cached_tokens or 0

    def usage(self, completion_tokens: int, prompt_tokens: int | None = None, **further: Any) -> Usage:
        """As a stream writes it; of one prompt where it is given, else of all."""
        prompts = self._num_prompt_tokens if prompt_tokens is None else prompt_tokens
        if self._details:
            further["prompt_tokens_details"] = PromptTokensDetails(cached_tokens=sum(self._cached.values()))
        return Usage(
            prompt_tokens=prompts,
            total_tokens=prompts + completion_tokens,
            completion_tokens=completion_tokens,
            **further,
        )

    def usage_chunk(self, completion_tokens: int) -> bytes:
        last = self._around(usage=self.usage(completion_tokens), system_fingerprint=self._fingerprint)
        return b"data: " + to_json(last) + b"\n\n"

    def whole(self, kind: type[Wire], choices: list[Any], completion_tokens: int, **further: Any) -> Wire:
        """An answer that is not streamed."""
        return kind(
            **self._common,
            object=_object_of(kind),
            choices=choices,
            service_tier=None,
            system_fingerprint=self._fingerprint,
            usage=self.usage(completion_tokens, prompt_tokens_details=None, completion_tokens_details=None),
            **further,
            kv_transfer_params=None,
            ec_transfer_params=None,
            metrics=None,
        )

    def _around(self, **fields: Any) -> BaseModel:
        return self._chunk(**self._common, object=_object_of(self._chunk), **{"choices": [], **fields})


def _object_of(kind: type[BaseModel]) -> str:
    """What the type says of itself on the wire."""
    name: str = kind.model_fields["object"].annotation.__args__[0]  # type: ignore[union-attr]
    return name
