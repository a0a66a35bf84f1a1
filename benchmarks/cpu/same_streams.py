"""Greedy streams of a live server, all at once, beside the same questions asked one at a time: how many differ.

    python benchmarks/cpu/same_streams.py [--streams 64] [--tokens 64] [--serve OPTION …]

Starts `quire serve` with the embedded model as it is by default (options of `serve` may follow `--serve`). Every
question is asked alone with the prefix cache reset before it, then all at once with an empty cache, then all at once
again, when each finds its own prompt in the cache. The exit status is 1 if an answer differs from the one given alone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

THINGS = ("the sea", "a bicycle", "bread", "the moon", "a violin", "glass", "a forest", "salt")
FORMS = (
    "Explain {} to a child.", "Write a short poem about {}.", "List three facts about {}.", "Why do people like {}?",
    "Tell a story of {} in one paragraph.", "What would the world be without {}?", "Describe {}.",
    "Who first wrote about {}?",
)  # fmt: skip
COMMON = "You answer in plain words, you never apologise, and you stop when everything is said. " * 4


def main() -> int:
    options = parse()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "quire.cli.main", "serve", "--port", str(port), *options.serve]
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, server)
        return compare(url, options)
    finally:
        server.terminate()
        server.wait()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[])
    return parser.parse_args()


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"the server ended with status {server.returncode} before it was ready")


def compare(url: str, options: argparse.Namespace) -> int:
    pairs = [(thing, form) for form in FORMS for thing in THINGS]
    questions = [
        pairs[n % len(pairs)][1].format(pairs[n % len(pairs)][0]) + "!" * (n // len(pairs))
        for n in range(options.streams)
    ]
    alone = []
    for question in questions:
        reset(url)
        alone.append(ask(url, question, options.tokens))
    reset(url)
    status = 0
    for name in ("at once, nothing in the cache", "at once, prompts in the cache"):
        with ThreadPoolExecutor(options.streams) as threads:
            together = list(threads.map(lambda question: ask(url, question, options.tokens), questions))
        differ = [n for n, (a, b) in enumerate(zip(alone, together, strict=True)) if a != b]
        print(f"{len(differ)} of {len(questions)} differ from the answer given alone ({name})", flush=True)
        for n in differ[:3]:
            print(f"  {questions[n]}\n    alone    {alone[n]!r}\n    together {together[n]!r}")
        status |= bool(differ)
    return status


def reset(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")).close()


def ask(url: str, question: str, tokens: int) -> str:
    messages = [{"role": "system", "content": COMMON}, {"role": "user", "content": question}]
    body = {"messages": messages, "temperature": 0, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text = []
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    sys.exit(f"{question}: {event['error']}")
                text += [choice["delta"].get("content") or "" for choice in event["choices"]]
    return "".join(text)


if __name__ == "__main__":
    sys.exit(main())
