"""engine/several.py: several engines as one client: fake engines and a fuzzer, then processes with the fake worker."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.base import env
from quire.checkpoint.media import ITEMS
from quire.config import EngineArgs
from quire.config.engine import replace
from quire.engine import connect
from quire.engine import several as several_engines
from quire.engine.client import InProcessClient
from quire.engine.connect import make_client
from quire.engine.pulse import Pulse
from quire.engine.several import SeveralEngines
from quire.engine.shared_counts import SharedCounts
from quire.sched.router import ROUTERS, LeastLoaded, PrefixAware
from quire.schema.errors import PEERS_LOST, CheckpointError, ConfigError, EngineDeadError, InputError
from quire.schema.media import MediaItem
from quire.schema.messages import EngineOutput, EngineReady, EngineRequest, FinishReason, Outputs
from quire.schema.params import ResolvedParams
from tests.fake_engine import EOS, ids_of, use_fake, write_model

READY = EngineReady(num_blocks=10, max_model_len=100, vocab_size=9, block_size=4)


def request(name: str, text: str = "abcde", max_tokens: int = 6, **extra: Any) -> EngineRequest:
    params = ResolvedParams(max_tokens=max_tokens, extra_args=extra or None)
    return EngineRequest(
        request_id=name, prompt_token_ids=tuple(ids_of(text)), params=params, seed=0, max_tokens=max_tokens,
        eos_token_id=EOS,
    )  # fmt: skip


class FakeMember:
    """An engine that runs nothing: what it has, it ends when the test says so."""

    def __init__(self) -> None:
        self.dead: EngineDeadError | None = None
        self.pulse = Pulse()
        self.running: list[str] = []
        self.sink: Any = None
        self.calls: list[tuple[str, Future[Any]]] = []

    def wait_ready(self) -> EngineReady:
        return READY

    def stream(self, sink: Any) -> None:
        self.sink = sink

    def submit(self, requests: Any) -> None:
        self._check()
        self.running += [one.request_id for one in requests]

    def abort(self, request_ids: Any) -> None:
        self._check()
        self.running = [one for one in self.running if one not in set(request_ids)]

    def begin_call(self, verb: str, *args: Any, **kwargs: Any) -> Future[Any]:
        self._check()
        future: Future[Any] = Future()
        self.calls.append((verb, future))
        return future

    def begin_close(self, reason: str = "") -> None: ...
    def abandon(self) -> None: ...
    def show_stacks(self) -> None: ...
    def client_left(self, client: int) -> None: ...
    def receive(self) -> Outputs:
        raise NotImplementedError

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        if self.dead is None:
            self.die("it was shut down")

    def say(self, request_id: str, *, ends: bool) -> None:
        if ends:
            self.running.remove(request_id)
        reason = FinishReason.LENGTH if ends else None
        self.sink.take(Outputs(outputs=[EngineOutput(request_id=request_id, new_token_ids=[5], finish_reason=reason)]))

    def die(self, reason: str) -> None:
        self.dead = EngineDeadError(reason)
        for _, future in self.calls:
            if not future.done():
                future.set_exception(self.dead)
        self.sink.died(self.dead)

    def _check(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead.reason)


class Recorder:
    """A sink that remembers how each request ended."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.errors: dict[str, str] = {}
        self.engines: dict[str, int] = {}
        self.dead: EngineDeadError | None = None

    def take(self, outputs: Outputs) -> None:
        for one in outputs.outputs:
            self.engines.setdefault(one.request_id, outputs.engine)
            assert self.engines[one.request_id] == outputs.engine
            if one.finish_reason is not None:
                self.ends[one.request_id] += 1
            if one.error is not None:
                self.errors[one.request_id] = one.error

    def died(self, error: EngineDeadError) -> None:
        assert self.dead is None, "said twice"
        self.dead = error


def several(
    number: int, kind: str = "least-loaded", *, together: bool = False
) -> tuple[SeveralEngines, list[FakeMember], Recorder]:
    members, recorder = [FakeMember() for _ in range(number)], Recorder()
    client = SeveralEngines(members, range(number), ROUTERS[kind](number), together=together)
    client.wait_ready()
    client.stream(recorder)
    return client, members, recorder


def unfinished(client: SeveralEngines) -> list[int]:
    return client._merged._router.unfinished


