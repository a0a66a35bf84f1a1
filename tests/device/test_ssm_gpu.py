"""Mixers with running states on CUDA: each kernel against its reference, and hybrid models through the whole engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from quire import LLM, SamplingParams
from quire.base import env
from quire.ops import ssm as reference
from quire.ops.triton import ssm, ssm_chunk
from tests import ssm_cases as cases

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import make_tiny

from tests.device.test_engine_gpu import COMMON, RUNS, greedy, prompts_of, tokens_of

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
SIZES = [16, 1072, 1 << 30]
ROWS = [*cases.ROWS, [(0, 1500), (300, 700), (17, 1), (5, 64)]]
HYBRIDS = (
    "Qwen3NextForCausalLM", "BambaForCausalLM", "Mamba2ForCausalLM", "JambaForCausalLM", "Lfm2ForCausalLM",
    "FalconH1ForCausalLM",
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS, ids=range(len(ROWS)))
def test_convolution(rows, size, dtype):
    for taps, bias, act, channels in ((4, True, "silu", 8192), (3, False, "", 70), (2, True, "silu", 500)):
        args, states, work = cases.conv_case(rows, size, "cuda", dtype, taps=taps, bias=bias, channels=channels)
        cases.compare(ssm.causal_conv, reference.causal_conv, args, states, work, (act,), TOLERANCE[dtype])


SSD = [dict(heads=8, size=64, groups=1, entries=128), dict(heads=6, size=20, groups=2, entries=24),
       dict(heads=4, size=64, groups=4, entries=256)]  # fmt: skip
DELTA = [dict(key_heads=2, heads=4, keys=128, values=128), dict(key_heads=2, heads=2, keys=24, values=20),
         dict(key_heads=1, heads=4, keys=96, values=192)]  # fmt: skip


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS, ids=range(len(ROWS)))
def test_mamba2(rows, size, dtype, fixed):
    for shape in SSD:
        args, states, work = cases.ssd_case(rows, size, "cuda", dtype, **shape)
        form = lambda *given: ssm_chunk.ssd_scan(*given, fixed=fixed)  # noqa: E731
        cases.compare(form, reference.ssd_scan, args, states, work, (), TOLERANCE[dtype])


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS, ids=range(len(ROWS)))
def test_gated_delta(rows, size, dtype, fixed):
    for shape in DELTA:
        args, states, work = cases.delta_case(rows, size, "cuda", dtype, **shape)
        form = lambda *given: ssm_chunk.delta_scan(*given, fixed=fixed)  # noqa: E731
        cases.compare(form, reference.delta_scan, args, states, work, (), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS, ids=range(len(ROWS)))
def test_mamba1(rows, size, dtype):
    for channels, entries in ((8192, 16), (50, 12)):
        args, states, work = cases.selective_case(rows, size, "cuda", dtype, channels=channels, entries=entries)
        cases.compare(ssm.selective_scan, reference.selective_scan, args, states, work, (), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_gated_norm(first, shared, dtype):
    for group, groups in ((128, 32), (40, 3), (8192, 1)):
        args = cases.norm_case("cuda", dtype, shared=shared, group=group, groups=groups, tokens=33)
        want = reference.gated_rms_norm.reference(*args, first)
        cases.close(ssm.gated_rms_norm(*args, first), want, TOLERANCE[dtype])


def test_places_of_a_captured_step():
    cases.check_places(lambda *args: tuple(t.cpu() for t in ssm.state_places(
        *(a.cuda() if isinstance(a, torch.Tensor) else a for a in args))))  # fmt: skip


@pytest.mark.parametrize("arch", HYBRIDS)
def test_greedy_tokens_equal_the_cpus(arch: str, tmp_path: Path) -> None:
    make_tiny(arch, tmp_path)
    prompts = prompts_of(3)
    wanted = tokens_of(tmp_path, prompts, greedy(), device="cpu")
    reuse = {"enable_prefix_caching": True, "block_size": 8, "max_num_batched_tokens": 64}
    for name, options in {**RUNS, "prefix reuse": reuse}.items():
        assert tokens_of(tmp_path, prompts, greedy(), device="cuda", **options) == wanted, name


@pytest.mark.parametrize("arch", ("Qwen3NextForCausalLM", "BambaForCausalLM", "JambaForCausalLM"))
def test_batch_invariant_mode(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    make_tiny(arch, tmp_path)
    prompts = prompts_of(11)
    common = {"device": "cuda", "dtype": "bfloat16"}
    wanted = tokens_of(tmp_path, prompts, greedy(), **common)
    for name, options in RUNS.items():
        assert tokens_of(tmp_path, prompts, greedy(), **common, **options) == wanted, name


def test_a_steady_decode_never_waits_for_the_device(tmp_path: Path) -> None:
    make_tiny("Qwen3NextForCausalLM", tmp_path)
    llm = LLM(str(tmp_path), device="cuda", **COMMON)
    params: Any = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for i, prompt in enumerate(prompts_of(1)):
        llm.llm_engine.add_request(f"r{i}", {"prompt_token_ids": prompt}, params)
    loop = llm.llm_engine.front.client.loop
    while loop.scheduler.num_waiting or not loop.scheduler.num_running:
        llm.llm_engine.step()
    for _ in range(4):
        llm.llm_engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            llm.llm_engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loop.scheduler.num_running == 12
    llm.close()
