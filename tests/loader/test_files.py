"""Which files are read, in which order of preference, and what is said when they are not all there."""

import json
import os
import random
import struct
import subprocess
import sys
import time

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire.checkpoint.weight_files import find_weights
from quire.loader.files import read_weights
from quire.schema.errors import CheckpointError, NotBuiltError

IGNORE = ("original/**/*",)


def tensors(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((2, 2), float(len(name))) for name in names}


def read(path, load_format="auto", ignore=IGNORE, **more) -> dict[str, torch.Tensor]:
    found = find_weights(str(path), load_format, ignore)
    named = [item for piece in read_weights(found, dtype=torch.float32, **more) for item in piece.read()]
    assert len(dict(named)) == len(named)
    return dict(named)


def shards(folder, count: int = 3, *, ending: str = "safetensors", stem: str = "model", index: bool = True) -> None:
    owners = {}
    for i in range(1, count + 1):
        name = f"{stem}-{i:05d}-of-{count:05d}.{ending}"
        part = tensors(f"w{i}", f"v{i}")
        save_file(part, folder / name) if ending == "safetensors" else torch.save(part, folder / name)
        owners |= dict.fromkeys(part, name)
    if index:
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": owners}))


ALL = {f"{kind}{i}" for kind in "wv" for i in (1, 2, 3)}


def test_single_file(tmp_path):
    save_file(tensors("a", "bb"), tmp_path / "model.safetensors")
    got = read(tmp_path)
    assert got.keys() == {"a", "bb"} and got["bb"].tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("strategy", [None, "lazy", "eager"])
@pytest.mark.parametrize("index", [True, False])
def test_shards_with_and_without_an_index(tmp_path, index, strategy):
    shards(tmp_path, index=index)
    assert read(tmp_path, strategy=strategy).keys() == ALL


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(tmp_path, index):
    shards(tmp_path, index=index)
    os.remove(tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"1 of 3 .* missing: model-00002-of-00003\.safetensors"):
        find_weights(str(tmp_path))


def test_an_index_says_which_copy_counts(tmp_path):
    shards(tmp_path, 2)
    save_file(tensors("w2", "v2", "w1"), tmp_path / "model-00002-of-00002.safetensors")  # w1 belongs to the first
    assert read(tmp_path).keys() == {"w1", "v1", "w2", "v2"}


def test_an_index_cannot_reach_outside(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors("a"), tmp_path / "other.safetensors")
    index = {"weight_map": {"a": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"missing: \.\./other\.safetensors"):
        find_weights(str(folder))


@pytest.mark.parametrize("raw", ["{", "[]", "{}", '{"weight_map": {"a": 5}}', '{"weight_map": []}', "[" * 20_000])
def test_a_damaged_index_is_named(tmp_path, raw):
    shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(raw)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is not a usable index"):
        find_weights(str(tmp_path))


def test_duplicates_and_leftovers_are_not_weights(tmp_path):
    shards(tmp_path, 2, index=False)
    save_file(tensors("mistral"), tmp_path / "consolidated.safetensors")
    save_file(tensors("lora"), tmp_path / "adapter_model.safetensors")
    torch.save(tensors("optimizer"), tmp_path / "optimizer.bin")
    (tmp_path / "original").mkdir()
    save_file(tensors("llama"), tmp_path / "original" / "more.safetensors")
    assert read(tmp_path).keys() == {"w1", "v1", "w2", "v2"}


def test_ignore_patterns(tmp_path):
    save_file(tensors("a"), tmp_path / "a.safetensors")
    save_file(tensors("b"), tmp_path / "b.safetensors")
    assert read(tmp_path, ignore=("b*",)).keys() == {"a"}


def test_safetensors_come_before_bin_and_bin_before_pt(tmp_path):
    torch.save(tensors("pt"), tmp_path / "weights.pt")
    assert read(tmp_path).keys() == {"pt"}
    torch.save(tensors("bin"), tmp_path / "pytorch_model.bin")
    torch.save(tensors("training"), tmp_path / "training_args.bin")
    assert read(tmp_path).keys() == {"bin"}
    save_file(tensors("safe"), tmp_path / "model.safetensors")
    assert read(tmp_path).keys() == {"safe"}
    assert read(tmp_path, "pt").keys() == {"bin"}
    assert read(tmp_path, "safetensors").keys() == {"safe"}


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files_new_and_old(tmp_path, zipped):
    torch.save(tensors("a", "bb"), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    got = read(tmp_path, map_location={"cuda:0": "cpu"})
    assert got["bb"].tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_torch_shards(tmp_path):
    shards(tmp_path, ending="bin", stem="pytorch_model")
    assert read(tmp_path).keys() == ALL


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil-was-run",)


def test_nothing_is_run_on_loading(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not a usable weight file"):
        read(tmp_path)
    assert not (tmp_path / "evil-was-run").exists()


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"PK\3\4" + b"\0" * 200, b"\x80\x02}q\0X"])
def test_damaged_torch_files_are_named(tmp_path, content):
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not a usable weight file") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_truncated_torch_file(tmp_path):
    torch.save({"a": torch.randn(1000)}, tmp_path / "pytorch_model.bin")
    raw = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError, match="not a usable weight file"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("state", "says"), [([torch.ones(2)], "holds a list"), ({"a": {}}, "other things than tensors")]
)
def test_torch_files_that_hold_something_else(tmp_path, state, says):
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=says):
        read(tmp_path)


