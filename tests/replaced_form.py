"""Another form of an op for as long as a test wants it, preferred to those that the machine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from quire.ops.op import Kernels, Op


@contextmanager
def replaced(op: Op, device: str, function: Callable) -> Iterator[None]:
    usual = Kernels.of

    def of(kernels: Kernels, asked: Op) -> Callable:
        return function if asked is op and kernels.device.type == device else usual(kernels, asked)

    with patch.object(Kernels, "of", of):
        yield
