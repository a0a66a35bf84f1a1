"""engine/outputs.py and logprobs.py: text, stop strings, output kinds, n answers in one, log probabilities, numbers."""

from __future__ import annotations

import pickle

import pytest

from quire.config import EngineArgs
from quire.engine.inputs import InputProcessor
from quire.engine.outputs import OutputProcessor
from quire.observe.metrics import Metrics
from quire.schema.errors import EngineGenerateError, InputError
from quire.schema.messages import EngineOutput, EngineReady, FinishReason
from quire.schema.outputs import FlatLogprobs, Logprob
from quire.schema.params import RequestOutputKind, SamplingParams
from quire.schema.stats import RequestTimes
from quire.schema.step import LogprobRows
from quire.text.tokenizer import load_tokenizer
from tests.fake_engine import EOS, VOCAB, ids_of, write_model

DELTA, CUMULATIVE, FINAL = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"))
    config = EngineArgs(model=folder).create_engine_config()
    tokenizer = load_tokenizer(folder)
    ready = EngineReady(num_blocks=9, max_model_len=200, vocab_size=VOCAB, block_size=4)
    return InputProcessor(config, tokenizer, ready), tokenizer


class Run:
    """One request whose engine says what the test says."""

    def __init__(self, stage, prompt="ab", interval=1, metrics=None, **params) -> None:
        inputs, tokenizer = stage
        self.outputs = OutputProcessor(
            tokenizer, stream_interval=interval, metrics=() if metrics is None else [metrics]
        )
        self.asked = inputs.process("r", prompt, SamplingParams(**params))
        self.outputs.add(self.asked)

    def say(self, text="", *, index=None, finish=None, **news):
        name = self.asked.requests[index or 0].request_id
        output = EngineOutput(
            request_id=name, new_token_ids=news.pop("ids", ids_of(text)), finish_reason=finish, **news
        )
        return self.outputs.process([output])

    def texts(self, *pieces, finish=FinishReason.LENGTH):
        """The text of each result while the engine says these pieces, the last of them with the end."""
        shown = []
        for i, piece in enumerate(pieces):
            done = self.say(piece, finish=finish if i == len(pieces) - 1 else None)
            shown += [result.outputs[0].text for result in done.results]
        return shown


def test_output_kinds(stage):
    assert Run(stage, output_kind=CUMULATIVE).texts("he", "llo", "!") == ["he", "hello", "hello!"]
    assert Run(stage, output_kind=DELTA).texts("he", "llo", "!") == ["he", "llo", "!"]
    assert Run(stage, output_kind=FINAL).texts("he", "llo", "!") == ["hello!"]


def test_token_ids_follow_the_kind(stage):
    run = Run(stage, output_kind=DELTA)
    run.say("he")
    (result,) = run.say("llo").results
    assert result.outputs[0].token_ids == ids_of("llo")
    run = Run(stage, output_kind=CUMULATIVE)
    (first,) = run.say("he").results
    (second,) = run.say("llo").results
    assert first.outputs[0].token_ids == ids_of("he") and second.outputs[0].token_ids == ids_of("hello")
    assert first.prompt == "ab" and first.prompt_token_ids == ids_of("ab") and not first.finished


def test_half_a_character_waits(stage):
    snowman = ids_of("☃")
    run = Run(stage, output_kind=DELTA)
    texts = [run.say(ids=[i]).results[0].outputs[0].text for i in snowman]
    assert texts == ["", "", "☃"]
    run = Run(stage, output_kind=DELTA)
    run.say(ids=snowman[:1])
    assert run.say(ids=[], finish=FinishReason.LENGTH).results[0].outputs[0].text == "\ufffd"


