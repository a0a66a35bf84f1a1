"""Times between words: the op beside transformers' WhisperTimeStampLogitsProcessor, on histories of every kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from quire.ops.sample import keep_times_

VOCAB, END, PLAIN, FIRST = 60, 30, 34, 35
PROMPT = 3


def history(generator: torch.Generator, count: int) -> list[int]:
    """Text and times, mostly as the rules would have them, and sometimes not."""
    ids: list[int] = []
    low = FIRST
    while len(ids) < count:
        if torch.rand((), generator=generator) < 0.4:
            low = min(low + int(torch.randint(0, 4, (), generator=generator)), VOCAB - 1)
            ids.append(low)
        else:
            ids.append(int(torch.randint(0, END, (), generator=generator)))
    return ids


@pytest.mark.parametrize("latest", [None, 0, 5])
def test_times_are_those_of_transformers(latest: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    config: Any = SimpleNamespace(
        no_timestamps_token_id=PLAIN, eos_token_id=END, bos_token_id=END, max_initial_timestamp_index=latest
    )
    theirs = WhisperTimeStampLogitsProcessor(config, begin_index=PROMPT)
    counts = [0, 0, *range(9), *range(9)]
    rows = [[31, 32, 33, *history(generator, count)] for count in counts]
    width = max(map(len, rows)) + 2
    tokens = torch.tensor([[*row, *[FIRST + 1] * (width - len(row))] for row in rows], dtype=torch.int32)
    for spread in (0.1, 3.0):
        logits = torch.randn(len(rows), VOCAB, generator=generator) * spread
        mine = logits.clone()
        lengths = torch.tensor([len(row) for row in rows])
        keep_times_(mine, tokens, torch.full_like(lengths, PROMPT), lengths, first=FIRST, end=END, plain=PLAIN,
                    latest=latest)  # fmt: skip
        for line, row, before in zip(mine, rows, logits, strict=True):
            expected = theirs(torch.tensor([row]), before.unsqueeze(0))[0]
            assert torch.equal(line, expected), row
