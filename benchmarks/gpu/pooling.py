"""Embeddings on a GPU: LLM.embed of an encoder with random weights over texts of 5 to 200 token ids, in any engine.

python benchmarks/gpu/pooling.py FOLDER [--engine quire] [--texts 1000 10000] [--rounds 3] [--profile]

FOLDER is made if it is not there: a BERT of the base size (12 layers of 768) with random weights, MEAN pooling.
`--engine vllm` imports that package instead: run it with its own PYTHONPATH, in the same session as the other.
`--engine transformers` computes as sentence-transformers does: sorted by length, padded, --batch-size texts at a time.
Prompts are token ids, so that no tokenizer is measured. Texts per second, the best of the rounds; the sum over all
vectors tells whether two engines computed the same. `--profile` prints what the GPU did.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB, WIDTH, LAYERS, HEADS = 30522, 768, 12, 12
FLOPS_PER_TOKEN = 24 * WIDTH * WIDTH * LAYERS  # of the matmuls; attention is left out
PEAK = 790e12  # of bfloat16 matmuls of an H200
Embed = Callable[[list[list[int]]], list[list[float]]]


def make_model(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
    )  # fmt: skip
    BertModel(shape).to(torch.bfloat16).save_pretrained(folder)
    write_modules(folder, WIDTH)


def write_modules(folder: Path, width: int) -> None:
    """The files by which sentence-transformers knows MEAN pooling and normalizing."""
    parts = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path, _ in parts:
        (folder / path).mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000, VOCAB) for _ in range(rng.randint(5, 200))] for _ in range(count)]


def engine_embeds(engine: str, folder: Path, dtype: str, extra: dict[str, Any]) -> Embed:
    module = importlib.import_module(engine)
    llm = module.LLM(
        model=str(folder), runner="pooling", dtype=dtype, skip_tokenizer_init=True, max_model_len=512,
        gpu_memory_utilization=0.5, **extra,
    )  # fmt: skip

    def embed(prompts: list[list[int]]) -> list[list[float]]:
        given = [{"prompt_token_ids": ids} for ids in prompts]
        return [one.outputs.embedding for one in llm.embed(given, use_tqdm=False)]

    return embed


def transformers_embeds(folder: Path, dtype: str, size: int) -> Embed:
    """As sentence-transformers computes: sorted by length, padded, a batch at a time."""
    import torch
    from transformers import BertModel

    model = BertModel.from_pretrained(folder, dtype=getattr(torch, dtype), add_pooling_layer=False).cuda().eval()

    @torch.inference_mode()
    def embed(prompts: list[list[int]]) -> list[list[float]]:
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        found: list[Any] = [None] * len(prompts)
        for start in range(0, len(order), size):
            part = order[start : start + size]
            longest = len(prompts[part[0]])
            ids = torch.zeros((len(part), longest), dtype=torch.int64)
            mask = torch.zeros((len(part), longest), dtype=torch.int64)
            for row, index in enumerate(part):
                ids[row, : len(prompts[index])] = torch.tensor(prompts[index])
                mask[row, : len(prompts[index])] = 1
            mask = mask.cuda(non_blocking=True)
            hidden = model(input_ids=ids.cuda(non_blocking=True), attention_mask=mask).last_hidden_state
            weights = mask[:, :, None].to(hidden.dtype)
            vectors = torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)
            for index, vector in zip(part, vectors, strict=True):
                found[index] = vector
        return torch.stack(found).float().cpu().tolist()

    return embed


def timed(embed: Embed, prompts: list[list[int]], rounds: int) -> tuple[float, float]:
    """(seconds, least of the rounds; a sum over all vectors)."""
    least, total = float("inf"), 0.0
    for _ in range(rounds):
        vectors: list[list[float]] = []  # those of the round before are freed before this one is timed
        began = time.perf_counter()
        vectors = embed(prompts)
        least = min(least, time.perf_counter() - began)
        total = sum(sum(map(abs, vector)) for vector in vectors)
    return least, total


def profile(embed: Embed, prompts: list[list[int]]) -> None:
    from torch import profiler

    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as found:
        embed(prompts)
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=70))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", default="quire")
    parser.add_argument("--texts", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-size", type=int, default=128, help="of transformers alone")
    parser.add_argument("--extra", type=json.loads, default={}, help="further arguments of LLM, as JSON")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if not args.folder.exists():
        make_model(args.folder)
    began = time.perf_counter()
    if args.engine == "transformers":
        embed = transformers_embeds(args.folder, args.dtype, args.batch_size)
    else:
        embed = engine_embeds(args.engine, args.folder, args.dtype, args.extra)
    start = time.perf_counter() - began
    embed(make_prompts(300, seed=1))
    print(f"RESULT {args.engine} {args.dtype} ready after {start:.1f} s", flush=True)
    for count in args.texts:
        prompts = make_prompts(count)
        tokens = sum(map(len, prompts))
        seconds, total = timed(embed, prompts, args.rounds)
        floor = tokens * FLOPS_PER_TOKEN / PEAK
        print(
            f"RESULT {args.engine} {args.dtype} {count} texts of {tokens} tokens: {seconds:.3f} s, "
            f"{count / seconds:.0f} texts/s (matmuls alone {floor:.3f} s); sum {total:.3f}",
            flush=True,
        )
    if args.profile:
        profile(embed, make_prompts(1000))
    return 0


if __name__ == "__main__":
    sys.exit(main())
