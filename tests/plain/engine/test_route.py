"""engine/route.py and engine/pulse.py: several clients of one engine, and an engine's progress seen from outside."""

from __future__ import annotations

import os
import stat
import threading

import msgspec
import pytest

from quire.base.clock import now
from quire.base.seal import new_secret
from quire.config import EngineArgs
from quire.engine.process_client import AttachedClient, ProcessClient
from quire.engine.pulse import FILE, Pulse
from quire.engine.route import OWNER, Routes
from quire.schema.messages import (
    Abort,
    ControlCall,
    ControlReply,
    EngineDied,
    EngineOutput,
    FinishReason,
    Outputs,
    Stop,
)
from quire.schema.stats import StepStats
from tests.fake_engine import double, ids_of, use_fake, write_model
from tests.plain.engine.test_client import Collector, ask

STATS = StepStats(step=1, running=1, waiting=0, prompt_tokens=1, generated_tokens=1, preempted=0, kv_usage=0.5)


def output(name: str, reason: FinishReason | None = None) -> EngineOutput:
    return EngineOutput(request_id=name, new_token_ids=[5], finish_reason=reason)


def joined(*clients: int) -> Routes:
    routes = Routes()
    for client in clients:
        routes.join(client)
    return routes


def test_each_client_hears_of_its_own_requests():
    routes = joined(1, 2)
    routes.arrive(1, ask("a"))
    routes.arrive(2, ask("b"))
    told = dict(routes.deliver(Outputs(outputs=[output("a"), output("b", FinishReason.STOP), output("nobody's")])))
    assert {client: [o.request_id for o in news.outputs] for client, news in told.items()} == {1: ["a"], 2: ["b"]}
    later = dict(routes.deliver(Outputs(outputs=[output("a"), output("b")])))
    assert list(later) == [1]  # b had ended: what comes after is nobody's


def test_a_steps_numbers_are_told_to_one_client():
    routes = joined(1, 2)
    routes.arrive(2, ask("b"))
    told = dict(routes.deliver(Outputs(outputs=[output("b")], stats=STATS)))
    assert told[1].stats == STATS and told[1].outputs == [] and told[2].stats is None
    routes.leave(1)
    assert dict(routes.deliver(Outputs(outputs=[], stats=STATS)))[2].stats == STATS
    routes.leave(2)
    assert routes.deliver(Outputs(outputs=[], stats=STATS)) == []


def test_calls_with_the_same_number_are_kept_apart():
    routes = joined(1, 2)
    calls = [routes.arrive(client, ControlCall(call_id=7, verb="is_paused")) for client in (1, 2)]
    assert calls[0].call_id != calls[1].call_id
    for client, call in zip((1, 2), calls, strict=True):
        assert routes.deliver(ControlReply(call_id=call.call_id, value=client)) == [
            (client, ControlReply(call_id=7, value=client))
        ]


def test_a_client_that_leaves_takes_its_requests_with_it():
    routes = joined(1, 2)
    for name, client in (("a", 1), ("b", 2), ("c", 1)):
        routes.arrive(client, ask(name))
    call = routes.arrive(1, ControlCall(call_id=1, verb="is_paused"))
    assert routes.leave(1) == Abort(request_ids=("a", "c"))
    assert routes.deliver(Outputs(outputs=[output("a", FinishReason.ABORT)])) == []
    assert [client for client, _ in routes.deliver(ControlReply(call_id=call.call_id))] == [OWNER]
    routes.arrive(2, Stop())  # any client but the owner only leaves
    assert routes.arrive(OWNER, Stop()) == Stop()
    assert [client for client, _ in routes.deliver(EngineDied(reason="x"))] == [OWNER]


def test_a_number_that_is_taken_again_starts_from_nothing():
    routes = joined(1)
    routes.arrive(1, ask("a"))
    assert routes.leave(1) == Abort(request_ids=("a",))
    routes.join(1)
    routes.arrive(1, ask("b"))
    assert [o.request_id for o in routes.deliver(Outputs(outputs=[output("a"), output("b")]))[0][1].outputs] == ["b"]


