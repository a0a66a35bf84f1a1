"""Where the seconds of `long` go: the time of every step, then the kernels of two steps that hold prompts.

python benchmarks/gpu/steps.py MODEL_FOLDER [--rounds 3] [--requests 32] [--prompt 8000] [--outputs 256]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from quire import LLM, SamplingParams

KERNELS = 16


def add(engine: Any, name: str, count: int, length: int, params: SamplingParams, rng: random.Random) -> None:
    for i in range(count):
        ids = [rng.randrange(10, 150_000) for _ in range(length)]
        engine.add_request(f"{name}-{i}", {"prompt_token_ids": ids}, params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in (("rounds", 3), ("requests", 32), ("prompt", 8000), ("outputs", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    llm = LLM(asked.model, load_format="dummy", skip_tokenizer_init=True, max_model_len=10240, seed=0)
    engine, rng = llm.llm_engine, random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=asked.outputs, ignore_eos=True, detokenize=False)
    for number in range(asked.rounds):
        began, times = time.perf_counter(), []
        add(engine, f"r{number}", asked.requests, asked.prompt, params, rng)
        while engine.has_unfinished_requests():
            step = time.perf_counter()
            engine.step()
            times.append(1e3 * (time.perf_counter() - step))
        decodes = times[-asked.outputs + 8 :]
        print(
            f"round {number}: {time.perf_counter() - began:.3f} s, {len(times)} steps; the first, ms: "
            f"{' '.join(f'{ms:.0f}' for ms in times[:24])}; a decode step {statistics.median(decodes):.2f} ms"
        )
    add(engine, "p", 6, asked.prompt, params, rng)
    engine.step()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        engine.step()
        engine.step()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    for event in events[:KERNELS]:
        print(f"{event.self_device_time_total / 1e3:9.2f} ms {event.count:5d} x  {event.key[:100]}")
    llm.close()


if __name__ == "__main__":
    main()
