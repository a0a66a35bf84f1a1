"""Several engines behind one port, as an operator and the openai client see them: load, ranks, metrics, deaths."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.hosted import Hosted, completion, hosted, wait_until


def engine_pids(server: Hosted) -> list[int]:
    """In the order in which they were started: by rank."""
    return [pid for pid, command in server.children() if "fake_engine" in command]


def sample(server: Hosted, name: str, engine: int, label: str = "") -> float:
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")]
    (line,) = [line for line in lines if f'engine="{engine}"' in line and label in line]
    return float(line.rpartition(" ")[2])


class Streaming(threading.Thread):
    """Streams on one engine, one after another, read by the openai client until one fails."""

    def __init__(self, server: Hosted, rank: int) -> None:
        super().__init__(daemon=True)
        self.begun, self.error = threading.Event(), ""
        self._client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=60)
        self._model = server.get("/v1/models").json()["data"][0]["id"]
        self._rank = rank
        self.start()

    def run(self) -> None:
        try:
            while True:
                chunks: Any = self._client.completions.create(
                    model=self._model, prompt="abc", max_tokens=480, stream=True,
                    extra_body={"vllm_xargs": {"sleep": 0.02}}, extra_headers={"X-data-parallel-rank": str(self._rank)},
                )  # fmt: skip
                for _ in chunks:
                    self.begun.set()
        except (openai.APIError, httpx.TransportError) as failed:  # the latter: its API process is gone
            self.error = str(failed)


@pytest.mark.parametrize("processes", [1, 2])
def test_one_engine_dies_and_the_other_goes_on(processes: int, tmp_path: Path) -> None:
    flags = ("--data-parallel-size", "2", "--api-server-count", str(processes))
    with hosted(tmp_path, *flags) as server:
        listeners = 1 if processes == 1 else processes + 1  # to the engines: API processes, and who started them
        pids = engine_pids(server)
        assert len(pids) == 2 and server.get("/health").status_code == 200
        streams = [Streaming(server, rank) for rank in (0, 1, 1)]
        for stream in streams:
            assert stream.begun.wait(60), stream.error
        # One API process is told of steps, and another may stream what came of them before.
        wait_until(lambda: [sample(server, "vllm:num_requests_running", rank) for rank in (0, 1)] == [1, 2])
        os.kill(pids[1], signal.SIGKILL)
        for stream in streams[1:]:
            stream.join(30)
            assert "engine is dead: engine 1" in stream.error, stream.error
        wait_until(lambda: server.log.count("1 of 2 engines go on") == listeners)
        health = server.get("/health")
        assert health.status_code == 200 and "1" in health.json()["dead_engines"]
        wait_until(lambda: sample(server, "vllm:num_requests_running", 1) == 0)
        assert sample(server, "vllm:request_success_total", 1, 'finished_reason="error"') == 2
        refused = server.post("/v1/completions", completion(), headers={"X-data-parallel-rank": "1"})
        assert refused.status_code == 503 and "engine 1" in refused.text
        for _ in range(4):
            assert server.complete("abc", 6).json()["choices"][0]["text"] == "abcabc"
        assert streams[0].is_alive() and not streams[0].error
        if processes > 1:  # an API process that starts now finds one engine dead
            victim = server.api_pids()[0]
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: len(server.api_pids()) == 2 and victim not in server.api_pids())
            assert all(server.complete("abc", 6).status_code == 200 for _ in range(6))
        assert server.process.poll() is None
        os.kill(pids[0], signal.SIGKILL)
        assert server.wait(60) == 1 and "engine 0" in server.log


def test_ranks_of_requests_and_verbs_for_all(tmp_path: Path) -> None:
    with hosted(tmp_path, "-dp", "2", env={"QUIRE_SERVER_DEV_MODE": "1"}) as server:
        for header in ("2", "x", "-1"):
            refused = server.post("/v1/completions", completion(), headers={"X-data-parallel-rank": header})
            assert refused.status_code == 400 and "rank" in refused.json()["error"]["message"]
            assert header != "2" or "there are engines 0 to 1 here" in refused.text
        for _ in range(3):
            server.post("/v1/completions", completion(), headers={"X-data-parallel-rank": "1"}).raise_for_status()
        assert [sample(server, "vllm:generation_tokens_total", rank) for rank in (0, 1)] == [0, 18]
        assert sample(server, "vllm:cache_config_info", 0) == sample(server, "vllm:cache_config_info", 1) == 1
        rpc = server.post("/collective_rpc", {"method": "nap", "args": [0.0]}).json()
        assert rpc == {"results": ["awake", "awake"]}
        assert server.post("/pause").status_code == 200 and server.get("/is_paused").json() == {"is_paused": True}
        assert server.post("/resume").status_code == 200 and server.get("/is_paused").json() == {"is_paused": False}
        assert server.post("/reset_prefix_cache").json() == {"done": True}
        text = server.get("/metrics").text
        assert text.count("# TYPE vllm:num_requests_running gauge") == 1
        assert len(re.findall(r"^vllm:admission_rejections_total{", text, re.MULTILINE)) == 2  # by reason, of both


def test_a_server_per_engine(tmp_path: Path) -> None:
    """External balancing: the metrics of each server bear its rank."""
    with hosted(tmp_path, "--data-parallel-size", "2", "--data-parallel-rank", "1") as server:
        assert server.complete("abc", 6).json()["choices"][0]["text"] == "abcabc"
        assert sample(server, "vllm:generation_tokens_total", 1) == 6
        assert len(engine_pids(server)) == 1


def test_a_server_for_some_of_the_engines(tmp_path: Path) -> None:
    """Hybrid balancing: the second of two servers has engines 2 and 3, spreads its own requests and refuses others'."""
    flags = ("-dp", "4", "--data-parallel-size-local", "2", "--data-parallel-start-rank", "2")
    with hosted(tmp_path, *flags, "--data-parallel-hybrid-lb") as server:
        assert len(engine_pids(server)) == 2
        for _ in range(6):
            assert server.complete("abc", 6).json()["choices"][0]["text"] == "abcabc"
        wait_until(lambda: [sample(server, "vllm:generation_tokens_total", rank) for rank in (2, 3)] == [18, 18])
        assert 'engine="0"' not in server.get("/metrics").text
        named = server.post("/v1/completions", completion(), headers={"X-data-parallel-rank": "3"})
        refused = server.post("/v1/completions", completion(), headers={"X-data-parallel-rank": "1"})
        assert named.status_code == 200 and refused.status_code == 400, (named.text, refused.text)


