"""The scheduler fuzzer on a short budget with fixed seeds, and proof that it can fail: known faults are caught."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from quire.sched import kv_policy, prefix_hash
from quire.sched.blocks import BlockPool
from quire.sched.kv_cache import KVCache
from quire.sched.planner import Planner
from quire.sched.request import Request
from tests.plain.sched_fuzz import run_seed

SECONDS = 20.0


def test_no_invariant_breaks() -> None:
    seen, began, seed = Counter[str](), time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS and seed < 200:
        seen += run_seed(seed, 400)
        seed += 1
    assert seed >= 5, f"only {seed} seeds in {SECONDS} s"
    rare = {name: seen[name] for name in ("hits", "resumed", "aborted", "resets", "drafts") if seen[name] < seed}
    assert not rare, f"hardly exercised: {rare} in {dict(seen)}"


def early_window(policy: kv_policy.Window, computed: int) -> int:
    return max(0, computed - policy.window + 2) // policy.block_size


def early_state(policy: kv_policy.State, computed: int) -> int:
    return computed // policy.block_size


def keyless(given: Any, start: int, size: int) -> list[Any]:
    return []


def no_rewind(request: Request, num_accepted: int) -> None:
    request.end += num_accepted
    request.target = min(request.end, request.limit - 1)
    request.drafts = ()


def share_nothing(pool: BlockPool, blocks: Any) -> None:
    pass


def named_to_the_end(kv: KVCache, request: Request) -> None:
    """Names blocks by what is planned, drafts and unknown tokens included."""
    if kv.caching:
        table = request.held.tables[kv.growing[0][0]]
        for index in range(min(request.planned // kv.growing[0][1], len(request.held.hashes))):
            kv.pool.name(kv.growing[0][0], table[index], request.held.hashes[-1 - index])


def quiet_preempt(planner: Planner, request: Request) -> None:
    """Forgets to count the epoch up, so an old result is taken for a new one."""
    PREEMPT(planner, request)
    request.epoch -= 1


PREEMPT = Planner.preempt
FAULTS: list[tuple[object, str, Callable[..., Any]]] = [
    (kv_policy.Window, "first_needed", early_window),
    (kv_policy.State, "first_needed", early_state),
    (prefix_hash, "extra_keys", keyless),
    (Request, "judge", no_rewind),
    (BlockPool, "share", share_nothing),
    (KVCache, "name", named_to_the_end),
    (Planner, "preempt", quiet_preempt),
]


@pytest.mark.parametrize(("place", "name", "fault"), FAULTS, ids=[fault.__name__ for _, _, fault in FAULTS])
def test_faults_are_caught(monkeypatch: pytest.MonkeyPatch, place: object, name: str, fault: Any) -> None:
    monkeypatch.setattr(place, name, fault)
    with pytest.raises((AssertionError, LookupError)):
        for seed in range(60):
            run_seed(seed, 300)
