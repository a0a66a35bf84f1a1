"""ResponseStore: the answers of /v1/responses that are kept, bounded in number and in bytes.

In: records, each an answer that is whole or one that is being made in the background. Out: the same by caller and id
(who did not make one cannot tell that it is there), the oldest whole ones gone when there is no room. An id is taken
when its request begins. One store per API process, touched by its event loop only. Must not know: HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from quire.base import env
from quire.base.log import logger
from quire.schema.errors import InputError, OverloadedError

if TYPE_CHECKING:
    from quire.server.flow import Results
    from quire.server.openai.responses_answer import ResponseAnswer

log = logger(__name__)
Place = tuple[int, str]  # the caller that made it (callers.py), its id


class NoSuchResponseError(InputError):
    """An id that is not, or no longer, kept."""

    status = 404


class Record:
    """One answer. While it is made, `answer` knows how far it has come; then its JSON is all that is left of it."""

    def __init__(self, answer: ResponseAnswer, messages: list[dict[str, Any]], caller: int, *,
                 flow: Results | None = None, items: list[dict[str, Any]] | None = None,
                 with_events: bool = False) -> None:  # fmt: skip
        """`messages`: what it answers. `items`: its request's own input. `flow`: it is made in the background."""
        self.id = answer.id
        self.place: Place = (caller, answer.id)
        self.flow = flow
        self.background = flow is not None
        self.events: list[bytes] | None = [] if with_events else None
        self.task: asyncio.Task[None] | None = None
        self._answer: ResponseAnswer | None = answer
        self._input = messages
        self._body = self._messages = b""
        self._items = msgspec.json.encode(items or [])
        self.num_bytes = len(self._items)
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._answer is None

    @property
    def body(self) -> bytes:
        return self._body if self._answer is None else self._answer.whole()

    def messages(self) -> list[dict[str, Any]]:
        """The conversation up to and with this answer."""
        messages: list[dict[str, Any]] = msgspec.json.decode(self._messages)
        return messages

    def items(self) -> list[dict[str, Any]]:
        """The input of its request, as items with ids."""
        items: list[dict[str, Any]] = msgspec.json.decode(self._items)
        return items

    def add(self, events: list[bytes]) -> int:
        """More events; the bytes they take."""
        if self.events is None:
            return 0
        self.events += events
        self._tell()
        return sum(map(len, events))

    def end(self) -> int:
        """It is whole; the bytes it takes besides those of its input."""
        assert self._answer is not None
        self._body = self._answer.whole()
        self._messages = msgspec.json.encode([*self._input, *self._answer.messages()])
        self._answer, self._input, self.flow = None, [], None
        self._tell()
        return len(self._body) + len(self._messages)

    async def follow(self, first: int) -> AsyncIterator[bytes]:
        """Its events from number `first` on, until there are no more."""
        assert self.events is not None
        while True:
            while first < len(self.events):
                yield self.events[first]
                first += 1
            if self.ended:
                return
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class ResponseStore:
    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count, self.max_bytes = max_count, max_bytes
        self.num_bytes = 0
        self._records: OrderedDict[Place, Record] = OrderedDict()  # the one not used for longest first
        self._taken: set[Place] = set()  # of requests under way

    @classmethod
    def of_environment(cls) -> ResponseStore | None:
        if not env.ENABLE_RESPONSES_API_STORE.get():
            return None
        return cls(env.RESPONSES_STORE_COUNT.get(), env.RESPONSES_STORE_BYTES.get())

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, place: Place) -> bool:
        return place in self._records

    @contextlib.contextmanager
    def take(self, caller: int, response_id: str) -> Iterator[None]:
        """While a request is under way, no other one of the same caller gets its id."""
        place = (caller, response_id)
        if place in self._records or place in self._taken:
            raise InputError(
                f"request_id: there is already a response with the id {response_id:.300}", param="request_id"
            )
        self._taken.add(place)
        try:
            yield
        finally:
            self._taken.discard(place)

    def get(self, caller: int, response_id: str, param: str = "response_id") -> Record:
        if (record := self._records.get((caller, response_id))) is None:
            raise NoSuchResponseError(
                f"Response with id {response_id!r:.100} not found: it was not stored, or is no longer", param=param
            )
        self._records.move_to_end(record.place)
        return record

    def put(self, record: Record) -> None:
        """Room is made by dropping old ones; refused where all that are kept are still being made."""
        if (old := self._records.get(record.place)) is not None:
            self.remove(old)
        while len(self._records) >= self.max_count:
            if not self._drop_one():
                raise OverloadedError(
                    f"{len(self._records)} responses are being made in the background; the limit is {self.max_count} "
                    "(QUIRE_RESPONSES_STORE_COUNT)",
                    limit="QUIRE_RESPONSES_STORE_COUNT",
                )
        while self.num_bytes + record.num_bytes > self.max_bytes:
            if record.num_bytes > self.max_bytes or not self._drop_one():
                raise OverloadedError(
                    f"a response with {record.num_bytes} bytes of input, beside {self.num_bytes} bytes of responses "
                    f"that are being made in the background; the limit is {self.max_bytes} "
                    "(QUIRE_RESPONSES_STORE_BYTES)",
                    limit="QUIRE_RESPONSES_STORE_BYTES",
                )
        self._records[record.place] = record
        self.num_bytes += record.num_bytes

    def grow(self, record: Record, num_bytes: int) -> None:
        """A kept record takes more. One that is too large for the store itself goes too, once it has ended."""
        if self._records.get(record.place) is not record:
            return
        record.num_bytes += num_bytes
        self.num_bytes += num_bytes
        if record.num_bytes > self.max_bytes and record.ended:
            log.warning("A response of %d bytes is not kept; the store holds %d", record.num_bytes, self.max_bytes)
            self.remove(record)
        while self.num_bytes > self.max_bytes and self._drop_one(but=record):
            pass

    def remove(self, record: Record) -> None:
        """If it is still kept; another one may have its place by now."""
        if self._records.get(record.place) is record:
            del self._records[record.place]
            self.num_bytes -= record.num_bytes

    def _drop_one(self, but: Record | None = None) -> bool:
        for record in self._records.values():
            if record.ended and record is not but:
                self.remove(record)
                return True
        return False
