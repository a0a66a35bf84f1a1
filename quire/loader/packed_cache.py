"""Packed weights on disk: what a load made of a checkpoint, mapped by the next one instead of being made again.

One file per checkpoint, stored form and rank, in `packed` under QUIRE_CACHE_ROOT. It is used only if its key is that of
this start: the checkpoint's files (path, size, times, inode, and bytes sampled from all over them), what is read from
them (configuration, dtype, form, which rank of how many), and the code that decides what is stored (kernels,
instruction set, Quire's sources). A file that is stale, cut short or damaged (every byte is summed up) is made again.
Files are replaced, never written to, so that processes that map one keep what they have; all that map it share its
pages. Must not know: architectures.

    magic | length of the header | its checksum | header (JSON) | parameters, each at a multiple of 64 bytes
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire import __version__
from quire.base import env, native
from quire.base.clock import now
from quire.base.log import logger
from quire.base.mapped import MappedFile
from quire.base.progress import progress
from quire.checkpoint.weight_files import WeightFiles
from quire.config.engine import EngineConfig
from quire.layers.stored import packed_matrices
from quire.loader.gguf_file import pieces_of
from quire.loader.raw import as_bytes
from quire.ops.cpu.native import checksum, kernels
from quire.ops.packed import BLOCK, FORMS, PANEL, Packed
from quire.quant.shard import ALONE, ShardGroup

_log = logger(__name__)
MAGIC, FORMAT = b"QUIREPCK", 1
LEAST_BYTES = 16 << 20  # of packed numbers: less is packed in no time
_HEAD = struct.Struct("<8sQQ")
_ALIGN = 64
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_CODE = ("checkpoint", "layers", "loader", "models", "ops", "quant")  # packages that decide what is stored
_ABANDONED_S = 3600.0  # a file that nobody finished writing


@dataclass
class PackedEntry:
    """One parameter, or one part of a packed matrix."""

    module: str
    name: str
    is_part: bool
    form: str  # how it is packed, or the dtype of plain numbers
    shape: tuple[int, ...]
    start: int = 0  # from the first byte after the header
    num_bytes: int = 0
    sum: int = 0


@runtime_checkable
class HasRole(Protocol):
    """A model that is made from files of which another one may be made, too."""

    role: str


def packed_cache_for(
    model: object, config: EngineConfig, files: WeightFiles, group: ShardGroup = ALONE
) -> PackedCache | None:
    """None where nothing is packed, or the cache is off."""
    about = config.model_config
    if not env.CPU_PACKED_CACHE.get() or kernels() is None or not isinstance(model, nn.Module):
        return None
    if not packed_matrices(model) or group.broadcast is not None:  # what is mapped cannot move between ranks
        return None
    read = {"config": about.hf_config, "dtype": about.dtype, "form": about.weight_form,
            "format": config.load_config.load_format, "rank": group.rank, "ranks": group.size}  # fmt: skip
    use: tuple[object, ...] = (about.convert,) if about.is_pooling else ()  # which has other parameters
    if group.placement:
        use += (f"experts {group.placement}",)
        if group.spread is not None:
            use += (group.spread.rank, group.spread.size)
    if isinstance(model, HasRole):
        use += (model.role,)
    if group.stages > 1:
        use += (f"stage {group.stage}", group.stages, env.PP_LAYER_PARTITION.get())
    name = _digest(os.path.abspath(about.path), about.dtype, about.weight_form, group.rank, group.size, *use)
    paths = [piece for path in files.paths for piece in (pieces_of(path) if files.kind == "gguf" else (path,))]
    key = _digest(FORMAT, __version__, _code(), json.dumps(read, sort_keys=True, default=str), *map(_identity, paths))
    folder = Path(os.path.expanduser(env.CACHE_ROOT.get())) / "packed"
    return PackedCache(model, folder / f"{name}.bin", key)


class PackedCache:
    def __init__(self, model: nn.Module, path: Path, key: str) -> None:
        self._model, self.path, self.key = model, path, key

    def restore(self) -> bool:
        """Give the new model its parameters. False: there is no usable file, and all must be loaded."""
        began = now()
        try:
            file = MappedFile(str(self.path))
        except (OSError, ValueError):  # absent, or empty
            return False
        try:
            at, entries = self._header(file)
            whole = as_bytes(file.map)
            _check_sizes(self._model, entries, whole[at:].numel())
            if not _sound(entries, whole[at:]):
                raise ValueError("its contents are damaged")
            _place(self._model, entries, whole[at:])
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as wrong:
            _log.info("The packed weights in %s are not used, and made again: %s", self.path, wrong)
            return False
        _log.info("Packed weights mapped from %s in %.2f s", self.path, now() - began)
        return True

    def _header(self, file: MappedFile) -> tuple[int, list[PackedEntry]]:
        if file.size < _HEAD.size:
            raise ValueError("it is cut short")
        magic, length, total = _HEAD.unpack_from(file.map)
        if magic != MAGIC or _HEAD.size + length > file.size:
            raise ValueError("it is not such a file, or it is cut short")
        text = bytes(file.view(_HEAD.size, length))
        if checksum(as_bytes(bytearray(text))) != total:
            raise ValueError("its header is damaged")
        header = json.loads(text)
        if header["key"] != self.key:
            raise ValueError("the checkpoint, the options or Quire changed since")
        if header["size"] != file.size:
            raise ValueError(f"it has {file.size} bytes of {header['size']}")
        return _aligned(_HEAD.size + length), [PackedEntry(**entry) for entry in header["entries"]]

    def keep(self) -> None:
        """Whole or not at all; where it cannot be written, the next start packs again and nothing else happens."""
        began, size = now(), 0
        entries, tensors = map(list, zip(*_parameters(self._model), strict=True))
        for entry, tensor in zip(entries, tensors, strict=True):
            entry.start, entry.num_bytes, entry.sum = size, tensor.numel(), checksum(tensor)
            size = _aligned(size + tensor.numel())
        if sum(entry.num_bytes for entry in entries if entry.is_part) < LEAST_BYTES:
            return
        beside = self.path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._sweep()
            if shutil.disk_usage(self.path.parent).free < 2 * size:
                raise OSError(f"less than twice its {size / 1e6:.0f} MB are free there")
            self._write(beside, entries, tensors, size)
            beside.replace(self.path)
        except OSError as wrong:
            with suppress(OSError):
                beside.unlink()
            _log.info("Packed weights are not kept in %s: %s", self.path.parent, wrong)
            return
        _log.info("Packed weights kept in %s (%.0f MB, %.2f s)", self.path, size / 1e6, now() - began)

    def _write(self, path: Path, entries: list[PackedEntry], tensors: list[Tensor], size: int) -> None:
        text, at = b"", 0
        while True:  # the header says how large the file is, and is itself a part of it
            header = {"key": self.key, "size": at + size, "entries": [asdict(entry) for entry in entries]}
            text = json.dumps(header).encode()
            if _aligned(_HEAD.size + len(text)) == at:
                break
            at = _aligned(_HEAD.size + len(text))
        with path.open("xb") as file:
            file.write(_HEAD.pack(MAGIC, len(text), checksum(as_bytes(bytearray(text)))) + text)
            with progress(_log, "Keeping packed weights", size) as advance:
                for entry, tensor in zip(entries, tensors, strict=True):
                    file.seek(at + entry.start)
                    file.write(tensor.numpy().data)
                    advance(entry.num_bytes)
            file.truncate(at + size)

    def _sweep(self) -> None:
        """Remove what processes that died while writing left behind."""
        for path in self.path.parent.glob("*.tmp"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - _ABANDONED_S:
                    path.unlink()


def _parameters(model: nn.Module) -> Iterator[tuple[PackedEntry, Tensor]]:
    """Every parameter, as bytes."""
    seen = set()
    for where, matrix in packed_matrices(model).items():
        for part, stored in matrix.parts.items():
            numbers = stored.data if isinstance(stored, Packed) else stored
            shape = (stored.rows, stored.width) if isinstance(stored, Packed) else tuple(stored.shape)
            seen.add(numbers.data_ptr())
            yield (
                PackedEntry(where, part, True, stored.kind if isinstance(stored, Packed) else _name(stored), shape),
                _bytes(numbers),
            )
    for name, parameter in model.named_parameters():
        if parameter.data_ptr() not in seen:
            where, _, leaf = name.rpartition(".")
            yield PackedEntry(where, leaf, False, _name(parameter), tuple(parameter.shape)), _bytes(parameter.data)


def _check_sizes(model: nn.Module, entries: list[PackedEntry], room: int) -> None:
    """Every entry lies in the file, has the bytes that its shape takes, and the shape that the model gives it."""
    matrices, parameters = packed_matrices(model), dict(model.named_parameters())
    rows = dict.fromkeys((e.module for e in entries if e.is_part), 0)
    for entry in entries:
        numbers = (entry.start, entry.num_bytes, *entry.shape)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"its header has no such sizes: {numbers}")
        if entry.start + entry.num_bytes > room or entry.num_bytes != _bytes_of(entry):
            raise ValueError(f"its header says {entry.num_bytes} bytes for {entry.form} of {entry.shape}")
        if entry.is_part:
            rows[entry.module] += entry.shape[0]
            shape = matrices[entry.module].shape
            span = shape.parts.get(entry.name)
            expected = (entry.shape[0] if span is None else span.count, shape.width.count)
            fits = tuple(entry.shape) == expected
        else:
            own = parameters[_full_name(entry)]
            fits = tuple(entry.shape) == tuple(own.shape) and entry.form == _name(own)
        if not fits:
            raise ValueError(f"{entry.module}.{entry.name} has another shape than {tuple(entry.shape)}")
    for name, count in rows.items():
        if count != matrices[name].shape.rows:
            raise ValueError(f"{name} has other rows than {count}")


def _bytes_of(entry: PackedEntry) -> int:
    if entry.form in FORMS:
        rows, width = entry.shape
        if width % BLOCK:
            raise ValueError(f"rows of {width} are not packed")
        return -(-rows // PANEL) * (width // BLOCK) * FORMS[entry.form].num_bytes
    dtype = getattr(torch, entry.form)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry.form!r} is not a dtype")
    return math.prod(entry.shape) * dtype.itemsize


def _place(model: nn.Module, entries: list[PackedEntry], data: Tensor) -> None:
    matrices, parameters = packed_matrices(model), dict(model.named_parameters())
    if {entry.module for entry in entries if entry.is_part} != matrices.keys():
        raise ValueError("it holds other matrices than the model has")
    if parameters.keys() != {_full_name(entry) for entry in entries if not entry.is_part}:
        raise ValueError("it holds other parameters than the model has")
    for entry in entries:
        raw = data[entry.start : entry.start + entry.num_bytes]
        if entry.form in FORMS:
            if not entry.is_part:
                raise ValueError(f"{_full_name(entry)} is not a packed matrix")
            matrices[entry.module].put(entry.name, Packed(raw, entry.form, *entry.shape))
            continue
        numbers = raw.view(getattr(torch, entry.form)).view(entry.shape)
        if entry.is_part:
            matrices[entry.module].put(entry.name, numbers.clone())
        else:
            parameters[_full_name(entry)].data.copy_(numbers)


def _full_name(entry: PackedEntry) -> str:
    return f"{entry.module}.{entry.name}".lstrip(".")


def _sound(entries: list[PackedEntry], data: Tensor) -> bool:
    """Whether every byte is as it was written. Each thread takes its share at once: most entries are small."""
    threads = torch.get_num_threads()

    with (
        progress(_log, "Reading packed weights", sum(entry.num_bytes for entry in entries)) as advance,
        ThreadPoolExecutor(threads) as pool,
    ):

        def is_sound(entry: PackedEntry) -> bool:
            advance(entry.num_bytes)
            return entry.sum == checksum(data[entry.start : entry.start + entry.num_bytes])

        return all(pool.map(lambda first: all(map(is_sound, entries[first::threads])), range(threads)))


def _name(numbers: Tensor) -> str:
    return str(numbers.dtype).removeprefix("torch.")


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(-1).view(torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _digest(*what: object) -> str:
    return hashlib.sha256("\0".join(map(str, what)).encode()).hexdigest()[:32]


def _identity(path: str) -> str:
    """Changes whenever the file's bytes do: by the system's record of it, and by bytes from all over it."""
    about = os.stat(path)
    digest = hashlib.sha256(f"{os.path.abspath(path)} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}".encode())
    digest.update(str((about.st_dev, about.st_ino)).encode())
    with open(path, "rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(0, about.st_size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))  # the first and the last are ends
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


@cache
def _code() -> str:
    """Changes whenever the kernels or the sources that decide what is stored do."""
    library, chosen = native.library(), kernels()
    assert library is not None and chosen is not None
    digest = hashlib.sha256(library.read_bytes())
    digest.update(chosen.qc_isa())
    for room in _CODE:
        for path in sorted((Path(__file__).parents[1] / room).rglob("*.py")):
            digest.update(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return digest.hexdigest()
