"""Every documented environment variable is read or named at a start with a reason; every other one is reported."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from quire.base import env, log
from quire.base.unread import UNREAD, sort_names
from quire.config import EngineArgs
from quire.schema.errors import ConfigError
from tools.documented import VARIABLES

DOCUMENTED = VARIABLES
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No variable of ours or vLLM's but those a test sets, and nothing said before."""
    for name in env.names("QUIRE_", "VLLM_"):
        if name != "QUIRE_TARGET_DEVICE":
            monkeypatch.delenv(name)
    monkeypatch.setattr(log, "_logged", set())
    return monkeypatch


def warnings_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, **options: bool) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with caplog.at_level(logging.WARNING):
        EngineArgs(model=str(tmp_path), device="cpu", **options).create_engine_config()
    return [record.getMessage() for record in caplog.records if "nvironment variable" in record.getMessage()]


def test_every_documented_name_is_read_or_known() -> None:
    read = {spelling for variable in env.ALL.values() for spelling in variable.spellings}
    missing = [name for name in DOCUMENTED if f"VLLM_{name}" not in read and f"VLLM_{name}" not in UNREAD]
    assert len(DOCUMENTED) == 54 and missing == []
    assert not read & set(UNREAD)


def test_one_warning_names_all_that_have_no_effect(
    bare: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in DOCUMENTED:
        if f"VLLM_{name}" in UNREAD:
            bare.setenv(f"VLLM_{name}", "1")
    bare.setenv("VLLM_LOG_STATS_INTERVAL", "5")  # read
    (told,) = warnings_of(tmp_path, caplog)
    for name in DOCUMENTED:
        assert (f"VLLM_{name}" in told) == (f"VLLM_{name}" in UNREAD)
    assert "VLLM_XLA_USE_SPMD (TPUs are not supported in this version)" in told and "LOG_STATS" not in told
    caplog.clear()
    assert warnings_of(tmp_path, caplog) == []  # once in a process


def test_names_that_nobody_reads(bare: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bare.setenv("VLLM_LOGING_LEVEL", "DEBUG")
    bare.setenv("QUIRE_NONSENSE", "1")
    bare.setenv("QUIRE_BUILD_KERNELS", "1")  # of the build
    bare.setenv("VLLM_SERVICE_HOST", "10.0.0.1")  # Kubernetes names a service so
    bare.setenv("VLLM_PORT_8000_TCP_ADDR", "10.0.0.1")
    assert sort_names() == ({}, ["QUIRE_NONSENSE", "VLLM_LOGING_LEVEL"])
    (told,) = warnings_of(tmp_path, caplog)
    assert told.endswith("QUIRE_NONSENSE, VLLM_LOGING_LEVEL (did you mean VLLM_LOGGING_LEVEL?)")
    with pytest.raises(ConfigError, match="QUIRE_NONSENSE, VLLM_LOGING_LEVEL"):
        warnings_of(tmp_path, caplog, fail_on_environ_validation=True)


def test_nothing_is_said_about_nothing(
    bare: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(tmp_path, caplog, fail_on_environ_validation=True) == []
