"""Times one model on named workloads through LLM.generate, with token ids in and no detokenizing.

    python benchmarks/gpu/offline.py FOLDER WORKLOADS [--quantization NAME] [--kv-cache-dtype fp8] [--options JSON]

WORKLOADS: a list such as mixed256,single, or all. --options are keywords of LLM laid over the defaults below.
Prints one line per run: seconds, output tokens a second, all tokens a second. Prompts come from a fixed seed, so two
engines or two commits see the same ones.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

began = time.perf_counter()  # before anything heavy: a start is timed from here

from quire import LLM, SamplingParams  # noqa: E402

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


def run(llm: LLM, requests: list[Request]) -> dict[str, float]:
    params = [
        SamplingParams(temperature=r.temperature, ignore_eos=True, max_tokens=r.num_outputs, detokenize=False)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("workloads")
    parser.add_argument("--options", default="{}", type=json.loads)
    parser.add_argument("--quantization", default=None, help="what dummy weights are rounded to: fp8, int4_wo ...")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as LLM's: fp8, int8_per_token_head ...")
    parser.add_argument("--json", default=None, help="also write the results here")
    args = parser.parse_args()
    names = list(WORKLOADS) if args.workloads == "all" else args.workloads.split(",")
    options = DEFAULTS | {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype} | args.options
    llm = LLM(model=args.model, **options)
    ready = time.perf_counter() - began
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(*VOCABULARY) for _ in range(count)]

    first = run(llm, [Request(ids(128), 1)])["seconds"]
    print(f"start: ready {ready:.2f} s, first token {ready + first:.2f} s", flush=True)
    results: list[dict[str, Any]] = [{"work": "start", "ready_s": ready, "first_token_s": ready + first}]
    run(llm, [Request(ids(64), 16) for _ in range(8)])
    for name in names:
        for turn, requests in enumerate(WORKLOADS[name](ids, rng)):
            found = run(llm, requests)
            results.append({"model": Path(args.model).name, "work": name, "turn": turn, **found})
            print(
                f"{Path(args.model).name} {name}[{turn}] " + " ".join(f"{k}={v}" for k, v in found.items()), flush=True
            )
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
