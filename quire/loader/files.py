"""The tensors of weight files, one after the other.

In: files (checkpoint/weight_files.py chooses them). Out: pieces in file order, each a promise to read one tensor (or a
few that belong together), so that beside the model itself only the tensors being read (or, eagerly, one file) are in
memory. Tensors of safetensors and GGUF files are views of the mapped file where their numbers need no decoding: copy
them before writing.
Must not know: architectures, parameters, or where the files came from.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.base.log import logger
from quire.base.registry import load
from quire.checkpoint.weight_files import WeightFiles
from quire.loader.formats.parts import TensorAbout
from quire.loader.gguf_file import GGUFWeights
from quire.loader.safetensors_file import SafetensorsFile
from quire.quant.coded import CodedMatrix
from quire.schema.errors import CheckpointError, NotBuiltError

_log = logger(__name__)
_Q8_0 = 8  # a type that is kept wherever blocks are
_UNREADABLE = (  # what unpickling damaged or forbidden content ends in
    load("pickle:UnpicklingError"), RuntimeError, EOFError, ValueError, LookupError, TypeError,
    AttributeError, struct.error,
)  # fmt: skip


Named = Iterable[tuple[str, Tensor | CodedMatrix]]


class WeightPiece(NamedTuple):
    """Pieces may be read in any thread; a tensor is good as long as it is held."""

    num_bytes: int  # of the file, for progress
    read: Callable[[], Named]


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
