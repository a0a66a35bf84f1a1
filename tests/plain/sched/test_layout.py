"""place() and fit_length(): groups, slots, pages and the numbers in an error."""

from __future__ import annotations

import pytest

from quire.sched.kv_layout import arrange, blocks_needed, fit_length, place
from quire.sched.scheduler import Scheduler
from quire.sched.settings import SchedulerSettings
from quire.schema.errors import ConfigError
from quire.schema.kv import KVKind, KVLayout, KVSpec
from quire.schema.step import StepResult
from tests.plain.sched.kit import request

GIB = 1 << 30


def attention(name: str, *, heads: int = 2, window: int = 0, kind: KVKind | None = None, size: int = 16) -> KVSpec:
    return KVSpec(
        layer=name,
        kind=kind or (KVKind.WINDOW if window else KVKind.FULL),
        block_size=size,
        num_kv_heads=heads,
        head_size=8,
        window=window,
    )


def state(name: str, numbers: int, size: int = 16) -> KVSpec:
    return KVSpec(layer=name, kind=KVKind.STATE, block_size=size, state_shapes=((numbers,),), state_dtypes=("float32",))


def check(layout: KVLayout, specs: list[KVSpec]) -> None:
    """Every layer is in one group and one slot, and no slot has two layers of a group."""
    names = [spec.layer for spec in specs]
    assert sorted(name for group in layout.groups for name in group.layers) == sorted(names)
    assert sorted(name for slot in layout.slots for name in slot) == sorted(names)
    assert [spec.layer for spec in layout.specs] == names
    final = {spec.layer: spec for spec in layout.specs}
    for group in layout.groups:
        assert {(final[n].kind, final[n].window, final[n].block_size) for n in group.layers} == {
            (group.kind, group.window, group.block_size)
        }
        for slot in layout.slots:
            assert len(set(slot) & set(group.layers)) <= 1
    assert all(spec.page_bytes <= layout.page_bytes for spec in layout.specs)


def test_one_kind_is_one_group() -> None:
    specs = [attention(f"l{i}") for i in range(5)]
    layout = place(specs, 1 << 20, max_model_len=128, max_num_seqs=2)
    check(layout, specs)
    page = 16 * 2 * (8 + 8) * 4
    assert (len(layout.groups), len(layout.slots), layout.page_bytes) == (1, 5, page)
    assert layout.num_blocks == (1 << 20) // (page * 5)
    assert (1 << 20) - page * 5 < layout.total_bytes <= 1 << 20


def test_windows_and_full_layers_share_slots() -> None:
    specs = [attention(f"l{i}", window=0 if i % 6 == 5 else 1024) for i in range(62)]  # 10 full, 52 windowed
    layout = place(specs, GIB, max_model_len=131072, max_num_seqs=2, max_num_batched_tokens=2048)
    check(layout, specs)
    assert len(layout.slots) == 11 and [len(group.layers) for group in layout.groups] == [11, 11, 11, 11, 8, 10]


def test_nearly_equal_counts_are_not_torn_apart() -> None:
    specs = [attention(f"l{i}", window=0 if i % 2 else 4096) for i in range(61)]  # 30 and 31
    layout = place(specs, GIB, max_model_len=4096, max_num_seqs=2)
    check(layout, specs)
    assert [len(group.layers) for group in layout.groups] == [31, 30]


def test_smaller_pages_hold_more_tokens() -> None:
    specs = [attention("wide", heads=8), attention("narrow", heads=2), attention("odd", heads=3)]
    layout = arrange(specs, 1024)
    check(layout, specs)
    assert [spec.block_size for spec in layout.specs] == [16, 64, 16]
    assert layout.page_bytes == specs[0].page_bytes


def test_attention_pages_grow_to_a_states_and_snapshots_follow_them() -> None:
    specs = [attention("a"), state("s", 3000)]  # 2048 bytes against 12000
    layout = arrange(specs, 4096)
    check(layout, specs)
    assert [spec.block_size for spec in layout.specs] == [96, 96] and layout.page_bytes == 6 * 2048
    assert [spec.block_size for spec in arrange([attention("a"), state("s", 3000, 4096)], 4096).specs] == [96, 43 * 96]


def test_the_override_replaces_the_bytes() -> None:
    assert place([attention("a")], 0, num_blocks=9, max_model_len=128, max_num_seqs=1).num_blocks == 9


def test_too_small_says_how_much_and_what_to_do() -> None:
    specs = [attention("a")]
    with pytest.raises(ConfigError) as caught:
        place(specs, 4 * 2048, max_model_len=100, max_num_seqs=1)
    message = str(caught.value)
    for part in ("max_model_len=100", "7 KV blocks", "4 blocks of 2048 bytes", "at most 64", "gpu_memory_utilization"):
        assert part in message
    assert place(specs, 4 * 2048, max_model_len=64, max_num_seqs=1).num_blocks == 4
    with pytest.raises(
        ConfigError, match=r"num_gpu_blocks_override=4: lower max_model_len to at most 64, or raise num"
    ):
        place(specs, GIB, num_blocks=4, max_model_len=100, max_num_seqs=1)
    with pytest.raises(ConfigError, match=r"hold 0 blocks .*: raise gpu_memory_utilization"):
        place(specs, -5, max_model_len=100, max_num_seqs=1)


