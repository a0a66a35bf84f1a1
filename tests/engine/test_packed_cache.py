"""Packed weights kept on disk: the same model from the file as from the checkpoint, and never from a wrong file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.base import env
from quire.config import EngineArgs
from quire.loader import packed_cache
from quire.loader.load import load_model, weight_files
from quire.loader.packed_cache import PackedCache, packed_cache_for
from quire.models.build import Model
from quire.ops.cpu.forms import register
from quire.ops.cpu.native import kernels
from quire.quant.shard import ALONE, ShardGroup
from tests.tiny_models import write_tiny

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiled kernels")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    register()
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("QUIRE_CPU_PACKED_CACHE", "1")
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 1)
    env.forget_all()
    write_tiny("LlamaForCausalLM", tmp_path / "model")
    return tmp_path


def loaded(root: Path, quantization: str = "int8_wo") -> Model:
    args = EngineArgs(model=str(root / "model"), dtype="float32", device="cpu", quantization=quantization)
    return load_model(args.create_engine_config(), "cpu")


def kept(root: Path) -> Path:
    (found,) = (root / "cache" / "packed").iterdir()
    return found


def numbers(model: Model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def is_mapped(model: Model) -> bool:
    """Whether packed numbers lie in the cache's file: in memory that may not be written."""
    at = model.layers[0].attn.qkv.stored.packed.parts[0].data.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= at < last:
            return ".bin" in line and line.split()[1].startswith("r--")  # it may have been replaced since
    raise AssertionError("an address that is not mapped")


def same(one: Model, other: Model) -> bool:
    mine, theirs = numbers(one), numbers(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    "arch", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GPT2LMHeadModel"]
)
def test_the_file_holds_the_whole_model(root: Path, arch: str) -> None:
    write_tiny(arch, root / "model")
    first, second = loaded(root), loaded(root)
    assert same(first, second)
    hidden = torch.randn(3, first.arch.width)
    assert torch.equal(first.logits(hidden), second.logits(hidden))
    modules = dict(second.named_modules())
    for name, module in first.named_modules():
        if type(module).__name__ == "Linear":
            x = torch.randn(3, module.in_size)
            assert torch.equal(module(x), modules[name](x)), name


def test_a_file_is_mapped_and_weights_can_still_be_replaced(root: Path) -> None:
    assert not is_mapped(loaded(root))
    model = loaded(root)
    assert is_mapped(model)
    linear = model.layers[0].attn.qkv
    fresh = {part: torch.randn(rows, linear.in_size) for part, rows in linear.parts.items()}
    model.load_weights([(f"model.layers.0.self_attn.{part}.weight", fresh[part]) for part in fresh])
    x = torch.randn(2, linear.in_size)
    wanted = x @ torch.cat(list(fresh.values())).T
    assert (linear(x) - wanted).norm() < 0.02 * wanted.norm()
    assert not same(model, loaded(root))


