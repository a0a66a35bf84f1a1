"""PartialSums: the partial sums of a split-K matmul, from `linear_parts` (ops/few.py) to norms and `prepare_qkv`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PartialSums(NamedTuple):
    """Programs that share the columns of a matmul need not wait for each other: the consumer adds them up."""

    sums: Tensor  # [S, M, N] float32; the result is their sum over S
    dtype: torch.dtype  # that the result is rounded to

    @property
    def rows(self) -> int:
        return self.sums.shape[1]

    def whole(self) -> Tensor:
        return self.sums.sum(0).to(self.dtype)


def whole(product: Tensor | PartialSums) -> Tensor:
    return product.whole() if isinstance(product, PartialSums) else product


Delta = Tensor | PartialSums | None  # what is still to be added to a stream