def test_stream_interval(stage):
    run = Run(stage, interval=3, output_kind=DELTA)
    shown = [bool(run.say(c).results) for c in "abcdefg"]
    assert shown == [True, False, False, True, False, False, True]
    (last,) = run.say("h", finish=FinishReason.LENGTH).results
    assert last.outputs[0].text == "h" and last.finished
    run = Run(stage, interval=3, output_kind=DELTA)
    assert "".join(run.texts(*"abcdefgh")) == "abcdefgh"


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL])
def test_a_stop_string_across_tokens_ends_the_request(stage, kind):
    run = Run(stage, output_kind=kind, stop=["lo w"])
    results, aborts = [], []
    for piece in ("he", "l", "l", "o", " ", "w", "orld"):
        done = run.say(piece)
        results += done.results
        aborts += done.aborts
    last = results[-1]
    text = "".join(r.outputs[0].text for r in results) if kind is DELTA else last.outputs[0].text
    assert text == "hel" and last.finished and aborts == [run.asked.requests[0].request_id]
    assert last.outputs[0].finish_reason == "stop" and last.outputs[0].stop_reason == "lo w"
    ids = [i for r in results for i in r.outputs[0].token_ids] if kind is DELTA else last.outputs[0].token_ids
    assert ids == ids_of("hello w")
    assert "r" not in run.outputs and len(run.outputs) == 0


def test_several_tokens_at_once_are_cut_behind_the_stop_string(stage):
    run = Run(stage, output_kind=FINAL, stop=["llo"], logprobs=0)
    rows = LogprobRows([[i] for i in ids_of("hello world")], [[-1.0]] * 11, [1] * 11)
    (result,) = run.say("hello world", logprobs=rows).results
    assert result.outputs[0].token_ids == ids_of("hello") and result.outputs[0].text == "he"
    assert len(result.outputs[0].logprobs) == 5 and result.outputs[0].cumulative_logprob == -5.0


def test_a_stop_string_at_the_engines_own_end(stage):
    run = Run(stage, output_kind=FINAL, stop=["lo"], include_stop_str_in_output=True)
    done = run.say("hello", finish=FinishReason.LENGTH)
    assert done.aborts == [] and done.results[0].outputs[0].finish_reason == "stop"
    assert done.results[0].outputs[0].text == "hello"


def test_end_of_text_has_no_stop_reason_and_no_text(stage):
    run = Run(stage, output_kind=FINAL, skip_special_tokens=False)
    (result,) = run.say(ids=[*ids_of("hi"), EOS], finish=FinishReason.STOP).results
    answer = result.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hi", "stop", None)
    assert answer.token_ids == [*ids_of("hi"), EOS]
    run = Run(stage, output_kind=FINAL, stop_token_ids=ids_of("!"))
    (result,) = run.say("hi!", finish=FinishReason.STOP, stop_reason=ids_of("!")[0]).results
    assert result.outputs[0].text == "hi" and result.outputs[0].stop_reason == ids_of("!")[0]


def test_n_answers_are_one_result(stage):
    run = Run(stage, n=2, output_kind=FINAL)
    assert not run.say("x", index=0, finish=FinishReason.LENGTH).results
    (result,) = run.say("yz", index=1, finish=FinishReason.LENGTH).results
    assert result.finished and [(a.index, a.text) for a in result.outputs] == [(0, "x"), (1, "yz")]
    run = Run(stage, n=2, output_kind=CUMULATIVE)
    run.say("x", index=1)
    (result,) = run.say("a", index=0, finish=FinishReason.LENGTH).results
    assert [(a.index, a.text, a.finish_reason) for a in result.outputs] == [(0, "a", "length"), (1, "x", None)]
    assert not result.finished


def test_n_deltas_show_only_what_is_new(stage):
    run = Run(stage, n=2, output_kind=DELTA)
    run.say("x", index=0)
    (result,) = run.say("y", index=1).results
    assert [(a.index, a.text) for a in result.outputs] == [(1, "y")]
    (first,) = run.say("x2", index=0, finish=FinishReason.LENGTH).results
    assert not first.finished
    (last,) = run.say("y2", index=1, finish=FinishReason.LENGTH).results
    assert last.finished and [(a.index, a.text) for a in last.outputs] == [(1, "y2")]


def test_abort_says_what_there_is(stage):
    run = Run(stage, n=2, output_kind=FINAL)
    run.say("x", index=0, finish=FinishReason.LENGTH)
    run.say("yy", index=1)
    done = run.outputs.abort(["r", "unknown"])
    assert done.aborts == [run.asked.requests[1].request_id]
    (result,) = done.results
    assert [(a.text, a.finish_reason) for a in result.outputs] == [("x", "length"), ("yy", "abort")]
    assert result.finished and not run.say("zz", index=1).results and len(run.outputs) == 0


