"""The declarations themselves: defaults, checks, freezing, crossing to another process, unique names."""

from __future__ import annotations

import copy
import dataclasses

import msgspec
import pytest

from quire.checkpoint.facts import read_facts
from quire.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    CompilationMode,
    CUDAGraphMode,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    MultiModalConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    decode,
    encode,
    replace,
)
from quire.config.local import is_local, name_of, object_of
from quire.config.option import Group, OptionStatus, declarations, describe, limits
from quire.config.table import group_of, table
from quire.schema.errors import ConfigError


class Local:
    """Importable from this module."""


def test_a_hash_tells_options_apart_and_nothing_that_was_measured() -> None:
    for kind in every_group():
        assert len(kind().compute_hash()) == 10
    assert CacheConfig(block_size=32).compute_hash() != CacheConfig().compute_hash()
    assert CacheConfig().measured(9, 1.5, 64).compute_hash() == CacheConfig().compute_hash()
    changed = replace(EngineConfig(), **{"cache_config.block_size": 32})
    assert changed.compute_hash() != EngineConfig().compute_hash()
    assert EngineConfig(instance_id="a").compute_hash() == EngineConfig(instance_id="b").compute_hash()
    assert ModelConfig(hf_token="secret").compute_hash() == ModelConfig().compute_hash()


def test_what_is_documented_of_a_model() -> None:
    config = {"architectures": ["A"], "text_config": {"vocab_size": 99, "hidden_size": 8, "num_attention_heads": 2}}
    sampling = {"top_k": 3}
    model = ModelConfig(hf_config=config, facts=read_facts(config), default_sampling=sampling, runner="pooling")
    assert model.hf_text_config["vocab_size"] == model.get_vocab_size() == 99
    assert (model.architectures, model.architecture, model.runner_type) == (["A"], "A", "pooling")
    assert model.get_diff_sampling_param() == sampling is not model.get_diff_sampling_param()
    ranks = ParallelConfig(tensor_parallel_size=4)
    assert (model.get_num_attention_heads(ParallelConfig()), model.get_num_kv_heads(ranks)) == (2, 1)
    assert (model.is_moe, model.use_mla, model.is_quantized) == (False, False, False)
    assert (model.get_hidden_size(), model.get_head_size(), model.get_sliding_window()) == (8, 4, None)


def test_the_most_items_of_a_prompt() -> None:
    media = MultiModalConfig(limit_per_prompt={"image": 2, "video": {"width": 64}})
    assert [media.get_limit_per_prompt(modality) for modality in ("image", "video", "audio")] == [2, 999, 999]
    assert MultiModalConfig(language_model_only=True).get_limit_per_prompt("image") == 0


def every_group() -> list[type[Group]]:
    found: list[type[Group]] = [EngineConfig]
    for kind in found:
        for field in dataclasses.fields(kind):
            inner = group_of(field.type)
            if inner is not None and inner not in found:
                found.append(inner)
    return found


def test_documented_defaults() -> None:
    config = EngineConfig()
    assert (config.cache_config.block_size, config.cache_config.gpu_memory_utilization) == (16, 0.92)
    assert (config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs) == (2048, 128)
    assert config.scheduler_config.policy == "fcfs" and config.scheduler_config.scheduler_reserve_full_isl
    assert config.load_config.ignore_patterns == ("original/**/*",)
    assert config.model_config.max_logprobs == 20 and config.model_config.logprobs_mode == "raw_logprobs"
    assert config.parallel_config.world_size == 1 and config.lora_config is None
    assert (CacheConfig.DEFAULT_BLOCK_SIZE, SchedulerConfig.DEFAULT_MAX_NUM_SEQS) == (16, 128)


