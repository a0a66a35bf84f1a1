"""GGUF metadata -> configuration: the embedded model, and small files of each shape written here."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest

from quire.base.gguf import GGUFFile
from quire.checkpoint.facts import read_facts
from quire.checkpoint.gguf_config import FAMILIES, config_of
from quire.checkpoint.source import locate
from quire.schema.errors import CheckpointError

_KINDS = {bool: 7, int: 4, float: 6, str: 8}


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        kind = _KINDS[type(value[0])]
        return struct.pack("<IQ", kind, len(value)) + b"".join(_value(item) for item in value)
    if isinstance(value, str):
        return _text(value)
    return struct.pack({bool: "<?", int: "<I", float: "<f"}[type(value)], value)


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> GGUFFile:
    """`tensors`: name -> a shape (no data is read) or a list of floats."""
    keys = b"".join(
        _text(key) + struct.pack("<I", 9 if isinstance(value, list) else _KINDS[type(value)]) + _value(value)
        for key, value in metadata.items()
    )
    infos, data = b"", b""
    for name, given in tensors.items():
        shape = given if isinstance(given, tuple) else (len(given),)
        infos += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 0, len(data))
        data += b"" if isinstance(given, tuple) else struct.pack(f"<{len(given)}f", *given)
        data += bytes(-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + keys + infos
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return GGUFFile(str(path))


COMMON = {
    "block_count": 4, "context_length": 2048, "embedding_length": 64, "feed_forward_length": 128,
    "attention.head_count": 8, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}  # fmt: skip


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def build(arch: str, tensors: dict[str, Any] | None = None, /, drop: str = "", **more: Any) -> dict[str, Any]:
        keys = {**COMMON, **{key.replace("__", "."): value for key, value in more.items()}}
        keys.pop(drop, None)
        metadata = {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}
        return config_of(write(tmp_path / "m.gguf", metadata, {"token_embd.weight": (100, 64), **(tensors or {})}))

    return build


def test_the_embedded_model() -> None:
    config = config_of(GGUFFile(locate(None).path))
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] is True
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    facts = read_facts(config)
    assert (facts.max_positions, facts.num_kv_heads, facts.head_size, facts.eos_token_ids) == (8192, 3, 64, (2,))


def test_llama(make: Any) -> None:
    config = make("llama")
    assert config == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4,
        "max_position_embeddings": 2048, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 8, "intermediate_size": 128, "vocab_size": 100, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": True,
        "bos_token_id": None, "pad_token_id": None, "eos_token_id": None, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    with_head = make("llama", {"output.weight": (100, 64), "blk.0.attn_q.bias": (64,), "blk.0.ffn_up.bias": (128,)})
    assert (with_head["tie_word_embeddings"], with_head["attention_bias"], with_head["mlp_bias"]) == (False, True, True)
    experts = make("llama", expert_count=8, expert_used_count=2)
    assert experts["architectures"] == ["MixtralForCausalLM"] and experts["num_local_experts"] == 8


def llama3_divisors(factor: float, theta: float, dim: int, context: int = 8192) -> list[float]:
    """Written out again from the published formula: high frequencies stay, low ones are divided, between is smooth."""
    out = []
    for i in range(dim // 2):
        turns = context / (2 * math.pi * theta ** (2 * i / dim))  # over the original context
        keep = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        out.append(1 / (keep + (1 - keep) / factor))
    return out


def test_rope_factors_of_llama3_are_recognised(make: Any) -> None:
    freqs = llama3_divisors(8.0, 500000.0, 128)
    config = make("llama", {"rope_freqs.weight": freqs}, rope__freq_base=500000.0, attention__key_length=128)
    assert config["rope_parameters"] == {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    other = [1.0 + i for i in range(64)]
    config = make("llama", {"rope_freqs.weight": other}, attention__key_length=128)
    assert config["rope_parameters"]["rope_type"] == "longrope"
    assert config["rope_parameters"]["long_factor"] == other == config["rope_parameters"]["short_factor"]
    assert config["rope_parameters"]["attention_factor"] == 1.0
    plain = make("llama", {"rope_freqs.weight": [1.0] * 64}, attention__key_length=128)
    assert plain["rope_parameters"]["rope_type"] == "default"


def test_rope_scalings(make: Any) -> None:
    linear = make("llama", rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert linear["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    yarn = make("qwen2", rope__scaling__type="yarn", rope__scaling__factor=4.0,
                rope__scaling__original_context_length=512)  # fmt: skip
    assert yarn["rope_parameters"]["original_max_position_embeddings"] == 512
    assert read_facts(yarn).max_positions == 2048
    long, short = [2.0, 3.0, 4.0, 5.0], [1.0, 1.0, 1.0, 1.1]
    phi = make("phi3", {"rope_factors_long.weight": long, "rope_factors_short.weight": short},
               rope__scaling__original_context_length=512, rope__scaling__attn_factor=1.25)  # fmt: skip
    rope = phi["rope_parameters"]
    assert rope["long_factor"] == long and rope["short_factor"] == pytest.approx(short)
    assert (rope["factor"], rope["attention_factor"]) == (4.0, 1.25) and phi["original_max_position_embeddings"] == 512
    half = make("glm4", rope__dimension_count=4)
    assert half["rope_parameters"]["partial_rotary_factor"] == 0.5


def test_window_patterns(make: Any) -> None:
    kinds = {"s": "sliding_attention", "f": "full_attention"}

    def pattern(text: str) -> list[str]:
        return [kinds[letter] for letter in text]

    gemma2 = make("gemma2", block_count=4, attention__sliding_window=256, attn_logit_softcapping=50.0)
    assert gemma2["layer_types"] == pattern("sfsf") and gemma2["attn_logit_softcapping"] == 50.0
    assert gemma2["query_pre_attn_scalar"] == 8
    assert (
        make("gemma2", block_count=46, attention__key_length=128, attention__sliding_window=2)["query_pre_attn_scalar"]
        == 8
    ), "the 27B divides by hidden size over heads"
    gemma3 = make("gemma3", block_count=7, attention__sliding_window=256, rope__freq_base=1e6,
                  rope__scaling__type="linear", rope__scaling__factor=8.0)  # fmt: skip
    assert gemma3["layer_types"] == pattern("sssssfs")
    assert gemma3["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert read_facts(gemma3).max_positions == 2048
    assert make("cohere2", block_count=5, attention__sliding_window=4)["layer_types"] == pattern("sssfs")
    assert make("exaone4")["layer_types"] == pattern("ffff") and make("exaone4")["sliding_window"] is None
    olmo3 = make("olmo2", attention__sliding_window=4)
    assert olmo3["architectures"] == ["Olmo3ForCausalLM"] and olmo3["layer_types"] == pattern("sssf")
    assert make("olmo2")["architectures"] == ["Olmo2ForCausalLM"]
    oss = make("gpt-oss", attention__sliding_window=128, expert_count=4, expert_used_count=2,
               expert_feed_forward_length=96, rope__scaling__type="yarn", rope__scaling__factor=32.0,
               rope__scaling__original_context_length=64)  # fmt: skip
    assert oss["layer_types"] == pattern("sfsf") and oss["intermediate_size"] == 96
    assert oss["rope_parameters"]["truncate"] is False and oss["num_local_experts"] == 4


def test_experts(make: Any) -> None:
    qwen = make("qwen3moe", expert_count=16, expert_used_count=4, expert_feed_forward_length=32)
    assert (qwen["num_experts"], qwen["num_experts_per_tok"], qwen["moe_intermediate_size"]) == (16, 4, 32)
    assert qwen["norm_topk_prob"] is True and make("qwen2moe", expert_count=4)["norm_topk_prob"] is False
    glm = make("glm4moe", {"blk.1.attn_q_norm.weight": (8,)}, block_count=5, nextn_predict_layers=1, expert_count=8,
               leading_dense_block_count=1, expert_weights_scale=2.5, expert_weights_norm=True)  # fmt: skip
    assert (glm["num_hidden_layers"], glm["first_k_dense_replace"], glm["routed_scaling_factor"]) == (4, 1, 2.5)
    assert glm["use_qk_norm"] is True and glm["norm_topk_prob"] is True


def test_latent_attention(make: Any) -> None:
    latent = {
        "attention.kv_lora_rank": 32, "attention.key_length": 24, "attention.value_length": 16,
        "rope.dimension_count": 8, "expert_count": 8, "expert_used_count": 2, "expert_shared_count": 1,
        "leading_dense_block_count": 1, "expert_feed_forward_length": 16,
    }  # fmt: skip
    lite = make("deepseek2", **latent)
    assert lite["architectures"] == ["DeepseekV2ForCausalLM"] and lite["q_lora_rank"] is None
    assert (lite["qk_nope_head_dim"], lite["qk_rope_head_dim"], lite["v_head_dim"]) == (16, 8, 16)
    assert lite["topk_method"] == "greedy" and "partial_rotary_factor" not in lite["rope_parameters"]
    v3 = make("deepseek2", **latent | {
        "attention.q_lora_rank": 48, "expert_gating_func": 2, "expert_group_count": 4, "expert_group_used_count": 2,
        "attention.key_length": 40, "attention.key_length_mla": 24, "attention.value_length": 32,
        "attention.value_length_mla": 16, "attention.head_count_kv": 1, "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0, "rope.scaling.yarn_log_multiplier": 0.1,
    })  # fmt: skip
    assert v3["architectures"] == ["DeepseekV3ForCausalLM"] and v3["scoring_func"] == "sigmoid"
    assert (v3["n_group"], v3["topk_group"], v3["q_lora_rank"], v3["num_key_value_heads"]) == (4, 2, 48, 8)
    assert (v3["qk_nope_head_dim"], v3["v_head_dim"]) == (16, 16) and v3["rope_parameters"]["mscale_all_dim"] == 1.0


def test_older_architectures(make: Any) -> None:
    norm = {"attention.layer_norm_epsilon": 1e-5}
    gpt2 = make("gpt2", attention__head_count_kv=8, **norm)
    assert (gpt2["n_embd"], gpt2["n_layer"], gpt2["n_positions"], gpt2["layer_norm_epsilon"]) == (64, 4, 2048, 1e-5)
    falcon7 = make("falcon", attention__head_count_kv=1, **norm)
    assert falcon7["multi_query"] is True and falcon7["new_decoder_architecture"] is False
    falcon40 = make("falcon", {"blk.0.attn_norm_2.weight": (64,)}, attention__head_count_kv=2, **norm)
    assert (falcon40["num_kv_heads"], falcon40["num_ln_in_parallel_attn"]) == (2, 2)
    bloom = make("bloom", attention__head_count_kv=8, **norm)
    assert (bloom["n_head"], bloom["hidden_size"]) == (8, 64)
    stable = make("stablelm", {"blk.0.attn_q.bias": (64,), "blk.0.ffn_norm.weight": (64,)}, **norm)
    assert stable["use_qkv_bias"] is True and stable["use_parallel_residual"] is False
    starcoder = make("starcoder2", {"blk.0.attn_q.bias": (64,)}, **norm)
    assert starcoder["use_bias"] is True and starcoder["norm_epsilon"] == 1e-5
    granite = make("granite", embedding_scale=12.0, residual_scale=0.5, logit_scale=8.0, attention__scale=0.25)
    assert (granite["embedding_multiplier"], granite["residual_multiplier"]) == (12.0, 0.5)
    assert (granite["logits_scaling"], granite["attention_multiplier"]) == (8.0, 0.25)


def test_ends_of_an_answer(tmp_path: Path) -> None:
    metadata = {f"llama.{key}": value for key, value in COMMON.items()} | {
        "general.architecture": "llama", "tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 5, "tokenizer.ggml.bos_token_id": 1,
    }  # fmt: skip
    config = config_of(write(tmp_path / "m.gguf", metadata, {"token_embd.weight": (100, 64)}))
    assert config["eos_token_id"] == [5, 7] and config["bos_token_id"] == 1


@pytest.mark.parametrize("arch", sorted(FAMILIES))
def test_every_family_makes_a_configuration(make: Any, arch: str) -> None:
    config = make(
        arch, attention__layer_norm_epsilon=1e-5, attention__kv_lora_rank=16, attention__key_length=12,
        attention__value_length=8, rope__dimension_count=4, expert_count=4, expert_used_count=2,
    )  # fmt: skip
    facts = read_facts(config)
    assert facts.architectures[0].endswith(("ForCausalLM", "LMHeadModel")) and facts.max_positions == 2048
    assert (facts.num_layers, facts.hidden_size, facts.num_heads, facts.vocab_size) == (4, 64, 8, 100)


def test_what_cannot_be_read(make: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'xyz' is not supported; supported are arcee"):
        make("xyz")
    with pytest.raises(CheckpointError, match=r"llama\.block_count is None"):
        make("llama", drop="block_count")
    with pytest.raises(CheckpointError, match=r"llama\.context_length is 'long'"):
        make("llama", context_length="long")
    with pytest.raises(CheckpointError, match="differs from layer to layer"):
        make("llama", attention__head_count=[8, 8, 4, 4])
    assert make("llama", attention__head_count=[8, 8, 8, 8])["num_attention_heads"] == 8
    with pytest.raises(CheckpointError, match="does not name its architecture"):
        config_of(write(tmp_path / "n.gguf", {"a": 1}, {}))
