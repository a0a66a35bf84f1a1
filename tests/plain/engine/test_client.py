"""engine/client.py and proc.py: the same behaviour in process and over a wire, and no death without an explanation."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest

from quire.base import env
from quire.config import EngineArgs
from quire.engine import proc
from quire.engine.client import InProcessClient
from quire.engine.connect import make_client
from quire.engine.process_client import ProcessClient
from quire.schema.errors import CheckpointError, EngineDeadError, InputError, NotBuiltError
from quire.schema.messages import EngineRequest, FinishReason
from quire.schema.params import ResolvedParams
from tests.fake_engine import EOS, double, ids_of, name_of_model, use_fake, write_model
from tests.fake_engine import main as fake_main

FORMS = {"in process": InProcessClient, "own process": ProcessClient}


@pytest.fixture
def config(tmp_path, monkeypatch):
    use_fake(monkeypatch)
    return EngineArgs(model=write_model(tmp_path), block_size=4, max_num_seqs=8).create_engine_config()


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def client(request, config):
    made = request.param(config)
    made.wait_ready()
    yield made
    made.close()


@pytest.fixture
def process(config):
    made = ProcessClient(config)
    made.wait_ready()
    yield made
    made.close()


def ask(name: str, text: str = "abcde", max_tokens: int = 6, **extra) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(ids_of(text)),
        params=ResolvedParams(max_tokens=max_tokens, extra_args=extra or None),
        seed=0,
        max_tokens=max_tokens,
        eos_token_id=EOS,
    )


def receive_until(client, *names: str) -> dict[str, tuple[list[int], FinishReason | None]]:
    found = {name: ([], None) for name in names}
    while not all(reason for _, reason in found.values()):
        for output in client.receive().outputs:
            ids, _ = found[output.request_id]
            found[output.request_id] = (ids + output.new_token_ids, output.finish_reason)
    return found


class Collector:
    def __init__(self) -> None:
        self.outputs, self.error, self.ended = [], None, threading.Event()

    def take(self, outputs) -> None:
        self.outputs.extend(outputs.outputs)

    def died(self, error) -> None:
        self.error = error
        self.ended.set()

    def wait_for(self, test, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not any(map(test, list(self.outputs))):
            assert time.monotonic() < deadline
            time.sleep(0.002)


def test_requests_are_answered(client):
    client.submit([ask("a"), ask("b", "xy", eos_at=4)])
    found = receive_until(client, "a", "b")
    assert found == {
        "a": (ids_of("abcdea"), FinishReason.LENGTH),
        "b": ([*ids_of("xyx"), EOS], FinishReason.STOP),
    }


def test_abort(client):
    client.submit([ask("a", max_tokens=400, sleep=0.02), ask("b")])
    client.abort(["a"])
    assert receive_until(client, "a", "b")["a"][1] is FinishReason.ABORT


def test_verbs_and_their_errors(client):
    assert client.call("is_paused") is False
    assert client.call("collective_rpc", "num_rows") == [0]
    assert client.call("collective_rpc", double, None, [4]) == [8]
    assert client.call("apply_model", name_of_model) == ["repeats its prompt"]
    with pytest.raises(NotBuiltError, match="sleep"):
        client.call("sleep", 1)
    with pytest.raises(LookupError, match="because"):
        client.call("collective_rpc", "fail", None, ["because"])
    with pytest.raises(InputError, match="known are"):
        client.call("no_such_verb")
    client.submit([ask("a")])
    assert receive_until(client, "a")["a"][1] is FinishReason.LENGTH


def test_pause_that_waits_lets_running_requests_finish(client):
    client.submit([ask("a", max_tokens=20)])
    client.call("pause", wait_for_inflight_requests=True)
    assert receive_until(client, "a")["a"][1] is FinishReason.LENGTH
    client.call("resume")


def test_streaming_and_closing(client):
    sink = Collector()
    client.stream(sink)
    client.submit([ask("a")])
    sink.wait_for(lambda o: o.finish_reason)
    assert client.call("is_paused") is False
    assert client.begin_call("collective_rpc", "num_rows").result(60) == [1]
    client.submit([ask("b", max_tokens=400, sleep=0.01)])
    client.close()
    assert sink.ended.wait(60) and "shut down" in str(sink.error)
    for late in (lambda: client.submit([ask("c")]), lambda: client.call("is_paused")):
        with pytest.raises(EngineDeadError, match="shut down"):
            late()
    client.close()


def test_a_step_that_never_ends_does_not_hold_up_the_end(config, monkeypatch):
    """Whoever waits is told; the loop is closed by the step's thread, which still has it, when the step ends."""
    monkeypatch.setattr("quire.engine.client.CLOSE_PATIENCE_S", 0.2)
    client, sink = InProcessClient(config), Collector()
    client.wait_ready()
    loop, begun, go_on = client.loop, threading.Event(), threading.Event()
    step, closed = loop.step, []

    def stuck():
        begun.set()
        go_on.wait(60)
        return step()

    monkeypatch.setattr(loop, "step", stuck)
    monkeypatch.setattr(loop, "close", lambda: closed.append(1))
    client.stream(sink)
    client.submit([ask("a")])
    assert begun.wait(60)
    client.close()
    assert sink.ended.wait(60) and "shut down" in str(sink.error) and not closed
    sink.ended.clear()
    go_on.set()
    client._thread.join(60)
    assert not client._thread.is_alive() and not sink.ended.is_set(), "told twice"
    assert closed == [1]


