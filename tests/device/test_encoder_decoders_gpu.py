"""Encoder-decoder models on a GPU: greedy tokens equal transformers' on CPU, in float32, whole, in pieces, preempted;
decodes are replayed from graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.sched.gates import TokenBudget
from tests.engine.test_encoder_decoders import COUNT, Served, agree
from tests.preempting import preempting
from tests.seq2seq_models import WHISPER, draw_text, greedy

pytestmark = pytest.mark.gpu
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 256}
FAMILIES = (
    "T5ForConditionalGeneration", "BartForConditionalGeneration", WHISPER, "MBartForConditionalGeneration",
    "T5ForConditionalGeneration gated",
)  # fmt: skip


@pytest.fixture(params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(request.param, tmp_path_factory.mktemp("seq2seq"), **OPTIONS)
    yield made
    made.llm.close()


def test_tokens_equal_transformers(served: Served) -> None:
    runner = served.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    assert runner.graphs is not None and runner.mixed is None
    replayed: list[int] = []
    replay = runner.graphs.replay
    runner.graphs.replay = lambda bucket: replayed.append(bucket) or replay(bucket)
    inputs = [served.draw(seed) for seed in range(11)]
    expected = [served.expected(given) for given in inputs]
    prompts = [served.prompt(given) for given in inputs]
    assert agree(served.answers(prompts), expected, "all at once")
    assert len(replayed) >= COUNT - 1
    assert agree(served.answers(prompts[:1]), expected[:1], "alone")
    if served.name != WHISPER:
        begin = [served.start[0], *draw_text(5, 20)]
        found = served.answers([served.explicit(inputs[3], {"prompt_token_ids": begin})])
        assert agree(found, [greedy(served.model, inputs[3], begin, COUNT)], "a longer beginning")
        budget = next(gate for gate in served.scheduler.planner.gates if isinstance(gate, TokenBudget))
        budget.most = 7
        found = served.answers([served.explicit(inputs[3], {"prompt_token_ids": begin}), *prompts])
        assert agree(found[1:], expected, "in pieces")
        assert agree(found[:1], [greedy(served.model, inputs[3], begin, COUNT)], "a longer beginning, in pieces")
    assert served.num_held() == 0


def test_preempted_answers_are_the_same(served: Served) -> None:
    inputs = [served.draw(seed) for seed in range(6)]
    expected = [served.expected(given) for given in inputs]
    with preempting(served.scheduler) as seen:
        assert agree(served.answers([served.prompt(given) for given in inputs]), expected)
    assert seen.count >= 2
