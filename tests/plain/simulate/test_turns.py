"""Processors that work in turns: the event loop of a server, and of a load generator that disturbs what it measures."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from quire.schema.messages import EngineOutput, FinishReason
from quire.simulate.client import LoadClient
from quire.simulate.devices import ClientModel, HostModel
from quire.simulate.front import ServerFront
from quire.simulate.scenario import build_fleet
from quire.simulate.turns import TurnLoop, in_turns
from tests.plain.simulate.small import scenario

HOST = HostModel(accept_seconds=6.0, accept_turns=2, request_seconds=0.5, chunk_seconds=1.0, token_seconds=0.25)
CLIENT = ClientModel(request_seconds=1.0, connect_seconds=2.0, connect_turns=2, chunk_seconds=0.25)


class Events:
    """What is to happen, in the order of its time."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._waiting, (time, next(self._numbers), act))

    def run(self) -> None:
        while self._waiting:
            time, _, act = heapq.heappop(self._waiting)
            act(time)


def output(name: str, number: int = 1, *, last: bool = False) -> EngineOutput:
    reason = FinishReason.LENGTH if last else None
    return EngineOutput(request_id=name, new_token_ids=[7] * number, finish_reason=reason)


def test_what_comes_during_a_turn_waits_for_the_next() -> None:
    events, ended = Events(), list[tuple[str, float]]()
    loop = TurnLoop(events.at)

    def work(name: str, seconds: float) -> Callable[[float], float]:
        def run(time: float) -> float:
            ended.append((name, time + seconds))
            return time + seconds

        return run

    for time, name, seconds in ((0.0, "a", 3.0), (0.0, "b", 2.0), (1.0, "c", 1.0), (20.0, "d", 1.0)):
        events.at(time, lambda now, w=work(name, seconds): loop.add(now, w))
    events.run()
    assert ended == [("a", 3.0), ("b", 5.0), ("c", 6.0), ("d", 21.0)]


def test_work_of_several_turns_waits_for_the_other_work_of_each() -> None:
    events, ends = Events(), list[float]()
    loop = TurnLoop(events.at)
    for _ in range(3):
        in_turns(loop, 0.0, 2.0, 2, ends.append)
    events.run()
    assert ends == [4.0, 5.0, 6.0]  # all take their first half before one takes its second


def test_requests_that_come_together_are_read_together_and_a_connection_is_one_turn_more() -> None:
    events, read = Events(), list[tuple[str, float]]()
    front = ServerFront(HOST, events.at, lambda *chunk: None, Random(0))
    for name in ("a", "b"):
        front.accept(0.0, lambda now, name=name: read.append((name, now)))
    front.accept(0.0, lambda now: read.append(("new", now)), connects=True)
    events.run()
    assert read == [("a", 11.5), ("b", 14.5), ("new", 18.5)]


def test_tokens_that_come_while_others_are_sent_share_a_chunk() -> None:
    events, sent = Events(), list[tuple[str, float, int, bool]]()
    front = ServerFront(HOST, events.at, lambda *chunk: sent.append(chunk), Random(0))
    events.at(0.0, lambda now: front.deliver(now, [output("a"), output("b")]))
    events.at(0.5, lambda now: front.deliver(now, [output("a")]))
    events.at(1.5, lambda now: front.deliver(now, [output("a", 2, last=True)]))
    events.run()
    assert sent == [("a", 1.25, 1, False), ("b", 2.5, 1, False), ("a", 4.25, 3, True)]


def test_a_load_generator_takes_times_when_its_turn_comes_and_keeps_connections() -> None:
    events, began, sent, taken = Events(), list[float](), list[tuple[bool, float]](), list[Any]()
    client = LoadClient(CLIENT, events.at, lambda *chunk: taken.append(chunk))
    for _ in range(2):
        client.begin(0.0, began.append, lambda connects, now: sent.append((connects, now)))
    events.at(10.0, lambda now: client.receive(now, "a", 1, False))
    events.at(10.1, lambda now: client.receive(now, "b", 1, False))
    events.at(10.15, lambda now: client.receive(now, "b", 2, True))
    events.at(20.0, lambda now: client.begin(now, began.append, lambda connects, at: sent.append((connects, at))))
    events.run()
    assert began == [0.0, 1.0, 20.0]
    assert sent == [(True, 5.0), (True, 6.0), (False, 21.0)]
    assert taken == [("a", 10.25, 1, False), ("b", 10.5, 1, False), ("b", 10.75, 2, True)]


def test_a_slow_load_generator_is_seen_in_every_figure() -> None:
    def run(client: ClientModel | None) -> tuple[float, float]:
        fleet = build_fleet(scenario(client=client, num_requests=32))[0]
        requests = scenario().workload.draw(32, scenario().share)
        records = fleet.run(requests, 16)
        assert all(record.is_complete and len(record.gaps) > 0 for record in records)
        assert sum(record.num_tokens for record in records) == sum(request.output_tokens for request in requests)
        return max(record.last for record in records), max(record.ttft for record in records)

    free, fast, slow = run(None), run(ClientModel()), run(replace(ClientModel(), chunk_seconds=2e-3))
    assert free[0] < fast[0] < 0.5 * slow[0] and free[1] < fast[1] < slow[1]


@pytest.mark.parametrize("model", [None, ClientModel()])
def test_a_request_that_is_refused_ends(model: ClientModel | None) -> None:
    question = scenario(client=model, settings={"max_num_queued": 2})
    fleet = build_fleet(question)[0]
    records = fleet.run(question.workload.draw(20, question.share), 20)
    assert len(records) == 20 and 0 < sum(record.is_complete for record in records) < 20
