"""The door types: defaults, ranges, and that what crosses a process comes back the same."""

import math
import pickle

import msgspec
import numpy as np
import pytest

from quire.schema.errors import EngineDeadError, InputError, MissingExtraError
from quire.schema.kv import KVKind, KVSpec
from quire.schema.media import ArrayData, MediaItem
from quire.schema.messages import Abort, ControlCall, EngineOutput, EngineRequest, FromEngine, Outputs, ToEngine
from quire.schema.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput
from quire.schema.params import (
    BeamSearchParams,
    PoolingParams,
    RequestOutputKind,
    ResolvedParams,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.schema.prompt import Prompt, to_enc_dec_tuple_list, zip_enc_dec_prompts
from quire.schema.step import (
    Direction,
    EncodeItem,
    Grant,
    LogprobRows,
    Mask,
    Move,
    NewRow,
    Pooled,
    StepPlan,
    StepResult,
)

BAD_PARAMS = [
    ({"n": 0}, "n must be at least 1, got 0"),
    ({"n": 1.5}, "n must be an integer"),
    ({"n": True}, "n must be an integer"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": "hot"}, "temperature must be a number"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.0}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens is 5"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"seed": 1 << 64}, "seed"),
    ({"logprobs": -2}, "logprobs"),
    ({"prompt_logprobs": -5}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"stop": [""]}, "empty string"),
    ({"stop": [3]}, "stop holds 3"),
    ({"stop": ["x"], "detokenize": False}, "detokenize"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids holds 'x'"),
    ({"stop_token_ids": 7}, "stop_token_ids must be a list"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words"),
    ({"extra_args": 3}, "extra_args"),
    ({"max_tokens": 10**30}, f"max_tokens must be at most {2**63 - 1}, got 1000000000000000000000000000000"),
    ({"top_k": 10**30}, "top_k must be at most"),
    ({"temperature": 1e300}, "temperature must be in [0.0, 3.4e+38], got 1e+300"),
    ({"repetition_penalty": 1e300}, "repetition_penalty"),
    ({"output_kind": "delta"}, "output_kind must be one of CUMULATIVE (0), DELTA (1), FINAL_ONLY (2), got 'delta'"),
    ({"output_kind": 7}, "got 7"),
    ({"output_kind": True}, "got True"),
    ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
    ({"detokenize": None}, "detokenize must be True or False"),
    ({"skip_reading_prefix_cache": 1}, "skip_reading_prefix_cache"),
    ({"bad_words_token_ids": [1, 2]}, "bad_words_token_ids holds 1"),
    ({"bad_words_token_ids": [["x"]]}, "bad_words_token_ids holds 'x'"),
    ({"repetition_detection": {"max_pattern_size": 3}}, "must be RepetitionDetectionParams"),
]


@pytest.mark.parametrize(("given", "words"), BAD_PARAMS)
def test_bad_sampling_params_name_the_field(given, words):
    with pytest.raises(InputError, match=None) as caught:
        SamplingParams(**given)
    assert words in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_documented_defaults_and_normal_forms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, 16)
    assert params.stop == [] and params.stop_token_ids == [] and params.output_kind is RequestOutputKind.CUMULATIVE
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(stop="END").stop == ["END"]
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop_token_ids=None).stop_token_ids == []
    assert SamplingParams(logit_bias={"5": 200}).logit_bias == {5: 100.0}
    assert SamplingParams(temperature=1e-3).temperature == 0.01
    assert SamplingParams(temperature=0).greedy and not SamplingParams(temperature=0.01).greedy
    assert SamplingParams.from_optional(temperature=None, max_tokens=3).max_tokens == 3
    with pytest.raises(InputError, match="unknown sampling parameter"):
        SamplingParams.from_optional(temprature=1)


def test_numbers_of_numpy_become_pythons_own():
    params = SamplingParams(
        n=np.int64(2), seed=np.int64(3), max_tokens=np.uint8(7), temperature=np.float32(0.5), top_p=np.float64(0.9),
        allowed_token_ids=np.array([4, 5]), stop_token_ids=[np.int32(6)], bad_words_token_ids=[np.array([1, 2])],
    )  # fmt: skip
    own = SamplingParams(
        n=2, seed=3, max_tokens=7, temperature=0.5, top_p=0.9, allowed_token_ids=[4, 5], stop_token_ids=[6],
        bad_words_token_ids=[[1, 2]],
    )  # fmt: skip
    assert msgspec.msgpack.encode(params.freeze()) == msgspec.msgpack.encode(own.freeze())
    params.top_k, params.min_p = np.int64(-1), np.float32(0.25)
    assert (params.checked().top_k, params.checked().min_p) == (0, 0.25)
    beams = BeamSearchParams(beam_width=np.int64(2), max_tokens=np.int64(3), temperature=np.float64(0.5))
    assert [type(value) for value in (beams.beam_width, beams.max_tokens, beams.temperature)] == [int, int, float]


