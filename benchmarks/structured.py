"""What a grammar costs on the embedded model: compile times, time per token in loop and worker, and the bare matcher.

    python benchmarks/structured.py
The floor is xgrammar's own matcher: fill one row and accept one token, nothing else. Times per token are processor
time, so that a busy machine does not matter; those to a first token are by the clock, compiling process included.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import torch
import xgrammar

from quire import LLM, SamplingParams
from quire.engine.masking import make_masks
from quire.ops.sample import allow_only_, unpack_mask
from quire.schema.params import StructuredOutputsParams as Constraint

SCHEMA = {
    "type": "array", "minItems": 200,
    "items": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
              "required": ["name", "age"], "additionalProperties": False},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "json, xgrammar": {"json": SCHEMA},
    "json, guidance": {"json": SCHEMA, "whitespace_pattern": r"[ \n]{1,20}"},
    "regex": {"regex": r"([a-z]+ )+"},
}
TOKENS = 96


class Clock:
    """Time spent in one method of an object."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds, self.calls = 0.0, 0
        inner = getattr(owner, name)

        def timed(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return inner(*args)
            finally:
                self.seconds += time.thread_time() - began
                self.calls += 1

        setattr(owner, name, timed)


def on_the_step(llm: LLM, batch: int, constraint: dict[str, Any], clocks: list[Clock]) -> float:
    """Microseconds per token that masks add to the engine's loop."""
    bound = Constraint(**constraint)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, structured_outputs=bound)
    for clock in clocks:
        clock.seconds = 0.0
    llm.generate([f"People number {i}:" for i in range(batch)], params, use_tqdm=False)
    return sum(clock.seconds for clock in clocks) / TOKENS / batch * 1e6


def applied(vocab_size: int, batch: int) -> float:
    """Microseconds per row to unpack the bits and mask the logits."""
    words = torch.full((batch, (vocab_size + 31) // 32), 0x0F0F0F0F, dtype=torch.int32)
    logits, places = torch.zeros(batch, vocab_size), torch.arange(batch)
    began = time.process_time()
    for _ in range(50):
        allow_only_(logits, places, unpack_mask(words, vocab_size))
    return (time.process_time() - began) / 50 / batch * 1e6


def bare(llm: LLM) -> float:
    """Microseconds per token of the matcher alone, over the tokens of a real answer."""
    engine = llm.llm_engine
    vocabulary = make_masks(engine.vllm_config, engine.front.ready.vocab_size).compiler.vocabulary()
    info = xgrammar.TokenizerInfo(
        vocabulary.tokens, xgrammar.VocabType.RAW, vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.ends)
    )
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), max_whitespace_cnt=20)
    bound = Constraint(json=SCHEMA)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, structured_outputs=bound)
    tokens = llm.generate(["People number 0:"], params, use_tqdm=False)[0].outputs[0].token_ids
    rows = np.zeros((1, vocabulary.words), np.int32)
    best = float("inf")
    for _ in range(5):
        matcher = xgrammar.GrammarMatcher(compiled)
        began = time.thread_time()
        for token in tokens:
            matcher.fill_next_token_bitmask(rows, 0)
            assert matcher.accept_token(token)
        best = min(best, time.thread_time() - began)
    return best / len(tokens) * 1e6


def main() -> None:
    llm = LLM(max_model_len=512, max_num_seqs=16, num_gpu_blocks_override=600)
    for name, constraint in KINDS.items():
        bound = Constraint(**constraint)
        for when in ("first use", "again"):
            began = time.perf_counter()
            llm.generate(["A"], SamplingParams(max_tokens=1, structured_outputs=bound), use_tqdm=False)
            print(f"{name:16} {when:10} {time.perf_counter() - began:7.3f} s to the first token")
    masks = llm.llm_engine.front.client.loop.masks
    clocks = [Clock(masks, "mask"), Clock(masks, "advance")]
    for batch in (1, 8):
        for name, constraint in KINDS.items():
            print(
                f"{name:16} batch {batch}: {on_the_step(llm, batch, constraint, clocks):6.0f} us per token in the loop"
            )
        took = applied(llm.llm_engine.front.ready.vocab_size, batch)
        print(f"{'any':16} batch {batch}: {took:6.0f} us per token in the worker")
    print(f"xgrammar's matcher alone: {bare(llm):.0f} us per token")


if __name__ == "__main__":
    main()
