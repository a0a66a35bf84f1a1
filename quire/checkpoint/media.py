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
    "Idefics3ForConditionalGeneration": (IMAGE,),
    "SmolVLMForConditionalGeneration": (IMAGE,),
    "InternVLForConditionalGeneration": (IMAGE,),
    "Mistral3ForConditionalGeneration": (IMAGE,),
    "AyaVisionForConditionalGeneration": (IMAGE,),
    "Cohere2VisionForConditionalGeneration": (IMAGE,),
    "AriaForConditionalGeneration": (IMAGE,),
    "GotOcr2ForConditionalGeneration": (IMAGE,),
    "VideoLlavaForConditionalGeneration": (IMAGE,),
    "LlavaNextVideoForConditionalGeneration": (IMAGE, VIDEO),
    "DeepseekVLForConditionalGeneration": (IMAGE,),
    "Lfm2VlForConditionalGeneration": (IMAGE,),
    "Llama4ForConditionalGeneration": (IMAGE,),
    "FuyuForCausalLM": (IMAGE,),
    "LightOnOcrForConditionalGeneration": (IMAGE,),
    # attends in both directions within an image, which decoders here cannot: text only
    "Gemma3ForConditionalGeneration": (),
    "VoxtralForConditionalGeneration": (AUDIO,),
    "AudioFlamingo3ForConditionalGeneration": (AUDIO,),
    "Qwen2AudioForConditionalGeneration": (AUDIO,),
    "WhisperForConditionalGeneration": (AUDIO,),  # read by the model's own encoder
}

SPEECH_TYPES = frozenset(("whisper", "qwen2_audio"))


def modalities_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    for name in config.get("architectures") or ():
        if name in MODALITIES:
            return MODALITIES[name]
    return ()


def hears_speech(config: Mapping[str, Any]) -> bool:
    """Whether it is known how to ask the model what is said (media/speech)."""
    return str(config.get("model_type")) in SPEECH_TYPES
