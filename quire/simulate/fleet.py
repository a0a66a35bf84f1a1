"""All simulated replicas, their servers and the router, in one order of events.

In: requests by arrival, or so many at once. Out: one record per request. Events are taken in the order of their times,
so a router sees at each moment what a real one would. Must not know: how figures are made of records.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from quire.sched.router import Router
from quire.sched.settings import SchedulerSettings
from quire.schema.kv import KVLayout
from quire.schema.messages import EngineOutput, EngineRequest
from quire.schema.params import ResolvedParams
from quire.simulate.client import LoadClient
from quire.simulate.cost import CostModel
from quire.simulate.devices import ClientModel, HostModel
from quire.simulate.front import ServerFront
from quire.simulate.replica import NEVER, Replica
from quire.simulate.workload import SimulatedRequest

_PARAMS = ResolvedParams(ignore_eos=True, detokenize=False)
_EVENTS_BETWEEN = 1000  # two questions whether to stop


class RequestRecord:
    """What a client saw of its request. Times in seconds."""

    __slots__ = ("first", "gaps", "last", "num_tokens", "request", "start")

    def __init__(self, request: SimulatedRequest, start: float) -> None:
        self.request, self.start = request, start
        self.first = self.last = -1.0
        self.num_tokens = 0
        self.gaps: list[float] = []  # between chunks

    @property
    def ttft(self) -> float:
        return self.first - self.start

    @property
    def tpot(self) -> float:
        """Mean time of a token after the first; 0 if there is none."""
        return (self.last - self.first) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    @property
    def is_complete(self) -> bool:
        return self.num_tokens == self.request.output_tokens

    def begin(self, time: float) -> None:
        self.start = time

    def take(self, time: float, num_tokens: int) -> None:
        """A chunk without tokens says that the request was refused."""
        if self.first >= 0:
            self.gaps.append(time - self.last)
        elif num_tokens:
            self.first = time
        self.last = time
        self.num_tokens += num_tokens


class Fleet:
    def __init__(
        self,
        router: Router,
        num_replicas: int,
        settings: SchedulerSettings,
        layout: KVLayout,
        cost: CostModel,
        host: HostModel,
        seed: int = 0,
        client: ClientModel | None = None,
    ) -> None:
        """`client`: makes the load and measures it, on one processor; None: clients take no time."""
        self.router, self.records = router, list[RequestRecord]()
        self._by_id: dict[str, RequestRecord] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._waiting: list[SimulatedRequest] = []  # for one of those at once to end; last first
        random = Random(seed)
        self.fronts = [ServerFront(host, self._at, self._send, random) for _ in range(num_replicas)]
        self._client = None if client is None else LoadClient(client, self._at, self._take)
        self.replicas = [
            Replica(settings, layout, cost, host, partial(self._emit, index)) for index in range(num_replicas)
        ]

    def run(
        self,
        requests: Sequence[SimulatedRequest],
        max_concurrency: int | None = None,
        stop: Callable[[float], bool] = lambda now: False,
    ) -> list[RequestRecord]:
        """Every request to its end. `max_concurrency`: so many at once at most, each as soon as another has ended.
        `stop`: asked now and then whether what is left need not be simulated."""
        at_once = len(requests) if max_concurrency is None else max_concurrency
        self._waiting = list(requests[at_once:][::-1])
        for request in requests[:at_once]:
            self._at(request.arrival, partial(self._arrive, request))
        events, time = self._events, 0.0
        while events and not stop(time):
            for _ in range(_EVENTS_BETWEEN):
                if not events:
                    break
                time, _, act = heapq.heappop(events)
                act(time)
        return self.records

    @property
    def is_done(self) -> bool:
        """Nothing is left to simulate."""
        return not self._events

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, act))

    def _arrive(self, request: SimulatedRequest, now: float) -> None:
        record = RequestRecord(request, max(now, request.arrival))
        number = len(self.records)
        self.records.append(record)
        self._by_id[str(number)] = record
        if self._client is None:
            self._route(number, False, now)
        else:
            self._client.begin(now, record.begin, partial(self._route, number))

    def _route(self, number: int, connects: bool, now: float) -> None:
        """It comes to the fleet."""
        name, request = str(number), self.records[number].request
        prompt = _prompt(request, number)
        submitted = EngineRequest(
            request_id=name, prompt_token_ids=prompt, params=_PARAMS, seed=0, max_tokens=request.output_tokens
        )
        index = self.router.assign(submitted)
        self.fronts[index].accept(now, partial(self._submit, index, submitted), connects=connects)

    def _submit(self, index: int, request: EngineRequest, now: float) -> None:
        replica = self.replicas[index]
        before = replica.wake_at
        replica.submit(now, request)
        if replica.wake_at != before:
            self._at(replica.wake_at, partial(self._wake, index))

    def _wake(self, index: int, now: float) -> None:
        replica = self.replicas[index]
        if replica.wake_at != now:  # it was woken for something else meanwhile
            return
        replica.wake(now)
        if replica.wake_at < NEVER:
            self._at(replica.wake_at, partial(self._wake, index))

    def _emit(self, index: int, time: float, outputs: list[EngineOutput]) -> None:
        self._at(time, partial(self._deliver, index, outputs))

    def _deliver(self, index: int, outputs: list[EngineOutput], now: float) -> None:
        self.fronts[index].deliver(now, outputs)

    def _send(self, request_id: str, time: float, num_tokens: int, is_last: bool) -> None:
        if is_last:
            self.router.finish(request_id)
        if self._client is None:
            self._take(request_id, time, num_tokens, is_last)
        else:
            self._at(time, partial(self._receive, self._client, request_id, num_tokens, is_last))

    def _receive(self, client: LoadClient, request_id: str, num_tokens: int, is_last: bool, now: float) -> None:
        client.receive(now, request_id, num_tokens, is_last)

    def _take(self, request_id: str, time: float, num_tokens: int, is_last: bool) -> None:
        """A client has a chunk."""
        self._by_id[request_id].take(time, num_tokens)
        if is_last:
            del self._by_id[request_id]
            if self._waiting:
                self._at(time, partial(self._arrive, self._waiting.pop()))


def _prompt(request: SimulatedRequest, number: int) -> tuple[int, ...]:
    """Tokens that only requests of the same group share: a block of equal tokens is told apart by the token."""
    shared = request.prefix_tokens if request.group >= 0 else 0
    return (2 * request.group,) * shared + (2 * number + 1,) * (request.prompt_tokens - shared)
