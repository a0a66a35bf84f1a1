"""GGUF metadata -> the configuration dict that a Hugging Face checkpoint of the same model would have.

Owns: the table of GGUF keys and configuration keys, family by family, and what a GGUF file only reveals through
its tensors (biases, tied heads, rope factors). In: an open GGUFFile. Out: a plain dict.
Must not know: how tensors are decoded or renamed (loader/).
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from quire.base.gguf import GGUFError, GGUFFile, TensorInfo
from quire.checkpoint.limits import (
    EXPERTS,
    FFN,
    HEAD_DIM,
    HEADS,
    LAYERS,
    POSITIONS,
    SOME_LAYERS,
    VOCAB,
    WIDTH,
    WINDOW,
    Range,
    is_within,
    shown,
)
from quire.schema.errors import CheckpointError, InputError

Config = dict[str, Any]
_F32 = 0
_RANGES = {
    "block_count": LAYERS, "nextn_predict_layers": SOME_LAYERS,
    "leading_dense_block_count": SOME_LAYERS,
    "embedding_length": WIDTH, "feed_forward_length": FFN, "expert_feed_forward_length": FFN,
    "expert_shared_feed_forward_length": FFN, "context_length": Range(1, POSITIONS.most), "vocab_size": VOCAB,
    "attention.head_count": HEADS, "attention.head_count_kv": Range(0, HEADS.most), "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM, "attention.key_length_mla": HEAD_DIM, "attention.value_length_mla": HEAD_DIM,
    "attention.kv_lora_rank": FFN, "attention.q_lora_rank": FFN, "attention.sliding_window": WINDOW,
    "rope.dimension_count": HEAD_DIM, "expert_count": EXPERTS, "expert_used_count": EXPERTS,
    "expert_shared_count": EXPERTS, "expert_group_count": EXPERTS, "expert_group_used_count": EXPERTS,
}  # fmt: skip
_MISREAD = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, struct.error)


class GGUFArchitecture(NamedTuple):
    """How a GGUF architecture maps to a model type. `keys`: GGUF key (without the architecture) -> config key."""

    architecture: str
    model_type: str
    keys: Mapping[str, str] = {}
    fixed: Mapping[str, Any] = {}  # values that all models of the family share and the file lacks
    finish: Callable[["GGUFSource", Config], None] | None = None
    biases: str = "attention_bias"  # the key for biases of the q, k and v projections; '' if there is none


class GGUFSource:
    """A family's view of an open file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        arch = file.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise CheckpointError(f"{file.path}: the GGUF file does not name its architecture")
        self.arch = arch

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.arch}.{key}", default)

    def number(self, key: str) -> Any:
        """A required number; a list (one per layer) only if all entries are equal."""
        value = self.get(key)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                raise CheckpointError(
                    f"{self.file.path}: {self.arch}.{key} differs from layer to layer ({value[:6]}…), which no "
                    "supported architecture has"
                )
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{self.file.path}: GGUF key {self.arch}.{key} is {value!r}; expected a number > 0")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def has_in_layers(self, stem: str) -> bool:
        """True if any of the first layers has this tensor (the very first may be special)."""
        return any(self.has(f"blk.{layer}.{stem}") for layer in (0, 1, self.get("leading_dense_block_count", 0)))

    def floats(self, tensor: str) -> list[float] | None:
        """A float32 vector, or None if the file has no such tensor."""
        info: TensorInfo | None = self.file.tensors.get(tensor)
        if info is None or info.type_id != _F32 or len(info.shape) != 1:
            return None
        count = info.shape[0]
        return list(struct.unpack(f"<{count}f", self.file.data(info, 4 * count)))


def config_of(file: GGUFFile) -> Config:
    """The configuration of a GGUF model; CheckpointError for an unknown family."""
    source = GGUFSource(file)
    family = FAMILIES.get(source.arch)
    if family is None:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {source.arch!r} is not supported; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    for key, allowed in _RANGES.items():
        if (value := source.get(key)) is not None and not is_within(value, allowed):
            raise CheckpointError(
                f"{file.path}: GGUF key {source.arch}.{key} is {shown(value)}; expected {allowed}", param=key
            )
    try:
        return _config_of(source, family)
    except (InputError, GGUFError):
        raise
    except _MISREAD as wrong:
        raise CheckpointError(f"{file.path}: its metadata cannot be read ({type(wrong).__name__}: {wrong})") from wrong