@pytest.mark.parametrize("kind", every_group(), ids=lambda kind: kind.__name__)
def test_every_group_is_whole(kind: type[Group]) -> None:
    """Makes with no arguments, has a docstring, and its defaults pass its own checks."""
    made = kind()
    assert kind.__doc__ and made == kind() and made != object()
    for name, declared in declarations(kind).items():
        o = declared.option
        assert o.doc.endswith("."), name
        assert o.status is not OptionStatus.INERT or o.why, (
            f"{name} has no effect, and the declaration does not say why"
        )
        value = getattr(made, name)
        again = kind(**{name: copy.copy(value)})
        assert getattr(again, name) == value, name


def test_keywords_are_unique() -> None:
    """table() raises on a name that two groups declare; each name leads to the field that declares it."""
    for name, flat in table().items():
        owner = EngineConfig
        for part in flat.path[:-1]:
            owner = group_of(next(f.type for f in dataclasses.fields(owner) if f.name == part))
        declared = declarations(owner)[flat.path[-1]]
        assert (declared.option.name or flat.path[-1]) == name
    flags = [flag for flat in table().values() for flag in flat.declared.option.flags]
    assert len(flags) == len(set(flags))


def test_a_name_declared_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    import quire.config.table as module

    twice = list(module._walk(EngineConfig, ()))
    monkeypatch.setattr(module, "_walk", lambda *_: iter([*twice, twice[0]]))
    with pytest.raises(AssertionError, match="two options are called"):
        module.table.__wrapped__()


@pytest.mark.parametrize(
    "kind, key, value, words",
    [
        (CacheConfig, "block_size", 0, "block_size must be at least 1, got 0"),
        (CacheConfig, "block_size", "16", "block_size must be a whole number, got '16'"),
        (CacheConfig, "block_size", True, "block_size must be a whole number"),
        (CacheConfig, "gpu_memory_utilization", 0.0, "above 0 and at most 1"),
        (CacheConfig, "gpu_memory_utilization", 1.5, "above 0 and at most 1, got 1.5"),
        (CacheConfig, "gpu_memory_utilization", float("nan"), "above 0"),
        (SchedulerConfig, "watermark", 1.0, "at least 0 and below 1, got 1"),
        (SchedulerConfig, "max_num_seqs", -3, "at least 1, got -3"),
        (SchedulerConfig, "policy", "fcf", "did you mean 'fcfs'"),
        (ModelConfig, "max_logprobs", -2, "at least -1, got -2"),
        (ModelConfig, "max_logprobs", 1.5, "a whole number"),
        (ModelConfig, "dtype", "float8", "one of auto, bfloat16, float16, float32"),
        (ModelConfig, "trust_remote_code", "yes", "True or False"),
        (ModelConfig, "hf_overrides", 3, "a mapping"),
        (ModelConfig, "served_model_name", [], "empty list"),
        (ModelConfig, "logits_processors", 3, "list of classes or import paths"),
        (LoadConfig, "ignore_patterns", 5, "a list of strings"),
        (ParallelConfig, "tensor_parallel_size", 0, "at least 1"),
        (CompilationConfig, "mode", 4, "at most 3"),
        (CompilationConfig, "mode", "fast", "not one of NONE, STOCK"),
        (CompilationConfig, "cudagraph_mode", "SOME", "not one of NONE, PIECEWISE"),
        (EngineConfig, "optimization_level", 4, "at most 3"),
        (EngineConfig, "cache_config", {"block": 3}, "did you mean 'block_size'"),
    ],
)
def test_wrong_values_are_named(kind: type[Group], key: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        if key == "cache_config":
            CacheConfig(**value)
        else:
            kind(**{key: value})


def test_values_are_normalised() -> None:
    assert [ModelConfig(dtype=d).dtype for d in ("half", "torch.bfloat16", "FLOAT")] == [
        "float16",
        "bfloat16",
        "float32",
    ]
    assert LoadConfig(load_format="SafeTensors").load_format == "safetensors"
    assert LoadConfig(ignore_patterns="*.bin").ignore_patterns == ("*.bin",)
    assert ModelConfig(served_model_name=["a", "b"]).served_model_name == "a"
    assert CompilationConfig(mode="vllm_compile").mode == CompilationMode.VLLM_COMPILE == 3
    assert CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY).cudagraph_mode == "FULL_DECODE_ONLY"
    assert (
        AttentionConfig(backend="flash_attn").backend == "FLASH_ATTN"
        and AttentionConfig(backend="auto").backend is None
    )
    assert (CacheConfig(block_size=None).block_size, CompilationConfig(mode=None).mode) == (16, 0)
    assert ModelConfig(seed=None).seed == 0
    assert EngineConfig(optimization_level="O3").optimization_level == 3
    assert EngineConfig(compilation_config=0).compilation_config == CompilationConfig(mode=0)
    assert SpeculativeConfig(
        num_speculative_tokens_per_batch_size=[[1, 8, 4]]
    ).num_speculative_tokens_per_batch_size == ((1, 8, 4),)


