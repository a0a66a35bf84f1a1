"""What an engine answers with adapters, compared with models that are what the adapters amount to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quire import LLM, LoRARequest, SamplingParams
from tests.tiny_adapters import TinyAdapter, merge

PROMPT = [5, 9, 77, 100, 41, 8, 250, 33, 12]
NUM_TOKENS = 6


def start(folder: Path, **more: Any) -> LLM:
    options: dict[str, Any] = dict(
        dtype="float32", enable_lora=True, max_loras=2, max_lora_rank=8, max_model_len=64, seed=0,
        kv_cache_memory_bytes=1 << 24,
    )  # fmt: skip
    return LLM(str(folder), **(options | more))


def log_probabilities(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens]), use_cache=False).logits[0].float(), -1)


def check_like_merged(
    llm: LLM, model: Any, adapters: Sequence[TinyAdapter], *, close: float = 2e-4, different: int = 2
) -> None:
    """One batch of the base model and every adapter."""
    models, paths = [model, *[merge(model, one) for one in adapters]], [one.path for one in adapters]
    check_like(llm, models, paths, close=close, different=different)


def check_like(
    llm: LLM, models: Sequence[Any], paths: Sequence[str], *, close: float = 2e-4, different: int = 2
) -> None:
    """One batch of the base model and the adapters in these folders, and what transformers answers with each: tokens,
    and log probabilities of every position. So many of the answers must differ."""
    loras = [None, *[LoRARequest(f"a{i}", i + 1, path) for i, path in enumerate(paths)]]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    prompts: Any = [{"prompt_token_ids": PROMPT}] * len(loras)
    answers = llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
    distinct = set()
    for lora, expected, answer in zip(loras, models, answers, strict=True):
        tokens = list(answer.outputs[0].token_ids)
        everything = PROMPT + tokens
        scores = log_probabilities(expected, everything)
        likeliest = scores[len(PROMPT) - 1 : -1].argmax(-1).tolist()  # equal exactly if greedy decoding writes the same
        assert len(tokens) == NUM_TOKENS and tokens == likeliest, lora
        assert answer.lora_request is lora
        distinct.add(tuple(scores.flatten().tolist()))
        rows = [*(answer.prompt_logprobs or [])[1:], *(answer.outputs[0].logprobs or [])]
        assert len(rows) == len(everything) - 1
        for position, row in enumerate(rows):
            token = everything[position + 1]
            difference = abs(row[token].logprob - float(scores[position, token])) if row is not None else close
            assert difference < close, (lora, position, difference)
    assert len(distinct) >= different, "the adapters change nothing: the test cannot fail"
