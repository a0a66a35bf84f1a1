"""Named workloads of random token ids, for any package with vLLM's Python API; must not import one itself."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

VOCABULARY = (10, 150_000)
DEFAULTS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 10240, "gpu_memory_utilization": 0.9,
    "seed": 0,
}  # fmt: skip


class Request(NamedTuple):
    prompt: list[int]
    num_outputs: int
    temperature: float = 0.0


Draw = Callable[[int], list[int]]  # that many random ids


def mixed256(ids: Draw, rng: random.Random) -> list[list[Request]]:
    prompts = [ids(rng.randint(100, 1024)) for _ in range(256)]
    return [[Request(prompt, rng.randint(100, 1024), 0.6) for prompt in prompts]]


def batch1k(ids: Draw, rng: random.Random) -> list[list[Request]]:
    return [[Request(ids(512), 128) for _ in range(1000)]]


def prefill(ids: Draw, rng: random.Random) -> list[list[Request]]:
    return [[Request(ids(2048), 1) for _ in range(128)]]


def single(ids: Draw, rng: random.Random) -> list[list[Request]]:
    return [[Request(ids(128), 256)] for _ in range(2)]


def bs32(ids: Draw, rng: random.Random) -> list[list[Request]]:
    return [[Request(ids(128), 256) for _ in range(32)]]


def prefix(ids: Draw, rng: random.Random) -> list[list[Request]]:
    """The first round fills the cache with the shared 8,000 tokens."""
    shared = ids(8000)
    return [[Request(shared + ids(8), 1)], [Request(shared + ids(64), 32) for _ in range(128)]]


def long(ids: Draw, rng: random.Random) -> list[list[Request]]:
    return [[Request(ids(8000), 256) for _ in range(32)]]


WORKLOADS = {work.__name__: work for work in (mixed256, batch1k, prefill, single, bs32, prefix, long)}


def run(llm: Any, params_type: Any, requests: list[Request]) -> dict[str, float]:
    """`params_type`: the package's SamplingParams."""
    params = [
        params_type(temperature=r.temperature, ignore_eos=True, max_tokens=r.num_outputs, detokenize=False)
        for r in requests
    ]
    prompts = [{"prompt_token_ids": r.prompt} for r in requests]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    written = sum(len(output.outputs[0].token_ids) for output in outputs)
    read = sum(len(r.prompt) for r in requests)
    if written != sum(r.num_outputs for r in requests):
        raise SystemExit(f"{written} tokens came back, {sum(r.num_outputs for r in requests)} were asked for")
    return {
        "requests": len(requests), "seconds": round(seconds, 3), "output_tokens_per_s": round(written / seconds),
        "tokens_per_s": round((read + written) / seconds),
    }  # fmt: skip
