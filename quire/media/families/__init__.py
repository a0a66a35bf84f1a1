"""Which family a checkpoint belongs to: by the class of its processor, else by its type."""

from __future__ import annotations

from quire.base.registry import Registry
from quire.media.families.base import Family
from quire.media.settings import ProcessorFiles

_PLACE = "quire.media.families."
FAMILIES = Registry(
    "media processor",
    {
        "LlavaProcessor": _PLACE + "llava:Llava",
        "LlavaNextProcessor": _PLACE + "llava:LlavaNext",
        "LlavaNextVideoProcessor": _PLACE + "llava_video:LlavaNextVideo",
        "VideoLlavaProcessor": _PLACE + "llava_video:VideoLlava",
        "Llama4Processor": _PLACE + "canvases:Llama4",
        "Cohere2VisionProcessor": _PLACE + "canvases:Cohere2Vision",
        "Lfm2VlProcessor": _PLACE + "lfm2:Lfm2VL",
        "LlavaOnevisionProcessor": _PLACE + "llava:LlavaOneVision",
        "Qwen2VLProcessor": _PLACE + "qwen:Qwen2VL",
        "Qwen2_5_VLProcessor": _PLACE + "qwen:Qwen2VL",
        "Qwen3VLProcessor": _PLACE + "qwen:Qwen3VL",
        "Exaone4_5_Processor": _PLACE + "qwen:Qwen2VL",
        "VideoLlama3Processor": _PLACE + "qwen:VideoLlama3",
        "PaddleOCRVLProcessor": _PLACE + "qwen:PaddleOCRVL",
        "QianfanOCRProcessor": _PLACE + "tiles:QianfanOCR",
        "KimiVLProcessor": _PLACE + "kimi:KimiVL",
        "Kimi_K25Processor": _PLACE + "kimi:KimiK25",
        "MiniCPMVProcessor": _PLACE + "minicpm:MiniCPMV",
        "MiniCPMOProcessor": _PLACE + "minicpm:MiniCPMO",
        "MiniCPMV4_6Processor": _PLACE + "minicpm:MiniCPMV46",
        "MiniCPMV4_7Processor": _PLACE + "minicpm:MiniCPMV47",
        "MiniCPMOcrProcessor": _PLACE + "minicpm:MiniCPMOcr",
        "DeepseekVLV2Processor": _PLACE + "deepseek:deepseek_family",
        "Glm4vProcessor": _PLACE + "glm:Glm4v",
        "Glm46VProcessor": _PLACE + "glm:Glm46V",
        "Gemma3Processor": _PLACE + "gemma:Gemma3",
        "Gemma3nProcessor": _PLACE + "gemma:Gemma3n",
        "PaliGemmaProcessor": _PLACE + "gemma:PaliGemma",
        "Idefics3Processor": _PLACE + "tiles:Idefics3",
        "SmolVLMProcessor": _PLACE + "tiles:Idefics3",
        "InternVLProcessor": _PLACE + "tiles:InternVL",
        "PixtralProcessor": _PLACE + "tiles:Pixtral",
        "Ovis2Processor": _PLACE + "grids:Ovis2",
        "DeepseekOcr2Processor": _PLACE + "grids:DeepseekOcr2",
        "PerceptionLMProcessor": _PLACE + "grids:PerceptionLM",
        "MolmoProcessor": _PLACE + "molmo1:Molmo",
        "Molmo2Processor": _PLACE + "molmo:Molmo2",
        "Phi4MultimodalProcessor": _PLACE + "phi:Phi4Multimodal",
        "Phi4MMProcessor": _PLACE + "phi:Phi4MM",
        "Qwen2AudioProcessor": _PLACE + "speech:Qwen2Audio",
        "UltravoxProcessor": _PLACE + "ultravox:Ultravox",
        "WhisperProcessor": _PLACE + "speech:Whisper",
        "Florence2Processor": _PLACE + "florence:Florence2",
    },
)
_OF_TYPE = {
    "llava": "LlavaProcessor",
    "vipllava": "LlavaProcessor",
    "llava_next": "LlavaNextProcessor",
    "llava_onevision": "LlavaOnevisionProcessor",
    "llava_next_video": "LlavaNextVideoProcessor",
    "video_llava": "VideoLlavaProcessor",
    "llama4": "Llama4Processor",
    "cohere2_vision": "Cohere2VisionProcessor",
    "lfm2_vl": "Lfm2VlProcessor",
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "qwen3_5": "Qwen3VLProcessor",
    "qwen3_5_moe": "Qwen3VLProcessor",
    "exaone4_5": "Exaone4_5_Processor",
    "video_llama_3": "VideoLlama3Processor",
    "paddleocr_vl": "PaddleOCRVLProcessor",
    "qianfan_ocr": "QianfanOCRProcessor",
    "kimi_vl": "KimiVLProcessor",
    "kimi_k25": "Kimi_K25Processor",
    "minicpmv": "MiniCPMVProcessor",
    "minicpmo": "MiniCPMOProcessor",
    "minicpmv4_6": "MiniCPMV4_6Processor",
    "minicpmv4_7": "MiniCPMV4_7Processor",
    "minicpm_ocr": "MiniCPMOcrProcessor",
    "deepseek_vl_v2": "DeepseekVLV2Processor",
    "glm4v": "Glm4vProcessor",
    "glm4v_moe": "Glm4vProcessor",
    "glm46v": "Glm46VProcessor",
    "glm_ocr": "Glm46VProcessor",
    "gemma3": "Gemma3Processor",
    "gemma3n": "Gemma3nProcessor",
    "paligemma": "PaliGemmaProcessor",
    "idefics3": "Idefics3Processor",
    "smolvlm": "SmolVLMProcessor",
    "internvl": "InternVLProcessor",
    "mistral3": "PixtralProcessor",
    "ovis2": "Ovis2Processor",
    "deepseek_ocr2": "DeepseekOcr2Processor",
    "perception_lm": "PerceptionLMProcessor",
    "molmo": "MolmoProcessor",
    "molmo2": "Molmo2Processor",
    "phi4_multimodal": "Phi4MultimodalProcessor",
    "phi4mm": "Phi4MMProcessor",
    "qwen2_audio": "Qwen2AudioProcessor",
    "ultravox": "UltravoxProcessor",
    "whisper": "WhisperProcessor",
    "florence2": "Florence2Processor",
}


def family_name(files: ProcessorFiles) -> str | None:
    """None: there is no data for it here."""
    if files.processor_class in FAMILIES:
        return files.processor_class
    if str(files.vision.get("model_type")) == "pixtral":
        return "PixtralProcessor"
    return _OF_TYPE.get(str(files.config.get("model_type")))


def make_family(name: str, files: ProcessorFiles) -> Family:
    family: Family = FAMILIES.get(name)(files)
    return family
