"""Methods of drafting end to end: answers are those of plain decoding, token for token, whatever is drafted and
verified.

Plain decoding of the same requests is the oracle; everything runs in batch-invariant mode, where a step's shape does
not change its bits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from quire.config.drafting import SpeculativeConfig
from quire.engine.loop import EngineLoop
from quire.sched.scheduler import Scheduler
from quire.sched.settings import SchedulerSettings
from quire.schema.errors import ConfigError
from quire.schema.messages import EngineRequest, FinishReason
from quire.schema.step import StepPlan
from quire.worker.draft_setup import draft_as_configured, make_proposer
from quire.worker.drafters import Drafter
from tests.engine.test_drafts import LENGTH, Engine, Found, ask, same_bits, take
from tests.tiny_models import VOCAB, write_tiny

__all__ = ["same_bits"]

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "custom": {
        "method": "custom_class", "model": "tests.engine.own_proposer:Bigrams", "num_speculative_tokens": 3,
    },
}  # fmt: skip
FEW = (5, 6, 7)  # a text of few tokens repeats itself, whatever the model
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True, "allowed_token_ids": FEW},
    {"temperature": 0.8, "top_k": 2, "ignore_eos": True, "allowed_token_ids": FEW},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2, "allowed_token_ids": FEW},
    {"temperature": 0.8, "repetition_penalty": 1.05, "presence_penalty": 0.1, "frequency_penalty": 0.1,
     "allowed_token_ids": FEW},
    {"temperature": 0.0, "min_tokens": 12, "bad_words_token_ids": [[5], [6, 7]], "logprobs": 0,
     "allowed_token_ids": (*FEW, 8)},
    {"temperature": 0.7, "top_k": 2, "logit_bias": {5: 30.0, 6: 30.0}, "prompt_logprobs": 1},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(4, 30)), "stop_token_ids": (17,)},
    {"temperature": 1.0, "min_p": 0.3, "stop_token_ids": (21,)},
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, same_bits: None) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny("MistralForCausalLM", folder)
    made = Engine(str(folder), dtype="float32", skip_tokenizer_init=True)
    yield made
    made.close()


def prompts(count: int, seed: int) -> list[EngineRequest]:
    """Texts that repeat themselves, with every kind of parameters."""
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        piece = [rng.randrange(4, VOCAB) for _ in range(rng.randint(2, 12))]
        prompt = (piece * 8)[: rng.randint(1, 60)]
        requests.append(ask(f"r{i}", prompt, rng.randint(10, 40), **PARAMS[i % len(PARAMS)]))
    return requests


class Run:
    """Requests over a scheduler of their own, with or without drafts."""

    def __init__(
        self,
        engine: Engine,
        speculative: dict[str, Any] | None,
        drafter: Drafter | None = None,
        num_blocks: int | None = None,
        **settings: Any,
    ) -> None:
        """`num_blocks`: fewer than there are."""
        self.engine, self.runner = engine, engine.executor.worker.model_runner
        self.runner.drafts = None
        most = 0
        if speculative is not None:
            config = SpeculativeConfig(**speculative)
            most = config.num_speculative_tokens or 0
            draft_as_configured(self.runner, config, LENGTH, drafter)
        options = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "prefix_caching": False, **settings}
        layout = replace(engine.layout, num_blocks=num_blocks or engine.layout.num_blocks)
        self.scheduler = Scheduler(SchedulerSettings(max_model_len=LENGTH, num_drafts=most, **options), layout)
        self.scheduler.audits = True
        self.loop = EngineLoop(engine.executor, self.scheduler, masks=engine.masks)
        self.found: Found = {}
        self.num_accepted = 0

    def step(self) -> None:
        for output in self.loop.step():
            take(self.found, output)
        if (stats := self.loop.take_stats()) is not None:
            self.num_accepted += sum(stats.drafts.accepted)

    def finish(self) -> Found:
        for _ in range(100_000):
            self.step()
            if self.loop.is_drained():
                self.runner.forward(StepPlan(step=0, grants=(), left=tuple(self.scheduler.planner.left)))
                return self.found
        raise AssertionError("requests do not end")


def answers(engine: Engine, requests: list[EngineRequest], speculative: dict[str, Any] | None, **more: Any) -> Run:
    run = Run(engine, speculative, **more)
    for request in requests:
        run.loop.submit(request)
    run.finish()
    return run


@pytest.fixture(scope="module")
def plain(tiny: Engine) -> Found:
    return answers(tiny, prompts(64, 3), None).found


@pytest.mark.parametrize(
    ("method", "adaptive"), [("ngram", True), ("ngram", False), ("suffix", False), ("custom", False)]
)
def test_answers_are_those_of_plain_decoding(tiny: Engine, plain: Found, method: str, adaptive: bool) -> None:
    run = answers(tiny, prompts(64, 3), {**METHODS[method], "adaptive": adaptive})
    assert run.found == plain
    assert run.num_accepted > (0 if adaptive else 100), "some drafts were right"


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("suffix", {"depth": 2}), ("ngram", {"max_num_batched_tokens": 9}), ("suffix", {"prefix_caching": True}),
        ("ngram", {"policy": "priority"}),
    ],
    ids=str,
)  # fmt: skip
def test_however_steps_are_planned(tiny: Engine, plain: Found, method: str, settings: dict[str, Any]) -> None:
    some = [one for one in prompts(64, 3) if int(one.request_id[1:]) < 24]
    run = answers(tiny, some, {**METHODS[method], "adaptive": False}, **settings)
    assert run.found == {name: plain[name] for name in run.found} and len(run.found) == 24


@pytest.mark.parametrize("depth", [1, 2])
def test_acceptance_may_be_invented(tiny: Engine, depth: int) -> None:
    """Two drafts of three are kept, whatever the model says; what it says next goes by them."""
    keys = {
        "method": "custom_class", "model": "tests.engine.own_proposer:Same", "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": (1.0, 1.0, 0.0), "adaptive": False,
    }  # fmt: skip
    asked = [ask(f"r{i}", [5, 6, 7 + i], 25, temperature=0.0, ignore_eos=True) for i in range(3)]
    run = answers(tiny, asked, keys, depth=depth)
    assert 3 * 15 <= run.num_accepted <= 3 * 16  # the last of an answer may be beyond its end
    further = []
    for request in asked:
        said = run.found[request.request_id][0]
        assert len(said) == 25 and said[1:21:3] == said[2:21:3] == [9] * 7  # then there is room for fewer drafts
        further += [
            ask(f"{request.request_id}-{i}", [*request.prompt_token_ids, *said[:i]], 1, temperature=0.0)
            for i in range(0, 21, 3)
        ]
    plain = answers(tiny, further, None).found
    for one in further:
        name, _, place = one.request_id.partition("-")
        assert plain[one.request_id][0] == [run.found[name][0][int(place)]]


def test_those_of_low_priority_give_way(tiny: Engine, plain: Found) -> None:
    """Few blocks, and those that come later are more important: others are preempted in the middle of their drafts."""
    asked = [replace(one, priority=6 - i // 4, arrival=float(i)) for i, one in enumerate(prompts(64, 3)[:24])]
    run = Run(
        tiny, {**METHODS["ngram"], "adaptive": False}, policy="priority", max_num_seqs=4, num_blocks=6,
        prefix_caching=True,
    )  # fmt: skip
    waiting, epochs = list(asked), dict[str, int]()
    while waiting or not run.loop.is_drained():
        if waiting and run.scheduler.step % 3 == 0:
            run.loop.submit(waiting.pop(0))
        run.step()
        epochs |= {one.id: one.epoch for one in run.scheduler.requests.values()}
    run.finish()
    assert sum(epochs.values()) > 0 and run.num_accepted > 20
    assert run.found == {one.request_id: plain[one.request_id] for one in asked}


def test_a_custom_class_must_be_one() -> None:
    for model, words in (
        ("tests.engine.nowhere:Missing", "cannot be imported"),
        ("tests.engine.own_proposer:VOCABULARY", "is not a class"),
        ("tests.engine.own_proposer:Half", "has no extend, propose, end"),
    ):
        with pytest.raises(ConfigError, match=f"speculative_config: model '{model}' {words}"):
            make_proposer(SpeculativeConfig(method="custom_class", model=model, num_speculative_tokens=1))


@pytest.mark.parametrize("depth", [1, 2])
def test_under_load_with_aborts_and_preemption_nothing_is_lost(tiny: Engine, plain: Found, depth: int) -> None:
    run = Run(tiny, {**METHODS["ngram"], "adaptive": False}, depth=depth)
    disturb(run, plain, prompts(64, 3), depth)


def disturb(run: Run, plain: Found, requests: list[EngineRequest], seed: int) -> None:
    """Requests come while others run, some are aborted, and all that run are preempted now and then."""
    rng = random.Random(seed)
    aborted: set[str] = set()
    waiting = list(requests)
    preempted = 0
    for turn in range(100_000):
        if waiting and rng.random() < 0.5:
            run.loop.submit(waiting.pop())
        if turn % 11 == 5 and (live := run.loop.live_ids()):
            name = rng.choice(live)
            aborted.add(name)
            run.loop.abort([name])
        if turn % 17 == 3:
            run.loop.settle(0)
            preempted += len(run.scheduler.planner.running)
            run.scheduler.reset_prefix_cache(reset_running_requests=True)  # preempts all that run
        run.step()
        if not waiting and run.loop.is_drained():
            break
    run.runner.forward(StepPlan(step=0, grants=(), left=tuple(run.scheduler.planner.left)))
    # enough of both; how many there are goes by the number of turns
    assert len(run.found) == len(requests) and preempted > 4 and 2 < len(aborted) < len(requests) - 4
    for name, (tokens, _, reason) in run.found.items():
        expected, _, plain_reason = plain[name]
        if reason is FinishReason.ABORT:
            assert name in aborted and tokens == expected[: len(tokens)]
        else:
            assert (tokens, reason) == (expected, plain_reason)
    assert run.num_accepted > 20 and not run.runner.drafts.of.keys() - run.runner.rows.row_of.keys()
