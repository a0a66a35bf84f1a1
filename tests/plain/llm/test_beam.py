"""llm/beam.py: the search itself against an exhaustive one, and through an LLM that repeats its prompt."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from quire import LLM
from quire.llm.beam import BeamSearchInstance
from quire.llm.beam_limits import BeamLimits
from quire.schema.errors import InputError, NotBuiltError
from quire.schema.outputs import Logprob
from quire.schema.params import BeamSearchParams
from tests.fake_engine import ids_of, use_fake, write_model

VOCAB, END = 5, 4


def language(seed: int):
    """Log probabilities of the next token as a function of all before."""

    def following(tokens: tuple[int, ...]) -> list[float]:
        weights = [random.Random(hash((seed, tokens, token))).random() ** 3 + 1e-3 for token in range(VOCAB)]
        return [math.log(w / sum(weights)) for w in weights]

    return following


def search(following, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    instance = BeamSearchInstance(prompt, params, params.max_tokens, frozenset({END}))
    while not instance.done:
        found = []
        for beam in instance.beams:
            logprobs = following(tuple(beam.tokens))
            best = sorted(range(VOCAB), key=lambda t: -logprobs[t])[: instance.num_logprobs]
            found.append({t: Logprob(logprobs[t]) for t in best})
        instance.advance(found)
    return [(beam.tokens, instance.score(beam)) for beam in instance.output().sequences]


def every_answer(following, prompt: list[int], length: int, penalty: float, ignore_eos: bool):
    """All complete answers: ended by END, or of full length."""
    for count in range(1, length + 1):
        for tokens in itertools.product(range(VOCAB), repeat=count):
            ended = END in tokens and not ignore_eos
            if (ended and tokens.index(END) != count - 1) or (not ended and count < length):
                continue
            total = sum(following((*prompt, *tokens[:i]))[t] for i, t in enumerate(tokens))
            yield [*prompt, *tokens], total / count**penalty


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_wide_beam_finds_the_best_of_all(penalty, ignore_eos):
    for seed in range(12):
        following = language(seed)
        params = BeamSearchParams(beam_width=VOCAB**3, max_tokens=3, length_penalty=penalty, ignore_eos=ignore_eos)
        want = sorted(every_answer(following, [1, 2], 3, penalty, ignore_eos), key=lambda pair: -pair[1])
        got = search(following, [1, 2], params)
        for (tokens, score), (best, best_score) in zip(got[:20], want[:20], strict=True):
            assert tokens == best and score == pytest.approx(best_score)


def test_width_one_is_greedy():
    following = language(7)
    ((tokens, _),) = search(following, [0], BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True))
    want = [0]
    for _ in range(6):
        logprobs = following(tuple(want))
        want.append(max(range(VOCAB), key=lambda t: logprobs[t]))
    assert tokens == want


def test_sequences_are_sorted_and_as_many_as_the_width():
    found = search(language(3), [0], BeamSearchParams(beam_width=4, max_tokens=5))
    assert len(found) == 4
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)


def test_temperature_is_refused_not_ignored():
    with pytest.raises(NotBuiltError, match=r"0\.7"):
        search(language(0), [0], BeamSearchParams(beam_width=2, max_tokens=2, temperature=0.7))


# ---- through an LLM whose likeliest tokens are always 10, 11, 12, …


@pytest.fixture
def llm(tmp_path, monkeypatch):
    use_fake(monkeypatch)
    with LLM(write_model(tmp_path), max_model_len=32, max_num_seqs=4) as made:
        yield made


@pytest.mark.parametrize("limit", [None, 1])
def test_beam_search_over_an_engine(llm, limit):
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    outputs = llm.beam_search(["ab", {"prompt_token_ids": ids_of("xyz")}, ids_of("q")], params, concurrency_limit=limit)
    assert [len(o.sequences) for o in outputs] == [2, 2, 2]
    assert outputs[1].sequences[0].tokens == [*ids_of("xyz"), 10, 10, 10]
    assert outputs[1].sequences[0].cum_logprob == -3.0 and outputs[1].sequences[1].cum_logprob == -4.0
    assert outputs[0].sequences[0].text == "ab\x06\x06\x06"
    assert len(outputs[0].sequences[0].logprobs) == 3


def test_a_wide_beam_is_not_stopped_by_max_logprobs(llm):
    (output,) = llm.beam_search("ab", BeamSearchParams(beam_width=30, max_tokens=2))
    assert len(output.sequences) == 30


def test_the_context_ends_the_search(llm):
    (output,) = llm.beam_search("a" * 29, BeamSearchParams(beam_width=2, max_tokens=50))
    assert len(output.sequences[0].tokens) == 32


def test_bad_calls(llm):
    for wrong in ({"params": 5}, {"params": BeamSearchParams(beam_width=1, max_tokens=1), "concurrency_limit": 0}):
        with pytest.raises(InputError):
            llm.beam_search("a", **wrong)


@pytest.mark.parametrize(
    ("width", "num_prompts", "words"),
    [(10**9, 1, "29000000000 tokens of beams; the limit is 1073741824"), (10**7, 5, "limit is 1073741824"),
     (10**7, 1, "weighs 75400000000 log probabilities; the limit is 17179869184")],
)  # fmt: skip
def test_work_is_bounded(llm, width, num_prompts, words):
    with pytest.raises(ValueError, match=words):
        llm.beam_search(["abc"] * num_prompts, BeamSearchParams(beam_width=width, max_tokens=10**12))


def test_work():
    BeamLimits(tokens=60, logprobs=600).check(5, [4, 8], shown=3, vocab_size=100)
    BeamLimits(tokens=60, logprobs=420).check(5, [4, 8], shown=3, vocab_size=7)
    for given, name in (({"tokens": 59}, "max_tokens"), ({"logprobs": 599}, "n")):
        with pytest.raises(InputError, match=r"60 tokens of beams; the limit is 59|600 log prob.*limit is 599") as told:
            BeamLimits(**given).check(5, [4, 8], shown=3, vocab_size=100)
        assert told.value.param == name
    with pytest.raises(InputError, match="720 log"):
        BeamLimits(logprobs=719).check(5, [4, 8], shown=12, vocab_size=100)


def test_the_salt_of_a_prompt_goes_with_every_beam(tmp_path, monkeypatch):
    use_fake(monkeypatch)
    with LLM(write_model(tmp_path), max_num_seqs=8) as llm:
        loop = llm.llm_engine.front.client.loop
        submit, salts = loop.submit, []
        monkeypatch.setattr(loop, "submit", lambda request: (salts.append(request.cache_salt), submit(request)))
        params = BeamSearchParams(beam_width=2, max_tokens=3)
        llm.beam_search([{"prompt": "ab", "cache_salt": "mine"}], params)
        assert len(salts) > 2 and set(salts) == {"mine"}


def test_logits_are_no_scores(tmp_path, monkeypatch):
    use_fake(monkeypatch)
    with LLM(write_model(tmp_path), logprobs_mode="raw_logits") as llm, pytest.raises(InputError, match="raw_logits"):
        llm.beam_search(["ab"], BeamSearchParams(beam_width=2, max_tokens=3))
