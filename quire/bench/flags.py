"""Flags of the bench commands: the dataset's, which two commands share, and those of `bench serve`.

Names and defaults are vLLM's, so that scripts written for it work. A flag whose feature is missing is refused by name.
Must not know: what a flag does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import uuid
from typing import Any

from quire.bench.arrivals import STRATEGIES
from quire.bench.datasets import DATASETS, LATER, RERANK, DatasetOptions
from quire.bench.endpoints import BACKENDS
from quire.schema.errors import InputError, NotBuiltError

SAMPLING: dict[str, type] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "frequency_penalty": float,
    "presence_penalty": float, "repetition_penalty": float,
}  # fmt: skip
# Flags of vLLM's command that this version has no feature for.
NOT_BUILT = (
    "lora-modules", "lora-assignment", "enable-multimodal-chat", "probe-request-rate", "self-timed", "hf-name",
    "hf-subset", "hf-split", "hf-output-len", "no-reranker", "custom-ensure-client-side-data",
    "spec-bench-category", "spec-bench-output-len", "blazedit-min-distance", "blazedit-max-distance",
    "asr-min-audio-len-sec", "asr-max-audio-len-sec", "random-mm-base-items-per-request",
    "random-mm-num-mm-items-range-ratio", "random-mm-limit-mm-per-prompt", "random-mm-bucket-config",
    "bfcl-categories", "speed-bench-category", "speed-bench-dataset-subset", "speed-bench-output-len",
    "timed-trace-chunk-hash-size", "timed-trace-label-hash-ids", "timed-trace-label-input-length",
    "timed-trace-label-output-length", "timed-trace-label-timestamp", "timed-trace-sec-multiplier",
)  # fmt: skip


class Refused(argparse.Action):
    """A known flag without its feature."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        raise NotBuiltError(f"{option_string} is not available in this version of Quire", param=self.dest)


def key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r}: write KEY=VALUE")
    return key, value


