"""The encoders of Phi-4-multimodal as its own repository configures and names them (Phi4MMForCausalLM), which are those
of transformers' Phi-4-multimodal.

In: the raw config.json. Out: numbers within bounds, of which that class is made, and the names of its tensors. What the
released code knows and that class does not is refused by name. Must not know: files, tensors, the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.checkpoint.limits import VOCAB, WIDTH, Range, check_numbers, shown
from quire.schema.errors import CheckpointError, NotBuiltError

_SIZE, _COUNT = Range(1, 1 << 16), Range(1, 1 << 10)
_MOST_WEIGHTS = 1 << 33
# of the image encoder, which released configurations do not describe: img_processor is null
_VISION = {
    "hidden_size": 1152, "image_size": 448, "intermediate_size": 4304, "num_attention_heads": 16,
    "num_hidden_layers": 27, "patch_size": 14,
}  # fmt: skip
_VISION_RANGES = {
    "hidden_size": _SIZE, "intermediate_size": Range(1, 1 << 18), "num_attention_heads": _COUNT,
    "num_hidden_layers": _COUNT, "patch_size": Range(1, 1 << 8), "image_size": Range(1, 1 << 13),
}  # fmt: skip
# name in audio_processor.config -> name in transformers
_AUDIO = {
    "attention_dim": "hidden_size", "attention_heads": "num_attention_heads", "linear_units": "intermediate_size",
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel", "num_blocks": "num_blocks",
    "ext_pw_out_channel": "ext_pw_out_channel", "depthwise_multiplier": "depthwise_multiplier",
    "kernel_size": "kernel_size", "input_size": "input_size", "time_reduction": "time_reduction",
}  # fmt: skip
_AUDIO_RANGES = {
    **dict.fromkeys(("attention_dim", "depthwise_seperable_out_channel", "ext_pw_out_channel", "input_size"), _SIZE),
    **dict.fromkeys(("attention_heads", "num_blocks", "depthwise_multiplier", "kernel_size"), _COUNT),
    "linear_units": Range(1, 1 << 18), "time_reduction": Range(2, 1 << 6),
}  # fmt: skip
_ACTIVATIONS = ("activation", "conv_activation", "conv_glu_type")
_SWISH = "swish"
_TEXT = ("hidden_size", "vocab_size", "tie_word_embeddings")

_OLD, _NEW = r"^model\.embed_tokens_extend\.", "model.embed_tokens_extend."
# of a block of the audio encoder. transformers' loader knows one group of a pattern
_BLOCK = {
    **{rf"feed_forward_{side}\.net\.0\.linear": f"feed_forward_{side}.gate_up_proj" for side in ("in", "out")},
    **{rf"feed_forward_{side}\.net\.2": f"feed_forward_{side}.down_proj" for side in ("in", "out")},
    **{rf"self_attn\.linear_{one}": f"self_attn.{one}_proj" for one in "qkv"},
    r"self_attn\.linear_out": "self_attn.o_proj",
}
_BLOCK_OLD, _BLOCK_NEW = rf"{_OLD}audio_embed\.encoder\.encoders\.(\d+)\.", rf"{_NEW}audio_embed.encoder.encoders.\1."
_NAMES = {
    rf"{_OLD}image_embed\.img_projection\.0\.": f"{_NEW}image_embed.img_projection_up.",
    rf"{_OLD}image_embed\.img_projection\.2\.": f"{_NEW}image_embed.img_projection_down.",
    rf"{_OLD}image_embed\.glb_GN$": f"{_NEW}image_embed.global_img_feature_extensor",
    rf"{_OLD}image_embed\.sub_GN$": f"{_NEW}image_embed.sub_img_feature_extensor",
    rf"{_OLD}audio_embed\.audio_projection\.speech\.0\.": f"{_NEW}audio_embed.up_proj_for_speech.",
    rf"{_OLD}audio_embed\.audio_projection\.speech\.2\.": f"{_NEW}audio_embed.down_proj_for_speech.",
    rf"{_OLD}audio_embed\.audio_projection\.vision\.0\.": f"{_NEW}audio_embed.up_proj_for_vision_speech.",
    rf"{_OLD}audio_embed\.audio_projection\.vision\.2\.": f"{_NEW}audio_embed.down_proj_for_vision_speech.",
    **{rf"{_BLOCK_OLD}{old}\.": rf"{_BLOCK_NEW}{new}." for old, new in _BLOCK.items()},
}


def phi4mm_encoders(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The configuration of transformers' class, and names."""
    layers = _part(raw, "embd_layer")
    image, audio = (_part(layers, name) for name in ("image_embd_layer", "audio_embd_layer"))
    _refuse_others("image_embd_layer", image, {
        "projection_cls": "mlp", "hd_transform_order": "sub_glb", "use_hd_transform": True,
        "with_learnable_separator": True, "image_token_compression_cls": "avg_pool_2d",
    })  # fmt: skip
    _refuse_others("audio_embd_layer", audio, {
        "projection_cls": "mlp", "use_qformer": False, "use_conv_downsample": False, "downsample_rate": 1,
    })  # fmt: skip
    _check(raw, {"hidden_size": WIDTH, "vocab_size": VOCAB})
    vision, speech = _vision(raw, image), _audio(raw)
    _check_weights(vision, speech)
    config = {
        "architectures": ["Phi4MultimodalForCausalLM"],
        "model_type": "phi4_multimodal",
        "pad_token_id": 0,  # any within the vocabulary
        **{name: raw[name] for name in _TEXT if raw.get(name) is not None},
        "vision_config": vision,
        "audio_config": speech,
    }
    return config, _NAMES


