"""Envelope: the parts of every chunk and answer of a call that do not change, encoded once; and its usage.

In: the call's id, model, options, and the counts of its tokens as they grow. Out: bytes that a dialect puts its choices
between. Streaming costs are paid per chunk, so whatever can be encoded beforehand is. Must not know: choices.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from quire.config.server import ServerConfig
from quire.server.openai.params import Opened
from quire.server.openai.protocol import GenerateRequest
from quire.server.served import ServedModel

encode = msgspec.json.Encoder().encode


class Envelope:
    def __init__(
        self, options: ServerConfig, model: ServedModel, request: GenerateRequest, opened: Opened, public_id: str,
        kind: str,
    ) -> None:  # fmt: skip
        self.public_id, self.kind = public_id, kind
        self.created = int(time.time())
        self.model = model.name
        self.fingerprint = model.fingerprint
        self.num_prompt_tokens = opened.num_prompt_tokens
        self._details = options.enable_prompt_tokens_details
        self._cached: dict[str, int] = {}
        asked = request.stream_options
        self.include_usage = bool((asked and asked.include_usage) or options.enable_force_include_usage)
        self.continuous = bool(asked and asked.include_usage and asked.continuous_usage_stats)
        common = {"id": public_id, "object": kind, "created": self.created, "model": self.model}
        self.head = b"data: " + encode(common)[:-1] + b',"choices":['
        self.tail = b"]}\n\n"

    def note_cached(self, request_id: str, num_cached_tokens: int | None) -> None:
        self._cached[request_id] = num_cached_tokens or 0

    def usage(self, completion_tokens: int, prompt_tokens: int | None = None) -> dict[str, Any]:
        """As a stream writes it; of one prompt where it is given, else of all."""
        prompts = self.num_prompt_tokens if prompt_tokens is None else prompt_tokens
        found: dict[str, Any] = {
            "prompt_tokens": prompts,
            "total_tokens": prompts + completion_tokens,
            "completion_tokens": completion_tokens,
        }
        if self._details:
            found["prompt_tokens_details"] = {"cached_tokens": sum(self._cached.values())}
        return found

    def usage_chunk(self, completion_tokens: int) -> bytes:
        usage = encode(self.usage(completion_tokens))
        return self.head + b'],"usage":' + usage + b',"system_fingerprint":' + encode(self.fingerprint) + b"}\n\n"

    def whole(self, choices: list[dict[str, Any]], completion_tokens: int, **further: Any) -> bytes:
        """An answer that is not streamed."""
        usage = self.usage(completion_tokens)
        usage.setdefault("prompt_tokens_details", None)
        usage["completion_tokens_details"] = None
        return encode(
            {
                "id": self.public_id,
                "object": self.kind,
                "created": self.created,
                "model": self.model,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": self.fingerprint,
                "usage": usage,
                **further,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )
