"""Requests generated from our own OpenAPI page (schemathesis), sent to a live server.

    python -m tests.server.fuzz --requests 2000

Half of them follow the page's schemas, half break them somewhere. Bodies drawn at random nearly always hold some field
that is refused, so those are thinned out: about half of the requests that follow the schemas reach the engine.
Every answer must have a documented status under 500, its documented type and form; errors must be the dialect's.
"""

from __future__ import annotations

import argparse
import collections
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.live import Live, live_fake

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
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


OPENAI_ERROR = {"message", "type", "param", "code"}


@dataclass
class Tally:
    requests: int = 0
    by_status: collections.Counter[tuple[str, int]] = field(default_factory=collections.Counter)

    def of(self, status: int) -> int:
        return sum(count for (_, found), count in self.by_status.items() if found == status)


def fuzz(server: Live, requests: int, *, begin: int = 0) -> Tally:
    """About so many requests over all operations; those that generate get most."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    weights = [8 if op.body and "/v1/" in op.path else 3 if op.body else 1 for op in operations]
    tally = Tally()
    rng = random.Random(begin)
    for operation, weight in zip(operations, weights, strict=True):
        share = max(1, round(requests * weight / sum(weights)))
        modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] if operation.body else [GenerationMode.POSITIVE]
        for mode in modes:
            _run(operation, mode, max(1, share // len(modes)), tally, rng, begin)
    return tally


def _run(operation: Any, mode: GenerationMode, examples: int, tally: Tally, rng: random.Random, begin: int) -> None:
    def send(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            _thin(case, rng)
        response = case.call(timeout=120)
        tally.requests += 1
        tally.by_status[operation.path, response.status_code] += 1
        assert response.status_code < 500, f"{operation.path} {case.body!r}: {response.text[:500]}"
        if response.status_code >= 400:
            wanted = {"type", "message"} if operation.path.startswith("/v1/messages") else OPENAI_ERROR
            assert set(response.json()["error"]) == wanted, response.text
        case.validate_response(response, checks=CHECKS)

    end = tally.requests + examples
    while tally.requests < end:  # where few inputs are possible, one run sends fewer than it may
        run = given(case=operation.as_strategy(generation_mode=mode))(send)
        run = settings(
            max_examples=end - tally.requests, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(run)  # fmt: skip
        seed(begin + tally.requests)(run)()


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
    if isinstance(body.get("messages"), list) and rng.random() < 0.7:
        for message in body["messages"]:
            if isinstance(message, dict):
                message["role"] = rng.choice(["user", "assistant", "system", "tool"])
                if not isinstance(message.get("content"), str):
                    message["content"] = rng.choice(["hi", [{"type": "text", "text": "é"}], None])
                message.pop("tool_calls", None)


def is_alive(server: Live) -> None:
    """The engine answers, is healthy, and nothing is left running."""
    answer = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 3})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "abc", answer.text
    assert httpx.get(server.url + "/health").status_code == 200
    assert len(server.engine.front.outputs) == 0 and server.engine.is_running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, live_fake(Path(folder) / "model") as server:
        tally = fuzz(server, args.requests, begin=args.seed)
        is_alive(server)
    print(f"{tally.requests} requests, no 5xx, the engine answers")
    for (path, status), count in sorted(tally.by_status.items()):
        print(f"{path:<28}{status:>5}{count:>7}")


if __name__ == "__main__":
    main()