def _config_of(source: GGUFSource, family: GGUFArchitecture) -> Config:
    config = _common(source)
    for key, name in family.keys.items():
        if (value := source.get(key)) is not None:
            config[name] = value
    config |= {"architectures": [family.architecture], "model_type": family.model_type, **family.fixed}
    if family.biases:
        config[family.biases] = _qkv_biases(source)
    if family.finish is not None:
        family.finish(source, config)
    return config


def _common(source: GGUFSource) -> Config:
    heads = source.number("attention.head_count")
    hidden = source.number("embedding_length")
    head_dim = source.get("attention.key_length") or hidden // heads
    tensors = source.file.tensors
    embedding = tensors.get("token_embd.weight")
    tokens = source.file.metadata.get("tokenizer.ggml.tokens") or ()
    feed_forward = source.get("feed_forward_length")
    return {
        "num_hidden_layers": source.number("block_count") - source.get("nextn_predict_layers", 0),
        "max_position_embeddings": source.number("context_length"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": source.number("attention.head_count_kv") if _grouped(source) else heads,
        "head_dim": head_dim,
        "intermediate_size": source.number("feed_forward_length") if feed_forward else 4 * hidden,
        "vocab_size": embedding.shape[0] if embedding else source.get("vocab_size", len(tokens)),
        "hidden_act": "silu",
        **_eps(source),
        "rope_parameters": rope_parameters(source, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        **special_ids(source.file.metadata),
    }


def _grouped(source: GGUFSource) -> bool:
    return bool(source.get("attention.head_count_kv"))


def _eps(source: GGUFSource) -> Config:
    rms, layer = source.get("attention.layer_norm_rms_epsilon"), source.get("attention.layer_norm_epsilon")
    values = {}
    if rms is not None:
        values["rms_norm_eps"] = _short(rms)
    if layer is not None:
        values["layer_norm_eps"] = _short(layer)
    return values


def _short(value: float) -> float:
    """A float32 as the decimal that was meant: 9.999999747378752e-06 is 1e-05."""
    return float(f"{value:.7g}")


def special_ids(metadata: Mapping[str, Any]) -> Config:
    """Beginning of text, padding, and every end token (of text, turn, message)."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(i for i in ends if isinstance(i, int)))
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
    }


def _qkv_biases(source: GGUFSource) -> bool:
    return source.has_in_layers("attn_q.bias") or source.has_in_layers("attn_qkv.bias")


# Rope


def rope_parameters(source: GGUFSource, head_dim: int) -> Config:
    rope: Config = {"rope_type": "default", "rope_theta": float(source.get("rope.freq_base", 10000.0))}
    dim = source.get("rope.dimension_count")
    if dim and dim != head_dim and not source.get("attention.kv_lora_rank"):
        if dim > head_dim:
            raise CheckpointError(
                f"{source.file.path}: GGUF key {source.arch}.rope.dimension_count is {dim}; expected at most the size "
                f"of a head, {head_dim}"
            )
        rope["partial_rotary_factor"] = dim / head_dim
    kind = source.get("rope.scaling.type", "none")
    factor = source.get("rope.scaling.factor") or source.get("rope.scale_linear")
    if kind == "linear" or (kind == "none" and factor and factor != 1.0):
        rope |= {"rope_type": "linear", "factor": float(factor or 1.0)}
    elif kind == "yarn":
        rope |= _yarn(source, float(factor or 1.0))
    if (freqs := source.floats("rope_freqs.weight")) is not None:
        rope |= _scaled_freqs(source, freqs, rope["rope_theta"])
    long, short = source.floats("rope_factors_long.weight"), source.floats("rope_factors_short.weight")
    if long is not None and short is not None:
        rope |= _longrope(source, long, short)
    return rope


def _yarn(source: GGUFSource, factor: float) -> Config:
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    scaling = {name: source.get(f"rope.scaling.{key}") for key, name in names.items()}
    context = source.get("rope.scaling.original_context_length") or int(source.number("context_length") / factor)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": context,
        **{name: float(value) for name, value in scaling.items() if value is not None},
    }


def _scaled_freqs(source: GGUFSource, freqs: list[float], theta: float) -> Config:
    """A divisor per frequency. All known ones follow Llama 3's formula; anything else is listed number by number."""
    if all(abs(f - 1.0) < 1e-6 for f in freqs):
        return {}
    for context in (8192, source.get("rope.scaling.original_context_length") or 8192):
        llama3 = {
            "rope_type": "llama3",
            "factor": round(max(freqs), 4),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": context,
        }
        made = _llama3_divisors(llama3, theta, 2 * len(freqs))
        if all(abs(a - b) <= 1e-3 * max(a, b) for a, b in zip(made, freqs, strict=True)):
            return llama3
    return {
        "rope_type": "longrope",
        "short_factor": freqs,
        "long_factor": freqs,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": source.number("context_length"),
    }


def _llama3_divisors(rope: Config, theta: float, dim: int) -> list[float]:
    """The divisor of each frequency in Llama 3's scaling."""
    out = []
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    for i in range(0, dim, 2):
        wavelength = 2 * 3.141592653589793 * theta ** (i / dim)
        if wavelength < high:
            out.append(1.0)
        elif wavelength > low:
            out.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            out.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return out


def _longrope(source: GGUFSource, long: list[float], short: list[float]) -> Config:
    context = source.number("context_length")
    original = source.get("rope.scaling.original_context_length") or context
    scaling: Config = {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "factor": context / original,
        "original_max_position_embeddings": original,
    }
    if attention := source.get("rope.scaling.attn_factor"):
        scaling["attention_factor"] = float(attention)
    return scaling


# What families do beyond renaming keys


def _windows(pattern: int) -> Callable[[GGUFSource, Config], None]:
    """Every `pattern`-th layer has full attention, the others a window, if the file has one."""

    def finish(source: GGUFSource, config: Config) -> None:
        window = source.get("attention.sliding_window")
        config["sliding_window"] = window or None
        kinds = ["full_attention" if not window or (i + 1) % pattern == 0 else "sliding_attention"
                 for i in range(config["num_hidden_layers"])]  # fmt: skip
        config["layer_types"] = kinds

    return finish


def _llama(source: GGUFSource, config: Config) -> None:
    config["mlp_bias"] = source.has_in_layers("ffn_up.bias")
    if source.get("expert_count"):
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": source.number("expert_count"),
            "num_experts_per_tok": source.number("expert_used_count"),
            "sliding_window": None,
        }


def _ministral3(source: GGUFSource, config: Config) -> None:
    config["sliding_window"] = None
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if beta := source.get("attention.temperature_scale"):
        rope["llama_4_scaling_beta"] = _short(beta)


def _smollm3(source: GGUFSource, config: Config) -> None:
    layers = config["num_hidden_layers"]
    config["no_rope_layers"] = [0 if (i + 1) % 4 == 0 else 1 for i in range(layers)]
    config |= {"layer_types": ["full_attention"] * layers, "use_sliding_window": False, "sliding_window": None}


def _olmo2(source: GGUFSource, config: Config) -> None:
    if source.get("attention.sliding_window"):
        config |= {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
        _windows(4)(source, config)
        whole = config["rope_parameters"]
        plain = {"rope_type": "default", "rope_theta": whole["rope_theta"]}
        config["rope_parameters"] = {"full_attention": whole, "sliding_attention": plain}


def _qwen_window(source: GGUFSource, config: Config) -> None:
    config |= {"use_sliding_window": False, "sliding_window": None}
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]


def _sigmoid_experts(source: GGUFSource, config: Config) -> None:
    """Groups default to one, weights to unscaled; the gate is softmax unless the file specifies another."""
    config.setdefault("n_group", 1)
    config.setdefault("topk_group", 1)
    config["routed_scaling_factor"] = _short(float(source.get("expert_weights_scale") or 1.0))
    config["norm_topk_prob"] = bool(source.get("expert_weights_norm", False))
    config["scoring_func"] = "sigmoid" if source.get("expert_gating_func") == 2 else "softmax"


def _glm4_moe(source: GGUFSource, config: Config) -> None:
    _sigmoid_experts(source, config)
    config["use_qk_norm"] = source.has_in_layers("attn_q_norm.weight")


def _dots1(source: GGUFSource, config: Config) -> None:
    _sigmoid_experts(source, config)
    config |= {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}


def _deepseek(source: GGUFSource, config: Config) -> None:
    _sigmoid_experts(source, config)
    rotated = source.number("rope.dimension_count")
    keys = source.get("attention.key_length_mla") or source.number("attention.key_length")
    values = source.get("attention.value_length_mla") or source.number("attention.value_length")
    config |= {
        "q_lora_rank": source.get("attention.q_lora_rank") or None,
        "kv_lora_rank": source.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "qk_head_dim": keys,
        "v_head_dim": values,
        "head_dim": rotated,
        "num_key_value_heads": config["num_attention_heads"],
        "rope_interleave": True,
        "moe_layer_freq": 1,
    }
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn" and (log := source.get("rope.scaling.yarn_log_multiplier")):
        rope |= {"mscale": _short(10 * log), "mscale_all_dim": _short(10 * log)}
    if config["scoring_func"] == "sigmoid":
        config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "topk_method": "noaux_tc"}
    else:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"


