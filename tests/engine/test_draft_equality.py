"""Every method of drafting over 64 prompts, greedy and drawn: answers are those of plain decoding, token for token.

In batch-invariant mode, where a step's shape does not change its bits; test_draft_ties.py has the other mode. Drafters
of hidden states are random, so a forced proposer stands before them and lets three of five drafts be right.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.schema.messages import EngineRequest
from tests.engine.test_draft_heads import METHODS as HEADS
from tests.engine.test_draft_heads import ForcedDrafter, Kind, deepseek, kinds, llama, of
from tests.engine.test_draft_models import drafter, drafter_of, folders, speculative, tiny
from tests.engine.test_drafts import Engine, ask, same_bits
from tests.engine.test_speculative import METHODS as OTHERS
from tests.engine.test_speculative import Run, answers
from tests.tiny_models import VOCAB

__all__ = ["deepseek", "drafter", "drafter_of", "folders", "kinds", "llama", "of", "same_bits", "tiny"]

PROMPTS = 64
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "drawn": {
        "temperature": 0.8, "top_p": 0.9, "top_k": 20, "presence_penalty": 0.2, "frequency_penalty": 0.1,
        "repetition_penalty": 1.1, "ignore_eos": True,
    },
}  # fmt: skip
pytestmark = pytest.mark.long


def requests(way: str) -> list[EngineRequest]:
    """Half of the prompts repeat themselves; of those, half say few tokens, so that n-grams are right now and then."""
    rng, made = random.Random(way), []
    for i in range(PROMPTS):
        piece = [rng.randrange(4, VOCAB) for _ in range(rng.randint(2, 12))]
        prompt = (piece * 8)[: rng.randint(1, 60)] if i % 2 else piece
        few = {"allowed_token_ids": (5, 6, 7)} if i % 4 == 1 else {}
        made.append(ask(f"r{i}", prompt, rng.randint(10, 30), **WAYS[way], **few))
    return made


def compare(engine: Engine, way: str, keys: dict[str, Any], make: Any = None) -> Run:
    """`make`: a drafter, knowing what plain decoding says."""
    asked = requests(way)
    plain = answers(engine, asked, None).found
    more = {} if make is None else {"drafter": make(asked, plain)}
    run = answers(engine, asked, {**keys, "adaptive": False}, **more)
    assert len(run.found) == PROMPTS and run.found == plain
    said = sum(len(tokens) for tokens, _, _ in run.found.values())
    print(f"{keys['method']} {way}: {PROMPTS} answers, {said} tokens, {run.num_accepted} drafts were right: equal")
    return run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", OTHERS)
def test_methods_without_a_model(tiny: Engine, method: str, way: str) -> None:
    assert compare(tiny, way, OTHERS[method]).num_accepted > 20


@pytest.mark.parametrize("way", WAYS)
def test_a_draft_model(tiny: Engine, folders: tuple[Path, Path, Any], drafter: Any, way: str) -> None:
    assert compare(tiny, way, speculative(folders[1]), lambda asked, plain: drafter).num_accepted > 100


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", HEADS)
def test_heads(of: Callable[[str], Kind], method: str, way: str) -> None:
    kind = of(method)

    def forced(asked: list[EngineRequest], plain: Any) -> Any:
        return ForcedDrafter(replace(kind, asked=asked, plain=plain, compared=0.0), 0.6)

    assert compare(kind.engine, way, kind.keys, forced).num_accepted > 200
