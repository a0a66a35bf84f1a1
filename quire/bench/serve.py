"""`quire bench serve`: load on a running server of OpenAI's kind, and what its users would have felt.

In: flags. Out: a table on stdout; a JSON file and plots on request. Status goes to stderr. The engine is not loaded:
what runs here is a tokenizer and a load generator.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from quire.base import env
from quire.base.registry import load
from quire.bench import drafts, plot, report
from quire.bench.arrivals import ArrivalProcess, arrival_times
from quire.bench.datasets import Sample, make_samples
from quire.bench.endpoints import (
    COMPLETIONS,
    POOLING,
    RANKING,
    MeasuredResponse,
    RequestTemplate,
    check_endpoint,
)
from quire.bench.flags import SAMPLING, add_serve_flags, check_dataset, dataset_options
from quire.bench.http_client import HTTPError, Pool, ServerAddress, parse_server
from quire.bench.load import Generator, TimedRequest, allow_files, run_async
from quire.bench.result_file import check_place, written_to
from quire.checkpoint import embedded
from quire.checkpoint.source import locate
from quire.config import FlexibleArgumentParser
from quire.schema.errors import InputError, ModelNotFoundError, QuireError, counted

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


def main(arguments: Sequence[str], program: str) -> int:
    parser = FlexibleArgumentParser(prog=program, description="Load a running server and measure its answers.")
    add_serve_flags(parser)
    args = parser.parse_args(arguments)
    return run_async(run(args))


async def run(args: argparse.Namespace) -> int:
    options, pace = read_report_options(args), read_pace(args)
    check_endpoint(args.backend, args.endpoint)
    check_dataset(
        args.dataset_name, batch_size=args.random_batch_size, ranks=args.backend in RANKING,
        embeds=args.backend in ("openai-embeddings", "vllm-pooling"),
    )  # fmt: skip
    plotting = args.plot_timeline or args.plot_dataset_stats
    if plotting:
        plot.require()
    if args.use_beam_search and not args.no_stream:
        raise InputError("--use-beam-search needs --no-stream: which beam is best is known at the end",
                         param="use_beam_search")  # fmt: skip
    if plotting or args.save_result or args.append_result:
        prepare_place(args)
    server = parse_server(args.base_url or f"http://{_bracketed(args.host)}:{args.port}", insecure=args.insecure)
    pool = Pool(server)
    try:
        result, outcomes, samples = await measure_server(args, pool, options, pace)
    finally:
        pool.close()
    for line in report.failures(outcomes):
        print(line, file=sys.stderr)
    print("\n".join(report.table(result, options)))
    base = result_path(args, result["model_id"])
    if args.save_result or args.append_result:
        save(result, base, detailed=args.save_detailed, append=args.append_result)
    with written_to("--result-dir", base.parent):
        if args.plot_timeline:
            say(f"wrote {plot.timeline(outcomes, base, plot.parse_limits(args.timeline_itl_thresholds))}")
        if args.plot_dataset_stats:
            say(f"wrote {plot.lengths(samples, outcomes, base)}")
    return 0 if result["completed"] else 1


async def measure_server(
    args: argparse.Namespace, pool: Pool, options: report.ReportOptions, pace: ArrivalProcess
) -> tuple[dict[str, Any], list[MeasuredResponse], list[Sample]]:
    headers = dict(args.header)
    if (key := env.OPENAI_API_KEY.get()) and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {key}"
    model, sources = await find_model(args, pool, headers)
    source, tokenizer = load_tokenizer(args, sources)
    rendered = args.backend in COMPLETIONS and not args.skip_chat_template
    samples = make_samples(tokenizer, dataset_options(args, apply_chat_template=rendered))
    template = read_template(args, model, headers)
    requests = encode_all(template, pool.server, samples)
    allow_files(min(len(requests), args.max_concurrency or len(requests)))
    generator = Generator(pool, stream=template.stream, max_concurrency=args.max_concurrency)
    if args.ready_check_timeout_sec > 0:
        say(f"waiting for {pool.server.name} …")
        await generator.wait_ready(requests[0], args.ready_check_timeout_sec)
    await warm_up(generator, requests[0], args.num_warmups)
    if args.profile:
        await profile(pool, "/start_profile", headers)
    counters = await drafts.read_counters(pool, headers)
    say(f"{counted(len(requests), 'request')}, {describe_pace(pace)}, {describe_limit(args.max_concurrency)}")
    with bar(len(requests), hidden=args.disable_tqdm) as progress:
        times = arrival_times(len(requests), pace, Random(args.seed))
        outcomes, duration = await generator.run(requests, times, progress.update)
    if args.profile:
        await profile(pool, "/stop_profile", headers)
    if args.backend not in POOLING:
        count_missing(outcomes, tokenizer)
    result = about(args, model, source) | report.measure(outcomes, duration, options)
    if counters is not None:
        result |= drafts.measure(counters, await drafts.read_counters(pool, headers))
    return result, outcomes, samples


# ---- what was asked --------------------------------------------------------------------------------------------------


def read_report_options(args: argparse.Namespace) -> report.ReportOptions:
    generates = args.backend not in POOLING
    metrics = report.parse_metrics(args.percentile_metrics)
    return report.ReportOptions(
        metrics=metrics if generates else ("e2el",),  # an answer of a pooling model comes as a whole
        generates=generates,
        percentiles=report.parse_percentiles(args.metric_percentiles),
        goodput=report.parse_goodput(args.goodput),
        max_concurrency=args.max_concurrency,
        request_rate=args.request_rate,
    )


def read_pace(args: argparse.Namespace) -> ArrivalProcess:
    start, end = args.ramp_up_start_rps, args.ramp_up_end_rps
    if args.ramp_up_strategy is None:
        if start is not None or end is not None:
            raise InputError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return ArrivalProcess(args.request_rate, args.burstiness)
    if start is None or end is None:
        raise InputError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    return ArrivalProcess(args.request_rate, args.burstiness, args.ramp_up_strategy, start, end)


def describe_pace(pace: ArrivalProcess) -> str:
    if pace.ramp is not None:
        return f"{pace.ramp} from {pace.ramp_start:g} to {pace.ramp_end:g} a second"
    return "all sent at once" if pace.rate == math.inf else f"{pace.rate:g} a second, burstiness {pace.burstiness:g}"


def describe_limit(max_concurrency: int | None) -> str:
    return "any number in flight" if max_concurrency is None else f"at most {max_concurrency} in flight"


def read_template(args: argparse.Namespace, model: str, headers: dict[str, str]) -> RequestTemplate:
    sampling = {name: value for name in SAMPLING if (value := vars(args)[name]) is not None}
    if args.use_beam_search:
        sampling["use_beam_search"] = True
    if args.chat_template_kwargs is not None:
        sampling["chat_template_kwargs"] = args.chat_template_kwargs
    return RequestTemplate(
        backend=args.backend,
        endpoint=args.endpoint,
        model=model,
        headers=headers,
        sampling=sampling,
        extra_body=args.extra_body,
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
        stream=not args.no_stream and args.backend not in POOLING,
        request_id_prefix=args.request_id_prefix,
    )


def encode_all(template: RequestTemplate, server: ServerAddress, samples: Sequence[Sample]) -> list[TimedRequest]:
    return [TimedRequest(sample, template.encode(server, sample, str(i))) for i, sample in enumerate(samples)]


async def find_model(args: argparse.Namespace, pool: Pool, headers: dict[str, str]) -> tuple[str, list[str]]:
    """The name to ask for, and where its tokenizer may be found, likeliest first."""
    named = args.served_model_name or args.model
    sources = [source for source in (args.tokenizer, args.model) if source]
    if named and sources:
        return named, sources[:1]
    try:
        reply, body = await pool.get("/v1/models", headers)
    except HTTPError as wrong:
        if args.ready_check_timeout_sec <= 0:
            raise QuireError(str(wrong)) from None
        raise QuireError(f"{wrong}; name --model and --tokenizer to wait for a server that is not up yet") from None
    if reply.status != 200:
        raise QuireError(
            f"GET /v1/models of {pool.server.name}: HTTP {reply.status}: {body[:200].decode('utf-8', 'replace')}"
        )
    listed = [entry for entry in msgspec.json.decode(body).get("data", []) if isinstance(entry, dict)]
    if not listed:
        raise QuireError(f"{pool.server.name} lists no model; name one with --model")
    entry = next((entry for entry in listed if entry.get("id") == named), listed[0])
    roots = [str(entry[key]) for key in ("root", "id") if entry.get(key)]
    return named or str(entry["id"]), sources or roots


def load_tokenizer(args: argparse.Namespace, sources: Sequence[str]) -> tuple[str, Tokenizer]:
    """The first source that can be found on this machine or fetched."""
    failures: list[str] = []
    for source in sources:
        try:
            located = locate(None if source == embedded.NAME else source, weights=False)
        except QuireError as wrong:
            failures.append(str(wrong))
            continue
        from quire.text.tokenizer import load_tokenizer as load_tokenizer_  # lazy

        tokenizer: Tokenizer = load_tokenizer_(
            located.path, mode=args.tokenizer_mode, trust_remote_code=args.trust_remote_code
        )
        return source, tokenizer
    raise ModelNotFoundError(f"no tokenizer to count with: {'; '.join(failures)}. Name one with --tokenizer")


# ---- around the run --------------------------------------------------------------------------------------------------


async def warm_up(generator: Generator, request: TimedRequest, count: int) -> None:
    if count < 1:
        return
    outcomes, _ = await generator.run([request] * count, [0.0] * count, lambda: None)
    if not any(outcome.success for outcome in outcomes):
        raise QuireError(f"no warm-up request succeeded: {outcomes[0].error}")


async def profile(pool: Pool, path: str, headers: dict[str, str]) -> None:
    try:
        reply, body = await pool.ask("POST", path, headers)
    except HTTPError as wrong:
        raise QuireError(f"POST {path}: {wrong}") from None
    if reply.status != 200:
        why = body[:200].decode("utf-8", "replace")
        raise QuireError(f"POST {path}: HTTP {reply.status}: {why} (was the server started with a profiler?)")


def bar(total: int, *, hidden: bool) -> Any:
    return load("tqdm:tqdm")(total=total, disable=hidden, dynamic_ncols=True, mininterval=0.5)


def count_missing(outcomes: Sequence[MeasuredResponse], tokenizer: Tokenizer) -> None:
    """A server that reports no usage: its answers are counted here."""
    for outcome in outcomes:
        if outcome.success and outcome.output_len == 0:
            outcome.output_len = max(1, len(tokenizer.encode(outcome.text, add_special_tokens=False)))


def about(args: argparse.Namespace, model: str, tokenizer: str) -> dict[str, Any]:
    """The first keys of a result: what was run."""
    result: dict[str, Any] = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label or args.backend,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "num_prompts": args.num_prompts,
        "request_rate": args.request_rate if args.request_rate < math.inf else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    if args.ramp_up_strategy is not None:
        result |= {
            "ramp_up_strategy": args.ramp_up_strategy,
            "ramp_up_start_rps": args.ramp_up_start_rps,
            "ramp_up_end_rps": args.ramp_up_end_rps,
        }
    return result | dict(args.metadata)


def result_path(args: argparse.Namespace, model: str) -> Path:
    name: str | None = args.result_filename
    if name is None:
        rate = f"{args.request_rate:g}qps" if args.ramp_up_strategy is None else f"ramp-up-{args.ramp_up_strategy}"
        limit = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
        short = model.rstrip("/").rsplit("/", 1)[-1]
        moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        name = f"{args.label or args.backend}-{rate}{limit}-{short}-{moment}.json"
    return Path(args.result_dir or ".") / name


def prepare_place(args: argparse.Namespace) -> None:
    """The folder of the files, before anything is sent; they are named when the run is over."""
    path = result_path(args, "model")
    with written_to("--result-dir", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    check_place("--result-filename", str(path))


def save(result: dict[str, Any], path: Path, *, detailed: bool, append: bool) -> None:
    stored = result if detailed else {key: value for key, value in result.items() if key not in report.DETAILS}
    with written_to("--save-result", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a" if append else "w", encoding="utf-8") as file:
            if append and file.tell():
                file.write("\n")
            json.dump(stored, file)
    say(f"wrote {path}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