def _gpt_oss(source: GGUFSource, config: Config) -> None:
    _windows(2)(source, config)
    config["intermediate_size"] = source.get("expert_feed_forward_length") or config["intermediate_size"]
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


def _gemma(pattern: int, large: int) -> Callable[[GGUFSource, Config], None]:
    """The file lacks the query scale: the largest model (by layers) has a different one."""

    def finish(source: GGUFSource, config: Config) -> None:
        _windows(pattern)(source, config)
        big = config["num_hidden_layers"] == large
        config["query_pre_attn_scalar"] = (
            config["hidden_size"] // config["num_attention_heads"] if big else config["head_dim"]
        )
        config["hidden_activation"] = "gelu_pytorch_tanh"

    return finish


def _gemma3(source: GGUFSource, config: Config) -> None:
    _gemma(6, 62)(source, config)
    local = {"rope_type": "default", "rope_theta": float(source.get("rope.freq_base_swa") or 10000.0)}
    config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    config.setdefault("attn_logit_softcapping", None)
    config.setdefault("final_logit_softcapping", None)


def _cohere(source: GGUFSource, config: Config) -> None:
    config["use_qk_norm"] = source.has_in_layers("attn_q_norm.weight")


def _phi3(source: GGUFSource, config: Config) -> None:
    rope = config["rope_parameters"]
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    config["original_max_position_embeddings"] = original
    config.setdefault("sliding_window", None)