@pytest.mark.parametrize(
    "given",
    [{"n": np.int64(0)}, {"n": np.float64(2)}, {"n": np.bool_(True)}, {"temperature": np.float32(-1)},
     {"temperature": np.bool_(True)}, {"top_p": np.float64("nan")}, {"allowed_token_ids": np.array([0.5])},
     {"allowed_token_ids": np.array([True])}, {"stop_token_ids": np.int64(3)}],
)  # fmt: skip
def test_numbers_of_numpy_are_checked_as_others(given):
    (name,) = given
    with pytest.raises(InputError, match=name):
        SamplingParams(**given)


def test_clone_is_private_unless_promised():
    params = SamplingParams(stop=["a"], extra_args={"k": [1]})
    copy = params.clone()
    copy.extra_args["k"].append(2)
    assert params.extra_args == {"k": [1]}
    shared = SamplingParams(extra_args={"k": [1]}, skip_clone=True)
    assert shared.clone().extra_args is shared.extra_args


def test_exactly_one_structured_constraint():
    assert StructuredOutputsParams(choice=["a"]).choice == ["a"]
    for given in ({}, {"regex": "a", "json": "{}"}):
        with pytest.raises(InputError, match="exactly one"):
            StructuredOutputsParams(**given)


def test_beam_params_are_checked():
    with pytest.raises(InputError, match="beam_width"):
        BeamSearchParams(beam_width=0, max_tokens=4)
    by_place = BeamSearchParams(2, 3, True, 0.5, 0.9, True)
    assert by_place == BeamSearchParams(
        beam_width=2,
        max_tokens=3,
        ignore_eos=True,
        temperature=0.5,
        length_penalty=0.9,
        include_stop_str_in_output=True,
    )


@pytest.mark.parametrize(
    "given",
    [
        None,
        3,
        3.5,
        b"bytes",
        {},
        {"text": "x"},
        {"prompt": 3},
        ["a", "b"],
        [1, 2.5],
        [True],
        {"prompt_token_ids": "12"},
    ],
)
def test_wrong_prompts_are_refused(given):
    with pytest.raises(InputError):
        Prompt.of(given)


def test_prompt_forms():
    assert Prompt.of("hi").text == "hi"
    assert Prompt.of([1, 2]).token_ids == (1, 2)
    assert Prompt.of({"prompt_token_ids": [3], "prompt": "x", "cache_salt": "s"}) == Prompt(
        text="x", token_ids=(3,), cache_salt="s"
    )
    with pytest.raises(InputError, match="cache_salt"):
        Prompt.of({"prompt": "x", "cache_salt": ""})
    with pytest.raises(InputError, match="surrogate"):
        Prompt.of({"prompt": "x", "cache_salt": "a\udc00"})
    part = {"prompt": "x", "cache_salt": "é"}
    assert Prompt.of({"encoder_prompt": part, "decoder_prompt": part}).cache_salt == "é"
    with pytest.raises(InputError, match="give one"):
        Prompt.of({"encoder_prompt": part, "decoder_prompt": {"prompt": "x", "cache_salt": "b"}})


