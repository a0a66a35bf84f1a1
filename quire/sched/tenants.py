"""Tenants: waiting requests by whose they are, and how much prompt each tenant was served. Who waits is served in turn.

A tenant is an opaque number of a request; where all have the same one, turns are the policy's own order. Otherwise the
next turn is that of the tenant with the lowest level: `served` counts the prompt tokens computed for it (not those that
the prefix cache had), and one that comes, or comes again, begins at `now`, which is what a tenant that always waits is
served on average. So nobody saves up turns by staying away, any number of newcomers keeps nobody from its turn, and of
two that wait neither gets more than a step's tokens ahead, as far as gates and blocks let the other join.
Priorities stand above turns, and within a tenant the policy's order stays.
Must not know: gates, blocks, what a tenant is (the server decides: server/callers.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, merge

from quire.sched.request import Queue, Request, order_of

_FEW = 64  # tenants that nobody needs to forget


class Tenant:
    __slots__ = ("served", "waiting")

    def __init__(self, served: float) -> None:
        self.waiting = Queue()
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
        return merge(*(self.tenants[name].waiting.items for name in self.active), key=order_of)

    def add(self, request: Request) -> None:
        tenant = self._tenant(request.tenant)
        if not tenant.waiting.items:
            self.active.add(request.tenant)
            tenant.served = max(tenant.served, self.now)
        tenant.waiting.add(request)
        self._size += 1
        self.num_added += 1
        self.num_tokens += request.num_prompt

    def remove(self, request: Request) -> None:
        self.tenants[request.tenant].waiting.remove(request)
        self._removed(request)

    def drop(self, request: Request, index: int) -> None:
        """The same, for one whose place in its tenant's queue is known."""
        self.tenants[request.tenant].waiting.drop(index)
        self._removed(request)

    def charge(self, name: int, tokens: int) -> None:
        """So many tokens of a prompt are computed for this tenant."""
        tenant = self._tenant(name)
        tenant.served += tokens
        self.now = max(self.now + tokens / len(self.active | {name}), tenant.served - self.credit)

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

    def _removed(self, request: Request) -> None:
        self._size -= 1
        self.num_tokens -= request.num_prompt
        if not self.tenants[request.tenant].waiting.items:
            self.active.discard(request.tenant)

    def _forget(self) -> None:
        """Tenants that would begin at `now` anyway."""
        self.tenants = {
            name: tenant for name, tenant in self.tenants.items() if tenant.waiting.items or tenant.served > self.now
        }
        self._many = max(_FEW, 2 * len(self.tenants))


class Turns:
    """One step's way through those who wait: `request` is whose turn it is, until it joins or is passed by."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._heads: list[tuple[float, float, tuple[float, ...], int, int]] = []  # of each tenant: the next one
        self.request: Request | None = None
        self._index = 0  # its place in its tenant's queue
        for name in waiting.active:
            if (head := self._head(name, 0)) is not None:
                self._heads.append(head)
        heapify(self._heads)
        self._next()

    def pass_by(self) -> None:
        """It stays where it is."""
        assert self.request is not None
        self._go_on(self.request.tenant, self._index + 1)

    def join(self) -> Request:
        """It waits no more. Charge its tenant before `go_on`."""
        assert self.request is not None
        self._waiting.drop(self.request, self._index)
        return self.request

    def go_on(self) -> None:
        """After the one that joined."""
        assert self.request is not None
        self._go_on(self.request.tenant, self._index)

    def _go_on(self, name: int, index: int) -> None:
        if (head := self._head(name, index)) is not None:
            heappush(self._heads, head)
        self._next()

    def _next(self) -> None:
        if not self._heads:
            self.request = None
            return
        *_, name, self._index = heappop(self._heads)
        self.request = self._waiting.tenants[name].waiting.items[self._index]

    def _head(self, name: int, index: int) -> tuple[float, float, tuple[float, ...], int, int] | None:
        items = self._waiting.tenants[name].waiting.items
        if index >= len(items):
            return None
        request = items[index]
        return request.rank, self._waiting.level(name), request.order, name, index
