"""Adapters on several ranks: logits are those of one rank that has all of the model and of every adapter, whether one
half of A and B is cut among the ranks or both (`fully_sharded_loras`), and whether experts are cut or whole.

One rank is compared with transformers in tests/engine/test_lora_models.py. The ordinary suite takes some architectures,
`make ranks` (pytest --every-architecture) all declared ones. Ranks are threads here;
tests/engine/test_lora_ranks.py has processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from quire.base import env
from quire.config import LoRAConfig
from quire.layers.linear import Linear
from quire.layers.moe import Experts, mixtures_of
from quire.loader.adapter import HostAdapter
from quire.ops.lora import AdapterRows, LowRankPiece, add_pieces
from quire.ops.lora_shards import AdapterShards, add_sharded_pieces
from quire.quant.shard import ALONE, ShardGroup
from quire.schema.adapters import AdapterPlacement, AdapterSource
from quire.worker.adapters import WorkerAdapters
from quire.worker.balance import ExpertBalance
from quire.worker.lora import give_slots
from tests.models.test_expert_ranks import stored
from tests.models.test_ranks import LOADING, check
from tests.paged import Paged
from tests.shard_rank import loaded
from tests.thread_ranks import on_ranks
from tests.tiny_adapters import expert_modules, linear_modules, write_adapter, write_stacked
from tests.tiny_models import ARCHS, make_tiny

PROMPTS = [[7, 9, 30, 4, 11, 80, 21, 6], [5, 6, 99, 17], [200, 12, 33, 150, 99, 41], [8, 8, 3, 5]]
SLOTS = [1, 0, 2, 3]  # of the rows
STEPS = ([(0, 6), (2, 5)], [(1, 2), (0, 1), (3, 3)], [(1, 2)], [(0, 1), (2, 1), (3, 1)])
STACKED = {"GptOssForCausalLM": "e i o", "Llama4ForCausalLM": "e o i"}  # adapters of all experts at once
RANKS = (4, 5, 1)  # of the adapters: one that two ranks divide evenly, one that they do not, one that only one has


TURNED = ("AriaTextForCausalLM",)  # whose experts `expert_modules` cannot name
NOT_OURS = ("indexer", "encoder_attn", "adapter_list", "shared_transformer", "experts.fc")  # computed otherwise, or not


class Ran(NamedTuple):
    logits: list[Tensor]
    num_bytes: int  # of the adapters in host memory


def write_adapters(arch: str, folder: Path) -> list[str]:
    """Of every matmul, of every second one, and of all but experts; of the embedding and the head, too."""
    model = make_tiny(arch, folder)
    modules, ends = linear_modules(model, None), linear_modules(model, ("embed_tokens", "lm_head", "wte"))
    modules = {name: shape for name, shape in modules.items() if not any(word in name for word in NOT_OURS)}
    experts = {} if arch in (*STACKED, *TURNED) else expert_modules(model, (0, 1, 3))
    parts = (modules | ends | experts, dict(list(modules.items())[::2]) | experts, modules | ends)
    paths = [
        write_adapter(model, folder / f"adapter {i}", modules=part, rank=rank, seed=i + 1).path
        for i, (rank, part) in enumerate(zip(RANKS, parts, strict=True))
    ]
    if arch in STACKED:
        more = {"axes": STACKED[arch], "config": {"peft_version": "0.21.2"}}
        paths[:2] = [
            write_stacked(model, folder / f"experts {i}", rank=rank, seed=i + 1, **more).path
            for i, rank in enumerate(RANKS[:2])
        ]
    return paths


def read_all(model: Any, paths: Sequence[str], *, both: bool, stacks: bool = False) -> WorkerAdapters:
    """Every adapter is read, and lies in the slot of its number. `stacks`: there is room for all slots of every matmul,
    as on a GPU."""
    lora = LoRAConfig(max_lora_rank=8, max_loras=3, fully_sharded_loras=both)
    adapters = give_slots(model, lora, torch.float32, model.storage.kernels)
    for layer in adapters._layers:
        if stacks and isinstance(layer, Linear) and layer.adapters is not None and layer.adapters.shards is not None:
            layer.adapters.set_up_shards(layer, 8, torch.empty(0))
    for serial, path in enumerate(paths, 1):
        adapters.begin(AdapterSource(serial=serial, name=path, path=path))
        (read,) = adapters.poll(60.0)
        assert read.error is None, read.error
        adapters.place([AdapterPlacement(serial=serial, slot=serial)])
    return adapters


def bytes_of(adapters: Sequence[HostAdapter]) -> int:
    """Of all memory that an adapter's numbers keep alive."""
    pieces: list[Any] = []
    for adapter in adapters:
        pieces += [piece for some in adapter.linears.values() for piece in some]
        pieces += adapter.tables.values()
        pieces += [p for of in adapter.experts.values() for own in of.values() for side in own for p in side]
    storages = {t.untyped_storage() for piece in pieces for t in piece if isinstance(t, Tensor)}
    by_address = {one.data_ptr(): one.nbytes() for one in storages}
    assert sum(by_address.values()) == sum(adapter.num_bytes for adapter in adapters)
    return sum(by_address.values())


