"""In bfloat16 on the GPU, logits stay as near to float32 as bfloat16 allows: no further than twice what the CPU's own
bfloat16 run, whose products and sums are the references, strays."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import VOCAB, make_tiny

pytestmark = pytest.mark.gpu
COMMON: dict[str, Any] = {
    "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20, "seed": 0, "logprobs_mode": "raw_logits",
    "max_logprobs": -1, "enable_prefix_caching": False,
}  # fmt: skip


def logits_of(folder: Path, prompts: list[list[int]], **options: Any) -> torch.Tensor:
    """[tokens, VOCAB]: the logits behind every prompt token."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    llm = LLM(str(folder), **COMMON, **options)
    try:
        found = llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.close()
    rows = [entry for out in found for entry in out.prompt_logprobs[1:]]
    return torch.tensor([[row[token].logprob for token in range(VOCAB)] for row in rows])


ARCHS = (
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
)


@pytest.mark.parametrize("arch", ARCHS)
def test_logits_are_within_bfloat16_of_float32(arch: str, tmp_path: Path) -> None:
    make_tiny(arch, tmp_path)
    rng = random.Random(1)
    prompts = [[rng.randrange(4, VOCAB) for _ in range(length)] for length in (3, 17, 40, 90)]
    exact = logits_of(tmp_path, prompts, device="cpu", dtype="float32")
    cpu = logits_of(tmp_path, prompts, device="cpu", dtype="bfloat16")
    gpu = logits_of(tmp_path, prompts, device="cuda", dtype="bfloat16")
    strays = (cpu - exact).square().mean().sqrt()
    assert strays > 0
    assert (gpu - exact).square().mean().sqrt() <= 2 * strays
