"""EngineArgs is derived, round-trips through asdict and namespaces, and refuses by name what is not built."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from quire.config import AsyncEngineArgs, CompilationConfig, EngineArgs, EngineConfig, FlexibleArgumentParser
from quire.config.option import LATER, OptionField, OptionStatus, declarations, parts, same
from quire.config.table import Flat, assemble, group_of, refuse_unbuilt, table
from quire.schema.errors import ConfigError, NotBuiltError


def assembled(**kwargs: Any) -> EngineConfig:
    return assemble(vars(EngineArgs(**kwargs)))


def other_values(declared: OptionField) -> Iterator[Any]:
    """Values of the option's types that are neither its default nor one that works. Some may still be out of range."""
    o = declared.option
    tries: list[Any] = []
    for kind in (*parts(declared.type), *parts(declared.accepted)):
        if get_origin(kind) is Literal:
            tries += get_args(kind)
        elif get_origin(kind) is tuple:
            tries += [(1,), ("x",), ((1, 2, 3),)]
        elif get_origin(kind) is dict:
            tries += [{"x": 1}, {"x": "y"}, {"x": {}}, {"x": (1.0,)}, {"x": ("y",)}]
        elif (group := group_of(kind)) is not None:
            tries += [{name: value} for name, mine in declarations(group).items() for value in other_values(mine)]
        else:
            tries += {bool: [True, False], int: [2, 3, 77], float: [0.5, 2.5], str: [*o.choices, "x"]}.get(kind, [])
    ready = (o.unset, o.default, *o.ready, *o.hints)
    yield from (value for value in tries if not any(same(value, other) for other in ready))


def refused(make: Callable[[Any], dict[str, Any]], declared: OptionField) -> str:
    """The message of the refusal, for the first value that the option's own checks let through."""
    for value in other_values(declared):
        try:
            config = assembled(**make(value))
        except ConfigError:
            continue
        with pytest.raises(NotBuiltError) as caught:
            refuse_unbuilt(config)
        return str(caught.value)
    raise AssertionError(f"no other value of {declared.field} could be made")


LATER_ONES = [flat for flat in table().values() if flat.declared.option.status is LATER]


@pytest.mark.parametrize("flat", LATER_ONES, ids=lambda flat: flat.name)
def test_every_unbuilt_option_is_refused_by_name(flat: Flat) -> None:
    message = refused(lambda value: {flat.name: value}, flat.declared)
    assert message.startswith(f"{flat.name}=") and "is not available in this version" in message


def unbuilt_keys() -> Iterator[tuple[str, str, OptionField]]:
    for flat in table().values():
        group = group_of(flat.declared.type)
        if group is not None and flat.declared.option.status is not LATER:
            later = (d for d in declarations(group).values() if d.option.status is LATER)
            yield from ((flat.name, declared.field, declared) for declared in later)


@pytest.mark.parametrize("name, key, declared", unbuilt_keys(), ids=[f"{n}.{k}" for n, k, _ in unbuilt_keys()])
def test_every_unbuilt_key_is_refused_by_name(name: str, key: str, declared: OptionField) -> None:
    assert key in refused(lambda value: {name: {key: value}}, declared)