# ---- live ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["here", "from other machines"])
def owner(request, tmp_path, monkeypatch):
    """Clients join through a folder, or by TCP."""
    use_fake(monkeypatch)
    config = EngineArgs(model=write_model(tmp_path), block_size=4, max_num_seqs=8).create_engine_config()
    way = {} if request.param == "here" else {"host": "127.0.0.1", "secret": new_secret()}
    made = ProcessClient(config, shared=True, **way)
    made.wait_ready()
    made.stream(Collector())
    yield made
    made.close()
    os.close(made.mailbox.life)


def attach(owner: ProcessClient, number: int) -> tuple[AttachedClient, Collector]:
    host = "127.0.0.1" if owner.mailbox.address else ""
    client = AttachedClient(owner.mailbox._replace(host=host), number)
    assert client.wait_ready().client == number
    sink = Collector()
    client.stream(sink)
    return client, sink


def wait_idle(owner: ProcessClient) -> None:
    """Before its requests would have ended by themselves, after 150 s."""
    deadline = now() + 100
    while owner.call("stats", timeout=60)["running"]:
        assert now() < deadline


def test_two_clients_of_one_engine(owner):
    (one, heard), (two, also) = attach(owner, 1), attach(owner, 2)
    one.submit([ask("a", "abc", 4)])
    two.submit([ask("b", "xyz", 400, sleep=0.01)])
    heard.wait_for(lambda o: o.finish_reason)
    assert {o.request_id for o in heard.outputs} == {"a"}
    assert [i for o in heard.outputs for i in o.new_token_ids] == ids_of("abca")
    for client in (one, two):
        assert client.call("collective_rpc", double, None, [4], timeout=60) == [8]
    two.abort(["b"])
    also.wait_for(lambda o: o.finish_reason is FinishReason.ABORT)
    one.close()
    assert two.call("is_paused", timeout=60) is False  # the engine is not the one's to end
    two.close()


def test_a_client_that_vanished_is_worked_for_no_more(owner):
    one, heard = attach(owner, 1)
    one.submit([ask("a", max_tokens=400, sleep=0.01)])
    heard.wait_for(lambda o: o.new_token_ids)
    owner.client_left(1)
    deadline = now() + 10
    while owner.call("stats", timeout=60)["running"]:
        assert now() < deadline
    one.close()
    again, _ = attach(owner, 2 if owner.mailbox.address else 1)  # whoever comes by TCP has a number of its own
    assert again.call("is_paused", timeout=60) is False
    again.close()


def test_the_engines_death_is_heard_by_all(owner):
    (one, heard), (two, also) = attach(owner, 1), attach(owner, 2)
    one.submit([ask("a", max_tokens=400, exit_at=2)])
    for sink in (heard, also):
        assert sink.ended.wait(60) and "process is gone" in str(sink.error)
    one.close()
    two.close()


def test_sockets_are_for_this_user_alone(owner):
    one, _ = attach(owner, 1)
    assert stat.S_IMODE(os.stat(owner.mailbox.folder).st_mode) == 0o700
    names = os.listdir(owner.mailbox.folder)
    assert {"client-0", FILE} | (set() if owner.mailbox.address else {"engine", "client-1"}) <= set(names)
    for name in names:
        assert stat.S_IMODE(os.stat(os.path.join(owner.mailbox.folder, name)).st_mode) == 0o600
    one.close()


# ---- pulse ---------------------------------------------------------------------------------------------------------


