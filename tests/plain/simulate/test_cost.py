"""The cost model: loads of plans against counting one by one, and times that no device could beat."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.gpu.models import MODELS
from quire.schema.errors import InputError
from quire.schema.step import Grant, StepPlan
from quire.simulate.cost import CachedPrefix, CostModel, StepLoad, load_of
from quire.simulate.devices import DEVICES, H200, find_device
from quire.simulate.shape import read_shape
from quire.simulate.topology import Topology
from tests.plain.simulate.small import shape

ONE = Topology()


def plan(*grants: tuple[int, int]) -> StepPlan:
    """Of (start, count)."""
    made = tuple(Grant(str(i), start, count, True, 0) for i, (start, count) in enumerate(grants))
    return StepPlan(step=1, grants=made, total_tokens=sum(count for _, count in grants))


def decode(rows: int, context: int) -> StepLoad:
    return load_of(plan(*[(context - 1, 1)] * rows), (0,))


def prompt(tokens: int) -> StepLoad:
    return load_of(plan((0, tokens)), (0,))


def test_pairs_and_keys_are_those_counted_one_by_one() -> None:
    rng, windows = random.Random(0), (0, 7, 50)
    for _ in range(300):
        start, count = rng.randrange(100), rng.randrange(1, 100)
        load = load_of(plan((start, count)), windows)
        for window in windows:
            pairs = sum(min(at + 1, window or at + 1) for at in range(start, start + count))
            parts = load.decode_keys[window], load.fresh_pairs[window], load.paged_pairs[window]
            assert parts == ((pairs, 0, 0) if count == 1 else (0, 0, pairs) if start else (0, pairs, 0))


def test_keys_that_rows_share_are_read_from_memory_once() -> None:
    prefixes = {"0": CachedPrefix(5, 64), "1": CachedPrefix(5, 64), "2": CachedPrefix(9, 64)}
    load = load_of(plan((99, 1), (79, 1), (99, 1), (99, 1)), (0,), prefixes)
    assert load.shared_keys == 64 and load.decode_keys[0] == 100 + 80 + 100 + 100 - 64
    cost = CostModel(shape(), H200, ONE)
    assert cost.keeps(CachedPrefix(5, 8000)) and not cost.keeps(CachedPrefix(5, 80_000))


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_no_step_is_faster_than_its_bytes_and_products(device: object) -> None:
    model = shape()
    cost = CostModel(model, device, ONE)
    for rows in (1, 8, 64, 256):
        load = decode(rows, 1000)
        num_bytes = 2 * model.num_params + rows * 1000 * 28 * 4096
        assert cost.stage_seconds(load) > num_bytes / (1.25 * device.weight_bandwidth)
    products = 2 * 8192 * (model.num_params - model.head_params)
    assert cost.stage_seconds(prompt(8192)) > products / device.matmul_rate


def test_more_work_takes_longer() -> None:
    cost = CostModel(shape(), H200, ONE)
    decodes = [cost.stage_seconds(decode(rows, 500)) for rows in (1, 2, 16, 64, 128, 129, 512)]
    contexts = [cost.stage_seconds(decode(64, context)) for context in (10, 100, 1000, 10_000)]
    prompts = [cost.stage_seconds(prompt(tokens)) for tokens in (16, 128, 129, 1000, 9000)]
    for times in (decodes, contexts, prompts):
        assert times == sorted(times) and times[0] < times[-1]


def test_tokens_up_to_the_next_tile_cost_little_more() -> None:
    cost = CostModel(shape(), H200, ONE)
    step = [cost.stage_seconds(prompt(tokens)) for tokens in (512, 513, 640)]
    assert step[2] - step[1] < step[1] - step[0]


def test_ranks_divide_the_work_and_pay_for_collectives() -> None:
    one, two, eight = (CostModel(shape(), H200, Topology(tensor_size=n)).stage_seconds(prompt(8192)) for n in (1, 2, 8))
    assert one / 2 < two < one and one / 8 < eight < two
    slow = replace(H200, link=replace(H200.link, bandwidth=1e9))
    assert CostModel(shape(), slow, Topology(tensor_size=2)).stage_seconds(prompt(8192)) > one
    far = CostModel(shape(num_attention_heads=32), H200, Topology(tensor_size=16))
    near = CostModel(shape(num_attention_heads=32), replace(H200, devices_per_machine=16), Topology(tensor_size=16))
    assert far.stage_seconds(prompt(8192)) > near.stage_seconds(prompt(8192))


def test_a_stage_has_its_share_of_layers() -> None:
    whole = CostModel(shape(), H200, ONE).stage_seconds(decode(32, 500))
    stage = CostModel(shape(), H200, Topology(pipeline_size=4)).stage_seconds(decode(32, 500))
    assert whole / 4 < stage < whole / 2


def test_few_tokens_read_few_experts() -> None:
    mixture = shape(num_experts=64, num_experts_per_tok=4, moe_intermediate_size=768, num_attention_heads=16)
    cost = CostModel(mixture, H200, ONE)
    one, many = cost.stage_seconds(decode(1, 10)), cost.stage_seconds(decode(64, 10))
    experts = 28 * 64 * mixture.expert_params * 2 / H200.expert_bandwidth
    assert many > experts and one < many / 3
    split = CostModel(mixture, H200, Topology(tensor_size=4, has_expert_parallel=True))
    assert split.stage_seconds(decode(64, 10)) != CostModel(mixture, H200, Topology(tensor_size=4)).stage_seconds(
        decode(64, 10)
    )


def test_devices_are_known_by_name_and_only_one_was_measured() -> None:
    assert find_device("h100").name == "H100"
    assert [device.name for device in DEVICES.values() if device.is_measured] == ["H200"]
    with pytest.raises(InputError, match="'TPU' is unknown; choose one of H200, "):
        find_device("TPU")


# Milliseconds of a captured step of Qwen3-8B by its tokens, without attention, on an H200 (docs/log.md, 2026-11-16).
CAPTURED = {
    128: 4.98, 256: 7.01, 384: 9.88, 448: 11.58, 512: 11.22, 544: 13.58, 576: 14.65, 640: 13.88, 704: 17.26,
    768: 18.19, 1024: 23.71, 2048: 44.95,
}  # fmt: skip


@pytest.mark.parametrize("tokens", CAPTURED)
def test_steps_of_every_size_take_as_long_as_measured(tokens: int) -> None:
    cost = CostModel(read_shape(MODELS["qwen3-8b"], "8B"), H200, ONE)
    load = StepLoad(tokens, 0, {0: 0}, 0, {0: 0}, {0: 0})
    assert cost.stage_seconds(load) * 1e3 == pytest.approx(CAPTURED[tokens], rel=0.10)
