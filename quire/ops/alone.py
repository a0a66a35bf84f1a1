"""Rows one by one: how an op keeps a row's bits from its neighbours where a library does the arithmetic.

A library may round a number in one way or another according to the shape of a call, to the number's place in it (a sum
that begins elsewhere, a vector loop with a scalar tail) and to the address of its memory. So in batch-invariant mode on
CPU every call gets one row, in memory of its own: the shape, the place and the alignment are then always the same.
What is no row (a weight, a table) lies where it lay when the model was loaded. Compiled forms keep their own order of
sums and are preferred where they exist. Must not know: what an op computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.ops.op import Kernels, Op, same_bits


def fresh(x: Tensor) -> Tensor:
    """The same numbers without gaps in new memory, which torch aligns. `contiguous` may keep what it is given."""
    return x.clone(memory_format=torch.contiguous_format)


def each_alone(function: Callable[..., Any], *rows: Tensor | None) -> Any:
    """function(*rows), called with one row (of the first dimension) of each at a time; a tensor or a tuple of some."""
    count = next(len(x) for x in rows if x is not None)
    if not count:
        return function(*rows)
    found = [function(*(None if x is None else fresh(x[i : i + 1]) for x in rows)) for i in range(count)]
    if isinstance(found[0], Tensor):
        return torch.cat(found)
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def keep_apart(op: Op, rows: int = 1) -> None:
    """Add the form that calls those before it row by row. `rows`: how many of the first arguments have rows."""

    @op.made("cpu", same_bits)
    def make(whole: Callable[..., Any], kernels: Kernels) -> Callable[..., Any]:
        def apart(*args: Any, **kwargs: Any) -> Any:
            return each_alone(lambda *own: whole(*own, *args[rows:], **kwargs), *args[:rows])

        apart.__name__ = f"{op.name}_apart"
        return apart
