"""Shares: rows and KV blocks between tenants while some of them wait. Where there is one tenant, nothing is shared.

A tenant's share is an equal part for each tenant that runs or waits. Whoever holds more keeps it until another, which
holds less than its share, waits for a row or for blocks: then the newest requests of the tenant that holds most are
preempted, as they are when blocks run out, and wait in their old place. The oldest that a tenant runs is never among
them, so all come to an end; and higher priority is not given up for lower. So that this is rare, and what was given up
is not taken back, whoever has its share of rows leaves the last free ones to those that have less.
In: who runs and who waits. Out: who may join, which request to preempt next. Must not know: gates, what a step holds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from quire.sched.kv_cache import KVCache
from quire.sched.request import Request, Running
from quire.sched.tenants import Waiting

MOST_GIVEN_UP = 4  # rows that change hands in one step: about as many prompts as can join it
LEFT_FREE = 8  # the part of all rows, as its inverse, that whoever has its share leaves free while others run
LOOKED_AT = 8  # requests of a tenant, the first that wait, before it counts as waiting for something else


class Shares:
    def __init__(self, most_rows: int, running: Running, waiting: Waiting, kv: KVCache) -> None:
        self.most_rows, self.running, self.waiting, self.kv = most_rows, running, waiting, kv
        self.num_tenants = 0  # that run or wait in this step; with one, nothing here is asked
        self._claims: tuple[int, float] | None = None  # on rows, and the highest rank of them
        self._needy: list[int] | None = None  # tenants that wait with fewer rows than their share

    def open(self) -> None:
        """A step of several tenants begins. Within it requests start and stop running, but no tenant comes or goes."""
        self._claims = self._needy = None

    @property
    def row_share(self) -> int:
        return max(1, self.most_rows // max(1, self.num_tenants))

    @property
    def num_free_rows(self) -> int:
        return self.most_rows - len(self.running)

    def row_to_give_up(self, barred: Callable[[Request], bool]) -> Request | None:
        """Of a tenant with more rows than its share, if those with fewer want more than there are free."""
        if self._claims is None:  # a row that is given up changes none: its tenant keeps its share
            self._claims = self._count_claims(barred)
        num_claims, rank = self._claims
        return None if num_claims <= self.num_free_rows else self._newest(self.running.rows, self.row_share, rank)

    def may_take_row(self, name: int) -> bool:
        """Whether this tenant may have one more of those that are free."""
        rows, share = self.running.rows, self.row_share
        if rows.get(name, 0) < share or self.num_tenants == 1:
            return True
        left = self.most_rows // LEFT_FREE
        if self._has_needy():
            left = max(left, MOST_GIVEN_UP)
        return self.num_free_rows > left

    def blocks_to_give_up(self, claimant: Request) -> Request | None:
        """The same for blocks: `claimant` may join but for these."""
        kv = self.kv
        hit = kv.match(claimant)
        need = kv.need_to_join(claimant, hit, claimant.target, whole=True)
        if need <= kv.pool.num_free:
            return None
        blocks: dict[int, set[int]] = {}  # of each tenant: those that its requests share count once
        for request in self.running.items:
            blocks.setdefault(request.tenant, set()).update(*request.holding.tables)
        in_use = {name: len(own - {-1}) for name, own in blocks.items()}
        share = kv.pool.num_blocks // self.num_tenants
        if in_use.get(claimant.tenant, 0) + need > share:
            return None
        return self._newest(in_use, share, claimant.rank)

    def _count_claims(self, barred: Callable[[Request], bool]) -> tuple[int, float]:
        rows, share = self.running.rows, self.row_share
        ranks = [
            request.rank
            for name in self.waiting.active
            if rows.get(name, 0) < share
            for request in self._heads(name, share - rows.get(name, 0), barred)
        ]
        return len(ranks), min(ranks, default=0.0)

    def _has_needy(self) -> bool:
        """Whether some tenant waits with fewer rows than its share. Once requests join, tenants only cease to be so."""
        rows, share, active = self.running.rows, self.row_share, self.waiting.active
        if self._needy is None:
            self._needy = list(active)
        while self._needy and not (self._needy[-1] in active and rows.get(self._needy[-1], 0) < share):
            self._needy.pop()
        return bool(self._needy)

    def _heads(self, name: int, most: int, barred: Callable[[Request], bool]) -> list[Request]:
        first = self.waiting.first(name, LOOKED_AT)
        return list(islice((request for request in first if not barred(request)), most))

    def _newest(self, in_use: dict[int, int], share: int, rank: float) -> Request | None:
        """Of the tenant that holds most, unless that is within its share, or ranks higher."""
        name = max(in_use, key=in_use.__getitem__, default=None)
        if name is None or in_use[name] <= share or self.running.rows[name] < 2:
            return None
        last = next(request for request in reversed(self.running.items) if request.tenant == name)
        return last if last.rank >= rank else None
