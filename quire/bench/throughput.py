"""`quire bench throughput`: how many requests and tokens a second the engine does when it has them all at once.

In: flags. Out: one line and two totals on stdout, JSON where asked. The engine runs in this process through LLM, or
in its own through AsyncLLM (--async-engine).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.base.clock import now
from quire.bench.datasets import DatasetOptions, Sample, check_options, make_samples
from quire.bench.flags import add_dataset_flags, check_dataset, dataset_options
from quire.bench.load import run_async
from quire.bench.result_file import check_place, write_json
from quire.config import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
from quire.llm.offline import LLM
from quire.llm.online import AsyncLLM
from quire.schema.errors import InputError
from quire.schema.outputs import RequestOutput
from quire.schema.params import RequestOutputKind, SamplingParams


class Timed(NamedTuple):
    seconds: float
    outputs: list[RequestOutput]


def main(arguments: Sequence[str], program: str) -> int:
    parser = FlexibleArgumentParser(
        prog=program, description="Time a whole dataset, offline.", conflict_handler="resolve"
    )
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(disable_log_stats=True)
    add_dataset_flags(parser)
    add = parser.add_argument_group("throughput").add_argument
    add("--backend", choices=["vllm", "vllm-chat"], default="vllm", help="vllm-chat sends prompts as messages")
    add("--n", type=int, default=1, help="answers per prompt (default: 1)")
    add("--prefix-len", type=int, default=None, help="as --random-prefix-len")
    add("--async-engine", action="store_true", help="through AsyncLLM, the engine in a process of its own")
    add("--disable-detokenize", action="store_true", help="leave token ids as they are")
    add("--profile", action="store_true", help="run under the profiler (see --profiler-config)")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add("--output-json", default=None, help="file for the result")
    args = parser.parse_args(arguments)
    check_dataset(args.dataset_name, batch_size=args.random_batch_size)
    check_options(_dataset(args))
    if args.n < 1:
        raise InputError(f"--n must be at least 1, got {args.n}", param="n")
    if args.prefix_len is not None:
        args.random_prefix_len = args.prefix_len
    check_place("--output-json", args.output_json)
    timed = run_async(run_online(args)) if args.async_engine else run_offline(args)
    return tell(timed, args.output_json)


def samples_for(args: argparse.Namespace, tokenizer: Any) -> list[Sample]:
    return make_samples(tokenizer, _dataset(args))


def _dataset(args: argparse.Namespace) -> DatasetOptions:
    return dataset_options(args, apply_chat_template=args.backend == "vllm" and not args.skip_chat_template)


def params_for(args: argparse.Namespace, sample: Sample, kind: RequestOutputKind) -> SamplingParams:
    return SamplingParams(
        n=args.n,
        temperature=1.0,
        top_p=1.0,
        ignore_eos=True,
        max_tokens=sample.output_len,
        detokenize=not args.disable_detokenize,
        output_kind=kind,
    )


def run_offline(args: argparse.Namespace) -> Timed:
    with LLM(**vars(EngineArgs.from_cli_args(args))) as llm:
        samples = samples_for(args, llm.get_tokenizer())
        params = [params_for(args, sample, RequestOutputKind.FINAL_ONLY) for sample in samples]
        prompts = [sample.prompt for sample in samples]
        if args.profile:
            llm.start_profile()
        start = now()
        if args.backend == "vllm-chat":
            messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(messages, params, use_tqdm=not args.disable_tqdm)
        else:
            outputs = llm.generate(prompts, params, use_tqdm=not args.disable_tqdm)
        seconds = now() - start
        if args.profile:
            llm.stop_profile()
    return Timed(seconds, outputs)


async def run_online(args: argparse.Namespace) -> Timed:
    if args.backend == "vllm-chat":
        raise InputError("--async-engine sends prompts as they are: use --backend vllm", param="backend")
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    try:
        samples = samples_for(args, await engine.get_tokenizer())

        async def one(index: int, sample: Sample) -> RequestOutput:
            params = params_for(args, sample, RequestOutputKind.FINAL_ONLY)
            return [output async for output in engine.generate(sample.prompt, params, request_id=str(index))][-1]

        if args.profile:
            await engine.start_profile()
        start = now()
        outputs = await asyncio.gather(*(one(index, sample) for index, sample in enumerate(samples)))
        seconds = now() - start
        if args.profile:
            await engine.stop_profile()
    finally:
        engine.shutdown()
    return Timed(seconds, list(outputs))


def tell(timed: Timed, path: str | None) -> int:
    seconds, outputs = timed
    prompt_tokens = sum(len(output.prompt_token_ids or ()) for output in outputs)
    output_tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    total = prompt_tokens + output_tokens
    print(
        f"Throughput: {len(outputs) / seconds:.2f} requests/s, {total / seconds:.2f} total tokens/s, "
        f"{output_tokens / seconds:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {prompt_tokens}")
    print(f"Total num output tokens:  {output_tokens}")
    write_json(
        path,
        {
            "elapsed_time": seconds,
            "num_requests": len(outputs),
            "total_num_tokens": total,
            "requests_per_second": len(outputs) / seconds,
            "tokens_per_second": total / seconds,
        },
    )
    return 0
