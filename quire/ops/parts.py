"""PartialSums: what a consumer has yet to add up. The partial sums of a split-K matmul, from `linear_parts`
(ops/few.py) to norms and `prepare_qkv`; the results of a token's experts, from `run_experts` (ops/moe.py) to norms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PartialSums(NamedTuple):
    """Programs that share the columns of a matmul need not wait for each other: the consumer adds them up."""

    sums: Tensor  # [S, M, N]; the result is their sum over S, in float32
    dtype: torch.dtype  # that the result is rounded to
    factors: Tensor | None = None  # [M, S] of the parts of a row; norms alone take them

    @property
    def rows(self) -> int:
        return self.sums.shape[1]

    def whole(self) -> Tensor:
        if self.factors is None:
            return self.sums.sum(0).to(self.dtype)
        return torch.einsum("smn,ms->mn", self.sums.float(), self.factors.float()).to(self.dtype)


def whole(product: Tensor | PartialSums) -> Tensor:
    return product.whole() if isinstance(product, PartialSums) else product


Delta = Tensor | PartialSums | None  # what is still to be added to a stream
