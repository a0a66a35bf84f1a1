"""`quire bench serve`, `quire chat` and `quire complete` against Quire's own server, and a real start taken apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.bench import serve, startup
from quire.cli import client
from tests.server.live import Live, live_fake


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_fake(tmp_path_factory.mktemp("model"), api_key=["secret"]) as running:
        yield running


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")


@pytest.mark.parametrize("stream", [[], ["--no-stream"]])
@pytest.mark.parametrize(
    "backend", [[], ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]], ids=["completions", "chat"]
)
def test_the_figures_are_what_the_server_did(
    backend: list[str], stream: list[str], server: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    flags = [
        "--base-url", server.url, "--num-prompts", "12", "--random-input-len", "20", "--random-output-len", "9",
        "--ignore-eos", "--max-concurrency", "5", "--temperature", "0", "--disable-tqdm", "--percentile-metrics",
        "ttft,tpot,itl,e2el", "--save-result", "--save-detailed", "--result-filename", str(path), "--num-warmups", "2",
    ]  # fmt: skip
    assert serve.main([*flags, *backend, *stream], "quire bench serve") == 0
    found = json.loads(path.read_text())
    around = len("user:;assistant:") if backend else 0  # the chat template
    assert (found["completed"], found["failed"]) == (12, 0)
    assert found["total_input_tokens"] == 12 * (20 + around)
    assert found["total_output_tokens"] == 12 * 9
    assert found["model_id"] == "fake" and found["max_concurrent_requests"] <= 5
    if not stream:  # the pieces may be merged when this machine is slow, but none is lost
        assert all(1 <= len(gaps) + 1 <= 9 for gaps in found["itls"])
        assert found["mean_e2el_ms"] >= found["mean_ttft_ms"] > 0
    assert "Successful requests:                     12" in capsys.readouterr().out


def test_a_refusal_is_told(server: Live, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--base-url", server.url, "--num-prompts", "3", "--random-input-len", "600", "--disable-tqdm"]
    assert serve.main(flags, "quire bench serve") == 1
    assert "3 failed: HTTP 400: " in capsys.readouterr().err


def test_a_wrong_key_is_told(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with pytest.raises(Exception, match=r"GET /v1/models of .*: HTTP 401"):
        serve.main(["--base-url", server.url, "--num-prompts", "1"], "quire bench serve")


def test_chat_and_complete(server: Live, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--url", f"{server.url}/v1", "--api-key", "secret", "--max-tokens", "7", "--temperature", "0"]
    assert client.complete([*flags, "-q", "abc"], "quire complete") == 0
    assert capsys.readouterr().out == "abcabca\n"
    assert client.chat([*flags, "--system-prompt", "be", "-q", "hey", "--top-k", "3"], "quire chat") == 0
    printed = capsys.readouterr()
    assert printed.out == "system:\n"  # it repeats its prompt
    assert printed.err == f"fake at {server.url}/v1\n"


def test_a_start_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "startup.json"
    flags = ["--cold", "--num-iters-cold", "1", "--evict-weights", "--max-model-len", "256", "--output-json", str(path)]
    assert startup.main(flags, "quire bench startup") == 0
    found: dict[str, Any] = json.loads(path.read_text())
    phases = found["cold_phases"]
    assert set(phases) >= {
        "interpreter", "import quire", "config", "import torch", "device", "load", "profile", "kv", "warm_up",
        "tokenizer and front", "first token",
    }  # fmt: skip
    outer = sum(seconds for name, seconds in phases.items() if "/" not in name)
    assert outer == pytest.approx(found["avg_cold_first_token_time"], rel=0.02)
    assert all(seconds >= 0 for seconds in phases.values()) and phases["import torch"] > 0.1
    assert "to the first token" in capsys.readouterr().out
