"""`quire pull`, `quire list`, `quire run`, and the ways people write a hub name, without a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint import source
from quire.cli import models
from quire.cli.main import COMMANDS, main
from quire.schema.errors import ModelNotFoundError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """A hub with one repository of two GGUF files; what was asked of it."""
    asked: list[dict[str, Any]] = []
    held = tmp_path / "snapshot"
    held.mkdir()
    for kind in ("Q4_K_M", "Q8_0"):
        (held / f"tiny-{kind}.gguf").write_bytes(b"GGUF" * 300)

    def download(**asking: Any) -> str:
        asked.append(asking)
        return str(held)

    class Api:
        def model_info(self, repository: str, **_: Any) -> Any:
            return type("Info", (), {"siblings": []})

    real = source.load
    fakes = {"huggingface_hub:snapshot_download": download, "huggingface_hub:HfApi": Api}
    monkeypatch.setattr(source, "load", lambda path: fakes.get(path) or real(path))
    monkeypatch.setattr(source.env.HF_HUB_OFFLINE, "_value", False)
    return asked


@pytest.mark.parametrize(
    "name",
    ["org/repo:Q4_K_M", "hf.co/org/repo:Q4_K_M", "huggingface.co/org/repo:q4_k_m", "https://huggingface.co/org/repo:Q4_K_M"],
)  # fmt: skip
def test_a_hub_name_as_other_programs_write_it(name: str, hub: list[dict[str, Any]]) -> None:
    found = source.locate(name)
    assert hub[0]["repo_id"] == "org/repo" and found.path.endswith("tiny-Q4_K_M.gguf") and found.kind == "gguf"
    assert found.name.lower() == "org/repo:q4_k_m"


@pytest.mark.parametrize("name", ["ftp://hf.co/org/repo", "hf.co.example/org/repo/x", "hf.co/../etc"])
def test_what_only_looks_like_one(name: str, hub: list[dict[str, Any]]) -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder or file"):
        source.locate(name)
    assert hub == []


def test_pull_fetches_and_says_where_it_is(hub: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "hf.co/org/repo:Q8_0", "--revision", "v1"]) == 0
    assert hub[0]["revision"] == "v1"
    told = capsys.readouterr().out
    assert told.startswith("org/repo:Q8_0  1.2 kB  ") and told.endswith("tiny-Q8_0.gguf\n")


def test_pull_of_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", str(tmp_path)]) == 1
    assert "is a local path" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--revision", "--download-dir"])
def test_options_that_mean_nothing_for_the_default_model(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models.embedded, "fetch", lambda: pytest.fail("it was fetched"))
    assert main(["pull", "default", option, "x"]) == 1
    assert f"{option} is for models of the hub" in capsys.readouterr().err


def test_list_shows_what_is_cached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("huggingface_hub")
    for name, file in (
        ("org--plain", "model.safetensors"),
        ("org--small", "tiny-Q4_K_M.gguf"),
        ("org--none", "README.md"),
    ):
        held = tmp_path / f"models--{name}" / "snapshots" / ("a" * 40)
        held.mkdir(parents=True)
        (held / file).write_bytes(b"x" * 2_500_000)
        (held.parents[1] / "refs").mkdir()
        (held.parents[1] / "refs" / "main").write_text("a" * 40)
    assert main(["list", "--download-dir", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "org/plain" in told and "safetensors" in told and "2.5 MB" in told and "gguf: Q4_K_M" in told
    assert "org/none" not in told


def test_list_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(models, "the_default", lambda: iter(()))
    assert main(["list", "--download-dir", str(tmp_path / "nowhere")]) == 0
    assert "quire pull" in capsys.readouterr().out


def test_run_is_chat() -> None:
    assert COMMANDS["run"].path == COMMANDS["chat"].path
