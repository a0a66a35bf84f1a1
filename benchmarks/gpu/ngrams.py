"""N-gram drafts on a GPU over prompts that repeat, by a model with random weights that goes on repeating them.

    python benchmarks/gpu/ngrams.py FOLDER [--engine quire] [--method ngram] [--rows 1,32] [--drafts 4]

Outputs of attention and mlp are scaled down to a thousandth, and the rows of the head are those of the embedding, one
token on, in cycles of 64 ids. So every text is a cycle, whichever random numbers an engine fills weights with, and
engines draft alike: `--engine vllm` times another one, in a process that has it and not Quire on its path. Greedy,
prompts of 128 tokens, answers of 256, the better of two runs. Prints tokens a second, how many texts are the cycle that
they must be, and how many drafts were right. `--method ""`: without drafts.
"""

from __future__ import annotations

import argparse
import importlib
import random
import time
from typing import Any

import torch

PROMPT, ANSWER, CYCLE = 128, 256, 64
SMALL = ("o_proj.weight", "down_proj.weight", ".attn.o.weight", ".mlp.down.weight")
COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")


@torch.no_grad()
def repeat(model: Any) -> None:
    """Let the model say the next id of a cycle."""
    named = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, weight in named.items():
        if name.endswith(SMALL):
            weight.mul_(1e-3)
        elif name in ("norm.weight", "model.norm.weight"):
            weight.fill_(1)
    table = next(weight for name, weight in named.items() if "embed" in name)
    head = next(weight for name, weight in named.items() if name.endswith("head.weight"))
    table.normal_(0, 1, generator=torch.Generator(table.device).manual_seed(1))
    ids = torch.arange(len(head) // CYCLE * CYCLE, device=head.device)
    head[: len(ids)] = table[ids // CYCLE * CYCLE + (ids % CYCLE - 1) % CYCLE]


def model_of(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.get_model()


def counters(llm: Any) -> list[int]:
    found: dict[str, int] = {}
    for one in llm.get_metrics():
        if one.name.startswith("vllm:spec_decode_num_") and not one.name.endswith("per_pos"):
            found[one.name] = found.get(one.name, 0) + int(one.value)
    return [found.get(f"vllm:spec_decode_num_{name}", 0) for name in COUNTERS]


def time_rows(engine: Any, llm: Any, count: int) -> str:
    rng, best, num_cycles = random.Random(count), 0.0, 0
    params = engine.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=ANSWER, detokenize=False)
    for _ in range(2):
        starts = [(CYCLE * rng.randrange(10, 2300), rng.randrange(CYCLE)) for _ in range(count)]
        whole = [[first + (at + i) % CYCLE for i in range(PROMPT + ANSWER)] for first, at in starts]
        before, began = counters(llm), time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": text[:PROMPT]} for text in whole], params, use_tqdm=False)
        rate = count * ANSWER / (time.perf_counter() - began)
        if rate > best:
            best, (steps, drafted, right) = rate, [a - b for a, b in zip(counters(llm), before, strict=True)]
        said = [list(output.outputs[0].token_ids) for output in outputs]
        num_cycles = sum(one == text[PROMPT:] for one, text in zip(said, whole, strict=True))
    return (
        f"{count} requests: {best:.0f} tokens/s; {num_cycles} texts as they must be; "
        f"{right} of {drafted} drafts right, {1 + right / max(1, steps):.2f} tokens a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--engine", default="quire")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--drafts", type=int, default=4)
    args = parser.parse_args()
    engine = importlib.import_module(args.engine)
    speculative = {"prompt_lookup_max": 4, "prompt_lookup_min": 2, "num_speculative_tokens": args.drafts}
    llm = engine.LLM(
        model=args.model, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, seed=0,
        gpu_memory_utilization=0.88, disable_log_stats=False,
        speculative_config={"method": args.method, **speculative} if args.method else None,
    )  # fmt: skip
    if args.engine == "quire":
        llm.apply_model(repeat)
    else:
        repeat(model_of(llm))
    for count in map(int, args.rows.split(",")):
        print(f"{args.engine} {args.method or 'plain'}, {time_rows(engine, llm, count)}", flush=True)


if __name__ == "__main__":
    main()
