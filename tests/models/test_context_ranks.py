"""Context parallelism for decode: ranks that keep some tokens of every context each give the logits of one rank.

The ordinary suite takes some of each kind of attention; `make ranks` (pytest --every-architecture) takes all declared
architectures whose heads of keys are fewer than ranks. Ranks are threads here; tests/engine/test_context_engine.py has
processes. Memory is full of NaN before it is written, so a token of nobody's would be seen.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attention.context_ranks import WithContextRanks, divide
from quire.attention.cpu import CpuAttention
from quire.layers.batch import GroupStep
from quire.ops.attention import merge_attention, padded_attention, paged_attention, partial_attention
from quire.quant.shard import ALONE, ShardGroup
from quire.schema.errors import ConfigError
from quire.schema.kv import KVGroup, KVKind, KVSpec
from tests.models.test_ranks import LOADING, check
from tests.paged import Paged
from tests.shard_rank import loaded
from tests.thread_ranks import on_ranks
from tests.tiny_models import ARCHS, write_tiny

SOME = (
    "LlamaForCausalLM", "GPTBigCodeForCausalLM", "Gemma2ForCausalLM",  # grouped heads, one head, windows and a soft cap
    "GptOssForCausalLM", "Llama4ForCausalLM",  # sinks, chunks
    "DeepseekV2ForCausalLM", "FalconH1ForCausalLM",  # latent vectors, beside states
)  # fmt: skip
draw = random.Random(0)
PROMPTS = [[draw.randrange(3, 200) for _ in range(length)] for length in (23, 3, 1, 10)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "arch" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-architecture")
        metafunc.parametrize("arch", [arch for arch in ARCHS if every or arch in SOME])


def run(model: Any) -> list[Tensor]:
    """Chunks and single tokens of rows in any mix, then the same prompts at once."""
    return [*Paged(model, PROMPTS, block_size=4).in_chunks(seed=1), *Paged(model, PROMPTS, block_size=2).whole()]


def answers(folder: Path, group: ShardGroup) -> list[Tensor]:
    with LOADING:
        model = loaded(folder, group)
    return run(model)


def shape_of(model: Any) -> tuple[int, int]:
    """How many ranks, and how many of them divide a context; (0, 0): no more ranks than heads of keys can be had."""
    arch, kinds = model.arch, {spec.kind.value for spec in model.kv_specs(4, "float32")}
    if kinds <= {"state"}:
        return 0, 0
    latent = all(spec.v_head_size == 0 for spec in model.kv_specs(4, "float32") if spec.kind.value != "state")
    heads = 1 if latent else arch.kv_heads
    size = 2 * heads
    return (size, 2) if heads and arch.heads % size == 0 and size <= 4 else (0, 0)


def test_logits_of_one_rank(arch: str, tmp_path: Path) -> None:
    write_tiny(arch, tmp_path)
    whole = loaded(tmp_path, ALONE)
    size, context = shape_of(whole)
    if not size:
        pytest.skip("no ranks with the same heads of keys")
    check(on_ranks(size, lambda group: answers(tmp_path, group), context=context), run(whole))


@pytest.mark.parametrize(("interleave", "by_exchange"), [(1, True), (2, False), (4, True)])
def test_ways_to_divide_and_to_merge(
    interleave: int, by_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are cut into tiles of queries; of some of these a rank keeps nothing."""
    monkeypatch.setattr("quire.attention.context_ranks.TILE", 3)
    monkeypatch.setattr("quire.attention.context_ranks.PACK_TOKENS", 8)
    write_tiny("GPTBigCodeForCausalLM", tmp_path)
    whole = loaded(tmp_path, ALONE)

    def own(group: ShardGroup) -> list[Tensor]:
        with LOADING:
            model = loaded(tmp_path, group)
        return Paged(model, PROMPTS, block_size=4).in_chunks(seed=2)

    found = on_ranks(4, own, context=4, interleave=interleave, by_exchange=by_exchange)
    check(found, Paged(whole, PROMPTS, block_size=4).in_chunks(seed=2))


def test_a_rank_keeps_its_share_only(tmp_path: Path) -> None:
    """Of eight tokens in a row each of two ranks keeps four, two in a row in turn, and writes nothing else."""
    write_tiny("GPTBigCodeForCausalLM", tmp_path)

    def written(group: ShardGroup) -> tuple[int, list[list[bool]]]:
        with LOADING:
            model = loaded(tmp_path, group)
        specs = model.kv_specs(4, "float32")
        paged = Paged(model, [PROMPTS[0][:13]], block_size=4)
        paged.step([(0, 13)])
        caches = [module.cache for module in model.modules() if hasattr(module, "cache")]
        kept = [[bool(row.isfinite().all()) for row in cache.rows] for cache in caches]
        assert group.context is not None
        divided = divide(specs, group.context)
        assert [spec.page_bytes for spec in divided] == [spec.page_bytes for spec in specs]
        assert [spec.block_size for spec in divided] == [8] * len(specs)
        assert all(len(rows) == paged.num_blocks * 4 for rows in kept)
        return paged.num_blocks, kept

    (_, first), (_, second) = on_ranks(2, written, context=2, interleave=2)
    assert [sum(rows) for rows in first] == [7] * len(first)  # 0 1 . . 4 5 . . 8 9 . . 12
    assert [sum(rows) for rows in second] == [6] * len(second)