def test_a_failure_takes_the_whole_request_and_only_it(stage):
    run = Run(stage, n=2)
    done = run.say(index=0, finish=FinishReason.ERROR, error="out of luck")
    ((name, error),) = done.failures
    assert name == "r" and type(error) is EngineGenerateError and "out of luck" in str(error)
    assert done.aborts == [run.asked.requests[1].request_id] and len(run.outputs) == 0
    run = Run(stage)
    done = run.say(finish=FinishReason.ERROR, error="too long", error_kind="InputError")
    assert type(done.failures[0][1]) is InputError


def test_an_id_in_use_is_refused(stage):
    run = Run(stage)
    with pytest.raises(InputError, match="'r'"):
        run.outputs.add(run.asked)
    run.say("x", finish=FinishReason.LENGTH)
    run.outputs.add(run.asked)


# ---- log probabilities

ROWS = LogprobRows([[7, 10, 11], [10, 10, 11]], [[-3.0, -0.5, -1.0], [-0.25, -0.25, -1.5]], [9, 1])


def test_logprobs_have_ranks_and_text(stage):
    run = Run(stage, logprobs=2, output_kind=DELTA)
    (result,) = run.say(ids=[7, 10], logprobs=ROWS).results
    answer = result.outputs[0]
    assert answer.logprobs == [
        {7: Logprob(-3.0, 9, "\x03"), 10: Logprob(-0.5, 1, "\x06"), 11: Logprob(-1.0, 2, "\x07")},
        {10: Logprob(-0.25, 1, "\x06"), 11: Logprob(-1.5, 2, "\x07")},
    ]
    assert answer.cumulative_logprob == -3.25
    (result,) = run.say(ids=[7, 10], logprobs=ROWS).results
    assert len(result.outputs[0].logprobs) == 2 and result.outputs[0].cumulative_logprob == -6.5


def test_logprobs_of_named_ids_have_no_rank(stage):
    """They are asked for instead of the likeliest, so no other has a rank either but the token itself."""
    run = Run(stage, logprobs=1, logprob_token_ids=[10, 11])
    (result,) = run.say(ids=[7, 10], logprobs=ROWS).results
    assert [entry.rank for entry in result.outputs[0].logprobs[0].values()] == [9, None, None]


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL])
def test_flat_logprobs_are_the_same(stage, kind):
    plain, flat = (
        Run(stage, logprobs=2, prompt_logprobs=2, prompt="abc", flat_logprobs=f, output_kind=kind)
        for f in (False, True)
    )
    for run in (plain, flat):
        run.say(prompt_logprobs=LogprobRows([[102, 10, 11]], [[-1.0, -0.5, -2.0]], [2]))
        run.seen = run.say(
            ids=[7, 10], logprobs=ROWS, prompt_logprobs=LogprobRows([[103, 10, 11]], [[-1.0] * 3], [2])
        ).results
        run.seen += run.say(ids=[7, 10], logprobs=ROWS, finish=FinishReason.LENGTH).results
    assert len(plain.seen) == len(flat.seen)
    for want, got in zip(plain.seen, flat.seen, strict=True):
        assert isinstance(got.outputs[0].logprobs, FlatLogprobs)
        assert list(got.outputs[0].logprobs) == want.outputs[0].logprobs
        if want.prompt_logprobs is None:
            assert got.prompt_logprobs is None
        else:
            assert want.prompt_logprobs[0] is None and len(want.prompt_logprobs) == 3
            assert list(got.prompt_logprobs)[1:] == want.prompt_logprobs[1:]


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_prompt_logprobs_wait_until_they_are_whole(stage, kind):
    run = Run(stage, prompt="abc", n=2, prompt_logprobs=0, output_kind=kind)
    run.say(index=0, prompt_logprobs=LogprobRows([[102]], [[-1.0]], [2]))
    (early,) = run.say("a", index=1).results  # the second answer overtakes the first, which brings them
    assert early.prompt_logprobs is None
    (result,) = run.say("a", index=0, prompt_logprobs=LogprobRows([[103]], [[-2.0]], [2])).results
    assert [position and list(position) for position in result.prompt_logprobs] == [None, [102], [103]]
    early.add(result, aggregate=kind is DELTA)  # a slow caller sees both as one
    assert len(early.prompt_logprobs) == 3
    assert (run.say("b", index=0).results[0].prompt_logprobs is None) == (kind is DELTA)