@pytest.mark.parametrize(
    ("form", "extra", "words"),
    [
        ("in process", {"raise_at": 3}, "ArithmeticError: the step went wrong"),
        ("own process", {"raise_at": 3}, "ArithmeticError: the step went wrong"),
        ("own process", {"exit_at": 3}, "exit code 7"),
        ("own process", {"kill_at": 3}, "SIGKILL"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_whatever_kills_an_engine_everybody_hears_why_at_once(config, form, extra, words, streaming):
    client = FORMS[form](config)
    client.wait_ready()
    sink = Collector()
    if streaming:
        client.stream(sink)
    client.submit([ask("innocent", max_tokens=400), ask("guilty", max_tokens=400, **extra)])
    began = time.monotonic()
    if streaming:
        assert sink.ended.wait(60)
        assert words in str(sink.error)
    else:
        with pytest.raises(EngineDeadError, match=words):
            receive_until(client, "innocent", "guilty")
        with pytest.raises(EngineDeadError, match=words):
            client.receive()
    assert time.monotonic() - began < 60
    assert words in client.dead.reason
    for late in (lambda: client.submit([ask("late")]), lambda: client.call("is_paused"), lambda: client.abort(["x"])):
        with pytest.raises(EngineDeadError, match=words):
            late()
    client.close()


def test_a_call_under_way_fails_with_the_engine(process):
    process.stream(Collector())
    future = process.begin_call("collective_rpc", "nap", None, [600])
    os.kill(process._reader.child.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        future.result(60)


@pytest.mark.parametrize("form", FORMS)
def test_a_failing_load_raises_the_real_error_quickly(tmp_path, monkeypatch, form):
    use_fake(monkeypatch)
    args = EngineArgs(model=write_model(tmp_path), additional_config={"bad_checkpoint": True})
    began = time.monotonic()
    client = FORMS[form](args.create_engine_config())
    with pytest.raises(CheckpointError, match="lm_head"):
        client.wait_ready()
    assert time.monotonic() - began < 60
    client.close()


def test_dying_while_starting_is_explained(tmp_path, monkeypatch):
    use_fake(monkeypatch)
    args = EngineArgs(model=write_model(tmp_path), additional_config={"exit_in_load": True})
    client = ProcessClient(args.create_engine_config())
    with pytest.raises(EngineDeadError, match=r"while starting.*exit code 11"):
        client.wait_ready()


def test_a_start_that_takes_too_long_is_given_up(config, monkeypatch):
    monkeypatch.setattr("quire.engine.process_client.MAIN", "tests.plain.engine.test_client:never_ready")
    monkeypatch.setenv("QUIRE_ENGINE_START_TIMEOUT_S", "1")
    env.forget_all()
    client = ProcessClient(config)
    with pytest.raises(EngineDeadError, match="not ready after 1 s"):
        client.wait_ready()
    assert not client._reader.child.alive


def never_ready(boot: bytes) -> None:
    time.sleep(600)


def test_what_cannot_cross_is_refused_and_nothing_breaks(process):
    with pytest.raises(InputError, match="cannot cross"):
        process.call("collective_rpc", "num_rows", None, [object()])
    with pytest.raises(InputError, match="QUIRE_ENABLE_V1_MULTIPROCESSING=0"):
        process.call("apply_model", lambda model: 1)
    with pytest.raises(InputError, match="cannot cross"):
        process.call("collective_rpc", "tests.plain.engine.test_client:foreign")  # its value is no plain data
    with pytest.raises(InputError, match="cannot be encoded"):
        process.submit([ask("a", number=1 << 80)])
    process.submit([ask("b")])
    assert receive_until(process, "b")["b"][1] is FinishReason.LENGTH


def foreign(worker) -> object:
    return object()


def test_a_message_the_engine_cannot_read_is_answered(process):
    good = process._codec.encode(ask("a"))[0]
    process._reader.send([bytes(good).replace(b"max_tokens", b"max_tokenz")])
    (output,) = process.receive().outputs
    assert output.request_id == "a" and output.finish_reason is FinishReason.ERROR and "max_tokens" in output.error
    process._reader.send([b"\xc1 nothing at all"])
    assert process.call("is_paused") is False


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"", b""], [b"nobody"], [b"-1", b""], [b"\xff\xfe"], [b"9" * 5000, b"\x80"], [b"0"], [b"0", b""]],
    ids=lambda frames: repr(frames)[:30],
)
def test_frames_that_are_no_message_leave_an_engine_that_hears(process, frames):
    process._reader.wire._lead = []
    process._reader.wire.send(frames)
    process._reader.wire._lead = [b"0"]
    assert process.call("is_paused", timeout=60) is False


def test_an_engine_that_cannot_read_its_mailbox_dies_and_says_why(config, monkeypatch):
    monkeypatch.setattr("quire.engine.process_client.MAIN", "tests.plain.engine.test_client:deafened")
    client = ProcessClient(config)
    client.wait_ready()
    with pytest.raises(EngineDeadError, match="the mailbox is broken"):
        client.call("is_paused", timeout=60)
    assert client.dead is not None
    client.close()


def deafened(boot: bytes) -> None:
    """An engine whose reading thread meets what nobody foresaw."""

    def fail(self, client, message):
        raise LookupError("the mailbox is broken")

    proc._Receiver._take = fail
    fake_main(boot)


def test_a_call_may_time_out_and_the_engine_goes_on(process):
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        process.call("collective_rpc", "nap", None, [1.5], timeout=0.1)
    assert process.call("collective_rpc", "nap", None, [0.0]) == ["awake"]


def test_collecting_a_client_ends_its_process(config):
    client = ProcessClient(config)
    client.wait_ready()
    child = client._reader.child
    del client
    gc.collect()
    assert child.wait(60)
    assert "exit code 0" in child.why_dead()


def test_the_environment_overrules_the_habit(config, monkeypatch):
    for value, kind in (("0", InProcessClient), ("1", ProcessClient)):
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", value)
        env.forget_all()
        made = make_client(config, own_process=value == "0")
        assert type(made) is kind
        made.close()


def test_ctrl_c_between_steps_leaves_the_engine_whole(config):
    client = InProcessClient(config)
    client.wait_ready()
    client.submit([ask("a", max_tokens=100, sleep=0.02)])
    client.receive()  # it has begun, and goes on for forty times as long as the interrupt takes
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(100_000):
            client.receive()
    assert client.dead is None
    found = []
    while not any(o.finish_reason for o in found):
        found += client.receive().outputs
    client.close()
