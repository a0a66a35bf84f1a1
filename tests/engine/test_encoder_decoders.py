"""Encoder-decoder models through the engine: greedy tokens equal transformers', whoever runs beside, whole or in
pieces, preempted or not; inputs of encoders are encoded once, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from quire import LLM, AsyncEngineArgs, SamplingParams
from quire.llm.online import AsyncLLM
from quire.sched.gates import TokenBudget
from quire.sched.scheduler import Scheduler
from quire.schema.errors import ConfigError, InputError, NotBuiltError
from quire.schema.params import BeamSearchParams, StructuredOutputsParams
from quire.schema.prompt import zip_enc_dec_prompts
from tests.preempting import preempting
from tests.seq2seq_models import (
    BEGIN,
    FAMILIES,
    RATE,
    STARTS,
    WHISPER,
    Answer,
    draw_audio,
    draw_text,
    features_of,
    greedy,
    make_model,
)
from tests.tiny_models import VOCAB, write_tiny

pytestmark = pytest.mark.usefixtures("warm_children")
COUNT = 8
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=0)
BEGIN_IDS = list(range(VOCAB, VOCAB + len(STARTS)))
Given = Any  # ids, or samples


class Served:
    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        self.name, self.folder, self.model = name, folder, make_model(name, folder)
        self.llm = LLM(
            str(folder), dtype="float32", max_num_seqs=8, block_size=4, num_gpu_blocks_override=400, **options
        )
        config = FAMILIES[name]
        forced = config.get("forced_bos_token_id")
        self.start = [config["decoder_start_token_id"], *([] if forced is None else [forced])]
        if name == WHISPER:
            self.start = BEGIN_IDS

    @property
    def scheduler(self) -> Scheduler:
        loop: Any = self.llm.llm_engine.front.client.loop
        return loop.scheduler

    def draw(self, seed: int) -> Given:
        if self.name == WHISPER:
            return draw_audio(seed, seconds=0.3 + 0.1 * (seed % 8))
        return draw_text(seed, 1 + 9 * (seed % 5))

    def prompt(self, given: Given) -> Any:
        """Implicit."""
        if isinstance(given, np.ndarray):
            return {"prompt": BEGIN, "multi_modal_data": {"audio": (given, RATE)}}
        return {"prompt_token_ids": given}

    def explicit(self, given: Given, begin: Any) -> Any:
        if isinstance(given, np.ndarray):
            return {
                "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (given, RATE)}},
                "decoder_prompt": begin,
            }
        return {"encoder_prompt": {"prompt_token_ids": given}, "decoder_prompt": begin}

    def answers(self, prompts: list[Any], params: SamplingParams = GREEDY) -> list[Answer]:
        return [answer_of(output.outputs[0]) for output in self.llm.generate(prompts, params)]

    def expected(self, given: Given, start: list[int] | None = None) -> Answer:
        return greedy(self.model, given, start or self.start, COUNT)

    def num_held(self) -> int:
        pool = self.scheduler.kv.pool
        return pool.num_blocks - pool.num_free


def answer_of(output: Any) -> Answer:
    chosen = zip(output.logprobs, output.token_ids, strict=True)
    return Answer(list(output.token_ids), [own[token].logprob for own, token in chosen])


def agree(found: list[Answer], expected: list[Answer], why: str = "") -> bool:
    assert [one.tokens for one in found] == [one.tokens for one in expected], why
    for own, wanted in zip(found, expected, strict=True):
        assert own.logprobs == pytest.approx(wanted.logprobs, abs=2e-3), why
    return True


THOROUGH = ("T5ForConditionalGeneration", "BartForConditionalGeneration", WHISPER)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """One engine per family."""
    made: dict[str, Served] = {}

    def find(name: str) -> Served:
        if name not in made:
            made[name] = Served(name, tmp_path_factory.mktemp("seq2seq"))
        return made[name]

    yield find
    for one in made.values():
        one.llm.close()


@pytest.fixture(params=list(FAMILIES))
def served(request: pytest.FixtureRequest, serve: Callable[[str], Served]) -> Served:
    return serve(request.param)


@pytest.fixture(params=THOROUGH)
def thorough(request: pytest.FixtureRequest, serve: Callable[[str], Served]) -> Served:
    return serve(request.param)


@pytest.fixture
def whisper(serve: Callable[[str], Served]) -> Served:
    return serve(WHISPER)


@pytest.fixture
def bart(serve: Callable[[str], Served]) -> Served:
    return serve("BartForConditionalGeneration")


def test_tokens_equal_transformers(served: Served) -> None:
    """Inputs of different lengths in one batch, and a decoder's prompt of its own, computed whole and in chunks."""
    given = [served.draw(seed) for seed in range(6)]
    begin = [*served.start, *draw_text(50, 9)]
    prompts = [*map(served.prompt, given), served.explicit(given[1], {"prompt_token_ids": begin})]
    expected = [*map(served.expected, given), served.expected(given[1], begin)]
    assert len({tuple(answer.tokens) for answer in expected}) > 3, "what the encoder reads matters"
    assert agree(served.answers(prompts), expected)
    assert agree(served.answers(prompts), expected, "with prefix hits")
    budget = next(gate for gate in served.scheduler.planner.gates if isinstance(gate, TokenBudget))
    whole, budget.most = budget.most, 3
    served.llm.reset_prefix_cache()
    assert agree(served.answers(prompts), expected, "in chunks")
    budget.most = whole
    assert served.num_held() == 0


