"""Mixture of experts: selecting experts per token, and the grouped matmuls of the selected ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.ops.alone import keep_apart
from quire.ops.linear import linear
from quire.ops.op import Kernels, op
from quire.ops.packed import Matrix, packed_linear
from quire.ops.parts import PartialSums


@op
def route(
    logits: Tensor,  # [T, E]
    top_k: int,
    *,
    score: str = "softmax",  # softmax | sigmoid | topk_softmax | topk_sigmoid (over the chosen only) | mixer
    renorm: bool = True,
    scale: float = 1.0,
    bias: Tensor | None = None,  # [E] float32: affects the selection, not the weights
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",  # max | top2sum: how a group of experts is ranked
    dtype: torch.dtype = torch.float32,  # of the weights, which are computed in float32
) -> tuple[Tensor, Tensor]:
    """(weights [T, k], experts [T, k] int64)."""
    weights, index = _route(logits.float(), top_k, score, renorm, scale, bias, groups, top_groups, group_score)
    return weights.to(dtype), index


keep_apart(route)


def _route(
    logits: Tensor, top_k: int, score: str, renorm: bool, scale: float, bias: Tensor | None, groups: int,
    top_groups: int, group_score: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if score == "topk_softmax":
        top, index = logits.topk(top_k, -1)
        return top.softmax(-1), index
    if score == "topk_sigmoid":
        index = (logits if bias is None else logits + bias).topk(top_k, -1)[1]
        weights = logits.gather(1, index).sigmoid()
        return (weights / weights.sum(-1, keepdim=True) if renorm else weights) * scale, index
    if score == "mixer":
        return _mixer(logits, top_k, scale)
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if groups > 1:
        grouped = choice.view(choice.shape[0], groups, -1)
        rank = grouped.amax(-1) if group_score == "max" else grouped.topk(2, -1)[0].sum(-1)
        keep = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, rank.topk(top_groups, -1)[1], True)
        choice = grouped.masked_fill(~keep[..., None], float("-inf")).flatten(1)
    index = choice.topk(top_k, -1)[1]
    weights = scores.gather(1, index)
    if renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, index


@op
def sum_choices(x: Tensor) -> Tensor:
    """[T, k, dim] -> [T, dim]: the sum of the outputs of a token's experts."""
    return x.sum(1)


keep_apart(sum_choices)


def _mixer(logits: Tensor, top_k: int, margin: float) -> tuple[Tensor, Tensor]:
    """One expert after another: each is weighted by a softmax over those close to it that are not selected yet."""
    weights, chosen, left = [], [], logits
    for _ in range(top_k):
        best, index = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > margin
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(1, index))
        chosen.append(index)
        left = left.scatter(1, index, float("-inf"))
    return torch.cat(weights, 1), torch.cat(chosen, 1)


def sum_experts(
    x: Tensor,
    weights: Tensor,
    index: Tensor,
    count: int,
    expert_of: Callable[[Tensor, int], Tensor],  # (rows of x, number of an expert) -> its result for them
    stream: Tensor | None,
) -> Tensor:
    """Sum over a token's experts of weight * result, each expert run once on all of its tokens, in ascending order."""
    flat = index.flatten()
    order = flat.argsort(stable=True)
    tokens = order.div(index.shape[1], rounding_mode="floor")
    scales = weights.flatten()[order, None]
    absent, *sizes = torch.bincount(flat + 1, minlength=count + 1).tolist()
    out, start = torch.zeros_like(x), absent
    for expert, size in enumerate(sizes):
        if not size:
            continue
        rows = tokens[start : start + size]
        result = expert_of(x[rows], expert) * scales[start : start + size]
        out.index_add_(0, rows, result.to(out.dtype))
        start += size
    return out if stream is None else stream + out


@op
def run_experts(
    x: Tensor,  # [T, dim]
    weights: Tensor,  # [T, k]
    index: Tensor,  # [T, k]; -1: an expert of another rank, which adds nothing
    w1: Tensor,  # [E, 2 * ffn, dim]: gate rows, then up rows
    w2: Tensor,  # [E, dim, ffn]
    *,
    b1: Tensor | None,
    b2: Tensor | None,
    act: Callable[[Tensor], Tensor],  # [n, 2 * ffn] -> [n, ffn]
    stream: Tensor | None = None,  # [T, dim]
    in_parts: bool = False,
    all_experts: int = 0,
    matmul: Callable[..., Tensor] | None = None,
) -> Tensor | PartialSums:  # [T, dim]
    """Sum over a token's experts of weight * expert(x); experts are summed in ascending order, as in transformers. The
    sum, rounded, is added to `stream` if there is one. `in_parts`: a norm follows, to which a form may leave the sum.
    `all_experts`: how many the ranks have that divide them; 0: all are here, and `index` has no -1.
    `matmul`: `linear`, in the form a layer was built with."""
    matmul = matmul or linear.on(x.device)

    def expert_of(rows: Tensor, expert: int) -> Tensor:
        h = act(matmul(rows, w1[expert], None if b1 is None else b1[expert]))
        return matmul(h, w2[expert], None if b2 is None else b2[expert])

    return sum_experts(x, weights, index, w1.shape[0], expert_of, stream)


@run_experts.made("cpu")
def run_experts_cpu(
    before: Callable[..., Tensor | PartialSums], kernels: Kernels
) -> Callable[..., Tensor | PartialSums]:
    return partial(before, matmul=kernels.of(linear))


@dataclass
class Mixture:
    """Experts one by one, each matrix packed or plain. `handle` belongs to the form that multiplies."""

    up: tuple[Matrix | Tensor, ...]  # gate rows, then up rows
    down: tuple[Matrix | Tensor, ...]
    up_bias: tuple[Tensor | None, ...]
    down_bias: tuple[Tensor | None, ...]
    act: Callable[[Tensor], Tensor]  # [n, rows of up] -> [n, ffn]
    rule: tuple[str, float, float] | None = None  # the name of `act` if it is gated and has one; alpha, limit
    handle: Any = None


@op
def run_mixture(
    x: Tensor,
    weights: Tensor,
    index: Tensor,
    experts: Mixture,
    stream: Tensor | None = None,
    products: tuple[Callable[..., Tensor], Callable[..., Tensor]] | None = None,
) -> Tensor:
    """As `run_experts`, for experts stored as separate matrices. `products`: `linear` and `packed_linear`. Compiled
    forms of CPUs take no -1: there, a rank picks its own pairs first."""
    products = products or (linear.on(x.device), packed_linear.on(x.device))

    def multiply(rows: Tensor, matrix: Matrix | Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(matrix, Tensor):
            return products[0](rows, matrix, bias)
        return products[1](rows, matrix, bias)

    def expert_of(rows: Tensor, expert: int) -> Tensor:
        h = experts.act(multiply(rows, experts.up[expert], experts.up_bias[expert]))
        return multiply(h, experts.down[expert], experts.down_bias[expert])

    return sum_experts(x, weights, index, len(experts.up), expert_of, stream)


@run_mixture.made("cpu")
def run_mixture_cpu(before: Callable[..., Tensor], kernels: Kernels) -> Callable[..., Tensor]:
    return partial(before, products=(kernels.of(linear), kernels.of(packed_linear)))