def test_silence_is_only_counted_while_there_is_work(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("quire.engine.pulse.now", lambda: clock[0])
    pulse = Pulse()
    pulse.beat(busy=False, paused=False)
    clock[0] = 500.0
    assert pulse.silence(None) == 0.0
    assert pulse.silence(waiting_since=450.0) == 50.0  # asked, and the engine has not even looked
    pulse.beat(busy=True, paused=False)
    clock[0] = 507.0
    assert pulse.silence(None) == 7.0 == pulse.silence(waiting_since=506.0)
    pulse.beat(busy=False, paused=True)
    clock[0] = 600.0
    assert pulse.silence(waiting_since=550.0) == 0.0  # told to hold requests
    pulse.beat(busy=True, paused=True)
    clock[0] = 603.0
    assert pulse.silence(None) == 3.0  # what was running when it was paused must still end


def test_a_pulse_is_felt_in_other_processes(tmp_path):
    mine, theirs = Pulse(str(tmp_path)), Pulse(str(tmp_path))
    mine.beat(busy=True, paused=False)
    assert theirs.read() == mine.read() and theirs.read().busy and theirs.read().steps == 1
    assert stat.S_IMODE(os.stat(tmp_path / FILE).st_mode) == 0o600


def test_a_running_engine_beats(owner):
    one, sink = attach(owner, 1)
    before = one.pulse.read().steps
    one.submit([ask("a")])
    sink.wait_for(lambda o: o.finish_reason)
    done = threading.Event()
    for _ in range(500):
        if not one.pulse.read().busy:
            break
        done.wait(0.01)
    assert one.pulse.read().steps > before and not one.pulse.read().busy
    one.close()


# ---- from other machines -------------------------------------------------------------------------------------------


@pytest.fixture
def reachable(tmp_path, monkeypatch):
    use_fake(monkeypatch)
    config = EngineArgs(model=write_model(tmp_path), block_size=4, max_num_seqs=8).create_engine_config()
    made = ProcessClient(config, shared=True, host="127.0.0.1", secret=new_secret())
    made.wait_ready()
    made.stream(Collector())
    yield made
    made.close()
    os.close(made.mailbox.life)


def test_whoever_has_another_secret_is_not_heard(reachable):
    mailbox = reachable.mailbox._replace(host="127.0.0.1", secret=new_secret())
    stranger = AttachedClient(mailbox, 1)
    assert stranger._reader.wire.receive(2.0) is None  # no answer to its Hello
    stranger.close()
    client, sink = attach(reachable, 1)  # not even its number is taken
    client.submit([ask("a", "abc", 4)])
    sink.wait_for(lambda o: o.finish_reason)
    client.close()


def test_a_client_whose_message_was_lost_on_the_network_is_given_up_alone(reachable):
    (one, heard), (two, also) = attach(reachable, 1), attach(reachable, 2)
    one.submit([ask("a", max_tokens=300, sleep=0.5)])
    heard.wait_for(lambda o: o.new_token_ids)
    one._reader.wire._seal._sent[b"from 1"] += 1  # a message that never arrives
    one.abort(["nothing"])
    assert heard.ended.wait(60) and "messages were lost on the network: message 3 came" in str(heard.error)
    wait_idle(reachable)
    two.submit([ask("b", "abc", 4)])  # the others go on
    also.wait_for(lambda o: o.finish_reason)
    assert not also.ended.is_set()
    one.close()
    two.close()


def test_the_owner_cannot_be_given_up(reachable):
    _, heard = attach(reachable, 1)
    reachable._reader.wire._seal._sent[b"from 0"] += 1
    reachable.abort(["nothing"])
    assert heard.ended.wait(60) and "messages were lost on the network" in str(heard.error)


def test_a_client_that_misses_something_gives_the_engine_up(reachable):
    (one, heard), (two, also) = attach(reachable, 1), attach(reachable, 2)
    one._reader.wire._seal._received[b"to 1"] -= 1
    one.submit([ask("a", max_tokens=300, sleep=0.5)])
    assert heard.ended.wait(60) and "messages were lost on the network" in str(heard.error)
    wait_idle(reachable)  # nobody would hear of it
    two.submit([ask("b", "abc", 4)])  # the others go on
    also.wait_for(lambda o: o.finish_reason)
    one.close()
    two.close()


def test_an_address_that_is_none_is_not_opened(reachable):
    client, _ = attach(reachable, 1)
    wrong = ["ipc:///etc/passwd", "tcp://a:1", "tcp://1.2.3.4", "tcp://1.2.3.4:*", "tcp://1.2.3.4:65536",
             "tcp://1.2.3.256:1", "tcp://1.2.3.4:0", "x" * 99]  # fmt: skip
    for address in wrong:
        client._reader.wire.send([msgspec.msgpack.encode({"type": "hello", "address": address})])
        assert client.call("is_paused", timeout=60) is False
    client.close()