def test_answers_equal_generate(served: Served) -> None:
    """Ends included: transformers' own loop, from the model's own first tokens."""
    for seed in (1, 2, 3):
        given = served.draw(seed)
        (output,) = served.llm.generate([served.prompt(given)], SamplingParams(temperature=0, max_tokens=12))
        found = list(output.outputs[0].token_ids)
        assert output.prompt_token_ids == served.start
        options: dict[str, Any] = dict(do_sample=False, num_beams=1, max_new_tokens=12 + len(served.start) - 1)
        if served.name == WHISPER:
            start = torch.tensor([served.start])
            made = tf.GenerationMixin.generate(
                served.model, input_features=features_of(given), decoder_input_ids=start,
                **options | {"max_new_tokens": 12},
            )  # fmt: skip
        else:
            made = served.model.generate(input_ids=torch.tensor([given]), **options)
            assert output.encoder_prompt_token_ids == given
        expected = made[0].tolist()
        assert expected[: len(served.start)] == served.start and found == expected[len(served.start) :]


def test_preempted_answers_are_the_same(thorough: Served) -> None:
    """Vectors of their inputs are kept in one round, and gone in the next."""
    served = thorough
    given = [served.draw(seed) for seed in range(20, 26)]
    prompts, expected = [*map(served.prompt, given)], [*map(served.expected, given)]
    encoder = served.scheduler.planner.encoder
    assert encoder is not None
    for then in (None, encoder.clear):
        served.llm.reset_prefix_cache()
        with preempting(served.scheduler, then) as seen:
            assert agree(served.answers(prompts), expected)
        assert seen.count >= 2 and served.num_held() == 0


def test_few_blocks(thorough: Served) -> None:
    """Room for hardly more than one request at a time: others wait, or are preempted, and nothing is lost."""
    given = [thorough.draw(seed) for seed in range(30, 38)]
    llm = LLM(
        str(thorough.folder),
        dtype="float32",
        max_num_seqs=8,
        block_size=4,
        num_gpu_blocks_override=45,
        max_model_len=48,
    )
    outputs = llm.generate([*map(thorough.prompt, given)], GREEDY)
    llm.close()
    assert agree([answer_of(one.outputs[0]) for one in outputs], [*map(thorough.expected, given)])


def test_the_same_input_is_encoded_once(thorough: Served) -> None:
    served, counts = thorough, [0, 0]
    encoder = served.scheduler.planner.encoder
    assert encoder is not None
    take = encoder.take_counts

    def counted() -> Any:
        taken = take()
        counts[0], counts[1] = counts[0] + taken.queries, counts[1] + taken.hits
        return taken

    encoder.take_counts = counted  # type: ignore[method-assign]
    given, other = served.draw(40), served.draw(41)
    served.answers([served.prompt(given)])
    assert counts == [1, 0]
    begin = [*served.start, *draw_text(60, 5)]
    served.answers([served.explicit(given, {"prompt_token_ids": begin}), served.prompt(other)])
    assert counts == [3, 1]
    served.answers([served.prompt(given), served.prompt(other), served.prompt(given)])
    assert counts == [6, 4]
    del encoder.take_counts