def test_siblings_go_together_and_a_wish_is_followed() -> None:
    client, members, _ = several(3)
    pair = [request("a#0"), request("a#1")]
    place = client.place(pair)
    client.submit(pair)
    assert members[place].running == ["a#0", "a#1"]
    for name in ("b", "c"):
        assert client.place([request(name)], rank=place) == place
    assert unfinished(client)[place] == 4 and client.place([request("d")]) != place


def test_routing_by_prefix_looks_at_adapters_salts_and_media() -> None:
    """Equal tokens of three pieces: only what is cached under the same keys leads to the same engine."""

    def kinds(name: str) -> list[EngineRequest]:
        one = request(name, "x" * 200)
        images = [MediaItem(modality="image", key=key, offset=2, length=150) for key in ("cat", "dog")]
        changes: list[dict[str, Any]] = [
            {}, {"cache_salt": "s"}, {"lora_id": 1, "lora_name": "a"}, {"lora_id": 2, "lora_name": "b"},
            *({"media": (image,)} for image in images),
        ]  # fmt: skip
        return [msgspec.structs.replace(one, request_id=f"{name} {i}", **change) for i, change in enumerate(changes)]

    client, _, _ = several(6, "prefix-aware")
    first = [client.place([one]) for one in kinds("first")]
    assert sorted(first) == list(range(6))
    assert [client.place([one]) for one in kinds("second")] == first


def test_an_engine_that_dies_fails_its_own_requests_only() -> None:
    client, members, recorder = several(2)
    for name in "abcd":
        client.place([request(name)])
        client.submit([request(name)])
    lost, kept = list(members[0].running), list(members[1].running)
    members[0].die("engine 0 (process 7) was killed by SIGKILL")
    assert dict(recorder.ends) == dict.fromkeys(lost, 1) and client.dead is None
    assert set(recorder.errors.values()) == {"Quire's engine is dead: engine 0 (process 7) was killed by SIGKILL"}
    assert client.lost == {0: "engine 0 (process 7) was killed by SIGKILL"}
    with pytest.raises(EngineDeadError, match="engine 0"):
        client.place([request("wanted there")], rank=0)
    for name in kept:
        members[1].say(name, ends=True)
    assert unfinished(client) == [0, 0]
    members[1].die("worker 1 (process 9) left with exit code 3")
    assert client.dead is not None and client.dead is recorder.dead
    assert "engine 0 (process 7)" in client.dead.reason and "engine 1: worker 1 (process 9)" in client.dead.reason
    with pytest.raises(EngineDeadError):
        client.place([request("too late")])


def test_engines_that_cannot_go_on_alone_end_together_with_the_true_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_engines, "_TRUE_REASON_S", 600.0)  # nobody waits once it is known
    client, members, recorder = several(3, together=True)
    for name in "abcdef":
        client.place([request(name)])
        client.submit([request(name)])
    members[0].die(f"{PEERS_LOST}: Connection closed by peer")  # heard before the notice of the death
    assert not recorder.ends and client.dead is None
    members[1].die("engine 1 (process 7) was killed by SIGKILL")
    for _ in range(600):
        if recorder.dead is not None:
            break
        threading.Event().wait(0.1)
    assert dict(recorder.ends) == dict.fromkeys("abcdef", 1) and recorder.dead is client.dead
    said = "engine 1 (process 7) was killed by SIGKILL; engines that share experts cannot go on alone"
    assert set(recorder.errors.values()) == {f"Quire's engine is dead: {said}"}
    with pytest.raises(EngineDeadError, match=r"engine 1 .process 7. was killed"):
        client.place([request("too late")])
    members[2].die(f"engine 1 {PEERS_LOST}: Connection closed by peer")  # nobody is told a second time


def test_engines_that_share_experts_are_closed_like_others() -> None:
    client, members, recorder = several(2, together=True)
    client.place([request("a")], rank=1)
    client.submit([request("a")])
    client._merged.close()
    for member in members:
        member.die("it was shut down")
    assert dict(recorder.ends) == {"a": 1} and "it was shut down" in recorder.errors["a"]