def _vision(raw: Mapping[str, Any], image: Mapping[str, Any]) -> dict[str, Any]:
    own = _part(raw, "img_processor")
    _refuse_others("img_processor", own, {"layer_idx": -2, "type_feature": "patch"})
    vision = {name: own[name] if own.get(name) is not None else default for name, default in _VISION.items()}
    _check(vision, _VISION_RANGES)
    crop = image.get("crop_size", vision["image_size"])
    if crop != vision["image_size"]:
        raise CheckpointError(
            f"crop_size of image_embd_layer is {shown(crop)}; the encoder reads {vision['image_size']} pixels",
            param="embd_layer",
        )
    _check_heads("img_processor", vision["hidden_size"], vision["num_attention_heads"])
    if vision["image_size"] < 2 * vision["patch_size"]:
        raise CheckpointError(
            f"img_processor: an image of {vision['image_size']} pixels has fewer than two patches of "
            f"{vision['patch_size']} along a side",
            param="img_processor",
        )
    return {**vision, "crop_size": crop}


def _audio(raw: Mapping[str, Any]) -> dict[str, Any]:
    processor = _part(raw, "audio_processor")
    _refuse_others("audio_processor", processor, {"name": "cascades"})
    own = _part(processor, "config")
    bias = _part(own, "relative_attention_bias_args")
    _refuse_others("audio_processor.config", own, {
        "input_layer": "nemo_conv", "causal": True, "batch_norm": False, "bias_in_glu": True, "cnn_layer_norm": True,
        "ext_pw_kernel_size": 1, "chunk_size": -1, **dict.fromkeys(_ACTIVATIONS, _SWISH),
    })  # fmt: skip
    _refuse_others("relative_attention_bias_args", bias, {"type": "t5", "t5_bias_symmetric": False})
    _check(own, _AUDIO_RANGES)
    channels, distance = _part(own, "nemo_conv_settings").get("conv_channels"), bias.get("t5_bias_max_distance")
    _check({"conv_channels": channels, "t5_bias_max_distance": distance},
           {"conv_channels": _SIZE, "t5_bias_max_distance": Range(1, 1 << 20)})  # fmt: skip
    if (factor := own.get("time_reduction") or 8) & (factor - 1):
        raise CheckpointError(f"time_reduction is {factor}; expected a power of two", param="audio_processor")
    made = {new: own[old] for old, new in _AUDIO.items() if own.get(old) is not None}
    more = {"nemo_conv_channels": channels, "bias_max_distance": distance}
    made |= {name: value for name, value in more.items() if value is not None}
    _check_heads("audio_processor.config", made.get("hidden_size", 1024), made.get("num_attention_heads", 16))
    return made


def _part(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"{name} must be a mapping, not {shown(value)}", param=name)
    return value or {}


def _check(part: Mapping[str, Any], ranges: Mapping[str, Range]) -> None:
    """As for any configuration, but a list, which others have for layers of different sizes, is none."""
    for name, allowed in ranges.items():
        if (value := part.get(name)) is not None and type(value) is not int:
            raise CheckpointError(f"{name} is {shown(value)}; expected {allowed}", param=name)
    check_numbers(part, ranges)


def _check_weights(vision: Mapping[str, int], speech: Mapping[str, int]) -> None:
    """Of the layers, which are nearly all."""
    size, width = vision["hidden_size"], speech.get("hidden_size", 1024)
    inner = 4 * width + 6 * speech.get("intermediate_size", 1536) + 6 * speech.get("ext_pw_out_channel", 1024)
    total = vision["num_hidden_layers"] * size * (4 * size + 2 * vision["intermediate_size"])
    total += (vision["image_size"] // vision["patch_size"]) ** 2 * size + speech.get("num_blocks", 24) * width * inner
    if total > _MOST_WEIGHTS:
        raise CheckpointError(
            f"the configuration describes encoders of {total} weights; the limit is {_MOST_WEIGHTS}", param="model"
        )


def _check_heads(name: str, width: int, heads: int) -> None:
    if width % heads:
        raise CheckpointError(f"{name}: a width of {width} is not a multiple of its {heads} heads", param=name)


def _refuse_others(place: str, part: Mapping[str, Any], built: Mapping[str, Any]) -> None:
    for name, expected in built.items():
        if (value := part.get(name)) is not None and value != expected:
            raise NotBuiltError(
                f"Phi-4-multimodal with {name} = {shown(value)} in {place} is not built: {expected!r} is", param=name
            )
