"""Speech to text: what a model declares for it, and how long audio is cut. Must not know: engines, HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.base.registry import Registry

if TYPE_CHECKING:
    from quire.media.speech.model import SpeechModel, SpeechTokenizer

_PLACE = "quire.media.speech."
SPEECH_MODELS = Registry(
    "speech model",
    {
        "whisper": _PLACE + "whisper:WhisperSpeech",
        "qwen2_audio": _PLACE + "instructed:Qwen2AudioSpeech",
    },
)


def speech_model(config: Mapping[str, Any], folder: str, tokenizer: SpeechTokenizer) -> SpeechModel:
    """Of a model that hears speech (checkpoint/media.py). Reads files."""
    model: SpeechModel = SPEECH_MODELS.get(str(config.get("model_type"))).of(config, folder, tokenizer)
    return model
