"""Drafts end to end, on real models: whatever a drafter proposes, the tokens are those of plain decoding.

The drafter is scripted: it knows what plain decoding said, proposes three tokens a row, and makes half of them wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.base import env
from quire.config import EngineArgs
from quire.drafting.lengths import DraftLengths
from quire.drafting.proposer import Proposal
from quire.engine.loop import EngineLoop
from quire.engine.masking import make_masks
from quire.executor.base import WorkerProtocol, one_model
from quire.executor.inproc import InProcessExecutor
from quire.grammar.masks import Masks
from quire.sched.kv_layout import place
from quire.sched.scheduler import Scheduler
from quire.sched.settings import SchedulerSettings
from quire.schema.grammar import GrammarKind, GrammarSpec
from quire.schema.messages import EngineOutput, EngineRequest, FinishReason
from quire.schema.params import ResolvedParams
from quire.schema.step import Grant, Mask, NewRow, StepPlan
from quire.worker.drafts import Drafts
from tests.tiny_models import VOCAB, write_tiny
from tests.worker.driver import Asked
from tests.worker.fakes import FakeModel, make_runner
from tests.worker.test_steps import alone

LENGTH, DRAFTS = 160, 3
SHAPES = {"digits": "[0-9]{4}-[a-f]{6}!", "list": '\\["(yes|no)"(, "(yes|no)"){4}\\]'}

Found = dict[str, tuple[list[int], list[Any], FinishReason | None]]  # tokens, log probabilities, why it ended


class Scripted:
    """Proposes what came of plain decoding, every second token on average another."""

    def __init__(self, texts: dict[str, list[int]], vocab_size: int) -> None:
        self.texts, self.vocab_size = texts, vocab_size
        self.rng = random.Random(5)
        self.num_right = self.num_wrong = 0
        self.known: dict[str, list[int]] = {}

    def begin(self, new: NewRow) -> None:
        self.known[new.request_id] = list(new.token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.known[request_id] += token_ids

    def end(self, request_id: str) -> None:
        self.known.pop(request_id, None)

    def propose(self, request_ids: Sequence[str], count: int) -> list[Proposal]:
        return [Proposal(self._propose(name, count)) for name in request_ids]

    def _propose(self, request_id: str, count: int) -> list[int]:
        known = self.known[request_id]
        text = self.texts[request_id]
        assert known[: len(text)] == text[: len(known)], "it is told what was said"
        ahead = self.texts[request_id][len(known) : len(known) + count]
        wrong = [self.rng.random() < 0.5 for _ in ahead]
        self.num_wrong += sum(wrong)
        self.num_right += len(wrong) - sum(wrong)
        return [(token + 1 + bad) % self.vocab_size if bad else token for token, bad in zip(ahead, wrong, strict=True)]


class Engine:
    """A worker with a loop around it, made anew for each run, so that nothing is left of the one before."""

    def __init__(self, model: str, **options: Any) -> None:
        args = EngineArgs(
            **({"model": model} if model else {}), max_model_len=LENGTH, max_num_seqs=8, max_num_batched_tokens=64,
            block_size=16, **options,
        )  # fmt: skip
        self.config = args.create_engine_config()
        self.executor = InProcessExecutor(self.config)
        info = one_model(self.executor.ask(WorkerProtocol.load))
        self.layout = place(info.specs, 0, num_blocks=80, max_model_len=LENGTH, max_num_seqs=8)
        self.executor.ask(WorkerProtocol.init_kv, self.layout)
        self.vocab_size = info.vocab_size
        self.masks: Masks = make_masks(self.config, info.vocab_size)
        self.num_grants = self.num_drafting = 0

    def run(
        self,
        requests: list[EngineRequest],
        *,
        drafter: Scripted | None = None,
        depth: int = 1,
        lengths: DraftLengths | None = None,
    ) -> Found:
        settings = SchedulerSettings(
            max_model_len=LENGTH, max_num_batched_tokens=64, max_num_seqs=8, depth=depth,
            num_drafts=DRAFTS if drafter else 0, prefix_caching=False,
        )  # fmt: skip
        runner = self.executor.worker.model_runner
        runner.drafts = None
        if drafter is not None:
            runner.draft_with(Drafts(drafter, runner.rows, DRAFTS, lengths))
        scheduler = Scheduler(settings, self.layout)
        loop = EngineLoop(self.executor, scheduler, masks=self.masks)
        plan = scheduler.plan

        def counted() -> Any:
            made = plan()
            self.num_grants += sum(grant.samples for grant in made.grants)
            self.num_drafting += sum(grant.num_drafts > 0 for grant in made.grants)
            return made

        scheduler.plan = counted  # type: ignore[method-assign]
        for request in requests:
            loop.submit(request)
        found: Found = {}
        for _ in range(100_000):
            for output in loop.step():
                take(found, output)
            if loop.is_drained():
                runner.forward(StepPlan(step=0, grants=(), left=tuple(scheduler.planner.left)))
                return found
        raise AssertionError("requests do not end")

    def close(self) -> None:
        self.masks.close()
        self.executor.shutdown()


def take(found: Found, output: EngineOutput) -> None:
    tokens, logprobs, _ = found.get(output.request_id, ([], [], None))
    if output.logprobs is not None:
        assert len(output.logprobs.ranks) == len(output.new_token_ids)
        rows = zip(output.logprobs.token_ids, output.logprobs.logprobs, output.logprobs.ranks, strict=True)
        logprobs += [(ids, [round(value, 3) for value in values], rank) for ids, values, rank in rows]
    assert output.error is None, output.error
    found[output.request_id] = tokens + output.new_token_ids, logprobs, output.finish_reason


@pytest.fixture(scope="module", autouse=True)
def same_bits() -> Iterator[None]:
    """A step of other shape may round otherwise; here only the drafts shall differ."""
    patch = pytest.MonkeyPatch()
    patch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    yield
    patch.undo()
    env.forget_all()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, same_bits: None) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny("MistralForCausalLM", folder)  # windows, so that blocks are given back too
    made = Engine(str(folder), dtype="float32", skip_tokenizer_init=True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def embedded(same_bits: None) -> Iterator[Engine]:
    made = Engine("")
    yield made
    made.close()


def ask(
    name: str, prompt: list[int], max_tokens: int, regex: str | None = None, eos: int = 2, **params: Any
) -> EngineRequest:
    spec = None if regex is None else GrammarSpec(kind=GrammarKind.REGEX, text=regex, backends=("guidance",))
    given = ResolvedParams(max_tokens=max_tokens, grammar=spec, **params)
    return EngineRequest(
        request_id=name, prompt_token_ids=tuple(prompt), params=given, seed=len(name) * 7 + max_tokens,
        max_tokens=max_tokens, eos_token_id=eos,
    )  # fmt: skip


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.0, "ignore_eos": True, "logprobs": 3},
    {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "logprobs": 0},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "ignore_eos": True},
    {"temperature": 0.0, "min_tokens": 6, "bad_words_token_ids": [[9]]},
]


def compare(engine: Engine, requests: list[EngineRequest], depth: int) -> Found:
    plain = engine.run(requests)
    texts = {one.request_id: [*one.prompt_token_ids, *plain[one.request_id][0]] for one in requests}
    drafter = Scripted(texts, engine.vocab_size)
    engine.num_grants = engine.num_drafting = 0
    assert engine.run(requests, drafter=drafter, depth=depth) == plain
    assert drafter.num_right > 20 and drafter.num_wrong > 20, "half of the drafts are wrong"
    return plain


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_change_no_token_and_no_log_probability(tiny: Engine, depth: int) -> None:
    rng = random.Random(1)
    requests = [
        ask(f"r{i}", [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 70))], rng.randint(15, 40), **params)
        for i, params in enumerate(PARAMS * 2)
    ]
    compare(tiny, requests, depth)
    num_tokens = sum(request.max_tokens for request in requests)
    assert tiny.num_drafting > 0.8 * tiny.num_grants - len(requests), "look-ahead does not starve drafts"
    assert tiny.num_grants < 0.8 * num_tokens, f"{tiny.num_grants} grants for {num_tokens} tokens: too few were right"


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_follow_a_grammar(embedded: Engine, depth: int) -> None:
    pytest.importorskip("llguidance")
    prompt = list(range(100, 130))
    eos = embedded.config.model_config.eos_token_ids[0]
    requests = [ask(name, prompt, 40, regex, eos, temperature=0.0, logprobs=1) for name, regex in SHAPES.items()]
    requests += [ask(f"drawn {name}", prompt, 40, regex, eos, temperature=1.0) for name, regex in SHAPES.items()]
    requests.append(ask("free", prompt, 40, temperature=0.0, ignore_eos=True))
    plain = compare(embedded, requests, depth)
    assert embedded.num_drafting > 0.5 * embedded.num_grants
    assert {name: plain[name][2] for name in SHAPES} == dict.fromkeys(SHAPES, FinishReason.STOP)


def test_a_grant_brings_no_more_tokens_than_its_mask_has_rows() -> None:
    runner, greedy = make_runner(), ResolvedParams(temperature=0.0)
    said = alone(FakeModel(), Asked("a", [1, 2, 3], greedy, 0, 9))
    drafter = Scripted({"a": [1, 2, 3, *said]}, 64)
    drafter.rng.random = lambda: 1.0  # type: ignore[method-assign]  # all are right
    runner.draft_with(Drafts(drafter, runner.rows, 2))
    row = NewRow(
        request_id="a", epoch=0, token_ids=(1, 2, 3), num_prompt_tokens=3, params=greedy, seed=0, blocks=((), ()),
    )  # fmt: skip
    blocks = ((0, 1, 2), (3, 4, 5))
    runner.forward(StepPlan(step=1, grants=(Grant("a", 0, 3, True, 0, blocks),), joined=(row,)))
    assert runner.sample(1, None).result().sampled == [said[:1]]
    everything = b"\xff" * 8
    found = []
    for step, mask in enumerate(
        (
            Mask(index=(0,), rows=everything, words=2),
            Mask(index=(0, 0), offsets=(0, 1), rows=everything * 2, words=2),
            None,
        ),
        2,
    ):
        runner.forward(StepPlan(step=step, grants=(Grant("a", 3 * step - 3, 3, True, 0, (), 2),)))
        result = runner.sample(step, mask).result()
        found += result.sampled
        assert result.drafts["a"] == said[sum(map(len, found)) + 1 :][:2]
    assert [len(tokens) for tokens in found] == [1, 2, 3], "though all drafts were right"
    assert [token for tokens in found for token in tokens] == said[1:7]
