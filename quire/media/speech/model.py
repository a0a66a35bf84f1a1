"""SpeechModel: what a model declares so that audio can be transcribed and translated with it.

In: a SpeechTask. Out: the prompt that asks for it, and what tokens of the answer mean. Must not know: engines, HTTP.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from quire.config import SpeechToTextConfig
from quire.media.settings import Settings
from quire.media.speech.languages import LANGUAGES
from quire.schema.errors import InputError
from quire.schema.params import SpeechRules, TimeRules
from quire.schema.prompt import Prompt

TRANSCRIBE, TRANSLATE = "transcribe", "translate"


class SpeechTokenizer(Protocol):
    """What is used of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class SpeechTask:
    """What is to be done with audio."""

    kind: str = TRANSCRIBE
    language: str | None = None  # that is spoken: two letters, mostly
    to_language: str | None = None  # of a translation
    prompt: str = ""  # guiding text
    with_timestamps: bool = False


class Detection(NamedTuple):
    """How the model is asked which language it hears: the next token after `prompt` is one of these."""

    prompt: Prompt
    languages: Mapping[int, str]  # token id -> language


class TimeSpan(NamedTuple):
    """Tokens that are spoken between two times, in seconds from the start of the clip."""

    start: float
    end: float
    begin: int  # first of its tokens in the answer, timestamps included
    stop: int  # one past the last


@dataclass(frozen=True)
class Decoding:
    """How answers are sampled, whatever the request says."""

    never: tuple[int, ...] = ()  # token ids
    never_first: tuple[int, ...] = ()
    times: TimeRules | None = None

    def as_params(self) -> dict[str, Any]:
        """Fields of SamplingParams."""
        values: dict[str, Any] = {}
        if self.never:
            values["bad_words_token_ids"] = [[token_id] for token_id in self.never]
        if self.never_first or self.times is not None:
            values["speech_rules"] = SpeechRules(never_first=self.never_first, times=self.times)
        return values


class SpeechModel(abc.ABC):
    """One model. Read-only once made, so threads may share it."""

    config = SpeechToTextConfig()
    languages: Mapping[str, str] = LANGUAGES  # code -> name
    has_timestamps = False
    translates = True
    default_language: str | None = None  # of audio whose language neither the request nor the model tells
    joint = " "  # between the texts of two clips

    @classmethod
    @abc.abstractmethod
    def of(cls, config: Mapping[str, Any], folder: str, tokenizer: SpeechTokenizer) -> SpeechModel:
        """From config.json and other files of the checkpoint."""

    @abc.abstractmethod
    def prompt(self, task: SpeechTask) -> Prompt:
        """Without the audio, which is added to it as its only item."""

    def decoding(self, task: SpeechTask) -> Decoding:
        return Decoding()

    def detection(self) -> Detection | None:
        """None: the model needs no language."""
        return None

    def spans(self, token_ids: Sequence[int], seconds: float) -> list[TimeSpan]:
        """Of an answer to a task with timestamps, for a clip of this length."""
        raise NotImplementedError

    def text(self, token_ids: Sequence[int]) -> str:
        """Without timestamps and control tokens."""
        raise NotImplementedError

    def audio_tokens(self, seconds: float) -> int:
        """What a clip of this length counts in `usage`, where it has no tokens in the prompt."""
        return 0

    def clean(self, text: str) -> str:
        """Text as the engine writes it, whole tokens at a time, without what is no speech."""
        return text

    # ---- what a request may say ------------------------------------------------------------------------------------

    def check(self, task: SpeechTask) -> None:
        """InputError for what this model cannot do."""
        for name, code in (("language", task.language), ("to_language", task.to_language)):
            if code is not None and code not in self.languages:
                raise InputError(
                    f"{name} {code!r:.40} is not supported; it must be one of {', '.join(sorted(self.languages))}",
                    param=name,
                    value=code,
                )
        if task.with_timestamps and not self.has_timestamps:
            raise InputError("this model tells no times: response_format can be json or text", param="response_format")
        if task.kind == TRANSLATE and not self.translates:
            raise InputError("this model transcribes, and cannot translate", param="model")

    def joint_of(self, language: str | None) -> str:
        return "" if language in _UNSPACED else self.joint


def heard(extractor: Mapping[str, Any]) -> SpeechToTextConfig:
    """As the settings of a feature extractor say: its rate, and clips as long as it takes."""
    settings = Settings.of({"sampling_rate": 16000, "chunk_length": 30}, extractor)
    return SpeechToTextConfig(
        sample_rate=settings.whole("sampling_rate", high=768_000),
        max_audio_clip_s=settings.whole("chunk_length", high=3600),
    )


_UNSPACED = frozenset(("zh", "yue", "ja", "th", "lo", "my", "km", "bo"))


def named(languages: Iterable[str]) -> dict[str, str]:
    return {code: LANGUAGES[code] for code in languages}
