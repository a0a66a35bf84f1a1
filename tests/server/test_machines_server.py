"""Engines of one server on several machines (`--data-parallel-size-local`, `--headless`): two programs on addresses of
the loopback interface over the fake worker, and two network namespaces with a tiny model. Requests reach every engine,
a machine is refused by reason, joins late, is killed, stopped or cut off, and ends with its server."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.base import env
from quire.base.lifeline import free_port
from tests.fake_engine import use_fake, write_model
from tests.server.hosted import Hosted, completion, started, wait_until
from tests.server.test_engines_server import Streaming, engine_pids, sample
from tests.server.test_nodes_server import KEY, OPTIONS, cable, expected, folder, tokens_of, url_of

__all__ = ["cable", "expected", "folder"]  # fixtures

HERE, THERE = "127.0.0.2", "127.0.0.3"
RANKS = range(4)


class Machines:
    """The command lines of one deployment of four engines, two of them on each machine."""

    def __init__(self, model: str, *more: str) -> None:
        self.port = free_port(HERE)
        where = ("--data-parallel-address", HERE, "--data-parallel-rpc-port", str(self.port))
        self.model, self._flags = model, ("--generation-config", "vllm", "-dp", "4", *where, *more)

    @contextlib.contextmanager
    def server(self, *more: str, local: int = 2, **variables: str) -> Iterator[Hosted]:
        with started(self.model, *self._flags, "-dpl", str(local), "--port", "0", *more, env=KEY | variables) as made:
            yield made

    @contextlib.contextmanager
    def node(self, *more: str, start: int = 2, number: int = 2, key: str = "", model: str = "") -> Iterator[Hosted]:
        variables = {**KEY, "QUIRE_HOST_IP": THERE} | ({"QUIRE_NODE_KEY": key} if key else {})
        flags = (model or self.model, *self._flags, "--headless", "-dpl", str(number), "-dpr", str(start), *more)
        with started(*flags, env=variables) as made:
            yield made


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(write_model(tmp_path / "model"))


def ready(server: Hosted) -> Hosted:
    server.url = url_of(server, "127.0.0.1")
    return server


def generated(server: Hosted) -> list[float]:
    return [sample(server, "vllm:generation_tokens_total", rank) for rank in RANKS]


@pytest.mark.parametrize("processes", [1, 2])
def test_requests_reach_every_engine_and_a_killed_one_is_named(processes: int, machines: Machines) -> None:
    count = ("--api-server-count", str(processes))
    with machines.node() as node, machines.server(*count) as server:  # the machine without a server is there first
        ready(server)
        assert len(engine_pids(server)) == len(engine_pids(node)) == 2
        for number in range(16):
            assert server.complete(f"ab{number}", 6).json()["choices"][0]["text"] == (f"ab{number}" * 6)[:6]
        for rank in RANKS:
            named = server.post("/v1/completions", completion(), headers={"X-data-parallel-rank": str(rank)})
            assert named.status_code == 200
        assert min(generated(server)) > 0 and sum(generated(server)) == 20 * 6
        if processes > 1:  # one that takes the place of another joins the engines of both machines
            os.kill(server.api_pids()[0], signal.SIGKILL)
            wait_until(lambda: len(server.api_pids()) == 2)
            for rank in (*RANKS, *RANKS):
                named = server.post("/v1/completions", completion(), headers={"X-data-parallel-rank": str(rank)})
                assert named.status_code == 200, named.text
        streams = [Streaming(server, rank) for rank in RANKS]
        assert all(stream.begun.wait(60) for stream in streams), [stream.error for stream in streams]
        victim = engine_pids(node)[0]
        os.kill(victim, signal.SIGKILL)
        streams[2].join(60)
        reason = f"engine 2 on {THERE} (process {victim}) was killed by SIGKILL"
        assert reason in streams[2].error, streams[2].error
        health = server.get("/health")
        assert health.status_code == 200 and list(health.json()["dead_engines"]) == ["2"]
        assert reason in health.json()["dead_engines"]["2"]
        refused = server.post("/v1/completions", completion(), headers={"X-data-parallel-rank": "2"})
        assert refused.status_code == 503 and reason in refused.text
        assert all(stream.is_alive() and not stream.error for stream in (streams[0], streams[1], streams[3]))
        os.kill(engine_pids(node)[0], signal.SIGKILL)  # its last one
        streams[3].join(60)
        assert f"engine 3 on {THERE}" in streams[3].error
        assert node.wait(60) == 1 and "engine 2 on" in node.lines[-1] and "engine 3 on" in node.lines[-1]
        for _ in range(4):
            assert server.complete("abc", 6).json()["choices"][0]["text"] == "abcabc"
        assert sorted(server.get("/health").json()["dead_engines"]) == ["2", "3"]


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGKILL, "is lost: the connection (was closed|broke)"), (signal.SIGTERM, "was stopped there")],
)
def test_a_machine_that_goes_takes_its_own_requests(number: int, said: str, machines: Machines) -> None:
    with machines.server() as server, machines.node() as node:
        ready(server)
        engines = engine_pids(node)
        streams = [Streaming(server, rank) for rank in RANKS]
        assert all(stream.begun.wait(60) for stream in streams), [stream.error for stream in streams]
        node.signal(number)
        for stream in streams[2:]:
            stream.join(60)
            assert re.search(rf"machine 127\.0\.0\.. with engines 2, 3 {said}", stream.error), stream.error
        assert node.wait(60) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines))
        assert sorted(server.get("/health").json()["dead_engines"]) == ["2", "3"]
        assert all(stream.is_alive() and not stream.error for stream in streams[:2])
        assert server.complete("abc", 6).json()["choices"][0]["text"] == "abcabc"
        server.signal(signal.SIGTERM)
        assert server.wait(60) == 0


def test_a_server_without_engines_and_the_order_of_its_end(machines: Machines, tmp_path: Path) -> None:
    """`--data-parallel-size-local 0`, and no weights there; two machines, the second of them late. All end with the
    server."""
    there = write_model(tmp_path / "there")
    Path(there, "model.safetensors").write_bytes(b"w" * 99)
    with machines.server(local=0) as server, machines.node(start=0, number=1, model=there) as first:
        server.wait_for_line("127.0.0.. with engine 0 has joined")
        server.wait_for_line("Engine 0 on .* is ready")
        assert not any("Listening" in line for line in server.lines)  # it waits for all
        with machines.node(start=1, number=3) as third:  # machines with engines are compared with each other
            assert third.wait(60) == 1 and "only there none, only here model.safetensors" in third.lines[-1]
        with machines.node(start=1, number=3, model=there) as second:
            ready(server)
            assert engine_pids(server) == [] and len(engine_pids(first)) == 1 and len(engine_pids(second)) == 3
            with pytest.raises(OSError):  # all are there: nobody else is listened to
                socket.create_connection((HERE, machines.port), timeout=10)
            for _ in range(8):
                assert server.complete("abc", 6).json()["choices"][0]["text"] == "abcabc"
            assert generated(server) == [12, 12, 12, 12]
            engines = [*engine_pids(first), *engine_pids(second)]
            server.signal(signal.SIGTERM)
            assert server.wait(60) == 0
            assert first.wait(60) == second.wait(60) == 0
            assert "The server was shut down" in first.log and "The server was shut down" in second.log
            wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines))


def test_an_engine_that_is_stuck_there_is_known_here(machines: Machines, tmp_path: Path) -> None:
    limit, gate = ("--engine-stall-timeout", "2"), tmp_path / "gate"
    with machines.server(*limit) as server, machines.node(*limit) as node, ThreadPoolExecutor(1) as pool:
        ready(server)
        body, named = completion("abc", 6, gate=str(gate)), {"X-data-parallel-rank": "3"}
        held = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, headers=named, timeout=300)
        try:
            wait_until(lambda: server.get("/health").status_code == 503)
            node.wait_for_line("Engine 3 is stuck: no step finished for")
            node.wait_for_line("Thread 0x")  # its stacks, where it is
        finally:
            gate.touch()
        wait_until(lambda: server.get("/health").status_code == 200)
        assert held.result().json()["choices"][0]["text"] == "abcabc"


def test_a_killed_server_ends_its_machines(machines: Machines) -> None:
    with machines.server("--api-server-count", "2") as server, machines.node() as node:
        ready(server)
        engines = engine_pids(node)
        server.signal(signal.SIGKILL)
        assert node.wait(60) == 1 and "the server at 127.0.0.2" in node.log and "is lost" in node.log
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines))


def test_nodes_by_their_number(tmp_path: Path) -> None:
    """`--nnodes` and `--node-rank` alone say which engines a machine has."""
    where = ("--master-addr", HERE, "--data-parallel-rpc-port", str(free_port(HERE)), "--generation-config", "vllm")
    flags = (write_model(tmp_path / "model"), "-dp", "4", "--nnodes", "2", *where)
    second = (*flags, "--node-rank", "1", "--headless")
    there = KEY | {"QUIRE_HOST_IP": THERE}
    with started(*flags, "--port", "0", env=KEY) as server, started(*second, env=there) as node:
        ready(server)
        assert len(engine_pids(server)) == len(engine_pids(node)) == 2
        for rank in RANKS:
            named = server.post("/v1/completions", completion(), headers={"X-data-parallel-rank": str(rank)})
            assert named.json()["choices"][0]["text"] == "abcabc"
        assert generated(server) == [6, 6, 6, 6]
        server.signal(signal.SIGTERM)
        assert server.wait(60) == 0 and node.wait(60) == 0


def test_a_server_that_fails_later_is_not_taken_to_be_shut_down(machines: Machines) -> None:
    """Its engines are ready, and an adapter has the model's own name: it ends with status 1, without an exception."""
    wrong = ("--served-model-name", "one", "--lora-modules", "one=/nowhere")
    with machines.server("--enable-lora", *wrong) as server, machines.node("--enable-lora") as node:
        server.wait_for_line("Engine 3 on .* is ready")
        assert server.wait(60) == 1
        assert node.wait(60) == 1 and "The server was shut down" not in node.log
        assert re.search(r"the server at 127\.0\.0\.2:\d+ ended: it (ended|could not)", node.lines[-1]), node.log


