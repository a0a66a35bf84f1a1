"""ModelFacts: properties of a model, read once from its raw configuration under all the names of its fields.

In: the dict of a config.json (or the one gguf_config.py makes). Out: plain numbers and names.
The only reader of raw Hugging Face configurations outside models/.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.checkpoint.limits import INT32, check_config, shown
from quire.checkpoint.media import ITEMS, both_ways_of, encoder_reads_text, modalities_of
from quire.schema.errors import CheckpointError

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
_MEDIA_PARTS = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower")
_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length",
    "max_seq_length", "seq_len", "max_target_positions",
)  # fmt: skip
_STATE_LAYERS = frozenset({"mamba", "mamba2", "linear_attention", "recurrent", "conv", "hybrid"})
_STATE_TYPES = frozenset({
    "mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "bamba", "jamba", "falcon_h1", "granitemoehybrid", "nemotron_h",
    "zamba", "zamba2", "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
    "olmo_hybrid", "kimi_linear", "bailing_hybrid", "minimax", "recurrent_gemma", "plamo2",
})  # fmt: skip
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NO_ID = (1 << 32) - 1  # -1, written without a sign
_MOST_IDS = 4096  # of end-of-text or beginning-of-text tokens
_UNSTRETCHED = frozenset(
    {"default", "mrope", "longrope", "su", "llama3", "proportional"}
)  # the length already includes the scaling


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Plain numbers and names; 0, '' or () if the configuration has no value."""

    architectures: tuple[str, ...] = ()
    model_type: str = ""
    vocab_size: int = 0
    hidden_size: int = 0
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_size: int = 0
    max_positions: int = 0  # tokens the model can attend over, rope scaling included
    dtype: str = ""  # of the checkpoint
    sliding_window: int = 0
    layer_types: tuple[str, ...] = ()
    num_experts: int = 0
    quantization: str = ""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    is_encoder_decoder: bool = False
    encoder_reads_text: bool = False  # of an encoder-decoder: and not only media
    encoder_length: int = 0  # of an encoder-decoder: tokens that its encoder reads at most; 0: as many as the decoder
    decoder_start: int | None = None  # the first token of every text that its decoder writes
    forced_start: int | None = None  # the token that must follow it
    tie_word_embeddings: bool | None = None
    uses_mla: bool = False
    has_states: bool = False  # some layers have a recurrent state instead of keys and values
    is_multimodal: bool = False
    modalities: tuple[str, ...] = ()  # of media that the model takes
    both_ways: str = ""  # what attends to itself in both directions: "item", "items", "prompt" (checkpoint/media.py)

    @property
    def joins_media(self) -> bool:
        """All media items of a prompt attend to each other."""
        return self.both_ways == ITEMS

    @property
    def all_windowed(self) -> bool:
        """Every layer attends only to its window."""
        return self.sliding_window > 0 and "full_attention" not in self.layer_types


def read_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of a raw configuration. A number out of range is a CheckpointError that names its key."""
    text = text_part(config)
    for part in (config, text):
        check_config(part)
    heads = _number(text, "num_attention_heads", "n_head", "n_heads", "num_heads")
    hidden = _number(text, "hidden_size", "n_embd", "d_model", "model_dim")
    latent = _number(text, "qk_nope_head_dim") + _number(text, "qk_rope_head_dim")
    layers = tuple(str(kind) for kind in text.get("layer_types") or text.get("layers_block_type") or ())
    model_type = str(config.get("model_type") or text.get("model_type") or "")
    return ModelFacts(
        architectures=tuple(str(a) for a in config.get("architectures") or ()),
        model_type=model_type,
        vocab_size=_number(text, "vocab_size", "padded_vocab_size") or _number(config, "vocab_size"),
        hidden_size=hidden,
        num_layers=_number(text, *_DEPTHS),
        num_heads=heads,
        num_kv_heads=_kv_heads(text, heads),
        head_size=_number(text, "head_dim", "head_size") or latent or (hidden // heads if heads else 0),
        max_positions=max_positions(config),
        dtype=dtype_of(config),
        sliding_window=window_of(text),
        layer_types=layers,
        num_experts=_number(text, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        quantization=quantization_of(config),
        eos_token_ids=token_ids(_either(config, text, "eos_token_id")),
        bos_token_id=next(iter(token_ids(_either(config, text, "bos_token_id"))), None),
        pad_token_id=next(iter(token_ids(_either(config, text, "pad_token_id"))), None),
        is_encoder_decoder=bool(config.get("is_encoder_decoder", False)),
        encoder_reads_text=bool(config.get("is_encoder_decoder")) and encoder_reads_text(config),
        encoder_length=encoder_length(config),
        decoder_start=decoder_start(config),
        forced_start=next(iter(token_ids(_either(config, text, "forced_bos_token_id"))), None),
        tie_word_embeddings=_either(config, text, "tie_word_embeddings"),
        uses_mla=_number(text, "kv_lora_rank") > 0,
        has_states=model_type in _STATE_TYPES or not _STATE_LAYERS.isdisjoint(layers),
        modalities=modalities_of(config),
        both_ways=both_ways_of(config),
        is_multimodal=any(config.get(part) for part in _MEDIA_PARTS),
    )


def encoder_length(config: Mapping[str, Any]) -> int:
    """Of an encoder-decoder model with a table of positions."""
    if not config.get("is_encoder_decoder"):
        return 0
    return _number(text_part(config), "max_source_positions", "max_position_embeddings")


def with_starts(facts: ModelFacts, generation: Mapping[str, Any]) -> ModelFacts:
    """As generation_config.json says, which newer checkpoints have these in."""
    start, forced = (token_ids(generation.get(name)) for name in ("decoder_start_token_id", "forced_bos_token_id"))
    return replace(
        facts,
        decoder_start=start[0] if start else facts.decoder_start,
        forced_start=forced[0] if forced else facts.forced_start,
    )


def decoder_start(config: Mapping[str, Any]) -> int | None:
    """Of an encoder-decoder model; T5's decoders begin with padding, BART's with an end of text."""
    if not config.get("is_encoder_decoder"):
        return None
    text = text_part(config)
    names = ("decoder_start_token_id", "pad_token_id" if "d_kv" in text else "eos_token_id")
    return next((start for name in names for start in token_ids(_either(config, text, name))), None)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part: the configuration itself, or a sub-configuration of a multimodal model."""
    part = next((part for name in _TEXT_PARTS if isinstance(part := config.get(name), Mapping)), None)
    # A width alone is a projector's (Ultravox, PaliGemma, Ovis2).
    if part is None or all(any(config.get(name) for name in names) for names in (_WIDTHS, _DEPTHS)):
        return config
    return text_part(part)


