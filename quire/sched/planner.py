"""One step's grants: every running request in order, then waiting ones unless a running one lacked blocks.

A request wants as many tokens as it has not computed; gates may shrink that, and the KV cache must have the blocks.
There are no phases: prompts, chunks, decodes, drafts, prefix hits and resumed requests differ only in that number.

Who waits is asked in turn (tenants.py): in order where all requests have one tenant. Before a step is filled, a tenant
that runs more than its share may have to give some up for another (shares.py).

Running requests stay sorted, and blocks are taken from the last of them. So a grant made earlier in the same step is
never withdrawn and its blocks may be named at once, and the first in order always gets on: alone, it fits. A request
that lacks blocks and is itself the last one keeps what it has and waits.
Must not know: results, or stop rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.sched.adapter_slots import AdapterSlots
from quire.sched.gates import CLOSED, NO_LIMIT, SKIP, Gate, Holds, SchedulerLoad, TokenPace, make_gates
from quire.sched.kv_cache import Hit, KVCache, Tables
from quire.sched.request import Request, Running
from quire.sched.settings import SchedulerSettings
from quire.sched.shares import MOST_GIVEN_UP, Shares
from quire.sched.tally import SchedulerCounts
from quire.sched.tenants import Waiting
from quire.schema.step import Grant, NewRow

if TYPE_CHECKING:
    from quire.sched.encoder_cache import EncoderCache

MOST_SKIPPED = 64  # waiting requests that gates may turn away in one step before the rest is left for the next


class OpenPlan:
    """A plan in the making; `requests` is parallel to `grants`."""

    __slots__ = ("grants", "joined", "requests")

    def __init__(self) -> None:
        self.grants: list[Grant] = []
        self.requests: list[Request] = []
        self.joined: list[NewRow] = []


def make_encoder(settings: SchedulerSettings, running: Running, *, is_cross: bool) -> EncoderCache:
    """For models that take media, or embeddings as prompts; `is_cross`: or whose decoder attends to an encoder."""
    from quire.sched.encoder_cache import CrossItems, EncoderCache  # lazy

    if is_cross:
        cross: EncoderCache = CrossItems(settings.encoder_tokens, settings.encoder_tokens, running, whole_items=False)
        return cross
    longest = min(settings.max_num_batched_tokens, settings.long_prefill_threshold or settings.max_num_batched_tokens)
    made: EncoderCache = EncoderCache(
        settings.encoder_tokens, longest, running, whole_items=settings.whole_media, joined=settings.joined_media
    )
    return made


class Planner:
    def __init__(
        self,
        settings: SchedulerSettings,
        kv: KVCache,
        tally: SchedulerCounts,
        clock: Callable[[], float],
        pace: TokenPace,
    ) -> None:
        self.kv, self.tally, self.clock = kv, tally, clock
        self.holds = Holds()
        self.waiting, self.running = Waiting(settings.tenant_credit), Running()
        self.shares = Shares(settings.max_num_seqs, self.running, self.waiting, kv)
        self.adapters = AdapterSlots(settings.max_loras, settings.max_cpu_loras) if settings.max_loras else None
        self.encoder: EncoderCache | None = None
        if settings.encoder_tokens:
            self.encoder = make_encoder(settings, self.running, is_cross=bool(kv.cross))
        further = [] if self.adapters is None else [self.adapters]
        self.use_gates([*further, *make_gates(settings, pace, self.shares, self.holds, self.encoder)])
        self.blocked: tuple[Request, int] | None = None  # by a lack of blocks, in the last step; with its epoch then
        self.left: list[str] = []  # rows the next plan tells the worker to free
        self.drafts = settings.num_drafts > 0
        self.reserves = settings.reserve_full_prompt
        self.watermark = int(settings.watermark * kv.pool.num_blocks)

    def use_gates(self, gates: Sequence[Gate]) -> None:
        """In the order they are asked. What is asked for every request is asked only of those that may object."""
        self.gates = tuple(gates)
        self._closers = [gate.closed for gate in gates if type(gate).closed is not Gate.closed]
        self._bars = [gate.bars for gate in gates if type(gate).bars is not Gate.bars]
        self._admits = [gate.admit for gate in gates if type(gate).admit is not Gate.admit]
        self._takes = [gate.take for gate in gates if type(gate).take is not Gate.take]
        self._limits = [gate.singles for gate in gates if type(gate).singles is not Gate.singles]

    def fill(self) -> OpenPlan:
        self.shares.num_tenants = len(self.running.rows.keys() | self.waiting.active)
        if self.shares.num_tenants > 1:
            self.shares.open()
            if self.waiting.active:
                self._give_up_shares()
        self.blocked = None
        plan, load = OpenPlan(), SchedulerLoad(len(self.running), len(self.waiting), self.waiting.num_tokens)
        for gate in self.gates:
            gate.open(load)
        reserved = self._grant_running(plan)
        if len(self.waiting) and reserved is not None:
            self._admit_waiting(plan, reserved)
        if self.kv.has_state:
            for grant, request in zip(plan.grants, plan.requests, strict=True):
                if grant.count > 1:
                    self.kv.name(request)
        return plan

    def preempt(self, request: Request) -> None:
        """Take everything back; it waits in its old place and starts again from its tokens."""
        self.running.remove(request)
        spoilt = self.encoder is not None and bool(request.source.media) and self.encoder.end(request)
        self.kv.release(request, spoilt=spoilt)
        if request.adapter is not None and self.adapters is not None:
            self.adapters.leave(request)
        request.restart()
        request.running = False
        request.epoch += 1
        request.times.num_preemptions += 1
        self.left.append(request.id)
        self.waiting.add(request)
        if self.holds.bars(request):
            self.waiting.hold(request)
        self.tally.preempted += 1

    def _give_up_shares(self) -> None:
        """Before anything is granted: tenants with more than their share preempt for those with less (shares.py)."""
        for _ in range(0 if self.shares.num_free_rows else MOST_GIVEN_UP):
            if (request := self.shares.row_to_give_up(self._barred)) is None:
                break
            self.preempt(request)
        blocked, epoch = self.blocked or (None, 0)
        if blocked is None or blocked.epoch != epoch or self._barred(blocked):  # it ended meanwhile, or is held
            return
        while (request := self.shares.blocks_to_give_up(blocked)) is not None:
            self.preempt(request)

    def _grant_running(self, plan: OpenPlan) -> int | None:
        """Blocks that prompts under way still need; None when one lacked blocks or a gate shut: nobody may join."""
        gates, running, kv = self.gates, self.running.items, self.kv
        before, shut, reserved = len(running), False, 0
        singles = self._singles()
        single = 0  # of these, granted without asking; not yet reported to the gates
        for request in running:  # which may shrink from its end
            count = request.target - request.planned
            if count <= 0:
                continue
            if gated := count > 1 or single >= singles:
                for gate in gates:
                    gate.take_singles(single)
                singles, single = self._singles(), 0
                if (count := self._ask(request, count)) == CLOSED:
                    shut = True
                    break
                if count == SKIP:
                    for gate in gates:
                        gate.pass_over(request)
                    continue
            new_blocks: Tables = ()
            upto = request.planned + count
            if upto > request.room:
                if not self._make_room(request, upto):
                    shut = True
                    continue
                new_blocks = kv.grow(request, upto)
            if gated:
                for take in self._takes:
                    take(request, count)
                singles = self._singles()
                reserved += kv.outstanding(request, upto)
            else:
                single += 1
            plan.grants.append(request.grant(count, new_blocks))
            plan.requests.append(request)
            if count > 1 and not kv.has_state:
                kv.name(request)
        for gate in gates:
            gate.take_singles(single)
        return None if shut or len(running) < before else reserved

    def _admit_waiting(self, plan: OpenPlan, reserved: int) -> None:
        """In turn, until one lacks blocks or a gate is shut; one that a gate turns away may be overtaken."""
        kv, turns, num_skipped = self.kv, self.waiting.turns(), 0
        while (request := turns.request) is not None and num_skipped < MOST_SKIPPED and not self._closed():
            if self._barred(request):
                turns.pass_lane()
                continue
            hit = kv.match(request)
            request.planned = hit.length  # gates see where it would start
            count = self._ask(request, request.target - hit.length)
            request.planned = 0
            if count == CLOSED:
                break
            if count == SKIP:
                turns.pass_by()
                num_skipped += 1
                continue
            upto = hit.length + count
            spare = self.watermark + (reserved if self.reserves else 0) if self.running.items else 0
            if (
                kv.policies
                and not self._fits(request, hit, upto, spare)
                and not (
                    kv.moves.unpin()
                    and self._fits(request, hit, upto, spare)  # the hit's own blocks may have been held
                )
            ):
                self.blocked = request, request.epoch
                break
            turns.join()
            self._join(plan, request, hit, count)
            turns.go_on()
            if request.planned < request.end:
                reserved += kv.outstanding(request, request.planned)

    def _join(self, plan: OpenPlan, request: Request, hit: Hit, count: int) -> None:
        """From waiting to running, with its first grant."""
        if not request.times.scheduled:
            request.times.scheduled = self.clock()
            request.times.num_cached_tokens = request.num_cached = min(hit.length, request.num_prompt)
            if self.kv.caching and request.reads_cache:
                self.tally.queries += request.num_prompt
                self.tally.hits += request.num_cached
        self.kv.join(request, hit)
        for take in self._takes:
            take(request, count)
        plan.joined.append(request.row(scoped=self.drafts, is_cross=bool(self.kv.cross)))
        new_blocks = self.kv.grow(request, hit.length + count)
        request.running = True
        self.running.add(request)
        plan.grants.append(request.grant(count, new_blocks))
        plan.requests.append(request)
        if not self.kv.has_state:
            self.kv.name(request)

    def _fits(self, request: Request, hit: Hit, upto: int, spare: int) -> bool:
        """Whether it may join, with so many blocks left over for those that run."""
        return self.kv.need_to_join(request, hit, upto, whole=self.reserves) + spare <= self.kv.pool.num_free

    def _singles(self) -> int:
        """One-token grants to running requests that no gate will object to."""
        return min([singles() for singles in self._limits], default=NO_LIMIT)

    def _closed(self) -> bool:
        for closed in self._closers:  # noqa: SIM110  # any() of a generator takes three times as long
            if closed():
                return True
        return False

    def _barred(self, request: Request) -> bool:
        for bars in self._bars:  # noqa: SIM110
            if bars(request):
                return True
        return False

    def _ask(self, request: Request, count: int) -> int:
        for admit in self._admits:
            if (count := admit(request, count)) <= SKIP:
                break
        return count

    def _make_room(self, request: Request, upto: int) -> bool:
        """Preempt from the end of the order until `upto` tokens fit; False when the request itself is at that end."""
        need = self.kv.need(request, upto)
        while need > self.kv.pool.num_free:
            if self.kv.moves.unpin():
                continue
            if (last := self.running.items[-1]) is request:
                return False
            self.preempt(last)
        return True