def test_several_answers_and_their_log_probabilities(thorough: Served) -> None:
    """Drawn answers differ from each other; each token has the probability that transformers gives it."""
    served, given = thorough, thorough.draw(45)
    params = SamplingParams(temperature=1.0, max_tokens=4, n=3, seed=1, logprobs=2, ignore_eos=True, prompt_logprobs=0)
    (output,) = served.llm.generate([served.prompt(given)], params)
    assert len({tuple(one.token_ids) for one in output.outputs}) > 1
    inputs = {"input_ids": torch.tensor([given])} if isinstance(given, list) else {"input_features": features_of(given)}
    for one in output.outputs:
        tokens = [*served.start, *one.token_ids]
        with torch.inference_mode():
            logits = served.model(**inputs, decoder_input_ids=torch.tensor([tokens])).logits[0]
        wanted = logits.log_softmax(-1)
        for place, (own, token) in enumerate(zip(one.logprobs, one.token_ids, strict=True), len(served.start) - 1):
            assert own[token].logprob == pytest.approx(float(wanted[place, token]), abs=2e-3)
            likeliest = max(own.values(), key=lambda entry: entry.logprob)
            assert likeliest.logprob == pytest.approx(float(wanted[place].max()), abs=2e-3)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(served.start)
    assert served.num_held() == 0


def test_aborted_requests_leave_no_blocks(thorough: Served) -> None:
    served, engine = thorough, thorough.llm.llm_engine
    for number in range(4):
        engine.add_request(f"gone-{number}", served.prompt(served.draw(50 + number)), GREEDY)
    engine.step()
    engine.step()
    assert served.num_held() > 0
    engine.abort_request([f"gone-{number}" for number in range(4)])
    while engine.has_unfinished_requests():
        engine.step()
    assert served.num_held() == 0 and served.scheduler.planner.encoder is not None
    assert not served.scheduler.planner.encoder.uses
    given = served.draw(1)
    assert agree(served.answers([served.prompt(given)]), [served.expected(given)])


