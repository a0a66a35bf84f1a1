"""Embeddings over HTTP beside the same texts offline: texts per second, their ratio, and whose processor time.

python benchmarks/cpu/embed_http.py MODEL [--texts 1000] [--per-request 32] [--at-once 4] [--rounds 3]

Each round runs LLM.embed, then sends the same texts to `/v1/embeddings` of a `quire serve` that stays up, as base64.
On a machine that others use the processor time is the figure: that of the server's processes over that of the offline
program, the client's left out. How far the vectors differ is printed too.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import json
import os
import sys
import time

import httpx
import numpy as np
from embed import make_texts
from http_batch import children_of, own_seconds, seconds_of, server

from quire import LLM


def over_http(client: httpx.Client, texts: list[str], per_request: int, at_once: int) -> np.ndarray:
    def embed(start: int) -> list[np.ndarray]:
        body = {"input": texts[start : start + per_request], "encoding_format": "base64"}
        answer = client.post("/v1/embeddings", json=body).raise_for_status().json()
        return [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in answer["data"]]

    with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
        groups = threads.map(embed, range(0, len(texts), per_request))
        return np.array([vector for group in groups for vector in group])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--per-request", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ["QUIRE_LOGGING_LEVEL"] = "WARNING"
    texts = make_texts(args.texts)
    llm = LLM(args.model, dtype="float32")
    runs: list[tuple[float, float, float, float]] = []  # wall and processor seconds, offline and over HTTP
    with (
        server(args.model, "--dtype", "float32") as (port, pid),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client,
    ):
        over_http(client, texts[: args.per_request], args.per_request, 1)  # unmeasured: everything imported and warm
        processes = [pid, *children_of(pid)]
        for _ in range(args.rounds):
            began, used = time.perf_counter(), own_seconds()
            offline = np.array([one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)])
            alone = time.perf_counter() - began, own_seconds() - used
            began, used = time.perf_counter(), sum(map(seconds_of, processes))
            online = over_http(client, texts, args.per_request, args.at_once)
            runs.append((*alone, time.perf_counter() - began, sum(map(seconds_of, processes)) - used))
    wall, cpu, http_wall, http_cpu = (min(column) for column in zip(*runs, strict=True))
    gap = float(np.abs(offline - online).max())
    print(f"offline: {wall:.2f} s, {args.texts / wall:.1f} texts/s; {cpu:.2f} s of processor time")
    print(f"/v1/embeddings: {http_wall:.2f} s, {args.texts / http_wall:.1f} texts/s; {http_cpu:.2f} s, all processes")
    print(f"of offline: {wall / http_wall:.3f} by wall time, {cpu / http_cpu:.3f} by processor time; vectors differ by "
          f"{gap:.2e} at most")  # fmt: skip
    print(json.dumps({"texts": args.texts, "runs": runs, "gap": gap}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
