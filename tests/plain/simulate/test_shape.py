"""Sizes read from configurations, against the parameter counts that the models' makers publish."""

from __future__ import annotations

from typing import Any

import pytest

from quire.schema.errors import CheckpointError, NotBuiltError
from quire.schema.kv import KVKind
from quire.simulate.shape import read_shape
from tests.plain.simulate.small import CONFIG

COMMON = {"num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False}
LLAMA_70B = COMMON | {
    "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
MIXTRAL = COMMON | {
    "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
DEEPSEEK_V3 = COMMON | {
    "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


@pytest.mark.parametrize(
    "config, billions",
    [(CONFIG, 0.596), (LLAMA_70B, 70.55), (MIXTRAL, 46.70), (DEEPSEEK_V3, 671.0)],
    ids=["Qwen3-0.6B", "Llama-3-70B", "Mixtral-8x7B", "DeepSeek-V3"],
)
def test_parameters_are_those_published(config: dict[str, Any], billions: float) -> None:
    assert read_shape(config, "model").num_params / 1e9 == pytest.approx(billions, rel=0.002)


def test_a_latent_cache_is_as_small_on_every_rank() -> None:
    shape = read_shape(DEEPSEEK_V3, "model")
    assert shape.kv_token_bytes(1) == shape.kv_token_bytes(8) == 2 * (512 + 64)
    assert sum(spec.token_bytes for spec in shape.kv_specs(64, 8, 61)) == 61 * 2 * (512 + 64)


def test_keys_and_values_are_divided_among_ranks_until_each_has_one_head() -> None:
    shape = read_shape(CONFIG, "model")
    assert [shape.kv_token_bytes(ranks) for ranks in (1, 4, 8, 16)] == [4096, 1024, 512, 512]


def test_windows_follow_the_kinds_of_layers() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 10
    shape = read_shape(CONFIG | {"layer_types": kinds[:28], "sliding_window": 512}, "model")
    assert shape.windows[:4] == (512, 512, 0, 512)
    assert [spec.kind for spec in shape.kv_specs(64, 1, 3)] == [KVKind.WINDOW, KVKind.WINDOW, KVKind.FULL]


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"num_hidden_layers": None}, CheckpointError, "lacks num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, CheckpointError, "num_hidden_layers"),
        ({"model_type": "mamba2"}, NotBuiltError, "recurrent states"),
        ({"is_encoder_decoder": True}, NotBuiltError, "encoder-decoder"),
        ({"quantization_config": {"quant_method": "gptq"}}, NotBuiltError, "quantized \\(gptq\\)"),
        ({"num_experts": 8}, CheckpointError, "8 experts but none of num_experts_per_tok"),
    ],
)
def test_what_cannot_be_simulated_is_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_shape(CONFIG | changes, "model")
