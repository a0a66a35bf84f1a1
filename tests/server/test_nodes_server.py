"""One engine on two machines (`--nnodes 2`): addresses of the loopback interface, and two network namespaces with a
cable between them. It answers as one machine does; strangers are refused; the loss of a node is told soon."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.base.lifeline import free_port
from tests.server.hosted import Hosted, started, wait_until
from tests.tiny_models import make_tiny

KEY = {"QUIRE_NODE_KEY": "what both machines were told", "OMP_NUM_THREADS": "1"}
PROMPT = [5, 6, 7, 30, 4]
LONG = {"prompt": PROMPT, "max_tokens": 230, "temperature": 0, "ignore_eos": True, "stream": True}
OPTIONS = ("--dtype", "float32", "--device", "cpu", "--num-gpu-blocks-override", "200", "--max-model-len", "256")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    make_tiny("LlamaForCausalLM", made)
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=256, num_gpu_blocks_override=60) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return list(answer.outputs[0].token_ids)


class Reader(threading.Thread):
    """One stream after another, until one fails."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.begun, self.error, self.ended, self._url = threading.Event(), "", 0.0, url
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


def tokens_of(url: str) -> list[int]:
    body = {**LONG, "stream": False, "max_tokens": 12, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def child_with(parent: int, text: str) -> int:
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not folder.name.isdigit() or text not in (folder / "cmdline").read_text():
                continue
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                return int(folder.name)
    raise AssertionError(f"{parent} has no child {text}")


def url_of(server: Hosted, host: str) -> str:
    return server.wait_for_line(r"Listening at (\S+) ")[1].replace("//0.0.0.0:", f"//{host}:")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_two_nodes_answer_as_one_and_a_lost_worker_is_named(
    number: signal.Signals, folder: Path, expected: list[int]
) -> None:
    port = str(free_port("127.0.0.2"))
    flags = (str(folder), *OPTIONS, "-tp", "2", "-n", "2", "--master-addr", "127.0.0.2", "--master-port", port)
    second = (*flags, "--headless", "--node-rank", "1")
    with started(*flags, "--port", "0", fake=False, env=KEY) as server:
        server.wait_for_line("Waiting for 1 more node")
        with socket.create_connection(("127.0.0.2", int(port)), timeout=10) as stranger:
            stranger.sendall(bytes(200))
        server.wait_for_line("A connection was refused: .* does not know the key")
        other_key = {**KEY, "QUIRE_NODE_KEY": "what somebody has guessed"}
        with started(*second, fake=False, env=other_key) as intruder:
            assert intruder.wait(60) == 1
            assert "could not join 127.0.0.2" in intruder.log and "another key" in intruder.log
        with started(*second, fake=False, env={**KEY, "QUIRE_HOST_IP": "127.0.0.3"}) as node:
            url = url_of(server, "127.0.0.1")
            assert tokens_of(url) == expected
            with pytest.raises(OSError):  # all nodes are there: nobody else is listened to
                socket.create_connection(("127.0.0.2", int(port)), timeout=10)
            readers = [Reader(url) for _ in range(3)]
            assert all(reader.begun.wait(60) for reader in readers)
            worker = child_with(node.process.pid, "executor.remote")
            os.kill(worker, number)
            lost = time.monotonic()
            how = "was killed by SIGKILL" if number == signal.SIGKILL else "has been stopped by a signal for 1.0 s"
            for reader in readers:
                reader.join(60)
                assert f"worker 1 on node 1 (process {worker}) {how}" in reader.error, reader.error
                assert "node 1 (127.0.0." in reader.error
                assert number == signal.SIGSTOP or reader.ended - lost < 2.0
            assert server.wait(60) == 1 and node.wait(60) == 1
            assert "node 0 (127.0.0.2" in node.log


@pytest.fixture
def cable() -> Iterator[tuple[str, str]]:
    """Two namespaces: 10.213.7.1 and 10.213.7.2, and from here to the first 10.213.8.2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    one, two = (f"quire-{os.getpid()}-{side}" for side in "ab")
    door = f"qdoor{os.getpid()}"

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True, timeout=30)

    try:
        ip(f"netns add {one}")
    except subprocess.CalledProcessError as wrong:
        pytest.skip(f"no network namespace can be made: {wrong.stderr.decode().strip()}")
    try:
        ip(f"netns add {two}")
        ip(f"link add cable netns {one} type veth peer name cable netns {two}")
        ip(f"link add {door} type veth peer name door netns {one}")
        ip(f"addr add 10.213.8.1/24 dev {door}")
        ip(f"link set {door} up")
        for name, number in ((one, 1), (two, 2)):
            ip(f"-n {name} addr add 10.213.7.{number}/24 dev cable")
            ip(f"-n {name} link set cable up")
            ip(f"-n {name} link set lo up")
        ip(f"-n {one} addr add 10.213.8.2/24 dev door")
        ip(f"-n {one} link set door up")
        yield one, two
    finally:
        # the kernel may keep a namespace without a name for long, and the door with it
        for words in (["link", "del", door], ["netns", "del", one], ["netns", "del", two]):
            subprocess.run(["ip", *words], capture_output=True, timeout=30)


def test_two_machines_and_a_cable_that_breaks(cable: tuple[str, str], folder: Path, expected: list[int]) -> None:
    """Nobody says good-bye when a cable is cut: only silence tells."""
    flags = (str(folder), *OPTIONS, "-tp", "2", "-n", "2", "--master-addr", "10.213.7.1")
    within = [("ip", "netns", "exec", name) for name in cable]
    first = started(*flags, "--port", "0", fake=False, env=KEY, within=within[0])
    second = started(*flags, "--headless", "-r", "1", fake=False, env=KEY, within=within[1])
    with first as server, second as node:
        url = url_of(server, "10.213.8.2")
        assert tokens_of(url) == expected
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
            next(answer.iter_lines())  # a client that leaves in the middle
        assert tokens_of(url) == expected
        readers = [Reader(url) for _ in range(3)]
        assert all(reader.begun.wait(60) for reader in readers)
        subprocess.run(["ip", "-n", cable[1], "link", "set", "cable", "down"], check=True, timeout=30)
        cut = time.monotonic()
        for reader in readers:
            reader.join(60)
            assert "node 1 (10.213.7.2) with worker 1 on node 1 is lost: nothing was heard for 1.5 s" in reader.error
            assert reader.ended - cut < 3.0  # 1.8 s on two busy cores
        assert server.wait(60) == 1
        assert node.wait(60) == 1 and "node 0 (10.213.7.1:29501) is lost" in node.log
        wait_until(lambda: not any("executor.remote" in command for _, command in node.children()))
