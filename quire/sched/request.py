"""Request: the engine's private, and only mutable, copy of one request's state; when it ends, and who goes first.

Scheduling reads no phase, only counts of tokens:

    tokens   [ prompt ............ | outputs known ... ]            len(tokens)
                 ^computed    ^planned                  ^end        ^limit (never reached alive)
    computed: results are in    planned: granted, perhaps still in flight    end: known tokens and those in flight
    target:   how far `planned` may go now: `end` plus drafts, but never the last token of all, which nobody reads
Drafts in flight count as right until their result is in; then those that were not are taken back from all four. So
`planned` and `end` are the furthest the row can be, and the row itself, on the device, knows where it is.

It ends by the rules that need token ids only, in order, for each new token: end-of-text or a stop id (not before
min_tokens), the length limit, repetition. Stop strings are the client's business.

A policy gives each request one sortable key for life, which begins with its rank; a Queue keeps requests in that order.
The last of the running is the first to be preempted, so nothing granted earlier in a plan is ever withdrawn.
Must not know: gates, blocks (it only carries what kv_cache.py holds for it).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from quire.sched.adapter import LoadedAdapter
from quire.sched.kv_cache import Holding
from quire.sched.repetition import Repetition
from quire.schema.media import KEPT, MediaItem
from quire.schema.messages import EngineRequest, FinishReason
from quire.schema.params import PoolingParams, sampling_of
from quire.schema.stats import RequestTimes
from quire.schema.step import Grant, NewRow

SMALL = 256  # bytes of an array that describes an item: the grid of its patches, for one


_NO_STOPS: frozenset[int] = frozenset()


class Request:
    __slots__ = (
        "adapter", "computed", "end", "epoch", "holding", "id", "lane", "last", "last_token", "limit", "next_block",
        "num_cached", "num_drafts", "num_flights", "num_prompt", "num_prompt_logprobs", "order", "params", "planned",
        "rank", "reach", "repetition", "room", "running", "source", "stops", "target", "tenant", "times", "tokens",
        "watch_from",
    )  # fmt: skip

    def __init__(self, source: EngineRequest, *, limit: int, queued: float, num_drafts: int = 0) -> None:
        self.source, self.id, self.params = source, source.request_id, sampling_of(source.params)
        self.tokens: list[int] = list(source.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.limit = limit  # tokens in all, prompt included, at which it ends
        self.last = limit - 1  # tokens to compute at most
        self.num_drafts = num_drafts  # that a step may verify, once a token was sampled to draft from
        self.reach = num_drafts + 1  # tokens that a grant may bring
        eos = () if source.eos_token_id is None or self.params.ignore_eos else (source.eos_token_id,)
        further = self.params.stop_token_ids
        self.stops = frozenset((*eos, *further)) if eos or further else _NO_STOPS  # every token that may end the text
        rule = self.params.repetition_detection
        self.repetition = None if rule is None else Repetition(rule, start=self.num_prompt)
        self.watch_from = limit if rule is None else 0  # length from which any token may end
        self.tenant = source.tenant
        self.order: tuple[float, ...] = ()
        self.rank = 0.0  # lower ones go first, whose ever they are; equal unless the policy knows priorities
        self.running = False
        self.epoch = 0
        self.holding = Holding()
        self.num_cached = 0  # prompt tokens found in the prefix cache when first admitted
        self.num_prompt_logprobs = 0  # prompt positions whose log probabilities went out
        self.times = RequestTimes(queued=queued)
        self.last_token: float | None = None  # when its newest token came
        self.adapter: LoadedAdapter | None = None
        self.lane = 0  # in which it waits (tenants.py)
        self.restart()

    def restart(self) -> None:
        """Nothing is computed (any more); what is known stays."""
        self.computed = self.planned = 0
        self.num_flights = 0  # plans out that it is in; counted only where that is limited
        self.room = 0  # tokens its blocks can hold
        self.next_block = 0  # the KV cache has nothing to do before `computed` reaches this
        self.end = self.target = len(self.tokens)

    @property
    def reads_cache(self) -> bool:
        """Prompt log probabilities need every prompt position computed, and so do most ways of pooling."""
        if isinstance(self.source.params, PoolingParams):
            return not self.source.params.skip_reading_prefix_cache
        return self.params.prompt_logprobs is None and not self.params.skip_reading_prefix_cache

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    def grant(self, count: int, new_blocks: tuple[tuple[int, ...], ...]) -> Grant:
        """Count `count` more tokens as planned; a grant that reaches the end will bring one more token, and one more
        for each draft past it that is right."""
        start, end = self.planned, self.end
        self.planned = upto = start + count
        if upto < end:
            return Grant(self.id, start, count, False, self.epoch, new_blocks)
        self.end = upto + 1
        target = upto + self.reach
        self.target = target if target < self.last else self.last
        return Grant(self.id, start, count, True, self.epoch, new_blocks, upto - end)

    def take_back(self, num_wrong: int) -> None:
        """So many drafts of the grant just committed were wrong, or were never proposed: they count as not computed."""
        assert num_wrong >= 0, f"{self.id} got {-num_wrong} tokens more than its drafts allow"
        self.computed -= num_wrong
        self.planned -= num_wrong
        self.end -= num_wrong
        self.target = min(self.end + self.num_drafts, self.last)

    def expect_drafts(self, count: int) -> None:
        """Its next grant verifies so many; grants that are out know how many they do."""
        self.num_drafts, self.reach = count, count + 1
        self.target = min(self.end + count, self.last)

    def row(self, *, scoped: bool = False, is_cross: bool = False) -> NewRow:
        """`is_cross`: its media are what its encoder reads."""
        source = self.source
        fresh = len(self.tokens) == self.num_prompt
        return NewRow(
            request_id=self.id,
            epoch=self.epoch,
            token_ids=source.prompt_token_ids if fresh else tuple(self.tokens),
            num_prompt_tokens=self.num_prompt,
            params=source.params,
            seed=source.seed,
            stop_token_ids=tuple(sorted(self.stops)) if self.stops else (),
            blocks=tuple([tuple(table) for table in self.holding.tables]),
            lora_id=0 if self.adapter is None else self.adapter.slot,
            num_encoder_tokens=sum(item.length for item in source.media) if is_cross else 0,
            media=described(source.media) if source.media else (),
            scope=f"{source.tenant}\0{source.lora_name or ''}\0{source.cache_salt or ''}" if scoped else "",
        )


def described(media: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
    """Without the arrays that only an encoder reads."""
    return tuple([
        replace(item, arrays={name: array for name, array in item.arrays.items()
                              if name == KEPT or len(array.data) <= SMALL})
        for item in media
    ])  # fmt: skip


class Ending(NamedTuple):
    reason: FinishReason
    stop_id: int | None = None


def append(request: Request, new: list[int]) -> tuple[list[int], Ending | None]:
    """Add new tokens up to the one that ends it; those kept, and why it ended if it did."""
    tokens, before = request.tokens, len(request.tokens)
    for token in new:
        tokens.append(token)
        if (token in request.stops or len(tokens) >= request.watch_from) and (ending := ends(request, token)):
            return new[: len(tokens) - before], ending
    return new, None


def ends(request: Request, token: int) -> Ending | None:
    """`token` is its last; does it end here?"""
    params = request.params
    may_stop = request.num_outputs >= params.min_tokens
    if may_stop and token in request.stops:
        is_eos = token == request.source.eos_token_id and not params.ignore_eos
        return Ending(FinishReason.STOP, None if is_eos else token)
    if len(request.tokens) >= request.limit:
        return Ending(FinishReason.LENGTH)
    if may_stop and request.repetition is not None and request.repetition.found(request.tokens):
        return Ending(FinishReason.REPETITION)
    return None


Key = tuple[float, ...]
order_of = attrgetter("order")


def fcfs(request: Request, number: int) -> Key:
    return (0, number)


def priority(request: Request, number: int) -> Key:
    """Lower value first, then arrival."""
    return (request.source.priority, request.source.arrival, number)


POLICIES: dict[str, Callable[[Request, int], Key]] = {"fcfs": fcfs, "priority": priority}


class Queue:
    """Requests sorted by their key. `items` is public: the planner walks it, and drops from its end."""

    def __init__(self) -> None:
        self.items: list[Request] = []
        self.num_tokens = 0  # of their prompts

    def __len__(self) -> int:
        return len(self.items)

    def add(self, request: Request) -> None:
        self.num_tokens += request.num_prompt
        if not self.items or self.items[-1].order < request.order:
            self.items.append(request)
        else:
            insort(self.items, request, key=order_of)

    def remove(self, request: Request) -> None:
        first = bool(self.items) and self.items[0] is request
        index = 0 if first else bisect_left(self.items, request.order, key=order_of)
        assert self.items[index] is request, f"{request.id} is not where its order says"
        self.drop(index)

    def drop(self, index: int) -> None:
        self.num_tokens -= self.items.pop(index).num_prompt


class Running(Queue):
    """Those that run, and how many of them each tenant has."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, int] = {}

    def add(self, request: Request) -> None:
        super().add(request)
        rows, tenant = self.rows, request.tenant
        rows[tenant] = rows.get(tenant, 0) + 1

    def remove(self, request: Request) -> None:
        super().remove(request)
        self.rows[request.tenant] -= 1
        if not self.rows[request.tenant]:
            del self.rows[request.tenant]
