"""Starts a server with every documented flag at another value than its default, one at a time: what came of it.

python tools/survey.py                writes docs/reference/survey.md
python tools/survey.py --check        exits 1 if the page is out of date
python tools/survey.py --start FLAG   a real start of `quire serve` with that flag, until it answers, and its log line

Each flag goes the whole way of a start: parsed, checked, resolved against a small checkpoint, an engine (a worker that
repeats its prompt) and the app made. It works, is without effect and named in a line of the log, or is refused by name.
The same for every documented environment variable: read, or named in the warning.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest

from quire.base import env, log
from quire.base.lifeline import free_port
from quire.base.unread import UNREAD
from quire.cli.serve import make_parser, options_of
from quire.config import AsyncEngineArgs, UsageContext
from quire.config.option import OptionField, parts, same
from quire.config.server import flats
from quire.config.table import group_of, table
from quire.llm.online import AsyncLLM
from quire.schema.errors import NotBuiltError, QuireError
from quire.server.app import build_app
from quire.server.state import ServerState
from tests.fake_engine import use_fake, write_model
from tests.fake_ray import FakeRay
from tools.documented import FLAGS, VARIABLES
from tools.options_page import NOTE

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "survey.md"
WORKS, INERT, REFUSED, FAILED = "works", "no effect", "refused", "failed"
_PROCESSOR = """
from quire.sampling.processors import LogitsProcessor
class Idle(LogitsProcessor):
    def __init__(self, *args): pass
    def is_argmax_invariant(self): return True
    def update_state(self, update): pass
    def apply(self, logits): return logits