def test_a_burst_of_streams_is_spread_evenly(tmp_path: Path) -> None:
    """500 over four engines and two API processes, which share their counts. The engines are paused until all are
    there, so that none ends sooner on an engine that happens to be faster."""
    flags = ("-dp", "4", "--api-server-count", "2", "--max-num-seqs", "200")

    async def read(client: httpx.AsyncClient) -> int:
        async with client.stream("POST", "/v1/completions", json=completion("abc", 4, stream=True)) as answer:
            return sum(line.startswith("data: {") for line in [line async for line in answer.aiter_lines()])

    async def burst(server: Hosted) -> list[float]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            streams = [asyncio.create_task(read(client)) for _ in range(500)]
            waiting = [0.0]
            while sum(waiting) < 500:
                await asyncio.sleep(0.2)
                waiting = await asyncio.to_thread(all_waiting, server)
            assert (await client.post("/resume")).status_code == 200
            assert min(await asyncio.gather(*streams)) > 0
        return waiting

    def all_waiting(server: Hosted) -> list[float]:
        return [sample(server, "vllm:num_requests_waiting", rank) for rank in range(4)]

    with hosted(tmp_path, *flags, env={"QUIRE_SERVER_DEV_MODE": "1"}) as server:
        assert server.post("/pause").status_code == 200
        counts = asyncio.run(burst(server))
        assert sum(counts) == 500 and min(counts) > 112.5 and max(counts) < 137.5, counts
        wait_until(lambda: all_waiting(server) == [0, 0, 0, 0])
