"""engine/inputs.py: what becomes of a prompt and its parameters, and every refusal names value and limit."""

from __future__ import annotations

import copy
from pathlib import Path

import msgspec
import pytest

from quire.base.codec import Codec
from quire.config import EngineArgs
from quire.engine.inputs import InputProcessor, Options, check_context, default_params
from quire.sched.request import Request
from quire.schema.errors import InputError, NotBuiltError
from quire.schema.messages import EngineReady, ToEngine
from quire.schema.params import RepetitionDetectionParams, ResolvedParams, SamplingParams, StructuredOutputsParams
from quire.schema.step import NewRow
from quire.text.tokenizer import load_tokenizer
from tests.fake_engine import EOS, FURTHER_EOS, VOCAB, ids_of, write_model

ROOT = Path(__file__).parents[3]
CHOICE = StructuredOutputsParams(choice=["a"])
READY = EngineReady(num_blocks=64, max_model_len=40, vocab_size=VOCAB, block_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def make(folder, *, tokenizer=True, **options) -> InputProcessor:
    config = EngineArgs(model=folder, max_model_len=40, **options).create_engine_config()
    return InputProcessor(config, load_tokenizer(folder) if tokenizer else None, READY)


@pytest.fixture(scope="module")
def inputs(folder):
    return make(folder)


def test_a_text_prompt(inputs):
    asked = inputs.process("r", "héllo", SamplingParams(max_tokens=7, stop_token_ids=[9]))
    (request,) = asked.requests
    assert asked.text == "héllo" and list(request.prompt_token_ids) == ids_of("héllo")
    assert request.request_id.startswith("r#") and request.parent_id is None and request.max_tokens == 7
    assert request.eos_token_id == EOS and request.params.stop_token_ids == (9, FURTHER_EOS)


@pytest.mark.parametrize(
    "given", [[5, 6], (5, 6), {"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [5, 6], "prompt": "x"}]
)
def test_token_prompts(inputs, given):
    asked = inputs.process("r", given, SamplingParams())
    assert asked.token_ids == (5, 6)
    assert asked.text == ("x" if isinstance(given, dict) and "prompt" in given else None)


def test_max_tokens_fill_the_context(inputs):
    assert inputs.process("r", "abcd", SamplingParams(max_tokens=None)).requests[0].max_tokens == 36
    assert inputs.process("r", "abcd", SamplingParams(max_tokens=1000)).requests[0].max_tokens == 36
    assert inputs.process("r", [5] * 39, SamplingParams()).requests[0].max_tokens == 1


def test_ignore_eos_leaves_only_the_callers_stop_ids(inputs):
    (request,) = inputs.process("r", "a", SamplingParams(ignore_eos=True, stop_token_ids=[7])).requests
    assert request.params.stop_token_ids == (7,)


def test_n_answers_are_siblings_with_seeds_in_a_row(inputs):
    first = -1 - (1 << 62)
    asked = inputs.process("r", "abc", SamplingParams(n=3, seed=-1 - (1 << 62), prompt_logprobs=1))
    names = [r.request_id for r in asked.requests]
    assert len(set(names)) == 3 and all(name.startswith("r#") for name in names)
    assert [r.seed for r in asked.requests] == [(first + i) % (1 << 64) for i in range(3)]
    assert {r.parent_id for r in asked.requests} == {"r"}
    assert [r.params.prompt_logprobs for r in asked.requests] == [1, None, None]


def test_unseeded_requests_repeat_with_the_engines_seed(folder):
    def seeds(**options):
        return [make(folder, **options).process(str(i), "a", SamplingParams()).requests[0].seed for i in range(3)]

    first = make(folder)
    drawn = [first.process(str(i), "a", SamplingParams()).requests[0].seed for i in range(3)]
    again = make(folder)
    assert drawn == [again.process(str(i), "a", SamplingParams()).requests[0].seed for i in range(3)]
    assert len(set(drawn)) == 3
    assert seeds(seed=1) != seeds(seed=2)
    assert make(folder).process("r", "a", SamplingParams(seed=-5)).requests[0].seed == (1 << 64) - 5


def test_truncation_keeps_the_end(inputs):
    text = "abcdefgh" * 10
    assert inputs.process("r", text, SamplingParams(truncate_prompt_tokens=5)).token_ids == tuple(ids_of(text[-5:]))
    assert inputs.process("r", text, SamplingParams(truncate_prompt_tokens=-1)).token_ids == tuple(ids_of(text[-39:]))
    kwargs = Options(tokenization_kwargs={"truncation": True, "max_length": 3})
    assert inputs.process("r", text, SamplingParams(), kwargs).token_ids == tuple(ids_of(text[-3:]))
    assert inputs.process("r", "ab", SamplingParams(truncate_prompt_tokens=30)).token_ids == tuple(ids_of("ab"))


def test_bad_words_at_the_start_and_after_a_space(inputs):
    params = inputs.process("r", "a", SamplingParams(bad_words=["no", " yes"])).requests[0].params
    assert params.bad_words_token_ids == tuple(tuple(ids_of(w)) for w in ("no", " no", "yes", " yes"))


def test_the_callers_params_stay_as_they_were(inputs):
    given = SamplingParams(bad_words=["no"], stop=["x"])
    inputs.process("r", "a", given)
    assert given == SamplingParams(bad_words=["no"], stop=["x"])


REFUSED = [
    ("", {}, ["empty"]),
    ([], {}, ["empty"]),
    ("x" * 40, {}, ["40 input tokens", "max_model_len=40"]),
    ([1, VOCAB], {}, [str(VOCAB), str(VOCAB - 1)]),
    ([-1], {}, ["-1"]),
    (17, {}, ["int"]),
    ("a", {"thinking_token_budget": 3}, ["no reasoning parser", "--reasoning-parser"]),
    ("a", {"logprobs": 21}, ["logprobs", "21", "20"]),
    ("a", {"logprobs": -1}, ["-1", "20"]),
    ("a", {"prompt_logprobs": 50}, ["prompt_logprobs", "50", "20"]),
    ("a", {"allowed_token_ids": [VOCAB]}, ["allowed_token_ids", str(VOCAB)]),
    ("a", {"stop_token_ids": [-3]}, ["stop_token_ids", "-3"]),
    ("a", {"logit_bias": {VOCAB: 1.0}}, ["logit_bias", str(VOCAB)]),
    ("a", {"logprob_token_ids": [VOCAB]}, ["logprob_token_ids"]),
    ("a", {"min_tokens": 40, "max_tokens": None}, ["min_tokens=40", "41 in all", "max_model_len=40"]),
    ("a", {"truncate_prompt_tokens": 41}, ["41", "40"]),
]


@pytest.mark.parametrize(("prompt", "params", "words"), REFUSED, ids=lambda x: str(x)[:30])
def test_refusals_name_value_and_limit(inputs, prompt, params, words):
    with pytest.raises(InputError) as caught:
        inputs.process("r", prompt, SamplingParams(**params))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_lengths_have_one_message():
    """Whoever finds that a request is too long says so in the same words: value, limit, and which parameter it is."""
    check_context(40, 39)
    check_context(40, 30, 10)
    for given, param, value in (
        ((40, 40), "prompt", 40), ((40, 30, 11), "max_tokens", 11), ((40, 41, 3), "prompt", 41),
        ((40, 0, 41), "max_tokens", 41),
    ):  # fmt: skip
        with pytest.raises(InputError) as caught:
            check_context(*given)
        assert (caught.value.param, caught.value.value) == (param, value)
        assert "max_model_len=40" in str(caught.value) and str(value) in str(caught.value)
    sources = {path: path.read_text() for path in (ROOT / "quire").rglob("*.py")}
    for words in (
        "longer than the maximum model length",
        "maximum context length",
        "cannot be greater than max_model_len",
    ):
        assert [path.name for path, text in sources.items() if words in text] == ["inputs.py"], words


@pytest.mark.parametrize(
    ("prompt", "params", "options"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, {}, {}),
    ],
)
def test_what_is_not_built_is_refused_by_name(inputs, prompt, params, options):
    with pytest.raises(NotBuiltError):
        inputs.process("r", prompt, SamplingParams(**params), Options(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 3},
        {"priority": "high"},
        {"data_parallel_rank": 1},
        {"tokenization_kwargs": {"colour": 1}},
    ],
)
def test_options_are_checked(inputs, options):
    with pytest.raises(InputError):
        inputs.process("r", "a", SamplingParams(), Options(**options))


@pytest.mark.parametrize(("request_id", "params"), [("", SamplingParams()), (5, SamplingParams()), ("r", "greedy")])
def test_types_are_checked(inputs, request_id, params):
    with pytest.raises(InputError):
        inputs.process(request_id, "a", params)


def test_priority_needs_its_policy(folder):
    inputs = make(folder, scheduling_policy="priority")
    assert inputs.process("r", "a", SamplingParams(), Options(priority=-3)).requests[0].priority == -3


def test_max_logprobs_minus_one_has_no_cap(folder):
    inputs = make(folder, max_logprobs=-1)
    inputs.process("r", "a", SamplingParams(logprobs=-1, prompt_logprobs=VOCAB))
    with pytest.raises(InputError):
        inputs.process("r", "a", SamplingParams(logprobs=VOCAB + 1))


def test_without_a_tokenizer(folder):
    inputs = make(folder, tokenizer=False, skip_tokenizer_init=True)
    asked = inputs.process("r", [5], SamplingParams())
    assert not asked.params.detokenize and asked.requests[0].eos_token_id == EOS
    for prompt, params in (("text", {}), ([5], {"stop": ["x"]}), ([5], {"bad_words": ["x"]})):
        with pytest.raises(InputError, match="skip_tokenizer_init"):
            inputs.process("r", prompt, SamplingParams(**params))


def test_params_changed_after_their_making_are_checked_again(inputs):
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(InputError, match="temperature"):
        inputs.process("r", "a", params)
    with pytest.raises(InputError, match="1000000000"):
        inputs.process("r", "a", SamplingParams(n=10**9))


def test_resolved_params_are_a_value_of_their_own(inputs):
    """Frozen, and whatever a caller does to its own afterwards does not reach them."""
    mine = SamplingParams(
        stop=["x"], stop_token_ids=[7], logit_bias={5: 1.0}, allowed_token_ids=[5, 6], bad_words_token_ids=[[5, 6]],
        extra_args={"deep": [1]}, logprob_token_ids=[5], top_k=-1,
    )  # fmt: skip
    before = copy.deepcopy(mine)
    found = inputs.process("r", "a", mine).requests[0].params
    assert mine == before, "the caller's own was changed"
    kept = copy.deepcopy(found)
    for value in (mine.stop, mine.stop_token_ids, mine.allowed_token_ids, mine.bad_words_token_ids[0]):
        value.clear()
    mine.logit_bias[5], mine.temperature = 9.0, 0.0
    mine.extra_args["deep"].append(2)
    assert found == kept and found.extra_args == {"deep": [1]} and found.logprobs == 0
    for name in ResolvedParams.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(found, name, None)


def test_nothing_checks_resolved_params_again(inputs, monkeypatch):
    """Not another prompt, not the wire, not the scheduler, and not a worker's wire."""
    resolved = inputs.resolve(SamplingParams(n=2, prompt_logprobs=1, stop=["x"], structured_outputs=CHOICE))
    checked = []
    for kind in (SamplingParams, StructuredOutputsParams):
        monkeypatch.setattr(kind, "__post_init__", lambda self: checked.append(type(self)))
    for name in ("resolve", "_check_params"):
        monkeypatch.setattr(inputs, name, lambda *a, **k: checked.append("resolve"))
    first, second = inputs.process("r", "a", resolved).requests
    assert first.params is resolved and second.params.prompt_logprobs is None
    codec = Codec(ToEngine)
    arrived = codec.decode(codec.encode(first))
    assert arrived == first and isinstance(arrived.params, ResolvedParams)
    row = Request(arrived, limit=9, queued=0.0).row()
    assert row.params is arrived.params
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=NewRow) == row
    assert not checked


def test_resolved_params_have_the_names_of_sampling_params():
    mine, theirs = set(ResolvedParams.__struct_fields__), set(SamplingParams.__struct_fields__)
    assert mine - theirs == {"grammar"}
    assert theirs - mine == {"structured_outputs", "skip_clone", "logits_processors"}


def test_default_params_come_from_the_generation_config(folder):
    config = EngineArgs(model=folder).create_engine_config()
    assert default_params(config) == SamplingParams(temperature=0.5, top_p=0.9, max_tokens=33)
    plain = EngineArgs(model=folder, generation_config="vllm").create_engine_config()
    assert default_params(plain) == SamplingParams()


def test_repetition_detection_travels(inputs):
    rule = RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    assert (
        inputs.process("r", "a", SamplingParams(repetition_detection=rule)).requests[0].params.repetition_detection
        == rule
    )
