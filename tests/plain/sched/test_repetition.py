"""sched/repetition.py against the plain definition, and what it costs where the definition is quadratic."""

from __future__ import annotations

import random
import time

import pytest

from quire.sched.repetition import Repetition
from quire.schema.params import RepetitionDetectionParams


def repeats(tokens: list[int], num_outputs: int, rule: RepetitionDetectionParams) -> bool:
    """The output ends in `min_count` copies of one pattern of an allowed size."""
    copies = max(2, rule.min_count)
    for size in range(max(1, rule.min_pattern_size), rule.max_pattern_size + 1):
        span = size * copies
        if span > num_outputs:
            return False
        if tokens[-span:-size] == tokens[-span + size :]:
            return True
    return False


def texts(draw: random.Random) -> list[int]:
    """Words from a few letters, some of them said again and again, sometimes with a slip."""
    found: list[int] = []
    while len(found) < 120:
        word = [draw.randrange(draw.choice((1, 2, 5))) for _ in range(draw.randrange(1, 12))]
        for _ in range(draw.randrange(1, 6)):
            found += word
            if draw.random() < 0.2:
                found[-1] = draw.randrange(5)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_the_same_answer_as_the_definition_after_every_token(seed: int) -> None:
    draw = random.Random(seed)
    rule = RepetitionDetectionParams(
        min_pattern_size=draw.randrange(0, 6),
        max_pattern_size=draw.choice((0, 1, 3, 10, 40, 1 << 40)),
        min_count=draw.randrange(0, 7),
    )
    num_prompt = draw.randrange(0, 30)
    text, jumps = texts(draw), draw.random() < 0.3
    told = Repetition(rule, start=num_prompt)
    for end in range(num_prompt + 1, len(text) + 1):
        if jumps and draw.random() < 0.5:
            continue  # not asked: it may not stop yet
        expected = repeats(text[:end], end - num_prompt, rule)
        assert told.found(text[:end]) == expected, (rule, text[:end])


@pytest.mark.parametrize("kind", ["random", "two letters", "a long period", "blocks"])
def test_a_long_output_and_any_size_cost_little(kind: str) -> None:
    """By the definition the last token alone would cost a tenth of a second or more."""
    draw, num_tokens = random.Random(0), 20_000
    text = {
        "random": [draw.randrange(50_000) for _ in range(num_tokens)],
        "two letters": [draw.randrange(2) for _ in range(num_tokens)],
        "a long period": [i % 9_999 for i in range(num_tokens)],
        "blocks": [0 if i % 100 else i for i in range(num_tokens)],
    }[kind]
    told = Repetition(RepetitionDetectionParams(min_pattern_size=150, max_pattern_size=1 << 60, min_count=2), start=0)
    tokens: list[int] = []
    began = time.thread_time()
    for token in text:
        tokens.append(token)
        told.found(tokens)
    assert time.thread_time() - began < 6.0
