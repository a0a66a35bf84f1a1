"""The resolver of the model hub: the real huggingface_hub, in a process of its own, against a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.base import env
from quire.schema.errors import ConfigError
from quire.server.hub_resolver import MOST_BYTES, HubResolver, files_of_adapter, split_name
from quire.server.resolvers import FilesystemResolver, ResolverTable
from tests.fake_hub import FakeHubServer, serving

FILES = {
    "adapter_config.json": b'{"r": 8}', "adapter_model.safetensors": b"weights", "README.md": b"not fetched",
    "more/french/adapter_config.json": b'{"r": 4}', "more/french/adapter_model.bin": b"french", "empty/x.txt": b"",
}  # fmt: skip
LISTED, OTHER = "org/adapters", "org/secret"
PROGRAM = """
import asyncio, json, os, sys
from quire.server.resolvers import LoRAResolverRegistry

async def ask(names):
    (resolver,) = LoRAResolverRegistry.resolvers()
    out = {}
    for name in names:
        lora = await resolver.resolve_lora("base", name)
        out[name] = None if lora is None else [lora.lora_name, lora.lora_int_id, {
            file: open(os.path.join(lora.lora_path, file)).read() for file in sorted(os.listdir(lora.lora_path))
            if os.path.isfile(os.path.join(lora.lora_path, file))}]
    return out

print(json.dumps(asyncio.run(ask(json.loads(sys.argv[1])))))
"""


@pytest.fixture
def hub() -> Iterator[FakeHubServer]:
    with serving({LISTED: FILES, OTHER: FILES}) as server:
        yield server


def resolve(names: list[str], endpoint: str, folder: Path, **more: str) -> tuple[dict[str, Any], str]:
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint, "HF_HOME": str(folder),
        "VLLM_LORA_RESOLVER_HF_REPO_LIST": f"{LISTED}, org/gone", "VLLM_PLUGINS": "lora_hf_hub_resolver", **more,
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(names)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    results: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return results, ran.stderr + ran.stdout


def test_adapters_of_a_hub(hub: FakeHubServer, tmp_path: Path) -> None:
    french = f"{LISTED}/more/french"
    absent = [f"{LISTED}/empty", f"{LISTED}/nothing", f"{LISTED}/more/../more/french", f"{LISTED}/*", OTHER, "org/gone",
              f"{LISTED}/more/french/", "../adapters", "adapters", ""]  # fmt: skip
    results, said = resolve([LISTED, french, *absent], hub.url, tmp_path)
    name, number, files = results[LISTED]
    assert name == LISTED and number > 0
    assert files == {"adapter_config.json": '{"r": 8}', "adapter_model.safetensors": "weights"}
    assert results[french][2] == {"adapter_config.json": '{"r": 4}', "adapter_model.bin": "french"}
    assert results[french][1] != number
    assert [results[name] for name in absent] == [None] * len(absent)
    assert not any(OTHER in path or "README" in path for path in hub.paths), "neither unlisted nor unneeded"
    assert "org/gone: the model hub has no answer" in said
    offline, _ = resolve([LISTED, french, f"{LISTED}/empty"], hub.url, tmp_path, HF_HUB_OFFLINE="1")
    assert offline[LISTED] is not None and offline[french] is not None and offline[f"{LISTED}/empty"] is None


def test_a_hub_that_does_not_answer(tmp_path: Path) -> None:
    results, said = resolve([LISTED], "http://127.0.0.1:9", tmp_path)
    assert results == {LISTED: None} and f"{LISTED}: the model hub has no answer" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("a/b", ("a/b", "")), ("a/b/c", ("a/b", "c")), ("a/b/c/d.e", ("a/b", "c/d.e")),
        *((name, None) for name in (
            "", "a", "a/", "/b", "a/b/", "a/b//c", "a/b/..", "a/../b", "a/b/.", "a/b/.git", "a/b/c\\d", "a/b/*",
            "a/b/[x]", "a/b/c\n", "a/b\0", "/a/b", "a/b/" + "x" * 97, "a/b" + "/c" * 9, "é/b",
        )),
    ],
)  # fmt: skip
def test_names(name: str, place: tuple[str, str] | None) -> None:
    assert split_name(name) == place


def test_files() -> None:
    whole: dict[str, int | None] = {"adapter_config.json": 9, "adapter_model.bin": 5, "adapter_model.safetensors": 7}
    assert files_of_adapter("a/b", "", whole) == ["adapter_config.json", "adapter_model.safetensors"]
    assert files_of_adapter("a/b", "c", whole) == []
    for size in (None, -1, MOST_BYTES + 1):
        assert files_of_adapter("a/b", "", whole | {"adapter_model.safetensors": size}) == []


def test_which_resolvers_there_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def kinds(**values: str) -> list[type]:
        for variable in (env.LORA_RESOLVER_CACHE_DIR, env.LORA_RESOLVER_HF_REPO_LIST, env.PLUGINS):
            monkeypatch.delenv(f"QUIRE_{variable.name}", raising=False)
            if variable.name in values:
                monkeypatch.setenv(f"QUIRE_{variable.name}", values[variable.name])
            variable.forget()
        return [type(resolver) for resolver in ResolverTable().resolvers()]

    both = {"LORA_RESOLVER_CACHE_DIR": str(tmp_path), "LORA_RESOLVER_HF_REPO_LIST": "a/b"}
    assert kinds() == [] and kinds(**both) == [FilesystemResolver, HubResolver]
    assert kinds(**both, PLUGINS="lora_hf_hub_resolver") == [HubResolver]
    assert kinds(**both, PLUGINS="lora_filesystem_resolver") == [FilesystemResolver]
    assert kinds(PLUGINS="lora_hf_hub_resolver") == []
    with pytest.raises(ConfigError, match="LORA_RESOLVER_HF_REPO_LIST has 'b'"):
        kinds(LORA_RESOLVER_HF_REPO_LIST="a/b, b")
    monkeypatch.undo()
    for variable in (env.LORA_RESOLVER_CACHE_DIR, env.LORA_RESOLVER_HF_REPO_LIST, env.PLUGINS):
        variable.forget()
