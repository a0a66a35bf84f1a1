"""Speculative decoding as programs for vLLM use it: the documented configuration, answers, and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Vector

from tests.engine.test_drafts import same_bits

__all__ = ["same_bits"]

VERSE = "red green blue, red green blue and black; "
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=24, stop=["black; red"], include_stop_str_in_output=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=5, n=2, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=1, ignore_eos=True, repetition_penalty=1.1),
]


def make(**options: Any) -> LLM:
    return LLM(max_model_len=256, max_num_seqs=4, **options)


@pytest.fixture(scope="module")
def drafting(same_bits: None) -> Iterator[LLM]:
    speculative = {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2,
        "adaptive": False,
    }  # fmt: skip
    yield make(speculative_config=speculative, disable_log_stats=False)


def said(llm: LLM) -> list[Any]:
    outputs = llm.generate([(VERSE * 4).strip()] * len(PARAMS), PARAMS, use_tqdm=False)
    return [
        [(one.text, one.token_ids, one.finish_reason, one.stop_reason, rounded(one.logprobs)) for one in output.outputs]
        + [rounded(output.prompt_logprobs)]
        for output in outputs
    ]


def rounded(rows: Any) -> Any:
    return rows and [row and {token: (round(one.logprob, 3), one.rank) for token, one in row.items()} for row in rows]


def test_answers_texts_and_log_probabilities_are_those_of_plain_decoding(drafting: LLM) -> None:
    answers = said(drafting)
    assert answers == said(make())
    assert answers[1][0][3] == "black; red" and answers[1][0][0].endswith("black; red"), (
        "it ends within a step's tokens"
    )
    metrics = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in drafting.get_metrics()}
    drafts, tokens, accepted = (metrics[name] for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"))
    by_position = metrics["num_accepted_tokens_per_pos"]
    assert isinstance(drafts, Counter) and isinstance(tokens, Counter) and isinstance(accepted, Counter)
    assert isinstance(by_position, Vector) and len(by_position.values) == 4
    assert tokens.value >= accepted.value == sum(by_position.values) > 20
    assert drafts.value >= by_position.values[0] >= by_position.values[-1] > 0