def test_a_failed_encoder_ends_its_request_alone(thorough: Served) -> None:
    served, given = thorough, [thorough.draw(70), thorough.draw(71)]
    model = served.llm.apply_model(lambda model: model)[0]
    whole, calls = model.encode_item, 0

    def failing(modality: str, arrays: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("as asked")
        return whole(modality, arrays)

    model.encode_item = failing
    try:
        with pytest.raises(Exception, match="could not be encoded: as asked"):
            served.llm.generate([served.prompt(given[0])], GREEDY)
        assert agree(served.answers([*map(served.prompt, given)]), [*map(served.expected, given)])
    finally:
        del model.encode_item
    assert calls == 3 and served.num_held() == 0


def test_text_prompts(bart: Served) -> None:
    """Plain strings are the encoder's; the decoder's text has no special tokens but the first."""
    text, tokenizer = "seven children counted boats", bart.llm.get_tokenizer()
    ids = tokenizer.encode(text)
    (output,) = bart.llm.generate([text], GREEDY)
    assert agree([answer_of(output.outputs[0])], [bart.expected(ids)])
    assert (output.encoder_prompt, output.encoder_prompt_token_ids) == (text, ids)
    assert (output.prompt, output.prompt_token_ids) == (None, bart.start)
    begin = [2, *tokenizer.encode("an old", add_special_tokens=False)]
    pairs = zip_enc_dec_prompts([text, {"prompt": text}, {"prompt_token_ids": ids}], ["an old", begin, None])
    outputs = bart.llm.generate(pairs, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [begin, begin, bart.start]
    assert outputs[0].prompt == "an old"
    expected = bart.expected(ids, begin)
    assert agree([answer_of(one.outputs[0]) for one in outputs], [expected, expected, bart.expected(ids)])


def test_structured_outputs_hold(bart: Served) -> None:
    allowed = StructuredOutputsParams(choice=["river", "bridge"])
    (output,) = bart.llm.generate(
        ["seven children"], SamplingParams(temperature=0, max_tokens=20, structured_outputs=allowed)
    )
    assert output.outputs[0].text in ("river", "bridge")


def test_forms_of_audio(whisper: Served) -> None:
    """(samples, rate), samples alone, WAV bytes, another rate, an explicit prompt, an earlier text before the start."""
    audio = draw_audio(3)
    expected = whisper.expected(audio)
    data = {"audio": (audio, RATE)}
    prompts: list[Any] = [
        {"prompt": BEGIN, "multi_modal_data": data},
        {"prompt": BEGIN, "multi_modal_data": {"audio": audio}},
        {"prompt": BEGIN, "multi_modal_data": {"audio": [(audio, RATE)]}},
        {"prompt_token_ids": BEGIN_IDS, "multi_modal_data": data},
        {"prompt": "".join(STARTS[1:]), "multi_modal_data": data},  # the first token is added
        whisper.explicit(audio, BEGIN),
        whisper.explicit(audio, "".join(STARTS[1:])),
    ]
    assert agree(whisper.answers(prompts), [expected] * len(prompts))
    earlier = [*draw_text(5, 4), *BEGIN_IDS]
    found = whisper.answers([{"prompt_token_ids": earlier, "multi_modal_data": data}])
    assert agree(found, [whisper.expected(audio, earlier)])
    doubled = np.repeat(audio, 2)  # at twice the rate: nearly the same
    (output,) = whisper.llm.generate([{"prompt": BEGIN, "multi_modal_data": {"audio": (doubled, 2 * RATE)}}], GREEDY)
    assert len(output.outputs[0].token_ids) == COUNT


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (BEGIN, "encoder reads audio, and the prompt has none"),
        ({"encoder_prompt": "hello", "decoder_prompt": BEGIN}, "reads audio, and the prompt has none"),
        ({"encoder_prompt": {"prompt": "a", "multi_modal_data": {"audio": "A"}}, "decoder_prompt": None}, "not text"),
        ({"prompt": BEGIN, "multi_modal_data": {"image": "A"}}, "takes audio and no image"),
        ({"prompt": BEGIN, "multi_modal_data": {"audio": ["A", "A"]}}, r"At most 1 audio\(s\).*got 2"),
        ({"prompt": BEGIN, "multi_modal_data": {"audio": "long"}}, "lasts 1.5 s, and the model hears 1 s"),
        ({"prompt": BEGIN, "multi_modal_data": {"audio": (["a"], RATE)}}, "audio must be"),
        ({"prompt": BEGIN, "multi_modal_data": {}}, "reads one audio item; the prompt has 0"),
        ({"prompt": BEGIN * 20, "multi_modal_data": {"audio": "A"}}, "maximum context length is 64"),
        ({"decoder_prompt": BEGIN}, "needs 'encoder_prompt'"),
        ({"encoder_prompt": "a", "decoder_prompt": "b", "prompt": "c"}, "unknown keys"),
        ({"encoder_prompt": {"encoder_prompt": "a"}, "decoder_prompt": "b"}, "cannot itself have parts"),
        ({"encoder_prompt": "", "decoder_prompt": {"prompt": "", "multi_modal_data": {}}}, "encoder's part"),
    ],
)  # fmt: skip
def test_wrong_prompts_of_whisper(whisper: Served, prompt: Any, words: str) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(one) for key, one in value.items()}
        if isinstance(value, list):
            return [filled(one) for one in value]
        return {"A": (draw_audio(1), RATE), "long": (draw_audio(1, 1.5), RATE)}.get(value, value) if isinstance(
            value, str
        ) else value  # fmt: skip

    with pytest.raises(InputError, match=words):
        whisper.llm.generate([filled(prompt)], GREEDY)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt_token_ids": [5] * 129}, "129 tokens; this model's encoder reads 128 at most"),
        ("a" * 100_000, "100000 characters, which are at least"),
        ({"prompt_token_ids": []}, "encoder's prompt is empty"),
        ({"prompt_token_ids": [VOCAB]}, "the encoder's prompt holds token id 320 out of vocabulary"),
        ({"encoder_prompt": {"prompt_token_ids": [1 << 70]}, "decoder_prompt": None}, "out of vocabulary"),
        ({"encoder_prompt": "a", "decoder_prompt": {"prompt_token_ids": [VOCAB]}}, "out of vocabulary"),
        ({"encoder_prompt": "a", "decoder_prompt": {"prompt_token_ids": [5] * 200}}, "maximum context length is 128"),
        ({"encoder_prompt": 5, "decoder_prompt": None}, "a prompt is a string"),
        ({"prompt": "a", "multi_modal_data": {"audio": 5}}, "encoder reads text"),
        ({"prompt_embeds": [[0.0] * 32]}, "takes no embeddings"),
    ],
)  # fmt: skip
def test_wrong_prompts_of_bart(bart: Served, prompt: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        bart.llm.generate([prompt], GREEDY)


def test_truncation_cuts_the_encoder_s_text(bart: Served) -> None:
    ids = draw_text(8, 60)
    cut = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=0, truncate_prompt_tokens=20)
    assert agree(bart.answers([{"prompt_token_ids": ids}], cut), [bart.expected(ids[-20:])])


