"""Rows one by one: how an op makes a row's bits independent of its neighbours if a library does the arithmetic.

A library may round a value differently depending on the shape of a call, the value's position in it (a sum that starts
elsewhere, a vector loop with a scalar tail) and its memory address. So in batch-invariant mode on CPU every call gets
one row, in freshly allocated memory: shape, position and alignment are then always the same. Weights and tables stay
where they were when the model was loaded. Compiled forms have a fixed order of summation and are preferred if they
exist. Must not know: what an op computes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from quire.ops.op import Kernels, Op, same_bits


def fresh(x: Tensor) -> Tensor:
    """A contiguous copy in new memory, which torch aligns. `contiguous` may return its input."""
    return x.clone(memory_format=torch.contiguous_format)


def each_alone(function: Callable[..., Any], *rows: Tensor | None) -> Any:
    """function(*rows), called with one row (of the first dimension) of each at a time; returns a tensor or a tuple."""
    count = next(len(x) for x in rows if x is not None)
    if not count:
        return function(*rows)
    alone = (repeat(None, count) if x is None else map(fresh, x.split(1)) for x in rows)
    results = [function(*row) for row in zip(*alone, strict=True)]
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


def keep_apart(op: Op, rows: int = 1) -> None:
    """Add the form that calls the previous ones row by row. `rows`: how many of the first arguments have rows."""

    @op.made("cpu", same_bits)
    def make(whole: Callable[..., Any], kernels: Kernels) -> Callable[..., Any]:
        def apart(*args: Any, **kwargs: Any) -> Any:
            return each_alone(lambda *row: whole(*row, *args[rows:], **kwargs), *args[:rows])

        apart.__name__ = f"{op.name}_apart"
        return apart