def test_a_window_needs_no_more_than_its_window_and_a_step() -> None:
    layout = arrange([attention("w", window=100)], 100_000, 64)
    assert blocks_needed(layout, 100_000, 64) == -(-(100 + 64 + 14) // 16) + 1
    assert blocks_needed(layout, 100_000) == 6250, "a step may compute all of it"


@pytest.mark.parametrize("blocks", [2, 3, 40])
def test_the_longest_that_fits(blocks: int) -> None:
    specs = [attention("a"), attention("b"), attention("w", window=8)]
    layout = arrange(specs, 500, 32)
    free = blocks * layout.page_bytes * len(layout.slots)
    length = fit_length(specs, free, longest=500, max_num_batched_tokens=32)
    place(specs, free, max_model_len=length, max_num_seqs=1, max_num_batched_tokens=32)
    if length < 500:
        with pytest.raises(ConfigError):
            place(specs, free, max_model_len=length + 1, max_num_seqs=1, max_num_batched_tokens=32)
    else:
        assert blocks == 40


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError, match=r"no request of 2 tokens fits"):
        fit_length([attention("a")], 100, longest=500)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([attention("a"), attention("a")], "given more than once: a"),
        ([attention("a", heads=0)], "layer 'a' keeps 0 bytes"),
        ([attention("a", kind=KVKind.WINDOW)], "with window 0"),
    ],
)
def test_specs_that_make_no_sense(specs: list[KVSpec], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(specs, GIB, max_model_len=100, max_num_seqs=1)


def test_too_few_blocks_for_all_sequences_is_said(caplog: pytest.LogCaptureFixture) -> None:
    place([attention("a")], 0, num_blocks=9, max_model_len=16, max_num_seqs=10)
    assert "9 KV blocks are fewer than one per group for each of max_num_seqs=10" in caplog.text


def test_a_model_that_keeps_nothing_has_no_blocks() -> None:
    layout = place([], 1 << 20, max_model_len=64, max_num_seqs=2)
    assert (layout.num_blocks, layout.total_bytes, blocks_needed(layout, 64)) == (0, 0, 0)
    assert fit_length([], 0, longest=512) == 512
    scheduler = Scheduler(SchedulerSettings(max_model_len=64), layout)
    scheduler.add(request("a", 12, max_tokens=1))
    plan = scheduler.plan()
    assert [(grant.count, grant.samples, grant.new_blocks) for grant in plan.grants] == [(12, True, ())]
    (done,) = scheduler.commit(plan, StepResult(step=plan.step, sampled=[[7]]))
    assert done.finish_reason is not None
    scheduler.audit()


def test_stages_have_slots_of_their_own() -> None:
    """Each stage's memory is for its layers, and every group is on both, so that no block is wasted on one."""
    specs = [attention(f"l{i}", window=0 if i % 6 == 5 else 1024) for i in range(62)]  # 10 full, 52 windowed
    names = [spec.layer for spec in specs]
    stages = (tuple(names[:31]), tuple(names[31:]))
    common = dict(max_model_len=32768, max_num_seqs=2, max_num_batched_tokens=2048)
    whole = place(specs, 1 << 30, **common)
    layout = place(specs, [1 << 29, 1 << 28], stages=stages, **common)
    check(layout, specs)
    assert [g.kind for g in layout.groups] == [g.kind for g in whole.groups]
    parts = [layout.only(set(layers)) for layers in stages]
    for part, layers in zip(parts, stages, strict=True):
        assert {name for slot in part.slots for name in slot} == {spec.layer for spec in part.specs} == set(layers)
        assert len(part.groups) == len(layout.groups) and part.num_blocks == layout.num_blocks
    assert sum(len(part.slots) for part in parts) == len(layout.slots) <= len(whole.slots) + 1
    assert parts[1].total_bytes <= 1 << 28 < parts[1].total_bytes + len(parts[1].slots) * layout.page_bytes
    assert layout.only(set(names)) is layout


def test_a_stage_without_a_cache_needs_no_memory() -> None:
    specs = [attention("a"), attention("b")]
    layout = place(specs, [0, 1 << 20], stages=((), ("a", "b")), max_model_len=64, max_num_seqs=1)
    assert layout.num_blocks == (1 << 20) // (2 * layout.page_bytes) and not layout.only(()).slots
    assert fit_length(specs, [0, 1 << 20], stages=((), ("a", "b")), longest=64) == 64
