"""Constrained answers of the embedded model: every finished one is judged by jsonschema, re, or the list itself."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from quire import LLM, SamplingParams
from quire.base import env
from quire.ops.cpu.native import kernels
from quire.schema.errors import InputError
from quire.schema.outputs import CompletionOutput
from quire.schema.params import StructuredOutputsParams as Constraint
from tests.engine.schema_corpus import GRAMMARS, MORE_GRAMMARS, REGEXES, SCHEMAS, random_schema
from tests.products import marked, spread

pytestmark = pytest.mark.usefixtures("warm_children")
PROMPT = "Answer with one example, as short as possible:"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        if kernels() is None:  # torch alone rounds by the size of a batch, unless it is asked not to
            patch.setenv("QUIRE_BATCH_INVARIANT", "1")
            env.forget_all()
        made = LLM(max_model_len=512, max_num_seqs=16, num_gpu_blocks_override=400)
        yield made
        made.close()
    env.forget_all()


def ask(llm: LLM, constraints: list[dict[str, Any]], **params: Any) -> list[CompletionOutput]:
    given = {"temperature": 0.0, "max_tokens": 70, **params}
    asked = [SamplingParams(**given, structured_outputs=Constraint(**one)) for one in constraints]
    return [result.outputs[0] for result in llm.generate([PROMPT] * len(asked), asked, use_tqdm=False)]


def validates(text: str, schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(("temperature", "part"), spread([0.0, 1.0], [0, 1]))
def test_every_finished_answer_is_valid_json(llm: LLM, temperature: float, part: int) -> None:
    schemas = SCHEMAS[part::2]
    answers = ask(llm, [{"json": schema} for schema in schemas], temperature=temperature, seed=3)
    ended = [(a, s) for a, s in zip(answers, schemas, strict=True) if a.finish_reason == "stop"]
    for answer, schema in ended:
        validates(answer.text, schema)
    # the others ran out of tokens: small models repeat themselves inside open texts and numbers
    assert len(ended) >= len(schemas) * 0.75, [a.text for a in answers if a.finish_reason != "stop"]


@pytest.mark.parametrize("count", marked([18, 36], [18]))
def test_random_schemas(llm: LLM, count: int) -> None:
    dice = random.Random(11)
    schemas = [random_schema(dice) for _ in range(count)]
    answers = ask(llm, [{"json": schema} for schema in schemas], temperature=1.0, seed=5)
    ended = [(a, s) for a, s in zip(answers, schemas, strict=True) if a.finish_reason == "stop"]
    for answer, schema in ended:
        validates(answer.text, schema)
    assert len(ended) >= count * 0.75


def test_regexes(llm: LLM) -> None:
    answers = ask(llm, [{"regex": regex} for regex in REGEXES], max_tokens=60, temperature=1.0, seed=1)
    ended = [(a.text, r) for a, r in zip(answers, REGEXES, strict=True) if a.finish_reason == "stop"]
    assert [(text, regex) for text, regex in ended if not re.fullmatch(regex, text)] == []
    assert len(ended) >= 25


def test_choices_and_grammars(llm: LLM) -> None:
    lists = [["red", "green"], ["yes"], ["a", "ab", "abc"], ['"q"', "tab\there", "é"], [str(i) for i in range(3000)]]
    for answer, words in zip(ask(llm, [{"choice": words} for words in lists]), lists, strict=True):
        assert answer.text in words and answer.finish_reason == "stop"
    for answer, words in zip(ask(llm, [{"grammar": one} for one in GRAMMARS]), GRAMMARS.values(), strict=True):
        assert answer.text in words and answer.finish_reason == "stop"
    answers = ask(llm, [{"grammar": one} for one in MORE_GRAMMARS], max_tokens=40)
    for answer, regex in zip(answers, MORE_GRAMMARS.values(), strict=True):
        assert answer.finish_reason == "length" or re.fullmatch(regex, answer.text), (regex, answer.text)


def test_json_object_and_structural_tag(llm: LLM) -> None:
    (answer,) = ask(llm, [{"json_object": True}], max_tokens=80)
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.text), dict)
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
    (answer,) = ask(llm, [{"structural_tag": json.dumps({"type": "structural_tag", "format": form})}])
    found = re.fullmatch(r"<f>(.*)</f>", answer.text, re.S)
    assert found, answer.text
    validates(found[1], schema)
    old = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f>"]}
    (answer,) = ask(llm, [{"structural_tag": json.dumps(old)}], max_tokens=20)
    assert answer.text  # free text until the trigger


def test_compact_json(llm: LLM) -> None:
    answers = ask(llm, [{"json": s, "disable_any_whitespace": True} for s in (SCHEMAS[0], SCHEMAS[9])])
    assert answers[0].text == json.dumps(json.loads(answers[0].text), separators=(",", ":"), ensure_ascii=False)


def test_each_alone_equals_all_at_once(llm: LLM) -> None:
    mixed: list[dict[str, Any]] = [
        {"json": SCHEMAS[0]}, {"regex": REGEXES[0]}, {"choice": ["red", "green"]}, {"json": SCHEMAS[9]},
        {"grammar": 'root ::= [a-z]+ "!"'}, {"json_object": True}, {"json": SCHEMAS[15]}, {"regex": REGEXES[3]},
    ]  # fmt: skip
    together = [a.token_ids for a in ask(llm, mixed, max_tokens=40)]
    alone = [ask(llm, [one], max_tokens=40)[0].token_ids for one in mixed]
    assert together == alone


def test_constrained_and_free_requests_in_one_batch(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=12)
    bound = SamplingParams(temperature=0, max_tokens=12, structured_outputs=Constraint(choice=["red", "blue"]))
    (alone,) = llm.generate([PROMPT], free, use_tqdm=False)
    results = llm.generate([PROMPT] * 4, [free, bound, free, bound], use_tqdm=False)
    assert [r.outputs[0].token_ids for r in results[::2]] == [alone.outputs[0].token_ids] * 2
    assert {r.outputs[0].text for r in results[1::2]} <= {"red", "blue"}


def test_several_answers_with_logprobs(llm: LLM) -> None:
    params = SamplingParams(
        n=4, temperature=1.5, seed=2, logprobs=3, max_tokens=30, structured_outputs=Constraint(json=SCHEMAS[2])
    )
    (result,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert len(result.outputs) == 4
    for answer in result.outputs:
        validates(answer.text, SCHEMAS[2])
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)


def test_an_end_comes_only_where_the_grammar_allows_it(llm: LLM) -> None:
    eos = llm.get_tokenizer().eos_token_id
    biased = {"logit_bias": {eos: 100.0}}
    answers = ask(llm, [{"regex": "[a-z]{4,9}"}, {"regex": "[a-z]{4,9}"}], **biased)
    assert all(re.fullmatch("[a-z]{4,9}", a.text) and a.token_ids[-1] == eos for a in answers)
    (kept,) = ask(llm, [{"regex": "[a-z]{4}"}], ignore_eos=True, max_tokens=50)
    assert re.fullmatch("[a-z]{4}", kept.text) and kept.finish_reason == "stop" and eos not in kept.token_ids
    (long,) = ask(llm, [{"choice": ["ab"]}], min_tokens=20, max_tokens=50)
    assert long.text == "ab" and long.finish_reason == "stop"


def test_stop_strings_still_cut(llm: LLM) -> None:
    (answer,) = ask(llm, [{"regex": r"\w+@\w+\.com\n"}], stop=["\n"], max_tokens=80)
    assert "\n" not in answer.text


def test_a_preempted_request_keeps_its_place(llm: LLM) -> None:
    schema = {"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 999}, "minItems": 12,
              "maxItems": 12}  # fmt: skip
    small = LLM(
        max_model_len=128,
        max_num_seqs=5,
        num_gpu_blocks_override=12,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    try:
        asked = {
            "constraints": [{"json": schema, "disable_any_whitespace": True}] * 5,
            "max_tokens": 90,
            "temperature": 0.8,
            "seed": 7,
        }
        answers = ask(small, **asked)
        preempted = {m.name: m for m in small.get_metrics()}["vllm:num_preemptions"]
    finally:
        small.close()
    assert preempted.value > 0, "the run must preempt to show anything"
    assert [a.token_ids for a in answers] == [a.token_ids for a in ask(llm, **asked)]
    for answer in answers:
        validates(answer.text, schema)


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"json": {"type": "object", "not": {}}}, "'not'"),
        ({"json": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}, "'uniqueItems'"),
        ({"grammar": "root ::= ("}, "ebnf"),
        ({"grammar": "start: missing"}, "lark"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}}, "oneOf"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_engine_goes_on(
    llm: LLM, constraint: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        ask(llm, [constraint])
    assert ask(llm, [{"choice": ["on"]}])[0].text == "on"


def test_a_pydantic_model_is_a_schema(llm: LLM) -> None:
    import pydantic

    class Car(pydantic.BaseModel, extra="forbid"):  # else a small model goes on with more of its own
        brand: str = pydantic.Field(max_length=12)
        doors: int = pydantic.Field(ge=1, le=5)

    (answer,) = ask(llm, [{"json": Car}])
    assert 1 <= Car.model_validate_json(answer.text).doors <= 5


def test_look_ahead_and_a_process_of_its_own_change_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.base import env

    mixed: list[dict[str, Any]] = [{"json": SCHEMAS[0]}, {"regex": REGEXES[3]}, {"choice": ["red", "green"]}]
    wanted = [a.token_ids for a in ask(llm, mixed, max_tokens=40)]
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "1")
    env.forget_all()
    try:
        with LLM(max_model_len=512, num_gpu_blocks_override=400, async_scheduling=True) as other:
            assert other.llm_engine.vllm_config.scheduler_config.async_scheduling
            assert [a.token_ids for a in ask(other, mixed, max_tokens=40)] == wanted
            with pytest.raises(InputError, match="ebnf"):
                ask(other, [{"grammar": "root ::= ("}])
    finally:
        monkeypatch.undo()
        env.forget_all()


def test_forced_text_is_said_in_whole_tokens(llm: LLM) -> None:
    """One token per letter would be a step per letter, in a form the model has never seen."""
    text = "a constant of some length"
    (answer,) = ask(llm, [{"regex": f"(?i:x)?{text}"}])  # a regex for guidance
    assert answer.text.endswith(text) and len(answer.token_ids) <= 12, answer


@pytest.mark.parametrize("backend", ["outlines", "lm-format-enforcer"])
def test_further_backends_on_the_model(backend: str) -> None:
    from quire.grammar.backend import PACKAGES

    pytest.importorskip(PACKAGES[backend][0])
    config = {"backend": backend, "disable_fallback": True}
    schema = {"type": "object", "properties": {"kind": {"type": "string", "enum": ["cat", "dog"]},
              "old": {"type": "boolean"}}, "required": ["kind", "old"], "additionalProperties": False}  # fmt: skip
    with LLM(max_model_len=256, num_gpu_blocks_override=60, structured_outputs_config=config) as made:
        answers = ask(made, [{"json": schema}, {"regex": r"[a-c]{3}-\d{2}"}, {"choice": ["red", "green"]}])
        validates(answers[0].text, schema)
        assert re.fullmatch(r"[a-c]{3}-\d{2}", answers[1].text) and answers[2].text in ("red", "green")
        with pytest.raises(InputError, match=backend):
            ask(made, [{"json": {"type": "string", "format": "date"}}])


def test_beams_are_held_to_a_form(llm: LLM) -> None:
    from quire import BeamSearchParams

    words = ["red", "green", "blue", "black"]
    held = {"beam_width": 3, "max_tokens": 12, "structured_outputs": Constraint(choice=words)}
    (found,) = llm.beam_search([PROMPT], BeamSearchParams(**held))
    said = [sequence.text.removeprefix(PROMPT) for sequence in found.sequences if sequence.text is not None]
    assert len(said) == 3 and set(said) <= set(words), said
    assert len({tuple(sequence.tokens) for sequence in found.sequences}) == 3
    (free,) = llm.beam_search(
        [PROMPT], BeamSearchParams(beam_width=3, max_tokens=4, structured_outputs=Constraint(regex="[a-z ]{3,40}"))
    )
    for sequence in free.sequences:
        assert sequence.text is not None and re.fullmatch("[a-z ]*", sequence.text.removeprefix(PROMPT))
    with pytest.raises(InputError, match="ebnf"):
        llm.beam_search([PROMPT], BeamSearchParams(**{**held, "structured_outputs": Constraint(grammar="root ::= (")}))
