"""What a grammar costs on the embedded model: time to compile, time per token above the backend's bare matcher.

    python benchmarks/structured.py
The floor is the matcher of the backend's own package: fill a row, accept a token, nothing else. It is measured twice:
within the run, where the model has emptied the caches in between, and alone over the tokens of the same answers.
`above` is what Quire adds to the first. Times per token are processor time, so that a busy machine matters little;
those to a first token are by the clock, compiling process included.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from quire import LLM, SamplingParams
from quire.grammar.request import make_spec
from quire.ops.sample import allow_words_
from quire.schema.params import StructuredOutputsParams as Constraint

SCHEMA = {
    "type": "array", "minItems": 200,
    "items": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
              "required": ["name", "age"], "additionalProperties": False},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "json, xgrammar": {"json": SCHEMA},
    "json, guidance": {"json": SCHEMA, "whitespace_pattern": r"[ \n]{1,20}"},
    "regex, xgrammar": {"regex": r"([a-z]+ )+"},
}
TOKENS, BATCHES, ROUNDS = 96, (1, 8), 2


class Clock:
    """Processor time spent in some methods while it is open."""

    def __init__(self, *methods: tuple[Any, str]) -> None:
        self.seconds = 0.0
        self._inner = [(owner, name, getattr(owner, name)) for owner, name in methods]

    def __enter__(self) -> Clock:
        for owner, name, inner in self._inner:
            setattr(owner, name, self._timed(inner))
        return self

    def __exit__(self, *raised: object) -> None:
        for owner, name, inner in self._inner:
            setattr(owner, name, inner)

    def _timed(self, inner: Any) -> Any:
        def timed(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return inner(*args)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def first_tokens(llm: LLM, constraint: dict[str, Any]) -> tuple[float, float]:
    """Seconds to a first token, with the constraint new and known."""
    took = []
    for _ in range(2):
        began = time.perf_counter()
        params = SamplingParams(max_tokens=1, structured_outputs=Constraint(**constraint))
        llm.generate(["A"], params, use_tqdm=False)
        took.append(time.perf_counter() - began)
    return took[0], took[1]


Answers = list[list[int]]


def on_the_step(llm: LLM, batch: int, constraint: dict[str, Any], *methods: tuple[Any, str]) -> tuple[float, Answers]:
    """Microseconds per token in these methods, and the answers."""
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, structured_outputs=Constraint(**constraint)
    )
    best, answers = float("inf"), Answers()
    for _ in range(ROUNDS):
        with Clock(*methods) as clock:
            found = llm.generate([f"People number {i}:" for i in range(batch)], params, use_tqdm=False)
        best = min(best, clock.seconds / TOKENS / batch * 1e6)
        answers = [list(one.outputs[0].token_ids) for one in found]
    return best, answers


def bare(backend: Any, loaded: Any, answers: Answers, words: int) -> float:
    """Microseconds per token of the packages' matchers alone."""
    best, rows = float("inf"), np.zeros((1, words), np.int32)
    for _ in range(ROUNDS):
        inners = [started.inner for started in map(backend.start, [loaded] * len(answers))]
        began = time.thread_time()
        for tokens, inner in zip(answers, inners, strict=True):
            if hasattr(inner, "fill_next_token_bitmask"):
                for token in tokens:
                    inner.fill_next_token_bitmask(rows, 0)
                    inner.accept_token(token)
            else:
                for token in tokens:
                    inner.unsafe_compute_mask_ptr(rows.ctypes.data, rows.nbytes)
                    inner.consume_token(token)
        best = min(best, time.thread_time() - began)
    return best / sum(map(len, answers)) * 1e6


def applied(vocab_size: int, batch: int) -> float:
    """Microseconds per row to mask the logits with its bits."""
    words = torch.full((batch, (vocab_size + 31) // 32), 0x0F0F0F0F, dtype=torch.int32)
    logits, places = torch.zeros(batch, vocab_size), torch.arange(batch)
    allow = allow_words_.on("cpu")
    allow(logits, places, words)
    began = time.process_time()
    for _ in range(200):
        allow(logits, places, words)
    return (time.process_time() - began) / 200 / batch * 1e6


def main() -> None:
    llm = LLM(max_model_len=512, max_num_seqs=16, num_gpu_blocks_override=600)
    started = {name: first_tokens(llm, constraint) for name, constraint in KINDS.items()}
    engine, masks = llm.llm_engine, llm.llm_engine.front.client.loop.masks
    head = f"{'constraint':17}{'first use':>10}{'again':>9} |{'rows':>5}{'in the loop':>13}{'matcher there':>15}"
    units = f"{'':17}{'s':>10}{'s':>9} |{'':5}{'us/token':>13}{'us/token':>15}{'us':>8}{'us':>8}"
    print(f"{head}{'above':>8}{'alone':>8}\n{units}")
    for name, constraint in KINDS.items():
        spec = make_spec(Constraint(**constraint), engine.vllm_config.structured_outputs_config)
        made = masks.compiler.fetch(spec)
        kind = type(made.backend.start(made.loaded))
        matcher = (made.backend, "fill"), (kind, "accept"), (kind, "can_end")
        for batch in BATCHES:
            whole, answers = on_the_step(llm, batch, constraint, (masks, "mask"), (masks, "advance"))
            own, _ = on_the_step(llm, batch, constraint, *matcher)
            alone = bare(made.backend, made.loaded, answers, (engine.front.ready.vocab_size + 31) // 32)
            shown = f"{name:17}{started[name][0]:10.3f}{started[name][1]:9.3f}" if batch == BATCHES[0] else f"{'':36}"
            print(f"{shown} |{batch:5}{whole:13.1f}{own:15.1f}{whole - own:8.1f}{alone:8.1f}")
    for batch in BATCHES:
        print(f"masking the logits, {batch} rows: {applied(engine.front.ready.vocab_size, batch):.1f} us per row")


if __name__ == "__main__":
    main()
