"""Requests generated from our own OpenAPI page (schemathesis), sent to a live server.

    python -m tests.server.fuzz --requests 10000                             # over the worker that repeats its prompt
    python -m tests.server.fuzz --url http://127.0.0.1:8000 --seconds 600    # a server that runs, for so long

Half of them follow the page's schemas, half break them somewhere. Bodies drawn at random nearly always hold some field
that is refused, so those are thinned out: about half of the requests that follow the schemas reach the engine.
Every answer must come within 10 s and have a documented status under 500 (or 503: the server has its limits), its
documented type and form; errors must be the dialect's.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.live import Live, live_fake

CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]
HANG_S = 10.0
ALWAYS_REFUSED = (
    "suffix", "prompt_embeds", "watermarking", "thinking_token_budget",
    "kv_transfer_params", "ec_transfer_params", "routed_experts_prompt_start", "return_token_offsets",
    "return_mm_kwargs", "media_io_kwargs", "mm_processor_kwargs", "tool_choice",
    "chat_template", "chat_template_kwargs", "priority", "stream_interval", "logprob_token_ids", "allowed_token_ids",
    "truncate_prompt_tokens", "min_tokens",
)  # fmt: skip
OFTEN_REFUSED = (
    "n", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "stop", "stop_token_ids",
    "logit_bias", "bad_words", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "cache_salt", "request_id", "stream_options", "structured_outputs", "response_format",
    "use_beam_search", "length_penalty",
)  # fmt: skip


LENGTHS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/chat/completions/batch": ("max_tokens", "max_completion_tokens"),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/invocations": ("max_tokens", "max_completion_tokens"),
}
OPENAI_ERROR = {"message", "type", "param", "code"}


@dataclass
class Tally:
    requests: int = 0
    by_status: collections.Counter[tuple[str, int]] = field(default_factory=collections.Counter)
    slowest: float = 0.0

    def of(self, status: int) -> int:
        return sum(count for (_, found), count in self.by_status.items() if found == status)


@dataclass
class Fuzzer:
    """Sends generated requests to one server. The first answer that is not as promised ends it."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    pause: float = 0.0  # seconds after each request
    most_tokens: int | None = None  # of an answer, where a real model makes it
    stop_at: float = float("inf")
    tally: Tally = field(default_factory=Tally)
    rng: random.Random = field(default_factory=random.Random)

    def run(self, requests: int, begin: int) -> Tally:
        """About so many requests over all operations; those that generate get most."""
        self.rng.seed(begin)
        self._warm_up()
        schema = schemathesis.openapi.from_url(f"{self.url}/openapi.json", headers=dict(self.headers))
        operations = [found.ok() for found in schema.get_all_operations()]
        weights = [8 if op.body and "/v1/" in op.path else 3 if op.body else 1 for op in operations]
        for operation, weight in zip(operations, weights, strict=True):
            share = max(1, round(requests * weight / sum(weights)))
            modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] if operation.body else [GenerationMode.POSITIVE]
            for mode in modes:
                self._run(operation, mode, max(1, share // len(modes)), begin)
        return self.tally

    def _warm_up(self) -> None:
        """The first constraint of a process is waited for longer than any other: libraries are imported."""
        body = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": {"type": "object"}}}
        httpx.post(f"{self.url}/v1/completions", json=body, headers=dict(self.headers), timeout=120)

    def _run(self, operation: Any, mode: GenerationMode, examples: int, begin: int) -> None:
        def send(case: Any) -> None:
            if time.monotonic() < self.stop_at:
                self._send(operation, mode, case)

        end = self.tally.requests + examples
        while self.tally.requests < end and time.monotonic() < self.stop_at:
            # where few inputs are possible, one run sends fewer than it may
            run = given(case=operation.as_strategy(generation_mode=mode))(send)
            run = settings(
                max_examples=end - self.tally.requests, deadline=None, database=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )(run)  # fmt: skip
            seed(begin + self.tally.requests)(run)()

    def _send(self, operation: Any, mode: GenerationMode, case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            _thin(case, self.rng)
        if self.most_tokens is not None:
            _shorten(case, self.most_tokens)
        began = time.monotonic()
        response = case.call(timeout=120, headers=dict(self.headers))
        seconds, status = time.monotonic() - began, response.status_code
        tally = self.tally
        tally.requests += 1
        tally.by_status[operation.path, status] += 1
        tally.slowest = max(tally.slowest, seconds)
        what = f"{operation.path} {case.body!r:.2000}"
        assert status < 500 or status == 503, f"{what}: {response.text[:500]}"
        assert seconds < HANG_S, f"{what}: answered {status} after {seconds:.1f} s"
        if status >= 400:
            wanted = {"type", "message"} if operation.path.startswith("/v1/messages") else OPENAI_ERROR
            assert set(response.json()["error"]) == wanted, response.text
        case.validate_response(response, checks=CHECKS)
        time.sleep(self.pause)


def fuzz(server: Live, requests: int, *, begin: int = 0) -> Tally:
    return Fuzzer(server.url).run(requests, begin)


def _thin(case: Any, rng: random.Random) -> None:
    body = case.body
    if not isinstance(body, dict):
        return
    if rng.random() < 0.9:
        body.pop("model", None)
    for names, chance in ((ALWAYS_REFUSED, 0.98), (OFTEN_REFUSED, 0.8)):
        for name in names:
            if rng.random() < chance:
                body.pop(name, None)
    if not body.get("stream"):
        body.pop("stream_options", None)
    if case.operation.path == "/v1/messages" and rng.random() < 0.9:
        body["max_tokens"] = rng.randint(1, 8)
    if rng.random() < 0.8 and case.operation.path.startswith("/v1/completions"):
        body["prompt"] = rng.choice(["a", "hello é", ["ab", "c"], [5, 6], [[7], [8, 9]]])
    if case.operation.path == "/inference/v1/generate" and rng.random() < 0.8:
        body["token_ids"], body["sampling_params"] = rng.choice([[5], [5, 6, 7]]), {"max_tokens": rng.randint(1, 8)}
    if isinstance(body.get("messages"), list) and rng.random() < 0.7:
        for message in body["messages"]:
            if isinstance(message, dict):
                message["role"] = rng.choice(["user", "assistant", "system", "tool"])
                if not isinstance(message.get("content"), str):
                    message["content"] = rng.choice(["hi", [{"type": "text", "text": "é"}], None])
                message.pop("tool_calls", None)


def _shorten(case: Any, most: int) -> None:
    """Most bodies say nothing of their answer's length, and a model may go on until its context is full."""
    body = case.body
    if not isinstance(body, dict):
        return
    for name in LENGTHS.get(case.operation.path, ()):
        if body.get(name) is None or (isinstance(body[name], int) and body[name] > most):
            body[name] = most


def is_alive(server: Live) -> None:
    """The engine answers, is healthy, and nothing is left running."""
    answer = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 3})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "abc", answer.text
    assert httpx.get(server.url + "/health", timeout=60).status_code == 200
    assert len(server.engine.front.outputs) == 0 and server.engine.is_running


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="a server that runs; unset starts one")
    parser.add_argument("--api-key", help="its key")
    parser.add_argument("--seconds", type=float, help="go on for so long, in rounds of --requests, then end")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two requests")
    args = parser.parse_args()
    if args.url is None:
        with tempfile.TemporaryDirectory() as folder, live_fake(Path(folder) / "model") as server:
            tally = fuzz(server, args.requests, begin=args.seed)
            is_alive(server)
    else:
        headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
        fuzzer = Fuzzer(args.url, headers, args.pause, most_tokens=4)
        if args.seconds is not None:
            fuzzer.stop_at = time.monotonic() + args.seconds
        tally = fuzzer.run(args.requests, args.seed)
        while args.seconds is not None and time.monotonic() < fuzzer.stop_at:
            tally = fuzzer.run(args.requests, args.seed + tally.requests)
        assert httpx.get(f"{args.url}/health", timeout=HANG_S).status_code == 200
    print(f"{tally.requests} requests, no 5xx but 503, the slowest {tally.slowest:.2f} s, the engine answers")
    for (path, status), count in sorted(tally.by_status.items()):
        print(f"{path:<28}{status:>5}{count:>7}")
    return int(tally.requests == 0)  # time was over before anything was sent


if __name__ == "__main__":
    sys.exit(main())
