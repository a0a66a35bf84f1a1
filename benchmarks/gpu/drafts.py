"""Speculative decoding on a GPU with random weights, whose texts nothing could guess: how many drafts are right is set.

    python benchmarks/gpu/drafts.py FOLDER [--rows 1,32] [--never 1,32,256] [--outputs 256] [--drafter FOLDER]

Plain decoding first. Then drafts of four tokens of which three are right (--rows at once): what is right is known from
a run in which all drafts were wrong, whose steps have the same shape, so that rounding is the same. Then an engine that
adapts to drafts that are never right (--never). Greedy, prompts of 128 random ids. Prints tokens a second and their
ratio to plain decoding, and how many drafts of a step were right. --drafter: a draft model, whose drafts are computed
and then replaced.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.config.drafting import SpeculativeConfig
from quire.drafting.proposer import MODEL_EVIDENCE, NOTHING, Proposal
from quire.observe.reader import Counter
from quire.schema.kv import KVLayout
from quire.schema.step import NewRow
from quire.worker.draft_model import DraftModel
from quire.worker.drafters import Drafter

DRAFTS, RIGHT, PROMPT = 4, 3, 128
TEXTS = Path(tempfile.gettempdir()) / "quire-benchmark-drafts.json"  # by the prompt's first ids: what follows
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 2048, "gpu_memory_utilization": 0.9,
    "seed": 0, "disable_log_stats": False,
}  # fmt: skip


def key_of(prompt: Sequence[int]) -> str:
    return ",".join(map(str, prompt[:8]))


class Script:
    """A proposer (custom_class): three right drafts and a wrong one, where the text is known; wrong ones where not."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._texts: dict[str, list[int]] = {}
        self._rows: dict[str, tuple[str, int]] = {}  # key of the text, tokens said
        self._read = 0.0

    def begin(self, new: NewRow) -> None:
        if TEXTS.exists() and TEXTS.stat().st_mtime != self._read:
            self._texts, self._read = json.loads(TEXTS.read_text()), TEXTS.stat().st_mtime
        self._rows[new.request_id] = key_of(new.token_ids), len(new.token_ids) - new.num_prompt_tokens

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        key, said = self._rows[request_id]
        self._rows[request_id] = key, said + len(token_ids)

    def end(self, request_id: str) -> None:
        self._rows.pop(request_id, None)

    def propose(self, request_ids: Sequence[str], count: int) -> list[Proposal]:
        return [self._propose(*self._rows[name], count) for name in request_ids]

    def _propose(self, key: str, said: int, count: int) -> Proposal:
        text = self._texts.get(key)
        if text is None:
            return Proposal([1] * count)
        right = text[said : said + min(RIGHT, count)]
        return Proposal([*right, *[1] * (count - len(right))]) if right else NOTHING


class Paid(Script):
    """A draft model drafts, and the script says something else. It goes on as if those had been its drafts."""

    def __init__(self, own: DraftModel) -> None:
        super().__init__(SpeculativeConfig())
        self._own = own

    def begin(self, new: NewRow) -> None:
        super().begin(new)
        self._own.begin(new)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        super().extend(request_id, token_ids)
        self._own.extend(request_id, token_ids)

    def end(self, request_id: str) -> None:
        super().end(request_id)
        self._own.end(request_id)

    def behind(self, request_id: str) -> int | None:
        return self._own.behind(request_id)

    def propose(self, request_ids: Sequence[str], count: int) -> list[Proposal]:
        drafts = self._own.propose(request_ids, count)
        said = super().propose(request_ids, count)
        for name, own, other in zip(request_ids, drafts, said, strict=True):
            if own.token_ids and other.token_ids:
                self._own._memory.drafted[name] = other.token_ids
        return [Proposal(one.token_ids, MODEL_EVIDENCE) for one in said]


def pay_for_drafts() -> None:
    plain = Drafter.proposer

    def proposer(self: Drafter, layout: KVLayout, max_model_len: int) -> Paid:
        own = plain(self, layout, max_model_len)
        assert isinstance(own, DraftModel)
        return Paid(own)

    Drafter.proposer = proposer  # type: ignore[method-assign]


def ask(llm: LLM, count: int, num_outputs: int) -> tuple[float, list[list[int]], list[list[int]]]:
    """Tokens a second, prompts, answers."""
    rng = random.Random(count)
    prompts = [[rng.randrange(10, 150_000) for _ in range(PROMPT)] for _ in range(count)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_outputs, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    llm.generate(
        given, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False
    )  # prompts are read: decoding is timed
    began = time.perf_counter()
    outputs = llm.generate(given, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return count * num_outputs / seconds, prompts, [list(output.outputs[0].token_ids) for output in outputs]


def counts(llm: LLM) -> tuple[int, int]:
    found = {one.name: one.value for one in llm.get_metrics() if isinstance(one, Counter)}
    return (
        int(found.get("vllm:spec_decode_num_drafts", 0)), int(found.get("vllm:spec_decode_num_accepted_tokens", 0))
    )  # fmt: skip


def stop(llm: LLM) -> None:
    llm.close()


def scripted(llm: LLM, rows: Sequence[int], plain: Mapping[int, float], num_outputs: int) -> None:
    """None right, then a set share."""
    for count in rows:
        rate, prompts, answers = ask(llm, count, num_outputs)
        print(f"none of {DRAFTS} right {count}: {rate:.0f} tokens/s ({rate / plain[count]:.2f})", flush=True)
        TEXTS.write_text(json.dumps({key_of(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}))
        before = counts(llm)
        rate, _, again = ask(llm, count, num_outputs)
        num, right = (now - then for now, then in zip(counts(llm), before, strict=True))
        same = sum(a == b for a, b in zip(answers, again, strict=True))
        print(
            f"{RIGHT} of {DRAFTS} right {count}: {rate:.0f} tokens/s ({rate / plain[count]:.2f}); "
            f"{right / max(1, num):.2f} of {DRAFTS} were right; {same} of {count} answers equal",
            flush=True,
        )
        TEXTS.unlink()
    stop(llm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--never", default="1,8,32,128,256")
    parser.add_argument("--outputs", type=int, default=256)
    parser.add_argument("--drafter", default="")
    args = parser.parse_args()
    rows, never = ([int(one) for one in given.split(",") if one] for given in (args.rows, args.never))
    drafted: dict[str, Any] = {
        "method": "custom_class", "model": "drafts:Script", "num_speculative_tokens": DRAFTS, "adaptive": False,
    }  # fmt: skip
    if args.drafter:
        drafted |= {"method": "draft_model", "model": args.drafter, "draft_load_config": {"load_format": "dummy"}}
        pay_for_drafts()
    TEXTS.unlink(missing_ok=True)
    plain: dict[int, float] = {}
    llm = LLM(model=args.model, **OPTIONS)
    for count in sorted({*rows, *never}):
        plain[count] = max(ask(llm, count, args.outputs)[0] for _ in range(2))
        print(f"plain {count}: {plain[count]:.0f} tokens/s", flush=True)
    stop(llm)
    if rows:
        scripted(LLM(model=args.model, **OPTIONS, speculative_config=drafted), rows, plain, args.outputs)
    llm = LLM(model=args.model, **OPTIONS, speculative_config=drafted | {"adaptive": True})
    for count in never:
        rates = [ask(llm, count, args.outputs)[0] for _ in range(2)]
        print(f"adaptive, never right {count}: {max(rates):.0f} tokens/s ({max(rates) / plain[count]:.3f})", flush=True)
    print("verified in all:", counts(llm), flush=True)
    stop(llm)


if __name__ == "__main__":
    main()
