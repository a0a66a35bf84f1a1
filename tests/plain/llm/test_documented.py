"""LLM, LLMEngine and AsyncLLM have every documented method: it works, or refuses by the name of what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from quire.schema.errors import InputError, NotBuiltError
from quire.text.tokenizer import Tokenizer, load_tokenizer
from tests.fake_engine import use_fake, write_model

METHODS = {
    LLM: "generate chat beam_search encode embed classify reward score collective_rpc apply_model preprocess_chat "
    "get_metrics get_default_sampling_params sleep wake_up is_sleeping start_profile stop_profile reset_mm_cache "
    "reset_prefix_cache get_tokenizer set_tokenizer add_lora remove_lora list_loras pin_lora",
    LLMEngine: "from_engine_args from_vllm_config add_request abort_request step has_unfinished_requests "
    "get_num_unfinished_requests reset_prefix_cache reset_mm_cache sleep wake_up is_sleeping start_profile "
    "stop_profile add_lora remove_lora list_loras pin_lora collective_rpc apply_model get_tokenizer set_tokenizer "
    "get_metrics get_supported_tasks do_log_stats",
    AsyncLLM: "from_engine_args from_vllm_config generate encode abort get_tokenizer is_tracing_enabled do_log_stats "
    "check_health start_profile stop_profile reset_mm_cache reset_prefix_cache sleep wake_up is_sleeping add_lora "
    "remove_lora list_loras pin_lora pause_generation resume_generation is_paused scale_elastic_ep collective_rpc "
    "get_supported_tasks shutdown",
}
REFUSED = [
    ("sleep", (1,), "sleep mode"), ("wake_up", (), "sleep mode"),
]  # fmt: skip
SWITCHED_OFF = [
    ("add_lora", (LoRARequest("a", 1, "x"),)),
    ("remove_lora", (1,)),
    ("list_loras", ()),
    ("pin_lora", (1,)),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    use_fake(monkeypatch)
    return write_model(tmp_path)


@pytest.mark.parametrize("door", METHODS, ids=lambda door: door.__name__)
def test_every_documented_method_exists(door: type[Any]) -> None:
    assert [name for name in METHODS[door].split() if not callable(getattr(door, name, None))] == []


@pytest.fixture(params=["LLM", "LLMEngine"])
def door(request: pytest.FixtureRequest, folder: str) -> Any:
    if request.param == "LLM":
        with LLM(folder, max_num_seqs=4, max_model_len=64) as made:
            yield made
    else:
        engine = LLMEngine.from_engine_args(EngineArgs(model=folder, max_num_seqs=4, max_model_len=64))
        yield engine
        engine.close()


@pytest.mark.parametrize(("name", "args"), SWITCHED_OFF, ids=[name for name, _ in SWITCHED_OFF])
def test_adapters_need_to_be_enabled(door: Any, name: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(InputError, match="enable_lora=True"):
        getattr(door, name)(*args)


@pytest.mark.parametrize(("name", "args", "feature"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_what_is_missing_refuses_by_name(door: Any, name: str, args: tuple[Any, ...], feature: str) -> None:
    with pytest.raises(NotBuiltError, match=feature):
        getattr(door, name)(*args)


def test_what_is_there_works(door: Any) -> None:
    assert door.is_sleeping() is False
    assert door.reset_mm_cache() is None
    assert door.reset_prefix_cache() is True


@pytest.mark.parametrize("door", [LLMEngine, AsyncLLM], ids=lambda door: door.__name__)
def test_stat_loggers_are_refused_and_their_absence_is_not(folder: str, door: type[Any]) -> None:
    args = AsyncEngineArgs(model=folder, max_num_seqs=4, max_model_len=64)
    for make, given in ((door.from_engine_args, args), (door.from_vllm_config, args.create_engine_config())):
        with pytest.raises(NotBuiltError, match="stat_loggers"):
            make(given, stat_loggers=[print])
    engine = door.from_vllm_config(args.create_engine_config(), stat_loggers=None, disable_log_stats=True)
    assert engine.vllm_config.disable_log_stats is True
    engine.shutdown() if door is AsyncLLM else engine.close()


def test_documented_arguments_by_place(folder: str) -> None:
    args = EngineArgs(model=folder, max_num_seqs=4, max_model_len=64)
    engine = LLMEngine.from_engine_args(args, "ENGINE_CONTEXT", None, False)
    assert engine.vllm_config.usage_context == "ENGINE_CONTEXT"
    engine.close()
    other = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=folder, max_num_seqs=4), True, "API_SERVER", None, enable_log_requests=False
    )
    assert other.vllm_config.usage_context == "API_SERVER"
    other.shutdown()


def test_another_tokenizer(folder: str, tmp_path: Path) -> None:
    llm = LLM(folder, max_num_seqs=4, max_model_len=64)
    own = llm.get_tokenizer()

    class Shouting(type(own)):  # type: ignore[misc]
        def encode_batch(self, texts: Any, add_special_tokens: bool = True) -> list[list[int]]:
            return list(super().encode_batch([text.upper() for text in texts], add_special_tokens))

    before = llm.generate("abc", SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids
    other: Tokenizer = load_tokenizer(folder)
    other.__class__ = Shouting
    llm.set_tokenizer(other)
    assert llm.get_tokenizer() is other
    after = llm.generate("abc", SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids
    assert after == own.encode("ABC") != before
    with pytest.raises(InputError, match="got str"):
        llm.set_tokenizer("a name")
    llm.llm_engine.add_request("1", "abc", SamplingParams(max_tokens=4))
    with pytest.raises(InputError, match="1 requests are under way"):
        llm.set_tokenizer(own)
    llm.close()
