"""config/agreement.py and checkpoint/fingerprint.py: what machines compare before their engines serve together."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.checkpoint import source
from quire.checkpoint.fingerprint import fingerprints
from quire.config import EngineArgs
from quire.config.agreement import differences, statement
from tests.plain.config.test_hints import LLAMA


def stated(
    folder: Path, *, model: dict[str, Any] | None = None, weights: bytes | None = b"w" * 99, **options: Any
) -> Any:
    """As the other machine gets it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | (model or {})))
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    args = EngineArgs(model=str(folder), device="cpu", skip_tokenizer_init=True, **options)
    config = args.create_engine_config()
    return msgspec.msgpack.decode(msgspec.msgpack.encode(statement(config)))


def test_what_belongs_to_a_machine_may_differ(tmp_path: Path) -> None:
    here = stated(tmp_path / "a", data_parallel_size=2, served_model_name="m", num_gpu_blocks_override=9)
    there = stated(
        tmp_path / "b", data_parallel_size=2, data_parallel_rank=1, hf_token="secret", kv_cache_memory_bytes=1 << 20
    )
    assert differences(here, there) == ""
    assert "secret" not in repr(there) and str(tmp_path) not in repr(there)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ({"hidden_size": 128}, {}, "model_config.hf_config.hidden_size is 128 there and 64 here"),
        ({"quirk": [1]}, {}, "model_config.hf_config.quirk is [1] there and not set here"),
        ({}, {"max_model_len": 99}, "model_config.max_model_len is 99 there and 512 here"),
        ({}, {"max_num_seqs": 5}, "scheduler_config.max_num_seqs is 5 there and "),
        ({}, {"dtype": "bfloat16"}, "model_config.dtype is 'bfloat16' there and 'float32' here"),
        ({}, {"weights": b"x" * 99}, "model.safetensors differs"),
        ({}, {"enable_lora": True}, "enable_lora is True there and False here"),
        ({}, {"seed": 4}, "model_config.seed is 4 there and 0 here"),
        ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "num_speculative_tokens is 2"),
    ],
)
def test_what_must_not(model: dict[str, Any], options: dict[str, Any], said: str, tmp_path: Path) -> None:
    here = stated(tmp_path / "a", dtype="float32")
    there = stated(tmp_path / "b", model=model, **{"dtype": "float32", **options})
    assert said in differences(here, there)


def test_a_server_without_engines_compares_the_model_alone(tmp_path: Path) -> None:
    here, there = stated(tmp_path / "a"), stated(tmp_path / "b", seed=4, max_num_seqs=5, dtype="bfloat16")
    assert differences(here, there) and not differences(here, there, model_only=True)
    other = stated(tmp_path / "c", model={"hidden_size": 128})
    assert "hidden_size" in differences(here, other, model_only=True)


def test_words_have_an_end(tmp_path: Path) -> None:
    here = {f"model_config.hf_config.{name}": name * 500 for name in "abcdefgh"}
    words = differences(here, {})
    assert words.endswith("and 4 more") and len(words) < 1000


def test_a_fingerprint_is_of_the_weights(tmp_path: Path) -> None:
    files = {"model-1.safetensors": os.urandom(300_000), "model-2.safetensors": b""}
    paths = [str(tmp_path / name) for name in files]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    before = fingerprints(paths)
    assert list(before) == list(files) and fingerprints(paths) == before
    for place in (0, 299_999):
        changed = bytearray(files["model-1.safetensors"])
        changed[place] ^= 1
        (tmp_path / "model-1.safetensors").write_bytes(changed)
        after = fingerprints(paths)
        assert after["model-1.safetensors"] != before["model-1.safetensors"]
        assert after["model-2.safetensors"] == before["model-2.safetensors"]
    assert fingerprints([]) == {}


def test_weights_are_the_files_that_are_read(tmp_path: Path) -> None:
    here = stated(tmp_path / "a")
    for name in ("training_args.bin", "pytorch_model.bin", "model.gguf", "optimizer.pt"):
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / name).write_bytes(name.encode())
    assert differences(here, stated(tmp_path / "b")) == ""
    assert differences(here, stated(tmp_path / "b", weights=b"x" * 99)) == (
        "the weights are not the same there and here: model.safetensors differs"
    )
    assert stated(tmp_path / "b", load_format="dummy")["model_config.weights"] == {}
    (tmp_path / "b" / "model.safetensors").unlink()
    assert list(stated(tmp_path / "b", weights=None)["model_config.weights"]) == ["pytorch_model.bin"]


def test_other_files_are_named(tmp_path: Path) -> None:
    shards = tmp_path / "b"
    shards.mkdir()
    for number in (1, 2):
        (shards / f"model-0000{number}-of-00002.safetensors").write_bytes(b"w")
    words = differences(stated(tmp_path / "a"), stated(shards, weights=None))
    assert words == (
        "other weight files are there than here: only there model-00001-of-00002.safetensors, "
        "model-00002-of-00002.safetensors, only here model.safetensors"
    )
    ranks = tmp_path / "c"
    ranks.mkdir()
    for rank in range(3):  # the third is no rank of this engine
        (ranks / f"model-rank-{rank}-part-0.safetensors").write_bytes(b"w")
    sharded = stated(ranks, weights=None, load_format="sharded_state", tensor_parallel_size=2)
    assert list(sharded["model_config.weights"]) == [f"model-rank-{rank}-part-0.safetensors" for rank in (0, 1)]


def test_a_server_without_engines_needs_no_weights(tmp_path: Path) -> None:
    here, there = stated(tmp_path / "a", weights=None), stated(tmp_path / "b")
    assert here["model_config.weights"] == {} and differences(here, there, model_only=True) == ""
    assert "only there model.safetensors, only here none" in differences(here, there)


@pytest.mark.parametrize("here", [0, 1])
def test_a_server_without_engines_fetches_no_weights(
    here: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def locate(*args: Any, weights: bool) -> Any:
        asked.append(weights)
        return source.locate(*args, weights=weights)

    monkeypatch.setattr("quire.config.resolve.locate", locate)
    where = {"data_parallel_address": "127.0.0.1", "data_parallel_size": 2}
    stated(tmp_path / "a", data_parallel_size_local=here, **where)
    assert asked[0] == (here > 0)
