"""`quire serve` with two ranks or two stages as its operator sees it: answers, and what the death of a rank does."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.server.hosted import Hosted, children_of, hosted, wait_until
from tests.tiny_models import make_tiny

LONG = {"prompt": [5, 6, 7], "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}


def workers_of(server: Hosted) -> list[int]:
    """Of the engine process, in the order in which they were started: by rank."""
    return [pid for pid, command in children_of(server.engine_pid) if "executor.remote" in command]


class Reader(threading.Thread):
    """One stream after another, until one fails."""

    def __init__(self, server: Hosted) -> None:
        super().__init__(daemon=True)
        self.begun, self.error, self.ended, self._url = threading.Event(), "", 0.0, server.url
        self.start()

    def run(self) -> None:
        while not self.error:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=LONG, timeout=60) as answer:
                for line in answer.iter_lines():
                    self.error = line if '"error"' in line or answer.status_code != 200 else ""
                    self.begun.set()
                    if self.error:
                        self.ended = time.monotonic()
                        return


@pytest.mark.parametrize(
    ("flag", "name", "number"),
    [
        ("--tensor-parallel-size", "worker 1", signal.SIGKILL),
        ("--tensor-parallel-size", "worker 1", signal.SIGSTOP),
        ("-pp", "worker 1, pipeline stage 1", signal.SIGKILL),
    ],
)
def test_two_ranks_serve_and_a_lost_one_ends_the_server(
    flag: str, name: str, number: signal.Signals, tmp_path: Path
) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    flags = (flag, "2", "--dtype", "float32", "--device", "cpu", "--num-gpu-blocks-override", "200")
    with hosted(None, str(tmp_path), *flags, "--max-model-len", "256", fake=False) as server:
        answer = server.complete("abc", 8, logprobs=2)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0
        assert 'num_gpu_blocks="200"' in server.get("/metrics").text  # of the engine, whatever the number of ranks
        engine, workers = server.engine_pid, workers_of(server)
        assert len(workers) == 2
        readers = [Reader(server) for _ in range(3)]
        for reader in readers:
            assert reader.begun.wait(60)
        os.kill(workers[1], number)
        lost = time.monotonic()
        how = "was killed by SIGKILL" if number == signal.SIGKILL else "has been stopped by a signal for 1.0 s"
        for reader in readers:
            reader.join(60)
            assert f"engine is dead: {name} (process {workers[1]}) {how}" in reader.error, reader.error
            assert number == signal.SIGSTOP or reader.ended - lost < 2.0
        assert server.wait(60) == 1
        assert "worker 1" in server.log
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in (engine, *workers)))
