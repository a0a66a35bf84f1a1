"""`quire bench latency`: how long one batch of equal requests takes, in this process, again and again.

In: flags. Out: average and percentiles on stdout, JSON where asked. Prompts are random token ids, and the prefix cache
is off unless asked for, so that every round does the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from quire.base.clock import now
from quire.base.registry import load
from quire.bench.report import percentile
from quire.bench.result_file import check_place, write_json
from quire.config import EngineArgs, FlexibleArgumentParser
from quire.llm.offline import LLM
from quire.schema.errors import InputError
from quire.schema.params import BeamSearchParams, SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def main(arguments: Sequence[str], program: str) -> int:
    parser = FlexibleArgumentParser(prog=program, description="Time one batch of requests, offline.")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(enable_prefix_caching=False, disable_log_stats=True)
    add = parser.add_argument_group("batch").add_argument
    add("--input-len", type=int, default=32, help="prompt tokens (default: 32)")
    add("--output-len", type=int, default=128, help="output tokens (default: 128)")
    add("--batch-size", type=int, default=8, help="requests at once (default: 8)")
    add("--n", type=int, default=1, help="answers per prompt (default: 1)")
    add("--use-beam-search", action="store_true", help="beam search with --n beams")
    add("--num-iters-warmup", type=int, default=10, help="rounds before the clock starts (default: 10)")
    add("--num-iters", type=int, default=30, help="rounds timed (default: 30)")
    add("--profile", action="store_true", help="one round under the profiler instead (see --profiler-config)")
    add("--output-json", default=None, help="file for the result")
    add("--disable-detokenize", action="store_true", help="leave token ids as they are")
    args = parser.parse_args(arguments)
    for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
        if vars(args)[name] < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, got {vars(args)[name]}", param=name)
    check_place("--output-json", args.output_json)
    with LLM(**vars(EngineArgs.from_cli_args(args))) as llm:
        once = one_round(llm, args)
        if args.profile:
            return profiled(llm, once)
        for _ in bar(args.num_iters_warmup, "warm-up"):
            once()
        seconds = [timed(once) for _ in bar(args.num_iters, "rounds")]
    return tell(seconds, args.output_json)


def one_round(llm: LLM, args: Any) -> Callable[[], object]:
    random = Random(0)
    limit = llm.input_processor.vocab_size
    prompts = [
        {"prompt_token_ids": [random.randrange(limit) for _ in range(args.input_len)]} for _ in range(args.batch_size)
    ]
    if args.use_beam_search:
        beams = BeamSearchParams(beam_width=args.n, max_tokens=args.output_len, ignore_eos=True)
        return lambda: llm.beam_search(prompts, beams)
    params = SamplingParams(
        n=args.n,
        temperature=1.0,
        top_p=1.0,
        ignore_eos=True,
        max_tokens=args.output_len,
        detokenize=not args.disable_detokenize,
    )
    return lambda: llm.generate(prompts, params, use_tqdm=False)


def profiled(llm: LLM, once: Callable[[], object]) -> int:
    llm.start_profile()
    once()
    llm.stop_profile()
    return 0


def timed(once: Callable[[], object]) -> float:
    start = now()
    once()
    return now() - start


def bar(count: int, label: str) -> Any:
    return load("tqdm:tqdm")(range(count), desc=label, dynamic_ncols=True)


def tell(seconds: list[float], path: str | None) -> int:
    ordered = sorted(seconds)
    average = sum(seconds) / len(seconds)
    print(f"Avg latency: {average} seconds")
    for share in PERCENTILES:
        print(f"{share}% percentile latency: {percentile(ordered, share)} seconds")
    write_json(
        path,
        {
            "avg_latency": average,
            "latencies": seconds,
            "percentiles": {str(share): percentile(ordered, share) for share in PERCENTILES},
        },
    )
    return 0
