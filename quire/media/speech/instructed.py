"""Chat models that hear, asked in words to transcribe: a text with the audio's place in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.media.settings import ProcessorFiles
from quire.media.speech.languages import LANGUAGES
from quire.media.speech.model import TRANSLATE, SpeechModel, SpeechTask, SpeechTokenizer, heard, named
from quire.schema.errors import InputError
from quire.schema.prompt import Prompt

_ENGLISH = "en"


class Qwen2AudioSpeech(SpeechModel):
    """As in the evaluation of its makers: "Detect the language and recognize the speech: <|en|>"."""

    languages = named(("en", "zh", "yue", "de", "es", "fr", "it", "ja", "ko"))
    _AUDIO = "<|audio_bos|><|AUDIO|><|audio_eos|>"

    def __init__(self, extractor: Mapping[str, Any]) -> None:
        self.config = heard(extractor)

    @classmethod
    def of(cls, config: Mapping[str, Any], folder: str, tokenizer: SpeechTokenizer) -> Qwen2AudioSpeech:
        return cls(ProcessorFiles.read(folder, config).parts["audio"])

    def prompt(self, task: SpeechTask) -> Prompt:
        if task.prompt.strip():
            raise InputError("prompt: this model is not guided by a text; leave it out", param="prompt")
        if task.kind == TRANSLATE:
            target = LANGUAGES[task.to_language or _ENGLISH]
            words = f"Detect the language and translate the speech into {target}:"
        else:
            words = "Detect the language and recognize the speech:"
        hint = f" <|{task.language}|>" if task.language else ""
        return Prompt(text=f"{self._AUDIO}{words}{hint}")