def run(
    folder: Path, paths: Sequence[str], group: ShardGroup, *, both: bool = False, placement: str = "",
    stacks: bool = False, form: str = "",
) -> Ran:  # fmt: skip
    """`form`: of the model's weights."""
    group = replace(group, placement=placement)
    if form:
        model = stored(folder, group, form)
    else:
        with LOADING:
            model = loaded(folder, group)
    adapters = read_all(model, paths, both=both, stacks=stacks)
    paged = Paged(model, PROMPTS, block_size=4, slots=SLOTS)
    logits = [row for grants in STEPS for row in paged.step(grants)]
    for _ in range(2):  # slots are filled with other adapters, and rows computed that have none
        adapters.place([AdapterPlacement(serial=2, slot=1), AdapterPlacement(serial=1, slot=3)])
        logits += Paged(model, PROMPTS, block_size=4, slots=[3, 1, 0, 2]).whole()
    adapters.close()
    return Ran(logits, bytes_of(list(adapters._copies.values())))


def base_of(folder: Path) -> list[Tensor]:
    paged = Paged(loaded(folder, ALONE), PROMPTS, block_size=4)
    return [row for grants in STEPS for row in paged.step(grants)]


DENSE = (
    "LlamaForCausalLM", "Gemma3ForCausalLM",  # an embedding and a head with one matrix
    "Phi3ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM",  # fused matrices
    "DeepseekV3ForCausalLM",  # kv_b_proj, which is absorbed
    "Qwen3NextForCausalLM", "FalconH1ForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "Lfm2ForCausalLM",  # states
)  # fmt: skip
MIXTURES = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", *STACKED)  # Llama 4: weights multiply what goes in


def check_changes(whole: Ran, folder: Path) -> None:
    """Adapters change the rows that have some."""
    pairs = zip(whole.logits, base_of(folder), strict=False)
    changed = [not torch.allclose(one, other, atol=1e-2) for one, other in pairs]
    assert changed == [bool(SLOTS[row]) for grants in STEPS for row, _ in grants]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_two_ranks_give_the_logits_of_one:
        every = metafunc.config.getoption("--every-architecture")
        metafunc.parametrize("arch", [arch for arch in ARCHS if every or arch in DENSE])


def test_two_ranks_give_the_logits_of_one(arch: str, tmp_path: Path) -> None:
    paths = write_adapters(arch, tmp_path)
    whole = run(tmp_path, paths, ALONE)
    check_changes(whole, tmp_path)
    for both in (False, True):
        shares = on_ranks(2, partial(run, tmp_path, paths, both=both))
        check([one.logits for one in shares], whole.logits)


@pytest.mark.parametrize("placement", ["", "round_robin"], ids=["cut", "whole"])
@pytest.mark.parametrize("arch", MIXTURES)
def test_experts(arch: str, placement: str, tmp_path: Path) -> None:
    paths = write_adapters(arch, tmp_path)
    whole = run(tmp_path, paths, ALONE)
    check_changes(whole, tmp_path)
    for both in (False, True):
        shares = on_ranks(2, partial(run, tmp_path, paths, both=both, placement=placement))
        check([one.logits for one in shares], whole.logits)


