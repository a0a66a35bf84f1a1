"""Runs of tokens that a request wants once: what is banned equals transformers' own processor where the window holds
all; windows, allowed tokens, and requests beside that do not ask; an answer of an engine has no such run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from quire import LLM, SamplingParams
from quire.sampling.no_repeat import NoRepeat, read
from quire.schema.errors import InputError
from tests.tiny_models import make_tiny

NAME = "quire.sampling.no_repeat.NGramPerReqLogitsProcessor"


def test_banned_tokens_equal_transformers() -> None:
    rng, some = random.Random(1), 0
    for _ in range(300):
        size, ids = rng.randrange(1, 6), [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
        theirs = NoRepeatNGramLogitsProcessor(size)(torch.tensor([ids]), torch.zeros(1, 4))[0]
        expected = theirs.isinf().nonzero().flatten().tolist()
        assert NoRepeat(size, 100, frozenset()).banned(ids) == expected
        assert NoRepeat(size, 100, frozenset({1, 2})).banned(ids) == [one for one in expected if one not in (1, 2)]
        some += bool(expected)
    assert some > 100


def test_only_the_window_is_searched() -> None:
    ids = [1, 2, 3, 9, 9, 9, 9, 1, 2]
    assert NoRepeat(3, 9, frozenset()).banned(ids) == [3]
    assert NoRepeat(3, 8, frozenset()).banned(ids) == []
    assert NoRepeat(3, 8, frozenset()).banned([]) == []


@pytest.mark.parametrize(("extra", "said"), [
    ({"ngram_size": 0}, "ngram_size of extra_args is 0; expected a whole number from 1 to 256"),
    ({"ngram_size": "3"}, "ngram_size of extra_args is '3'"),
    ({"ngram_size": True}, "ngram_size of extra_args is True"),
    ({"ngram_size": 10**9}, "ngram_size of extra_args is 1000000000"),
    ({"ngram_size": 3, "window_size": 10**6}, "window_size of extra_args is 1000000; .* from 1 to 8192"),
    ({"ngram_size": 3, "window_size": 0}, "window_size of extra_args is 0"),
    ({"ngram_size": 3, "whitelist_token_ids": 7}, "whitelist_token_ids of extra_args is 7"),
    ({"ngram_size": 3, "whitelist_token_ids": [1, "2"]}, "whitelist_token_ids of extra_args is"),
    ({"ngram_size": 3, "whitelist_token_ids": [0] * 5000}, "expected up to 4096 token ids"),
])  # fmt: skip
def test_hostile_parameters(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(extra)


def test_requests_that_do_not_ask() -> None:
    assert read(None) is None and read({"window_size": 0}) is None


def repeated(ids: list[int], size: int) -> bool:
    runs = [tuple(ids[at : at + size]) for at in range(len(ids) - size + 1)]
    return len(set(runs)) < len(runs)


def test_answers_repeat_nothing(tmp_path: Path) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    plain = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    asked = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True,
                           extra_args={"ngram_size": 1, "window_size": 60, "whitelist_token_ids": {5000}})  # fmt: skip
    prompts = [{"prompt_token_ids": [7] * 4}] * 2
    with LLM(str(tmp_path), dtype="float32", max_model_len=128, logits_processors=[NAME]) as llm:
        one, other = (list(output.outputs[0].token_ids) for output in llm.generate(prompts, [plain, asked]))
        with pytest.raises(InputError, match="ngram_size"):
            llm.generate(prompts[0], SamplingParams(extra_args={"ngram_size": -1}))
    assert repeated(one, 1) and not repeated(other, 1)
