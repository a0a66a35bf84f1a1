"""Sizes of the encoders of DeepSeek-VL2, DeepSeek-OCR and DeepSeek-OCR 2, out of an untrusted config.json: each is
checked before anything is made of it.

Must not know: modules, files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.checkpoint.limits import VOCAB, WIDTH, Range, check_numbers, shown
from quire.schema.errors import CheckpointError, NotBuiltError

_MOST_WEIGHTS = 1 << 33  # numbers in an encoder
_MOST_PLACES = 1 << 16  # patches of an image
_MOST_RATIO = 64
_SIZE, _COUNT = Range(1, 1 << 15), Range(1, 512)
# defaults of the released configuration classes
_VISION = {"image_size": 384, "patch_size": 16, "width": 1024, "layers": 24, "heads": 16, "mlp_ratio": 4}
_PROJECTOR = {"input_dim": 1152, "n_embed": 2048, "depth": 2, "mlp_ratio": 1, "downsample_ratio": 2}


def vl2_sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """vision_config and projector_config with every number, and where the whole image stands."""
    vision, projector = part_of(raw, "vision_config", _VISION), part_of(raw, "projector_config", _PROJECTOR)
    check_sizes(
        vision, {**dict.fromkeys(("image_size", "patch_size", "width"), _SIZE), "layers": _COUNT, "heads": _SIZE}
    )
    check_sizes(
        projector,
        {**dict.fromkeys(("input_dim", "n_embed"), _SIZE), "depth": Range(2, 16), "mlp_ratio": Range(1, _MOST_RATIO),
         "downsample_ratio": Range(1, _MOST_RATIO)},
    )  # fmt: skip
    _refuse_others(raw, vision, projector)
    ratio = vision["mlp_ratio"]
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= _MOST_RATIO:
        raise CheckpointError(
            f"mlp_ratio is {shown(ratio)}; expected a number above 0 and at most {_MOST_RATIO}", param="mlp_ratio"
        )
    check_fit(raw, "projector_config.n_embed", projector["n_embed"])
    _same("projector_config.input_dim", projector["input_dim"], "vision_config.width", vision["width"])
    check_heads("vision_config", vision["width"], vision["heads"])
    places = (vision["image_size"] // vision["patch_size"]) ** 2
    if not 1 <= places <= _MOST_PLACES:
        raise CheckpointError(
            f"vision_config: an image of {vision['image_size']} pixels has {places} patches of {vision['patch_size']}; "
            f"expected 1 to {_MOST_PLACES}",
            param="vision_config",
        )
    width, inner = vision["width"], projector["n_embed"] * projector["mlp_ratio"]
    check_weights(
        vision["layers"] * width * (4 * width + 2 * int(width * ratio))
        + (places + 3 * vision["patch_size"] ** 2) * width
        + width * projector["downsample_ratio"] ** 2 * inner
        + (projector["depth"] - 1) * inner * inner
    )
    return {"vision_config": vision, "projector_config": projector, "is_whole_first": _position(raw) == "head"}


# DeepSeek-OCR: what its code says of both encoders, whatever the configuration does
PATCH, _WINDOW, _NECK, _RATIO = 16, 14, 256, 4
_SAM = {"width": 768, "layers": 12, "heads": 12, "global_attn_indexes": [2, 5, 8, 11],
        "downsample_channels": [512, 1024]}  # fmt: skip
_CLIP = {"width": 1024, "layers": 24, "heads": 16, "image_size": 224, "patch_size": 14}


# of DeepSeek-OCR 2, which released configurations say of its second encoder: its width alone
_QWEN2 = {"dim": 896, "layers": 24, "heads": 14, "kv_heads": 2, "ffn_dim": 4864}
_OCR2_SIDE = 1024  # 256 and, for tiles, 144 vectors of their own are learned
_THETA = 1e6


def ocr_sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """sam_config as transformers' DeepSeek-OCR 2 has it, clip_config, and the projector's widths."""
    vision, sam = _sam(raw)
    clip = part_of(part_of(vision, "width", {}), "clip-l-14-224", _CLIP)
    projector = _projector(raw, "DeepSeek-OCR", {"input_dim": 2048, "n_embed": 1280})
    check_sizes(clip, {**_ENCODER, "image_size": _SIZE, "patch_size": _SIZE})
    channels = _channels(sam)
    _same("downsample_channels[1]", channels[1], "the width of clip-l-14-224", clip["width"])
    _same("projector_config.input_dim", projector["input_dim"], "the width of both encoders", 2 * clip["width"])
    check_heads("clip-l-14-224", clip["width"], clip["heads"])
    places = (clip["image_size"] // clip["patch_size"]) ** 2
    if not 1 <= places <= _MOST_PLACES:
        raise CheckpointError(f"clip-l-14-224 has {places} places; expected 1 to {_MOST_PLACES}", param="vision_config")
    check_weights(
        _sam_weights(sam, vision["image_size"], channels)
        + clip["layers"] * clip["width"] ** 2 * (4 + 2 * _RATIO)
        + places * clip["width"]
        + projector["input_dim"] * projector["n_embed"]
    )
    return {"sam_config": _about_sam(sam, vision["image_size"], channels),
            "clip_config": {**clip, "places": places, "mlp_ratio": _RATIO}, "projector_config": projector}  # fmt: skip


def ocr2_sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of transformers' DeepSeek-OCR 2, whose encoders these are."""
    vision, sam = _sam(raw)
    qwen2 = part_of(part_of(vision, "width", {}), "qwen2-0-5b", _QWEN2)
    check_sizes(qwen2, {**dict.fromkeys(("dim", "heads", "kv_heads", "ffn_dim"), _SIZE), "layers": _COUNT})
    projector = _projector(raw, "DeepSeek-OCR 2", {"input_dim": qwen2["dim"], "n_embed": 1280})
    check_heads("qwen2-0-5b", qwen2["dim"], qwen2["heads"])
    if qwen2["heads"] % qwen2["kv_heads"]:
        raise CheckpointError(
            f"qwen2-0-5b: {qwen2['heads']} heads are not a multiple of {qwen2['kv_heads']} kv_heads",
            param="vision_config",
        )
    _same("projector_config.input_dim", projector["input_dim"], "the width of qwen2-0-5b", qwen2["dim"])
    if vision["image_size"] != _OCR2_SIDE:
        raise NotBuiltError(
            f"DeepSeek-OCR 2 with image_size = {vision['image_size']} is not built: {_OCR2_SIDE} is", param="image_size"
        )
    channels = [_channels(sam)[0], qwen2["dim"]]  # whatever released files say of the second
    check_weights(
        _sam_weights(sam, vision["image_size"], channels)
        + qwen2["layers"] * qwen2["dim"] * (4 * qwen2["dim"] + 3 * qwen2["ffn_dim"])
        + projector["input_dim"] * projector["n_embed"]
    )
    encoder = {
        "hidden_size": qwen2["dim"], "num_hidden_layers": qwen2["layers"], "num_attention_heads": qwen2["heads"],
        "num_key_value_heads": qwen2["kv_heads"], "intermediate_size": qwen2["ffn_dim"], "vocab_size": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": _THETA},
    }  # fmt: skip
    text = part_of(raw, "language_config", {"hidden_size": projector["n_embed"], "vocab_size": 129280})
    check_sizes(text, {"hidden_size": WIDTH, "vocab_size": VOCAB})
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}  # of layers that are not made
    about_text = {**heads, **{name: text[name] for name in ("hidden_size", "vocab_size")}}
    sam_config = _about_sam(sam, vision["image_size"], channels)
    return {"vision_config": {"sam_config": sam_config, "encoder_config": encoder}, "text_config": about_text}