def test_nothing_to_read(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no .*safetensors.*it holds: nothing"):
        find_weights(str(tmp_path))
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(CheckpointError, match=r"it holds: README\.md"):
        find_weights(str(tmp_path), "pt")
    save_file(tensors("a"), tmp_path / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match="Mistral's own form"):
        find_weights(str(tmp_path))
    with pytest.raises(CheckpointError, match="neither a folder nor a file"):
        find_weights(str(tmp_path / "absent"))
    with pytest.raises(CheckpointError, match=r"README\.md is a file"):
        find_weights(str(tmp_path / "README.md"))


def test_formats_we_do_not_have_are_refused(tmp_path):
    save_file(tensors("a"), tmp_path / "model.safetensors")
    with pytest.raises(NotBuiltError, match="'npcache' is not supported; supported are auto"):
        find_weights(str(tmp_path), "npcache")
    with pytest.raises(NotBuiltError, match="'torchao' is not supported"):
        read(tmp_path, strategy="torchao")


def gguf_file(path, layers: range, *, split: tuple[int, int] | None = None, top: bool = True) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(4)
    writer.add_head_count(2)
    if split:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
    if top:
        writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    for layer in layers:
        writer.add_tensor(f"blk.{layer}.ffn_up.weight", np.full((4, 32), layer, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_alone_in_a_folder_or_named(tmp_path):
    gguf_file(tmp_path / "m.gguf", range(2))
    assert read(tmp_path).keys() == read(tmp_path / "m.gguf", "gguf").keys()
    assert len(read(tmp_path)) == 3
    gguf_file(tmp_path / "n.gguf", range(2))
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models, name one: m\.gguf, n\.gguf"):
        find_weights(str(tmp_path))
    with pytest.raises(CheckpointError, match="is a file; load_format 'safetensors'"):
        find_weights(str(tmp_path / "m.gguf"), "safetensors")


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_a_name_that_claims_very_many_shards(tmp_path, ending):
    stem = "model" if ending == "safetensors" else "pytorch_model"
    for number in (1, 3):
        (tmp_path / f"{stem}-{number:05d}-of-999999999.{ending}").write_bytes(b"")
    began = time.process_time()
    words = rf"999999997 of 999999999 shards are missing: {stem}-00002-of-999999999\.{ending}, .* and 999999989 more"
    with pytest.raises(CheckpointError, match=words):
        find_weights(str(tmp_path))
    assert time.process_time() - began < 5


def test_gguf_in_pieces(tmp_path):
    for i in range(3):
        gguf_file(tmp_path / f"m-{i + 1:05d}-of-00003.gguf", range(i, i + 1), split=(i, 3), top=i == 0)
    got = read(tmp_path)
    assert got.keys() == {"model.embed_tokens.weight", *(f"model.layers.{i}.mlp.up_proj.weight" for i in range(3))}
    assert got["model.layers.2.mlp.up_proj.weight"][0, 0] == 2
    with pytest.raises(CheckpointError, match=r"piece 1 of a model in 3 pieces; name the first"):
        read(tmp_path / "m-00002-of-00003.gguf")
    os.remove(tmp_path / "m-00003-of-00003.gguf")
    with pytest.raises(CheckpointError, match=r"1 of 3 pieces are missing: .*m-00003-of-00003\.gguf"):
        read(tmp_path)


def test_truncated_gguf(tmp_path):
    gguf_file(tmp_path / "m.gguf", range(2))
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw[:-100])
    with pytest.raises(CheckpointError, match=r"m\.gguf is truncated: tensor 'blk\.1\.ffn_up\.weight' needs bytes"):
        read(tmp_path)
    (tmp_path / "m.gguf").write_bytes(raw[:80])
    with pytest.raises(CheckpointError, match=r"m\.gguf: truncated"):
        read(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<I", 9) + raw[8:])
    with pytest.raises(CheckpointError, match="GGUF version 9"):
        read(tmp_path)


def test_random_damage_is_an_error_or_another_model(tmp_path):
    """Flipped bytes in the directory of a file: a CheckpointError, or tensors; never anything else."""
    gguf_file(tmp_path / "m.gguf", range(3))
    raw, rng, outcomes = (tmp_path / "m.gguf").read_bytes(), random.Random(0), {"error": 0, "read": 0}
    for i in range(300):
        damaged, path = bytearray(raw), tmp_path / f"{i}.gguf"
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(8, 400)] = rng.choice((0, 1, 2, 8, 12, 0x7F, 0xFF, rng.randrange(256)))
        path.write_bytes(damaged)
        try:
            read(path)
            outcomes["read"] += 1
        except CheckpointError:
            outcomes["error"] += 1
    assert min(outcomes.values()) > 20, outcomes


MEASURE = """
import sys, torch
from quire.checkpoint.weight_files import find_weights
from quire.loader.files import read_weights

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024

before = peak()
model = [torch.empty(10_000_000) for _ in range(6)]
found = find_weights(sys.argv[1])
for place, piece in zip(model, read_weights(found, dtype=torch.float32, strategy=sys.argv[2])):
    for name, tensor in piece.read():
        place.copy_(tensor.view(-1))
    del piece, tensor
print(peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the system does not say how much memory was used")
@pytest.mark.parametrize(("strategy", "extra_tensors"), [("lazy", 1), ("eager", 3)])
def test_memory_stays_near_one_model(tmp_path, strategy, extra_tensors):
    """240 MB in two files: beside the copy, lazy holds about one tensor (40 MB), eager one file (120 MB)."""
    for i in range(2):
        part = {f"t{i}{j}": torch.zeros(5000, 2000) for j in range(3)}
        save_file(part, tmp_path / f"model-0000{i + 1}-of-00002.safetensors")
        del part
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), strategy],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    peak = int(done.stdout)
    assert 240e6 < peak < 240e6 + (extra_tensors + 0.5) * 40e6
