"""The host's own cost of embedding a text: LLM.embed of a BERT whose arithmetic is left out, in processor time.

python benchmarks/embed_host.py [--texts 10000] [--width 768] [--rounds 3] [--strings] [--profile]

The path is the real one (inputs, scheduler, loop, rows, results, vectors as lists); only the model's layers and the
sums over texts are replaced by a constant, as if a device computed them in no time. Texts have 5 to 200 tokens: ids, or
with `--strings` words that a WordPiece tokenizer made for this run has to find. Microseconds of processor time a text,
best of the rounds, and in one further round by part: prepare (checks, tokenizing, requests), submit, plan, forward (the
step's arrays), sample and result (heads, vectors to the host), commit, take (outputs to results); the rest is reading
prompts, the making and freeing of lists, and what the measuring costs. `--profile` prints functions by their own
time instead, which overstates small ones.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import pstats
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

beside = importlib.import_module("gpu.pooling")
WORDS = 2000


def make_model(folder: Path, width: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    shape = BertConfig(
        vocab_size=30522, hidden_size=width, num_hidden_layers=1, num_attention_heads=max(1, width // 64),
        intermediate_size=64,
    )  # fmt: skip
    BertModel(shape).save_pretrained(folder)
    beside.write_modules(folder, width)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    ).save_pretrained(folder)


def make_strings(count: int) -> list[str]:
    rng = random.Random(0)
    return [" ".join(f"w{rng.randrange(WORDS)}" for _ in range(rng.randint(3, 198))) for _ in range(count)]


class Parts:
    """Processor seconds by part; what runs inside another part is not counted twice."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[float] = []

    def time(self, owner: Any, method: str, part: str) -> None:
        wrapped: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._open.append(0.0)
            began = time.thread_time()
            try:
                return wrapped(*args, **kwargs)
            finally:
                taken = time.thread_time() - began
                self.seconds[part] += taken - self._open.pop()
                if self._open:
                    self._open[-1] += taken

        setattr(owner, method, timed)


def leave_out_arithmetic(runner: Any, width: int) -> None:
    nothing = torch.ones(1, 1)
    runner.model.read = lambda texts: nothing.expand(len(texts.token_ids), width)
    runner._sums = lambda hidden, counts: torch.ones(len(counts), width)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=10000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strings", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_model(folder, args.width)
        from quire import LLM

        llm = LLM(str(folder), runner="pooling", dtype="float32", max_model_len=512, max_num_batched_tokens=16384)
    front = llm.llm_engine.front
    loop = front.client.loop
    runner = loop.executor._worker._runner
    leave_out_arithmetic(runner, args.width)
    prompts: Any = make_strings(args.texts) if args.strings else [
        {"prompt_token_ids": ids} for ids in beside.make_prompts(args.texts)
    ]  # fmt: skip
    llm.embed(prompts[:300], use_tqdm=False)
    if args.profile:
        profiler = cProfile.Profile(time.process_time)
        profiler.runcall(llm.embed, prompts, use_tqdm=False)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
        return 0
    best = min(_cpu(llm, prompts) for _ in range(args.rounds))
    parts = Parts()
    for owner, method, part in (
        (front, "prepare_pooled", "prepare"), (llm.llm_engine, "add", "submit"), (loop.scheduler, "plan", "plan"),
        (loop.executor, "forward", "forward"), (loop.executor, "sample", "sample and result"),
        (loop, "settle", "sample and result"), (loop.scheduler, "commit", "commit"), (front, "take", "take"),
    ):  # fmt: skip
        parts.time(owner, method, part)
    whole = _cpu(llm, prompts)
    print(f"RESULT {args.texts} texts, width {args.width}: {1e6 * best / args.texts:.1f} us of processor time a text")
    parts.seconds["rest"] = whole - sum(parts.seconds.values())
    for part, seconds in sorted(parts.seconds.items(), key=lambda one: -one[1]):
        print(f"  {part}: {1e6 * seconds / args.texts:.1f}")
    return 0


def _cpu(llm: Any, prompts: Any) -> float:
    began = time.process_time()
    for one in llm.embed(prompts, use_tqdm=False):
        one.outputs.embedding  # noqa: B018  # where it is made when it is read
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