def test_messages_cross_a_process_unchanged():
    params = ResolvedParams(
        temperature=0.5, stop=("x",), logit_bias={3: 1.5}, extra_args={"a": [1, "b"]}, seed=MAX_SEED
    )
    request = EngineRequest(
        request_id="r", prompt_token_ids=(1, 2, 3), params=params, seed=MAX_SEED, max_tokens=5, cache_salt="s"
    )
    for message in (request, Abort(request_ids=("r",)), ControlCall(call_id=1, verb="v", args=[1, {"a": None}])):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToEngine) == message
    rows = LogprobRows([[1, 2]], [[-0.5, -1.0]], [1])
    out = Outputs(outputs=[EngineOutput(request_id="r", new_token_ids=[1], logprobs=rows)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(out), type=FromEngine) == out
    row = NewRow(request_id="r", epoch=0, token_ids=(1,), num_prompt_tokens=1, params=params, seed=1, blocks=((1, -1),))
    plan = StepPlan(step=1, grants=(Grant("r", 0, 1, True, 0, ((3,),)),), joined=(row,), left=("q",), total_tokens=1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan
    result = StepResult(step=1, sampled=[[4]], logprobs=[rows], prompt_logprobs={"r": rows})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result


MAX_SEED = (1 << 63) - 1


def test_page_bytes():
    spec = KVSpec(layer="a", kind=KVKind.FULL, block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16")
    assert spec.page_bytes == 16 * 2 * (64 + 64) * 2
    latent = KVSpec(
        layer="a", kind=KVKind.FULL, block_size=16, num_kv_heads=1, head_size=576, v_head_size=0, dtype="bfloat16"
    )
    assert latent.page_bytes == 16 * 576 * 2
    state = KVSpec(
        layer="a", kind=KVKind.STATE, block_size=1, state_shapes=((3, 4), (2,)), state_dtypes=("float32", "bfloat16")
    )
    assert state.page_bytes == 3 * 4 * 4 + 2 * 2


def test_flat_logprobs_behave_like_the_list():
    positions = [{1: Logprob(-0.5, 1, "a"), 2: Logprob(-1.0, 2, "b")}, {}, {3: Logprob(-0.1, 1, "c")}]
    flat = FlatLogprobs()
    flat.extend(positions)
    flat.append_fast([9], [-2.0], [4], ["z"])
    assert len(flat) == 4 and list(flat)[:3] == positions and flat[3] == {9: Logprob(-2.0, 4, "z")}
    assert list(flat[1:3]) == positions[1:3] and flat[-1] == flat[3]
    with pytest.raises(TypeError):
        flat[0] = {}


def test_request_outputs_join_and_pickle():
    first = RequestOutput("r", "p", [1], None, [CompletionOutput(0, "a", [5], -0.5)], False)
    later = RequestOutput("r", "p", [1], None, [CompletionOutput(0, "b", [6], -0.9, None, "stop")], True)
    first.add(later)
    assert first.outputs[0].text == "ab" and first.outputs[0].token_ids == [5, 6] and first.finished
    assert first.outputs[0].finish_reason == "stop" and first.outputs[0].cumulative_logprob == -0.9
    assert pickle.loads(pickle.dumps(first)) == first


def test_errors_say_what_to_do():
    assert 'pip install "quire-llm[hub]"' in str(MissingExtraError("a hub id", "hub", "huggingface_hub"))
    assert "because" in str(EngineDeadError("because")) and EngineDeadError("x").status == 503


def test_what_a_plan_does_not_say_does_not_travel() -> None:
    """Fields of features that are not used cost nothing on the wire, and come back as they were."""
    row = NewRow(
        request_id="a", epoch=0, token_ids=(1, 2), num_prompt_tokens=2, params=ResolvedParams(temperature=0.5), seed=3
    )
    plan = StepPlan(step=1, grants=(Grant("a", 0, 2, True, 0),), joined=(row,))
    data = msgspec.msgpack.encode(plan)
    bare = msgspec.msgpack.decode(data)
    assert set(bare) == {"step", "grants", "joined"}
    assert set(bare["grants"][0]) == {"request_id", "start", "count", "samples", "epoch"}
    assert msgspec.msgpack.decode(data, type=StepPlan) == plan
    result = StepResult(step=1, sampled=[[7]])
    assert set(msgspec.msgpack.decode(msgspec.msgpack.encode(result))) == {"step", "sampled"}


def test_plans_and_results_cross_with_all_they_may_hold() -> None:
    arrays = {"pixels": ArrayData((2, 1), "float32", bytes(8))}
    item = MediaItem(modality="image", key="k", offset=0, length=2, arrays=arrays, takes_vector=b"\x01\x00")
    row = NewRow(
        request_id="a", epoch=0, token_ids=(1,), num_prompt_tokens=1, params=PoolingParams(task="x"), seed=3,
        media=(item,),
    )  # fmt: skip
    plan = StepPlan(
        step=1,
        grants=(Grant("a", 3, 4, True, 0, ((5,),), 3),),
        joined=(row,),
        moves=(Move(1, 2), Move(3, 4, Direction.IN), Move(5, 6, Direction.OUT, after=True)),
        encode=(EncodeItem("a", item),),
        free_encoded=("old",),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan
    result = StepResult(step=1, sampled=[[7, 8]], drafts={"a": [9]}, pooled={"b": Pooled((2,), "float32", bytes(8))})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result
    mask = Mask(index=(0, 0), offsets=(0, 1), rows=bytes(16), words=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(mask), type=Mask) == mask


@pytest.mark.parametrize("params", [ResolvedParams(temperature=0.3, max_tokens=4), PoolingParams(task="embed")])
def test_parameters_are_a_tagged_union(params: ResolvedParams | PoolingParams) -> None:
    sent = EngineRequest(request_id="a", prompt_token_ids=(1,), params=params, seed=0, max_tokens=1)
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineRequest)
    assert type(got.params) is type(params) and got == sent
    assert got.sampling == (params if isinstance(params, ResolvedParams) else ResolvedParams())


def test_prompts_of_encoder_decoders_in_pairs() -> None:
    pairs = zip_enc_dec_prompts(["a", {"prompt_token_ids": [1, 2]}], [None, "b"], {"sampling_rate": 8000})
    assert pairs[0] == {"encoder_prompt": "a", "decoder_prompt": None, "mm_processor_kwargs": {"sampling_rate": 8000}}
    assert to_enc_dec_tuple_list(pairs) == [("a", None), ({"prompt_token_ids": [1, 2]}, "b")]
    each = zip_enc_dec_prompts(["a", "b"], ["c", "d"], [{"x": 1}, {}])
    assert [pair["mm_processor_kwargs"] for pair in each] == [{"x": 1}, {}]
    with pytest.raises(ValueError, match="shorter"):
        zip_enc_dec_prompts(["a"], [])
    read = Prompt.of({"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": 5}}, "decoder_prompt": [7, 8]})
    assert read.encoder is not None and read.encoder.text == "" and read.encoder.media is None
    assert (read.text, read.token_ids, read.media, read.has_media) == (None, (7, 8), {"audio": 5}, True)
