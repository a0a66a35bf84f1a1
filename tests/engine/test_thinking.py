"""Thoughts of the embedded model: a form waits for their end, and a budget brings it. Templates open or close them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.schema.errors import ConfigError, InputError
from quire.schema.params import StructuredOutputsParams as Constraint

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinking is defined %}{{ '<think>\n' if thinking else '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
QUESTION = [{"role": "user", "content": "Say a color."}]
COLORS = ["red", "green"]
FORM = Constraint(choice=COLORS)
SIZES: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "num_gpu_blocks_override": 80}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(structured_outputs_config={"reasoning_parser": "deepseek_v3"}, **SIZES) as made:
        yield made


def say(llm: LLM, *, thinking: bool | None = None, form: Constraint | None = FORM, **params: Any) -> list[str]:
    given = {"temperature": 0.0, "max_tokens": 40, **params}
    told: dict[str, Any] = {} if thinking is None else {"thinking": thinking}
    asked = SamplingParams(**given, structured_outputs=form)
    (result,) = llm.chat(QUESTION, asked, use_tqdm=False, chat_template=TEMPLATE, chat_template_kwargs=told)
    return [one.text for one in result.outputs]


def test_an_open_thought_is_free_and_its_answer_is_bound(llm: LLM) -> None:
    (free,) = say(llm, thinking=True)
    assert "</think>" not in free and not free.startswith(("red", "green"))  # this model never closes it by itself
    (closed,) = say(llm, thinking=True, thinking_token_budget=6)
    thought, _, answer = closed.partition("</think>")
    assert answer in COLORS and free.startswith(thought) and thought
    schema = {"type": "object", "properties": {"c": {"enum": COLORS}}, "required": ["c"], "additionalProperties": False}
    (found,) = say(llm, thinking=True, form=Constraint(json=schema), thinking_token_budget=3)
    assert json.loads(found.partition("</think>")[2])["c"] in COLORS


def test_a_thought_switched_off_leaves_the_form_alone(llm: LLM) -> None:
    assert say(llm, thinking=False)[0] in COLORS
    assert say(llm, thinking=False, thinking_token_budget=0)[0] in COLORS


def test_an_answer_may_open_its_thought_itself(llm: LLM) -> None:
    assert say(llm)[0] in COLORS  # it may, and does not
    opener = llm.get_tokenizer().encode("<think>", add_special_tokens=False)[0]
    (found,) = say(llm, thinking_token_budget=4, logit_bias={opener: 100.0})
    assert found.startswith("<think>") and found.partition("</think>")[2] in COLORS


def test_budgets_without_a_form(llm: LLM) -> None:
    (free,) = say(llm, thinking=True, form=None)
    (none,) = say(llm, thinking=True, form=None, thinking_token_budget=0)
    (some,) = say(llm, thinking=True, form=None, thinking_token_budget=5)
    assert none.startswith("</think>") and free.startswith(some.partition("</think>")[0])
    assert len(llm.get_tokenizer().encode(some.partition("</think>")[0], add_special_tokens=False)) == 5
    assert say(llm, thinking=True, form=None, thinking_token_budget=1000) == [free]
    several = say(llm, thinking=True, form=None, thinking_token_budget=3, n=3, temperature=1.0, seed=1)
    assert len(set(several)) == 3 and all("</think>" in one for one in several)


def test_an_answer_that_is_continued_may_be_within_its_thought(llm: LLM) -> None:
    for begun, waits in (("<think>I like red, but", True), ("<think>Hm.</think>", False), ("Well: ", False)):
        messages = [*QUESTION, {"role": "assistant", "content": begun}]
        asked = SamplingParams(temperature=0, max_tokens=30, structured_outputs=FORM, thinking_token_budget=4)
        more = {"add_generation_prompt": False, "continue_final_message": True, "use_tqdm": False}
        text = llm.chat(messages, asked, **more)[0].outputs[0].text
        thought, closed, answer = text.partition("</think>")
        assert (answer in COLORS and thought and closed) if waits else text in COLORS, (begun, text)


def test_the_whole_answer_is_bound_where_that_is_asked() -> None:
    config = {"reasoning_parser": "deepseek_v3", "enable_in_reasoning": True}
    with LLM(structured_outputs_config=config, **SIZES) as strict:
        assert say(strict, thinking=True)[0] in COLORS


def test_marks_of_ones_own_and_words_before_the_end() -> None:
    own = {"reasoning_start_str": "<think>", "reasoning_end_str": " Enough.</think>"}
    with LLM(reasoning_config=own, async_scheduling=True, **SIZES) as made:
        (found,) = say(made, thinking=True, thinking_token_budget=4)
        assert found.partition(" Enough.</think>")[2] in COLORS
    with pytest.raises(ConfigError, match="reasoning_start_str"):
        LLM(reasoning_config={"reasoning_end_str": "x"})
    with pytest.raises(ConfigError, match="qwen3"):
        LLM(reasoning_parser="deepseek_r1", reasoning_config={"reasoning_parser": "qwen3"})


def test_a_family_without_tags_has_no_budgets() -> None:
    with (
        LLM(reasoning_parser="identity", **SIZES) as plain,
        pytest.raises(InputError, match="'identity' does not tell"),
    ):
        say(plain, thinking_token_budget=3)
