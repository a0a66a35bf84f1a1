"""Attention over a context that ranks divide, kernels interpreted on CPU, against the reference over all of it.

Ranks are threads, one of which runs at a time, as the interpreter needs it. Memory that a rank never wrote is NaN."""

import os
import random

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted only with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("tests.interpreted")

import quire.attention.triton as attention
from quire.attention.context_exchange import own_slots
from quire.attention.state import WithStates
from quire.attention.triton import TileSet, TritonAttention
from quire.attention.triton_context import DividedTritonAttention
from quire.ops.qkv import QkvPrep, prepare_qkv
from quire.ops.triton import attention_plan
from quire.ops.triton.attention import AttentionTile
from quire.quant.shard import ALONE
from tests.attention_case import RULE_NAMES, RULES, Case, CodedCase
from tests.divided_case import DividedCase, Twins
from tests.models.test_context_ranks import SOME, shape_of
from tests.paged import Paged
from tests.products import spread
from tests.shard_rank import loaded
from tests.thread_ranks import on_ranks
from tests.tiny_models import write_tiny

MIX = [(12, 5), (90, 1), (9, 9), (3, 1), (101, 21), (60, 0), (2, 2)]
DECODES = [(n, 1) for n in (5, 90, 8, 64, 1)]
WAYS = [(2, 1, False), (2, 4, True), (4, 2, False)]  # ranks, interleave, by exchange


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch):
    """So that contexts of a test are cut into parts too."""
    monkeypatch.setattr(attention, "LEAST_KEYS", 32)


def answers(case, way, run):
    """run(case of a rank, backend) on every rank -> the heads of all of them."""
    size, interleave, by_exchange = way

    def own(group):
        return run(DividedCase(case, group.context), DividedTritonAttention(group.context))

    found = on_ranks(size, own, context=size, interleave=interleave, by_exchange=by_exchange, in_turns=True)
    return torch.cat(found, 1)


def close(found, wanted, dtype=torch.float32):
    limit = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found.float().cpu(), wanted, rtol=limit, atol=limit)


def eager(case, backend):
    return case.run(backend)


@pytest.mark.parametrize(("way", "rule"), spread(WAYS, RULES))
def test_any_mix_under_any_rule(way, rule):
    case = Case(MIX, heads=8, kv_heads=1, size=16, rule=rule)
    close(answers(case, way, eager), case.reference())


@pytest.mark.parametrize(("way", "rule"), spread(WAYS, RULES))
def test_captured_decodes(way, rule):
    case = Case(DECODES, heads=8, kv_heads=1, size=32, rule=rule, dtype=torch.float16, seed=3)
    found = answers(case, way, lambda own, backend: own.run(backend, static=9))
    close(found[: len(DECODES)], case.reference(), torch.float16)
    assert not found[len(DECODES) :].any()


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_captured_mixes(rule):
    case = Case(MIX, heads=4, kv_heads=1, size=32, rule=rule, dtype=torch.float16, seed=4)
    tokens = sum(case.counts)
    found = answers(case, WAYS[1], lambda own, backend: own.run_refilled(backend, tokens + 21))
    close(found[:tokens], case.reference(), torch.float16)
    assert not found[tokens:].any()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_latent_values(way):
    case = Case(MIX, heads=40, kv_heads=1, size=24, value=-16)
    close(answers(case, way, eager), case.reference())
    case = Case(DECODES, heads=40, kv_heads=1, size=24, value=-16)
    found = answers(case, way, lambda own, backend: own.run(backend, static=6))
    close(found[: len(DECODES)], case.reference())


