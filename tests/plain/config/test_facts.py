"""ModelFacts from configurations as they really look, under every name a field goes by."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.checkpoint.facts import ModelFacts, max_positions, read_facts
from quire.schema.errors import CheckpointError

LLAMA31 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rope_theta": 500000.0, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12,
        "n_head": 12, "n_positions": 1024, "n_ctx": 1024, "eos_token_id": 50256}  # fmt: skip
GEMMA3_MM = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
    "dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
    "text_config": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2560, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
        "sliding_window": 1024, "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "max_position_embeddings": 163840, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"},
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
}  # fmt: skip


def test_llama() -> None:
    facts = read_facts(LLAMA31)
    assert facts.architectures == ("LlamaForCausalLM",) and facts.model_type == "llama"
    assert (facts.vocab_size, facts.hidden_size, facts.num_layers) == (128256, 4096, 32)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_size) == (32, 8, 128)
    assert facts.max_positions == 131072, "llama3 scaling is part of the length already"
    assert facts.dtype == "bfloat16" and facts.eos_token_ids == (128001, 128008, 128009)
    assert facts.bos_token_id == 128000 and facts.tie_word_embeddings is False and facts.num_experts == 0


def test_older_names() -> None:
    facts = read_facts(GPT2)
    assert (facts.hidden_size, facts.num_layers, facts.num_heads, facts.num_kv_heads) == (768, 12, 12, 12)
    assert facts.max_positions == 1024 and facts.dtype == "" and facts.eos_token_ids == (50256,)
    falcon = {"hidden_size": 4544, "num_attention_heads": 71, "multi_query": True, "max_position_embeddings": 2048}
    assert read_facts(falcon).num_kv_heads == 1
    assert read_facts(falcon | {"new_decoder_architecture": True, "num_kv_heads": 8}).num_kv_heads == 8
    assert read_facts({"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 99}).max_positions == 99


def test_a_multimodal_model_is_its_text_part() -> None:
    facts = read_facts(GEMMA3_MM)
    assert facts.is_multimodal and facts.architectures == ("Gemma3ForConditionalGeneration",)
    assert (facts.hidden_size, facts.head_size, facts.vocab_size) == (2560, 256, 262208)
    assert facts.max_positions == 131072 and facts.dtype == "bfloat16"
    assert facts.sliding_window == 1024 and not facts.all_windowed and len(facts.layer_types) == 6


def test_latent_attention_and_experts() -> None:
    facts = read_facts(DEEPSEEK)
    assert facts.uses_mla and facts.num_experts == 256 and facts.quantization == "fp8"
    assert facts.head_size == 192 and facts.max_positions == 163840


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "model_max_length": 2048}, 2048),
        ({"seq_length": 2048}, 2048),
        ({"n_positions": 512}, 512),
        ({"max_sequence_length": 77}, 77),
        ({"model_max_length": 1e30}, 0),
        ({}, 0),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2}}, 4096),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, 2048),
        ({"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
          "original_max_position_embeddings": 32768}}, 131072),
        ({"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "yarn", "factor": 32.0,
          "original_max_position_embeddings": 4096, "rope_theta": 150000.0}}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", "factor": 32.0}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "su"}}, 131072),
        ({"max_position_embeddings": 100, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 100),
        ({"max_position_embeddings": 100, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_type": "default"}}}, 800),
        ({"max_position_embeddings": 100, "model_type": "gemma3_text",
          "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": None}, 100),
    ],
)  # fmt: skip
def test_lengths(config: dict[str, Any], expected: int) -> None:
    assert max_positions({"hidden_size": 8, **config}) == expected


@pytest.mark.parametrize(
    "config, window",
    [
        ({"sliding_window": 4096}, 4096),
        ({"sliding_window": 4096, "use_sliding_window": False}, 0),
        ({"sliding_window": None}, 0),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 2}, 0),
        ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}, 128),
    ],
)
def test_windows(config: dict[str, Any], window: int) -> None:
    assert read_facts({"hidden_size": 8, **config}).sliding_window == window


def test_all_windowed() -> None:
    assert read_facts({"hidden_size": 8, "sliding_window": 4096}).all_windowed
    assert not ModelFacts().all_windowed


@pytest.mark.parametrize(
    "config, dtype",
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": "auto"}, ""),
        ({"text_config": {"hidden_size": 4, "dtype": "float16"}}, "float16"),
        ({}, ""),
    ],
)
def test_dtypes(config: dict[str, Any], dtype: str) -> None:
    assert read_facts(config).dtype == dtype


def test_states_and_shapes_of_layers() -> None:
    assert read_facts({"hidden_size": 8, "layers_block_type": ["mamba", "attention"]}).has_states
    assert read_facts({"hidden_size": 8, "layer_types": ["linear_attention", "full_attention"]}).has_states
    assert read_facts({"model_type": "mamba", "hidden_size": 8}).has_states
    assert not read_facts(LLAMA31).has_states
    assert read_facts({"is_encoder_decoder": True}).is_encoder_decoder
    assert read_facts({"hidden_size": 8, "num_key_value_heads": [4, 8], "num_attention_heads": 8}).num_kv_heads == 8


@pytest.mark.parametrize(
    "config, words",
    [
        ({"hidden_size": "big"}, "hidden_size='big'; expected a number"),
        ({"hidden_size": -1}, "hidden_size=-1"),
        ({"hidden_size": 8, "num_hidden_layers": [1, "x"]}, "num_hidden_layers"),
        ({"hidden_size": 8, "vocab_size": True}, "vocab_size=True"),
    ],
)
def test_a_number_that_is_none(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_facts(config)


def test_compressed_checkpoints() -> None:
    assert read_facts({"compression_config": {"format": "x"}}).quantization == "compressed-tensors"
    assert read_facts({"quantization_config": {"quant_method": "GPTQ"}}).quantization == "gptq"
    assert (
        read_facts({"text_config": {"hidden_size": 4, "quantization_config": {"quant_method": "awq"}}}).quantization
        == "awq"
    )


def test_facts_are_plain() -> None:
    facts = read_facts(GEMMA3_MM)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=ModelFacts) == facts
