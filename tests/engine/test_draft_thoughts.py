"""Drafts where an answer thinks first: a form waits for the end of the thought, a budget brings that end, and every
answer is the one of plain decoding. Past answers are drafted, so the second time most drafts are right."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.schema.params import StructuredOutputsParams as Constraint
from tests.engine.test_drafts import same_bits
from tests.engine.test_thinking import COLORS, FORM, QUESTION, SIZES, TEMPLATE

__all__ = ["same_bits"]

SCHEMA = {"type": "object", "properties": {"c": {"enum": COLORS}}, "required": ["c"], "additionalProperties": False}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=FORM),
    SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=FORM, thinking_token_budget=9),
    SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=Constraint(json=SCHEMA), thinking_token_budget=5),
    SamplingParams(temperature=0.9, seed=4, max_tokens=30, structured_outputs=FORM, thinking_token_budget=6, n=2),
    SamplingParams(temperature=0.0, max_tokens=30, thinking_token_budget=7),
    SamplingParams(temperature=0.8, seed=2, max_tokens=30, thinking_token_budget=0, logprobs=1),
]


def said(llm: LLM) -> list[Any]:
    more: dict[str, Any] = {"chat_template": TEMPLATE, "chat_template_kwargs": {"thinking": True}, "use_tqdm": False}
    done = llm.chat([QUESTION] * len(PARAMS), PARAMS, **more)
    return [[(one.token_ids, one.text, one.finish_reason) for one in output.outputs] for output in done]


CONFIG = {"reasoning_parser": "deepseek_v3"}


@pytest.fixture(scope="module")
def expected(same_bits: None) -> list[Any]:
    """Plain decoding's answers."""
    pytest.importorskip("llguidance")
    with LLM(structured_outputs_config=CONFIG, async_scheduling=False, **SIZES) as plain:
        found = said(plain)
    for answers in found[1:4]:
        assert all(text.partition("</think>")[2] for _, text, _ in answers)
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_thoughts_budgets_and_forms(expected: list[Any], ahead: bool) -> None:
    keys = {"method": "suffix", "num_speculative_tokens": 8, "adaptive": False}
    with LLM(
        structured_outputs_config=CONFIG, speculative_config=keys, disable_log_stats=False, async_scheduling=ahead,
        **SIZES,
    ) as drafting:  # fmt: skip
        assert [said(drafting) for _ in range(2)] == [expected, expected]
        metrics: dict[str, Any] = {metric.name: metric for metric in drafting.get_metrics()}
    tokens = sum(len(tokens) for answers in expected for tokens, _, _ in answers)
    assert metrics["vllm:spec_decode_num_accepted_tokens"].value > tokens / 4
