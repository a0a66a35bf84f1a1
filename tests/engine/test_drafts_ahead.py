"""Drafts on a device that computes by itself: steps that verify none are started before the tokens of the step before
are there; whichever way steps take, tokens are those of plain decoding.

The device is the CPU with a GPU's staged inputs (tests/worker/test_adapter_graphs.py): tokens are looked at as late.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.config.drafting import SpeculativeConfig
from quire.drafting.lengths import DraftLengths
from quire.schema.messages import EngineRequest
from quire.worker.device_inputs import DeviceInputs
from quire.worker.runner import PendingStep
from tests.engine.test_drafts import DRAFTS, PARAMS, SHAPES, Engine, Scripted, ask, same_bits
from tests.tiny_models import VOCAB, write_tiny
from tests.worker.test_adapter_graphs import LateBackend

__all__ = ["same_bits"]


@contextmanager
def staged(engine: Engine) -> Iterator[None]:
    """The worker's steps as on a GPU."""
    runner = engine.executor.worker.model_runner
    backend, runner.backend = runner.backend, LateBackend(runner.backend)
    runner.inputs = DeviceInputs(runner.rows, 256)
    try:
        yield
    finally:
        runner.backend, runner.inputs, runner.drafts = backend, None, None
        for table in runner.rows.tables:
            table.changed = None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, same_bits: None) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny("MistralForCausalLM", folder)
    made = Engine(str(folder), dtype="float32", skip_tokenizer_init=True)
    with staged(made):
        yield made
    made.close()


@pytest.fixture(scope="module")
def embedded(same_bits: None) -> Iterator[Engine]:
    made = Engine("")
    with staged(made):
        yield made
    made.close()


class Moody(Scripted):
    """Of 16 proposals for a row four are right, then twelve wrong."""

    def __init__(self, texts: dict[str, list[int]], vocab_size: int) -> None:
        super().__init__(texts, vocab_size)
        self.asked: dict[str, int] = {}

    def _propose(self, request_id: str, count: int) -> list[int]:
        self.asked[request_id] = asked = self.asked.get(request_id, 0) + 1
        mood = asked % 16 >= 4
        self.rng.random = lambda: 1.0 - mood  # type: ignore[method-assign]
        return super()._propose(request_id, count)


class Seen:
    """How many steps were verified, and how many were started before the tokens of the step before were there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verified = self.passed = 0
        result = PendingStep.result

        def counted(pending: PendingStep) -> object:
            self.verified += bool(pending.verified)
            self.passed += pending.is_passed
            return result(pending)

        monkeypatch.setattr(PendingStep, "result", counted)


def requests_of(count: int, seed: int, shortest: int = 15) -> list[EngineRequest]:
    rng = random.Random(seed)
    return [
        ask(
            f"r{i}", [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 50))], rng.randint(shortest, 60),
            **PARAMS[i % len(PARAMS)],
        )
        for i in range(count)
    ]  # fmt: skip


def lengths_that_pay(wait: float = 0.4) -> DraftLengths:
    lengths = DraftLengths(SpeculativeConfig(method="ngram", num_speculative_tokens=DRAFTS))
    lengths.costs.probed([1.0, 1.01, 1.02, 1.05, 1.1])
    lengths.costs.wait, lengths.costs.is_fixed = wait, True
    return lengths


def texts_of(requests: Sequence[EngineRequest], plain: dict[str, tuple]) -> dict[str, list[int]]:
    return {one.request_id: [*one.prompt_token_ids, *plain[one.request_id][0]] for one in requests}


@pytest.mark.parametrize("depth", [1, 2])
def test_all_drafts_are_verified_without_adapting(tiny: Engine, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(10, depth)
    plain = tiny.run(requests, depth=depth)
    seen = Seen(monkeypatch)
    drafter = Scripted(texts_of(requests, plain), tiny.vocab_size)
    assert tiny.run(requests, drafter=drafter, depth=depth) == plain
    assert drafter.num_right > 20 and drafter.num_wrong > 20
    assert seen.verified > 20 and not seen.passed


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_steps_wait_only_while_drafts_are_right(tiny: Engine, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(6, 10 + seed, 40)
    plain = tiny.run(requests, depth=2)
    seen = Seen(monkeypatch)
    drafter = Moody(texts_of(requests, plain), tiny.vocab_size)
    assert tiny.run(requests, drafter=drafter, depth=2, lengths=lengths_that_pay()) == plain
    assert seen.verified > 5 and seen.passed > 5, "both happen"


def test_steps_never_wait_where_waiting_costs_more(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(8, 3, 30)
    plain = tiny.run(requests, depth=2)
    seen = Seen(monkeypatch)
    drafter = Scripted(texts_of(requests, plain), tiny.vocab_size)
    assert tiny.run(requests, drafter=drafter, depth=2, lengths=lengths_that_pay(wait=20.0)) == plain
    assert not seen.verified and seen.passed > 20


def test_grammars(embedded: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    prompt = list(range(100, 130))
    eos = embedded.config.model_config.eos_token_ids[0]
    requests = [ask(name, prompt, 40, regex, eos, temperature=0.0, logprobs=1) for name, regex in SHAPES.items()]
    requests.append(ask("free", prompt, 40, temperature=0.0, ignore_eos=True))
    plain = embedded.run(requests, depth=2)
    seen = Seen(monkeypatch)
    drafter = Moody(texts_of(requests, plain), embedded.vocab_size)
    assert embedded.run(requests, drafter=drafter, depth=2, lengths=lengths_that_pay()) == plain
    assert seen.verified > 3