def test_answers_of_all_engines_become_one() -> None:
    client, members, _ = several(3)

    def answered(verb: str, *values: Any) -> Any:
        whole = client.begin_call(verb)
        for member, value in zip(members, values, strict=False):
            (_, future) = member.calls.pop()
            if isinstance(value, Exception):
                future.set_exception(value)
            else:
                future.set_result(value)
        return whole.result(5)

    assert answered("reset_prefix_cache", True, False, True) is False
    assert answered("abort_requests", 1, 2, 3) == 6
    assert answered("collective_rpc", ["a"], ["b"], ["c"]) == ["a", "b", "c"]
    assert answered("list_loras", [2, 1], [1], []) == [1, 2]
    assert answered("resume", None, None, None) is None and answered("pause", None, None, None) is None
    assert answered("is_paused", False, True, False) is True
    assert answered("save_sharded_state", ["file"]) == ["file"] and not members[1].calls  # replicas: one writes
    assert answered("remove_lora", True, EngineDeadError("gone"), False) is True  # of a dead engine nothing is wanted
    with pytest.raises(InputError, match="engine 1: no such thing"):
        answered("pin_lora", True, InputError("no such thing"), True)
    with pytest.raises(InputError, match=r"^all alike$"):
        answered("pin_lora", *[InputError("all alike")] * 3)


def test_a_call_does_not_wait_for_an_engine_that_dies() -> None:
    client, members, _ = several(2)
    whole = client.begin_call("collective_rpc", "method")
    members[0].calls[0][1].set_result(["mine"])
    members[1].die("gone")
    assert whole.result(5) == ["mine"]
    members[0].die("gone too")
    with pytest.raises(EngineDeadError):
        client.begin_call("resume")


@pytest.mark.parametrize("seed", range(40))
def test_no_request_is_lost_or_answered_twice(seed: int) -> None:
    """Any order of requests, tokens, ends, aborts and deaths."""
    rng = random.Random(seed)
    kind = rng.choice(sorted(ROUTERS))
    client, members, recorder = several(rng.randrange(1, 5), kind)
    open_ids, aborted, refused = set[str](), set[str](), 0
    for number in range(400):
        dice, living = rng.random(), [one for one in members if one.dead is None]
        if dice < 0.45:
            batch = [request(f"{number}#{i}", "xy" * rng.randrange(1, 90)) for i in range(rng.choice((1, 1, 1, 3)))]
            rank = rng.randrange(len(members)) if rng.random() < 0.2 else None
            try:
                client.place(batch, rank)
            except EngineDeadError:
                refused += 1
                continue
            if rng.random() < 0.05 and living:
                rng.choice(living).die(f"died between two calls in step {number}")
            client.submit(batch)
            open_ids |= {one.request_id for one in batch}
        elif dice < 0.85 and (busy := [one for one in living if one.running]):
            member = rng.choice(busy)
            member.say(rng.choice(member.running), ends=rng.random() < 0.7)
        elif dice < 0.97 and open_ids:
            ids = rng.sample(sorted(open_ids), min(3, len(open_ids)))
            client.abort(ids)
            aborted |= {one for one in ids if not recorder.ends[one]}
        elif dice > 0.99 and living:
            rng.choice(living).die(f"died in step {number}")
        running = [sum(one in member.running for one in open_ids) for member in members if member.dead is None]
        assert [count for count, one in zip(unfinished(client), members, strict=True) if one.dead is None] == running
    for member in members:
        if member.dead is None:
            for name in list(member.running):
                member.say(name, ends=True)
    assert unfinished(client) == [0] * len(members)
    assert all(recorder.ends[one] == (one not in aborted) for one in open_ids)
    assert (recorder.dead is not None) == all(member.dead is not None for member in members)
    client.close()


