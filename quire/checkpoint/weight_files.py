"""Which files of a model hold its weights.

In: a folder or a .gguf file, the load format, and for a sharded state the rank. Out: their paths, as the loader reads
them and machines compare them. Must not know: what a tensor is, or where the files came from.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from itertools import islice
from typing import Any, NamedTuple

from quire.schema.errors import CheckpointError, NotBuiltError, some

DEFAULT_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
FORMATS = ("auto", "safetensors", "pt", "gguf", "mistral")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)(?P<end>\.\w+)")
_HQQ = "qmodel.pt"  # what the library itself saves
_NAMED = 8  # missing files that an error names
_NOT_WEIGHTS = (  # tensors that training or adapters leave beside a model
    "consolidated*", "adapter_*", "training_args.*", "optimizer.*", "scheduler.*", "scaler.*", "rng_state*",
    "trainer_state.*",
)  # fmt: skip


class WeightFiles(NamedTuple):
    kind: str  # safetensors | pt | gguf
    paths: tuple[str, ...]
    owners: Mapping[str, str]  # tensor -> file name, where an index says so

    @property
    def num_bytes(self) -> int:
        return sum(os.path.getsize(path) for path in self.paths)


def find_weights(path: str, load_format: str = "auto", ignore: Sequence[str] = ()) -> WeightFiles:
    """The files to read; CheckpointError says what was looked for and what is there."""
    if load_format not in FORMATS:
        raise NotBuiltError(f"load_format {load_format!r} is not supported; supported are {', '.join(FORMATS)}, dummy")
    if os.path.isfile(path):
        if not path.endswith(".gguf") or load_format not in ("auto", "gguf"):
            raise CheckpointError(
                f"{path} is a file; load_format {load_format!r} reads a folder, or a .gguf file as gguf"
            )
        return WeightFiles("gguf", (path,), {})
    if not os.path.isdir(path):
        raise CheckpointError(f"{path} is neither a folder nor a file")
    there = sorted(entry.name for entry in os.scandir(path) if entry.is_file())
    if load_format == "mistral":
        return _consolidated(path, there)
    names = [name for name in there if not any(fnmatch(name, p) for p in (*ignore, *_NOT_WEIGHTS))]
    for kind, endings in (("safetensors", (".safetensors",)), ("pt", (".bin", ".pt")), ("gguf", (".gguf",))):
        if load_format not in ("auto", kind):
            continue
        for ending in endings:
            chosen, owners = _choose(path, names, ending)
            if chosen == [_HQQ]:
                raise NotBuiltError(
                    f"{os.path.join(path, _HQQ)} is a pickle of the hqq library, and Quire unpickles none; the nearest "
                    "supported is HQQ as transformers saves it in safetensors files, or GPTQ",
                    param="quantization",
                    value="hqq",
                )
            if chosen:
                return WeightFiles(kind, tuple(os.path.join(path, name) for name in chosen), owners)
    raise CheckpointError(_nothing_found(path, load_format))


def pattern_of(extra: Mapping[str, Any]) -> str:
    return str(extra.get("pattern") or DEFAULT_PATTERN)


def find_sharded(folder: str, rank: int, pattern: str) -> WeightFiles:
    """A rank's files; all parts from 0 on must be there."""
    own = re.escape(pattern.replace("{rank}", str(rank))).replace(re.escape("{part}"), r"(\d+)")
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is not a folder; load_format 'sharded_state' reads a folder")
    shards = sorted(
        (int(match[1]), name) for name in os.listdir(folder) if (match := re.fullmatch(own, name)) is not None
    )
    if not shards or [number for number, _ in shards] != list(range(len(shards))):
        there = some(sorted(os.listdir(folder))) or "nothing"
        raise CheckpointError(f"{folder} lacks files {pattern!r} of rank {rank}, parts from 0 on; it holds {there}")
    return WeightFiles("safetensors", tuple(os.path.join(folder, name) for _, name in shards), {})


