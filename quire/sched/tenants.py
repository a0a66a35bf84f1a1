"""Tenants: waiting requests by whose they are, and how much prompt each tenant was served. Who waits is served in turn.

A tenant is an opaque number of a request; where all have the same one, turns are the policy's own order. Otherwise the
next turn is that of the tenant with the lowest level: `served` counts the prompt tokens computed for it (not those that
the prefix cache had), and one that comes, or comes again, begins at `now`, which is what a tenant that always waits is
served on average. So nobody saves up turns by staying away, any number of newcomers keeps nobody from its turn, and of
two that wait neither gets more than a step's tokens ahead, as far as gates and blocks let the other join.
Priorities stand above turns, and within a tenant the policy's order stays.

A tenant's requests wait in lanes: one for those without an adapter, one for each adapter, one for those on hold.
Whatever bars a request from joining bars its whole lane in that step: a step looks at its first, not at all of them.
Of lanes whose adapter has no slot a step looks at a limited number, those first that were served longest ago.
Must not know: gates, blocks, what a tenant is (the server decides: server/callers.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappushpop, heapreplace, merge
from itertools import islice

from quire.sched.request import Queue, Request, order_of

_FEW = 64  # tenants that nobody needs to forget
MOST_LANES, LEAST_LANES = 128, 4  # of adapters without a slot, that a step looks at: of all tenants, of each at least
ON_HOLD = -1  # the lane of requests that wait for something outside the scheduler; others: an adapter's serial, or 0


class Tenant:
    __slots__ = ("lanes", "served")

    def __init__(self, served: float) -> None:
        self.lanes: dict[int, Queue] = {}  # none of them empty
        self.served = served  # prompt tokens, on the scale of `now`


class Waiting:
    """Requests that wait. `credit`: tokens that a tenant is behind others at most, whatever kept it from joining."""

    def __init__(self, credit: int) -> None:
        self.credit = credit
        self.tenants: dict[int, Tenant] = {}
        self.now = 0.0
        self.num_tokens = 0  # of their prompts
        self.num_added = 0  # since the beginning
        self.active: set[int] = set()  # tenants with requests here
        self._size = 0
        self._many = _FEW

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """In the policy's order, whose ever they are."""
        lanes = (lane.items for name in self.active for lane in self.tenants[name].lanes.values())
        return merge(*lanes, key=order_of)

    def first(self, name: int, most: int) -> list[Request]:
        """The first of a tenant's requests, without those on hold."""
        open_lanes = self.tenants[name].lanes
        lanes = [open_lanes[lane].items for lane in self.lanes_to_look_at(name) if lane != ON_HOLD]
        return lanes[0][:most] if len(lanes) == 1 else list(islice(merge(*lanes, key=order_of), most))

    def lanes_to_look_at(self, name: int) -> list[int]:
        lanes, left = self.tenants[name].lanes, max(LEAST_LANES, MOST_LANES // len(self.active))
        if len(lanes) <= left:
            return list(lanes)
        chosen = []
        for lane, queue in lanes.items():
            adapter = queue.items[0].adapter
            if lane > 0 and adapter is not None and not adapter.slot:
                left -= 1
                if left < 0:
                    continue
            chosen.append(lane)
        return chosen

    def add(self, request: Request) -> None:
        tenant = self._tenant(request.tenant)
        if not tenant.lanes:
            self.active.add(request.tenant)
            tenant.served = max(tenant.served, self.now)
        self._enter(request, _lane_of(request))
        self._size += 1
        self.num_added += 1
        self.num_tokens += request.num_prompt

    def remove(self, request: Request) -> None:
        self._lane(request).remove(request)
        self._removed(request)

    def drop(self, request: Request, index: int) -> None:
        """The same, for one whose place in its lane is known."""
        lanes, lane = self.tenants[request.tenant].lanes, request.lane
        queue = lanes[lane]
        queue.drop(index)
        if queue.items and len(lanes) == 1:  # nearly always
            self._size -= 1
            self.num_tokens -= request.num_prompt
            return
        lanes[lane] = lanes.pop(lane)  # served last
        self._removed(request)

    def hold(self, request: Request) -> None:
        """It keeps its order, in the lane of those on hold."""
        self._change_lane(request, ON_HOLD)

    def release(self, request: Request) -> None:
        self._change_lane(request, _lane_of(request))

    def charge(self, name: int, tokens: int) -> None:
        """So many tokens of a prompt are computed for this tenant."""
        tenant = self._tenant(name)
        tenant.served += tokens
        num_active = len(self.active) + (name not in self.active)
        self.now = max(self.now + tokens / num_active, tenant.served - self.credit)

    def level(self, name: int) -> float:
        """The lowest has the next turn."""
        tenant = self.tenants.get(name)
        return self.now if tenant is None else max(tenant.served, self.now - self.credit)

    def turns(self) -> Turns:
        return Turns(self)

    def _tenant(self, name: int) -> Tenant:
        tenant = self.tenants.get(name)
        if tenant is None:
            if len(self.tenants) >= self._many:
                self._forget()
            tenant = self.tenants[name] = Tenant(self.now)
        return tenant

    def _lane(self, request: Request) -> Queue:
        return self.tenants[request.tenant].lanes[request.lane]

    def _enter(self, request: Request, lane: int) -> None:
        request.lane = lane
        lanes = self.tenants[request.tenant].lanes
        if lane not in lanes:
            lanes[lane] = Queue()
        lanes[lane].add(request)

    def _change_lane(self, request: Request, lane: int) -> None:
        if lane == request.lane:
            return
        self._lane(request).remove(request)
        self._close_if_empty(request)
        self._enter(request, lane)

    def _close_if_empty(self, request: Request) -> None:
        if not self._lane(request).items:
            del self.tenants[request.tenant].lanes[request.lane]

    def _removed(self, request: Request) -> None:
        self._size -= 1
        self.num_tokens -= request.num_prompt
        self._close_if_empty(request)
        if not self.tenants[request.tenant].lanes:
            self.active.discard(request.tenant)

    def _forget(self) -> None:
        """Tenants that would begin at `now` anyway."""
        self.tenants = {
            name: tenant for name, tenant in self.tenants.items() if tenant.lanes or tenant.served > self.now
        }
        self._many = max(_FEW, 2 * len(self.tenants))


def _lane_of(request: Request) -> int:
    return 0 if request.adapter is None else request.adapter.serial


Place = tuple[tuple[float, ...], int, int]  # order, lane, index: of one that waits


class Turns:
    """One step's way through those who wait: `request` is whose turn it is, until it joins or is passed by."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._heads: list[tuple[float, float, tuple[float, ...], int]] = []  # of each tenant
        self._places: dict[int, list[Place]] = {}  # of each tenant: the next one of each lane, as a heap
        self.request: Request | None = None
        for name in waiting.active:
            places = [self._place(name, lane, 0) for lane in waiting.lanes_to_look_at(name)]
            self._places[name] = [place for place in places if place is not None]
            heapify(self._places[name])
            self._heads.append(self._head(name))
        heapify(self._heads)
        self._next()

    def pass_by(self) -> None:
        """It stays where it is."""
        assert self.request is not None
        _, _, index = self._places[self.request.tenant][0]
        self._go_on(self.request, index + 1)

    def pass_lane(self) -> None:
        """It stays where it is, and so does everyone in its lane."""
        assert self.request is not None
        heappop(self._places[self.request.tenant])
        self._turn_over(self.request.tenant)

    def join(self) -> Request:
        """It waits no more. Charge its tenant before `go_on`."""
        assert self.request is not None
        _, _, index = self._places[self.request.tenant][0]
        self._waiting.drop(self.request, index)
        return self.request

    def go_on(self) -> None:
        """After the one that joined."""
        assert self.request is not None
        _, _, index = self._places[self.request.tenant][0]
        self._go_on(self.request, index)

    def _go_on(self, request: Request, index: int) -> None:
        places = self._places[request.tenant]
        if (place := self._place(request.tenant, request.lane, index)) is None:
            heappop(places)
        elif len(places) == 1:
            places[0] = place
        else:
            heapreplace(places, place)
        self._turn_over(request.tenant)

    def _turn_over(self, name: int) -> None:
        if not self._places[name]:
            self._next()
        elif not self._heads:  # nobody else waits
            self.request = self._first(name)
        else:
            *_, name = heappushpop(self._heads, self._head(name))
            self.request = self._first(name)

    def _next(self) -> None:
        if not self._heads:
            self.request = None
            return
        *_, name = heappop(self._heads)
        self.request = self._first(name)

    def _first(self, name: int) -> Request:
        _, lane, index = self._places[name][0]
        return self._waiting.tenants[name].lanes[lane].items[index]

    def _head(self, name: int) -> tuple[float, float, tuple[float, ...], int]:
        request = self._first(name)
        return request.rank, self._waiting.level(name), request.order, name

    def _place(self, name: int, lane: int, index: int) -> Place | None:
        queue = self._waiting.tenants[name].lanes.get(lane)
        if queue is None or index >= len(queue.items):
            return None
        return queue.items[index].order, lane, index