def test_more_ranks_than_heads_of_keys(tmp_path: Path) -> None:
    """Neighbours have all rows of the same B, and some rows each of its A; adapters have fewer ranks than there are
    of the other kind."""
    paths = write_adapters("LlamaForCausalLM", tmp_path)
    whole = run(tmp_path, paths, ALONE)
    shares = on_ranks(4, lambda group: run(tmp_path, paths, group, both=True))
    check([one.logits for one in shares], whole.logits)


@pytest.mark.parametrize(("arch", "size"), [("LlamaForCausalLM", 4), ("Phi3ForCausalLM", 2)])
def test_steps_that_do_not_ask_which_slots_they_have(
    arch: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a graph holds them: the rows of one replay may have other slots than those of the next."""
    model = make_tiny(arch, tmp_path)
    modules = linear_modules(model, None)
    parts = (modules, dict(list(modules.items())[::2]), modules)
    paths = [
        write_adapter(model, tmp_path / f"adapter {i}", modules=part, rank=rank, seed=i, rslora=True).path
        for i, (rank, part) in enumerate(zip(RANKS, parts, strict=True))
    ]
    whole = run(tmp_path, paths, ALONE)
    check_changes(whole, tmp_path)

    def read_back(rows: AdapterRows) -> Any:
        raise AssertionError("a layer asks which slots the rows have")

    monkeypatch.setattr(AdapterRows, "groups", property(read_back))
    shares = on_ranks(size, lambda group: run(tmp_path, paths, group, both=True, stacks=True))
    check([one.logits for one in shares], whole.logits)


@pytest.mark.parametrize(("arch", "form"), [("LlamaForCausalLM", "fp8"), ("MixtralForCausalLM", "int8_wo")])
def test_quantized_weights(arch: str, form: str, tmp_path: Path) -> None:
    """Ranks round their own parts of a matrix, so one rank has other weights; adapters are not rounded."""
    paths = write_adapters(arch, tmp_path)
    one_half, both = (
        [share.logits for share in on_ranks(2, partial(run, tmp_path, paths, form=form, both=both))]
        for both in (False, True)
    )
    check(both, one_half[0])
    assert not all(map(torch.equal, both[0], run(tmp_path, paths, ALONE).logits))


@pytest.mark.parametrize("stacks", [False, True], ids=["by slot", "stacks"])
def test_a_row_does_not_depend_on_the_rows_beside_it(
    stacks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batch-invariant mode: the same bits, whichever adapters the others have."""
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    paths = write_adapters("LlamaForCausalLM", tmp_path)

    def together_and_alone(group: ShardGroup) -> tuple[list[Tensor], list[Tensor]]:
        with LOADING:
            model = loaded(tmp_path, group)
        assert model.storage.kernels.batch_invariant
        read_all(model, paths, both=True, stacks=stacks).close()
        everything = [(row, 1) for row in range(len(PROMPTS))]  # matmuls of one row add up in another order than others
        steps = [everything, *([grant] for grant in everything)]
        together, *alone = (Paged(model, PROMPTS, block_size=4, slots=(1, 0, 1, 1)).step(grants) for grants in steps)
        return together, [logits for (logits,) in alone]

    for together, alone in on_ranks(2, together_and_alone):
        assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def test_what_ranks_have_of_adapters(tmp_path: Path) -> None:
    """In bytes. Both halves are cut: every number is on one rank. One half is: the other is on both."""
    paths = write_adapters("LlamaForCausalLM", tmp_path)
    whole = run(tmp_path, paths, ALONE).num_bytes
    one_half, both = (
        [share.num_bytes for share in on_ranks(2, partial(run, tmp_path, paths, both=both))] for both in (False, True)
    )
    assert sum(both) == whole and max(both) < 0.55 * whole
    assert sum(one_half) > 1.3 * whole


def test_what_ranks_have_of_whole_experts(tmp_path: Path) -> None:
    """Adapters of the experts that they have; all else is on both."""
    model = make_tiny("MixtralForCausalLM", tmp_path)
    paths = [write_adapter(model, tmp_path / "adapter", modules=expert_modules(model, (0, 1, 3))).path] * 3
    whole = run(tmp_path, paths, ALONE).num_bytes
    shares = on_ranks(2, lambda group: run(tmp_path, paths, group, placement="linear").num_bytes)
    assert shares[0] == 2 * shares[1] and sum(shares) == whole


def test_experts_that_move(tmp_path: Path) -> None:
    """Adapters are where their experts are, copies included; those that are placed later, too."""
    paths = write_adapters("MixtralForCausalLM", tmp_path)

    def steps_of(model: Any) -> list[Tensor]:
        return Paged(model, PROMPTS, block_size=4, slots=SLOTS).whole()

    def moving(group: ShardGroup) -> tuple[list[list[Tensor]], list[Any]]:
        with LOADING:
            model = loaded(tmp_path, replace(group, placement="linear", redundant=1))
        assert group.broadcast is not None
        adapters, mixtures = read_all(model, paths, both=True), mixtures_of(model)
        balance = ExpertBalance(mixtures, group.broadcast, rank=group.rank, interval=1, window=1)
        logits, placements = [], []
        for busy in ((9, 0, 0, 500), (500, 9, 0, 0), (0, 500, 9, 1)):
            logits.append(steps_of(model))
            placements.append([share.placed for mixture in mixtures if (share := mixture.experts.share) is not None])
            for mixture in mixtures:
                share = mixture.experts.share
                assert share is not None and share.loads is not None
                share.loads.copy_(torch.tensor(busy))
            balance.end_step()
            adapters.place([AdapterPlacement(serial=1, slot=1)])
        held = [layer.adapters.slots for layer in adapters._layers if isinstance(layer, Experts) and layer.adapters]
        assert all(set(slots[0]) <= set(share.own) for slots in held)
        adapters.close()
        return logits, placements

    model = loaded(tmp_path, ALONE)
    read_all(model, paths, both=False).close()
    wanted = steps_of(model)
    shares = on_ranks(2, moving, moves=True)
    assert len({str(placed) for placed in shares[0][1]}) == 3, "experts have not moved"
    for turn in range(3):
        check([logits[turn] for logits, _ in shares], wanted)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("is_summed", [False, True], ids=["rows cut", "columns cut"])
def test_ranks_add_up_what_one_adds(size: int, is_summed: bool) -> None:
    """The op itself, for ranks that no size divides; pieces of several slots, one of them in scattered rows."""
    draw = torch.Generator().manual_seed(size)
    rows, width, tokens = 11 if is_summed else 10, 13, 6
    x, y = torch.randn(tokens, width, generator=draw), torch.randn(tokens, rows, generator=draw)

    def piece(start: int, stop: int, rank: int, scale: float) -> LowRankPiece:
        a, b = torch.randn(rank, width, generator=draw), torch.randn(stop - start, rank, generator=draw)
        return LowRankPiece(start, stop, a, b, scale)

    groups = [
        (slice(1, 3), (piece(0, rows, 4, 0.5),)),
        (torch.tensor([0, 5]), (piece(0, rows - 3, 3, 1.0), piece(rows - 3, rows, 7, 2.0))),
        (slice(3, 4), ()),
    ]
    wanted = y.clone()
    for some, pieces in groups:
        if pieces:
            add_pieces(wanted, x[some], some, pieces, torch.nn.functional.linear)

    def work(group: ShardGroup) -> Tensor:
        shards = AdapterShards(group.rank, group.size, group.reduce)
        columns = shards.own(width)

        def share(one: LowRankPiece) -> LowRankPiece:
            if not is_summed:
                return one._replace(a=one.a[shards.own(len(one.a))])
            own = shards.own(len(one.b))
            return one._replace(
                start=one.start + own.start, stop=one.start + own.stop, a=one.a[:, columns], b=one.b[own]
            )

        mine = y.clone() if group.rank == 0 or not is_summed else torch.zeros_like(y)
        add_sharded_pieces(
            mine, x[:, columns] if is_summed else x, [(some, tuple(map(share, own))) for some, own in groups], shards,
            torch.nn.functional.linear,
        )  # fmt: skip
        return group.reduce(mine) if is_summed else mine

    for own in on_ranks(size, work):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-5)
