"""Sharded state: a model's parameters as they lie in memory, one set of files per rank, written and read back.

Nothing is renamed, joined or decoded when such a checkpoint is loaded: each tensor is one parameter of the model that
the same configuration builds. In: a model and a folder. Out: files named by a pattern with {rank} and {part}.
Must not know: architectures, other file formats.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.base.log import logger
from quire.checkpoint.weight_files import DEFAULT_PATTERN
from quire.models.build import Model
from quire.schema.errors import CheckpointError, InputError, some

DEFAULT_SIZE = 5 << 30  # bytes of one file
_log = logger(__name__)
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class ShardedStateLoader:
    """The documented name of this form's constants."""

    DEFAULT_PATTERN = DEFAULT_PATTERN


@runtime_checkable
class NamesWeights(Protocol):
    """A model that keeps more than parameters."""

    def named_weights(self) -> Iterable[tuple[str, Tensor]]: ...


def weights_of(model: Model) -> dict[str, Tensor]:
    """Every tensor once, under its first name."""
    named = model.named_weights() if isinstance(model, NamesWeights) else model.named_parameters()
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, int, tuple[int, ...]]] = set()
    for name, tensor in named:
        place = (tensor.data_ptr(), tensor.numel(), tuple(tensor.shape))
        if place not in seen or not tensor.numel():
            seen.add(place)
            tensors[name] = tensor.detach()
    return tensors


def save(model: Model, path: str, rank: int, pattern: str | None = None, max_size: int | None = None) -> list[str]:
    """Write a rank's files; returns their names."""
    pattern, limit = pattern or DEFAULT_PATTERN, DEFAULT_SIZE if max_size is None else max_size
    if "{part}" not in pattern or os.path.basename(pattern) != pattern:
        raise InputError(f"pattern must be a file name with {{part}} (and {{rank}}) in it, got {pattern!r}")
    if limit < 1:
        raise InputError(f"max_size must be at least 1 byte, got {limit}")
    folder = os.path.expanduser(path)
    os.makedirs(folder, exist_ok=True)
    names, parts = [], list(_parts(weights_of(model), limit))
    for number, part in enumerate(parts):
        names.append(pattern.format(rank=rank, part=number))
        write_safetensors(os.path.join(folder, names[-1]), part)
    _log.info("Saved %d tensors of rank %d to %s: %s", sum(map(len, parts)), rank, folder, some(names))
    return names


def _parts(weights: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name], size = tensor, size + tensor.nbytes
    if part:
        yield part


def write_safetensors(path: str, tensors: Mapping[str, Tensor]) -> None:
    """One file, tensor by tensor, so that no second copy of all of them is made."""
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            if tensor.numel():
                tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().tofile(file)


class ShardedTable:
    """Where a sharded state's tensors go: the parameters themselves. Used as a weight table is."""

    def __init__(self, model: Model) -> None:
        self._places = weights_of(model)
        self._missing = dict.fromkeys(self._places)

    def load(self, name: str, source: Tensor, send: Callable[[Any], Any] | None = None) -> bool:
        tensor, place = source, self._places.get(name)
        if place is None:
            return False
        if send is not None:
            tensor = send(tensor)
        if place.shape != tensor.shape or place.dtype != tensor.dtype:
            raise CheckpointError(
                f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, the model's is {place.dtype} "
                f"{list(place.shape)}: a sharded state is loaded with the dtype and parallel sizes it was saved with",
                param=name,
            )
        place.copy_(tensor)
        self._missing.pop(name, None)
        return True

    def missing(self) -> list[str]:
        return list(self._missing)
