"""Rendering a template that nobody vouches for, in a process of its own with bounded time and memory.

    parent: render_apart(source, variables) ── JSON on stdin ──▶ child: limits on itself, render ── JSON on stdout ──▶
A child that hangs is killed; one that grows dies by itself. Either is an InputError about the template.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from quire.base.env import sandbox_environment
from quire.schema.errors import InputError
from quire.text.template import LIMITS, Limits, render

SECONDS_TO_START = 20.0  # on top of the rendering's own, for a busy machine
MEMORY_BYTES = 1 << 30
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from quire.text.template_child import main; main()"


def render_apart(source: str, variables: Mapping[str, Any], limits: Limits = LIMITS) -> str:
    try:
        job = json.dumps({"source": source, "variables": dict(variables), "limits": asdict(limits)}).encode()
    except (TypeError, ValueError) as wrong:
        raise InputError(f"messages for a chat template of a request must be plain JSON ({wrong})") from None
    seconds = limits.seconds + SECONDS_TO_START
    try:
        done = subprocess.run(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            input=job,
            capture_output=True,
            timeout=seconds,
            check=False,
            env=sandbox_environment(),
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"the chat template took over {seconds:g} seconds", param="chat_template") from None
    if done.returncode != 0:
        raise InputError(
            f"the chat template used more than {limits.seconds:g} seconds or {MEMORY_BYTES >> 20} MiB "
            f"(its process ended with {done.returncode})",
            param="chat_template",
        )
    answer = json.loads(done.stdout)
    if "error" in answer:
        cause = TypeError() if answer["cause"] == "TypeError" else None
        raise InputError(answer["error"], param="chat_template") from cause
    return str(answer["text"])


def main() -> None:
    """The child: one job from stdin, one answer to stdout."""
    job = json.loads(sys.stdin.buffer.read())
    limits = Limits(**job["limits"])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    seconds = math.ceil(time.process_time() + limits.seconds)  # whole seconds of processor time, start-up included
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        answer = {"text": render(job["source"], job["variables"], limits)}
    except InputError as wrong:
        answer = {"error": str(wrong), "cause": type(wrong.__cause__).__name__}
    sys.stdout.write(json.dumps(answer))
