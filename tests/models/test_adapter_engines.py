"""Adapters of experts that ranks of several engines share: logits are those of one rank that has all of the model,
while each engine has adapters, slots and rows of its own, or none. Engines are threads here;
tests/engine/test_expert_adapters.py has processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from quire.config import LoRAConfig
from quire.layers.adapters import ExpertPieces
from quire.layers.moe import Experts, mixtures_of
from quire.ops.lora import LowRankPiece
from quire.quant.shard import ALONE, ShardGroup
from quire.schema.adapters import AdapterPlacement, AdapterSource
from quire.worker.adapters import WorkerAdapters
from quire.worker.balance import ExpertBalance
from quire.worker.lora import give_slots
from quire.worker.spread_adapters import pieces_received, pieces_sent
from tests.models.test_adapter_ranks import MIXTURES, read_all, write_adapters
from tests.models.test_ranks import LOADING, check
from tests.paged import Paged
from tests.shard_rank import loaded
from tests.thread_ranks import ThreadSpread, on_engines

PROMPTS = [[7, 9, 30, 4, 11, 80], [5, 6, 99, 17], [200, 12, 33, 150, 99]]
SOME = ("Qwen3MoeForCausalLM", "Llama4ForCausalLM")  # the latter's weights multiply what goes in
GRANTS = ([(0, 4), (1, 1)], [(0, 1), (1, 2), (2, 5)])
FIRST, SECOND, NO_EXPERTS = 1, 2, 3  # the adapters


class Part(NamedTuple):
    """What one engine has to do meanwhile."""

    placed: Mapping[int, int]  # slot -> adapter
    slots: Sequence[int] | None  # of the rows; None: there are none, and it takes part in the others' steps


IDLE = Part({}, None)
TURNS = (  # of two engines with two slots each
    (Part({1: FIRST, 2: SECOND}, (1, 0, 2)), Part({1: NO_EXPERTS}, (1, 1, 0))),
    (IDLE, Part({1: SECOND}, (0, 1, 1))),
    (Part({1: NO_EXPERTS}, (1, 2, 0)), IDLE),  # others have to forget what was in that slot
    (Part({}, (0, 0, 0)), Part({2: FIRST}, (2, 1, 0))),
    (Part({2: FIRST}, (1, 2, 2)), Part({}, (2, 1, 2))),
)


class Done(NamedTuple):
    engine: int
    logits: list[Tensor]
    held: int  # adapters of experts
    moved: int  # experts


def adapters_of_rows(engine: int) -> list[list[int] | None]:
    """Turn by turn."""
    there: dict[int, int] = {0: 0}
    rows = []
    for parts in TURNS:
        part = parts[engine]
        there |= part.placed
        rows.append(None if part.slots is None else [there[slot] for slot in part.slots])
    return rows


def expected(folder: Path, paths: Sequence[str]) -> list[list[Tensor]]:
    """By engine: what one rank computes."""
    model = loaded(folder, ALONE)
    read_all(model, paths, both=False).close()  # every adapter in the slot of its number

    def steps(slots: Sequence[int]) -> list[Tensor]:
        paged = Paged(model, PROMPTS, block_size=4, slots=slots)
        return [row for grants in GRANTS for row in paged.step(grants)]

    base = steps((0, 0, 0))
    for adapter in (FIRST, SECOND, NO_EXPERTS):
        changed = steps((adapter,) * 3)
        assert not any(torch.allclose(one, other, atol=1e-2) for one, other in zip(base, changed, strict=True))
    return [
        [row for slots in adapters_of_rows(engine) if slots is not None for row in steps(slots)] for engine in (0, 1)
    ]


def read(model: Any, paths: Sequence[str], both: bool) -> WorkerAdapters:
    lora = LoRAConfig(max_lora_rank=8, max_loras=2, fully_sharded_loras=both)
    adapters = give_slots(model, lora, torch.float32, model.storage.kernels)
    for serial, path in enumerate(paths, 1):
        adapters.begin(AdapterSource(serial=serial, name=path, path=path))
        (done,) = adapters.poll(60.0)
        assert done.error is None, done.error
    return adapters


def step_of(model: Any, spread: ThreadSpread, paged: Paged | None, grants: Sequence[tuple[int, int]]) -> list[Tensor]:
    if paged is not None:
        spread.begin(sum(count for _, count in grants))
        return paged.step(grants)
    assert spread.begin(0)
    with torch.inference_mode():
        for mixture in mixtures_of(model):
            mixture.idle()
    return []


def num_held(adapters: WorkerAdapters, group: ShardGroup) -> int:
    """Experts in slots: those that are here. In host memory are also those of the ranks of the same number of other
    engines, and no more."""
    assert group.spread is not None
    held = 0
    for layer in adapters._layers:
        if not isinstance(layer, Experts):
            continue
        assert layer.adapters is not None and layer.share is not None
        held += sum(map(len, layer.adapters.slots))
        assert all(set(slot) <= set(layer.share.own) for slot in layer.adapters.slots)
        if not layer.share.moves:
            near = {expert for rank in group.spread.peers for expert in layer.share.placed[rank]}
            assert all(set(copy.experts.get(layer, ())) <= near for copy in adapters._copies.values())
    return held


def engine(folder: Path, paths: Sequence[str], group: ShardGroup, *, placement: str, both: bool = False) -> Done:
    """As one rank of one engine."""
    moves, spread = group.broadcast is not None, group.spread
    assert isinstance(spread, ThreadSpread)
    with LOADING:
        model = loaded(folder, replace(group, placement=placement, redundant=int(moves)))
    adapters, mixtures = read(model, paths, both), mixtures_of(model)
    balance = None
    if group.broadcast is not None:
        balance = ExpertBalance(mixtures, group.broadcast, rank=group.expert_rank, interval=1, window=1)
    logits: list[Tensor] = []
    for parts in TURNS:
        part = parts[spread.engine]
        adapters.place(AdapterPlacement(serial=adapter, slot=slot) for slot, adapter in part.placed.items())
        paged = None if part.slots is None else Paged(model, PROMPTS, block_size=4, slots=part.slots)
        before = spread.num_exchanges
        for grants in GRANTS:
            logits += step_of(model, spread, paged, grants)
            if balance is not None:
                balance.end_step()
        has_news = any(one.placed and set(one.placed.values()) != {NO_EXPERTS} for one in parts) or parts == TURNS[2]
        assert spread.num_exchanges == before + (len(mixtures) if has_news else 0)
    held = num_held(adapters, group)
    adapters.close()
    return Done(spread.engine, logits, held, 0 if balance is None else balance.num_moved)


def check_all(done: Sequence[Done], wanted: Sequence[list[Tensor]]) -> None:
    for one in done:
        check([one.logits], wanted[one.engine])
    assert sum(one.held for one in done)


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch in SOME else pytest.mark.long) for arch in MIXTURES]
)
def test_engines_with_adapters_of_their_own_give_the_logits_of_one(arch: str, tmp_path: Path) -> None:
    paths = write_adapters(arch, tmp_path)
    wanted = expected(tmp_path, paths)
    check_all(on_engines(2, 1, partial(engine, tmp_path, paths, placement="linear")), wanted)


def test_engines_with_two_ranks_each(tmp_path: Path) -> None:
    paths = write_adapters("MixtralForCausalLM", tmp_path)
    wanted = expected(tmp_path, paths)
    check_all(on_engines(2, 2, partial(engine, tmp_path, paths, placement="round_robin", both=True)), wanted)


def test_experts_that_move_between_engines(tmp_path: Path) -> None:
    paths = write_adapters("MixtralForCausalLM", tmp_path)
    wanted = expected(tmp_path, paths)
    done = on_engines(2, 1, partial(engine, tmp_path, paths, placement="linear"), moves=True)
    check_all(done, wanted)
    assert all(one.moved for one in done)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pieces_arrive_as_they_were_sent(dtype: torch.dtype) -> None:
    def piece(start: int, stop: int, rank: int) -> LowRankPiece:
        a, b = torch.randn(rank, 6), torch.randn(stop - start, rank)
        return LowRankPiece(start, stop, a.to(dtype), b.to(dtype), 2 / 3)

    pieces = {
        1: ExpertPieces(up=(piece(0, 4, 2), piece(4, 8, 3))),
        5: ExpertPieces(up=(piece(4, 8, 1),), down=(piece(0, 6, 1),)),
    }
    received = pieces_received(pieces_sent(pieces), dtype)
    assert received.keys() == pieces.keys()
    for expert, own in pieces.items():
        for side, other in zip(own, received[expert], strict=True):
            for one, same in zip(side, other, strict=True):
                assert (one.start, one.stop, one.scale) == (same.start, same.stop, same.scale)
                assert torch.equal(one.a, same.a) and torch.equal(one.b, same.b) and same.a.dtype is dtype
