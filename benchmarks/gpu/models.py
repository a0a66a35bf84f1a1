"""Writes the model folders that the GPU benchmarks run: shapes of published models, no weights (load_format=dummy).

    python benchmarks/gpu/models.py FOLDER

Random weights do the same work as real ones. The shapes are those of Qwen3-0.6B, Qwen3-8B, Qwen3-30B-A3B and
gpt-oss-20b, the last with its experts in MXFP4, as published, and in bf16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def shape(layers: int, width: int, ffn: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return COMMON | {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


MODELS = {
    "qwen3-0.6b": shape(28, 1024, 3072, 16, 8, tie_word_embeddings=True),
    "qwen3-8b": shape(36, 4096, 12288, 32, 8),
    "qwen3-30b-a3b": shape(
        48, 2048, 6144, 32, 4,
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    ),
}  # fmt: skip
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, "vocab_size": 201088,
    "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "swiglu_limit": 7.0, "attention_bias": True,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "initial_context_length": 4096,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False, "dtype": "bfloat16", "eos_token_id": 200002, "pad_token_id": 199999,
}  # fmt: skip
MODELS["gpt-oss-20b-bf16"] = _GPT_OSS
MODELS["gpt-oss-20b"] = _GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}
MODELS["qwen3-8b-w4a16"] = MODELS["qwen3-8b"] | {
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
}
MODELS["qwen3-8b-fp8-blocks"] = MODELS["qwen3-8b"] | {
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
}
MODELS["qwen3-8b-w8a8"] = MODELS["qwen3-8b"] | {
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"},
        }},
    }
}  # fmt: skip


def write(root: Path) -> list[Path]:
    folders = []
    for name, config in MODELS.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [config["eos_token_id"]]}))
        folders.append(folder)
    return folders


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for made in write(Path(sys.argv[1])):
        print(made)