@pytest.mark.parametrize("where", [3, 9, 60, -3000, -1, "short", "empty"])
def test_a_damaged_file_is_made_again(root: Path, where: int | str) -> None:
    wanted, path = loaded(root), kept(root)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    if isinstance(where, int):
        damaged[where] ^= 1
    path.unlink()
    path.write_bytes(damaged if isinstance(where, int) else whole[: len(whole) // 2] if where == "short" else b"")
    found = loaded(root)
    assert same(found, wanted) and not is_mapped(found)
    assert path.read_bytes() == whole
    assert is_mapped(loaded(root))


def test_other_weights_or_options_make_another_file(root: Path) -> None:
    before = loaded(root)
    weights = root / "model" / "model.safetensors"
    times = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1  # same size, and below the same times: only the system's own record tells
    weights.write_bytes(data)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = loaded(root)
    assert not same(before, after) and not is_mapped(after)
    assert is_mapped(loaded(root)) and kept(root)
    assert not is_mapped(loaded(root, "int4_wo")) and len(list((root / "cache" / "packed").iterdir())) == 2


def test_bytes_all_over_a_file_are_part_of_the_key(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = root / "model" / "model.safetensors"
    monkeypatch.setattr(os, "stat", lambda path, **_: os.stat_result((0,) * 6 + (weights_size,) + (0,) * 3))
    weights_size = len(weights.read_bytes())
    seen = {packed_cache._identity(str(weights))}
    for place in (0, weights_size // 2, weights_size - weights_size // 32):
        data = bytearray(weights.read_bytes())
        data[place : place + weights_size // 32] = bytes(weights_size // 32)
        weights.write_bytes(data)
        seen.add(packed_cache._identity(str(weights)))
    assert len(seen) == 4


def test_several_writers_and_readers_at_once(root: Path) -> None:
    model = loaded(root)
    args = EngineArgs(model=str(root / "model"), dtype="float32", device="cpu", quantization="int8_wo")
    config = args.create_engine_config()
    cache = packed_cache_for(model, config, weight_files(config))
    assert isinstance(cache, PackedCache)
    with ThreadPoolExecutor(6) as pool:
        writing = [pool.submit(cache.keep) for _ in range(6)]
        assert all(is_mapped(found) and same(found, model) for found in pool.map(lambda _: loaded(root), range(6)))
    assert all(future.result() is None for future in writing)
    assert kept(root) == cache.path  # and nothing beside it


@pytest.mark.parametrize("why", ["a file in the way", "off", "small", "full"])
def test_a_start_without_it(root: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    folder = root / "cache" / "packed"
    if why == "a file in the way":
        folder.parent.mkdir()
        folder.write_text("not a folder")
    elif why == "off":
        monkeypatch.setenv("QUIRE_CPU_PACKED_CACHE", "0")
        env.forget_all()
    elif why == "small":
        monkeypatch.setattr(packed_cache, "LEAST_BYTES", 16 << 20)
    else:
        monkeypatch.setattr("shutil.disk_usage", lambda path: _Full)
    assert same(loaded(root), loaded(root))
    assert not folder.is_dir() or not list(folder.iterdir())


class _Full:
    free = 100


LIES = {
    "more rows": lambda e: {"shape": [e["shape"][0] * 1000, e["shape"][1]]},
    "wider": lambda e: {"shape": [e["shape"][0], e["shape"][1] * 64]},
    "turned": lambda e: {"shape": [e["shape"][1] // 2, e["shape"][0] * 2]},
    "another kind": lambda e: {"form": "B16"},
    "a plain dtype": lambda e: {"form": "float16"},
    "no dtype": lambda e: {"form": "load"},
    "a column": lambda e: {"shape": [e["shape"][0] * e["shape"][1], 1]},
    "negative": lambda e: {"shape": [-e["shape"][0], -e["shape"][1]]},
    "no numbers": lambda e: {"shape": ["16", 64]},
    "behind the end": lambda e: {"start": 1 << 40},
    "before the start": lambda e: {"start": -64},
    "fewer bytes": lambda e: {"num_bytes": 64},
}


@pytest.mark.parametrize("is_part", [True, False])
@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(root: Path, lie: str, is_part: bool) -> None:
    """Checksums and key are right; only what the header says of one entry is not."""
    wanted, path = loaded(root), kept(root)
    whole = path.read_bytes()
    _rewrite(path, whole, lambda e: LIES[lie](e if len(e["shape"]) == 2 else {"shape": [*e["shape"], 1]}), is_part)
    found = loaded(root)
    assert same(found, wanted) and not is_mapped(found)
    assert path.read_bytes() == whole


def _rewrite(path: Path, whole: bytes, change: Callable[[dict[str, Any]], dict[str, Any]], is_part: bool) -> None:
    head, checksum = packed_cache._HEAD, packed_cache.checksum
    _, length, _ = head.unpack_from(whole)
    header = json.loads(whole[head.size : head.size + length])
    data = whole[packed_cache._aligned(head.size + length) :]
    entry = next(entry for entry in header["entries"] if entry["is_part"] is is_part)
    entry |= change(entry)
    if 0 <= entry["start"] < len(data):
        own = bytearray(data[entry["start"] : entry["start"] + entry["num_bytes"]])
        entry["sum"] = checksum(torch.frombuffer(own, dtype=torch.uint8))
    at = 0
    while True:
        header["size"] = at + len(data)
        text = json.dumps(header).encode()
        if packed_cache._aligned(head.size + len(text)) == at:
            break
        at = packed_cache._aligned(head.size + len(text))
    total = checksum(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    start = head.pack(packed_cache.MAGIC, len(text), total) + text
    path.unlink()
    path.write_bytes(start + bytes(at - len(start)) + data)


def test_a_header_that_was_written_again_unchanged_is_used(root: Path) -> None:
    loaded(root)
    path = kept(root)
    _rewrite(path, path.read_bytes(), lambda e: {}, True)
    assert is_mapped(loaded(root))


def test_every_rank_has_a_file_of_its_own(root: Path) -> None:
    """What one rank packed is not what another, or one that holds all, would map."""
    args = EngineArgs(model=str(root / "model"), dtype="float32", device="cpu", quantization="int8_wo")
    config = args.create_engine_config()
    groups = [ALONE, *(ShardGroup(rank, 2) for rank in range(2)), ShardGroup(1, 4)]
    models = [load_model(config, "cpu", group) for group in groups]
    assert len(list((root / "cache" / "packed").iterdir())) == len(groups)
    for group, model in zip(groups, models, strict=True):
        again = load_model(config, "cpu", group)
        assert is_mapped(again) and not is_mapped(model) and same(again, model)
    caches = [
        packed_cache_for(model, config, weight_files(config), group)
        for model, group in zip(models, groups, strict=True)
    ]
    assert len({cache.key for cache in caches}) == len({cache.path for cache in caches}) == len(groups)
    caches[1].path.replace(caches[2].path)  # rank 0's under the name of rank 1's
    assert not is_mapped(load_model(config, "cpu", groups[2]))