def _consolidated(folder: str, there: list[str]) -> WeightFiles:
    """Mistral's own files: one, or those that its index lists."""
    names = [name for name in there if fnmatch(name, "consolidated*.safetensors")]
    if "consolidated.safetensors" in names:
        return WeightFiles("safetensors", (os.path.join(folder, "consolidated.safetensors"),), {})
    if "consolidated.safetensors.index.json" in there:
        names, owners = _read_index(folder, "consolidated.safetensors.index.json", set(names))
        return WeightFiles("safetensors", tuple(os.path.join(folder, name) for name in names), owners)
    if not names:
        raise CheckpointError(f"{folder} holds no consolidated*.safetensors; it holds: {some(there) or 'nothing'}")
    _check_shards(folder, names)
    return WeightFiles("safetensors", tuple(os.path.join(folder, name) for name in names), {})


def _choose(folder: str, names: list[str], ending: str) -> tuple[list[str], dict[str, str]]:
    """One whole file, else what an index lists, else a complete set of shards, else all there are."""
    ours = [name for name in names if name.endswith(ending)]
    whole = {".safetensors": "model.safetensors", ".bin": "pytorch_model.bin"}.get(ending)
    if whole in ours:
        return [str(whole)], {}
    indexes = [name for name in names if name.endswith(f"{ending}.index.json")]
    if whole is not None and f"{whole}.index.json" in indexes:
        indexes = [f"{whole}.index.json"]
    if len(indexes) > 1:
        raise CheckpointError(f"{folder} has {len(indexes)} indexes and no {whole}.index.json: {', '.join(indexes)}")
    if indexes:
        return _read_index(folder, indexes[0], set(ours))
    if ending == ".gguf":
        ours = [name for name in ours if not (m := _SHARD.fullmatch(name)) or int(m["number"]) == 1]
        if len(ours) > 1:
            raise CheckpointError(f"{folder} holds {len(ours)} GGUF models, name one: {', '.join(ours[:8])}")
        return ours, {}
    _check_shards(folder, ours)
    return ours, {}


def _read_index(folder: str, name: str, there: set[str]) -> tuple[list[str], dict[str, str]]:
    path = os.path.join(folder, name)
    try:
        with open(path, encoding="utf-8") as file:
            owners = json.load(file)["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as wrong:
        raise CheckpointError(f"{path} is not a usable index: {type(wrong).__name__}: {wrong}") from None
    if not isinstance(owners, dict) or not all(isinstance(owner, str) for owner in owners.values()):
        raise CheckpointError(f"{path} is not a usable index: its weight_map does not map names to files")
    files = sorted(set(owners.values()))
    if missing := [owner for owner in files if owner not in there]:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(files)} files that {name} lists are missing: {some(missing)}"
        )
    return files, owners


def _check_shards(folder: str, names: list[str]) -> None:
    """Names such as model-00002-of-00003.safetensors tell what else must be there. A name may claim any number of
    files, so no more of them are tried than there are, and a few."""
    there = set(names)
    sets: dict[tuple[str, int, str, str], set[int]] = {}
    for match in filter(None, map(_SHARD.fullmatch, names)):
        key = (match["stem"], len(match["number"]), match["count"], match["end"])
        sets.setdefault(key, set()).add(int(match["number"]))
    for (stem, width, text, end), numbers in sets.items():
        count = int(text)
        missing = count - sum(1 <= number <= count for number in numbers)
        if missing > 0:
            every = (f"{stem}-{i:0{width}d}-of-{text}{end}" for i in range(1, count + 1))
            few = list(islice((name for name in every if name not in there), _NAMED))
            more = f" and {missing - len(few)} more" if missing > len(few) else ""
            raise CheckpointError(f"{folder}: {missing} of {count} shards are missing: {', '.join(few)}{more}")


def _nothing_found(folder: str, load_format: str) -> str:
    patterns = {"safetensors": "*.safetensors", "pt": "*.bin or *.pt", "gguf": "*.gguf"}
    looked = patterns.get(load_format, "*.safetensors, *.bin, *.pt or *.gguf")
    there = sorted(os.listdir(folder))
    if any(name.startswith("consolidated") for name in there):
        return f"{folder} holds weights in Mistral's own form only (consolidated*): load_format='mistral' reads them"
    return (
        f"{folder} holds no {looked} with weights (load_format {load_format!r}); it holds: {some(there) or 'nothing'}"
    )
