"""Where the time of a workload goes: the GPU's idle share, the host's time per step by part, the time of each kernel.

    python benchmarks/gpu/profile_step.py MODEL_FOLDER [WORKLOADS] [--options JSON] [--kernels 20] [--json FILE]

WORKLOADS: of benchmarks/gpu/offline.py, by default mixed256,batch1k,bs32,single. Each runs twice through LLM.generate:

    timed    the parts of every turn on the host's clock; on the device two events a step, so that the time between the
             end of one step and the begin of the next is known: the GPU had nothing to do then
    traced   several windows of consecutive steps, spread over the run, under the profiler, which notes each kernel's
             begin and end. Kernel times that overlap count once: idle share = 1 - busy / window, both of one window

The trace slows steps down a little, inside graphs above all, and so hides some idleness; the events do not, but see
nothing of the gaps within a step. Both are printed.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from offline import run
from workloads import DEFAULTS, VOCABULARY, WORKLOADS, Request

from quire import LLM

DEFAULT = "mixed256,batch1k,bs32,single"
WINDOWS, STEPS = 6, 24  # traced
SKIPPED = 4  # steps of a window before it counts: the profiler's own start stops the pipeline
Spans = list[tuple[int, int]]  # begin and end, ns


class Host:
    """Seconds by part of a turn, and the device's events, of one run."""

    def __init__(self, llm: LLM) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.num_steps = self.num_mixed = 0
        self._loop: Any = llm.llm_engine.front.client.loop
        self._undo: list[Any] = []

    def __enter__(self) -> Host:
        loop = self._loop
        self._time(loop, "step", "turn")
        self._time(loop.scheduler, "plan", "plan")
        self._time(loop.scheduler, "commit", "commit")
        self._time(loop.scheduler, "stats", "stats")
        forward, sample = loop.executor.forward, loop.executor.sample

        def forwarded(plan: Any) -> None:
            began = torch.cuda.Event(enable_timing=True)
            began.record()
            self.events.append((began, torch.cuda.Event(enable_timing=True)))
            self.num_steps += 1
            mixed = plan.total_tokens > len(plan.grants)
            self.num_mixed += mixed
            start = time.perf_counter()
            forward(plan)
            self.seconds["forward, with prompts" if mixed else "forward"] += time.perf_counter() - start

        def sampled(step: int, mask: Any) -> Any:
            start = time.perf_counter()
            pending = sample(step, mask)
            self.seconds["sample"] += time.perf_counter() - start
            self.events[-1][1].record()
            ready, result = pending.ready, pending.result

            def waited() -> Any:
                start = time.perf_counter()
                if ready is not None:
                    ready.synchronize()
                middle = time.perf_counter()
                found = result()
                self.seconds["wait"] += middle - start
                self.seconds["result"] += time.perf_counter() - middle
                return found

            pending.result = waited
            return pending

        self._set(loop.executor, "forward", forwarded)
        self._set(loop.executor, "sample", sampled)
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()

    def idle_between(self) -> float:
        """Share of the time from the first step's begin to the last one's end that lies between two steps."""
        torch.cuda.synchronize()
        if len(self.events) < 2:
            return 0.0
        pairs = zip(self.events, self.events[1:], strict=False)
        gaps = sum(max(0.0, before[1].elapsed_time(after[0])) for before, after in pairs)
        return gaps / self.events[0][0].elapsed_time(self.events[-1][1])

    def _set(self, thing: Any, name: str, new: Any) -> None:
        own = vars(thing).get(name)  # what a step calls may be bound to the instance
        setattr(thing, name, new)
        self._undo.append(lambda: delattr(thing, name) if own is None else setattr(thing, name, own))

    def _time(self, thing: Any, name: str, label: str) -> None:
        plain = getattr(thing, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                self.seconds[label] += time.perf_counter() - start

        self._set(thing, name, measured)


class Traces:
    """The profiler, on for some windows of a run."""

    def __init__(self, llm: LLM, num_steps: int) -> None:
        every = max(1, num_steps // WINDOWS)
        self._starts = {every * i + every // 3 for i in range(WINDOWS)} if num_steps > 2 * STEPS else {1}
        self._length = min(STEPS, max(SKIPPED + 2, num_steps - 2))
        self._loop: Any = llm.llm_engine.front.client.loop
        self._step, self._at, self._left = self._loop.step, 0, 0
        self._profile: Any = None
        self.busy = self.window = 0  # ns
        self.kernels: Counter[str] = Counter()  # ns by name
        self.launches: Counter[str] = Counter()
        self.num_steps = 0

    def __enter__(self) -> Traces:
        self._loop.step = self._turn
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.step = self._step
        self._stop()

    def _turn(self) -> Any:
        if self._profile is None and self._at in self._starts:
            torch.cuda.synchronize()
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.start()
            self._left = self._length
        outputs = self._step()
        self._at += 1
        if self._profile is not None:
            self._left -= 1
            if self._left == 0:
                self._stop()
        return outputs

    def _stop(self) -> None:
        if self._profile is None:
            return
        torch.cuda.synchronize()
        self._profile.stop()
        found = self._profile.profiler.kineto_results.events()
        self._profile = None
        device = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        kernels = [(e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in found if e.device_type() == device]
        if not kernels:
            return
        kernels.sort()
        first, last = kernels[0][0], max(end for _, end, _ in kernels)
        steps = self._length - self._left
        begin = first + (last - first) * SKIPPED // max(SKIPPED + 1, steps)
        inside = [(max(start, begin), end, name) for start, end, name in kernels if end > begin]
        self.busy += merged([(start, end) for start, end, _ in inside])
        self.window += last - begin
        self.num_steps += max(1, steps - SKIPPED)
        for start, end, name in inside:
            self.kernels[name] += end - start
            self.launches[name] += 1


def merged(spans: Spans) -> int:
    """Length of the union."""
    total, upto = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, upto))
        upto = max(upto, end)
    return total


def profile(llm: LLM, name: str, requests: list[Request], top: int) -> dict[str, Any]:
    with Host(llm) as host:
        found = run(llm, requests)
        between = host.idle_between()
    llm.llm_engine.reset_prefix_cache()
    with Traces(llm, host.num_steps) as traces:
        run(llm, requests)
    steps = host.num_steps
    idle, traced = 1 - traces.busy / max(1, traces.window), max(1, traces.num_steps)
    print(
        f"== {name}: {found['output_tokens_per_s']} output tokens/s, {steps} steps ({host.num_mixed} with prompts), "
        f"{1e3 * found['seconds'] / steps:.3f} ms each"
    )
    print(
        f"GPU idle: {idle:.1%} of {traces.num_steps} traced steps ({traces.window / 1e6 / traced:.3f} ms each so); "
        f"{between:.1%} of all between steps, untraced"
    )
    parts = dict(host.seconds)
    turn = parts.pop("turn", 0.0)
    parts["rest of a turn"] = turn - sum(parts.values())
    parts["outputs, beside turns"] = found["seconds"] - turn
    busy = sum(parts.values()) - parts["wait"]
    print(f"host: {1e6 * busy / steps:.0f} us a step beside waiting")
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        number = host.num_mixed if part == "forward, with prompts" else steps
        print(f"    {part:<24}{1e6 * seconds / max(1, number):>9.1f} us")
    count = sum(traces.launches.values()) / traced
    print(f"kernels: {count:.0f} a step, {sum(traces.kernels.values()) / 1e6 / traced:.3f} ms")
    for kernel, ns in traces.kernels.most_common(top):
        launches = traces.launches[kernel] / traced
        print(f"    {ns / 1e3 / traced:>9.1f} us {launches:>7.1f} x  {kernel[:90]}", flush=True)
    return {
        "work": name, **found, "steps": steps, "mixed": host.num_mixed, "idle": idle, "idle_between": between,
        "host_us": {part: 1e6 * seconds / steps for part, seconds in parts.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("workloads", nargs="?", default=DEFAULT)
    parser.add_argument("--options", default="{}", type=json.loads, help="keywords of LLM")
    parser.add_argument("--kernels", type=int, default=20, help="how many to list")
    parser.add_argument("--json", default=None, help="also write the results here")
    args = parser.parse_args()
    llm = LLM(model=args.model, **(DEFAULTS | args.options))
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(*VOCABULARY) for _ in range(count)]

    run(llm, [Request(ids(64), 16) for _ in range(8)])
    results = []
    for name in args.workloads.split(","):
        requests = WORKLOADS[name](ids, rng)[-1]
        llm.llm_engine.reset_prefix_cache()
        results.append(profile(llm, name, requests, args.kernels))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