def test_who_is_refused_and_why(machines: Machines, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    config = Path(other, "config.json")
    config.write_text(config.read_text().replace('"intermediate_size": 96', '"intermediate_size": 128'))
    with machines.server() as server:
        server.wait_for_line("Waiting for engines 2, 3 at 127.0.0.2")
        with socket.create_connection((HERE, machines.port), timeout=10) as stranger:
            stranger.sendall(bytes(200))
        server.wait_for_line("A connection was refused: .* does not know the key")
        with machines.node(key="what somebody has guessed") as node:
            assert node.wait(60) == 1 and "engines 2, 3 could not join" in node.log and "another key" in node.log
        with machines.node(model=other) as node:
            assert node.wait(60) == 1
            assert "model_config.hf_config.intermediate_size is 128 there and 96 here" in node.lines[-1]
        refused = {
            "scheduler_config.max_num_seqs is 7 there and 128 here": ("--max-num-seqs", "7"),
            "data_parallel_size is 5 there and 4 here": ("-dp", "5"),
            "it has 2 engines from 1 on, and the server waits for engines 2, 3": ("-dpr", "1"),
        }
        for said, flags in refused.items():
            with machines.node(*flags) as node:
                assert node.wait(60) == 1, node.log
                assert said in node.lines[-1] and "were refused by the server at 127.0.0.2" in node.lines[-1]
                server.wait_for_line(f"was refused: .*{said}")
        with machines.node() as node:  # whoever is right may still come
            ready(server)
            assert server.complete("abc", 6).status_code == 200
            with machines.node() as late:
                assert late.process.poll() is None  # the port is closed: it waits for the next server
            assert node.process.poll() is None


def test_an_engine_that_cannot_start_there_ends_the_start(machines: Machines) -> None:
    with machines.server() as server, machines.node("--additional-config", '{"bad_checkpoint": true}') as node:
        assert server.wait(60) == 1 and "engines 2, 3: " in server.log and "lm_head" in server.log
        assert node.wait(60) == 1 and "lm_head" in node.log


def test_a_machine_hears_why_the_start_failed_elsewhere(machines: Machines) -> None:
    bad = ("--additional-config", '{"bad_checkpoint": true}')
    with machines.server(local=1) as server, machines.node(start=1, number=1) as good:
        server.wait_for_line("Engine 1 on .* is ready")
        with machines.node(*bad) as node:
            assert server.wait(60) == 1 and node.wait(60) == 1
        assert good.wait(60) == 1 and "The server was shut down" not in good.log
        assert re.search(r"the server at 127\.0\.0\.2:\d+ ended: engines 2, 3: .*lm_head", good.lines[-1]), good.log


def test_a_machine_that_never_comes(machines: Machines) -> None:
    with machines.server(QUIRE_ENGINE_START_TIMEOUT_S="3") as server:
        assert server.wait(60) == 1
        assert "engines 2, 3: no machine that has it joined within 3 s (QUIRE_ENGINE_START_TIMEOUT_S)" in server.log


def test_a_program_instead_of_a_server(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LLM` has other defaults than a server, which the other machine has to be told."""
    use_fake(monkeypatch)
    monkeypatch.setenv("QUIRE_NODE_KEY", KEY["QUIRE_NODE_KEY"])
    env.forget_all()
    same = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "inter_token_latency_goal_ms": 0.0,
            "max_num_queued_reqs": 0, "max_num_queued_tokens": 0}  # fmt: skip
    flags = [word for name, value in same.items() for word in (f"--{name.replace('_', '-')}", f"{value:g}")]
    with machines.node(*flags) as node:
        llm = LLM(
            machines.model, data_parallel_size=4, data_parallel_size_local=2, data_parallel_address=HERE,
            data_parallel_rpc_port=machines.port, **same,
        )  # fmt: skip
        with llm:
            texts = [f"ab{number}" for number in range(8)]
            outputs = llm.generate(texts, SamplingParams(max_tokens=6), use_tqdm=False)
            assert [one.outputs[0].text for one in outputs] == [(text * 6)[:6] for text in texts]
            assert len(engine_pids(node)) == 2
        assert node.wait(60) == 0 and "The server was shut down" in node.log


def test_no_key_no_machines(machines: Machines) -> None:
    with machines.server(QUIRE_NODE_KEY="") as server:
        assert server.wait(60) == 1 and "QUIRE_NODE_KEY is not set" in server.log


def test_two_machines_and_a_cable_that_breaks(cable: tuple[str, str], folder: Path, expected: list[int]) -> None:
    """A real model: equal answers from both, and only silence tells that one is gone."""
    where = ("--data-parallel-address", "10.213.7.1", "--data-parallel-rpc-port", "13345")
    flags = (str(folder), *OPTIONS, "-dp", "2", "-dpl", "1", *where)
    within = [("ip", "netns", "exec", name) for name in cable]
    limit = {**KEY, "QUIRE_NODE_TIMEOUT_S": "1.5"}
    first = started(*flags, "--port", "0", fake=False, env=limit, within=within[0])
    second = started(*flags, "--headless", "-dpr", "1", fake=False, env=limit, within=within[1])
    with first as server, second as node:
        server.url = url_of(server, "10.213.8.2")
        assert [tokens_of(server.url) for _ in range(4)] == [expected] * 4
        wait_until(lambda: [sample(server, "vllm:generation_tokens_total", rank) for rank in (0, 1)] == [24, 24])
        subprocess.run(["ip", "-n", cable[1], "link", "set", "cable", "down"], check=True, timeout=30)
        said = "machine 10.213.7.2 with engine 1 is lost: nothing was heard for 1.5 s"
        server.wait_for_line(said)
        assert said in server.get("/health").json()["dead_engines"]["1"]
        assert tokens_of(server.url) == expected
        assert node.wait(60) == 1 and "the server at 10.213.7.1:13345 is lost" in node.log
