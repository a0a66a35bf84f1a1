"""Checkpoints have rows, matrices and whole layers of zeros: padded vocabularies, layers that have learned nothing yet.
In every form that rounds, zeros are zeros: what is divided by the largest of a row is never a number over zero."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.loader.online import coder_of
from quire.ops.coded import CodedWeight, decode_weight
from quire.quant.coded import CodedMatrix
from quire.quant.device_codes import device_codes
from tests.tiny_models import VOCAB, make_tiny

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
LENGTHS = (1, 20, 100, 300)  # of prompts: each takes other kernels


def zeroed(arch: str, folder: Path, prefix: str) -> str:
    """A model all of whose numbers with this prefix are zeros."""
    more = {"moe_intermediate_size": 256} if "Moe" in arch else {}
    model = make_tiny(arch, folder, **SIZES, **more)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.startswith(prefix):
                weight.zero_()
    model.to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def logprobs_of(path: str, **options: Any) -> list[list[float]]:
    """Of the likeliest token at every place that is chosen, for single prompts and all at once."""
    llm = LLM(path, **{"dtype": "bfloat16", "max_model_len": 400, "kv_cache_memory_bytes": 64 << 20} | options)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True, detokenize=False)
    prompts: list[Any] = [{"prompt_token_ids": [5 + at % 7 for at in range(length)]} for length in LENGTHS]
    asked = [*([prompt] for prompt in prompts), 12 * prompts]
    try:
        found = [out for each in asked for out in llm.generate(each, params, use_tqdm=False)]
    finally:
        llm.close()
    return [[next(iter(entry.values())).logprob for entry in out.outputs[0].logprobs] for out in found]


def check_all_zeros(path: str, **options: Any) -> None:
    """Every token is as likely as every other."""
    for one in logprobs_of(path, **options):
        assert one == pytest.approx([-math.log(VOCAB)] * 4, abs=1e-4)


def check_zero_layer(path: str, **options: Any) -> None:
    """It adds nothing: there are numbers, and not all alike."""
    found = [value for one in logprobs_of(path, **options) for value in one]
    assert all(map(math.isfinite, found)) and max(found) > -0.9 * math.log(VOCAB)


@pytest.mark.parametrize("quantization", [None, "int8_wo", "int4_wo"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_of_zeros_on_a_cpu(dtype: str, quantization: str | None, tmp_path: Path) -> None:
    path = zeroed("Qwen3ForCausalLM", tmp_path / "all", "")
    check_all_zeros(path, device="cpu", dtype=dtype, quantization=quantization)
    path = zeroed("Qwen3ForCausalLM", tmp_path / "layer", "model.layers.1.")
    check_zero_layer(path, device="cpu", dtype=dtype, quantization=quantization)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_rows_of_zeros_are_rounded_to_zeros(form: str, dtype: torch.dtype) -> None:
    coder = coder_of(form)
    assert coder is not None
    numbers = torch.randn((6, 256), generator=torch.Generator().manual_seed(1)).to(dtype)
    numbers[2], numbers[4, :128], numbers[5] = 0, 0, 1e-30 if dtype is not torch.float16 else 6e-8
    made = coder(numbers)
    weight = device_codes(made) if isinstance(made, CodedMatrix) else made
    assert isinstance(weight, CodedWeight)
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        found = decode_weight(weight, kind)
        assert found.isfinite().all() and not found[2].any() and not found[4, :128].any()
        assert (found[:2].float() - numbers[:2].float()).abs().max() < 0.5