def test_prompt_logprobs_come_once_with_deltas(stage):
    run = Run(stage, prompt_logprobs=1, output_kind=DELTA)
    rows = LogprobRows([[102, 10]], [[-1.0, -0.5]], [2])
    assert not run.say(prompt_logprobs=rows).results  # a piece of prompt alone is no news
    assert [bool(run.say(c).results[0].prompt_logprobs) for c in "xy"] == [True, False]


def test_without_detokenizing(stage):
    run = Run(stage, detokenize=False, logprobs=1, output_kind=FINAL)
    (result,) = run.say(ids=[7, 10], logprobs=ROWS, finish=FinishReason.LENGTH).results
    assert result.outputs[0].text == "" and result.outputs[0].token_ids == [7, 10]
    assert result.outputs[0].logprobs[0][7].decoded_token is None


# ---- numbers


def test_times_and_cached_tokens(stage):
    run = Run(stage, output_kind=FINAL)
    run.say("a", num_cached_tokens=1, times=RequestTimes(queued=1.0, scheduled=2.0, first_token=3.0))
    times = RequestTimes(queued=1.0, scheduled=2.0, first_token=3.0, last_token=4.0, num_preemptions=2)
    (result,) = run.say("b", num_cached_tokens=1, times=times, finish=FinishReason.LENGTH).results
    assert result.num_cached_tokens == 1
    metrics = result.metrics
    assert (metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts) == (
        1.0,
        2.0,
        3.0,
        4.0,
    )
    assert metrics.num_generation_tokens == 2 and metrics.num_preemptions == 2 and metrics.first_token_latency >= 0
    assert pickle.loads(pickle.dumps(result)) == result


def test_an_answer_that_never_started_says_nothing_about_when_its_siblings_did(stage):
    run = Run(stage, n=3, output_kind=FINAL)
    for index, late in ((1, 5.0), (2, 0.0)):  # the first waits in the queue until the request is aborted
        times = RequestTimes(queued=1.0 + late, scheduled=2.0 + late, first_token=3.0 + late, last_token=4.0 + late)
        run.say("a", index=index, times=times)
    (result,) = run.outputs.abort(["r"]).results
    shown = result.metrics
    assert (shown.queued_ts, shown.scheduled_ts, shown.first_token_ts, shown.last_token_ts) == (1.0, 2.0, 3.0, 9.0)
    (never,) = Run(stage, n=2, output_kind=FINAL).outputs.abort(["r"]).results
    assert (never.metrics.queued_ts, never.metrics.scheduled_ts, never.metrics.last_token_ts) == (0.0, 0.0, 0.0)


def test_metrics_are_fed(stage):
    metrics = Metrics("m", 200)
    run = Run(stage, n=2, metrics=metrics, output_kind=FINAL)
    for index in (0, 1):
        run.say("a", index=index, num_cached_tokens=1, times=RequestTimes(queued=1.0, scheduled=2.0, first_token=3.0))
        run.say("bc", index=index, num_cached_tokens=1, finish=FinishReason.LENGTH)
    found = {(m.name, m.labels.get("finished_reason")): m for m in metrics.snapshot()}
    assert found["vllm:request_success", "length"].value == 2
    assert found["vllm:prompt_tokens", None].value == 4 and found["vllm:prompt_tokens_cached", None].value == 2
    assert found["vllm:request_params_n", None].sum == 2
    assert found["vllm:request_max_num_generation_tokens", None].sum == 3
    assert found["vllm:time_to_first_token_seconds", None].count == 2
    assert found["vllm:inter_token_latency_seconds", None].count == 2
