"""The encoders of MiniCPM-V up to 4.5 and MiniCPM-o as a configuration of Idefics2, whose vision encoder they have.

In: the raw config.json. Out: numbers within bounds, of which the class in hf_models/minicpm.py is made. Must not know:
files, tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.checkpoint.limits import Range, check_numbers, shown
from quire.checkpoint.minicpm import release_of
from quire.schema.errors import CheckpointError, ConfigError

HEAD = 128  # numbers of a head that resamples
_VISION = {
    "hidden_size": 1152, "image_size": 980, "intermediate_size": 4304, "num_attention_heads": 16,
    "num_hidden_layers": 27, "patch_size": 14,
}  # fmt: skip
_QUERIES = 64
_RANGES = {
    "hidden_size": Range(1, 1 << 16),
    "intermediate_size": Range(1, 1 << 18),
    "num_attention_heads": Range(1, 1 << 10),
    "num_hidden_layers": Range(1, 1 << 10),
    "patch_size": Range(1, 1 << 8),
    "image_size": Range(1, 1 << 14),
}
_MOST_WEIGHTS = 1 << 33
# MiniCPM-o: Whisper's encoder
_AUDIO = {
    "d_model": 1024, "encoder_layers": 24, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "num_mel_bins": 80,
    "max_source_positions": 1500,
}  # fmt: skip
_AUDIO_RANGES = {
    "d_model": Range(1, 1 << 16), "encoder_layers": Range(1, 1 << 10), "encoder_attention_heads": Range(1, 1 << 10),
    "encoder_ffn_dim": Range(1, 1 << 18), "num_mel_bins": Range(1, 1 << 10), "max_source_positions": Range(1, 1 << 16),
}  # fmt: skip
_PER_SECOND = 50  # positions of the encoder
_LONGEST_CHUNK = 3600.0  # seconds


def minicpmv_encoder(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The configuration, and no names: tensors are named as in checkpoints."""
    own = raw.get("vision_config") or {}
    if not isinstance(own, Mapping):
        raise CheckpointError(f"vision_config must be a mapping, not {own!r:.60}", param="vision_config")
    vision = {name: own[name] if own.get(name) is not None else default for name, default in _VISION.items()}
    check_numbers(vision, _RANGES)
    width: Any = raw.get("hidden_size")
    queries = raw.get("query_num")
    queries = _QUERIES if queries is None else queries
    check_numbers({"hidden_size": width or 0, "query_num": queries},
                  {"hidden_size": Range(1, 1 << 16), "query_num": Range(1, 1 << 12)})  # fmt: skip
    _check_divisors(vision, width)
    if raw.get("drop_vision_last_layer", True):
        vision["num_hidden_layers"] = max(1, vision["num_hidden_layers"] - 1)
    _check_weights(vision, width)
    config = {
        "architectures": ["MiniCPMV"],
        "model_type": "idefics2",
        "vision_config": vision,
        "text_config": {"model_type": "mistral", "hidden_size": width, "vocab_size": 1, "num_hidden_layers": 0},
        "perceiver_config": {"hidden_size": width, "resampler_n_latents": queries},
        "places_in_a_row": release_of(raw) == "2.5",
        "tie_word_embeddings": False,
    }
    return config, {}


def minicpmo_encoder(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """With what hears; nothing of what speaks."""
    config, names = minicpmv_encoder(raw)
    own = raw.get("audio_config") or {}
    if not isinstance(own, Mapping):
        raise CheckpointError(f"audio_config must be a mapping, not {own!r:.60}", param="audio_config")
    audio = {name: own[name] if own.get(name) is not None else default for name, default in _AUDIO.items()}
    for name, value in audio.items():
        if type(value) is not int:
            raise CheckpointError(f"{name} is {shown(value)}; expected {_AUDIO_RANGES[name]}", param=name)
    check_numbers(audio, _AUDIO_RANGES)
    width, heads = audio["d_model"], audio["encoder_attention_heads"]
    if width % heads:
        raise ConfigError(f"d_model = {width} of audio_config is not a multiple of its {heads} heads",
                          param="audio_config", value=width)  # fmt: skip
    total = audio["encoder_layers"] * width * (4 * width + 2 * audio["encoder_ffn_dim"])
    if total > _MOST_WEIGHTS:
        raise CheckpointError(
            f"audio_config describes an encoder of {total} weights; the limit is {_MOST_WEIGHTS}", param="audio_config"
        )
    step, seconds = raw.get("audio_pool_step", 2), raw.get("audio_chunk_length", 1.0)
    check_numbers({"audio_pool_step": step}, {"audio_pool_step": Range(1, 64)})
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 1 / _PER_SECOND <= seconds <= _LONGEST_CHUNK:
        raise CheckpointError(
            f"audio_chunk_length is {shown(seconds)}; expected seconds from {1 / _PER_SECOND} to {_LONGEST_CHUNK:g}",
            param="audio_chunk_length",
        )
    more = {"architectures": ["MiniCPMO"], "hearing": audio, "pool_step": int(step)}
    return {**config, **more, "chunk_places": int(seconds * _PER_SECOND)}, names


def _check_divisors(vision: Mapping[str, int], width: Any) -> None:
    if width % HEAD:
        raise ConfigError(f"hidden_size = {width} is not a multiple of {HEAD}", param="hidden_size", value=width)
    size, heads = vision["hidden_size"], vision["num_attention_heads"]
    if size % heads:
        raise ConfigError(f"hidden_size = {size} of vision_config is not a multiple of its {heads} heads",
                          param="vision_config", value=size)  # fmt: skip
    if vision["image_size"] < vision["patch_size"]:
        raise ConfigError(f"image_size = {vision['image_size']} of vision_config is less than a patch",
                          param="vision_config", value=vision["image_size"])  # fmt: skip


def _check_weights(vision: Mapping[str, int], width: int) -> None:
    size = vision["hidden_size"]
    layers = vision["num_hidden_layers"] * size * (4 * size + 2 * vision["intermediate_size"])
    places = (vision["image_size"] // vision["patch_size"]) ** 2 * size + 3 * vision["patch_size"] ** 2 * size
    total = layers + places + width * (5 * width + size)
    if total > _MOST_WEIGHTS:
        raise CheckpointError(
            f"the encoder of this configuration has {total} weights; the limit is {_MOST_WEIGHTS}",
            param="vision_config", value=total,
        )  # fmt: skip
