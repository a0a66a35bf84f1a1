"""Parsing and rendering an untrusted template, in a separate process with limited time and memory.

    parent: render_apart(job) ── JSON on stdin ──▶ child: limits on itself, render_job ── JSON, text on stdout ──▶
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
from dataclasses import asdict, replace

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
    try:
        sent = json.dumps({"job": vars(job), "limits": asdict(limits)}).encode()
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
    return text.decode("utf-8", "surrogatepass")


def main() -> None:
    """The child: one job from stdin, one answer to stdout."""
    message = json.loads(sys.stdin.buffer.read())
    limits = TemplateLimits(**message["limits"])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = math.ceil(time.process_time() + limits.seconds)  # full seconds of CPU time, start-up included
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    text = b""
    try:
        text = render_job(ChatJob(**message["job"]), limits).encode("utf-8", "surrogatepass")
        head = {}
    except InputError as wrong:
        head = {"error": str(wrong)[:_LONGEST_ERROR], "param": wrong.param}
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