def test_cuda_graph_modes_are_pairs() -> None:
    assert CUDAGraphMode.FULL_AND_PIECEWISE.decode_mode() is CUDAGraphMode.FULL
    assert CUDAGraphMode.FULL_AND_PIECEWISE.mixed_mode() is CUDAGraphMode.PIECEWISE
    assert not CUDAGraphMode.NONE and CUDAGraphMode.FULL_DECODE_ONLY.value == (2, 0)


def test_groups_are_frozen() -> None:
    config = CacheConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 32
    with pytest.raises(dataclasses.FrozenInstanceError):
        del config.block_size
    with pytest.raises(TypeError):
        hash(config)


def test_replace_reaches_into_groups_and_checks() -> None:
    config = replace(EngineConfig(), **{"cache_config.block_size": 32, "disable_log_stats": True})
    assert config.cache_config.block_size == 32 and config.disable_log_stats
    assert EngineConfig().cache_config.block_size == 16
    with pytest.raises(ConfigError, match="at least 1"):
        replace(config, **{"cache_config.block_size": 0})
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        replace(config, **{"cache_config.blok_size": 8})


def test_configs_cross_processes() -> None:
    config = replace(
        EngineConfig(),
        **{
            "model_config.hf_config": {"a": [1, {"b": None}]},
            "model_config.logits_processors": ("m:P",),
            "kv_transfer_config": {"kv_connector": "X", "kv_role": "kv_both"},
            "compilation_config": {"cudagraph_mode": "full"},
        },
    )
    again = decode(encode(config))
    assert again == config and again.model_config.logits_processors == ("m:P",)
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
    assert copy.deepcopy(config) == config
    assert dataclasses.asdict(config)["cache_config"]["block_size"] == 16


def test_a_token_stays_out_of_the_log() -> None:
    text = repr(replace(EngineConfig(), **{"model_config.hf_token": "hf_secret", "cache_config.block_size": 8}))
    assert "hf_secret" not in text and "block_size=8" in text and "max_num_seqs" not in text


def test_classes_have_names_that_lead_back() -> None:
    class Hidden:
        pass

    assert name_of("a.b:C") == "a.b:C"
    assert object_of(name_of(dataclasses.Field)) is dataclasses.Field and not is_local(name_of(dataclasses.Field))
    mark = name_of(Hidden)
    assert is_local(mark) and object_of(mark) is Hidden
    config = ModelConfig(logits_processors=[Hidden, dataclasses.Field])
    assert config.logits_processors == (mark, "dataclasses:Field")
    with pytest.raises(ConfigError, match=r"Hidden.* cannot import"):
        encode(EngineConfig(model_config=config))
    with pytest.raises(ConfigError, match="belongs to another process"):
        object_of("in-process:gone.Class#1")


def test_words_for_types() -> None:
    assert describe(int | None) == "a whole number or None"
    assert describe(tuple[str, ...]) == "a list of strings"
    assert limits(declarations(CacheConfig)["gpu_memory_utilization"].option) == "above 0 and at most 1"
