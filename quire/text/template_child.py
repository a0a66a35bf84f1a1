"""Parsing and rendering an untrusted template, in a separate process with limited time and memory.

    parent: render_apart(job) ── JSON on stdin ──▶ child: limits on itself, render_job ── JSON, texts on stdout ──▶
The parent never inspects such a template: parsing, deriving the form of messages it expects, and rendering happen in
the child, and nothing is cached. A child that hangs is killed; one that exceeds its memory fails. Both are
an InputError about the template.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from quire.base.env import sandbox_environment
from quire.base.procs import background_command
from quire.schema.errors import InputError
from quire.text.chat import ChatJob, render_job
from quire.text.template import LIMITS, TemplateLimits

SECONDS_TO_START = 20.0  # in addition to the rendering's, for a busy machine
MEMORY_BYTES = 1 << 30
# A prompt of a million tokens has about four characters per token; longer texts would only be refused later.
APART = replace(LIMITS, output_chars=1 << 24)
_MAIN = "quire.text.template_child:main"
_LONGEST_ERROR = 4096  # characters; a template may raise any message


def render_apart(job: ChatJob, limits: TemplateLimits = APART) -> str:
    return render_all_apart(job, [job.messages], limits)[0]


def render_all_apart(
    job: ChatJob, conversations: Sequence[Sequence[Mapping[str, Any]]], limits: TemplateLimits = APART
) -> list[str]:
    """The job once for each conversation, which take the place of its messages. The limits are those of all of them
    together."""
    try:
        sent = json.dumps({
            "job": {**vars(job), "messages": ()}, "conversations": list(conversations), "limits": asdict(limits),
        }).encode()  # fmt: skip
    except (TypeError, ValueError) as wrong:
        raise InputError(f"messages for a chat template of a request must be plain JSON ({wrong})") from None
    seconds = limits.seconds + SECONDS_TO_START
    try:
        done = subprocess.run(
            background_command(_MAIN),
            input=sent,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
            env=sandbox_environment(),
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"the chat template took over {seconds:g} seconds", param="chat_template") from None
    head, _, text = done.stdout.partition(b"\n")
    if done.returncode != 0 or not head:
        raise InputError(
            f"the chat template used more than {limits.seconds:g} seconds or {MEMORY_BYTES >> 20} MiB "
            f"(its process ended with {done.returncode})",
            param="chat_template",
        )
    answer = json.loads(head)
    if "error" in answer:
        raise InputError(answer["error"], param=answer["param"])
    texts, start = [], 0
    for size in answer["sizes"]:
        texts.append(text[start : start + size].decode("utf-8", "surrogatepass"))
        start += size
    return texts


def main() -> None:
    """The child: one job from stdin, its answers to stdout."""
    message = json.loads(sys.stdin.buffer.read())
    limits = TemplateLimits(**message["limits"])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = math.ceil(time.process_time() + limits.seconds)  # full seconds of CPU time, start-up included
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    texts: list[bytes] = []
    try:
        texts = _render_all(ChatJob(**message["job"]), message["conversations"], limits)
        head: dict[str, Any] = {"sizes": [len(text) for text in texts]}
    except InputError as wrong:
        head = {"error": str(wrong)[:_LONGEST_ERROR], "param": wrong.param}
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")
    sys.stdout.buffer.writelines(texts)
    sys.stdout.buffer.flush()


def _render_all(
    job: ChatJob, conversations: Sequence[Sequence[Mapping[str, Any]]], limits: TemplateLimits
) -> list[bytes]:
    texts, num_chars = [], 0
    for messages in conversations:
        text = render_job(replace(job, messages=messages), limits)
        num_chars += len(text)
        if num_chars > limits.output_chars:
            raise InputError(
                f"the chat template wrote over {limits.output_chars} characters for {len(conversations)} conversations",
                param="chat_template",
            )
        texts.append(text.encode("utf-8", "surrogatepass"))
    return texts
