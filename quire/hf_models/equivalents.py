"""Architectures that transformers lacks, whose encoder one of its classes is, under other names, or a class of ours.

In: the raw config.json. Out: the configuration of that class, and the names of the encoder's tensors in checkpoints, as
patterns, with those that the class has for them. The language model is declared elsewhere. Must not know: files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.checkpoint.limits import Range, check_numbers
from quire.hf_models.minicpm_config import minicpmo_encoder, minicpmv_encoder
from quire.hf_models.phi4 import phi4mm_encoders
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


def _deepseek_vl2(raw: Mapping[str, Any]) -> Equivalent:
    """A class of ours, which needs no more than the sizes of its parts."""
    from quire.hf_models.deepseek_sizes import vl2_sizes  # lazy

    return {"architectures": ["DeepseekVLV2ForCausalLM"], **vl2_sizes(raw)}, {}


def _deepseek_ocr(raw: Mapping[str, Any]) -> Equivalent:
    """A class of ours around the SAM of transformers' DeepSeek-OCR 2."""
    from quire.hf_models.deepseek_sizes import ocr_sizes  # lazy

    old, new = r"^model\.sam_model\.", "model.sam_model."
    names = {
        rf"{old}blocks\.(\d+)\.norm1\.": rf"{new}layers.\1.layer_norm1.",
        rf"{old}blocks\.(\d+)\.norm2\.": rf"{new}layers.\1.layer_norm2.",
        rf"{old}blocks\.(\d+)\.attn\.": rf"{new}layers.\1.attn.",
        rf"{old}blocks\.(\d+)\.mlp\.": rf"{new}layers.\1.mlp.",
        rf"{old}patch_embed\.proj\.": f"{new}patch_embed.projection.",
        rf"{old}neck\.0\.": f"{new}neck.conv1.",
        rf"{old}neck\.1\.": f"{new}neck.layer_norm1.",
        rf"{old}neck\.2\.": f"{new}neck.conv2.",
        rf"{old}neck\.3\.": f"{new}neck.layer_norm2.",
        rf"{old}net_2\.": f"{new}proj.conv1.",
        rf"{old}net_3\.": f"{new}proj.conv2.",
    }
    return {"architectures": ["DeepseekOCRForCausalLM"], **ocr_sizes(raw)}, names


def _deepseek_ocr2(raw: Mapping[str, Any]) -> Equivalent:
    """transformers' class, whose loader knows the released names."""
    from quire.hf_models.deepseek_sizes import ocr2_sizes  # lazy

    kind = {"architectures": ["DeepseekOcr2ForConditionalGeneration"], "model_type": "deepseek_ocr2"}
    return {**kind, **ocr2_sizes(raw), "tie_word_embeddings": False}, {}


_EQUIVALENTS: dict[str, Callable[[Mapping[str, Any]], Equivalent]] = {
    "KimiVLForConditionalGeneration": _kimi_vl,
    "DeepseekVLV2ForCausalLM": _deepseek_vl2,
    "DeepseekOCRForCausalLM": _deepseek_ocr,
    "DeepseekOCR2ForCausalLM": _deepseek_ocr2,
    "MiniCPMV": minicpmv_encoder,
    "MiniCPMO": minicpmo_encoder,
    "Phi4MMForCausalLM": phi4mm_encoders,
}


def equivalent_of(raw: Mapping[str, Any]) -> Equivalent:
    """Itself, where there is no other."""
    for name in raw.get("architectures") or ():
        if name in _EQUIVALENTS:
            return _EQUIVALENTS[name](raw)
    return dict(raw), {}