"""
_ONE_HEAD = ("--tensor-parallel-size", "2", "--load-format", "dummy", "--hf-overrides", '{"num_key_value_heads": 1}')
_MIXTURE = json.dumps(
    {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
)
_BESIDE = {  # what a flag needs to mean something
    "mm-shm-cache-max-object-size-mb": ("--mm-processor-cache-type", "shm"),
    "decode-context-parallel-size": _ONE_HEAD,
    "cp-kv-cache-interleave-size": (*_ONE_HEAD, "--decode-context-parallel-size", "2"),
    "dcp-kv-cache-interleave-size": (*_ONE_HEAD, "--decode-context-parallel-size", "2"),
    "dcp-comm-backend": (*_ONE_HEAD, "--decode-context-parallel-size", "2"),
    "collect-detailed-traces": ("--otlp-traces-endpoint", "http://localhost:4317"),
    "data-parallel-backend": ("--data-parallel-size", "2"),
    "data-parallel-external-lb": ("--data-parallel-size", "2", "--data-parallel-rank", "1"),
    "data-parallel-hybrid-lb": ("--data-parallel-size", "4", "--data-parallel-size-local", "2"),
    "data-parallel-rank": ("--data-parallel-size", "4"),
    "data-parallel-size-local": ("--data-parallel-size", "2"),
    "data-parallel-start-rank": ("--data-parallel-size", "4", "--data-parallel-size-local", "2"),
    "tensor-parallel-size": ("--load-format", "dummy"),  # ranks are real workers
    "pipeline-parallel-size": ("--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 2}'),
    "spec-method": ("--spec-tokens", "2"),
    "spec-model": ("--spec-tokens", "2"),
    "spec-tokens": ("--spec-method", "ngram"),
    "tool-call-parser": ("--enable-auto-tool-choice",),
    "enable-auto-tool-choice": ("--tool-call-parser", "hermes"),
    "enable-eplb": (
        "--enable-expert-parallel", "--tensor-parallel-size", "2", "--load-format", "dummy", "--hf-overrides", _MIXTURE,
    ),
    "numa-bind-cpus": ("--numa-bind",),
    "numa-bind-nodes": ("--numa-bind",),
    "enable-log-outputs": ("--enable-log-requests",),
    "enable-log-deltas": ("--enable-log-requests", "--enable-log-outputs"),
    "fingerprint-mode": ("--fingerprint-value", "mine"),
    "fingerprint-value": ("--fingerprint-mode", "custom"),
    "max-long-partial-prefills": ("--max-num-partial-prefills", "4"),
    "ssl-keyfile": ("--ssl-certfile", "cert.pem"),
    "ssl-ca-certs": ("--ssl-certfile", "cert.pem"),
    "enable-ssl-refresh": ("--ssl-certfile", "cert.pem"),
    "ssl-cert-reqs": ("--ssl-certfile", "cert.pem", "--ssl-ca-certs", "cert.pem"),
    "tool-parser-plugin": ("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
}  # fmt: skip
_OF_A_NODE = {"nnodes": "2", "node-rank": "1", "headless": ""}
_OF_A_MACHINE = {"data-parallel-address": "127.0.0.1", "data-parallel-rpc-port": "a free one"}
_VALUES: dict[str, tuple[str, ...]] = {  # where a value of the right type is not enough
    "model": ("{folder}",), "tokenizer": ("{folder}",), "hf-config-path": ("{folder}",),
    "chat-template": ("{{{{ 1 }}}}",), "served-model-name": ("mine",), "max-model-len": ("128",),
    "block-size": ("32",), "max-num-batched-tokens": ("512",),
    "fingerprint-mode": ("custom",), "dtype": ("float32",), "kv-cache-memory-bytes": ("1G",), "revision": ("main",),
    "tokenizer-revision": ("main",), "download-dir": ("{folder}",), "generation-config": ("vllm",),
    "override-generation-config": ('{{"temperature": 0.5}}',), "hf-overrides": ('{{"vocab_size": 260}}',),
    "reasoning-parser": ("deepseek_r1",), "tool-call-parser": ("hermes",), "max-num-partial-prefills": ("2",),
    "compilation-config": ("3",), "attention-config": ('{{"backend": "FLASH_ATTN"}}',),
    "kernel-config": ('{{"moe_backend": "triton"}}',), "reasoning-config": ('{{"reasoning_parser": "deepseek_r1"}}',),
    "profiler-config": ('{{"profiler": "torch", "torch_profiler_dir": "traces"}}',),
    "additional-config": ('{{"a": 1}}',),
    "structured-outputs-config": ('{{"backend": "xgrammar"}}',), "scheduler-cls": ("quire.sched.scheduler:Scheduler",),
    "otlp-traces-endpoint": ("http://localhost:4317",), "collect-detailed-traces": ("all",),
    "custom-histogram-buckets": ('{{"vllm:time_to_first_token_seconds": [0.1, 1.0]}}',), "log-level": ("DEBUG",),
    "default-chat-template-kwargs": ('{{"a": 1}}',), "log-config-file": ("{folder}/log.json",),
    "logits-processors": ("survey_processor:Idle",), "worker-extension-cls": ("builtins:object",),
    "tool-parser-plugin": ("{folder}/plugin.py",), "reasoning-parser-plugin": ("{folder}/plugin.py",),
    "middleware": ("starlette.middleware.gzip.GZipMiddleware",), "tool-server": ("localhost:1",),
    "config": ("{folder}/options.yaml",), "ec-transfer-config": ('{{"ec_connector": "x"}}',),
    "h11-max-incomplete-event-size": ("2048",), "ir-op-priority": ('{{"rms_norm": ["x"]}}',),
    "kv-events-config": ('{{"enable_kv_cache_events": true}}',), "kv-transfer-config": ('{{"kv_connector": "x"}}',),
    "pooler-config": ('{{"task": "embed"}}',), "weight-transfer-config": ('{{"backend": "nccl"}}',),
    "quantization": ("experts_int8",), "model-class-overrides": ("{{}}",),
    "speculative-config": ('{{"method": "ngram", "num_speculative_tokens": 2}}',),
    "spec-method": ("suffix",), "spec-model": ("ngram",),
    "eplb-config": ('{{"window_size": 10}}',), "limit-mm-per-prompt": ('{{"image": 2}}',),
    "media-io-kwargs": ('{{"image": {{"a": 1}}}}',), "cudagraph-capture-sizes": ("1", "2"),
    "ssl-certfile": ("cert.pem",), "ssl-keyfile": ("key.pem",), "ssl-ca-certs": ("ca.pem",), "ssl-cert-reqs": ("1",),
    "dcp-comm-backend": ("a2a",), "numa-bind-cpus": ("0-3",),
    "uds": ("{folder}/socket",), "prefix-caching-hash-algo": ("sha256_cbor",), "root-path": ("/under",),
}  # fmt: skip


class Found(NamedTuple):
    flag: str
    value: str
    what: str
    words: str = ""


def declared_flags() -> dict[str, OptionField]:
    rows = [*table().values(), *flats()]
    return {row.name.replace("_", "-"): row.declared for row in rows}


def other_values(name: str, declared: OptionField | None, folder: str) -> Iterator[tuple[str, ...]]:
    """Words to write after the flag; () for a switch. The first that the flag's own checks take is used."""
    if name in _VALUES:
        yield tuple(word.format(folder=folder) for word in _VALUES[name])
        return
    if declared is None:
        yield ()
        return
    o = declared.option
    for kind in parts(declared.accepted):
        if kind is bool:
            yield ()
        elif get_origin(kind) is Literal:
            yield from ((str(v),) for v in get_args(kind) if not same(v, o.unset))
        elif get_origin(kind) in (tuple, list):
            inner = get_args(kind)[0]
            literals = [str(v) for part in parts(inner) if get_origin(part) is Literal for v in get_args(part)]
            yield (literals[0] if literals else "2" if int in parts(inner) else "0.5" if inner is float else "x",)
        elif get_origin(kind) is dict:
            yield from (('{"x": "y"}',), ('{"x": 1}',), ('{"x": {}}',))
        elif (group := group_of(kind)) is not None:
            yield (
                ("{}",)
                if not group.__dataclass_fields__
                else (json.dumps({next(iter(group.__dataclass_fields__)): 1}),)
            )
        elif kind in (int, float):
            yield from ((str(v),) for v in ("2", "77", "0.5", "0") if str(o.unset) != v)
        elif kind is str:
            yield from ((choice,) for choice in o.choices if choice != o.unset)
            yield ("x",)


