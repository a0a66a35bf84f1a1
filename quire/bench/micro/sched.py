"""How long the scheduler takes: plan and commit of a full decode batch, block hashing, prefix match.

    python -m quire.bench.micro.sched [--running 256] [--steps 1000] [--look-ahead 0] [--json]

A step's time is the median over all steps, other times are the best of several: on a shared machine the rest is other
people's work. Every step crosses block ends as a real one does: one request in `block_size` needs a block and a hash.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import deque
from statistics import median
from typing import Any

from quire.base.clock import now
from quire.sched.prefix_hash import ALGORITHMS, BlockHasher
from quire.sched.request import Request
from quire.sched.scheduler import Scheduler
from quire.sched.settings import SchedulerSettings
from quire.schema.errors import MissingExtraError
from quire.schema.kv import KVGroup, KVKind, KVLayout
from quire.schema.messages import EngineRequest
from quire.schema.params import ResolvedParams
from quire.schema.step import StepPlan, StepResult

BLOCK_SIZE = 16
ROUNDS = 5
PROMPTS = (1024, 8192, 32768)


def one_request(name: str, prompt: tuple[int, ...], max_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt_token_ids=prompt, params=ResolvedParams(), seed=0, max_tokens=max_tokens, eos_token_id=2
    )


def build(num_running: int, longest: int, look_ahead: int) -> Scheduler:
    settings = SchedulerSettings(
        max_model_len=longest, max_num_batched_tokens=8192, max_num_seqs=num_running, depth=look_ahead + 1
    )
    group = KVGroup(kind=KVKind.FULL, block_size=BLOCK_SIZE, window=0, layers=("layer",))
    num_blocks = num_running * -(-longest // BLOCK_SIZE)
    layout = KVLayout(num_blocks=num_blocks, page_bytes=1, groups=(group,), slots=(("layer",),), specs=())
    return Scheduler(settings, layout)


def answer(plan: StepPlan) -> StepResult:
    return StepResult(step=plan.step, sampled=[[7] if grant.samples else [] for grant in plan.grants])


def decode_steps(num_running: int, num_steps: int, look_ahead: int) -> dict[str, float]:
    """Microseconds per request and step of plan() and commit(), all requests decoding."""
    prompt_len = 64
    scheduler = build(num_running, prompt_len + BLOCK_SIZE + num_steps + 128, look_ahead)
    for index in range(num_running):
        # prompts of different length, so that block ends are spread over the steps
        prompt = (index, *range(prompt_len + index % BLOCK_SIZE))
        scheduler.add(one_request(f"request-{index}", prompt, num_steps + 64))
    flights: deque[tuple[StepPlan, StepResult]] = deque()

    def step() -> tuple[float, float]:
        before = now()
        plan = scheduler.plan()
        planned = now()
        flights.append((plan, answer(plan)))
        committed = 0.0
        if len(flights) > look_ahead:
            oldest = flights.popleft()
            began = now()
            scheduler.commit(*oldest)
            committed = now() - began
        return planned - before, committed

    while scheduler.num_waiting or len(flights) < look_ahead:
        step()
    for _ in range(8):
        step()
    gc.collect()
    times = [step() for _ in range(num_steps)]
    per_request = 1e6 / num_running
    return {
        "plan": median(planned for planned, _ in times) * per_request,
        "commit": median(committed for _, committed in times) * per_request,
        "total": median(planned + committed for planned, committed in times) * per_request,
    }


def hashing() -> dict[str, float]:
    """Nanoseconds per token of hashing an 8k prompt, for each algorithm that is there."""
    tokens = list(range(1000, 1000 + 8192))
    request, times = one_request("request", tuple(tokens), 1), {}
    for algorithm in ALGORITHMS:
        try:
            hasher = BlockHasher(algorithm, BLOCK_SIZE)
        except MissingExtraError:
            continue
        times[algorithm] = min(_time(hasher.extend, [], tokens, len(tokens), request) for _ in range(ROUNDS))
    return {name: seconds * 1e9 / len(tokens) for name, seconds in times.items()}


def matching() -> dict[int, dict[str, float]]:
    """Microseconds to find a prompt of each length in the cache: hashes known (a retry), and new (hashing included)."""
    times = {}
    for length in PROMPTS:
        scheduler = build(2, length + 64, 0)
        prompt = tuple(range(length))
        scheduler.add(one_request("first", prompt, 1))
        while scheduler.has_unfinished():
            plan = scheduler.plan()
            scheduler.commit(plan, answer(plan))
        known = fresh = float("inf")
        for _ in range(ROUNDS):
            request = Request(one_request("again", prompt, 1), limit=length + 1, queued=0.0)
            fresh = min(fresh, _time(scheduler.kv.match, request))
            known = min(known, _time(scheduler.kv.match, request))
            assert scheduler.kv.match(request).length == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        times[length] = {"known": known * 1e6, "new": fresh * 1e6}
    return times


def _time(function: Any, *args: Any) -> float:
    args = tuple(list(arg) if isinstance(arg, list) else arg for arg in args)
    before = now()
    function(*args)
    return now() - before


def main() -> None:
    parser = argparse.ArgumentParser(description="Bench of the scheduler.")
    parser.add_argument("--running", type=int, default=256, help="requests that decode at once")
    parser.add_argument("--steps", type=int, default=1000, help="steps measured")
    parser.add_argument("--look-ahead", type=int, default=None, help="plans out besides the newest; unset: 0 and 1")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args()
    depths = (0, 1) if options.look_ahead is None else (options.look_ahead,)
    steps = {depth: decode_steps(options.running, options.steps, depth) for depth in depths}
    hashes, matches = hashing(), matching()
    if options.json:
        print(json.dumps({"running": options.running, "step_us": steps, "hash_ns": hashes, "match_us": matches}))
        return
    for depth, times in steps.items():
        print(
            f"{options.running} decodes, look-ahead {depth}: plan {times['plan']:.2f} + commit {times['commit']:.2f} = "
            f"{times['total']:.2f} us per request per step"
        )
    print("hashing, ns per token: " + ", ".join(f"{name} {value:.1f}" for name, value in hashes.items()))
    for length, pair in matches.items():
        print(f"prefix match of {length} tokens: {pair['known']:.0f} us, with hashing {pair['new']:.0f} us")


if __name__ == "__main__":
    main()
