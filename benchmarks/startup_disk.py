"""A start with real weight files against the speed of the disk they lie on.

    python benchmarks/startup_disk.py MODEL_FOLDER TARGET_FOLDER [--options JSON]

Writes a checkpoint with the shapes of MODEL_FOLDER's config.json (Qwen3, dense) and random numbers to TARGET_FOLDER, as
sharded safetensors. Then, each time with the files' pages given back to the system first: reads them past the page
cache with several threads (the disk's own speed), and starts the engine in a process of its own, printing its phases.
A third start finds the files in memory. Needs as much disk as the model has bytes, and removes nothing.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

SHARD = 4 << 30
PIECE = 16 << 20
THREADS = 8
START = """
import json, sys, time
began = time.perf_counter()
from quire import LLM
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
ready = llm.llm_engine.front.ready
phases = [(p.name, p.seconds, p.inside) for p in ready.phases]
print(json.dumps({"seconds": time.perf_counter() - began, "phases": phases}))
"""


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as Hugging Face saves them."""
    width, ffn, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", (width,)
        yield at + "post_attention_layernorm.weight", (width,)
        for name, shape in (
            ("q", (heads, width)),
            ("k", (kv_heads, width)),
            ("v", (kv_heads, width)),
            ("o", (width, heads)),
        ):
            yield f"{at}self_attn.{name}_proj.weight", shape
        yield at + "self_attn.q_norm.weight", (size,)
        yield at + "self_attn.k_norm.weight", (size,)
        for name, shape in (("gate", (ffn, width)), ("up", (ffn, width)), ("down", (width, ffn))):
            yield f"{at}mlp.{name}_proj.weight", shape
    yield "model.norm.weight", (width,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (config["vocab_size"], width)


def write(source: Path, target: Path) -> list[Path]:
    target.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        (target / name).write_text((source / name).read_text())
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    held = 0
    for name, shape in tensors(json.loads((source / "config.json").read_text())):
        size = 2 * int(np.prod(shape))
        if held + size > SHARD and shards[-1]:
            shards.append([])
            held = 0
        shards[-1].append((name, shape))
        held += size
    values = (np.random.default_rng(0).standard_normal(1 << 22, np.float32) * 0.02).view(np.uint32) >> 16
    block = values.astype(np.uint16).tobytes()  # bfloat16, by cutting
    paths = [target / f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    owners = {name: path.name for path, shard in zip(paths, shards, strict=True) for name, _ in shard}
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": owners}))
    for path, shard in zip(paths, shards, strict=True):
        write_shard(path, shard, block)
    return paths


def write_shard(path: Path, shard: list[tuple[str, tuple[int, ...]]], block: bytes) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shard:
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = end
        while left:
            left -= file.write(block[: min(left, len(block))])
        file.flush()
        os.fsync(file.fileno())


def forget(paths: list[Path]) -> None:
    """Give the files' pages back."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read_directly(paths: list[Path]) -> float:
    """Seconds to read all of it past the page cache."""

    def read(job: tuple[Path, int]) -> int:
        path, start = job
        buffer = mmap.mmap(-1, PIECE)
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(file, [buffer], start)
        finally:
            os.close(file)

    jobs = [(path, start) for path in paths for start in range(0, path.stat().st_size, PIECE)]
    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        total = sum(pool.map(read, jobs))
    assert total == sum(path.stat().st_size for path in paths)
    return time.perf_counter() - began


def start(folder: Path, options: dict[str, Any], label: str) -> None:
    command = [sys.executable, "-c", START, str(folder), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    found = json.loads(done.stdout.splitlines()[-1])
    phases = ", ".join(f"{inside + '/' if inside else ''}{name} {s:.2f}" for name, s, inside in found["phases"])
    print(f"{label}: ready in {found['seconds']:.2f} s ({phases})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--options", default="{}", type=json.loads)
    args = parser.parse_args()
    options = {"skip_tokenizer_init": True, "max_model_len": 10240} | args.options
    began = time.perf_counter()
    paths = write(args.model, args.target)
    size = sum(path.stat().st_size for path in paths)
    print(f"wrote {size / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s", flush=True)
    forget(paths)
    seconds = read_directly(paths)
    print(f"the disk alone: {seconds:.2f} s, {size / 1e9 / seconds:.2f} GB/s", flush=True)
    for label in ("from disk, first start", "from disk", "from memory"):
        if label != "from memory":
            forget(paths)
        start(args.target, options, label)


if __name__ == "__main__":
    main()
