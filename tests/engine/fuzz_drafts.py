"""Engine fuzzer with drafts: random methods, plans, grammars, aborts and preemptions; every answer is plain decoding's.

    QUIRE_BATCH_INVARIANT=1 python -m tests.engine.fuzz_drafts --seconds 600 --seed 1

Each round takes a model (plain, with windows, with recurrent states), decodes some requests plainly, and then again
with drafts while requests come, are aborted and are preempted. Nothing may be lost, told twice, or differ by a token.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from quire.schema.messages import EngineRequest, FinishReason
from quire.schema.step import StepPlan
from tests.engine.test_draft_states import ScriptedDrafter
from tests.engine.test_drafts import Engine, Found, ask
from tests.engine.test_speculative import METHODS, Run, answers
from tests.tiny_models import VOCAB, write_tiny

MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "BambaForCausalLM", "Lfm2ForCausalLM")  # the last two with states
REGEXES = ["[0-9]{3,9}", "(yes|no)(, (yes|no)){2,4}", "[a-f]{2}-[a-z]+!"]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.0, "ignore_eos": True, "allowed_token_ids": (5, 6, 7)},
    {"temperature": 0.8, "top_k": 3, "allowed_token_ids": (5, 6, 7, 8)},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 1},
    {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"temperature": 0.0, "min_tokens": 5, "bad_words_token_ids": [[5], [6, 7]], "stop_token_ids": (21, 40)},
]


class Engines:
    """One of each model, made when it is needed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, dict[str, Engine]()

    def __getitem__(self, name: str) -> Engine:
        if name not in self._made:
            write_tiny(name, self._folder / name)
            keys = {**METHODS["ngram"], "num_speculative_tokens": 8}
            self._made[name] = Engine(str(self._folder / name), dtype="float32", speculative_config=keys)
        return self._made[name]

    def close(self) -> None:
        for engine in self._made.values():
            engine.close()


def draw_requests(rng: random.Random, tag: str) -> list[EngineRequest]:
    stem = [rng.randrange(4, VOCAB) for _ in range(48)]
    made = []
    for i in range(rng.randint(6, 20)):
        piece = [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 12))]
        prompt = stem[: rng.choice((0, 0, 17, 48))] + (piece * 6)[: rng.randint(1, 40)]
        regex = rng.choice(REGEXES) if rng.random() < 0.3 else None
        one = ask(f"{tag}-{i}", prompt, rng.randint(1, 30), regex, **rng.choice(PARAMS[:1] if regex else PARAMS))
        made.append(replace(one, priority=rng.randint(0, 3), arrival=float(i), seed=rng.getrandbits(40)))
    return made


def draw_settings(rng: random.Random, model: str) -> dict[str, Any]:
    return {
        "depth": rng.choice((1, 1, 2)), "policy": rng.choice(("fcfs", "priority")),
        "prefix_caching": model in MODELS[:2] and rng.random() < 0.5, "max_num_batched_tokens": rng.choice((9, 20, 64)),
        "max_num_seqs": rng.choice((1, 3, 8)), "num_blocks": rng.choice((None, None, 30)),
    }  # fmt: skip


def draw_method(rng: random.Random, asked: list[EngineRequest], plain: Found) -> tuple[dict[str, Any], Any]:
    name = rng.choice(("scripted", "scripted", "ngram", "suffix", "custom"))
    keys = METHODS["ngram" if name == "scripted" else name]
    keys = {**keys, "num_speculative_tokens": rng.choice((1, 3, 8)), "adaptive": rng.random() < 0.2}
    return keys, ScriptedDrafter(asked, plain) if name == "scripted" else None


def play(run: Run, rng: random.Random, asked: list[EngineRequest], seen: Counter[str]) -> set[str]:
    """Which were aborted."""
    waiting, aborted = list(asked), set[str]()
    aborts, preempts, comes = rng.choice((0, 0.02, 0.1)), rng.choice((0, 0, 0.05)), rng.choice((1.0, 0.3))
    while waiting or not run.loop.is_drained():
        if waiting and rng.random() < comes:
            run.loop.submit(waiting.pop(0))
        if rng.random() < aborts and (live := run.loop.live_ids()):
            name = rng.choice(live)
            aborted.add(name)
            run.loop.abort([name])
        if rng.random() < preempts:
            run.loop.settle(0)
            seen["preempted"] += len(run.scheduler.planner.running)
            run.scheduler.reset_prefix_cache(reset_running_requests=True)
        run.step()
        seen["steps"] += 1
    run.runner.forward(StepPlan(step=0, grants=(), left=tuple(run.scheduler.planner.left)))
    return aborted


def round_of(engines: Engines, seed: int, seen: Counter[str]) -> None:
    rng = random.Random(seed)
    model = rng.choice(MODELS)
    engine, asked = engines[model], draw_requests(rng, f"{seed}")
    plain = answers(engine, asked, None).found
    keys, drafter = draw_method(rng, asked, plain)
    run = Run(engine, keys, drafter, **draw_settings(rng, model))
    aborted = play(run, rng, asked, seen)
    assert run.found.keys() == plain.keys(), "one was lost"
    for name, (tokens, logprobs, reason) in run.found.items():
        expected, their_logprobs, their_reason = plain[name]
        if reason is FinishReason.ABORT:
            assert name in aborted and tokens == expected[: len(tokens)], name
        else:
            assert (tokens, logprobs, reason) == (expected, their_logprobs, their_reason), name
    grammars = sum(one.params.grammar is not None for one in asked)
    seen.update(rounds=1, requests=len(asked), grammars=grammars, aborted=len(aborted), right=run.num_accepted)
    seen.update(tokens=sum(len(tokens) for tokens, _, _ in run.found.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz the engine with drafts.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    seen, began, seed = Counter[str](), time.monotonic(), asked.seed * 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(Path(folder))
        while time.monotonic() - began < asked.seconds:
            try:
                round_of(engines, seed, seen)
            except BaseException:
                print(f"round {seed} failed", flush=True)
                raise
            seed += 1
            print(f"{time.monotonic() - began:.0f} s: {dict(seen)}", flush=True)
        engines.close()


if __name__ == "__main__":
    main()