def json_mapping(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError as wrong:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {wrong}") from None
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON mapping")
    return parsed


def number_or_mapping(text: str) -> float | dict[str, float]:
    return json_mapping(text) if text.lstrip().startswith("{") else float(text)


def add_dataset_flags(parser: argparse.ArgumentParser, *, num_prompts: int = 1000) -> None:
    defaults = DatasetOptions()
    group = parser.add_argument_group("dataset")
    add = group.add_argument
    add("--dataset-name", metavar="{" + ",".join(DATASETS) + "}", default="random",
        help=f"where prompts come from: {', '.join(DATASETS)} (default: random)")  # fmt: skip
    add("--dataset-path", default=None, help="the file of sharegpt, custom and (if not our own lines) sonnet")
    add("--num-prompts", type=int, default=num_prompts, help=f"requests to send (default: {num_prompts})")
    add("--disable-shuffle", action="store_true", help="take a file's prompts in its order")
    add("--no-oversample", action="store_true", help="send fewer requests where a file holds fewer prompts")
    add("--input-len", type=int, default=None, help="input tokens, for any dataset that has a length of its own")
    add("--output-len", type=int, default=None, help="output tokens, for any dataset")
    lengths = {
        "random_input_len": "input tokens, besides the prefix",
        "random_output_len": "output tokens",
        "random_prefix_len": "tokens at the start that every prompt shares",
        "random_batch_size": "texts of a request for embeddings, documents of a request for ranks",
        "sonnet_input_len": "input tokens, about",
        "sonnet_output_len": "output tokens",
        "sonnet_prefix_len": "of them shared by every prompt, about",
        "sharegpt_output_len": "output tokens; unset takes the recorded answer's length",
        "custom_output_len": 'output tokens; -1 takes each line\'s "output_tokens"',
        "prefix_repetition_prefix_len": "tokens of each shared beginning",
        "prefix_repetition_suffix_len": "tokens of each end",
        "prefix_repetition_num_prefixes": "how many beginnings",
        "prefix_repetition_output_len": "output tokens",
    }
    for name, text in lengths.items():
        default = getattr(defaults, name)
        add(
            f"--{name.replace('_', '-')}",
            type=int,
            default=default,
            help=text if default is None else f"{text} (default: {default})",
        )
    add("--random-range-ratio", type=number_or_mapping, default=0.0,
        help='lengths vary by this share both ways; or {"input": …, "output": …} (default: 0)')  # fmt: skip
    add("--skip-chat-template", action="store_true", help="send custom and sonnet prompts to /v1/completions as is")


def check_dataset(name: str, *, batch_size: int = 1, ranks: bool = False, embeds: bool = False) -> None:
    """Before anything is loaded or asked. `ranks`, `embeds`: what the endpoint does, else it generates."""
    if name in LATER:
        message = f"--dataset-name {name} is not available in this version of Quire; there are {', '.join(DATASETS)}"
        raise NotBuiltError(message, param="dataset_name", value=name)
    if name not in DATASETS:
        raise InputError(f"--dataset-name must be one of {', '.join(DATASETS)}, got {name!r}", param="dataset_name")
    if ranks is not (name == RERANK):
        raise InputError(
            f"--dataset-name {RERANK} and --backend vllm-rerank of `bench serve` go together: only one of them is set",
            param="dataset_name",
            value=name,
        )
    if batch_size != 1 and not (ranks or embeds):
        raise InputError(
            "--random-batch-size is for requests of embeddings and ranks; a prompt to generate from goes alone",
            param="random_batch_size",
            value=batch_size,
        )


def dataset_options(args: argparse.Namespace, *, apply_chat_template: bool) -> DatasetOptions:
    names = {field.name for field in dataclasses.fields(DatasetOptions)}
    chosen = {name: value for name, value in vars(args).items() if name in names}
    return DatasetOptions(**chosen, apply_chat_template=apply_chat_template)


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", default=None, help="model name in requests; unset asks the server")
    add("--served-model-name", default=None, help="model name in requests, where it is not --model")
    add("--tokenizer", default=None, help="folder, file or hub id; unset takes the model's")
    add("--tokenizer-mode", default="auto", help="as the engine's option (default: auto)")
    add("--trust-remote-code", action="store_true", help="as the engine's option")


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    add_tokenizer_flags(parser)
    add_dataset_flags(parser)
    _add_server_flags(parser)
    _add_load_flags(parser)
    _add_request_flags(parser)
    _add_result_flags(parser)
    for name in NOT_BUILT:
        parser.add_argument(f"--{name}", action=Refused, nargs="*", help=argparse.SUPPRESS)


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--backend", choices=BACKENDS, default="openai", help="what speaks there (default: openai)")
    add("--base-url", default=None, help="http(s)://host:port[/prefix]; goes before --host and --port")
    add("--host", default="127.0.0.1", help="the server's (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="the server's (default: 8000)")
    add("--endpoint", default="/v1/completions", help="path (default: /v1/completions)")
    add("--header", type=key_value, nargs="*", default=[], metavar="KEY=VALUE", help="further headers")
    add("--insecure", action="store_true", help="do not check the server's certificate")
    add("--ready-check-timeout-sec", type=float, default=0.0, help="wait this long for a first answer (default: 0)")
    add("--profile", action="store_true", help="call /start_profile and /stop_profile around the run")


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--request-rate", type=float, default=float("inf"), help="requests a second (default: inf, all at once)")
    add("--burstiness", type=float, default=1.0, help="1 is a Poisson process, less is burstier (default: 1)")
    add("--max-concurrency", type=int, default=None, help="requests under way at once, at most")
    add("--ramp-up-strategy", choices=STRATEGIES, default=None, help="let the rate grow")
    add("--ramp-up-start-rps", type=float, default=None, help="the ramp's first rate")
    add("--ramp-up-end-rps", type=float, default=None, help="the ramp's last rate")
    add("--num-warmups", type=int, default=0, help="requests before the clock starts (default: 0)")
    add("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")


def _add_request_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    for name, kind in SAMPLING.items():
        add(f"--{name.replace('_', '-')}", type=kind, default=None, help="unset leaves it to the server")
    add("--ignore-eos", action="store_true", help="always generate the asked length")
    add("--logprobs", type=int, default=None, help="log probabilities per token")
    add("--use-beam-search", action="store_true", help="ask for beam search, which is not streamed: with --no-stream")
    add("--no-stream", action="store_true", help="whole answers: TTFT is then the whole time")
    add("--extra-body", type=json_mapping, default={}, metavar="JSON", help="further fields of every request")
    add("--chat-template-kwargs", type=json_mapping, default=None, metavar="JSON", help="for the chat template")
    add("--request-id-prefix", default=f"bench-{uuid.uuid4().hex[:8]}-", help="of X-Request-Id")


def _add_result_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("result").add_argument
    add("--percentile-metrics", default="ttft,tpot,itl", help="of ttft,tpot,itl,e2el (default: ttft,tpot,itl)")
    add("--metric-percentiles", default="99", help="like 25,50,99 (default: 99)")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="limits a good request keeps, like ttft:200")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add("--label", default=None, help="name of the run; unset is the backend")
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help="with every request in it")
    add("--append-result", action="store_true", help="add to the JSON file instead of replacing it")
    add("--result-dir", default=None, help="folder of the JSON file and the plots")
    add("--result-filename", default=None, help="unset is made of label, rate, model and date")
    add("--metadata", type=key_value, nargs="*", default=[], metavar="KEY=VALUE", help="further keys of the JSON file")
    add("--plot-timeline", action="store_true", help="draw every request over time (PNG)")
    add("--timeline-itl-thresholds", default="25,50", help="milliseconds where the colours change (default: 25,50)")
    add("--plot-dataset-stats", action="store_true", help="draw the lengths of prompts and answers (PNG)")
