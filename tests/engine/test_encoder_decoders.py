"""Encoder-decoder models through the engine: greedy tokens equal transformers', whoever runs beside, whole or in pieces,
preempted or not; items of encoders are encoded once, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from quire import LLM, SamplingParams
from quire.sched.gates import TokenBudget
from quire.sched.scheduler import Scheduler
from quire.schema.errors import InputError
from tests.seq2seq_models import (
    BEGIN,
    FAMILIES,
    RATE,
    STARTS,
    WHISPER,
    Answer,
    draw_audio,
    draw_text,
    greedy,
    make_model,
)
from tests.tiny_models import VOCAB

COUNT = 8
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=0)
BEGIN_IDS = list(range(VOCAB, VOCAB + len(STARTS)))
Given = Any  # ids, or samples


class Served:
    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        self.name, self.folder, self.model = name, folder, make_model(name, folder)
        self.llm = LLM(
            str(folder), dtype="float32", max_num_seqs=8, block_size=4, num_gpu_blocks_override=400, **options
        )
        config = FAMILIES[name]
        forced = config.get("forced_bos_token_id")
        self.start = [config["decoder_start_token_id"], *([] if forced is None else [forced])]
        if name == WHISPER:
            self.start = BEGIN_IDS

    @property
    def scheduler(self) -> Scheduler:
        loop: Any = self.llm.llm_engine.front.client.loop
        return loop.scheduler

    def draw(self, seed: int) -> Given:
        if self.name == WHISPER:
            return draw_audio(seed, seconds=0.3 + 0.1 * (seed % 8))
        return draw_text(seed, 1 + 9 * (seed % 5))

    def prompt(self, given: Given) -> Any:
        """Implicit."""
        if isinstance(given, np.ndarray):
            return {"prompt": BEGIN, "multi_modal_data": {"audio": (given, RATE)}}
        return {"prompt_token_ids": given}

    def explicit(self, given: Given, begin: Any) -> Any:
        if isinstance(given, np.ndarray):
            return {
                "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (given, RATE)}},
                "decoder_prompt": begin,
            }
        return {"encoder_prompt": {"prompt_token_ids": given}, "decoder_prompt": begin}

    def answers(self, prompts: list[Any], params: SamplingParams = GREEDY) -> list[Answer]:
        return [answer_of(output.outputs[0]) for output in self.llm.generate(prompts, params)]

    def expected(self, given: Given, start: list[int] | None = None) -> Answer:
        return greedy(self.model, given, start or self.start, COUNT)

    def num_held(self) -> int:
        pool = self.scheduler.kv.pool
        return pool.num_blocks - pool.num_free


def answer_of(output: Any) -> Answer:
    chosen = zip(output.logprobs, output.token_ids, strict=True)
    return Answer(list(output.token_ids), [own[token].logprob for own, token in chosen])


def agree(found: list[Answer], expected: list[Answer], why: str = "") -> bool:
    assert [one.tokens for one in found] == [one.tokens for one in expected], why
    for own, wanted in zip(found, expected, strict=True):
        assert own.logprobs == pytest.approx(wanted.logprobs, abs=2e-3), why
    return True


@pytest.fixture(scope="module", params=list(FAMILIES))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(request.param, tmp_path_factory.mktemp("seq2seq"))
    yield made
    made.llm.close()


THOROUGH = ("T5ForConditionalGeneration", "BartForConditionalGeneration", WHISPER)


@pytest.fixture(scope="module", params=THOROUGH)
def thorough(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(request.param, tmp_path_factory.mktemp("seq2seq"))
    yield made
    made.llm.close()


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(WHISPER, tmp_path_factory.mktemp("seq2seq"))
    yield made
    made.llm.close()


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served("BartForConditionalGeneration", tmp_path_factory.mktemp("seq2seq"))
    yield made
    made.llm.close()


def test_tokens_equal_transformers(served: Served) -> None:
    """Inputs of different lengths in one batch, and a decoder's prompt of its own, computed whole and in chunks."""
    given = [served.draw(seed) for seed in range(6)]
    begin = [*served.start, *draw_text(50, 9)]
    prompts = [*map(served.prompt, given), served.explicit(given[1], {"prompt_token_ids": begin})]
    expected = [*map(served.expected, given), served.expected(given[1], begin)]
    assert len({tuple(answer.tokens) for answer in expected}) > 3, "what the encoder reads matters"
    assert agree(served.answers(prompts), expected)
    assert agree(served.answers(prompts), expected, "with prefix hits")
    budget = next(gate for gate in served.scheduler.planner.gates if isinstance(gate, TokenBudget))
    whole, budget.most = budget.most, 3
    served.llm.reset_prefix_cache()
    assert agree(served.answers(prompts), expected, "in chunks")
    budget.most = whole
    assert served.num_held() == 0
