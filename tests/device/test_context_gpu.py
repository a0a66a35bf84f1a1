"""Contexts that ranks divide, on a GPU: kernels against the reference, in graphs, and the collectives between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from tests.attention_case import RULE_NAMES, RULES, Case, CodedCase
from tests.divided_case import DividedCase, Twins
from tests.thread_ranks import on_ranks

pytestmark = pytest.mark.gpu

MIX = [(12, 5), (1500, 1), (90, 90), (3, 1), (1700, 310), (60, 0), (128, 1), (2, 2), (700, 64)]
DECODES = [(n, 1) for n in (700, 33, 5000, 1, 2048, 64)]
LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def answers(case: Case, size: int, interleave: int, run: Any, *, by_exchange: bool = False) -> Tensor:
    """run(case of a rank, backend) on every rank -> the heads of all of them."""
    from quire.attention.triton_context import DividedTritonAttention

    def own(group: Any) -> Tensor:
        found: Tensor = run(DividedCase(case, group.context), DividedTritonAttention(group.context))
        return found

    ranks = on_ranks(size, own, context=size, interleave=interleave, by_exchange=by_exchange, in_turns=True)
    return torch.cat(ranks, 1)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    limit = LIMITS[dtype]
    found = found.float().cpu()
    assert (found - wanted).norm() <= limit * wanted.norm()
    torch.testing.assert_close(found, wanted, rtol=4 * limit, atol=4 * limit)


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (4, 8)])
def test_any_mix_under_any_rule(size: int, interleave: int, dtype: torch.dtype, rule: dict[str, Any]) -> None:
    case = Case(MIX, heads=16, kv_heads=1, size=128, block_size=64, rule=rule, dtype=dtype, device="cuda")
    found = answers(case, size, interleave, lambda own, backend: own.run(backend), by_exchange=size == 4)
    close(found, case.reference(), dtype)
    few = Case(DECODES, heads=16, kv_heads=1, size=128, block_size=64, rule=rule, dtype=dtype, device="cuda")
    found = answers(few, size, interleave, lambda own, backend: own.run(backend, static=8))
    close(found[: len(DECODES)], few.reference(), dtype)
    assert not found[len(DECODES) :].any()
    tokens = sum(case.counts)
    found = answers(case, size, interleave, lambda own, backend: own.run_refilled(backend, tokens + 37))
    close(found[:tokens], case.reference(), dtype)
    assert not found[tokens:].any()


@pytest.mark.parametrize("heads", [16, 128])
def test_latent(heads: int) -> None:
    for lens, how in ((MIX, {}), (DECODES, {"static": 8})):
        case = Case(
            lens, heads=heads, kv_heads=1, size=576, value=-512, block_size=64, dtype=torch.bfloat16, device="cuda"
        )
        found = answers(case, 2, 1, lambda own, backend, how=how: own.run(backend, **how))
        close(found[: sum(case.counts)], case.reference(), torch.bfloat16)


@pytest.mark.parametrize("form", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_caches_in_8_bits(form: str) -> None:
    scales = (0.02, 0.03) if form == "float8_e4m3fn" else (1.0, 1.0)
    for lens in (MIX, DECODES):
        case = CodedCase(
            lens, heads=16, kv_heads=1, size=128, block_size=64, dtype=torch.bfloat16, device="cuda", form=form,
            scales=scales,
        )  # fmt: skip
        close(answers(case, 2, 4, lambda own, backend: own.run(backend)), case.reference(), torch.bfloat16)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("rule", [{}, {"window": 100, "sinks": True}], ids=["plain", "window"])
def test_a_graph_serves_any_contexts(rule: dict[str, Any], rank: int) -> None:
    """Which slots are this rank's, and how much it keeps, follow from the contexts of the moment."""
    from quire.attention.triton_context import DividedTritonAttention

    ranks, bucket, dtype = Twins(rank, interleave=2), 8, torch.bfloat16
    shape: dict[str, Any] = dict(heads=16, kv_heads=1, size=128, block_size=64, rule=rule, dtype=dtype, device="cuda")
    attention = DividedTritonAttention(ranks)
    longest = DividedCase(Case([(3000, 1)] * bucket, **shape), ranks)
    step, inputs, cache = longest.step(static=bucket), [x.clone() for x in longest.inputs()], longest.cache(attention)
    options = longest.options()
    attention.plan(step, longest.group()).run(*inputs, cache, **options)
    plan, graph = attention.plan(step, longest.group()), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = plan.run(*inputs, cache, **options)
    for seed, lens in enumerate([[2999, 17, 1, 640], [5, 1300, 64, 65, 2048, 900, 128]]):
        case = DividedCase(Case([(n, 1) for n in lens], **shape, seed=seed + 1), ranks)
        case.case.sinks = longest.case.sinks
        other, source = case.step(static=bucket), case.cache(attention)
        wanted = attention.plan(other, case.group()).run(*case.inputs(bucket - len(lens)), source, **options)
        source = case.cache(attention)
        cache.keys[: case.case.num_blocks], cache.values[: case.case.num_blocks] = source.keys, source.values
        step.block_tables[: other.block_tables.shape[0], : other.block_tables.shape[1]] = other.block_tables
        step.block_tables[other.row_index[-1].item(), :] = -1
        for target, value in zip(
            (step.row_index, step.contexts, step.slots), (other.row_index, other.contexts, other.slots), strict=True
        ):
            target.copy_(value)
        for target, value in zip(inputs, case.inputs(bucket - len(lens)), strict=True):
            target.copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, wanted) and bool(out[: len(lens)].any(-1).all()) and not out[len(lens) :].any()


def test_collectives_are_captured() -> None:
    """In a group of one, which NCCL has too: it brings back what it is given."""
    from quire.worker.context import ProcessContext

    device = torch.device("cuda", torch.cuda.current_device())
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        ranks = ProcessContext(0, 1, distributed.group.WORLD, interleave=1, by_exchange=False)
        x = torch.zeros(1, 6, 8, device=device)

        def all_of_them() -> list[Tensor]:
            return [ranks.gather(x[0])[0], ranks.scatter(x), ranks.exchange(x)[0]]

        all_of_them()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = all_of_them()
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert all(torch.equal(one, x[0]) for one in found) and bool(x.any())
    finally:
        distributed.destroy_process_group()
