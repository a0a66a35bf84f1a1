"""Mistral's native configuration file (params.json), translated to the keys of a config.json.

In: the mapping of params.json. Out: the raw configuration that the rest of Quire reads. Unsupported features
(vision, audio, quantized weights) are refused by name. Must not know: weights; see loader/mistral_names.py.
"""

from collections.abc import Mapping
from typing import Any

from quire.checkpoint.limits import EXPERTS, FFN, HEAD_DIM, HEADS, LAYERS, VOCAB, WIDTH, WINDOW, check_numbers
from quire.schema.errors import CheckpointError, NotBuiltError

CONFIG_FILE = "params.json"
_NEEDED = ("dim", "n_layers", "n_heads", "norm_eps", "vocab_size", "hidden_dim")
_NOT_TEXT = ("vision_encoder", "multimodal", "audio_encoder", "whisper_model_args")
_OTHER_FORMS = ("quantization", "q_lora_rank", "lora", "sparse_attn")
_LENGTHS = ("max_position_embeddings", "max_seq_len", "model_max_length")
DEFAULT_LENGTH = 128_000
_RANGES = {
    "dim": WIDTH, "hidden_dim": FFN, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": HEADS, "head_dim": HEAD_DIM,
    "vocab_size": VOCAB, "sliding_window": WINDOW, "_sliding_window": WINDOW,
}  # fmt: skip
_MOE_RANGES = {"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS}


def config_of(params: Mapping[str, Any], path: str) -> dict[str, Any]:
    if lacking := [key for key in _NEEDED if params.get(key) is None]:
        raise CheckpointError(f"{path} is not a Mistral configuration: it lacks {', '.join(lacking)}")
    for key in (*_NOT_TEXT, *_OTHER_FORMS):
        if params.get(key):
            raise NotBuiltError(
                f"{path} has {key!r}, which is not built for Mistral's format; use its Hugging Face checkpoint",
                param="config_format",
            )
    heads, moe = params["n_heads"], _part(params, "moe", tuple(_MOE_RANGES), path)
    check_numbers(params, _RANGES)
    check_numbers(moe, _MOE_RANGES)
    config = {
        "architectures": ["MixtralForCausalLM" if moe else "MistralForCausalLM"],
        "model_type": "mixtral" if moe else "mistral",
        "hidden_size": params["dim"],
        "intermediate_size": params["hidden_dim"],
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": params.get("n_kv_heads") or heads,
        "head_dim": params.get("head_dim") or params["dim"] // heads,
        "rms_norm_eps": params["norm_eps"],
        "vocab_size": params["vocab_size"],
        "rope_theta": params.get("rope_theta") or 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": next((params[key] for key in _LENGTHS if params.get(key)), DEFAULT_LENGTH),
        "sliding_window": _window(params, path),
        "tie_word_embeddings": bool(params.get("tied_embeddings", False)),
    }
    if moe:
        config |= {"num_local_experts": moe["num_experts"], "num_experts_per_tok": moe["num_experts_per_tok"]}
    if yarn := _part(params, "yarn", ("factor", "original_max_position_embeddings"), path):
        config["rope_scaling"] = _yarn(yarn)
    if dtype := params.get("dtype") or params.get("torch_dtype"):
        config["dtype"] = dtype
    return config


def _part(params: Mapping[str, Any], name: str, needed: tuple[str, ...], path: str) -> Mapping[str, Any]:
    """A mapping within params.json that has these keys; empty if there is none."""
    part = params.get(name) or {}
    if part and not (isinstance(part, Mapping) and all(part.get(key) is not None for key in needed)):
        raise CheckpointError(f"{path}: {name!r} must be a mapping with {', '.join(needed)}", param=name)
    return part


def _window(params: Mapping[str, Any], path: str) -> int | None:
    window = params.get("sliding_window") or params.get("_sliding_window")
    if isinstance(window, list):
        raise NotBuiltError(f"{path} has a sliding window per layer, which is not built", param="config_format")
    return window


def _yarn(yarn: Mapping[str, Any]) -> dict[str, Any]:
    rope = {
        "rope_type": "yarn",
        "factor": yarn["factor"],
        "original_max_position_embeddings": yarn["original_max_position_embeddings"],
        "beta_fast": yarn.get("beta", 32.0),
        "beta_slow": yarn.get("alpha", 1.0),
    }
    if not yarn.get("apply_scale", True):
        rope["attention_factor"] = 1.0
    return rope