def _starcoder2(source: GGUFSource, config: Config) -> None:
    config |= {"norm_epsilon": config.get("layer_norm_eps", 1e-5), "use_bias": _qkv_biases(source)}
    config.setdefault("sliding_window", None)


def _stablelm(source: GGUFSource, config: Config) -> None:
    config["qk_layernorm"] = source.has_in_layers("attn_q_norm.weight")
    config.setdefault("use_parallel_residual", not source.has_in_layers("ffn_norm.weight"))


def _nemotron(source: GGUFSource, config: Config) -> None:
    config |= {"norm_eps": config.get("layer_norm_eps", 1e-5), "mlp_bias": source.has_in_layers("ffn_up.bias")}


def _gpt2(source: GGUFSource, config: Config) -> None:
    config |= {
        "n_embd": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "n_positions": config["max_position_embeddings"],
        "n_inner": config["intermediate_size"],
        "layer_norm_epsilon": config.get("layer_norm_eps", 1e-5),
    }


def _bloom(source: GGUFSource, config: Config) -> None:
    config |= {
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "seq_length": config["max_position_embeddings"],
        "layer_norm_epsilon": config.get("layer_norm_eps", 1e-5),
    }


def _falcon(source: GGUFSource, config: Config) -> None:
    grouped = config["num_key_value_heads"] > 1
    two_norms = source.has_in_layers("attn_norm_2.weight")
    config |= {
        "num_kv_heads": config["num_key_value_heads"],
        "multi_query": not grouped,
        "new_decoder_architecture": grouped,
        "num_ln_in_parallel_attn": (2 if two_norms else 1) if grouped else None,
        "ffn_hidden_size": config["intermediate_size"],
        "layer_norm_epsilon": config.get("layer_norm_eps", 1e-5),
    }


