"""A start of several ranks: what one of them finds on its disk, or what GPU it has, does not decide what it does
alone."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.quant.shard import ShardGroup
from quire.schema.errors import NotBuiltError
from quire.worker import mixed_graphs
from quire.worker.draft_setup import check_bits
from quire.worker.worker import Worker, WorkerParts
from tests.thread_ranks import on_ranks
from tests.worker.fakes import FakeBackend, FakeModel, make_config, make_layout

PARTS = WorkerParts(
    make_model=lambda config, device, group: FakeModel(),
    reload_weights=lambda model, config: None,
    update_config=lambda config, overrides: config,
    select_backend=lambda device, specs, name: FakeBackend(),
)


class DryRuns(Worker):
    """A dry run has the sums of a step in it."""

    num_dry_runs = 0

    def _compile(self, early: Any) -> None:
        self.group.reduce(torch.zeros(7))
        self.num_dry_runs += 1


@pytest.mark.parametrize(("missing", "expected"), [((), 0), ((1,), 1), ((0, 2), 1), ((0, 1, 2), 1)])
def test_all_ranks_make_a_dry_run_or_none_does(missing: tuple[int, ...], expected: int) -> None:
    """Each has a record of its kernels, in the cache of its own host: one may be gone, or could not be written."""

    def start(group: ShardGroup) -> int:
        manifest = SimpleNamespace(current=group.rank not in missing)
        early: Any = SimpleNamespace(manifest=manifest, compilers=None, close=lambda: None)
        worker = DryRuns(make_config(), torch.device("cpu"), PARTS, early=early, group=group)
        worker.load()
        group.reduce(torch.zeros(3))  # what comes next, of all ranks
        return worker.num_dry_runs

    assert on_ranks(3, start) == [expected] * 3


class WithGraphs(Worker):
    def _graph_sizes(self) -> tuple[int, ...]:
        return 1, 2


@pytest.mark.parametrize(("counts", "expected"), [((132, 132, 132), (16, 32, 64)), ((132, 132, 114), ())])
def test_graphs_of_prompts_on_gpus_of_one_size_only(
    counts: tuple[int, ...], expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a step fits such a graph goes by the multiprocessors of a GPU; where it does, tokens are padded."""
    monkeypatch.setattr(
        mixed_graphs, "multiprocessors", lambda device: counts[int(threading.current_thread().name.split()[1])]
    )

    def sizes(group: ShardGroup) -> tuple[int, ...]:
        config = make_config()
        config.compilation_config = SimpleNamespace(cudagraph_mode="FULL")
        worker = WithGraphs(config, torch.device("cpu"), PARTS, group=group)
        return worker._mixed_sizes(make_layout(FakeModel().kv_specs(4, "float32"), 8))

    assert on_ranks(3, sizes) == [expected] * 3


@pytest.mark.parametrize("others", [(), (1,), (0,), (1, 2)])
def test_ranks_with_other_instructions_do_not_draft(others: tuple[int, ...]) -> None:
    """On several machines: each rank finds by itself how many drafts were right."""

    def check(group: ShardGroup) -> str:
        isa = b"avx2" if group.rank in others else b"avx512"
        kernels: Any = SimpleNamespace(library=SimpleNamespace(qc_isa=lambda: isa), device=torch.device("cpu"))
        try:
            check_bits(group, kernels)
        except NotBuiltError as refused:
            return str(refused)
        return ""

    told = on_ranks(3, check)
    assert all(told) if others else not any(told)
    for rank, line in enumerate(told if others else ()):
        assert f"rank {1 if 0 in others else others[0]} has others than rank 0 (rank {rank}: " in line
        assert ("avx2)" if rank in others else "avx512)") in line
