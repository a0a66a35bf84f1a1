"""Speculative decoding on the GPU: tokens are those of plain decoding, where the shape of a step changes no bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base import env
from quire.observe.reader import Counter
from tests.tiny_models import VOCAB, make_tiny

pytestmark = pytest.mark.gpu
PROMPTS = 132  # half of them greedy
FEW = [5, 6, 7]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True, "allowed_token_ids": FEW},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "top_k": 2, "ignore_eos": True, "seed": 3},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2, "allowed_token_ids": FEW, "seed": 4},
    {"temperature": 0.8, "repetition_penalty": 1.05, "presence_penalty": 0.1, "allowed_token_ids": FEW, "seed": 5},
    {"temperature": 0.0, "min_tokens": 12, "logit_bias": {5: 30.0, 6: 30.0}},
]
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "every ngram": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "custom": {"method": "custom_class", "model": "tests.engine.own_proposer:Bigrams", "num_speculative_tokens": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    make_tiny("MistralForCausalLM", made)
    return made


def prompts() -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    rng = random.Random(1)
    given, params = [], []
    for i in range(PROMPTS):
        piece = [rng.randrange(4, VOCAB) for _ in range(rng.randint(2, 12))]
        given.append({"prompt_token_ids": (piece * 8)[: rng.randint(1, 60)]})
        params.append(SamplingParams(max_tokens=rng.randint(12, 60), detokenize=False, **PARAMS[i % len(PARAMS)]))
    return given, params


def answers(
    folder: Path, dtype: str, speculative: dict[str, Any] | None, **options: Any
) -> tuple[list[list[int]], float]:
    """Tokens, and how many drafts were right."""
    with LLM(
        str(folder), dtype=dtype, skip_tokenizer_init=True, max_model_len=160, max_num_seqs=16, seed=0,
        disable_log_stats=False, speculative_config=speculative, kv_cache_memory_bytes=64 << 20, **options,
    ) as llm:  # fmt: skip
        outputs = llm.generate(*prompts(), use_tqdm=False)
        found = {one.name: one.value for one in llm.get_metrics() if isinstance(one, Counter)}
    return [list(out.outputs[0].token_ids) for out in outputs], found.get("vllm:spec_decode_num_accepted_tokens", 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_those_of_plain_decoding(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    plain, _ = answers(folder, dtype, None)
    for name, speculative in METHODS.items():
        found, num_right = answers(folder, dtype, speculative)
        assert found == plain, name
        if "adaptive" in speculative:
            assert num_right > 20, name
    for options in ({"enforce_eager": True}, {"async_scheduling": False}, {"num_gpu_blocks_override": 40}):
        found, num_right = answers(folder, dtype, METHODS["every ngram"], **options)
        assert found == plain, options
        assert num_right > 20, options
