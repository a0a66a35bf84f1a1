"""Weights of a GGUF file (or of one written in several pieces) under the names of Hugging Face checkpoints.

Joins the container (base/gguf.py), the tensor types (gguf_types.py) and the names (gguf_names.py). In: the path of
the first file. Out: named tensors, decoded one recipe at a time. Plain float tensors stay views of the file in their
own dtype; quantized ones come in the dtype asked for, decoded on the device asked for.
Must not know: which model they go to.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quire.base.gguf import GGUFError, GGUFFile, shared
from quire.loader.gguf_names import Recipe, recipes
from quire.loader.gguf_types import dequantize, num_bytes, tensor_type
from quire.loader.raw import as_bytes, cut
from quire.quant.coded import GGUFBlocks, OpenBlocks
from quire.schema.errors import CheckpointError

_PIECE = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def open_gguf(path: str) -> GGUFFile:
    try:
        return shared(path)
    except GGUFError as wrong:
        raise CheckpointError(str(wrong)) from None


def pieces_of(path: str) -> tuple[str, ...]:
    """All files of a model that `path` is the first file of."""
    metadata = open_gguf(path).metadata
    count, number = metadata.get("split.count", 0), metadata.get("split.no", 0)
    if not isinstance(count, int) or count < 2:
        return (path,)
    folder, name = os.path.split(path)
    match = _PIECE.fullmatch(name)
    if number != 0 or match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path} is piece {number} of a model in {count} pieces; name the first, "
            f"which is called …-00001-of-{count:05d}.gguf"
        )
    paths = tuple(os.path.join(folder, f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))
    there = set(os.listdir(folder or "."))
    if missing := [p for p in paths if os.path.basename(p) not in there]:
        raise CheckpointError(f"{path}: {len(missing)} of {count} pieces are missing: {', '.join(missing[:8])}")
    return paths


class GGUFWeights:
    """Opens every piece, checks that every tensor lies inside its file, and knows the sizes before reading any."""

    def __init__(self, path: str) -> None:
        files = [open_gguf(piece) for piece in pieces_of(path)]
        self._where = {name: file for file in files for name in file.tensors}
        self._whole = {file.path: as_bytes(file.file.map) for file in files}
        self.recipes = recipes(files[0].metadata, self._where)
        self._sizes = {name: self._size(name) for recipe in self.recipes for name in recipe.sources}

    def num_bytes(self, recipe: Recipe) -> int:
        return sum(self._sizes[name] for name in recipe.sources)

    def expect(self, recipe: Recipe) -> None:
        """It is read soon: let the system fetch its tensors and what follows."""
        for name in recipe.sources:
            file = self._where[name]
            file.file.expect(file.tensors[name].offset, self._sizes[name])

    def read(
        self,
        recipe: Recipe,
        dtype: torch.dtype,
        device: torch.device | str,
        keeps: Callable[[int], bool] = lambda type_id: False,  # whose blocks are wanted as they are
    ) -> Iterator[tuple[str, Tensor | GGUFBlocks]]:
        """What the recipe makes; its pages are given back once all of it was taken."""
        try:
            if self._stays(recipe, keeps):
                yield from self._stored(recipe, dtype)
            else:
                yield from recipe.make(*(self._value(name, dtype, device) for name in recipe.sources))
        except (RuntimeError, LookupError) as wrong:  # sizes that the recipe's arithmetic cannot take
            shapes = ", ".join(f"{name!r} {list(self._where[name].tensors[name].shape)}" for name in recipe.sources)
            reason = str(wrong).partition("\n")[0]
            raise CheckpointError(f"GGUF tensors {shapes} do not fit their family ({reason})") from None
        for name in recipe.sources:
            file = self._where[name]
            file.file.forget(file.tensors[name].offset, self._sizes[name])

    def decoded(self, keeps: Callable[[int], bool]) -> dict[str, int]:
        """Types of blocks -> how many tensors of them `read` decodes although some blocks are kept."""
        counts: Counter[str] = Counter()
        for recipe in self.recipes:
            if not self._stays(recipe, keeps):
                kinds = [tensor_type(self._where[name].tensors[name].type_id) for name in recipe.sources]
                counts.update(kind.name for kind in kinds if kind.plain is None)
        return dict(counts)

    def _stays(self, recipe: Recipe, keeps: Callable[[int], bool]) -> bool:
        info = self._where[recipe.sources[0]].tensors[recipe.sources[0]]
        return recipe.by_rows and len(info.shape) >= 2 and keeps(info.type_id)

    def _stored(self, recipe: Recipe, dtype: torch.dtype) -> Iterator[tuple[str, GGUFBlocks]]:
        """A recipe of one tensor, worked on its rows of bytes."""
        (name,) = recipe.sources
        info = self._where[name].tensors[name]
        *rows, width = info.shape  # of a matrix, or of experts one after another
        kind = tensor_type(info.type_id)

        def decode(raw: Tensor) -> Tensor:
            shape = raw.shape[0], raw.shape[1] // kind.num_bytes * kind.elements
            return dequantize(raw.reshape(-1), info.type_id, shape, dtype, name)

        def open_codes(raw: Tensor) -> OpenBlocks:
            from quire.loader.gguf_codes import open_blocks  # lazy

            opened: OpenBlocks = open_blocks(raw, info.type_id)
            return opened

        for made, raw in recipe.make(self._raw(name).view(*rows, -1)):
            yield made, GGUFBlocks(raw, info.type_id, width, decode, kind.elements, opens=open_codes)

    def _size(self, name: str) -> int:
        file = self._where[name]
        info = file.tensors[name]
        size = num_bytes(info.type_id, info.shape, name)
        if info.offset + size > file.file.size:
            raise CheckpointError(
                f"{file.path} is truncated: tensor {name!r} needs bytes {info.offset} to {info.offset + size}, "
                f"the file has {file.file.size}"
            )
        return size

    def _value(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        info = self._where[name].tensors[name]
        return dequantize(self._raw(name).to(device), info.type_id, info.shape, dtype, name)

    def _raw(self, name: str) -> Tensor:
        file, size = self._where[name], self._sizes[name]
        return cut(self._whole[file.path], file.tensors[name].offset, size, torch.uint8, (size,))
