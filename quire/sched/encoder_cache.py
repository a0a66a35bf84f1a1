"""Media in the scheduler: which items a step encodes, and whose vectors the worker keeps.

An item is encoded in the first step that computes one of its positions, unless its vectors are there already: from
another request with the same key, or from before a preemption. They stay while a running request still has positions of
the item to compute, and after that until the room is needed, those that were used longest ago first.

    not there ──take──▶ in use (some request has positions left) ──next step──▶ idle ──evicted──▶ not there
                          ▲───────────────────── take ─────────────────────────────┘

Plans run in order, so vectors may be dropped as soon as the plan that needs them last was made: what that plan used
counts as in use until the next one is begun. Where there is no room, a prompt is cut before the item. The first of the
running requests always gets on: it may exceed the capacity, as an item that is larger than the budget may if it is the
only one of its step.

Of an encoder-decoder model (CrossItems) items have no positions in the prompt: the first step of a row reads all of
them, to fill its blocks of cross-attention groups. Must not know: what an item is, blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.sched.gates import CLOSED, NO_LIMIT, SKIP, SchedulerLoad, WholeItems
from quire.schema.errors import InputError
from quire.schema.messages import EngineRequest
from quire.schema.stats import NO_LOOKUPS, CacheStats
from quire.schema.step import EncodeItem

if TYPE_CHECKING:
    from quire.sched.request import Request, Running
    from quire.schema.media import MediaItem

Use = tuple[str, int]  # request, first position of the item: one request may have an item twice


def num_vectors(item: MediaItem) -> int:
    return item.takes_vector.count(1) if item.takes_vector else item.length


class EncodedItem:
    """Vectors that the worker has, or will have once it has run the plans that were made."""

    __slots__ = ("size", "users")

    def __init__(self, size: int) -> None:
        self.size = size
        self.users: set[Use] = set()


class EncoderCache(WholeItems):
    """Vectors encoded per step, and kept: the gate that cuts a prompt before an item that must wait.

    `longest`: tokens that one prompt may get in a step at most; where items are not split over steps (`whole_items`),
    none may be longer. `joined`: all items of a prompt, and what is between them, are one in this respect.
    """

    def __init__(
        self, capacity: int, longest: int, running: Running, *, whole_items: bool, joined: bool = False
    ) -> None:
        self.capacity = self.budget = capacity
        self.longest, self.whole_items, self.joined, self._running = longest, whole_items or joined, joined, running
        self.left = capacity  # vectors that this step may still encode
        self.used = 0  # vectors of all entries
        self.entries: dict[str, EncodedItem] = {}
        self.idle: dict[str, None] = {}  # keys that nobody uses, in the order in which that began
        self.uses: dict[str, dict[int, str]] = {}  # request -> first position of an item -> key
        self.unfinished: set[str] = set()  # running requests with positions of items that were not granted
        self.num_queries = self.num_hits = 0  # items since the last report
        self._made_by: dict[str, list[str]] = {}  # running request -> keys that were encoded for it
        self._passed: list[Use] = []  # in this step
        self._encode: list[EncodeItem] = []
        self._freed: list[str] = []

    # ---- a step

    def open(self, load: SchedulerLoad) -> None:
        self.left = self.budget
        for name, offset in self._passed:
            self._release(name, offset)
        self._passed.clear()

    def singles(self) -> int:
        return 0 if self.unfinished else NO_LIMIT

    def is_whole(self, request: Request) -> bool:
        at, media = request.planned, request.source.media
        if self.joined:
            return bool(media) and media[0].offset <= at < self._last(media[-1])
        return self.whole_items and any(item.offset <= at < item.offset + item.length for item in media)

    def admit(self, request: Request, count: int) -> int:
        media = request.source.media
        if not media:
            return count
        start, upto, left = request.planned, request.planned + count, self.left
        room = self.capacity - self.used + sum([self.entries[key].size for key in self.idle])
        is_first = self._is_first(request)
        new: set[str] = set()
        for item in self._read_by(request, start, upto):
            if self.whole_items and self._last(media[-1] if self.joined else item) > upto:
                return self._cut(request, item)
            if item.key in new or (item.key in self.entries and item.key not in self.idle):
                continue
            size = num_vectors(item)
            is_new = item.key not in self.entries
            if (is_new and size > left and left < self.budget) or (size > room and not is_first):
                return self._cut(request, item)
            new.add(item.key)
            left, room = left - size * is_new, room - size
        return count

    def take(self, request: Request, count: int) -> None:
        media = request.source.media
        if not media:
            return
        start, upto = request.planned, request.planned + count
        counts = not request.epoch
        own = self._read_by(request, start, upto)
        if counts and not request.running:  # what a reused prefix covers needs no vectors at all
            covered = sum(self._last(item) <= start for item in media if item not in own)
            self.num_queries += covered
            self.num_hits += covered
        for item in own:  # those that are there, before any is evicted for the others
            is_there, is_begun = item.key in self.entries, item.offset in self.uses.get(request.id, ())
            if counts and not is_begun:
                self.num_queries += 1
                self.num_hits += is_there
            if is_there:
                self._use(request, item)
        for item in own:
            if item.key not in self.entries:
                self._add(request, item)
            self._use(request, item)
            if self._last(item) <= upto:
                self._passed.append((request.id, item.offset))
        if upto < self._last(media[-1]):
            self.unfinished.add(request.id)
        else:
            self.unfinished.discard(request.id)

    def take_plan(self) -> tuple[tuple[EncodeItem, ...], tuple[str, ...]]:
        """What the plan that was just filled encodes, and the keys it frees before that."""
        encode, freed = tuple(self._encode), tuple(self._freed)
        self._encode, self._freed = [], []
        return encode, freed

    def take_counts(self) -> CacheStats:
        """Since the last call."""
        if not self.num_queries:
            return NO_LOOKUPS
        counts = CacheStats(queries=self.num_queries, hits=self.num_hits)
        self.num_queries = self.num_hits = 0
        return counts

    # ---- requests come and go

    def check(self, request: EngineRequest) -> None:
        """InputError for media that could never be computed."""
        at, length = 0, len(request.prompt_token_ids)
        for item in request.media:
            end = item.offset + item.length
            if item.offset < at or item.length < 1 or end > length:
                raise InputError(
                    f"a media item stands at positions {item.offset} to {end - 1}: items lie one after another in a "
                    f"prompt of {length} tokens",
                    param="multi_modal_data",
                )
            at = end
            if item.takes_vector and (len(item.takes_vector) != item.length or not num_vectors(item)):
                raise InputError(
                    f"a media item of {item.length} positions says of {len(item.takes_vector)} whether they take a "
                    "vector; at least one must",
                    param="multi_modal_data",
                )
            if not item.arrays:
                raise InputError(f"the media item {item.key!r} was not sent", param="multi_modal_data")
            if self.whole_items and item.length > self.longest:
                raise InputError(
                    f"a media item has {item.length} tokens, and a step takes {self.longest} of a prompt at most; "
                    "items are not split over steps here (disable_chunked_mm_input, or the model's attention within "
                    "an item): raise max_num_batched_tokens",
                    param="multi_modal_data",
                )
        if self.joined and request.media:
            self._check_joined(request.media)

    def _check_joined(self, media: Sequence[MediaItem]) -> None:
        length = media[-1].offset + media[-1].length - media[0].offset
        limit = self.longest if len(media) == 1 else min(self.longest, self.budget)
        if length > limit:
            raise InputError(
                f"the prompt has {length} tokens from its first media item to the end of its last, and a step takes "
                f"{limit} of a prompt at most; all items of a prompt are in one step here, as they attend to each "
                "other: raise max_num_batched_tokens",
                param="multi_modal_data",
            )

    def end(self, request: Request, *, failed: bool = False) -> bool:
        """It runs no longer: it ended or was preempted. Whether what was computed of it may be wrong: it failed, or its
        items are in a step whose result is not in, and nobody will ask what became of them."""
        is_open = request.running and request.computed < request.planned and self._is_in_flight(request)
        if failed or is_open:
            self._spoil(request)
            return True
        self._leave(request)
        return False

    def _leave(self, request: Request) -> None:
        for offset in list(self.uses.get(request.id, ())):
            self._release(request.id, offset)
        self.unfinished.discard(request.id)
        self._made_by.pop(request.id, None)

    def _spoil(self, request: Request) -> None:
        """Whatever it used may be wrong, and is encoded again if others need it."""
        for key in {*self.uses.get(request.id, {}).values(), *self._made_by.get(request.id, ())}:
            self._drop(key)
        self._leave(request)

    def clear(self) -> None:
        """Forget what nobody uses."""
        for key in list(self.idle):
            self._drop(key)

    # ---- positions

    def _read_by(self, request: Request, start: int, upto: int) -> list[MediaItem]:
        """Items whose vectors a grant of these positions needs."""
        return [item for item in request.source.media if item.offset < upto and start < item.offset + item.length]

    def _last(self, item: MediaItem) -> int:
        """The position from which on its vectors are not needed."""
        return item.offset + item.length

    def _is_in_flight(self, request: Request) -> bool:
        """Whether a step reads its items whose result is not in."""
        return any(
            item.offset < request.planned and request.computed < item.offset + item.length
            for item in request.source.media
        )

    # ---- entries

    def _is_first(self, request: Request) -> bool:
        running = self._running.items
        return not running or running[0] is request

    def _cut(self, request: Request, item: MediaItem) -> int:
        """Up to the item; if it begins there, others go past a request that runs, and none past one that waits."""
        item = request.source.media[0] if self.joined else item
        if item.offset > request.planned:
            return item.offset - request.planned
        return SKIP if request.running else CLOSED

    def _add(self, request: Request, item: MediaItem) -> None:
        size = num_vectors(item)
        for key in list(self.idle):
            if self.used + size <= self.capacity:
                break
            self._drop(key)
        self.entries[item.key] = EncodedItem(size)
        self.used += size
        self.left -= size
        self._encode.append(EncodeItem(request.id, item))
        self._made_by.setdefault(request.id, []).append(item.key)

    def _use(self, request: Request, item: MediaItem) -> None:
        self.entries[item.key].users.add((request.id, item.offset))
        self.uses.setdefault(request.id, {})[item.offset] = item.key
        self.idle.pop(item.key, None)

    def _release(self, name: str, offset: int) -> None:
        uses = self.uses.get(name)
        if uses is None or offset not in uses:
            return
        key = uses.pop(offset)
        if not uses:
            del self.uses[name]
        entry = self.entries.get(key)
        if entry is not None:
            entry.users.discard((name, offset))
            if not entry.users:
                self.idle[key] = None

    def _drop(self, key: str) -> None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.used -= entry.size
            self.idle.pop(key, None)
            self._freed.append(key)


class CrossItems(EncoderCache):
    """Inputs of an encoder-decoder model's encoder. Each request has one, which its first step reads; after a
    preemption the first step again, from vectors that are still there or are encoded once more."""

    def __init__(self, capacity: int, longest: int, running: Running, *, whole_items: bool) -> None:
        super().__init__(capacity, longest, running, whole_items=whole_items)
        self._starts: dict[str, int] = {}  # running request -> the position at which its first step began

    def take(self, request: Request, count: int) -> None:
        if not request.running:
            self._starts[request.id] = request.planned
        super().take(request, count)

    def check(self, request: EngineRequest) -> None:
        if len(request.media) != 1:
            raise InputError(
                f"a request to an encoder-decoder model has one input of its encoder, not {len(request.media)}",
                param="encoder_prompt",
            )
        (item,) = request.media
        if item.offset or item.length < 1 or item.takes_vector:
            raise InputError(
                f"the input of an encoder has {item.length} vectors, from position {item.offset} on: it needs at least "
                "one, and has no place in the prompt",
                param="encoder_prompt",
            )
        if not item.arrays:
            raise InputError(f"the input {item.key!r} of the encoder was not sent", param="encoder_prompt")

    def _read_by(self, request: Request, start: int, upto: int) -> list[MediaItem]:
        return [] if request.running else list(request.source.media)

    def _last(self, item: MediaItem) -> int:
        return 1  # no row's first grant is empty

    def _is_in_flight(self, request: Request) -> bool:
        return request.computed == self._starts[request.id]

    def _leave(self, request: Request) -> None:
        super()._leave(request)
        self._starts.pop(request.id, None)