def test_beams_equal_transformers(thorough: Served) -> None:
    """The encoder reads once, however many rounds and beams follow."""
    served, width, count = thorough, 3, 6
    if served.name == WHISPER:
        with pytest.raises(NotBuiltError, match="beam search with media"):
            served.llm.beam_search([served.prompt(served.draw(1))], BeamSearchParams(beam_width=2, max_tokens=3))
        return
    given = [served.draw(seed) for seed in (2, 3, 4)]
    params = BeamSearchParams(beam_width=width, max_tokens=count, length_penalty=0.0)
    found = served.llm.beam_search([served.prompt(one) for one in given], params)
    for output, one in zip(found, given, strict=True):
        made = served.model.generate(
            input_ids=torch.tensor([one]), num_beams=width, num_return_sequences=width, do_sample=False,
            max_new_tokens=count + len(served.start) - 1, length_penalty=0.0, early_stopping=False,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        scores = [sequence.cum_logprob for sequence in output.sequences]
        assert scores == pytest.approx(made.sequences_scores.tolist(), abs=2e-3)
        pad = served.model.config.pad_token_id
        for sequence, theirs in zip(output.sequences, made.sequences.tolist(), strict=True):
            ids = theirs[: len(sequence.tokens)]
            assert sequence.tokens == ids and set(theirs[len(ids) :]) <= {pad}


def test_a_decoder_takes_no_encoder_s_prompt(tmp_path: Path) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=64, max_num_seqs=2)
    with pytest.raises(InputError, match="not an encoder-decoder"):
        llm.generate([{"encoder_prompt": "a", "decoder_prompt": "b"}], GREEDY)
    llm.close()


def test_options_that_are_not_built(tmp_path: Path) -> None:
    make_model("BartForConditionalGeneration", tmp_path)
    for option in (
        {"pipeline_parallel_size": 2}, {"enable_lora": True},
        {"enable_prompt_embeds": True}, {"runner": "pooling"}, {"model_impl": "transformers"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ):  # fmt: skip
        with pytest.raises(NotBuiltError, match="encoder-decoder"):
            LLM(str(tmp_path), dtype="float32", **option)


def test_what_is_not_declared_is_refused(tmp_path: Path) -> None:
    make_model("BartForConditionalGeneration", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchForConditionalGeneration"]}))
    with pytest.raises(ConfigError, match="no encoder-decoder is declared"):
        LLM(str(tmp_path), dtype="float32")


def test_an_engine_in_another_process(whisper: Served) -> None:
    """Requests of many callers at once; one of them leaves, and its blocks go back."""

    async def run() -> None:
        args = AsyncEngineArgs(
            model=str(whisper.folder), dtype="float32", max_num_seqs=4, block_size=4, num_gpu_blocks_override=90
        )
        engine = AsyncLLM.from_engine_args(args)

        async def ask(number: int) -> Answer:
            last: Any = None
            async for output in engine.generate(whisper.prompt(draw_audio(number % 3)), GREEDY, f"r{number}"):
                last = output
                if number == 5:
                    break
            return answer_of(last.outputs[0])

        try:
            answers = await asyncio.gather(*map(ask, range(9)))
            for number, answer in enumerate(answers):
                expected = whisper.expected(draw_audio(number % 3))
                length = len(answer.tokens) if number == 5 else COUNT
                assert answer.tokens == expected.tokens[:length]
            with pytest.raises(InputError, match="hears 1 s"):
                await anext(engine.generate(whisper.prompt(draw_audio(1, 2.0)), GREEDY, "long"))
        finally:
            engine.shutdown()

    asyncio.run(run())


@pytest.mark.parametrize(
    "options", [{"async_scheduling": True, "max_num_batched_tokens": 16}, {"tensor_parallel_size": 2}]
)
def test_steps_planned_ahead_and_several_ranks(whisper: Served, options: dict[str, Any]) -> None:
    given = [whisper.draw(seed) for seed in range(80, 85)]
    llm = LLM(
        str(whisper.folder), dtype="float32", max_num_seqs=4, block_size=4, num_gpu_blocks_override=120, **options
    )
    outputs = llm.generate([*map(whisper.prompt, given)], GREEDY)
    llm.close()
    assert agree([answer_of(one.outputs[0]) for one in outputs], [*map(whisper.expected, given)])


def test_weights_may_be_stored_in_bfloat16(whisper: Served, tmp_path: Path) -> None:
    llm = LLM(str(whisper.folder), dtype="bfloat16", max_num_seqs=2, block_size=4)
    (output,) = llm.generate([whisper.prompt(draw_audio(1))], GREEDY)
    assert len(output.outputs[0].token_ids) == COUNT
    llm.close()
