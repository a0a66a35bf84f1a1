"""`make invariance`: batch-invariant mode through the engine, on the libraries and instruction sets of this machine.

Every declared architecture x float32, bfloat16 and packed weights x each instruction set and none: the bits of greedy
log probabilities are equal for 1, 2, 5, 9 and 48 rows, small chunks, preemption and steps made ahead. It takes minutes
on many cores, so that `make test` leaves it out: it asks for QUIRE_TEST_INVARIANCE.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base import env
from quire.ops.cpu.native import kernels, usable
from tests.engine.test_every_architecture import FEW_BLOCKS, STATES
from tests.tiny_models import ARCHS, VOCAB, write_tiny

ASKED = "QUIRE_TEST_INVARIANCE" in os.environ
pytestmark = pytest.mark.skipif(not ASKED, reason="`make invariance` runs it")
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "packed": {"dtype": "float32", "quantization": "int8_wo"},
}
COMMON: dict[str, Any] = {
    "max_model_len": 64, "kv_cache_memory_bytes": 16 << 20, "seed": 0, "device": "cpu", "max_num_seqs": 64,
}  # fmt: skip
# How many of the prompts, and the engine's options; the first run is what all others are compared with.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "48 rows": (48, {}),
    "1 row": (1, {}),
    "2 rows": (2, {"enable_prefix_caching": False}),
    "5 rows": (5, {"block_size": 8}),
    "9 rows": (9, {}),
    "small chunks": (9, {"max_num_batched_tokens": 11, "max_num_seqs": 5, "block_size": 8}),
    "look-ahead": (9, {"async_scheduling": True, "max_num_batched_tokens": 48, "max_num_seqs": 9}),
    "preemption": (9, {"max_num_batched_tokens": 64, "max_num_seqs": 9}),
}


@cache
def sets() -> tuple[str, ...]:
    """Instruction sets of this machine; `off`: everything in torch."""
    library = kernels() if ASKED else None
    return ("off",) if library is None else (*usable(library), "off")


@pytest.fixture
def chosen(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    library, before = kernels(), b""
    if request.param == "off":
        monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
        env.forget_all()
    else:
        assert library is not None
        before = library.qc_isa()
        assert library.qc_use_isa(request.param.encode()) >= 0
    yield request.param
    if library is not None and before:
        library.qc_use_isa(before)
    monkeypatch.undo()
    env.forget_all()


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    stem = [rng.randrange(4, VOCAB) for _ in range(20)]
    tails = [[rng.randrange(4, VOCAB) for _ in range(rng.choice([1, 2, 7, 19]))] for _ in range(48)]
    return [stem + tail if i % 2 else tail for i, tail in enumerate(tails)]


def preempt_often(planner: Any) -> list[str]:
    """Requests that lost their place in every second step, however few blocks a model needs."""
    fill, num_steps, lost = planner.fill, 0, list[str]()

    def disturbed() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps % 2 == 0 and len(planner.running.items) > 1:
            lost.append(planner.running.items[-1].id)
            planner.preempt(planner.running.items[-1])
        return fill()

    planner.fill = disturbed
    return lost


def bits_of(folder: Path, count: int, preempts: bool, **options: Any) -> list[list[tuple[int, float]]]:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    llm = LLM(str(folder), **{**COMMON, **options})
    try:
        lost = preempt_often(llm.llm_engine.front.client.loop.scheduler.planner) if preempts else []
        found = llm.generate(prompts()[:count], params, use_tqdm=False)
    finally:
        llm.close()
    assert len(lost) > 1 or not preempts
    outputs = [out.outputs[0] for out in found]
    return [[(t, e[t].logprob) for t, e in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs]


def few_blocks(arch: str) -> dict[str, Any]:
    """Room for a longest request and a little more, in every table; states are saved and reused instead."""
    if arch in STATES:
        return {"enable_prefix_caching": True, "num_gpu_blocks_override": 200}
    return {"block_size": 4, "num_gpu_blocks_override": 2 + FEW_BLOCKS.get(arch, 18) * 11 // 8}


@pytest.mark.parametrize("chosen", sets(), indirect=True)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arch", ARCHS)
def test_bits(arch: str, form: str, chosen: str, tmp_path: Path) -> None:
    if chosen == "off" and form == "packed":
        pytest.skip("packing is compiled code")
    write_tiny(arch, tmp_path)
    wanted: list[list[tuple[int, float]]] = []
    differing = []
    for name, (count, options) in RUNS.items():
        preempts = name == "preemption"
        own = {**options, **few_blocks(arch)} if preempts else options
        bits = bits_of(tmp_path, count, preempts, **FORMS[form], **own)
        wanted = wanted or bits
        if bits != wanted[:count]:
            differing.append(name)
    assert not differing
