"""Wire types of /v1/audio/transcriptions and /v1/audio/translations: field names, types and defaults of the documented
API. Must not know: engines, audio."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import from_json

from quire.server.forms import FormFile
from quire.server.openai.protocol import ExtraArgs, Usage

FORMATS = Literal["json", "text", "srt", "verbose_json", "vtt"]
LISTS = frozenset(("timestamp_granularities", "include"))
_LONGEST_PROMPT = 1 << 15


def _file(value: Any) -> Any:
    if not isinstance(value, FormFile):
        raise ValueError("it must be a file: a part of the form with a filename")
    return value


def _object(value: Any) -> Any:
    """Objects stand in forms as JSON."""
    if isinstance(value, str):
        try:
            return from_json(value, allow_inf_nan=False)
        except ValueError:
            raise ValueError("it must be an object, as JSON") from None
    return value


class SpeechRequest(BaseModel):
    """Fields of both routes."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)

    file: Annotated[Any, BeforeValidator(_file), WithJsonSchema({"type": "string", "format": "binary"})]
    """Audio: wav, and with the `media` extra flac, mp3, mp4, mpeg, mpga, m4a, ogg, webm."""
    model: str | None = None
    """One of the served names; absent, the server's model."""
    language: Annotated[str, Field(max_length=16)] | None = None
    """That is spoken, as ISO 639-1 has it; absent, it is detected."""
    prompt: Annotated[str, Field(max_length=_LONGEST_PROMPT)] = ""
    """Text that guides the model: what was said before, or words to expect."""
    response_format: FORMATS = "json"
    temperature: float = 0.0
    to_language: Annotated[str, Field(max_length=16)] | None = None
    """Of a translation; en."""
    stream: bool = False
    stream_include_usage: bool = False
    """End the stream with a chunk that holds the usage."""
    stream_continuous_usage_stats: bool = False
    """Every chunk holds the usage so far; needs stream_include_usage."""
    seed: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_completion_tokens: int | None = None
    """Most tokens of the text of one clip; what the model can write, if absent."""
    vllm_xargs: Annotated[ExtraArgs, BeforeValidator(_object)] | None = None
    """Further arguments for custom logits processors, as JSON."""


class TranscriptionRequest(SpeechRequest):
    timestamp_granularities: Annotated[list[Literal["word", "segment"]], Field(max_length=8)] = []
    """Of verbose_json: segment. Times of words are refused."""


class TranslationRequest(SpeechRequest):
    pass


class DurationUsage(BaseModel):
    type: Literal["duration"]
    seconds: int


class SpeechText(BaseModel):
    """The answer with response_format json."""

    text: str
    usage: DurationUsage | None = None


class SpeechSegment(BaseModel):
    id: int
    seek: int
    """Where its clip begins, in hundredths of a second."""
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float | None = None
    compression_ratio: float | None = None
    no_speech_prob: float | None = None


class SpeechTextVerbose(BaseModel):
    """The answer with response_format verbose_json."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[SpeechSegment]
    words: list[Any] | None = None
    usage: DurationUsage | None = None


class SpeechDelta(BaseModel):
    content: str


class SpeechChoice(BaseModel):
    delta: SpeechDelta
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class SpeechChunk(BaseModel):
    """One event of a stream, as vLLM's clients read it (`choices`) and as OpenAI's do (`type`, `delta`, `text`). The
    last may hold the usage and no choice; an error is {"error": …}."""

    id: str
    object: Literal["transcription.chunk", "translation.chunk"]
    created: int
    model: str
    choices: list[SpeechChoice]
    usage: Usage | None = None
    type: Literal["transcript.text.delta", "transcript.text.done"] | None = None
    delta: str | None = None
    text: str | None = None
