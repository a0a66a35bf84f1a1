"""Metrics of two API processes on one engine: one page, exact sums, one log line; a killed process stays counted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fake_engine import write_model

ROOT = Path(__file__).parents[2]
SERVE = """
import sys
import quire.engine.process_client as client
client.MAIN, client.EARLY = "tests.fake_engine:main", ""
from quire.cli.main import main
sys.exit(main(["serve", *sys.argv[1:]]))
"""
PATIENCE_S = 240.0
ANSWERED = ("http_requests_total", ("/v1/completions", "POST", "2xx"))


class Server:
    def __init__(self, folder: Path) -> None:
        environment = dict(os.environ, QUIRE_LOG_STATS_INTERVAL="1", PYTHONPATH=str(ROOT))
        options = ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "0", "--block-size", "4"]
        options += ["--max-model-len", "64", "--api-server-count", "2"]
        command = [sys.executable, "-c", SERVE, write_model(folder), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder)
        self.lines: list[str] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.url = self.wait_line(r"Listening at (http://[\d.:]+)").group(1)
        except BaseException:
            self.process.kill()  # the others leave with it
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()

    def wait_line(self, pattern: str, count: int = 1) -> re.Match[str]:
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                found = [match for line in self.lines if (match := re.search(pattern, line))]
                if len(found) >= count:
                    return found[count - 1]
                left = deadline - time.monotonic()
                assert left > 0 and self._changed.wait(left), "".join(self.lines[-40:])

    def api_pids(self) -> list[int]:
        """API processes are children whose first function is that of server/host.py."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    command = (entry / "cmdline").read_text()
                except OSError:
                    continue
                if parent == self.process.pid and "server.host" in command:
                    found.append(int(entry.name))
        return found

    def complete(self, **body: Any) -> None:
        """On a new connection, so that either process may get it."""
        answer = httpx.post(f"{self.url}/v1/completions", json={"temperature": 0} | body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text

    def page(self) -> dict[tuple[str, tuple[str, ...]], float]:
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values = tuple(v for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine"))
                found[sample.name, values] = sample.value
        return found

    def page_after(self, generated: int, asked: int) -> dict[tuple[str, tuple[str, ...]], float]:
        """Steps are told to one process, which may hear of the last one after another process has answered; an answer
        is counted once its last byte is sent."""
        deadline = time.monotonic() + PATIENCE_S
        wanted = {("vllm:generation_tokens_total", ()): generated, ANSWERED: asked}
        while any((page := self.page())[key] != count for key, count in wanted.items()):
            assert all(page[key] <= count for key, count in wanted.items()) and time.monotonic() < deadline
            time.sleep(0.05)
        return page

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait()


def test_two_processes_count_as_one_server(server: Server) -> None:
    asked = 12
    for number in range(asked):
        server.complete(prompt="abcdefghij" + chr(65 + number), max_tokens=3)
    server.page_after(generated=3 * asked, asked=asked)
    seen = set()
    for _ in range(6):  # whichever process answers
        page = server.page()
        assert page["vllm:prompt_tokens_total", ()] == 11 * asked
        assert page["vllm:generation_tokens_total", ()] == 3 * asked
        assert page["vllm:request_success_total", ("length",)] == asked
        assert page["vllm:time_to_first_token_seconds_count", ()] == asked
        assert page["vllm:prefix_cache_queries_total", ()] == 11 * asked
        assert (
            page["vllm:prefix_cache_hits_total", ()] == page["vllm:prompt_tokens_cached_total", ()] == 8 * (asked - 1)
        )
        assert page["vllm:iteration_tokens_total_sum", ()] == 11 * asked - 8 * (asked - 1) + 3 * asked
        assert page["vllm:num_requests_running", ()] == page["vllm:kv_cache_usage_perc", ()] == 0
        assert page[ANSWERED] == asked
        assert ("process_resident_memory_bytes", ()) not in page
        seen.add(len(page))
    assert len(seen) == 1
    server.wait_line(r"generation throughput: 0.0 tokens/s, Running: 0")
    assert server.stop() == 0
    rates = [float(rate) for rate in re.findall(r"Avg generation throughput: ([\d.]+)", "".join(server.lines))]
    # Lines are a second apart or, on a busy machine, more: each token is in one of them, and in no two.
    assert 3 * asked / 20 < sum(rates) < 1.3 * 3 * asked


def test_a_killed_process_stays_counted_and_another_goes_on(server: Server) -> None:
    for number in range(8):
        server.complete(prompt=f"hello {number}", max_tokens=2)
    before = server.page_after(generated=8 * 2, asked=8)
    for pid in server.api_pids():  # one after the other, so that both the counting and the speaking one go
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while pid in server.api_pids() or len(server.api_pids()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        while True:
            try:
                page = server.page()
                break
            except httpx.TransportError:  # a connection that the dead process had taken
                assert time.monotonic() < deadline
        for key in (("vllm:prompt_tokens_total", ()), ("vllm:generation_tokens_total", ()),
                    ("vllm:request_success_total", ("length",)), ANSWERED):  # fmt: skip
            assert page[key] == before[key], key
    server.complete(prompt="again", max_tokens=4)
    page = server.page_after(generated=8 * 2 + 4, asked=9)
    assert page["vllm:request_success_total", ("length",)] == 9
    assert server.stop() == 0
