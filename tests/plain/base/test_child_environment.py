"""Children get the environment they need, and no keys: looked at in running processes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.base import env
from quire.base.procs import Child
from quire.config import EngineArgs
from quire.engine.process_client import for_children
from quire.grammar.backend import GrammarVocabulary
from quire.grammar.child import JobBoot
from quire.grammar.compiler import _CompilerProcess
from quire.text.chat import ChatJob
from quire.text.template_child import render_apart
from tests.fake_engine import write_model

SECRETS = {
    "QUIRE_API_KEY": "one", "VLLM_API_KEY": "one", "HF_TOKEN": "one", "OPENAI_API_KEY": "one",
    "AWS_ACCESS_KEY_ID": "one", "AWS_SESSION_TOKEN": "one", "AWS_PROFILE": "one", "AZURE_CLIENT_SECRET": "one",
    "MY_DB_PASSWORD": "one", "GITHUB_PAT": "one", "SSH_AUTH_SOCK": "one", "STRIPE_SECRETKEY": "one",
    "GOOGLE_APPLICATION_CREDENTIALS": "one",
    "HTTPS_PROXY": "http://me:one@proxy:3128", "DATABASE_URL": "postgres://me:one@db/x", "my_api_key": "one",
    "OTEL_EXPORTER_OTLP_HEADERS": "api-key=one", "SENTRY_AUTH_TOKEN": "one",
}  # fmt: skip
PLAIN = {
    "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "0", "OMP_WAIT_POLICY": "PASSIVE", "MY_PLUGIN": "x",
    "QUIRE_LOGGING_LEVEL": "INFO", "HTTP_PROXY": "http://proxy:3128", "PYTHONHASHSEED": "7", "MAX_TOKENS": "9",
    "KEYBOARD": "x", "AUTHOR": "x", "QUIRE_CACHE_ROOT": "/tmp",
}  # fmt: skip
ALLOWED = {"PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR", "OMP_NUM_THREADS", "TZ"}

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, **PLAIN}.items():
        monkeypatch.setenv(name, value)


def environment_of(pid: int) -> dict[str, str]:
    """Popen returns when the program's file is open; its environment is there a little later."""
    patience = time.monotonic() + PATIENCE_S
    while not (text := Path(f"/proc/{pid}/environ").read_bytes().decode()):
        assert time.monotonic() < patience, "a process without any environment"
        time.sleep(0.01)
    return dict(pair.split("=", 1) for pair in text.split("\0") if pair)


def test_an_engine_process_gets_all_but_secrets() -> None:
    child = Child("tests.fake_engine:main", None, name="a child")
    try:
        found = environment_of(child.pid)
    finally:
        child.close()
    assert not found.keys() & SECRETS.keys() and found.items() >= PLAIN.items() and "PATH" in found


def test_an_operator_may_pass_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_PASS_ENV", "HF_TOKEN, MY_DB_PASSWORD")
    env.forget_all()
    found = env.without_secrets()
    assert found.keys() & SECRETS.keys() == {"HF_TOKEN", "MY_DB_PASSWORD"}
    assert env.without_secrets(keep="OTEL_")["OTEL_EXPORTER_OTLP_HEADERS"] == "api-key=one"


def test_a_grammar_compiler_gets_what_an_interpreter_needs() -> None:
    vocabulary = GrammarVocabulary(tokens=[bytes([i]) for i in range(256)], size=256, ends=())
    child = _CompilerProcess(JobBoot(vocabulary=vocabulary, memory_bytes=1 << 30))
    process = child._open()
    try:
        found = environment_of(process.pid)
    finally:
        process.kill()
        process.communicate()
    _only_plain(found)


def test_a_template_of_a_request_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str] | None] = []
    begin = subprocess.Popen.__init__

    def spy(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(kwargs.get("env"))
        begin(self, *args, **kwargs)

    monkeypatch.setattr(subprocess.Popen, "__init__", spy)
    job = ChatJob("{{ messages[0].content }}", [{"role": "user", "content": "said"}], {})
    assert render_apart(job) == "said"
    assert seen and all(found is not None for found in seen)
    for found in seen:
        _only_plain(found or {})


def _only_plain(found: dict[str, str]) -> None:
    found.pop("LC_CTYPE", None)  # Python sets it where there is none
    others = {name for name in found if not name.startswith(("LC_", "PYTHON", "DYLD_", "CONDA_"))}
    assert others <= ALLOWED | {"LANGUAGE"} and not found.keys() & (SECRETS.keys() | PLAIN.keys())


def test_the_hubs_token_stays_in_the_configuration_of_this_process(tmp_path: Path) -> None:
    config = EngineArgs(model=write_model(tmp_path), hf_token="hf_secret").create_engine_config()
    assert config.model_config.hf_token == "hf_secret" and b"hf_secret" in msgspec.msgpack.encode(config)
    told = for_children(config)
    assert b"hf_secret" not in msgspec.msgpack.encode(told)
    same = dataclasses.replace(told.model_config, hf_token="hf_secret")
    assert dataclasses.replace(told, model_config=same) == config


def test_the_shells_folders_are_no_secrets() -> None:
    assert not env.is_secret("PWD", "/srv") and not env.is_secret("OLDPWD") and env.is_secret("DB_PWD")
    assert os.environ["QUIRE_API_KEY"] == "one"  # this process keeps its own
