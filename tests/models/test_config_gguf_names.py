"""Configurations made for GGUF files speak transformers' language and cover every family whose tensors we can read."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from quire.base.gguf import GGUFFile
from quire.checkpoint.gguf_config import FAMILIES, config_of
from quire.loader.gguf_names import FAMILIES as READABLE
from quire.models.build import read_arch

_OURS = {"architectures", "model_type", "hidden_act", "head_dim", "rms_norm_eps", "layer_norm_eps", "intermediate_size",
         "num_key_value_heads", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
         "max_position_embeddings", "rope_parameters", "attention_bias", "mlp_bias", "hidden_size", "num_hidden_layers",
         "num_attention_heads", "vocab_size", "qkv_bias", "sliding_window", "use_sliding_window",
         "layer_types"}  # fmt: skip
# Not fields of the configuration classes of transformers 5, but of published config.json files.
_PUBLISHED = {"scoring_func", "topk_method", "moe_layer_freq", "num_experts", "shared_expert_intermediate_size",
              "seq_length", "rope_interleave", "n_group", "topk_group", "n_inner"}  # fmt: skip


def _plain() -> Any:
    path = Path(__file__).parents[1] / "plain" / "config" / "test_gguf.py"
    spec = importlib.util.spec_from_file_location("plain_test_config_gguf", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_same_families() -> None:
    assert set(FAMILIES) == set(READABLE)


@pytest.mark.parametrize("arch", sorted(FAMILIES))
def test_names_are_known_to_transformers(arch: str, tmp_path: Path) -> None:
    import transformers

    plain = _plain()
    keys = plain.COMMON | {
        "attention.layer_norm_epsilon": 1e-5, "attention.kv_lora_rank": 16, "attention.key_length": 12,
        "attention.value_length": 8, "rope.dimension_count": 4, "expert_count": 4, "expert_used_count": 2,
    }  # fmt: skip
    metadata = {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}
    file: GGUFFile = plain.write(tmp_path / "m.gguf", metadata, {"token_embd.weight": (100, 64)})
    config = config_of(file)
    assert hasattr(transformers, config["architectures"][0])
    made = transformers.AutoConfig.for_model(config["model_type"])
    unknown = set(config) - set(made.to_dict()) - set(made.attribute_map) - _OURS - _PUBLISHED
    assert not unknown, f"{arch}: no such field in {type(made).__name__}"
    assert read_arch(config).vocab == 100
