"""Architectures that transformers lacks, whose encoder one of its classes is, under other names.

In: the raw config.json. Out: the configuration of that class, and the names of the encoder's tensors in checkpoints, as
patterns, with those that the class has for them. The language model is declared elsewhere. Must not know: files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.checkpoint.limits import Range, check_numbers
from quire.schema.errors import CheckpointError

_MOST_PLACES = 4096  # in a row or column of an image
Equivalent = tuple[dict[str, Any], dict[str, str]]
_MOONVIT = ("patch_size", "num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size",
            "merge_kernel_size")  # fmt: skip


def _mapping(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} must be a mapping, not {value!r:.60}", param=name)
    return value


def _kimi_vl(raw: Mapping[str, Any]) -> Equivalent:
    """MoonViT with its projector is what Kimi-K2.5 has, which takes videos besides."""
    parts, text = (_mapping(raw, name) for name in ("vision_config", "text_config"))
    check_numbers(parts, {f"init_pos_emb_{side}": Range(1, _MOST_PLACES) for side in ("height", "width")})
    vision = {name: parts[name] for name in _MOONVIT if name in parts}
    for side in ("height", "width"):
        if (length := parts.get(f"init_pos_emb_{side}")) is not None:
            vision[f"pos_emb_{side}"] = length
    config = {
        "architectures": ["Kimi_K25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {"model_type": "deepseek_v3", **text},
        "vision_config": vision,
        "projection_hidden_size": vision.get("hidden_size", 1152),
        "tie_word_embeddings": False,
    }
    names = {
        r"^multi_modal_projector\.linear_1\.": "model.mm_projector.in_proj.",
        r"^multi_modal_projector\.linear_2\.": "model.mm_projector.out_proj.",
        r"^multi_modal_projector\.pre_norm\.": "model.mm_projector.pre_norm.",
    }
    return config, names


_EQUIVALENTS: dict[str, Callable[[Mapping[str, Any]], Equivalent]] = {"KimiVLForConditionalGeneration": _kimi_vl}


def equivalent_of(raw: Mapping[str, Any]) -> Equivalent:
    """Itself, where there is no other."""
    for name in raw.get("architectures") or ():
        if name in _EQUIVALENTS:
            return _EQUIVALENTS[name](raw)
    return dict(raw), {}