def start(words: list[str], folder: str) -> list[str]:
    """The whole way of a start; the lines of the log that name options without effect."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    quire = logging.getLogger("quire")
    quire.addHandler(handler)
    log._logged.clear()
    try:
        args = make_parser("quire serve").parse_args([folder, "--device", "cpu", "--no-disable-log-stats", *words])
        args.model = args.model_tag if "--model" not in words else args.model
        options = options_of(args)
        engine = AsyncLLM(AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER))
        try:
            build_app(ServerState.of(engine, options))
        finally:
            engine.shutdown()
    finally:
        quire.removeHandler(handler)
    return [line for line in messages if "Options that have no effect" in line]


def two_nodes(folder: str) -> bool:
    """Whether a server answers whose ranks are on two nodes, both of this machine; the flags of a node are tried so."""
    shared = ["-tp", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port("127.0.0.1"))]
    return answers(folder, shared, ["--node-rank", "1"])


def two_machines(folder: str) -> bool:
    """Whether one does whose engines are."""
    shared = ["-dp", "2", "-dpl", "1", "--data-parallel-address", "127.0.0.1"]
    shared += ["--data-parallel-rpc-port", str(free_port("127.0.0.1"))]
    return answers(folder, shared, ["--data-parallel-start-rank", "1"])


def answers(folder: str, shared: list[str], second: list[str]) -> bool:
    http = str(free_port("127.0.0.1"))
    serve = [sys.executable, "-m", "quire.cli.main", "serve", folder, "--device", "cpu", "--load-format", "dummy"]
    serve += shared
    variables = env.child_environment(
        {"QUIRE_NODE_KEY": "of the survey's two nodes", "PYTHONPATH": str(PAGE.parents[2])}
    )
    nodes = [
        subprocess.Popen([*serve, *more], env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for more in (["--port", http], ["--headless", *second])
    ]
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{http}/health", timeout=5)
            except OSError:
                time.sleep(0.5)
            else:
                return True
        return False
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(60)


def try_flag(name: str, declared: OptionField | None, folder: str) -> Found:
    if name in _OF_A_NODE:
        return Found(name, _OF_A_NODE[name], WORKS if two_nodes(folder) else FAILED)
    if name in _OF_A_MACHINE:
        return Found(name, _OF_A_MACHINE[name], WORKS if two_machines(folder) else FAILED)
    last = Found(name, "", FAILED, "no value could be made")
    for value in other_values(name, declared, folder):
        shown = " ".join(value).replace(folder, "FOLDER")
        words = [f"--{name}", *value, *_BESIDE.get(name, ())]
        if value == () and declared is not None and declared.option.unset is True:
            words[0], shown = f"--no-{name}", "(switched off)"
        try:
            lines = start(words, folder)
        except NotBuiltError as wrong:
            return Found(name, shown, REFUSED, str(wrong).replace(folder, "FOLDER"))
        except QuireError as wrong:
            last = Found(name, shown, FAILED, str(wrong).replace(folder, "FOLDER"))
            continue
        except SystemExit:
            last = Found(name, shown, FAILED, "the parser refused it")
            continue
        return Found(name, shown, INERT if lines else WORKS, lines[0] if lines else "")
    return last


def survey(names: tuple[str, ...] = FLAGS) -> list[Found]:
    declared = declared_flags()
    found = []
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        use_fake(patch)
        patch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "0")
        env.forget_all()
        folder = write_model(Path(place))
        (Path(place) / "plugin.py").write_text("")
        (Path(place) / "options.yaml").write_text("max-num-seqs: 3\n")
        (Path(place) / "survey_processor.py").write_text(_PROCESSOR)
        patch.syspath_prepend(place)
        (Path(place) / "log.json").write_text('{"version": 1, "disable_existing_loggers": false}')
        for name in names:
            several = name.startswith("data-parallel")  # several engines are processes of their own
            patch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "1" if several else "0")
            env.forget_all()
            with pytest.MonkeyPatch.context() as alone:
                if name == "data-parallel-backend":  # as Quire sees Ray; Ray itself is an extra
                    FakeRay().install(alone)
                    alone.setenv("RAY_ADDRESS", "")
                found.append(try_flag(name, declared.get(name), folder))
    env.forget_all()
    return found


def page(found: list[Found]) -> str:
    counts = Counter(one.what for one in found)
    read = [name for name in VARIABLES if f"VLLM_{name}" not in UNREAD]
    lines = [
        "# Flags and variables of vLLM, tried one at a time",
        "",
        f"Of the {len(found)} documented flags of `vllm serve`, each given a value that is not its default on the way "
        f"of a start (CPU, a small text model): {counts[WORKS]} work, {counts[INERT]} have no effect and are named in "
        f"a line of the log, {counts[REFUSED]} are refused by name"
        + (f", {counts[FAILED]} could not be tried here" if counts[FAILED] else "")
        + ".",
        "",
        f"Of the {len(VARIABLES)} documented environment variables, {len(read)} are read; "
        f"{len(VARIABLES) - len(read)} have no effect and are named with the reason in a warning "
        "([the names](environment.md)).",
        "",
        "| flag | tried with | |",
        "|---|---|---|",
    ]
    for one in found:
        words = f": {_reason(one)}" if one.what == FAILED else ""
        lines.append(
            f"| `--{one.flag}` | {f'`{one.value}`' if one.value else ''} | {one.what}{words} |".replace("\n", " ")
        )
    return NOTE.replace("tools/reference.py", "tools/survey.py").replace("make reference", "python tools/survey.py") + (
        "\n".join(lines) + "\n"
    )


def _reason(one: Found) -> str:
    return one.words.replace("|", "\\|")[:200]


def real_start(name: str) -> int:
    """`quire serve` in a process of its own, with the embedded model, until /health answers."""
    declared = declared_flags().get(name)
    value = next(other_values(name, declared, "."))
    command = [sys.executable, "-m", "quire.cli.main", "serve", "--port", "18999", "--max-model-len", "256",
               f"--{name}", *value, *_BESIDE.get(name, ())]  # fmt: skip
    with subprocess.Popen(
        command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, env=os.environ
    ) as server:
        try:
            for _ in range(240):
                if server.poll() is not None:
                    break
                try:
                    urllib.request.urlopen("http://127.0.0.1:18999/health", timeout=1)
                    break
                except OSError:
                    time.sleep(0.5)
            running = server.poll() is None
        finally:
            server.terminate()
        said, _ = server.communicate(timeout=60)
    lines = [line for line in said.splitlines() if "no effect" in line or "not available" in line]
    print(
        f"--{name} {' '.join(value)}: {'answers' if running else f'ended with {server.returncode}'}", *lines, sep="\n  "
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is stale")
    parser.add_argument("--start", metavar="FLAG", help="a real start with this flag")
    args: Any = parser.parse_args()
    if args.start:
        return real_start(args.start.lstrip("-"))
    logging.getLogger("quire").handlers[:] = [logging.NullHandler()]
    found = survey()
    text = page(found)
    for one in found:
        if one.what == FAILED:
            print(f"--{one.flag} {one.value}: {one.words}")
    print(Counter(one.what for one in found))
    if args.check:
        return 0 if PAGE.exists() and PAGE.read_text() == text else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
