"""KV events reach a subscriber in order, batches that were missed come again, and the engine never waits for either."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from quire import LLM, SamplingParams
from quire.base import env
from quire.engine.loop import EngineLoop
from quire.engine.start import _event_publisher
from quire.observe.kv_events import END_OF_REPLAY, EventPublisher, address_of
from quire.sched.events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event
from quire.sched.kv_layout import place
from quire.sched.scheduler import Scheduler
from quire.sched.settings import SchedulerSettings
from quire.schema.errors import ConfigError
from quire.schema.messages import ControlCall
from tests.fake_engine import FakeExecutor, use_fake, write_model
from tests.plain.engine.test_loop import request, run

PATIENCE_MS = 30_000


class Batch(msgspec.Struct, array_like=True):
    """As a subscriber written for the documented format declares it."""

    ts: float
    events: list[Event]


class Subscriber:
    def __init__(self, folder: Path, *, replay: bool = False, topic: str = "") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.events.connect(f"ipc://{folder}/events")
        self.replay = self.context.socket(zmq.DEALER)
        if replay:
            self.replay.connect(f"ipc://{folder}/replay")

    def receive(self) -> tuple[int, list[Event]]:
        assert self.events.poll(PATIENCE_MS), "nothing was published"
        _, number, payload = self.events.recv_multipart()
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=Batch).events

    def wait_for_link(self, publisher: EventPublisher) -> int:
        """A subscription takes a while; the number of the first batch that comes through."""
        for _ in range(3000):
            publisher.publish([AllBlocksCleared()])
            if self.events.poll(10):
                number, _ = self.receive()
                while self.events.poll(50):
                    number, _ = self.receive()
                return number
        raise AssertionError("nothing was published")

    def missed(self, first: int, frames: list[bytes] | None = None) -> list[tuple[int, list[Event]]]:
        self.replay.send_multipart(frames or [b"", first.to_bytes(8, "big")])
        found = []
        while True:
            assert self.replay.poll(PATIENCE_MS), "no replay came"
            *_, number, payload = self.replay.recv_multipart()
            if not payload:
                assert number == END_OF_REPLAY
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=Batch).events))

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def subscriber(tmp_path: Path) -> Iterator[Subscriber]:
    made = Subscriber(tmp_path, replay=True)
    yield made
    made.close()


def make_publisher(folder: Path, **more: Any) -> EventPublisher:
    return EventPublisher(f"ipc://{folder}/events", replay_endpoint=f"ipc://{folder}/replay", **more)


def test_batches_come_in_order_and_missed_ones_again(tmp_path: Path, subscriber: Subscriber) -> None:
    publisher = make_publisher(tmp_path, buffer_steps=5)
    first = subscriber.wait_for_link(publisher) + 1
    sent = [[BlockRemoved([bytes([i])], MEDIUM_GPU)] for i in range(9)]
    for events in sent:
        publisher.publish(events)
    assert [subscriber.receive() for _ in sent] == list(enumerate(sent, first))
    assert subscriber.missed(first + 6) == [(first + i, sent[i]) for i in (6, 7, 8)]
    assert subscriber.missed(0) == [(first + i, sent[i]) for i in range(4, 9)], "five are kept"
    assert subscriber.missed(first + 9) == []
    subscriber.replay.send_multipart([b"", b"not a number"])  # left alone, and the next one is answered
    assert subscriber.missed(0, [first.to_bytes(8, "big")]) == [(first + i, sent[i]) for i in range(4, 9)]
    publisher.close()


def test_the_encoding_is_the_documented_one() -> None:
    stored = BlockStored([b"h"], None, [1, 2], 2, None, MEDIUM_GPU, None)
    events = [stored, msgspec.structs.replace(stored, group=1), BlockRemoved([b"h"], MEDIUM_GPU), AllBlocksCleared()]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(events)) == [
        ["BlockStored", [b"h"], None, [1, 2], 2, None, "GPU", None, 0],
        ["BlockStored", [b"h"], None, [1, 2], 2, None, "GPU", None, 1],
        ["BlockRemoved", [b"h"], "GPU", 0],
        ["AllBlocksCleared"],
    ]


def test_topics(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path, topic="kv@here")
    mine, other = Subscriber(tmp_path, topic="kv@"), Subscriber(tmp_path, topic="other")
    mine.wait_for_link(publisher)
    publisher.publish([AllBlocksCleared()])
    assert mine.receive()[1] == [AllBlocksCleared()] and not other.events.poll(100)
    publisher.close()
    mine.close()
    other.close()


def test_a_full_queue_drops_and_the_numbers_tell(
    tmp_path: Path, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make_publisher(tmp_path, max_queue_size=3)
    subscriber.wait_for_link(publisher)
    stop, turn = threading.Event(), publisher._poll_once
    monkeypatch.setattr(publisher, "_poll_once", lambda: stop.wait(30) and turn())
    time.sleep(0.3)  # a turn that had begun is over, and one batch may go with it
    began = time.monotonic()
    for i in range(50):
        publisher.publish([BlockRemoved([bytes([i])], MEDIUM_GPU)])
    assert time.monotonic() - began < 10, "the engine does not wait for the queue"
    last = publisher._next
    stop.set()
    got = [subscriber.receive()]
    for patience_ms in (60_000, 60_000, 1000):  # the fourth need not be there
        if subscriber.events.poll(patience_ms):
            got.append(subscriber.receive())
    assert 3 <= len(got) <= 4 and got[-1][0] < last - 1, "the last ones were dropped"
    publisher.publish([AllBlocksCleared()])
    assert subscriber.receive()[0] == last, "a gap shows that batches are missing"
    publisher.close()


@pytest.mark.parametrize("option", ["endpoint", "replay_endpoint"])
def test_an_address_that_cannot_be_used_is_named(tmp_path: Path, option: str) -> None:
    given = {"endpoint": f"ipc://{tmp_path}/events", option: "tcp://*:notaport"}
    with pytest.raises(ConfigError, match=rf"kv_events_config\.{option}='tcp://\*:notaport' cannot be used"):
        EventPublisher(given.pop("endpoint"), **given)


def test_the_loop_publishes_what_the_cache_does(tmp_path: Path, subscriber: Subscriber) -> None:
    publisher = make_publisher(tmp_path)
    subscriber.wait_for_link(publisher)
    fake = FakeExecutor(SimpleNamespace(cache_config=SimpleNamespace(block_size=4), additional_config={}))
    layout = place(fake.load().specs, 0, num_blocks=40, max_model_len=100, max_num_seqs=8)
    scheduler = Scheduler(SchedulerSettings(max_model_len=100, events=True), layout)
    loop = EngineLoop(fake, scheduler, kv_events=publisher)
    loop.submit(request("a", "abcdefghi", max_tokens=2))
    run(loop)
    (stored,) = subscriber.receive()[1]
    assert isinstance(stored, BlockStored) and len(stored.block_hashes) == 2 and stored.parent_block_hash is None
    assert stored.token_ids == [byte + 4 for byte in b"abcdefgh"] and stored.medium == "GPU"
    loop.call(ControlCall(call_id=1, verb="reset_prefix_cache"))
    assert subscriber.receive()[1] == [AllBlocksCleared()]
    loop.close()
    assert not publisher._thread.is_alive()


def test_options_decide_who_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def config(**asked: Any) -> Any:
        events = SimpleNamespace(publisher=None, publishes=False)
        vars(events).update(asked)
        return SimpleNamespace(kv_events_config=events, cache_config=SimpleNamespace(enable_prefix_caching=True))

    assert _event_publisher(SimpleNamespace(kv_events_config=None)) is None  # type: ignore[arg-type]
    assert _event_publisher(config()) is None and not caplog.records
    assert _event_publisher(config(publisher="zmq")) is None
    assert "nothing is published" in caplog.text


def test_from_the_option_to_a_subscriber(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake(monkeypatch)
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "0")
    env.forget_all()
    model = write_model(tmp_path / "model")
    options = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events",
               "replay_endpoint": f"ipc://{tmp_path}/replay"}  # fmt: skip
    llm = LLM(model, max_model_len=100, num_gpu_blocks_override=40, kv_events_config=options)
    subscriber = Subscriber(tmp_path, replay=True)
    try:
        llm.generate({"prompt_token_ids": list(range(20, 60))}, SamplingParams(max_tokens=2), use_tqdm=False)
        batches = subscriber.missed(0)  # whatever the subscription missed
        stored = [event for _, events in batches for event in events if isinstance(event, BlockStored)]
        assert [token for event in stored for token in event.token_ids] == list(range(20, 52))
    finally:
        llm.close()
        subscriber.close()


def test_every_engine_of_several_has_addresses_of_its_own() -> None:
    assert [address_of("tcp://*:5557", rank) for rank in (0, 1, 3)] == ["tcp://*:5557", "tcp://*:5558", "tcp://*:5560"]
    assert address_of("ipc:///tmp/events", 0) == "ipc:///tmp/events"
    assert address_of("ipc:///tmp/events", 2) == "ipc:///tmp/events_dp2"
    assert address_of("inproc://events", 1) == "inproc://events_dp1"
