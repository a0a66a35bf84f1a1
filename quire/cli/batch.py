"""`quire run-batch`: a file of requests in, a file of answers out, both local or behind http(s) URLs.

Owns: flags, input and output files, the progress bar and the lifetime of the engine. Answers come from the server's
routes (server/openai/batch.py). A local output is appended to; one for a URL is a temporary file until it is complete.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from socket import socket as Socket
from typing import IO, Any, cast

from quire.base.clock import now
from quire.base.fetch import FetchError, FetchPolicy, check, download, is_url, upload
from quire.base.log import logger
from quire.base.progress import progress
from quire.base.registry import load
from quire.bench.load import run_async
from quire.config import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
from quire.config.flags import add_flags, human_readable_int
from quire.config.server import ServerConfig, flats, server_config
from quire.llm.online import AsyncLLM
from quire.schema.errors import EngineDeadError, InputError, counted
from quire.server.openai.batch_resume import Earlier, InputLines, check_input, read_earlier

log = logger(__name__)
# Options of the server that apply without a socket.
SERVER_OPTIONS = (
    "chat_template", "chat_template_content_format", "trust_request_chat_template", "default_chat_template_kwargs",
    "response_role", "return_tokens_as_token_ids", "enable_prompt_tokens_details", "enable_log_requests",
    "enable_log_outputs", "max_log_len", "max_request_bytes", "max_json_depth", "max_json_values",
    "max_request_token_ids", "max_num_choices", "max_prompts_per_request", "max_sequences_per_request",
    "max_fan_out_bytes", "max_logprobs_per_request", "max_beam_tokens", "max_stop_strings", "max_stop_length",
    "max_logit_bias", "max_bad_words", "max_messages", "request_timeout", "fingerprint_mode", "fingerprint_value",
)  # fmt: skip
_LARGEST_FILE = 16 << 30
_IN_FLIGHT_PER_SEAT = 4  # requests submitted per running one: a slow first request must not idle the engine


def run_batch(arguments: Sequence[str], program: str) -> int:
    args = make_parser(program).parse_args(arguments)
    if args.model_tag is not None:
        args.model = args.model_tag
    options = server_config(**{name: vars(args)[name] for name in (*SERVER_OPTIONS, "host", "port")})
    policy = FetchPolicy(args.max_file_bytes, args.url_timeout, tuple(args.allow_url_host))
    refuse_one_file(args.input_file, args.output_file)
    try:
        with input_file(args.input_file, policy) as source:
            earlier = earlier_answers(args)
            lines = check_input(earlier, source, options.max_request_bytes)
            warn_of_repeated(lines)
            if lines.total and len(earlier.done) == lines.total:
                drop_failures(earlier)
                print(f"nothing is left to ask: {lines.total} of {lines.total} answered already", file=sys.stderr)
                return 0
            with metrics_socket(args, options) as bound, output_file(args, policy, earlier) as target:
                work = BatchRun(source, target, lines.total, earlier.done, bound)
                return run_async(answer_file(args, options, work))
    except FetchError as wrong:
        raise InputError(str(wrong)) from None


def refuse_one_file(source: str, target: str) -> None:
    """Whose first answer would take the place of the requests that are not read yet."""
    if is_url(source) or is_url(target) or not (os.path.isfile(source) and os.path.isfile(target)):
        return
    if os.path.samefile(source, target):
        raise InputError(
            f"--output-file {target} is --input-file {source}, whose requests would be overwritten: name another file",
            param="output_file",
        )


def warn_of_repeated(lines: InputLines) -> None:
    if lines.repeated:
        log.warning(
            "%s the custom_id of an earlier line, the first %r: their answers cannot be told apart, and --resume "
            "refuses such a file",
            "1 line has" if lines.repeated == 1 else f"{lines.repeated} lines have",
            lines.first_repeated[:200],
        )


def drop_failures(earlier: Earlier) -> None:
    """Only answers stay in the output, as if some had been added."""
    try:
        earlier.cut_back()
    except OSError as wrong:
        raise InputError(f"--output-file {earlier.place}: {wrong.strerror}", param="output_file") from None


def make_parser(program: str) -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog=program, description="Answer a file of requests in OpenAI's batch format.")
    EngineArgs.add_cli_args(parser)
    add_flags(parser, [flat for flat in flats() if flat.name in SERVER_OPTIONS])
    add = parser.add_argument
    add("model_tag", nargs="?", metavar="MODEL", help="folder, GGUF file or hub id (or --model)")
    add("-i", "--input-file", required=True, help="JSON lines: a path, or an http(s) URL to GET")
    add("-o", "--output-file", required=True, help="a path, or an http(s) URL to PUT the answers to")
    add("--resume", action="store_true",
        help="continue an interrupted batch: keep the answers in --output-file, run the rest")  # fmt: skip
    add("--output-tmp-dir", default=None, help="folder for answers before they are sent to a URL")
    add("--allow-url-host", action="append", default=[], metavar="HOST",
        help="allow this host in a private network; others are refused; repeatable")  # fmt: skip
    add("--max-file-bytes", type=human_readable_int, default=_LARGEST_FILE, help="maximum size of an input URL")
    add("--url-timeout", type=float, default=60.0, help="seconds without data before a URL fails (default: 60)")
    add("--enable-metrics", action="store_true", help="serve /metrics while the batch runs")
    add("--host", "--url", default="0.0.0.0", help="address of /metrics (default: 0.0.0.0)")
    add("--port", type=int, default=8000, help="port of /metrics (default: 8000)")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    return parser


@dataclass(frozen=True)
class BatchRun:
    """Input and output of a run; requests whose custom_id is in `done` are answered already."""

    source: IO[bytes]
    target: IO[bytes]
    total: int
    done: Collection[str]
    metrics: Socket | None = None  # bound, for /metrics


def earlier_answers(args: argparse.Namespace) -> Earlier:
    """Answers of the run that --resume continues; without it, none."""
    output = args.output_file
    if not args.resume:
        return Earlier(output)
    if is_url(output):
        raise InputError("--resume needs an --output-file that is a path: answers are sent to a URL all at once",
                         param="resume")  # fmt: skip
    try:
        earlier = read_earlier(output)
    except OSError as wrong:
        raise InputError(f"--output-file {output}: {wrong.strerror}", param="output_file") from None
    log.info(
        "%s: %s kept; failed or truncated, and run again: %s",
        output,
        counted(len(earlier.done), "answer"),
        counted(earlier.dropped, "line"),
    )
    return earlier


@contextmanager
def input_file(source: str, policy: FetchPolicy) -> Iterator[IO[bytes]]:
    if is_url(source):
        with tempfile.TemporaryFile() as fetched:
            size = download(source, fetched, policy)
            log.info("Fetched %d bytes of requests", size)
            fetched.seek(0)
            yield fetched
        return
    with contextlib.ExitStack() as opened:
        try:
            file: IO[bytes] = opened.enter_context(open(source, "rb"))
            if not file.seekable():  # a pipe; the lines are read twice
                spooled = opened.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(file, spooled)
                spooled.seek(0)
                file = spooled
        except OSError as wrong:
            raise InputError(f"--input-file {source}: {wrong.strerror}", param="input_file") from None
        yield file


@contextmanager
def output_file(args: argparse.Namespace, policy: FetchPolicy, earlier: Earlier) -> Iterator[IO[bytes]]:
    """What a failed run has written is kept."""
    output = args.output_file
    if not is_url(output):
        folder = os.path.dirname(output) or "."
        if os.path.isdir(output) or not os.access(output if os.path.exists(output) else folder, os.W_OK):
            raise InputError(f"--output-file {output}: not writable", param="output_file")
        with contextlib.closing(Growing("--output-file", output, earlier if args.resume else None)) as grows:
            try:
                yield cast(IO[bytes], grows)
            except BaseException:
                if grows.size:
                    print(f"the answers so far are in {output}", file=sys.stderr)
                raise
            grows.write(b"")
        return
    check(output, policy)  # fail now, not after hours of work
    try:
        number, path = tempfile.mkstemp(dir=args.output_tmp_dir, prefix="run-batch-", suffix=".jsonl")
    except OSError as wrong:
        raise InputError(f"--output-tmp-dir {args.output_tmp_dir}: {wrong.strerror}", param="output_tmp_dir") from None
    os.close(number)
    try:
        with contextlib.closing(Growing("--output-tmp-dir", path)) as grows:
            yield cast(IO[bytes], grows)
    except BaseException:
        _keep_or_drop(path)
        raise
    with open(path, "rb") as finished:
        try:
            upload(output, finished, os.path.getsize(path), policy)
        except FetchError as wrong:
            raise InputError(f"{wrong}; the answers are in {path}") from None
    os.unlink(path)


class Growing:
    """A file that is opened by the first write: a run that fails before leaves an older file unchanged.

    It is truncated, or continues after the answers of an `earlier` run.
    """

    def __init__(self, option: str, path: str, earlier: Earlier | None = None) -> None:
        self._option, self._path, self._earlier = option, path, earlier
        self.size = 0  # what a reader finds, beside answers of the earlier run
        self._written = 0
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> int:
        with self._told():
            if self._file is None:
                if self._earlier is not None:
                    self._earlier.cut_back()
                self._file = open(self._path, "wb" if self._earlier is None else "ab")  # noqa: SIM115
            self._written += len(data)
            return self._file.write(data)

    def flush(self) -> None:
        if self._file is not None:
            with self._told():
                self._file.flush()
                self.size = self._written

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # every line was flushed: what is left was refused before
                self._file.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as wrong:
            raise InputError(
                f"{self._option} {self._path}: {wrong.strerror}", param=self._option.strip("-").replace("-", "_")
            ) from None


def _keep_or_drop(path: str) -> None:
    if os.path.getsize(path):
        print(f"the answers so far are in {path}", file=sys.stderr)
    else:
        os.unlink(path)


async def answer_file(args: argparse.Namespace, options: ServerConfig, work: BatchRun) -> int:
    engine_args = AsyncEngineArgs.from_cli_args(args)
    from quire.server.app import build_app as build_app_  # lazy
    from quire.server.state import ServerState  # lazy

    build_app, state_class = build_app_, ServerState
    from quire.server.openai.batch import BatchRunner  # lazy

    runner_class = BatchRunner
    engine = AsyncLLM.from_engine_args(engine_args, usage_context="OPENAI_BATCH_RUNNER")

    def alive() -> None:
        if engine.errored:
            raise EngineDeadError(engine.dead_error.reason)

    try:
        app = build_app(state_class.of(engine, options))
        key = (("Authorization", f"Bearer {options.keys[0]}"),) if options.keys else ()
        runner = runner_class(
            app,
            window=engine.vllm_config.scheduler_config.max_num_seqs * _IN_FLIGHT_PER_SEAT,
            longest_line=options.max_request_bytes,
            headers=key,
            alive=alive,
        )
        began = now()
        async with metrics_page(app, work.metrics):
            shown, before = not args.disable_tqdm, len(work.done)
            with progress(log, "Answering", work.total, "requests", shown=shown, before=before) as advance:
                tally = await runner.run(work.source, work.target, lambda: advance(1), work.done)
    finally:
        engine.shutdown()
    earlier = f"{len(work.done)} answered earlier, " if work.done else ""
    print(f"{earlier}{tally.completed} answered, {tally.failed} failed, {now() - began:.1f} s", file=sys.stderr)
    if tally.nameless:
        lines = "1 line has" if tally.nameless == 1 else f"{tally.nameless} lines have"
        print(f"{lines} no readable custom_id", file=sys.stderr)
    return 1 if tally.nameless else 0


@contextmanager
def metrics_socket(args: argparse.Namespace, options: ServerConfig) -> Iterator[Socket | None]:
    """Bound before a model is loaded: a taken port is told at once."""
    if not args.enable_metrics:
        yield None
        return
    from quire.server.launch import listener  # lazy

    with listener(options) as (bound, _):
        yield bound


@asynccontextmanager
async def metrics_page(app: Any, bound: Socket | None) -> AsyncIterator[None]:
    """Serves only /metrics of the app over HTTP."""
    if bound is None:
        yield
        return

    async def only_metrics(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != "/metrics":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await app(scope, receive, send)

    config = load("uvicorn:Config")(only_metrics, log_level="warning", lifespan="off")
    server = load("uvicorn:Server")(config)
    task = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        yield
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await task