@pytest.mark.parametrize(("name", "heads"), [("LlamaForCausalLM", 2), ("GPT2LMHeadModel", 4)])
def test_ranks_without_a_head_of_keys_in_common(name: str, heads: int, tmp_path: Path) -> None:
    write_tiny(name, tmp_path)
    with pytest.raises(ConfigError, match=rf"it must divide tensor_parallel_size=2 / {heads} heads of keys"):
        on_ranks(2, lambda group: loaded(tmp_path, group), context=2)


def test_parts_of_keys_merge_to_all_of_them() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 6)
    mask = torch.zeros(2, 1, 5, 9)
    mask[1, :, 2, :4] = float("-inf")  # sees nothing of the first part
    expected = padded_attention.reference(q, k, v, mask, scale=0.3, softcap=2.0)
    spans = [slice(0, 4), slice(4, 9)]
    parts = [partial_attention(q, k[:, :, s], v[:, :, s], mask[..., s], scale=0.3, softcap=2.0) for s in spans]
    assert torch.equal(parts[0][0][1, :, 2], torch.zeros(4, 6)) and bool((parts[0][1][1, :, 2] == -torch.inf).all())
    out, total = merge_attention(torch.stack([p for p, _ in parts]), torch.stack([t for _, t in parts]))
    torch.testing.assert_close(out, expected)
    assert bool(total.isfinite().all())
    nothing = torch.full_like(parts[0][1], -torch.inf)
    empty, total = merge_attention(torch.zeros(2, *out.shape), torch.stack((nothing, nothing)))
    assert torch.equal(empty, torch.zeros_like(empty)) and bool((total == -torch.inf).all())


def test_queries_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 2, 7, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    mask = torch.zeros(7, 5).masked_fill_(torch.rand(7, 5) < 0.4, float("-inf"))
    whole = partial_attention(q, k, v, mask, scale=1.0)
    bare = partial_attention(q, k, v, None, scale=1.0)
    monkeypatch.setattr("quire.ops.attention.MAX_SCORES", 20)
    for given, expected in ((mask, whole), (None, bare)):
        for part, other in zip(partial_attention(q, k, v, given, scale=1.0), expected, strict=True):
            torch.testing.assert_close(part, other)


@pytest.mark.parametrize("learned", [False, True])
def test_scores_by_distance(learned: bool) -> None:
    """ALiBi, and learned scores: of the heads of all ranks."""
    torch.manual_seed(2)
    tokens, heads, size = 21, 4, 8
    q, k, v = torch.randn(tokens, heads, size), torch.randn(tokens, 1, size), torch.randn(tokens, 1, size)
    alibi = torch.rand(heads, 5) if learned else torch.rand(heads)
    group = KVGroup(kind=KVKind.WINDOW, block_size=8, window=9, layers=("attn",))
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    places = torch.arange(tokens)
    slots = table[0].long()[places // 8] * 8 + places % 8
    cache = torch.zeros(24, 2 * size)
    cache[slots] = torch.cat((k, v), -1).flatten(1)
    expected = paged_attention(
        q, cache, table, [tokens], [tokens], block_size=8, kv_heads=1, scale=0.3, window=9, alibi=alibi
    )
    spec = KVSpec(
        layer="attn", kind=KVKind.WINDOW, block_size=8, context_ranks=2, num_kv_heads=1, head_size=size, window=9
    )

    def own(ranks: ShardGroup) -> Tensor:
        assert ranks.context is not None
        backend = WithContextRanks.over(CpuAttention(), ranks.context, [spec])
        memory = torch.full((3, spec.page_bytes), 0xFF, dtype=torch.uint8)
        held, mine = backend.make_cache(spec, 3, memory), slice(2 * ranks.rank, 2 * ranks.rank + 2)
        outs = []
        for start, stop in ((0, 6), (6, 20), (20, 21)):
            step = GroupStep(table, torch.tensor([0, stop - start]), [stop], [stop - start], slots[start:stop])
            part = slice(start, stop)
            plan = backend.plan(step, group)
            outs.append(plan.run(q[part, mine], k[part], v[part], held, scale=0.3, alibi=alibi[mine]))
        return torch.cat(outs)

    torch.testing.assert_close(torch.cat(on_ranks(2, own, context=2, interleave=2), 1), expected)
