"""Requests that are submitted together, on their way to an engine process: what they share travels once.

In: EngineRequests of one call (n answers, several prompts), which hold the very same objects wherever nothing differs.
Out: messages in which each of these objects stands once; unpacked, the requests share them again. Must not know: wires.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.schema.messages import EngineRequest, EngineRequests, OneOfMany

_MOST_REQUESTS = 4096  # of one message
_MOST_TOKENS = 1 << 20  # of the prompts in one message: the engine may begin while the next one is encoded


def pack(requests: Sequence[EngineRequest]) -> Iterator[EngineRequest | EngineRequests]:
    """The requests in their order, as few messages."""
    if len(requests) == 1:
        yield requests[0]
        return
    packet = _Packet()
    for request in requests:
        if packet.is_full:
            yield packet.message()
            packet = _Packet()
        packet.add(request)
    if packet.requests:
        yield packet.message()


def unpack(message: EngineRequests) -> list[EngineRequest]:
    return [
        msgspec.structs.replace(
            message.commons[one.common],
            request_id=one.request_id,
            prompt_token_ids=message.prompts[one.prompt],
            seed=one.seed,
            max_tokens=one.max_tokens,
            arrival=one.arrival,
            parent_id=one.parent_id,
        )
        for one in message.requests
    ]


class _Packet:
    def __init__(self) -> None:
        self.requests: list[OneOfMany] = []
        self._commons: dict[Any, tuple[int, EngineRequest]] = {}
        self._prompts: dict[int, tuple[int, tuple[int, ...]]] = {}  # by identity; they are kept alive here
        self._num_tokens = 0

    @property
    def is_full(self) -> bool:
        return len(self.requests) >= _MOST_REQUESTS or self._num_tokens >= _MOST_TOKENS

    def add(self, request: EngineRequest) -> None:
        prompt = request.prompt_token_ids
        if id(prompt) not in self._prompts:
            self._prompts[id(prompt)] = len(self._prompts), prompt
            self._num_tokens += len(prompt)
        key = _key(request)
        if key not in self._commons:
            self._commons[key] = len(self._commons), request
        self.requests.append(
            OneOfMany(
                request_id=request.request_id,
                common=self._commons[key][0],
                prompt=self._prompts[id(prompt)][0],
                seed=request.seed,
                max_tokens=request.max_tokens,
                arrival=request.arrival,
                parent_id=request.parent_id,
            )
        )

    def message(self) -> EngineRequests:
        nothing = {"request_id": "", "prompt_token_ids": (), "seed": 0, "max_tokens": 1, "arrival": 0.0}
        return EngineRequests(
            commons=tuple(
                msgspec.structs.replace(request, **nothing, parent_id=None) for _, request in self._commons.values()
            ),
            prompts=tuple(prompt for _, prompt in self._prompts.values()),
            requests=tuple(self.requests),
        )


def _key(request: EngineRequest) -> tuple[Any, ...]:
    """Equal for requests that differ in nothing but what OneOfMany has: by identity where a value may be large."""
    return (
        id(request.params), tuple(request.trace_headers.items()), request.eos_token_id, request.priority,
        request.cache_salt, request.tenant, request.lora_id, request.lora_name, request.lora_path,
        request.lora_generation,
        id(request.media) if request.media else None, request.continues, request.thinking,
    )  # fmt: skip