def test_inner_groups_are_refused_too() -> None:
    with pytest.raises(NotBuiltError, match=r"attention_config\.use_non_causal=True"):
        refuse_unbuilt(assembled(attention_config={"use_non_causal": True}))
    with pytest.raises(NotBuiltError, match=r"speculative_config\.code_revision='main'"):
        refuse_unbuilt(assembled(speculative_config={"method": "ngram", "code_revision": "main"}))
    with pytest.raises(NotBuiltError, match="enable_moe_shared_loras=True"):
        refuse_unbuilt(assembled(enable_moe_shared_loras=True))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"enforce_eager": True},
        {"swap_space": 8},
        {"disable_custom_all_reduce": True},
        {"optimization_level": 0},
        {"runner": "generate"},
        {"load_format": "dummy"},
        {"device": "cpu"},
        {"device": "auto"},
        {"tensor_parallel_size": 1},
        {"distributed_executor_backend": "uni"},
        {"enable_lora": False},
        {"quantization": "GGUF"},
        {"quantization": "AWQ_marlin"},
        {"disable_cascade_attn": True},
        {"tokenizer_mode": "slow"},
        {"compilation_config": 0},
        {"compilation_config": {"mode": "NONE", "cudagraph_mode": "none"}},
        {"compilation_config": CompilationConfig()},
        {"kv_cache_dtype": "auto"},
        {"attention_backend": "auto"},
        {"attention_backend": "triton_attn"},
        {"device": "cuda"},
        {"device": "cuda:0"},
        {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
    ],
    ids=str,
)
def test_what_holds_already_is_accepted(kwargs: dict[str, Any]) -> None:
    refuse_unbuilt(assembled(**kwargs))


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"quantization": "made_up"}, "formats can be loaded: gguf, awq"),
        ({"load_format": "tensorizer"}, "'auto' or 'safetensors'"),
    ],
)
def test_refusals_say_what_to_do(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(NotBuiltError, match=words):
        refuse_unbuilt(assembled(**kwargs))


def test_an_unknown_value_of_a_known_set_is_not_called_unbuilt() -> None:
    with pytest.raises(ConfigError, match="did you mean 'safetensors'") as caught:
        refuse_unbuilt(assembled(load_format="safetensor"))
    assert not isinstance(caught.value, NotBuiltError)


def test_attributes_are_the_declarations() -> None:
    names = [field.name for field in dataclasses.fields(EngineArgs)]
    assert names == list(table()) and names[0] == "model"
    assert EngineArgs().max_num_seqs is None and EngineArgs().gpu_memory_utilization == 0.92
    assert EngineArgs().ignore_patterns == ["original/**/*"]
    assert EngineArgs("some/model").model == "some/model"
    first, second = EngineArgs(), EngineArgs()
    first.hf_overrides["a"] = 1
    assert second.hf_overrides == {}
    assert set(dir(AsyncEngineArgs())) > set(dir(EngineArgs())) and AsyncEngineArgs().enable_log_requests is False


def test_asdict_round_trip() -> None:
    args = EngineArgs(
        model="m",
        max_num_seqs=7,
        hf_overrides={"a": {"b": 1}},
        compilation_config=CompilationConfig(mode=0),
        served_model_name=["a", "b"],
        enable_prefix_caching=False,
    )
    again = EngineArgs(**dataclasses.asdict(args))
    assert assemble(vars(again)) == assemble(vars(args)) != assembled()
    assert EngineArgs(**(dataclasses.asdict(EngineArgs()) | {"seed": 3})) == EngineArgs(seed=3)
    assert dataclasses.replace(args, seed=5).max_num_seqs == 7


def test_namespace_round_trip() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    space = parser.parse_args([])
    assert EngineArgs.from_cli_args(space) == EngineArgs() == EngineArgs(**vars(space))
    space = parser.parse_args(["--max-num-seqs", "4", "-cc.mode=0", "--served-model-name", "a", "b"])
    assert EngineArgs(**vars(space)) == EngineArgs.from_cli_args(space)
    assert assemble(vars(EngineArgs(**vars(space)))) == assembled(
        max_num_seqs=4, compilation_config={"mode": 0}, served_model_name=["a", "b"]
    )
    partial = argparse.Namespace(model="x", mine=3)
    assert EngineArgs.from_cli_args(partial) == EngineArgs(model="x")


def test_set_defaults_and_own_flags() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--mine", type=int, default=1)
    parser.set_defaults(model="default", max_num_seqs=3)
    space = parser.parse_args(["--mine", "2"])
    assert (space.model, space.max_num_seqs, space.mine) == ("default", 3, 2)
    assert parser.parse_args(["--model", "other"]).model == "other"


def test_async_flags() -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    space = parser.parse_args(["--enable-log-requests", "--max-num-seqs", "2"])
    args = AsyncEngineArgs.from_cli_args(space)
    assert args.enable_log_requests and args.max_num_seqs == 2
    assert not AsyncEngineArgs.from_cli_args(parser.parse_args(["--disable-log-requests"])).enable_log_requests
    only = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(), async_args_only=True)
    assert vars(only.parse_args([])) == {"enable_log_requests": False}


def test_unknown_keyword_suggests_the_nearest() -> None:
    with pytest.raises(TypeError, match="did you mean 'max_num_seqs'"):
        EngineArgs(max_num_seq=3)
    with pytest.raises(ConfigError, match="no engine option 'zzzzqqq'"):
        EngineArgs(zzzzqqq=3)
    with pytest.raises(ConfigError, match=r"compilation_config has no key 'mod'; did you mean 'mode'"):
        assembled(compilation_config={"mod": 3})
    with pytest.raises(ConfigError, match="attention_config must be a mapping or a AttentionConfig, got 3"):
        assembled(attention_config=3)


def test_the_same_thing_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"attention_backend and attention_config\.backend set the same field"):
        assembled(attention_backend="FLASH_ATTN", attention_config={"backend": "TRITON"})
    with pytest.raises(ConfigError, match="cudagraph_capture_sizes"):
        assembled(cudagraph_capture_sizes=[1], compilation_config={"cudagraph_capture_sizes": [2]})


def test_flat_and_mapping_join() -> None:
    config = assembled(max_cudagraph_capture_size=8, compilation_config={"mode": 0})
    assert config.compilation_config == CompilationConfig(mode=0, max_cudagraph_capture_size=8)
    config = assembled(cpu_offload_gb=2, max_lora_rank=8, pooler_config={"dimensions": 3})
    assert config.offload_config.uva.cpu_offload_gb == 2.0
    assert config.lora_config is not None and config.lora_config.max_lora_rank == 8
    assert config.model_config.pooler_config is not None and config.model_config.pooler_config.dimensions == 3


def test_repr_shows_what_was_said() -> None:
    assert repr(EngineArgs(max_num_seqs=3, hf_token="hf_secret")) == "EngineArgs(hf_token='***', max_num_seqs=3)"


def test_batch_defaults() -> None:
    tokens, requests = EngineArgs.get_batch_defaults(2)
    assert (tokens["LLM_CLASS"], requests["OPENAI_API_SERVER"]) == (8192, 256)


def test_statuses_are_all_used() -> None:
    used = {flat.declared.option.status for flat in table().values()}
    assert used == set(OptionStatus)
