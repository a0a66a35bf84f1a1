"""MatrixPlan: which tensors of a checkpoint make one coded matrix, decided and checked before any of them is read.

Formats (the modules beside this one) make plans from the names, types and shapes of all tensors; coded_stage.py carries
them out. Must not know: where tensors come from, or where a matrix goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.quant.coded import CodedMatrix, Grid
from quire.schema.errors import CheckpointError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class TensorAbout(NamedTuple):
    """What a file's directory says about a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


Directory = Mapping[str, TensorAbout]
Made = Iterable[tuple[str, Tensor | CodedMatrix]]


@dataclass(frozen=True)
class MatrixPlan:
    module: str  # whose matrix it is, for messages
    names: Mapping[str, str]  # role -> tensor
    make: Callable[[Mapping[str, Tensor]], Made]  # from the tensors by role


class Parts:
    """The tensors of one module that a format knows, by role, with what their directory says."""

    def __init__(self, module: str, names: Mapping[str, str], directory: Directory) -> None:
        self.module, self.names, self._directory = module, names, directory

    def __contains__(self, role: str) -> bool:
        return role in self.names

    def __getitem__(self, role: str) -> TensorAbout:
        return self._directory[self.names[role]]

    def need(self, *roles: str) -> None:
        if missing := [role for role in roles if role not in self.names]:
            there = ", ".join(self.names)
            raise CheckpointError(
                f"the coded matrix {self.module!r} has {there}, but its {' and '.join(missing)} missing in the files"
                if len(missing) > 1
                else f"the coded matrix {self.module!r} has {there}, but no {missing[0]}: it is missing in the files",
                param=f"{self.module}.{missing[0]}",
            )

    def expect(self, role: str, shape: tuple[int, ...], why: str) -> None:
        """One shape, which follows from the others."""
        if self[role].shape != shape:
            raise self.wrong(role, f"expected {list(shape)} ({why})")

    def expect_dtype(self, role: str, *dtypes: torch.dtype) -> None:
        if self[role].dtype not in dtypes:
            raise self.wrong(role, f"expected {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}")

    def matrix(self, role: str) -> tuple[int, int]:
        shape = self[role].shape
        if len(shape) != 2 or 0 in shape:
            raise self.wrong(role, "expected a matrix that is not empty")
        return shape[0], shape[1]

    def wrong(self, role: str, reason: str) -> CheckpointError:
        info, name = self[role], self.names[role]
        kind = str(info.dtype).removeprefix("torch.")
        return CheckpointError(
            f"tensor {name!r} is {kind} {list(info.shape)}; {reason}", param=name, value=list(info.shape)
        )

    def group(self, width: int, size: int, groups: int, role: str) -> int:
        """Columns of a group, where the configuration says `size` (-1: all) and the file has so many groups."""
        columns = width if size == -1 else size
        if width % columns:
            raise self.wrong(role, f"its group size {size} does not divide the {width} columns of {self.module!r}")
        if width // columns != groups:
            raise self.wrong(
                role, f"{width} columns in groups of {columns} have {width // columns} scales, not {groups}"
            )
        return columns


def by_module(directory: Directory, roles: Iterable[str]) -> Iterator[Parts]:
    """Tensors named MODULE.role, gathered by module."""
    known, modules = tuple(f".{role}" for role in roles), dict[str, dict[str, str]]()
    for name in directory:
        ending = next((role for role in known if name.endswith(role)), None)
        if ending is not None:
            modules.setdefault(name[: -len(ending)], {})[ending[1:]] = name
    for module, names in modules.items():
        yield Parts(module, names, directory)


def scale_grid(parts: Parts, role: str, shape: tuple[int, int], block: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns that share a scale, from the scales' shape and, for blocks, what the configuration says."""
    (rows, width), stored = shape, parts[role].shape
    count = 1
    for size in stored:
        count *= size
    if count == 1:
        return rows, width
    flat = stored
    if len(stored) == 4 and stored[1] == stored[3] == 1:  # [blocks of rows, 1, blocks of columns, 1]
        flat = stored[0], stored[2]
    elif len(stored) > 2:
        flat = tuple(size for at, size in enumerate(stored) if size != 1 or at < 2)
    if block is not None and flat == (-(-rows // block[0]), -(-width // block[1])):
        return block
    if flat in ((rows,), (rows, 1)):
        return 1, width
    if len(flat) == 2 and flat[0] == rows and width % flat[1] == 0:
        return 1, width // flat[1]
    blocks = "" if block is None else f", or one for each block of {block[0]} x {block[1]}"
    raise parts.wrong(
        role,
        f"the scales of {parts.module!r} [{rows}, {width}] are one, one for each row, or [{rows}, groups that divide "
        f"{width}]{blocks}",
    )


def grid_of(values: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Grid:
    rows, columns = block
    return Grid(values.reshape(-(-shape[0] // rows), -(-shape[1] // columns)), rows, columns)
