"""One row times blocks of GGUF files (ops/triton/few_blocks.py): what the tests of the kernel have in common."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.ops.act import GATED
from quire.ops.few import NormRule, linear_add, norm_linear
from tests.coded_cases import normal

FEW_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def row_and_rest(
    rows: int, width: int, mode: str, half: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, dict[str, Any]]:
    """An input, and what is fused around it."""
    draw = partial(normal, dtype=half, device=device)
    x = draw(1, width)
    x[0, 7] = 40  # numbers of one group far apart
    rule = NormRule(1 + 0.3 * draw(width, seed=3), 1e-6, 0.0, False)
    return x, {
        "plain": {}, "bias": {"bias": draw(rows, seed=4)}, "norm": {"norm": rule},
        "add": {"bias": draw(rows, seed=4), "stream": draw(1, rows, seed=2)},
        "wide": {"norm": rule._replace(offset=1.0, wide=True)},
        "gated": {"norm": rule, "gated": True, "bias": draw(rows, seed=4)},
    }[mode]  # fmt: skip


def of_numbers(
    x: Tensor, numbers: Tensor, *, norm: NormRule | None = None, gated: bool = False, bias: Tensor | None = None,
    stream: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same by the references, in float32."""
    bias = None if bias is None else bias.float()
    if norm is None:
        return linear_add(x.float(), numbers, bias, None if stream is None else stream.float())
    assert norm.weight is not None
    rule = norm._replace(weight=norm.weight.float())
    return norm_linear(x.float(), rule, numbers, bias, GATED["silu"].reference if gated else None)
