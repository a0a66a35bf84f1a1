"""Expert parallelism: ranks with whole experts give the logits of one that has all of them.

The ordinary suite takes one of each kind; `make ranks` (pytest --every-architecture) takes all mixtures. Ranks are
threads here; tests/engine/test_ranks_engine.py has processes.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config import EngineArgs
from quire.layers.moe import Experts, ExpertShare, mixtures_of
from quire.loader.load import load_model
from quire.ops.op import Kernels
from quire.quant.shard import ALONE, ShardGroup
from quire.schema.errors import ConfigError
from quire.worker.balance import ExpertBalance
from tests.models.test_ranks import LOADING, check
from tests.shard_rank import loaded, size_of, steps
from tests.thread_ranks import on_ranks
from tests.tiny_models import ARCHS, write_tiny

# one by one, shared experts and groups, stacked with biases, weights that multiply what goes in
SOME = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM")


@cache
def mixtures() -> tuple[str, ...]:
    words = ("expert", "moe")
    return tuple(name for name, options in ARCHS.items() if any(word in key for key in options for word in words))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mixture" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-architecture")
        metafunc.parametrize("mixture", sorted({*SOME, *mixtures()}) if every else SOME)


def experts_of(model: Any) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def answers(folder: Path, group: ShardGroup, placement: str) -> tuple[list[Tensor], int, list[int]]:
    with LOADING:
        model = loaded(folder, replace(group, placement=placement))
    return steps(model), size_of(model), [layer.stored.shape.experts for layer in experts_of(model)]


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_two_ranks_with_whole_experts_give_the_logits_of_one(mixture: str, placement: str, tmp_path: Path) -> None:
    write_tiny(mixture, tmp_path)
    whole = loaded(tmp_path, ALONE)
    counts = [layer.stored.shape.experts for layer in experts_of(whole)]
    if not counts:
        assert mixture not in SOME, "these have experts: nothing may be skipped"
        pytest.skip("no mixture")
    shares = on_ranks(2, lambda group: answers(tmp_path, group, placement))
    assert [sum(own) for own in zip(*(experts for _, _, experts in shares), strict=True)] == counts
    assert all(size < 0.75 * size_of(whole) for _, size, _ in shares)
    check([logits for logits, _, _ in shares], steps(whole))


def stored(folder: Path, group: ShardGroup, form: str | None) -> Any:
    """The model of a folder, its weights rounded to `form`."""
    args = EngineArgs(
        model=str(folder), dtype="float32", max_model_len=64, skip_tokenizer_init=True, device="cpu", quantization=form
    )
    with LOADING:
        return load_model(args.create_engine_config(), "cpu", group)


@pytest.mark.parametrize("form", ["fp8", "int8_wo"])
@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_quantized_experts(form: str, placement: str, tmp_path: Path) -> None:
    write_tiny("MixtralForCausalLM", tmp_path)

    whole = stored(tmp_path, ALONE, form)
    assert {layer.stored.name for layer in experts_of(whole)} != {"stacked"}
    plain = steps(loaded(tmp_path, ALONE))
    wanted = steps(whole)
    assert any(not torch.equal(a, b) for a, b in zip(plain, wanted, strict=True))
    shares = on_ranks(2, lambda group: steps(stored(tmp_path, replace(group, placement=placement), form)))
    check(shares, wanted)


@pytest.mark.parametrize("form", [None, "fp8", "int8_wo"])
def test_experts_that_move(form: str | None, tmp_path: Path) -> None:
    """Whatever the loads are: the logits stay, and each rank keeps as many experts."""
    write_tiny("MixtralForCausalLM", tmp_path)

    def moving(group: ShardGroup) -> tuple[list[list[Tensor]], list[Any]]:
        model, rng = stored(tmp_path, replace(group, placement="linear", redundant=1), form), random.Random(5)
        assert group.broadcast is not None
        mixtures = mixtures_of(model)
        balance = ExpertBalance(mixtures, group.broadcast, rank=group.rank, interval=2, window=1)
        logits, placements = [steps(model)], [[mixture.experts.share.placed for mixture in mixtures]]
        for turn in range(6):
            for mixture in mixtures:
                mixture.experts.share.loads.copy_(torch.tensor([rng.choice((0, 3, 500)) for _ in range(4)]))
            balance.end_step()
            assert turn % 2 or len(placements) == 1 + turn // 2  # nothing moves in between
            if turn % 2:
                logits.append(steps(model))
                placements.append([mixture.experts.share.placed for mixture in mixtures])
        assert balance.num_moved > 0
        return logits, placements

    wanted = steps(stored(tmp_path, ALONE, form))
    shares = on_ranks(2, moving, moves=True)
    assert shares[0][1] == shares[1][1] and len({str(placed) for placed in shares[0][1]}) > 1
    assert {tuple(map(len, placed)) for layers in shares[0][1] for placed in layers} == {(2, 3)}
    for turn in range(4):
        check([logits[turn] for logits, _ in shares], wanted)


def test_which_experts_a_rank_has() -> None:
    def own(rank: int, size: int, placement: str, count: int) -> tuple[int, ...] | None:
        return ShardGroup(rank, size, placement=placement).own_experts(count)

    assert [own(rank, 2, "linear", 5) for rank in (0, 1)] == [(0, 1), (2, 3, 4)]
    assert [own(rank, 2, "round_robin", 5) for rank in (0, 1)] == [(0, 2, 4), (1, 3)]
    assert own(0, 1, "linear", 5) is None and own(1, 2, "", 5) is None
    for placement in ("linear", "round_robin"):
        shares = [own(rank, 7, placement, 60) for rank in range(7)]
        assert sorted(expert for share in shares for expert in share or ()) == list(range(60))
        assert {len(share or ()) for share in shares} == {8, 9}
    with pytest.raises(ConfigError, match="4 experts cannot be shared out among 8 ranks"):
        own(0, 8, "linear", 4)


@pytest.mark.parametrize("redundant", [0, 3])
@pytest.mark.parametrize("arch", ["Qwen3MoeForCausalLM", "Llama4ForCausalLM", "LongcatFlashForCausalLM"])
def test_shapes_that_do_not_depend_on_the_choice(arch: str, redundant: int, tmp_path: Path) -> None:
    """As on a GPU, where a graph has been captured: all pairs go to the kernels, with -1 for experts of other ranks."""
    write_tiny(arch, tmp_path)

    def static(group: ShardGroup) -> list[Tensor]:
        with LOADING:
            model = loaded(tmp_path, replace(group, placement="round_robin", redundant=redundant))
        for layer in experts_of(model):
            assert layer._share is not None and not layer._share._is_static
            assert layer.stored.shape.all_experts == layer._share.count + redundant > layer.stored.shape.experts
            layer._share._is_static = True
        return steps(model)

    check(on_ranks(2, static), steps(loaded(tmp_path, ALONE)))


def test_choices_as_a_gpu_makes_them_are_counted() -> None:
    """Triton's routing gives numbers of 32 bits."""
    share = ExpertShare(((1, 3), (0, 2)), 0, 4, Kernels.here("cpu"), counts=True)
    stored: Any = SimpleNamespace(multiply=lambda x, weights, index: x)
    index = torch.tensor([[0, 3], [3, 1]], dtype=torch.int32)
    share.multiply(stored, torch.zeros(2, 4), torch.ones(2, 2), index[:, :1])
    share._is_static = True
    share.multiply(stored, torch.zeros(2, 4), torch.ones(2, 2), index)
    assert share.loads is not None and share.loads.tolist() == [2, 1, 0, 3]
    assert share.find(index).tolist() == [[-1, 1], [1, 0]]
