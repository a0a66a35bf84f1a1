"""Forms of ops/few.py and ops/coded.py for few rows on Hopper: which kernel multiplies which matrix.

numbers                      few.py
codes, blocks, of one row    few_coded.py, few_blocks.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from quire.ops import coded as coded_ops
from quire.ops import few as few_ops
from quire.ops.coded import CodedWeight
from quire.ops.few import NormRule
from quire.ops.op import Fits, FormTable, Kernels
from quire.ops.triton import few, few_blocks, few_coded
from quire.ops.triton.act import SILU


def few_rows(width: int, dtype: torch.dtype, matrices: Sequence[Tensor | CodedWeight]) -> int:
    codes = [matrix for matrix in matrices if isinstance(matrix, CodedWeight)]
    if codes and dtype in few_coded.DTYPES and all(map(_is_faster, codes)):
        return 1
    return few.few_rows(width, dtype, matrices)


def _is_faster(weight: CodedWeight) -> bool:
    return few_blocks.fits_weight(weight) if weight.is_blocked else few_coded.is_faster(weight)


def _kernel_of(x: Tensor, weight: Tensor | CodedWeight) -> Callable[..., Tensor] | None:
    """None: that of numbers."""
    if not isinstance(weight, CodedWeight):
        return None
    if few_blocks.fits(x, weight):
        return few_blocks.few_blocks_linear
    return few_coded.few_coded_linear if few_coded.fits(x, weight) else None


def norm_linear(
    x: Tensor, norm: NormRule, weight: Tensor | CodedWeight, bias: Tensor | None,
    act: Callable[[Tensor], Tensor] | None = None, *, codes: Mapping[Callable, int], early: bool = False,
) -> Tensor:  # fmt: skip
    """`codes`: gated activations by function; SiLU is fused into the matmul, others run after it."""
    kernel = _kernel_of(x, weight)
    if kernel is None:
        return few.norm_linear(x, norm, weight, bias, act, codes=codes, early=early)
    gated = act is not None and codes.get(act) == SILU
    y = kernel(x, weight, bias, norm=norm, gated=gated, early=early)
    return y if act is None or gated else act(y)


def norm_linears(
    x: Tensor, norm: NormRule, weights: Sequence[Tensor | CodedWeight], bias: Tensor | None, *, early: bool = False
) -> Tensor:
    """Results of one row lie side by side where each matmul writes them."""
    if len(weights) == 1:
        return norm_linear(x, norm, weights[0], bias, codes={}, early=early)
    counts = [weight.rows if isinstance(weight, CodedWeight) else len(weight) for weight in weights]
    out = torch.empty((len(x), sum(counts)), dtype=x.dtype, device=x.device)
    biases = [None] * len(weights) if bias is None else bias.split(counts)
    for weight, own, y in zip(weights, biases, out.split(counts, 1), strict=True):
        kernel = _kernel_of(x, weight)
        if kernel is not None:
            kernel(x, weight, own, norm=norm, out=y, early=early)
        else:
            y.copy_(few.norm_linear(x, norm, weight, own, codes={}, early=early))
    return out


def linear_add(
    x: Tensor, weight: Tensor | CodedWeight, bias: Tensor | None, stream: Tensor | None,
    following: Tensor | CodedWeight | None = None, *, early: bool = False,
) -> Tensor:  # fmt: skip
    kernel = _kernel_of(x, weight)
    if kernel is None:
        return few.linear_add(x, weight, bias, stream, following, early=early)
    own = None if stream is None else stream.contiguous()
    if kernel is few_blocks.few_blocks_linear:
        return kernel(x, weight, bias, stream=own, early=early)
    ahead = few_coded.beginning(following) if early else None
    return kernel(x, weight, bias, stream=own, following=ahead, early=early)


class TallLinear:
    """ops.coded.coded_linear of one row with a tall matrix, such as that of the output, and with any of blocks; all
    else goes the other way."""

    def __init__(self, other: Callable[..., Tensor], kernels: Kernels, *, early: bool = False) -> None:
        self._other, self._early = other, early

    def __call__(self, x: Tensor, weight: CodedWeight, bias: Tensor | None = None) -> Tensor:
        if x.ndim == 2 and few_blocks.fits(x, weight):
            return few_blocks.few_blocks_linear(x, weight, bias, early=self._early)
        if x.ndim == 2 and weight.rows > few_coded.TALL and few_coded.fits(x, weight):
            return few_coded.few_coded_linear(x, weight, bias)
        return self._other(x, weight, bias)


def add_forms(table: FormTable, codes: Mapping[Callable, int], fits: Fits, *, early: bool) -> None:
    """The forms of this device; `codes` as in `norm_linear`."""
    table.form(few_ops.few_rows, fits)(few_rows)
    table.form(few_ops.norm_linear, fits)(partial(norm_linear, codes=codes, early=early))
    table.form(few_ops.norm_linears, fits)(partial(norm_linears, early=early))
    table.form(few_ops.linear_add, fits)(partial(linear_add, early=early))
    table.made(coded_ops.coded_linear, fits)(partial(TallLinear, early=early))
