"""Which files of a model hold its weights, and their tensors one after the other.

In: a folder or a .gguf file, and the load format. Out: pieces in file order, each a promise to read one tensor (or a
few that belong together), so that beside the model itself only the tensors being read (or, eagerly, one file) are in
memory. Tensors of safetensors and GGUF files are views of the mapped file where their numbers need no decoding: copy
them before writing.
Must not know: architectures, parameters, or where the files came from.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.base.log import logger
from quire.base.registry import load
from quire.loader.formats.parts import TensorAbout
from quire.loader.gguf_file import GGUFWeights
from quire.loader.safetensors_file import SafetensorsFile
from quire.quant.coded import CodedMatrix
from quire.schema.errors import CheckpointError, NotBuiltError, some

_log = logger(__name__)
_Q8_0 = 8  # a type that is kept wherever blocks are
FORMATS = ("auto", "safetensors", "pt", "gguf", "mistral")
_UNREADABLE = (  # what unpickling damaged or forbidden content ends in
    load("pickle:UnpicklingError"), RuntimeError, EOFError, ValueError, LookupError, TypeError,
    AttributeError, struct.error,
)  # fmt: skip
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


Named = Iterable[tuple[str, Tensor | CodedMatrix]]


class WeightPiece(NamedTuple):
    """Pieces may be read in any thread; a tensor is good as long as it is held."""

    num_bytes: int  # of the file, for progress
    read: Callable[[], Named]


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


def read_weights(
    files: WeightFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    strategy: str | None = None,
    map_location: str | dict[str, str] = "cpu",
    keeps: Callable[[int], bool] = lambda type_id: False,
    prefetch: bool = True,
    skips: Callable[[str], bool] = lambda name: False,
) -> Iterator[WeightPiece]:
    """Every tensor once. `dtype` and `device` are what decoding aims at; plain numbers come as they are stored.
    `keeps`: types of GGUF blocks that are wanted as CodedMatrix. `prefetch`: let the system read ahead whole tensors of
    safetensors files; else only the pages that are touched are read. `skips`: names of which nothing is read."""
    if strategy not in (None, "lazy", "eager"):
        raise NotBuiltError(f"safetensors_load_strategy {strategy!r} is not supported; lazy and eager are")
    for path in files.paths:
        if files.kind == "gguf":
            yield from _read_gguf(path, dtype, device, keeps, skips)
        elif files.kind == "pt":
            yield from _read_torch(path, map_location, files.owners, skips)
        else:
            yield from _read_safetensors(path, strategy == "eager", files.owners, prefetch, skips)


def read_directory(files: WeightFiles, map_location: str | dict[str, str] = "cpu") -> dict[str, TensorAbout]:
    """Type and shape of every tensor that `read_weights` gives, of safetensors and torch files, without reading it."""
    directory: dict[str, TensorAbout] = {}
    for path in files.paths:
        mine = os.path.basename(path)
        if files.kind == "pt":
            state = torch_state(path, map_location)
            infos = {name: TensorAbout(tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
        else:
            infos = {entry.name: TensorAbout(entry.dtype, entry.shape) for entry in SafetensorsFile(path).entries}
        directory |= {name: info for name, info in infos.items() if files.owners.get(name, mine) == mine}
    return directory


def read_metadata(files: WeightFiles) -> dict[str, str]:
    """What the writers of safetensors files say about them, of all files together."""
    metadata: dict[str, str] = {}
    for path in files.paths if files.kind == "safetensors" else ():
        metadata |= SafetensorsFile(path).metadata
    return metadata


def read_some(files: WeightFiles, wants: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Only the tensors with these names, of safetensors and torch files; a GGUF file gives none."""
    for path in files.paths if files.kind in ("safetensors", "pt") else ():
        mine = os.path.basename(path)
        pieces: Iterable[tuple[str, Tensor]]
        if files.kind == "pt":
            pieces = ((name, tensor) for name, tensor in torch_state(path, "cpu").items() if wants(name))
        else:
            file = SafetensorsFile(path)
            pieces = (pair for entry in file.entries if wants(entry.name) for pair in file.read(entry))
        yield from ((name, tensor) for name, tensor in pieces if files.owners.get(name, mine) == mine)


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


def _read_safetensors(
    path: str, eager: bool, owners: Mapping[str, str], prefetch: bool, skips: Callable[[str], bool]
) -> Iterator[WeightPiece]:
    mine = os.path.basename(path)
    file = SafetensorsFile(path, eager=eager)
    for entry in file.entries:
        if owners.get(entry.name, mine) == mine and not skips(entry.name):
            if prefetch:
                file.expect(entry)
            yield WeightPiece(entry.num_bytes, partial(file.read, entry))


def _read_gguf(
    path: str,
    dtype: torch.dtype,
    device: torch.device | str,
    keeps: Callable[[int], bool],
    skips: Callable[[str], bool],
) -> Iterator[WeightPiece]:
    weights = GGUFWeights(path)
    if keeps(_Q8_0) and (decoded := weights.decoded(keeps)):
        what = ", ".join(f"{count} of {name}" for name, count in decoded.items())
        _log.info("Decoded while loading, because nothing multiplies them as they are stored: %s", what)
    for recipe in weights.recipes:
        if recipe.prefix and skips(recipe.prefix):
            continue
        weights.expect(recipe)
        yield WeightPiece(weights.num_bytes(recipe), partial(weights.read, recipe, dtype, device, keeps))


def torch_state(path: str, map_location: str | dict[str, str]) -> dict[str, Tensor]:
    """Only tensors and plain containers are unpickled (weights_only); zip files are mapped, not read."""
    try:
        state: Any = torch.load(path, weights_only=True, mmap=zipfile.is_zipfile(path), map_location=map_location)
    except _UNREADABLE as wrong:
        reason = (str(wrong).strip() or type(wrong).__name__).splitlines()[0]
        raise CheckpointError(f"{path} is not a usable weight file: {reason}") from None
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        what = "other things than tensors" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise CheckpointError(f"{path} is not a usable weight file: it holds {what}, not tensors by name")
    return state


def _read_torch(
    path: str, map_location: str | dict[str, str], owners: Mapping[str, str], skips: Callable[[str], bool]
) -> Iterator[WeightPiece]:
    state = torch_state(path, map_location)
    mine = os.path.basename(path)
    for name in list(state):
        tensor = state.pop(name).detach()
        if owners.get(name, mine) == mine and not skips(name):
            yield WeightPiece(tensor.nbytes, partial(_named, name, tensor))
        del tensor


def _named(name: str, tensor: Tensor) -> Named:
    return [(name, tensor)]
