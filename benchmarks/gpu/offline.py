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
from pathlib import Path
from typing import Any

began = time.perf_counter()  # before anything heavy: a start is timed from here

from workloads import DEFAULTS, VOCABULARY, WORKLOADS, Request  # noqa: E402
from workloads import run as run_any  # noqa: E402

from quire import LLM, SamplingParams  # noqa: E402


def run(llm: LLM, requests: list[Request]) -> dict[str, float]:
    return run_any(llm, SamplingParams, requests)


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
