"""engine/together.py: requests of one call travel as one message, in which what they share stands once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.base.codec import Codec
from quire.config import EngineArgs
from quire.engine import together
from quire.engine.inputs import InputProcessor, Options
from quire.engine.process_client import ProcessClient
from quire.engine.together import pack, unpack
from quire.llm.online import size_of
from quire.schema.errors import InputError
from quire.schema.media import MediaItem
from quire.schema.messages import EngineReady, EngineRequest, EngineRequests, FinishReason, OneOfMany, ToEngine
from quire.schema.params import PoolingParams, ResolvedParams, SamplingParams, StructuredOutputsParams
from quire.schema.prompt import Prompt
from quire.text.tokenizer import load_tokenizer
from tests.fake_engine import VOCAB, ids_of, use_fake, write_model
from tests.plain.engine.test_client import ask, receive_until

CODEC: Codec[ToEngine] = Codec(ToEngine)
HEAVY: dict[str, Any] = {
    "allowed_token_ids": list(range(4, 200)) * 100,
    "logit_bias": dict.fromkeys(range(4, 250), 1.0),
    "bad_words": ["word" + "x" * 500],
    "extra_args": {"x": "y" * 20_000},
    "structured_outputs": StructuredOutputsParams(regex="(" + "ab|" * 3000 + "c)"),
}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    config = EngineArgs(model=write_model(tmp_path_factory.mktemp("m")), max_model_len=64).create_engine_config()
    ready = EngineReady(num_blocks=8, max_model_len=64, vocab_size=VOCAB, block_size=16)
    return InputProcessor(config, load_tokenizer(config.model_config.tokenizer), ready)


def call(processor: InputProcessor, num_prompts: int, **given: Any) -> list[EngineRequest]:
    """As a server prepares one."""
    params, found = processor.resolve(SamplingParams(**given)), []
    for index in range(num_prompts):
        options = Options(trace_headers={"traceparent": "t" * 50}, seed=index * 1000)
        prompt = {"prompt": "abc" + "d" * index, "cache_salt": "s" * 2000}
        found += processor.process(f"r{index}", prompt, params, options).requests
    return found


def size(requests: list[EngineRequest]) -> int:
    return sum(len(frame) for message in pack(requests) for frame in CODEC.encode(message))


def again(requests: list[EngineRequest]) -> list[EngineRequest]:
    """After a journey."""
    found: list[EngineRequest] = []
    for message in pack(requests):
        read = CODEC.decode(CODEC.encode(message))
        assert isinstance(read, EngineRequest | EngineRequests)
        found += unpack(read) if isinstance(read, EngineRequests) else [read]
    return found


@pytest.mark.parametrize(("n", "num_prompts"), [(1, 1), (3, 1), (1, 3), (4, 5)])
@pytest.mark.parametrize("further", [{}, {"prompt_logprobs": 1}, HEAVY])
def test_what_arrives_is_what_was_sent(
    processor: InputProcessor, n: int, num_prompts: int, further: dict[str, Any]
) -> None:
    sent = call(processor, num_prompts, n=n, **further)
    assert again(sent) == sent and len(sent) == n * num_prompts


@pytest.mark.parametrize("further", [{}, {"prompt_logprobs": 1}])
def test_parameters_travel_once(processor: InputProcessor, further: dict[str, Any]) -> None:
    """Sixty answers are little more than one, also where a prompt's first answer differs from its others."""
    one, many = call(processor, 1, **HEAVY, **further), call(processor, 20, n=3, **HEAVY, **further)
    assert size(many) < 2.2 * size(one) + 60 * 300
    arrived = again(many)
    for name in ("params", "cache_salt", "trace_headers"):
        assert (
            len({id(getattr(request, name)) for request in arrived}) <= (2 if name == "params" and further else 1) * 2
        )
    assert len({id(request.prompt_token_ids) for request in arrived}) == 20


