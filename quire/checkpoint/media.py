"""Which architectures take media, and of which kinds: what both sides must know of a model before it is loaded.

In: the raw configuration. Out: names of modalities. How an item is processed, and how it becomes vectors, is known
elsewhere; an architecture that is not here takes text only, whatever its configuration has parts for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IMAGE, VIDEO, AUDIO = "image", "video", "audio"
MODALITIES: dict[str, tuple[str, ...]] = {
    "LlavaForConditionalGeneration": (IMAGE,),
    "VipLlavaForConditionalGeneration": (IMAGE,),
    "LlavaNextForConditionalGeneration": (IMAGE,),
    "LlavaOnevisionForConditionalGeneration": (IMAGE, VIDEO),
    "Qwen2VLForConditionalGeneration": (IMAGE, VIDEO),
    "Qwen2_5_VLForConditionalGeneration": (IMAGE, VIDEO),
    "Qwen3VLForConditionalGeneration": (IMAGE, VIDEO),
    "Qwen3VLMoeForConditionalGeneration": (IMAGE, VIDEO),
    "Glm4vForConditionalGeneration": (IMAGE, VIDEO),
    "Glm4vMoeForConditionalGeneration": (IMAGE, VIDEO),
    "Glm46VForConditionalGeneration": (IMAGE, VIDEO),
    "GlmOcrForConditionalGeneration": (IMAGE,),
    "Qwen3_5ForConditionalGeneration": (IMAGE, VIDEO),
    "Qwen3_5MoeForConditionalGeneration": (IMAGE, VIDEO),
    "Exaone4_5_ForConditionalGeneration": (IMAGE,),
    "PaddleOCRVLForConditionalGeneration": (IMAGE,),
    "VideoLlama3ForConditionalGeneration": (IMAGE,),
    "Kimi_K25ForConditionalGeneration": (IMAGE,),
    "KimiVLForConditionalGeneration": (IMAGE,),
    "DeepseekVLV2ForCausalLM": (IMAGE,),
    "DeepseekOCRForCausalLM": (IMAGE,),
    "DeepseekOCR2ForCausalLM": (IMAGE,),  # under the names of its own repository
    "QianfanOCRForConditionalGeneration": (IMAGE,),
    "Idefics2ForConditionalGeneration": (IMAGE,),
    "MiniCPMV4_6ForConditionalGeneration": (IMAGE, VIDEO),
    "MiniCPMOcrForConditionalGeneration": (IMAGE, VIDEO),
    "MiniCPMV4_7ForConditionalGeneration": (IMAGE, VIDEO),
    "MiniCPMV": (IMAGE, VIDEO),
    "MiniCPMO": (IMAGE, VIDEO, AUDIO),
    "JanusForConditionalGeneration": (IMAGE,),
    "DeepseekVLHybridForConditionalGeneration": (IMAGE,),
    "Idefics3ForConditionalGeneration": (IMAGE,),
    "SmolVLMForConditionalGeneration": (IMAGE,),
    "InternVLForConditionalGeneration": (IMAGE, VIDEO),
    "Mistral3ForConditionalGeneration": (IMAGE,),
    "AyaVisionForConditionalGeneration": (IMAGE,),
    "Cohere2VisionForConditionalGeneration": (IMAGE,),
    "AriaForConditionalGeneration": (IMAGE,),
    "GotOcr2ForConditionalGeneration": (IMAGE,),
    "VideoLlavaForConditionalGeneration": (IMAGE,),
    "LlavaNextVideoForConditionalGeneration": (IMAGE, VIDEO),
    "DeepseekVLForConditionalGeneration": (IMAGE,),
    "DeepseekOcr2ForConditionalGeneration": (IMAGE,),
    "Lfm2VlForConditionalGeneration": (IMAGE,),
    "Llama4ForConditionalGeneration": (IMAGE,),
    "FuyuForCausalLM": (IMAGE,),
    "LightOnOcrForConditionalGeneration": (IMAGE,),
    "Gemma3ForConditionalGeneration": (IMAGE,),
    "Gemma3nForConditionalGeneration": (IMAGE, AUDIO),
    "PaliGemmaForConditionalGeneration": (IMAGE,),
    "Ovis2ForConditionalGeneration": (IMAGE,),
    "PerceptionLMForConditionalGeneration": (IMAGE, VIDEO),
    "MolmoForCausalLM": (IMAGE,),
    "Molmo2ForConditionalGeneration": (IMAGE, VIDEO),
    "Phi4MultimodalForCausalLM": (IMAGE, AUDIO),
    "Phi4MMForCausalLM": (IMAGE, AUDIO),  # the same under the names of its own repository
    "VoxtralForConditionalGeneration": (AUDIO,),
    "AudioFlamingo3ForConditionalGeneration": (AUDIO,),
    "Qwen2AudioForConditionalGeneration": (AUDIO,),
    "GraniteSpeechForConditionalGeneration": (AUDIO,),
    "GlmAsrForConditionalGeneration": (AUDIO,),
    "Qwen3ASRForConditionalGeneration": (AUDIO,),
    "UltravoxModel": (AUDIO,),
    "WhisperForConditionalGeneration": (AUDIO,),  # read by the model's own encoder
    "Florence2ForConditionalGeneration": (IMAGE,),  # encoded apart, then read by the model's own encoder with a text
}
# take media through code of their own repositories, and transformers has no class for them
OUTSIDE = frozenset(("InternVLChatModel", "H2OVLChatModel", "NVLM_D", "Ovis"))
# what attends to itself in both directions: the vectors of an item that follow each other, those of all items of a
# prompt to each other, or the whole prompt
ITEM, ITEMS, PROMPT = "item", "items", "prompt"
_BOTH_WAYS = {
    "Gemma3ForConditionalGeneration": ITEM,
    "Molmo2ForConditionalGeneration": ITEMS,
    "PaliGemmaForConditionalGeneration": PROMPT,
}

# of whose videos some vectors may be left out
_PRUNED = frozenset(("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"))

# in whose prompts slices of an image have positions on a canvas
_CANVAS = frozenset(("MiniCPMV4_7ForConditionalGeneration",))

# encoder-decoders whose encoder reads a text and what another encoder made of media in it
_READ_BOTH = frozenset(("Florence2ForConditionalGeneration",))

# whose configuration may name other checkpoints for parts of the model (parts.py)
_NAME_PARTS = frozenset(("UltravoxModel",))

SPEECH_TYPES = frozenset(("whisper", "qwen2_audio"))


def modalities_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    for name in config.get("architectures") or ():
        if name in MODALITIES:
            return MODALITIES[name]
    return ()


def names_parts(config: Mapping[str, Any]) -> bool:
    """Asked before it is known that the names are names."""
    names = config.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name in _NAME_PARTS for name in names)


def encoder_reads_text(config: Mapping[str, Any]) -> bool:
    """Of an encoder-decoder model."""
    return not modalities_of(config) or not _READ_BOTH.isdisjoint(config.get("architectures") or ())


def hears_speech(config: Mapping[str, Any]) -> bool:
    """Whether it is known how to ask the model what is said (media/speech)."""
    return str(config.get("model_type")) in SPEECH_TYPES


def prunes_video(config: Mapping[str, Any]) -> bool:
    return not _PRUNED.isdisjoint(config.get("architectures") or ())


def has_canvas(config: Mapping[str, Any]) -> bool:
    return not _CANVAS.isdisjoint(config.get("architectures") or ())


def both_ways_of(config: Mapping[str, Any]) -> str:
    """ITEM, ITEMS, PROMPT or nothing: attention is causal."""
    return next((_BOTH_WAYS[name] for name in config.get("architectures") or () if name in _BOTH_WAYS), "")
