"""Drafts for models with recurrent states: a state that has seen a wrong draft is never continued from.

The oracle is plain decoding of the same requests in batch-invariant mode; the drafter is scripted, and half of its
drafts are wrong. With prefix caching states are saved at block ends, also within the drafts of a step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.schema.errors import NotBuiltError
from quire.schema.messages import EngineRequest
from quire.schema.step import Grant, StepPlan
from quire.worker.draft_states import DraftStates, num_spare
from quire.worker.drafts import Drafts
from tests.engine.test_drafts import Engine, Found, Scripted, ask, same_bits
from tests.engine.test_speculative import Run, answers, disturb
from tests.products import marked
from tests.tiny_models import VOCAB, write_tiny

__all__ = ["same_bits"]

ARCHS = (
    "BambaForCausalLM", "Qwen3NextForCausalLM", "MambaForCausalLM", "Mamba2ForCausalLM", "KimiLinearForCausalLM",
    "MiniMaxForCausalLM", "Lfm2ForCausalLM", "JambaForCausalLM",
)  # fmt: skip
KEYS: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True, "logprobs": 1},
    {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True},
    {"temperature": 0.8, "top_k": 8, "repetition_penalty": 1.1, "presence_penalty": 0.2, "ignore_eos": True},
]


def requests(count: int) -> list[EngineRequest]:
    """Some prompts begin alike."""
    rng = random.Random(2)
    begin = [rng.randrange(4, VOCAB) for _ in range(36)]
    return [
        ask(
            f"r{i}", begin * (i % 3 == 0) + [rng.randrange(4, VOCAB) for _ in range(rng.choice((1, 7, 16, 40)))],
            rng.randint(10, 24), **PARAMS[i % len(PARAMS)],
        )
        for i in range(count)
    ]  # fmt: skip


class ScriptedDrafter:
    """In the place of a Drafter."""

    def __init__(self, asked: list[EngineRequest], plain: Found) -> None:
        self.texts = {one.request_id: [*one.prompt_token_ids, *plain[one.request_id][0]] for one in asked}

    def proposer(self, layout: Any, length: int) -> Scripted:
        self.made = Scripted(self.texts, VOCAB)
        return self.made

    def inner_states(self) -> None:
        return None


@pytest.fixture(scope="module", params=marked(ARCHS, ARCHS[:1]))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, same_bits: None
) -> Iterator[tuple[Path, Engine, list[EngineRequest], Found]]:
    folder = tmp_path_factory.mktemp("hybrid")
    write_tiny(request.param, folder)
    engine = Engine(str(folder), dtype="float32", skip_tokenizer_init=True, speculative_config=KEYS)
    asked = requests(12)
    yield folder, engine, asked, answers(engine, asked, None).found
    engine.close()


def check(engine: Engine, asked: list[EngineRequest], plain: Found, **settings: Any) -> None:
    drafter: Any = ScriptedDrafter(asked, plain)
    run = answers(engine, asked, KEYS, drafter=drafter, **settings)
    assert run.found == plain
    assert drafter.made.num_right > 40 and drafter.made.num_wrong > 40 and run.num_accepted > 20


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_are_those_of_plain_decoding(case: tuple[Path, Engine, list[EngineRequest], Found], depth: int) -> None:
    _, engine, asked, plain = case
    check(engine, asked, plain, depth=depth)


def test_under_load_with_aborts_and_preemption_nothing_is_lost(
    case: tuple[Path, Engine, list[EngineRequest], Found],
) -> None:
    _, engine, asked, _ = case
    more = [
        ask(f"{one.request_id}-{i}", list(one.prompt_token_ids), one.max_tokens, **PARAMS[0])
        for i in range(2)
        for one in asked
    ]
    expected = answers(engine, more, None).found
    drafter: Any = ScriptedDrafter(more, expected)
    disturb(Run(engine, KEYS, drafter), expected, more, 3)


def test_states_saved_at_block_ends(case: tuple[Path, Engine, list[EngineRequest], Found]) -> None:
    """A block of 16 tokens often ends within the drafts of a step, and a prefix is found again up to there."""
    folder, _, asked, plain = case
    engine = Engine(
        str(folder), dtype="float32", skip_tokenizer_init=True, speculative_config=KEYS, enable_prefix_caching=True
    )
    try:
        again = [
            ask(f"{one.request_id} again", [*one.prompt_token_ids, *plain[one.request_id][0][:-1]], 6, **PARAMS[0])
            for one in asked[::3]
        ]
        expected = plain | answers(engine, again, None, prefix_caching=False).found
        drafter: Any = ScriptedDrafter([*asked, *again], expected)
        run = Run(engine, KEYS, drafter, prefix_caching=True)
        hits = 0
        for some in (asked, again):
            for one in some:
                run.loop.submit(one)
            while not run.loop.is_drained():
                run.step()
                hits += sum(one.num_cached > 0 for one in run.scheduler.requests.values())
        run.finish()
        assert run.found == expected and hits and run.num_accepted > 20
    finally:
        engine.close()


def test_more_drafts_than_states_are_kept_for(
    case: tuple[Path, Engine, list[EngineRequest], Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later rows of a step then verify fewer."""
    _, engine, asked, plain = case
    made = DraftStates.__init__

    def few(states: DraftStates, *args: Any) -> None:
        made(states, *args)
        states.most = 4

    monkeypatch.setattr(DraftStates, "__init__", few)
    check(engine, asked, plain)


def continues_from_wrong_drafts(states: DraftStates, grant: Grant, num_right: int) -> None:
    SETTLE(states, grant, grant.num_drafts)


def forgets_right_drafts(states: DraftStates, grant: Grant, num_right: int) -> None:
    pass


SETTLE = DraftStates.settle


@pytest.mark.parametrize("fault", [continues_from_wrong_drafts, forgets_right_drafts])
def test_faults_are_noticed(
    case: tuple[Path, Engine, list[EngineRequest], Found], monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    _, engine, asked, plain = case
    monkeypatch.setattr(DraftStates, "settle", fault)
    with pytest.raises(AssertionError):
        check(engine, asked[:6], {one.request_id: plain[one.request_id] for one in asked[:6]})
    runner = engine.executor.worker.model_runner
    runner.forward(StepPlan(step=0, grants=(), left=tuple(runner.rows.row_of)))


def test_spare_blocks() -> None:
    assert (num_spare(3, 8), num_spare(5, 1000), num_spare(100, 4)) == (24, 64, 100)


def test_without_spare_blocks_nothing_is_verified(case: tuple[Path, Engine, list[EngineRequest], Found]) -> None:
    folder, _, _, _ = case
    engine = Engine(str(folder), dtype="float32", skip_tokenizer_init=True)
    runner = engine.executor.worker.model_runner
    with pytest.raises(NotBuiltError, match="no blocks for those after drafts"):
        runner.draft_with(Drafts(Scripted({}, VOCAB), runner.rows, 1))
    engine.close()