def test_pooling_parameters_travel_once(tmp_path: Path) -> None:
    args = EngineArgs(model=write_model(tmp_path), max_model_len=64, runner="pooling", convert="classify",
                      hf_overrides={"num_labels": 600})  # fmt: skip
    config = args.create_engine_config()
    ready = EngineReady(num_blocks=8, max_model_len=64, vocab_size=VOCAB, block_size=16)
    processor = InputProcessor(config, load_tokenizer(config.model_config.tokenizer), ready)
    given = PoolingParams(returned_token_ids=list(range(500)), normalize=True)
    params = processor.pooling.resolve(given)
    assert processor.pooling.resolve(params) is params and params.task == "classify" and given.task is None
    requests = [processor.process(f"r{index}", [index + 4], params).requests[0] for index in range(20)]
    assert all(request.params is params for request in requests)
    assert size(requests) < 2 * size(requests[:1]) + 20 * 300 and again(requests) == requests
    prompts = [Prompt(token_ids=(4,))] * 20
    assert size_of(prompts, params) >= size_of(prompts, PoolingParams()) + 20 * 500
    for wrong in ([600], [-1], [], [0, 0], list(range(600)) * 2):
        with pytest.raises(InputError, match="returned_token_ids"):
            processor.pooling.resolve(PoolingParams(returned_token_ids=wrong))


def test_checks_are_made_once(processor: InputProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("_check_params", "_grammar", "_bad_word_ids"):
        real = getattr(processor, name)
        monkeypatch.setattr(
            processor, name, lambda *a, real=real, name=name, **k: (calls.append(name), real(*a, **k))[1]
        )
    requests = call(processor, 8, n=2, **HEAVY)
    assert sorted(calls) == ["_bad_word_ids", "_check_params", "_grammar"]
    assert all(request.params.bad_words_token_ids and request.params.grammar for request in requests)


def test_differences_stay(processor: InputProcessor) -> None:
    rng = random.Random(0)
    sent = []
    for number in range(40):
        one = ask(f"r{number}", "abc")
        changes = {
            "priority": rng.randint(0, 1),
            "cache_salt": rng.choice([None, "a", "b"]),
            "eos_token_id": rng.choice([None, 2]),
            "lora_id": rng.randint(0, 1),
            "continues": rng.random() < 0.5,
            "arrival": rng.random(),
            "media": rng.choice([(), (MediaItem(modality="image", key="m", offset=0, length=1),)]),
            "parent_id": rng.choice([None, "p"]),
            "thinking": rng.choice([None, False]),
        }
        sent.append(msgspec.structs.replace(one, **changes))
    assert again(sent) == sent
    taken = {"request_id", "prompt_token_ids", "seed", "max_tokens", "arrival", "parent_id"}
    told = set(OneOfMany.__struct_fields__) | {"prompt_token_ids"}
    assert taken <= told  # and all other fields are part of the key:
    for name in set(EngineRequest.__struct_fields__) - taken:
        other = {"params": ResolvedParams(), "trace_headers": {"a": "b"}}.get(name, "other")
        assert together._key(sent[0]) != together._key(msgspec.structs.replace(sent[0], **{name: other})), name


def test_messages_are_bounded(processor: InputProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_MOST_TOKENS", 20)
    sent = call(processor, 20)
    assert len(list(pack(sent))) > 5 and again(sent) == sent
    monkeypatch.undo()
    monkeypatch.setattr(together, "_MOST_REQUESTS", 7)
    assert len(list(pack(sent))) == 3 and again(sent) == sent
    assert list(pack([])) == []


def test_a_message_that_names_what_is_not_there_is_unreadable(processor: InputProcessor) -> None:
    (message,) = pack(call(processor, 2))
    assert isinstance(message, EngineRequests)
    raw: dict[str, Any] = msgspec.msgpack.decode(CODEC.encode(message)[0])
    for name, wrong in (("common", 1), ("prompt", 2), ("prompt", -1)):
        broken = {**raw, "requests": [{**raw["requests"][0], name: wrong}]}
        with pytest.raises(ValueError, match="names what is not there"):
            CODEC.decode([msgspec.msgpack.encode(broken)])


def test_an_engine_process_answers_them_all(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake(monkeypatch)
    config = EngineArgs(model=write_model(tmp_path), max_model_len=64).create_engine_config()
    client = ProcessClient(config)
    try:
        client.wait_ready()
        sent = [ask(f"r{number}", "abc", 3) for number in range(20)]
        client.submit([msgspec.structs.replace(one, params=sent[0].params) for one in sent])
        wrong = [ask("x", "abc", 3), ask("y", "abc", 3)]
        unreadable = msgspec.structs.replace(wrong[0].params, temperature="hot")  # both hear of it
        client.submit([msgspec.structs.replace(wrong[0], params=unreadable), wrong[1]])
        found = receive_until(client, "x", "y", *(one.request_id for one in sent))
        assert all(found[one.request_id] == (ids_of("abc"), FinishReason.LENGTH) for one in sent)
        assert found["x"] == found["y"] == ([], FinishReason.ERROR)
    finally:
        client.close()
