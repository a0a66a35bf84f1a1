"""Language models within models that take media: which part of the configuration is theirs, and their weights' names.

The tower and whatever projects its output are not declared here: they make vectors of the language model's width
(hf_models/towers.py), which stand in place of token embeddings. So a declaration is that of the language model, read
from its own part of the configuration, with the names that checkpoints of the whole give to its weights; all other
weights are the tower's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.base.registry import Registry
from quire.models.arch import Arch, with_rope
from quire.models.view import View
from quire.models.zoo.defaults import DEFAULTS
from quire.schema.errors import ConfigError

if TYPE_CHECKING:
    from quire.layers.modality_tokens import ModalityTokensKind

# model_type of the language model's part -> its declaration
TEXT_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phi4_multimodal": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "aria_text": "AriaTextForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm4v_moe": "Glm4MoeForCausalLM",
    "glm_ocr_text": "Glm4ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "exaone4_5_text": "Exaone4ForCausalLM",
    "paddleocr_vl_text": "LlamaForCausalLM",
    "paddleocr_vl": "LlamaForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
# those that occur within such models only
OWN_TYPES = Registry(
    "language model",
    {
        "deepseek_ocr2_text": "quire.models.zoo.deepseek:deepseek_ocr",
        "molmo": "quire.models.zoo.olmo:molmo",
        "deepseek_vl2_text": "quire.models.zoo.deepseek:deepseek_vl2",
        "molmo2_text": "quire.models.zoo.olmo:molmo2_text",
        **dict.fromkeys(("minicpmv", "minicpmo"), "quire.models.zoo.minicpm:minicpmv"),
        "phi4mm": "quire.models.zoo.phi:phi4mm",
    },
)
# of architectures whose language model has no type of its own
_OF_ARCHITECTURE = dict.fromkeys(
    ("DeepseekVLV2ForCausalLM", "DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM"), "deepseek_vl2_text"
)
# what these language models do whatever their configuration says of it
_FIXED: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "glm4v_text": {"attention_bias": True},
    "glm_ocr_text": {"attention_bias": False},
}
# of its configuration classes
_GEMMA3N: dict[str, dict[str, Any]] = {
    "vision_config": dict(vocab_offset=262144, vocab_size=128, hidden_size=2048, rms_norm_eps=1e-6),
    "audio_config": dict(vocab_offset=262272, vocab_size=128, hidden_size=1536, rms_norm_eps=1e-6),
}
_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
# what checkpoints put before the names of the language model's weights
NAMES = (
    (r"^(?:model\.)?language_model\.(?:model\.)*lm_head\.", "lm_head."),
    # as transformers writes Kimi-K2.5 and Qianfan-OCR, though it reads layers too
    (r"^(?:model\.)?language_model\.(?:model\.)*(?:blocks|encoder\.layers)\.", "model.layers."),
    (r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)*", "model."),
)
# of the tower, and of what stands between it and the language model
TOWER = (
    r"^(?:model\.)?(?:vision_tower|vision_backbone|visual|vision_model|vision_encoder|vision_projection|vision_embed_tokens|video_tower|"
    r"visual_embeddings_table|embed_tokens_extend|sam_model|qwen2_model|view_sep[ae]rator|"
    r"image_tower|image_newline|multi_modal_projector|connector|aligner|audio_tower|encoder|projector|mm_projector|"
    r"merger|mlp_AR|mlp1|high_res_[a-z_]+|vqmodel|generation_[a-z]+|embed_(?:vision|audio)\.soft_embedding_norm)(?:\.|$)"
)


def composite(c: View) -> Arch:
    from quire.models.zoo import ZOO  # lazy: the table that this function is in

    text = text_of(c)
    own = (_OF_ARCHITECTURE[name] for name in c.maybe("architectures") or () if name in _OF_ARCHITECTURE)
    kind = next(own, str(text.get("model_type") or "llama"))
    if kind not in TEXT_TYPES and kind not in OWN_TYPES:
        raise ConfigError(f"a language model of type {kind!r} within a model that takes media is not declared",
                          param="text_config", value=kind)  # fmt: skip
    name = TEXT_TYPES.get(kind, kind)
    fixed = _FIXED.get(kind, {})
    if kind == "glm4v_text" or (kind == "glm_ocr_text" and not text.get("head_dim")):  # heads divide the width
        fixed = {**fixed, "head_dim": int(text["hidden_size"]) // int(text["num_attention_heads"])}
    declare = (ZOO if kind in TEXT_TYPES else OWN_TYPES).get(name)
    arch: Arch = declare(View({**text, **fixed}, DEFAULTS.get(name, {}), name))
    tie = c.maybe("tie_word_embeddings")
    sections = _sections(text)
    if sections:
        arch = with_rope(arch, sections=sections, interleaved=kind.startswith("qwen3"))
    deep = (c.maybe("vision_config") or {}).get("deepstack_visual_indexes") or ()
    return replace(
        arch,
        deepstack=len(deep),
        modality_tokens=_gemma3n_tokens(c, arch) if kind == "gemma3n_text" else (),
        names=(*NAMES, *arch.names),
        ignore=(*arch.ignore, TOWER),
        tie=arch.tie if tie is None or arch.input_only else bool(tie),
    )


def text_of(c: View) -> Mapping[str, Any]:
    """The language model's part; older checkpoints of some families have it at the top."""
    for part in _PARTS:
        if isinstance(text := c.maybe(part), Mapping):
            return text
    return c.raw


def _sections(text: Mapping[str, Any]) -> tuple[int, ...]:
    """M-RoPE: frequencies that turn by time, height and width."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return tuple(rope.get("mrope_section") or ())


def _gemma3n_tokens(c: View, arch: Arch) -> tuple[ModalityTokensKind, ...]:
    """The last ids of the vocabulary: those of images, then those of audio."""
    from quire.layers.modality_tokens import ModalityTokensKind  # lazy

    vision, audio = ({**_GEMMA3N[part], **(c.maybe(part) or {})} for part in _GEMMA3N)
    ends = audio["vocab_offset"], arch.vocab
    return tuple(
        ModalityTokensKind(
            f"model.embed_{name}", part["vocab_offset"], end, part["vocab_size"], part["hidden_size"],
            part["rms_norm_eps"],
        )
        for name, part, end in zip(("vision", "audio"), (vision, audio), ends, strict=True)
    )  # fmt: skip