_ENCODER = {"width": _SIZE, "layers": _COUNT, "heads": _SIZE}


def _sam(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """vision_config, and what it says of Segment Anything."""
    vision = part_of(raw, "vision_config", {"image_size": 1024})
    check_sizes(vision, {"image_size": Range(PATCH, 4096)})
    sam = part_of(part_of(vision, "width", {}), "sam_vit_b", _SAM)
    check_sizes(sam, _ENCODER)
    check_heads("sam_vit_b", sam["width"], sam["heads"])
    return vision, sam


def _projector(raw: Mapping[str, Any], model: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    projector = part_of(raw, "projector_config", defaults)
    check_sizes(projector, {"input_dim": _SIZE, "n_embed": _SIZE})
    if (kind := projector.get("projector_type", "linear")) != "linear":
        raise NotBuiltError(f"{model} with projector_type = {shown(kind)} is not built: 'linear' is",
                            param="projector_type")  # fmt: skip
    check_fit(raw, "projector_config.n_embed", projector["n_embed"])
    return projector


def _channels(sam: Mapping[str, Any]) -> list[int]:
    channels = _whole_numbers(sam, "downsample_channels", _SIZE.most)
    if len(channels) != 2:
        raise CheckpointError(f"downsample_channels has {len(channels)} numbers; expected 2", param="vision_config")
    return channels


def _sam_weights(sam: Mapping[str, Any], side: int, channels: list[int]) -> int:
    grid = side // PATCH
    return (
        sam["layers"] * sam["width"] ** 2 * (4 + 2 * _RATIO)
        + (grid * grid + 4 * grid * sam["layers"]) * sam["width"]
        + 9 * (_NECK * channels[0] + channels[0] * channels[1])
    )


def _about_sam(sam: Mapping[str, Any], side: int, channels: list[int]) -> dict[str, Any]:
    return {
        "hidden_size": sam["width"], "num_hidden_layers": sam["layers"], "num_attention_heads": sam["heads"],
        "image_size": side, "patch_size": PATCH, "window_size": _WINDOW, "output_channels": _NECK,
        "mlp_ratio": float(_RATIO), "downsample_channels": channels,
        "global_attn_indexes": _whole_numbers(sam, "global_attn_indexes", _COUNT.most),
    }  # fmt: skip


def _whole_numbers(part: Mapping[str, Any], name: str, most: int) -> list[int]:
    values = part[name]
    is_fine = isinstance(values, list) and len(values) <= _COUNT.most
    if not is_fine or any(type(one) is not int or not 0 <= one <= most for one in values):
        raise CheckpointError(f"{name} is {shown(values)}; expected whole numbers up to {most}", param=name)
    return list(values)


def _refuse_others(raw: Mapping[str, Any], vision: Mapping[str, Any], projector: Mapping[str, Any]) -> None:
    """What the released code knows and no released checkpoint has."""
    parts: tuple[tuple[str, Any, Any], ...] = (
        ("projector_type", projector.get("projector_type", "downsample_mlp_gelu"), "downsample_mlp_gelu"),
        ("token_pooling", projector.get("token_pooling") or False, False),
        ("class_token", vision.get("class_token") or False, False),
        ("ignore_head", vision.get("ignore_head", True), True),
        ("tile_tag", raw.get("tile_tag", "2D"), "2D"),
    )
    for name, value, built in parts:
        if value != built:
            raise NotBuiltError(f"DeepSeek-VL2 with {name} = {shown(value)} is not built: {built!r} is", param=name)


def _position(raw: Mapping[str, Any]) -> str:
    where = raw.get("global_view_pos", "head")
    if where not in ("head", "tail"):
        raise CheckpointError(f"global_view_pos is {shown(where)}; expected head or tail", param="global_view_pos")
    return str(where)


def part_of(raw: Mapping[str, Any], name: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} must be a mapping, not {value!r:.60}", param=name)
    return {**defaults, **{key: one for key, one in value.items() if one is not None}}


def check_fit(raw: Mapping[str, Any], name: str, width: int) -> None:
    """Vectors are as wide as the language model."""
    text = part_of(raw, "language_config", {})
    _same(name, width, "language_config.hidden_size", text.get("hidden_size", width))


def _same(name: str, value: Any, other: str, expected: Any) -> None:
    if value != expected:
        raise CheckpointError(f"{name} is {shown(value)}, but {other} is {shown(expected)}", param=name)


def check_heads(name: str, width: int, heads: int) -> None:
    if width % heads:
        raise CheckpointError(f"{name}: a width of {width} is not a multiple of its {heads} heads", param=name)


def check_weights(num: int) -> None:
    if num > _MOST_WEIGHTS:
        raise CheckpointError(
            f"the configuration describes an encoder of {num} weights; the limit is {_MOST_WEIGHTS}",
            param="vision_config",
        )


def check_sizes(part: Mapping[str, Any], ranges: Mapping[str, Range]) -> None:
    """As for any configuration, but a list, which others have for layers of different sizes, is none."""
    for name in ranges:
        if isinstance(part[name], list):
            raise CheckpointError(f"{name} is {shown(part[name])}; expected {ranges[name]}", param=name)
    check_numbers(part, ranges)
