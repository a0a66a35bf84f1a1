"""A server's life as its operator sees it: what a start says, how it ends, and what the death of a part does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.fake_engine import write_model
from tests.server.hosted import Hosted, completion, free_address, hosted, started, wait_until

LONG = 400
SLOW = {"sleep": 0.02}


class Stream(threading.Thread):
    """One streamed completion, read to its end in a thread of its own."""

    def __init__(self, server: Hosted, prompt: str = "abc", max_tokens: int = LONG, **xargs: object) -> None:
        super().__init__(daemon=True)
        self.begun, self.ended_at, self.broken = threading.Event(), 0.0, ""
        self.events: list[str] = []
        self._url, self._body = server.url, completion(prompt, max_tokens, stream=True, **xargs)
        self.start()

    def run(self) -> None:
        try:
            url = f"{self._url}/v1/completions"
            with httpx.stream("POST", url, json=self._body, timeout=60, verify=False) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                        self.begun.set()
        except httpx.HTTPError as wrong:
            self.broken = repr(wrong)
        self.ended_at = time.monotonic()
        self.begun.set()

    def finish(self, seconds: float = 60.0) -> None:
        self.join(seconds)
        assert not self.is_alive()

    @property
    def error(self) -> dict[str, object] | None:
        found = [json.loads(event) for event in self.events if event != "[DONE]"]
        return next((one["error"] for one in found if "error" in one), None)

    @property
    def text(self) -> str:
        found = (json.loads(event) for event in self.events if event != "[DONE]")
        return "".join(choice["text"] for one in found for choice in one.get("choices", ()))


def begin(server: Hosted, count: int, **xargs: float) -> list[Stream]:
    streams = [Stream(server, **(xargs or SLOW)) for _ in range(count)]
    for stream in streams:
        assert stream.begun.wait(60) and not stream.broken, stream.broken
    return streams


def test_a_start_says_what_it_serves_and_sigterm_ends_it_with_0(tmp_path):
    with hosted(tmp_path, "--served-model-name", "toy") as server:
        assert server.wait_for_line(r"Quire .*: toy \(.*\), float32 on cpu, context 512")
        assert server.wait_for_line(r"KV cache: \d+ tokens in \d+ blocks of 16, enough for [\d.]+ requests of 512")
        assert server.wait_for_line(r"Ready after [\d.]+ s: imports .*options .*model config .*engine .*http")
        assert server.get("/health").status_code == 200
        assert server.get("/ping").status_code == server.post("/ping").status_code == 200
        assert server.get("/version").json()["version"]
        assert server.get("/load").json() == {"server_load": 0}
        assert server.complete("abc", 5).json()["choices"][0]["text"] == "abcab"
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "Traceback" not in server.log


def test_ctrl_c_is_a_stop_too(tmp_path):
    with hosted(tmp_path) as server:
        server.signal(signal.SIGINT)
        assert server.wait() == 0


def test_told_to_stop_streams_end_at_once_with_an_error(tmp_path):
    with hosted(tmp_path) as server:
        streams = begin(server, 3)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        for stream in streams:
            stream.finish()
            assert stream.error and "shutting down" in stream.error["message"] and stream.events[-1] == "[DONE]"


def test_with_a_shutdown_timeout_requests_finish_and_nobody_else_gets_in(tmp_path):
    with hosted(tmp_path, "--shutdown-timeout", "60") as server:
        stream = Stream(server, "abc", 60, **SLOW)
        assert stream.begun.wait(60)
        server.signal(signal.SIGTERM)
        server.wait_for_line("Stopping: 1 request in flight, with 60 s to finish")
        wait_until(lambda: not _connects(server))
        stream.finish()
        assert stream.error is None and stream.text == "abc" * 20 and stream.events[-1] == "[DONE]"
        assert server.wait() == 0


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_signal_to_the_whole_group_is_as_orderly(tmp_path, count):
    """As a service manager sends it: every process gets it, and the engine must outlive the requests."""
    with hosted(tmp_path, "--shutdown-timeout", "60", "--api-server-count", count) as server:
        streams = [Stream(server, "abc", 60, **SLOW) for _ in range(4)]
        for stream in streams:
            assert stream.begun.wait(60)
        os.killpg(server.process.pid, signal.SIGTERM)
        for stream in streams:
            stream.finish()
            assert stream.error is None and stream.text == "abc" * 20
        assert server.wait() == 0


def _connects(server: Hosted) -> bool:
    try:
        server.get("/health")
    except httpx.ConnectError:
        return False
    except httpx.HTTPError:
        return True
    return True


def test_a_second_signal_does_not_wait(tmp_path):
    with hosted(tmp_path, "--shutdown-timeout", "600") as server:
        begin(server, 1)
        engine = server.engine_pid
        server.signal(signal.SIGTERM)
        server.wait_for_line("to finish")
        server.signal(signal.SIGTERM)
        assert server.wait(60) == 143
        wait_until(lambda: not os.path.exists(f"/proc/{engine}"))


@pytest.mark.parametrize(
    ("count", "number", "words"),
    [
        ("1", signal.SIGKILL, "was killed by SIGKILL"),
        ("2", signal.SIGKILL, "was killed by SIGKILL"),
        ("2", signal.SIGSTOP, "has been stopped by a signal for 1.0 s, and was killed"),
    ],
)
def test_the_engine_is_killed_or_stopped_under_load(tmp_path, count, number, words):
    """Every open request gets an error long before its end, and the server leaves with a status that is not 0."""
    with hosted(tmp_path, "--api-server-count", count) as server:
        streams = begin(server, 24, sleep=0.1)
        answers: list[httpx.Response] = []
        ask = lambda: answers.append(server.complete("abc", LONG, sleep=0.1))  # noqa: E731
        asking = [threading.Thread(target=ask) for _ in range(4)]
        for one in asking:
            one.start()
        wait_until(lambda: num_in_engine(server) == len(streams) + len(asking))  # one that comes later finds nobody
        killed = time.monotonic()
        os.kill(server.engine_pid, number)
        for stream in streams:
            stream.finish()
            assert stream.ended_at - killed < 30  # all tokens of 28 requests would take minutes
            assert stream.error and "engine is dead" in stream.error["message"], stream.events[-3:]
            if number == signal.SIGSTOP or count == "1":  # in the words of whoever watches the engine
                assert words in stream.error["message"]
        for one in asking:
            one.join(60)
        assert [answer.status_code for answer in answers] == [503] * 4
        assert server.wait(60) == 1
        assert words in server.lines[-1], server.log  # the cause, below what is logged while it stops


def num_in_engine(server: Hosted) -> int:
    """Requests that run or wait there, of all processes."""
    lines = server.get("/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))]
    return int(sum(float(line.rpartition(" ")[2]) for line in counts))


def test_a_step_that_raises_is_named_as_the_reason(tmp_path):
    with hosted(tmp_path) as server:
        innocent = begin(server, 2)
        guilty = server.complete("abc", LONG, raise_at=2)
        assert guilty.status_code == 503 and "ArithmeticError: the step went wrong" in guilty.text
        for stream in innocent:
            stream.finish()
            assert "ArithmeticError" in stream.error["message"]
        assert server.wait() == 1
        assert "the step went wrong" in server.lines[-1] or "the step went wrong" in server.log


def test_kill_9_of_a_client_frees_its_blocks(tmp_path):
    with hosted(tmp_path) as server:
        body = completion("abc", LONG, stream=True, sleep=0.2)
        code = (
            "import httpx\n"
            f"with httpx.stream('POST', '{server.url}/v1/completions', timeout=60, json={body!r}) as answer:\n"
            "    for line in answer.iter_lines():\n        print(line, flush=True)\n"
        )
        client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        try:
            assert client.stdout.readline().startswith("data:")
            assert _gauge(server, "vllm:num_requests_running") == 1 and _gauge(server, "vllm:kv_cache_usage_perc") > 0
        finally:
            client.kill()
            client.wait()
        killed = time.monotonic()
        wait_until(lambda: _gauge(server, "vllm:num_requests_running") == 0)
        assert time.monotonic() - killed < 40  # a step takes 0.2 s here; all 400 of them would take 80
        assert _gauge(server, "vllm:kv_cache_usage_perc") == 0


def _gauge(server: Hosted, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def test_an_engine_that_is_stuck_is_not_healthy_and_its_stacks_are_in_the_log(tmp_path):
    with hosted(tmp_path, "--engine-stall-timeout", "0.5") as server:
        assert server.get("/health").status_code == 200
        gate = tmp_path / "gate"
        stream = Stream(server, max_tokens=6, gate=str(gate))
        server.wait_for_line("The engine is stuck")
        sick = server.get("/health")
        assert sick.status_code == 503 and "no step finished for" in sick.json()["error"]["message"]
        server.wait_for_line(r'File ".*fake_engine.py", line \d+ in _trouble')
        gate.touch()
        server.wait_for_line("The engine goes on")
        assert server.get("/health").status_code == 200
        stream.finish()


def test_an_engine_that_is_frozen_while_idle_is_not_healthy_either(tmp_path):
    """Where nobody ends an engine that stands still."""
    with hosted(tmp_path, "--engine-stall-timeout", "0.5", env={"QUIRE_WORKER_TIMEOUT_S": "0"}) as server:
        pid = server.engine_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(1.0)  # longer than the limit: without requests that is no fault
            assert server.get("/health").status_code == 200
            stream = Stream(server, max_tokens=3)
            wait_until(lambda: server.get("/health").status_code == 503)
        finally:
            os.kill(pid, signal.SIGCONT)
        stream.finish()
        assert stream.error is None and server.get("/health").status_code == 200


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_server_that_is_stopped_as_a_whole_goes_on(tmp_path, count):
    """As Ctrl-Z and fg do it, for longer than any process may stand still."""
    with hosted(tmp_path, "--api-server-count", count) as server:
        streams = [Stream(server, "abc", 60, sleep=0.05) for _ in range(2)]
        assert all(stream.begun.wait(60) for stream in streams)
        time.sleep(0.5)  # the processes have been looked at
        os.killpg(server.process.pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.killpg(server.process.pid, signal.SIGCONT)
        for stream in streams:
            stream.finish()
            assert stream.error is None and stream.text == "abc" * 20, stream.error
        server.signal(signal.SIGTERM)
        assert server.wait() == 0 and "stopped by a signal" not in server.log


@pytest.mark.parametrize(
    ("about", "words"),
    [({"bad_checkpoint": True}, "tensor 'lm_head' has shape"), ({"exit_in_load": True}, "left with exit code 11")],
)
@pytest.mark.parametrize("count", ["1", "2"])
def test_a_failed_start_ends_with_its_real_cause(tmp_path, about, words, count):
    model = write_model(tmp_path)
    flags = ("--additional-config", json.dumps(about), "--api-server-count", count)
    with started(model, "--port", "0", *flags) as server:
        assert server.wait() == 1
        assert words in server.lines[-1], server.log


def test_a_taken_port_is_named_before_the_model_is_loaded(tmp_path):
    taken, port = free_address()
    with taken, started(write_model(tmp_path), "--host", "127.0.0.1", "--port", str(port)) as server:
        assert server.wait() == 1
        assert f"127.0.0.1:{port} is in use" in server.lines[-1] and "KV cache" not in server.log


def test_a_kill_9_of_the_server_takes_everything_with_it(tmp_path):
    with hosted(tmp_path, "--api-server-count", "2") as server:
        pids = [pid for pid, _ in server.children()]
        assert len(pids) == 3
        server.process.kill()
        wait_until(lambda: not any(_lives(pid) for pid in pids))


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
