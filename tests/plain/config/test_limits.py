"""Numbers of a configuration that become sizes, divisors or counts: refused where they are read, by name, at once."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from quire.base.gguf import GGUFFile
from quire.checkpoint.facts import read_facts
from quire.checkpoint.gguf_config import FAMILIES
from quire.checkpoint.gguf_config import config_of as gguf_config_of
from quire.checkpoint.mistral_config import config_of as mistral_config_of
from quire.checkpoint.source import read_json
from quire.schema.errors import CheckpointError, InputError
from tests.plain.config.test_gguf import COMMON, write

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "norm_eps": 1e-5, "vocab_size": 100, "hidden_dim": 128,
}  # fmt: skip
HOSTILE: tuple[Any, ...] = (
    0, -1, 1 << 31, 10**30, 0.5, 1e400, float("nan"), True, "7", "", [], [1, "x"], [10**9] * 3, {}, {"a": 1}, None,
)  # fmt: skip


@pytest.mark.parametrize(
    "key, value",
    [
        ("num_hidden_layers", 999_999_999), ("num_hidden_layers", 0), ("n_layer", 1 << 40), ("hidden_size", 1 << 40),
        ("num_attention_heads", 0), ("num_attention_heads", 4.5), ("num_key_value_heads", 0), ("head_dim", 1 << 20),
        ("intermediate_size", 1 << 40), ("vocab_size", 1 << 40), ("num_experts", 1 << 30), ("sliding_window", -1),
        ("sliding_window", 1 << 31), ("partial_rotary_factor", 100), ("partial_rotary_factor", 2.0),
        ("rotary_pct", -0.5), ("rope_pct", 0), ("rotary_dim", 1 << 30), ("layer_types", 7), ("architectures", "Llama"),
        ("layer_types", ["full_attention"] * 100_000), ("rope_parameters", []), ("rope_scaling", "yarn"),
    ],
)  # fmt: skip
def test_a_number_out_of_its_limits_is_named(key: str, value: Any) -> None:
    began = time.process_time()
    with pytest.raises(CheckpointError, match=key):
        read_facts({**LLAMA, key: value})
    assert time.process_time() - began < 5


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_rotary_part_larger_than_the_head(spelling: str, nested: bool) -> None:
    rope: dict[str, Any] = {"rope_type": "default", "partial_rotary_factor": 2.0}
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor=2\.0; expected .* at most 1"):
        read_facts({**LLAMA, spelling: {"full_attention": rope} if nested else rope})


@pytest.mark.parametrize("given", [1 << 31, 10**30, [2, 1 << 40], [1] * 5000])
def test_token_ids_that_no_tensor_holds(given: Any) -> None:
    with pytest.raises(CheckpointError, match="token ids"):
        read_facts({**LLAMA, "eos_token_id": given})


def test_no_token_may_be_written_without_a_sign() -> None:
    assert read_facts({**LLAMA, "eos_token_id": [2, (1 << 32) - 1, -1, None]}).eos_token_ids == (2,)


def test_what_is_said_of_a_file_has_an_end() -> None:
    with pytest.raises(CheckpointError) as caught:
        read_facts({**LLAMA, "hidden_size": "x", "model_type": "a" * 10**6})
    assert len(str(caught.value)) <= 2000
    said = str(CheckpointError("\ud800" + "y" * 10**6))
    assert len(said) <= 2000 and said.startswith("\\ud800y") and said.encode().endswith(b"yyy")


def test_the_text_part_is_checked_too() -> None:
    with pytest.raises(CheckpointError, match="num_hidden_layers=999999999; expected a number from 1 to 4096"):
        read_facts({"architectures": ["A"], "text_config": {**LLAMA, "num_hidden_layers": 999_999_999}})


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_a_stretch_without_end(factor: float) -> None:
    with pytest.raises(CheckpointError, match="factor"):
        read_facts({**LLAMA, "rope_scaling": {"type": "linear", "factor": factor}})


def test_a_file_nested_without_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 200_000)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_json(str(tmp_path), "config.json")


@pytest.mark.parametrize(
    "key, value",
    [
        ("n_heads", 0), ("n_heads", "x"), ("n_kv_heads", 1 << 20), ("dim", -64), ("n_layers", 999_999_999),
        ("head_dim", 1 << 30), ("vocab_size", 0), ("moe", 5), ("moe", {"num_experts": 8}), ("yarn", {"factor": 2.0}),
        ("moe", {"num_experts": 1 << 30, "num_experts_per_tok": 2}), ("sliding_window", -5),
    ],
)  # fmt: skip
def test_mistral_numbers(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key if key != "moe" else "moe|num_experts"):
        mistral_config_of({**MISTRAL, key: value}, "params.json")


def gguf(path: Path, arch: str, **more: Any) -> GGUFFile:
    keys = {**COMMON, **{key.replace("__", "."): value for key, value in more.items()}}
    metadata = {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}
    return write(path / "m.gguf", metadata, {"token_embd.weight": (100, 64)})


@pytest.mark.parametrize(
    "key, value",
    [
        ("rope.dimension_count", 65536), ("rope.dimension_count", 66), ("rope.dimension_count", 4096),
        ("block_count", 4_000_000_000), ("attention.head_count", 1_000_000), ("attention.key_length", 1 << 30),
        ("embedding_length", 1 << 30), ("attention.head_count", "8"), ("context_length", 4_000_000_000),
    ],
)  # fmt: skip
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3", "phi3", "smollm3"])
def test_gguf_numbers(tmp_path: Path, arch: str, key: str, value: Any) -> None:
    began = time.process_time()
    with pytest.raises(CheckpointError, match=f"{arch}.{key}"):
        gguf_config_of(gguf(tmp_path, arch, **{key: value}))
    assert time.process_time() - began < 5


def test_no_value_of_any_key_is_more_than_an_error() -> None:
    began = time.process_time()
    for key in (*LLAMA, "head_dim", "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "text_config",
                "eos_token_id", "dtype", "quantization_config", "num_experts", "kv_lora_rank"):  # fmt: skip
        for value in HOSTILE:
            _facts_or_error({**LLAMA, key: value})
            _facts_or_error({"architectures": ["A"], "text_config": {**LLAMA, key: value}})
    for key in (*MISTRAL, "n_kv_heads", "head_dim", "moe", "yarn", "rope_theta", "sliding_window"):
        for value in HOSTILE:
            with contextlib.suppress(InputError):
                _facts_or_error(mistral_config_of({**MISTRAL, key: value}, "params.json"))
    assert time.process_time() - began < 60


def test_no_metadata_of_any_family_is_more_than_an_error(tmp_path: Path) -> None:
    began = time.process_time()
    values: tuple[Any, ...] = (0, 1, 3, 65537, (1 << 32) - 1, -1.0, float("nan"), float("inf"), "x", True, [1, 2], [0])
    extra = ("rope.dimension_count", "attention.key_length", "attention.sliding_window", "rope.scaling.factor",
             "rope.scaling.type", "expert_count", "expert_used_count", "attention.kv_lora_rank")  # fmt: skip
    for arch in FAMILIES:
        for key in (*COMMON, *extra):
            for value in values:
                with contextlib.suppress(InputError):
                    _facts_or_error(gguf_config_of(gguf(tmp_path, arch, **{key: value})))
    assert time.process_time() - began < 200


def _facts_or_error(config: dict[str, Any]) -> None:
    try:
        facts = read_facts(config)
    except InputError:
        return
    assert facts.num_layers <= 4096
    json.dumps(config)
