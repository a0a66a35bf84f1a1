"""Self-audit on demand: free + held = all, and every count agrees with what it counts. In short: KVCache.check_idle."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from quire.sched.tenants import ON_HOLD

if TYPE_CHECKING:
    from quire.sched.blocks import BlockPool
    from quire.sched.encoder_cache import EncoderCache
    from quire.sched.kv_cache import KVCache
    from quire.sched.request import Request
    from quire.sched.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    planner = scheduler.planner
    running, waiting = planner.running.items, list(planner.waiting)
    lanes = [lane for tenant in planner.waiting.tenants.values() for lane in tenant.lanes.values()]
    assert all(lane.items for lane in lanes), "a lane is empty"
    for queue in (running, waiting, *(lane.items for lane in lanes)):
        assert all(a.order < b.order for a, b in pairwise(queue)), "a queue lost its order"
    everyone = {request.id: request for request in (*running, *waiting)}
    assert everyone == scheduler.requests, "a request is in no queue, or a queue has one that is not known"
    assert all(request.running for request in running) and not any(request.running for request in waiting)
    assert Counter(request.tenant for request in running) == planner.running.rows, "rows are counted wrongly"
    assert {request.tenant for request in waiting} == planner.waiting.active, "a tenant that waits is not known to"
    on_hold = {request.id for request in waiting if request.lane == ON_HOLD}
    assert on_hold == planner.holds.by_request.keys() & {request.id for request in waiting}, "who is on hold"
    assert planner.waiting.num_tokens == sum(request.num_prompt for request in waiting), "waiting tokens"
    assert len(planner.waiting) == len(waiting), "waiting requests are counted wrongly"
    assert len(running) <= scheduler.settings.max_num_seqs, f"{len(running)} run at once"
    for request in running:
        _check_request(request)
        _check_tables(request, scheduler.kv)
    for request in waiting:
        assert not any(request.holding.tables) and request.computed == request.planned == 0, (
            f"{request.id} waits with KV"
        )
    _check_pool(scheduler.kv.pool, running, scheduler.kv.moves.pinned)
    if planner.encoder is not None:
        _check_encoder(planner.encoder, {request.id for request in running})


def _check_encoder(encoder: EncoderCache, running: set[str]) -> None:
    entries = encoder.entries
    uses = {(name, offset, key) for name, own in encoder.uses.items() for offset, key in own.items() if key in entries}
    users = {(name, offset, key) for key, entry in entries.items() for name, offset in entry.users}
    assert users <= uses, f"vectors in use by nobody: {sorted(users - uses)}"
    assert encoder.uses.keys() | encoder.unfinished <= running, "media of requests that do not run"
    assert encoder.used == sum([entry.size for entry in entries.values()]), "vectors are counted wrongly"
    assert encoder.idle.keys() == {key for key, entry in entries.items() if not entry.users}, "idle vectors"


def _check_request(request: Request) -> None:
    known = len(request.tokens)
    assert request.computed <= request.planned <= request.target <= request.end + request.num_drafts, request.id
    assert known <= request.end and known < request.limit, f"{request.id} has {known} of {request.limit} tokens"
    assert request.planned <= request.room, f"{request.id} plans {request.planned} tokens in room for {request.room}"


def _check_tables(request: Request, kv: KVCache) -> None:
    """Whatever a step in flight or the next one reads or writes is still there."""
    for group, size in kv.growing:
        first = kv.policies[group].first_needed(request.computed)
        needed = request.holding.tables[group][first : -(-request.planned // size)]
        assert -1 not in needed, f"{request.id} lost a block of group {group} too early"


def _check_pool(pool: BlockPool, running: list[Request], pinned: list[int]) -> None:
    """Work for the blocks that are held or were; the many that never were taken are only counted."""
    holders = Counter(pinned)
    for request in running:
        for table in request.holding.tables:
            holders.update(table)
    del holders[-1]  # no block
    rightly = holders == {block: pool.refs[block] for block in holders}
    assert rightly and pool.refs.count(0) == pool.num_blocks - len(holders), (
        f"blocks counted wrongly: {_differences(holders, pool.refs)}"
    )
    free, untouched = {*pool.blank, *pool.cached}, range(pool.num_touched, pool.num_blocks)
    assert len(pool.blank) + len(pool.cached) == len(free) == pool.num_touched - len(holders), (
        f"{len(pool.blank) + len(pool.cached)} free blocks, {pool.num_touched - len(holders)} held by nobody"
    )
    assert free.isdisjoint(holders), "a held block is free"
    assert not any(block in untouched for blocks in (free, holders) for block in blocks), "a block that was never taken"
    _check_names(pool)


def _check_names(pool: BlockPool) -> None:
    """Whole columns at once: a pool may have thousands of blocks, and this is done at every step."""
    name_of, home_of = pool.names.__getitem__, pool.homes.__getitem__
    blank = [*map(name_of, pool.blank)]
    assert blank.count(None) == len(blank), "a named block lies among the blank"
    assert None not in map(name_of, pool.cached), "a block without a name lies among the cached"
    for group, named in enumerate(pool.named):  # its names differ, so no block can have two of them
        assert [*map(name_of, named.values())] == [*named], "names and the maps that find them differ"
        assert {*map(home_of, named.values())} <= {group}, "a block is named in a group that is not its own"
    num_named = pool.num_blocks - pool.names.count(None)
    assert num_named == sum(map(len, pool.named)), "a block has a name by which it cannot be found"


def _differences(counted: Counter[int], recorded: list[int]) -> dict[int, tuple[int, int]]:
    return {block: (counted[block], refs) for block, refs in enumerate(recorded) if counted[block] != refs}