def max_positions(config: Mapping[str, Any]) -> int:
    """The smallest length in the configuration, extended by its rope scaling; 0 if there is none."""
    text = text_part(config)
    named = [n for key in _LENGTHS if 0 < (n := _number(text, key)) < 1 << 40]  # some say "no limit" with 1e30
    if not named:
        return 0
    length = min(named)
    rope = rope_of(text)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind in _UNSTRETCHED or "gemma3" in str(text.get("model_type", "")):
        return length
    factor = rope.get("factor")
    if not isinstance(factor, int | float) or not 0 < factor < math.inf:
        return length
    if kind == "yarn":
        length = _number(rope, "original_max_position_embeddings") or length
    return min(int(length * factor), 1 << 62)


def rope_of(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """rope_parameters (or the older rope_scaling); those of full attention if they differ by layer type."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return {}
    full = rope.get("full_attention")
    return full if isinstance(full, Mapping) else rope


def window_of(text: Mapping[str, Any]) -> int:
    """Tokens of the sliding window; 0 if there is none or it is disabled."""
    if text.get("use_sliding_window") is False:
        return 0
    kinds = text.get("layer_types")
    if kinds and "sliding_attention" not in kinds:
        return 0
    return _number(text, "sliding_window")


def dtype_of(config: Mapping[str, Any]) -> str:
    """The dtype from dtype or torch_dtype, with or without 'torch.'."""
    text = text_part(config)
    dtype = _either(config, text, "dtype") or _either(config, text, "torch_dtype")
    return str(dtype).removeprefix("torch.") if isinstance(dtype, str) and dtype != "auto" else ""


def quantization_of(config: Mapping[str, Any]) -> str:
    """The quantization method a checkpoint declares, '' if none."""
    text = text_part(config)
    for key in ("quantization_config", "compression_config"):
        quantization = _either(config, text, key)
        if isinstance(quantization, Mapping):
            default = "compressed-tensors" if key == "compression_config" else ""
            return str(quantization.get("quant_method") or default).lower()
    return ""


def token_ids(value: Any) -> tuple[int, ...]:
    """A token id, a list of them, or nothing -> a tuple without duplicates and None."""
    items = [item for item in (value if isinstance(value, list | tuple) else [value]) if item != _NO_ID]
    if len(items) > _MOST_IDS or any(isinstance(item, int) and item > INT32 for item in items):
        raise CheckpointError(
            f"the model's configuration gives the token ids {shown(value)}; expected at most {_MOST_IDS}, from 0 to "
            f"{INT32}"
        )
    return tuple(dict.fromkeys(i for i in items if isinstance(i, int) and not isinstance(i, bool) and i >= 0))


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    if text.get("multi_query") is True and not text.get("new_decoder_architecture"):
        return 1  # whatever else is said: of Falcon, that there are as many as heads
    return _number(text, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num") or heads


def _either(config: Mapping[str, Any], text: Mapping[str, Any], key: str) -> Any:
    return text.get(key) if config.get(key) is None else config.get(key)


def _number(config: Mapping[str, Any], *names: str) -> int:
    """The first of these keys that has a value, as an integer; 0 if none does."""
    for name in names:
        value = config.get(name)
        if value is None or value is False:
            continue
        if isinstance(value, list) and value:  # per layer: the largest
            value = (
                max(v for v in value if isinstance(v, int | float))
                if all(isinstance(v, int | float) for v in value)
                else value
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value < 0:
            raise CheckpointError(f"the model's configuration says {name}={value!r}; expected a number", param=name)
        return int(value) if value < 1 << 62 else 1 << 62
    return 0
