"""Where the time of a steady decode goes: the GPU's idle share, and the host's time per step by part.

    python benchmarks/gpu/profile_step.py MODEL_FOLDER [--rows 256] [--context 512] [--steps 200] [--options JSON]
                                          [--trace FILE] [--kernels 25]

Drives the engine by hand: `rows` requests of `context` tokens, then `steps` decode steps three times over. First timed
alone (events at both ends: device time per step as the engine really runs). Then with the host's parts timed: plan,
forward (launch), wait for the result, sample, commit. Then under torch.profiler, which slows the host: only its kernel
times are read. Idle share = 1 - kernel time per step / wall time per step of the first pass.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from quire import LLM, SamplingParams


def loop_of(llm: LLM) -> Any:
    """The engine's loop, which lives in this process."""
    return llm.llm_engine.front.client.loop


def fill(llm: LLM, rows: int, context: int, room: int) -> Any:
    """Requests in, prompts computed: from here on every step is a decode."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=room, detokenize=False)
    for i in range(rows):
        prompt = {"prompt_token_ids": [rng.randrange(10, 150_000) for _ in range(context)]}
        llm.llm_engine.add_request(f"p{i}", prompt, params)
    loop = loop_of(llm)
    while loop.scheduler.num_waiting or loop.scheduler.num_running < rows:
        loop.step()
    for _ in range(8):
        loop.step()
    torch.cuda.synchronize()
    return loop


def timed(thing: Any, name: str, into: dict[str, float], label: str) -> Callable[[], None]:
    """Replace a method by one that adds its seconds; returns the undoing."""
    plain = getattr(thing, name)

    def measured(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return plain(*args, **kwargs)
        finally:
            into[label] += time.perf_counter() - start

    setattr(thing, name, measured)
    return lambda: setattr(thing, name, plain)


def wall(loop: Any, steps: int) -> float:
    """Seconds per step as the engine really runs."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        loop.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def host_parts(loop: Any, steps: int) -> dict[str, float]:
    """Seconds per step of each part of a turn."""
    parts: dict[str, float] = defaultdict(float)
    undo = [
        timed(loop.scheduler, "plan", parts, "plan"),
        timed(loop.scheduler, "commit", parts, "commit"),
        timed(loop.scheduler, "stats", parts, "stats"),
        timed(loop.executor, "forward", parts, "forward"),
    ]
    sample = loop.executor.sample

    def sampled(mask: Any) -> Any:
        start = time.perf_counter()
        pending = sample(mask)
        parts["sample"] += time.perf_counter() - start
        ready, result = pending.ready, pending.result

        def waited() -> Any:
            start = time.perf_counter()
            if ready is not None:
                ready.synchronize()
            parts["wait for the device"] += time.perf_counter() - start
            start = time.perf_counter()
            found = result()
            parts["result"] += time.perf_counter() - start
            return found

        pending.result = waited
        return pending

    loop.executor.sample = sampled
    undo.append(lambda: setattr(loop.executor, "sample", sample))
    parts["turn"] = wall(loop, steps) * steps
    for back in undo:
        back()
    return {name: seconds / steps for name, seconds in parts.items()}


def kernels(loop: Any, steps: int, trace: str | None) -> dict[str, tuple[float, float]]:
    """Kernel name -> (seconds per step on the device, launches per step)."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities if trace else activities[1:]) as profile:
        for _ in range(steps):
            loop.step()
        torch.cuda.synchronize()
    if trace:
        profile.export_chrome_trace(trace)
    found: dict[str, tuple[float, float]] = {}
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            found[event.key] = event.self_device_time_total / 1e6 / steps, event.count / steps
    return found


def report(rows: int, step_s: float, parts: dict[str, float], spent: dict[str, tuple[float, float]], top: int) -> None:
    busy = sum(seconds for seconds, _ in spent.values())
    print(f"{rows} rows: {1e3 * step_s:.3f} ms a step, {rows / step_s:.0f} tokens/s")
    print(f"GPU: busy {1e3 * busy:.3f} ms a step, idle share {max(0.0, 1 - busy / step_s):.1%}")
    host = sum(seconds for name, seconds in parts.items() if name not in ("turn", "wait for the device"))
    print(f"host: {1e3 * host:.3f} ms a step beside waiting (turn {1e3 * parts['turn']:.3f} ms)")
    for name, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        print(f"    {name:<22}{1e6 * seconds:>9.1f} us")
    print(f"kernels ({sum(count for _, count in spent.values()):.0f} launches a step):")
    for name, (seconds, count) in sorted(spent.items(), key=lambda item: -item[1][0])[:top]:
        print(f"    {1e6 * seconds:>9.1f} us {count:>7.1f} x  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kernels", type=int, default=25, help="how many to list")
    parser.add_argument("--options", default="{}", type=json.loads, help="keywords of LLM")
    parser.add_argument("--trace", default=None, help="also write a Chrome trace of a few steps here")
    args = parser.parse_args()
    given = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 10240, "seed": 0} | args.options
    llm = LLM(model=args.model, **given)
    profiled = min(args.steps, 50)
    loop = fill(llm, args.rows, args.context, 8 * args.steps + 200)
    step_s = wall(loop, args.steps)
    parts = host_parts(loop, args.steps)
    spent = kernels(loop, 5 if args.trace else profiled, args.trace)
    report(args.rows, step_s, parts, spent, args.kernels)


if __name__ == "__main__":
    main()
