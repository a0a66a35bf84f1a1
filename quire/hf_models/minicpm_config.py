"""The encoder of MiniCPM-V up to 4.5 as a configuration of Idefics2, whose vision encoder it has.

In: the raw config.json. Out: numbers within bounds, of which the class in hf_models/minicpm.py is made. Must not know:
files, tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.checkpoint.limits import Range, check_numbers
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