@pytest.mark.parametrize("form", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_caches_in_8_bits(form):
    scales = (0.02, 0.03) if form == "float8_e4m3fn" else (1.0, 1.0)
    for mix in (MIX, DECODES):
        case = CodedCase(mix, heads=8, kv_heads=1, size=32, dtype=torch.float16, form=form, scales=scales)
        close(answers(case, (2, 2, False), eager), case.reference(), torch.float16)


@pytest.mark.parametrize(
    ("tma", "page", "rule"), spread((False, True), (16, 64), ({}, {"sinks": True}, {"alibi": True}))
)
def test_forms_of_the_prompt_kernel(tma, page, rule):
    """Keys that all queries of a tile see, in a loop of their own, and ahead of each other."""
    lens = [(230, 9), (65, 33), (128, 64), (33, 33), (1, 1)]
    case = Case(lens, heads=4, kv_heads=1, size=32, block_size=2 * page, rule=rule, dtype=torch.float16)
    few, many = AttentionTile(16, 32, 4, 3), AttentionTile(32, 32, 4, 3, True, True, tma)

    def run(own, backend):
        backend.tiles = lambda *shape: TileSet(few, few, many, many)
        return own.run(backend)

    close(answers(case, (2, 4, False), run), case.reference(), torch.float16)


@pytest.mark.parametrize("how", [{"static": 9}, {}], ids=["captured", "eager"])
@pytest.mark.parametrize("rule", [{}, {"softcap": 3.0}, {"alibi": True, "sinks": True}], ids=["plain", "cap", "more"])
def test_a_shared_prefix(rule, how, monkeypatch):
    """In whole tiles of what a rank keeps, but for the last key of each row: 65 and 64 of the shortest one's."""
    monkeypatch.setattr(attention, "SHARE_ROWS", 3)
    monkeypatch.setattr(attention_plan.Sharing.__new__, "__defaults__", (32, 2, 64))  # probe, rows, saved
    lens = [(n, 1) for n in (200, 190, 90, 173, 260, 130, 70)]
    case = Case(lens, heads=8, kv_heads=1, size=32, block_size=32, rule=rule, shared=(128, (0, 1, 3, 4, 5)))

    def run(own, backend):
        found, shared = own.run_shared(backend, **how)
        assert shared[0].info.tolist()[:2] == [32 if own.ranks.rank else 64, 5]
        return found

    close(answers(case, (2, 4, False), run)[: len(lens)], case.reference())


@pytest.mark.parametrize("rule", [{}, {"window": 40, "sinks": True}], ids=["plain", "window"])
def test_from_the_fused_product_on(rule):
    """Norm, rotation and the write of those tokens that a rank keeps."""
    heads, size, tokens = 4, 32, sum(n for _, n in MIX)
    case = Case(MIX, heads=heads, kv_heads=1, size=size, rule=rule)
    angle = torch.rand((tokens, 1, size // 2), generator=torch.Generator().manual_seed(0))
    cos, sin = (torch.cat(pair, -1) for pair in ((angle.cos(), angle.cos()), (-angle.sin(), angle.sin())))
    weight = torch.rand(size, generator=torch.Generator().manual_seed(1))

    def prep(count):
        return QkvPrep(count, 1, weight, weight, 1e-6, 0.0, False, cos, sin, False)

    def run(own, backend):
        q, k, v = own.inputs()
        plan, cache = backend.plan(own.step(), own.group()), own.cache(backend)
        options = {name: value for name, value in own.options().items() if name != "v_size"}
        return plan.run_fused(torch.cat((q, k, v), 1).flatten(1), prep(q.shape[1]), cache, **options)

    found = answers(case, (2, 2, True), run)
    # the same keys in every cache: what this step computes replaces those of the case
    q, k, v = case.inputs()
    pages = torch.zeros(2, 1, tokens, 1, size)
    order = torch.arange(tokens)
    turned = prepare_qkv.reference(torch.cat((q, k, v), 1).flatten(1), prep(heads), pages[0], pages[1], order)
    case.q, at = turned, 0
    for row, count in enumerate(case.counts):
        end = sum(case.contexts[: row + 1])
        case.k[end - count : end], at = pages[0, 0, at : at + count], at + count
    close(found, case.reference())


SHARED = [*[(513, 1)] * 5, (300, 40)]  # of 513 tokens the first rank keeps 257, the other one 256, a prefix at most


@pytest.mark.parametrize("lens", [MIX, SHARED, [(n, 1) for n in range(600, 680)]], ids=["mix", "shared", "most"])
def test_all_ranks_replay_a_graph_or_none_does(lens, monkeypatch):
    """A graph pads the step: sums over ranks of another one's tokens would be of another length."""
    monkeypatch.setattr(attention, "SHARE_ROWS", 4)
    shared = (512, range(5)) if lens is SHARED else None

    def lists(rank):
        """Whether they fit, and what was written."""
        monkeypatch.setattr(attention, "MIXED_ROWS", 60)  # so that the room for 80 rows is tight
        case = Case(lens, heads=4, kv_heads=1, size=16, block_size=32, shared=shared)
        backend = DividedTritonAttention(Twins(rank))
        eager, cache = case.step(mirror=True), DividedCase(case, Twins(rank)).room(backend)
        static = eager._replace(is_static=True, is_decode=False, slots=torch.zeros(600, dtype=torch.int64))
        plan = backend.plan(static, case.group())
        call = attention.WorkListKey.of(backend, case.dtype, 4, cache, 0, plain=False)
        (few, many) = plan.lists.make(call)
        fits = plan.refill(eager._replace(host_rows=eager.row_index.numpy(), host_tables=eager.block_tables.numpy()))
        return fits, few.items.tolist(), many.items.tolist()

    assert lists(0) == lists(1)


def test_heads_of_all_ranks_lie_side_by_side(monkeypatch):
    """The address of a head within its token is computed in 32 bits, and is the same in steps of any length."""
    seen, plain = [], attention.attend
    monkeypatch.setattr(attention, "attend", lambda q, *rest, **named: (seen.append(q), plain(q, *rest, **named)))
    answers(Case(MIX, heads=8, kv_heads=1, size=16), WAYS[0], eager)
    assert len(seen) == 4 and all(q.shape[1:] == (8, 16) and q.is_contiguous() for q in seen)


def test_slots_of_a_rank():
    class Ranks:
        size, interleave, rank = 3, 2, 1

    slots = torch.tensor([-1, 0, 1, 2, 3, 4, 6, 8, 9, 12, 14, 15, 35])
    assert own_slots(slots, 12, Ranks()).tolist() == [-1, -1, -1, 0, 1, -1, -1, 2, 3, -1, 4, 5, -1]


@pytest.mark.parametrize("arch", SOME)
def test_logits_of_one_rank(arch, tmp_path, monkeypatch):
    """One head of keys, sinks and windows, chunks, latent vectors, and beside states."""
    monkeypatch.setattr("tests.paged.select_backend", lambda *_: WithStates(TritonAttention(fixed=False)))
    write_tiny(arch, tmp_path)
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 200) for _ in range(length)] for length in (19, 1, 10)]

    def run(group):
        return Paged(loaded(tmp_path, group), prompts, block_size=4).in_chunks(seed=1)

    wanted = run(ALONE)
    size, context = shape_of(loaded(tmp_path, ALONE))
    for found in on_ranks(size, run, context=context, in_turns=True):
        for own, whole in zip(found, wanted, strict=True):
            torch.testing.assert_close(own, whole, rtol=1e-4, atol=1e-4)