def test_threads_of_engines_do_not_disturb_each_other() -> None:
    client, members, recorder = several(4)
    names = [str(i) for i in range(500)]

    def run(member: FakeMember) -> None:
        while not (done.is_set() and not member.running):
            for name in list(member.running):
                member.say(name, ends=True)

    done = threading.Event()
    threads = [threading.Thread(target=run, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for name in names:
        client.place([request(name)])
        client.submit([request(name)])
    done.set()
    for thread in threads:
        thread.join(60)
    assert recorder.ends == Counter(names) and unfinished(client) == [0] * 4


def test_counts_of_processes_add_up_and_a_row_can_be_cleared(tmp_path: Path) -> None:
    rows = [SharedCounts(str(tmp_path), num_engines=3, num_rows=3, row=row) for row in (1, 2)]
    rows[0].add(0, 1)
    rows[1].add(0, 1)
    rows[1].add(2, 5)
    assert rows[0].read() == rows[1].read() == [2, 0, 5]
    routers = [LeastLoaded(3, row) for row in rows]
    assert routers[0].assign(request("a")) == 1
    SharedCounts(str(tmp_path), num_engines=3, num_rows=3, row=2)  # the process that takes the place of the second
    assert rows[0].read() == [1, 1, 0]


# ---- processes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    use_fake(monkeypatch)
    return dict(model=write_model(tmp_path), block_size=4, max_num_seqs=8, data_parallel_size=2, device="cpu")


def collected(client: Any, count: int) -> dict[str, EngineOutput]:
    ends: dict[str, EngineOutput] = {}
    while len(ends) < count:
        for output in client.receive().outputs:
            if output.finish_reason is not None:
                assert output.request_id not in ends
                ends[output.request_id] = output
    return ends


def test_processes_answer_and_one_is_killed(options: dict[str, Any]) -> None:
    client = make_client(EngineArgs(**options).create_engine_config(), own_process=False)
    assert isinstance(client, SeveralEngines) and not isinstance(client, InProcessClient)
    ready = client.wait_ready()
    try:
        pids = [one.pid for one in client.readies]
        assert len({os.getpid(), *pids}) == 3 and ready.num_blocks == sum(one.num_blocks for one in client.readies)
        assert ready.max_concurrency == sum(one.max_concurrency for one in client.readies) > 0
        assert client.call("collective_rpc", "num_rows") == [0, 0] and client.call("is_paused") is False
        batch = [request(str(i), max_tokens=400, sleep=0.01) for i in range(4)]
        places = {one.request_id: client.place([one]) for one in batch}
        client.submit(batch)
        os.kill(pids[1], signal.SIGKILL)
        lost = collected(client, 2)
        assert {places[one] for one in lost} == {1}
        assert all(f"engine 1 (process {pids[1]}) was killed by SIGKILL" in (o.error or "") for o in lost.values())
        client.abort([one for one, place in places.items() if place == 0])
        last = request("last", "abc", 5)
        client.place([last])
        client.submit([last])
        assert collected(client, 3)["last"].finish_reason is FinishReason.LENGTH  # two aborted ones end too
        assert client.call("collective_rpc", "nap", args=[0.0]) == ["awake"] and client.dead is None
    finally:
        client.close()


@pytest.mark.parametrize(
    ("trouble", "kind", "said"),
    [
        ("bad_checkpoint", CheckpointError, r"engines 0, 1: tensor 'lm_head' has shape"),
        ("exit_in_load", EngineDeadError, r"engine 0: it died while starting: engine 0 .* exit code 11; engine 1: "),
    ],
)
def test_reasons_are_named_by_engine(trouble: str, kind: Any, said: str, options: dict[str, Any]) -> None:
    client = make_client(
        EngineArgs(**options, additional_config={trouble: True}).create_engine_config(), own_process=True
    )
    with pytest.raises(kind, match=said):
        client.wait_ready()


def test_several_engines_need_processes(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "0")
    env.forget_all()
    with pytest.raises(ConfigError, match="need processes of their own"):
        make_client(EngineArgs(**options).create_engine_config(), own_process=False)


@pytest.mark.parametrize("joins", [False, True])
def test_the_router_knows_whether_items_attend_to_each_other(joins: bool, options: dict[str, Any]) -> None:
    config = EngineArgs(**options, data_parallel_routing="prefix-aware").create_engine_config()
    facts = dataclasses.replace(config.model_config.facts, both_ways=ITEMS if joins else "")
    members = [FakeMember(), FakeMember()]
    client = connect._several(replace(config, **{"model_config.facts": facts}), members)
    router = client._merged._router
    assert isinstance(router, PrefixAware) and router._hasher.joins_media is joins


def test_routing_by_prefix_raises_the_hit_rate(options: dict[str, Any]) -> None:
    """Seven conversations of four turns each: where a turn goes to another engine, all is computed again."""
    rates = {}
    for routing in ("round-robin", "prefix-aware"):
        llm = LLM(data_parallel_routing=routing, disable_log_stats=False, **options)
        try:
            rng = random.Random(5)
            talks = [[rng.randrange(4, 200) for _ in range(80)] for _ in range(7)]
            for _ in range(4):
                for talk in talks:
                    llm.generate([{"prompt_token_ids": talk}], SamplingParams(max_tokens=1), use_tqdm=False)
                    talk += [rng.randrange(4, 200) for _ in range(16)]
            values = {name: sum(m.value for m in llm.get_metrics() if m.name == f"vllm:prefix_cache_{name}")
                      for name in ("queries", "hits")}  # fmt: skip
            rates[routing] = values["hits"] / values["queries"]
        finally:
            llm.close()
    assert rates["prefix-aware"] > 0.6 and rates["prefix-aware"] > rates["round-robin"] + 0.15, rates
