"""Adapters on a GPU: the kernels against float64, and engines against merged weights in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from tests.lora_case import MIXES, LowRankCase
from tests.tiny_adapters import expert_modules, greedy, linear_modules, merge, write_adapter
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 9, 77, 100, 41, 8, 250, 33, 12], [7, 7, 30], list(range(4, 90))]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 8), (torch.bfloat16, 64), (torch.float16, 24)])
def test_kernels(mix: str, dtype: torch.dtype, rank: int) -> None:
    from quire.ops.triton.lora import add_low_rank

    case = LowRankCase(MIXES[mix], dtype, "cuda", rank=rank)
    result = add_low_rank(case.y.clone(), case.x, case.rows, case.low).cpu()
    limit = 1e-4 if dtype is torch.float32 else 0.3
    torch.testing.assert_close(result.double(), case.expected(), rtol=limit, atol=limit)


@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_engines(arch: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = make_tiny(arch, tmp_path / "model")
    modules = linear_modules(model, None) | expert_modules(model, (0, 2))
    adapters = [write_adapter(model, tmp_path / f"a{n}", modules=modules, seed=n, rank=4 * n) for n in (1, 2)]
    models = [model, *[merge(model, adapter) for adapter in adapters]]
    llm = LLM(
        str(tmp_path / "model"), dtype="float32", enable_lora=True, max_loras=2, max_lora_rank=8, max_model_len=256,
        kv_cache_memory_bytes=64 << 20, seed=0, **options,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    loras = [None, *[LoRARequest(f"a{n}", n, adapter.path) for n, adapter in enumerate(adapters, 1)]]
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in loras]
    answers = llm.generate(prompts, params, lora_request=loras * len(PROMPTS), use_tqdm=False)
    llm.close()
    expected = [greedy(one, prompt, 8) for prompt in PROMPTS for one in models]
    assert [list(answer.outputs[0].token_ids) for answer in answers] == expected
