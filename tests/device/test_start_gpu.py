"""A GPU engine's start: kernels compiled by other processes and kept, memory shared out as asked, clear refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.schema.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import make_tiny

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
START = """
import json, os, sys
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cuda", dtype="bfloat16", max_model_len=256, kv_cache_memory_bytes=64 << 20, seed=0,
          max_num_seqs=32)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
tokens = [list(out.outputs[0].token_ids) for out in llm.generate([[5, 6, 7], [9] * 40], params, use_tqdm=False)]
phases = [(p.name, p.inside) for p in llm.llm_engine.front.ready.phases]
print(json.dumps({"tokens": tokens, "phases": phases}))
"""


def start(folder: Path, cache: Path, processes: int) -> dict[str, Any]:
    """In a process of its own, with this kernel cache."""
    words = {"TRITON_CACHE_DIR": str(cache), "QUIRE_COMPILE_PROCESSES": str(processes)}
    command = ["env", *(f"{name}={value}" for name, value in words.items()), sys.executable, "-c", START, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_other_processes_compile_and_the_next_start_finds_all(arch: str, tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    make_tiny(arch, folder)
    first = start(folder, cache, 4)
    assert ["compile", "load"] in first["phases"]
    kept = sorted(cache.rglob("*.cubin"))
    assert kept and len(list(cache.glob("quire/*.json"))) == 1
    again = start(folder, cache, 4)
    assert ["compile", "load"] not in again["phases"]
    assert again["tokens"] == first["tokens"]
    assert sorted(cache.rglob("*.cubin")) == kept, "a start that found a current list compiled something"
    alone = start(folder, tmp_path / "other", 0)
    assert alone["tokens"] == first["tokens"]
    # what the dry run listed is what is wanted: compiling one by one makes no kernel that the processes did not
    assert {path.name for path in (tmp_path / "other").rglob("*.cubin")} <= {path.name for path in kept}


def test_short_launches_compute_the_same() -> None:
    from quire.ops.triton import norm, register

    register.compiled()
    (launcher,) = [one for one in register.launchers() if one.kernel is norm._norm_kernel]
    for width, dtype, skip in ((64, torch.bfloat16, 0), (64, torch.bfloat16, 1), (72, torch.float16, 0)):
        flat = torch.randn(5 * width + skip, device="cuda", dtype=dtype)
        x, weight = flat[skip:].view(5, width), torch.randn(width, device="cuda", dtype=dtype)
        found = [norm.rms_norm(x, weight, 1e-6) for _ in range(3)]  # the first goes Triton's way
        wanted = torch.nn.functional.rms_norm(x.float(), (width,), weight.float(), 1e-6)
        assert all(torch.equal(one, found[0]) for one in found)
        assert (found[0].float() - wanted).norm() / wanted.norm() < 1e-2
    assert any(known for _, known in launcher._readers.values())


def options(**more: Any) -> dict[str, Any]:
    return {"device": "cuda", "dtype": "float32", "seed": 0, "max_num_seqs": 8, **more}


def test_auto_length_is_what_fits(tmp_path: Path) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    whole = LLM(str(tmp_path), **options(max_model_len=-1, kv_cache_memory_bytes=64 << 20))
    longest = whole.llm_engine.front.ready.max_model_len
    whole.close()
    small = LLM(str(tmp_path), **options(max_model_len=-1, num_gpu_blocks_override=4, block_size=16))
    fitted = small.llm_engine.front.ready.max_model_len
    assert fitted == 64 < longest, (fitted, longest)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    (out,) = small.generate([[5] * 40], params, use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 24 and out.outputs[0].finish_reason == "length"
    small.close()


def test_blocks_follow_the_bytes_asked_for(tmp_path: Path) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    counts = []
    for size in (8 << 20, 16 << 20):
        llm = LLM(str(tmp_path), **options(max_model_len=128, kv_cache_memory_bytes=size))
        counts.append(llm.llm_engine.front.ready.num_blocks)
        llm.close()
    assert counts[1] == pytest.approx(2 * counts[0], abs=1)


def test_a_model_that_does_not_fit_says_so(tmp_path: Path) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(ConfigError, match=r"does not fit the GPU: .* GiB are free .*lower max_num_batched_tokens"):
            LLM(str(tmp_path), **options(max_model_len=128, kv_cache_memory_bytes=8 << 20))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_every_second_of_a_start_is_accounted_for(tmp_path: Path) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    llm = LLM(str(tmp_path), **options(max_model_len=128))
    ready = llm.llm_engine.front.ready
    outer = {phase.name: phase.seconds for phase in ready.phases if not phase.inside}
    total = ready.start_seconds["total"]
    assert total - 1 < sum(outer.values()) <= total  # what lies between phases takes no time worth a name
    names = {(phase.name, phase.inside) for phase in ready.phases}
    assert {("cuda", "device"), ("weights", "load"), ("largest step", "profile")} <= names
    assert {("prompt graphs", "warm_up"), ("decode graphs", "warm_up")} <= names
    llm.close()