_EXPERTS = {"expert_used_count": "num_experts_per_tok"}
_QWEN_EXPERTS = {
    **_EXPERTS,
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_ROUTED = {
    **_EXPERTS,
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
_LOCAL = {**_EXPERTS, "expert_count": "num_local_experts"}
_GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_TANH = {"hidden_act": "gelu_pytorch_tanh"}

FAMILIES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("LlamaForCausalLM", "llama", finish=_llama),
    "mistral3": GGUFArchitecture("Ministral3ForCausalLM", "ministral3", finish=_ministral3),
    "arcee": GGUFArchitecture("ArceeForCausalLM", "arcee", fixed={"hidden_act": "relu2", "mlp_bias": False}),
    "smollm3": GGUFArchitecture("SmolLM3ForCausalLM", "smollm3", fixed={"mlp_bias": False}, finish=_smollm3),
    "granite": GGUFArchitecture("GraniteForCausalLM", "granite", _GRANITE, {"mlp_bias": False}),
    "granitemoe": GGUFArchitecture("GraniteMoeForCausalLM", "granitemoe", {**_GRANITE, **_LOCAL}),
    "olmo": GGUFArchitecture("OlmoForCausalLM", "olmo", {"attention.clamp_kqv": "clip_qkv"}),
    "olmo2": GGUFArchitecture("Olmo2ForCausalLM", "olmo2", finish=_olmo2),
    "olmoe": GGUFArchitecture(
        "OlmoeForCausalLM", "olmoe", {**_EXPERTS, "expert_count": "num_experts"}, {"norm_topk_prob": False}
    ),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2", finish=_qwen_window, biases="qkv_bias"),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3", finish=_qwen_window),
    "qwen2moe": GGUFArchitecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        _QWEN_EXPERTS,
        {**_SPARSE, "norm_topk_prob": False},
        _qwen_window,
        "qkv_bias",
    ),
    "qwen3moe": GGUFArchitecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", _QWEN_EXPERTS, {**_SPARSE, "norm_topk_prob": True}, _qwen_window
    ),
    "command-r": GGUFArchitecture("CohereForCausalLM", "cohere", {"logit_scale": "logit_scale"}, finish=_cohere),
    "cohere2": GGUFArchitecture("Cohere2ForCausalLM", "cohere2", {"logit_scale": "logit_scale"}, finish=_windows(4)),
    "dots1": GGUFArchitecture("Dots1ForCausalLM", "dots1", _ROUTED, finish=_dots1),
    "glm4moe": GGUFArchitecture("Glm4MoeForCausalLM", "glm4_moe", _ROUTED, finish=_glm4_moe),
    "deepseek2": GGUFArchitecture("DeepseekV2ForCausalLM", "deepseek_v2", _ROUTED, finish=_deepseek),
    "gpt-oss": GGUFArchitecture(
        "GptOssForCausalLM", "gpt_oss", _LOCAL, {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}, _gpt_oss
    ),
    "gemma": GGUFArchitecture("GemmaForCausalLM", "gemma", fixed=_TANH),
    "gemma2": GGUFArchitecture("Gemma2ForCausalLM", "gemma2", _SOFTCAPS, _TANH, _gemma(2, 46)),
    "gemma3": GGUFArchitecture("Gemma3ForCausalLM", "gemma3_text", _SOFTCAPS, _TANH, _gemma3),
    "exaone4": GGUFArchitecture(
        "Exaone4ForCausalLM", "exaone4", fixed={"sliding_window_pattern": 4}, finish=_windows(4)
    ),
    "seed_oss": GGUFArchitecture(
        "SeedOssForCausalLM", "seed_oss", fixed={"attention_out_bias": False, "mlp_bias": False}
    ),
    "chatglm": GGUFArchitecture("GlmForCausalLM", "glm"),
    "glm4": GGUFArchitecture("Glm4ForCausalLM", "glm4"),
    "phi2": GGUFArchitecture(
        "PhiForCausalLM", "phi", fixed={"hidden_act": "gelu_new", "qk_layernorm": False}, biases=""
    ),
    "phi3": GGUFArchitecture("Phi3ForCausalLM", "phi3", _WINDOW, finish=_phi3),
    "starcoder2": GGUFArchitecture("Starcoder2ForCausalLM", "starcoder2", _WINDOW, _TANH, _starcoder2, ""),
    "stablelm": GGUFArchitecture(
        "StableLmForCausalLM",
        "stablelm",
        {"use_parallel_residual": "use_parallel_residual"},
        finish=_stablelm,
        biases="use_qkv_bias",
    ),
    "nemotron": GGUFArchitecture("NemotronForCausalLM", "nemotron", fixed={"hidden_act": "relu2"}, finish=_nemotron),
    "gpt2": GGUFArchitecture("GPT2LMHeadModel", "gpt2", fixed={"hidden_act": "gelu_new"}, finish=_gpt2, biases=""),
    "gptneox": GGUFArchitecture(
        "GPTNeoXForCausalLM", "gpt_neox", {"use_parallel_residual": "use_parallel_residual"}, {"hidden_act": "gelu"}
    ),
    "bloom": GGUFArchitecture(
        "BloomForCausalLM",
        "bloom",
        fixed={"hidden_act": "gelu", "apply_residual_connection_post_layernorm": False},
        finish=_bloom,
        biases="",
    ),
    "falcon": GGUFArchitecture(
        "FalconForCausalLM",
        "falcon",
        fixed={"activation": "gelu", "alibi": False, "parallel_attn": True, "bias": False},
        finish=_falcon,
        biases="",
    ),
}
