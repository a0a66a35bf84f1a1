"""POST /v1/audio/transcriptions and /v1/audio/translations: an audio file in, what is said in it out.

In: a form with a file. Decoding, resampling and cutting run in threads of the media workers, for few files at once,
because an hour of audio takes hundreds of megabytes. Each clip is a request of the engine. Must not know: prompts of
models (media/speech), formats of answers (speech_answer.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from quire.base import env
from quire.media.audio import decode_audio, resample
from quire.media.speech.clips import Clip, cut_into_clips
from quire.media.speech.model import TRANSCRIBE, TRANSLATE, SpeechModel, SpeechTask
from quire.schema.errors import InputError, MissingExtraError, NotBuiltError, TooLargeError
from quire.server.middleware import BodyLimit
from quire.server.openai.limits import check_request
from quire.server.openai.params import most_tokens
from quire.server.openai.protocol import GenerateRequest
from quire.server.openai.speech_answer import SpeechAnswer
from quire.server.openai.speech_desk import SpeechDesk
from quire.server.openai.speech_flow import ClipFlow
from quire.server.openai.speech_protocol import (
    LISTS,
    SpeechChunk,
    SpeechRequest,
    SpeechText,
    SpeechTextVerbose,
    TranscriptionRequest,
    TranslationRequest,
)
from quire.server.openai.speech_requests import SpeechCall
from quire.server.route import App, HttpCall, add_form_route
from quire.server.stream import drained, send_events

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
_FIELDS_BYTES = 1 << 20  # of a form, beside the file
_SAME = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "vllm_xargs",
)  # fmt: skip
_TIMED = ("verbose_json", "srt", "vtt")
_UNBUILT = ("include", "use_beam_search", "hotwords", "known_speaker_names", "known_speaker_references")
_TEXT = b"text/plain; charset=utf-8"
_TYPES = {"text": _TEXT, "srt": _TEXT, "vtt": b"text/vtt; charset=utf-8"}


def upload_limits() -> dict[str, BodyLimit]:
    """Of the bodies of these routes."""
    limit = BodyLimit(_most_file_bytes() + _FIELDS_BYTES, "QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB")
    return {TRANSCRIPTIONS: limit, TRANSLATIONS: limit}


def add_routes(app: App, desk: SpeechDesk) -> None:
    for path, create, form in (
        (TRANSCRIPTIONS, create_transcription, TranscriptionRequest),
        (TRANSLATIONS, create_translation, TranslationRequest),
    ):
        handler: Any = partial(create, desk)
        handler.__name__, handler.__doc__ = create.__name__, create.__doc__
        add_form_route(
            app, path, handler, form, answer=SpeechText | SpeechTextVerbose, streams=SpeechChunk, tag="speech",
            lists=LISTS,
        )  # fmt: skip


async def create_transcription(desk: SpeechDesk, call: HttpCall, request: TranscriptionRequest) -> None:
    """Write down what is said in an audio file.

    Streams with `stream=true`.
    """
    if request.timestamp_granularities and request.response_format != "verbose_json":
        raise InputError(
            f"timestamp_granularities can only be given with response_format verbose_json, not "
            f"{request.response_format}",
            param="timestamp_granularities",
        )
    if "word" in request.timestamp_granularities:
        raise NotBuiltError(
            "timestamp_granularities: times of words are not in this version of Quire; ask for segment",
            param="timestamp_granularities",
        )
    await _create(desk, call, request, TRANSCRIBE)


async def create_translation(desk: SpeechDesk, call: HttpCall, request: TranslationRequest) -> None:
    """Write down in another language what is said in an audio file.

    Streams with `stream=true`.
    """
    await _create(desk, call, request, TRANSLATE)


async def _create(desk: SpeechDesk, call: HttpCall, request: SpeechRequest, kind: str) -> None:
    model = await desk.model(call.model)
    task = _task(request, kind)
    model.check(task)
    plain = _as_generate(request)
    check_request(plain, call.state.options, 1)
    most_tokens(call.model, request.max_completion_tokens, None, name="max_completion_tokens")
    _check_fields(request)
    data = _take_file(request)
    clips = await call.attended(desk.decoded(call.model, partial(_read_clips, data, model)))
    del data
    size = sum(clip.samples.nbytes for clip in clips)
    desk.take(size)
    try:
        await _answer(SpeechCall(call, plain, model, request.max_completion_tokens), request, clips, task)
    finally:
        desk.give(size)


async def _answer(speech: SpeechCall, request: SpeechRequest, clips: list[Clip], task: SpeechTask) -> None:
    call = speech.call
    public_id = f"{'trsc' if task.kind == TRANSCRIBE else 'trsl'}-{call.request_id(None)}"
    if task.language is None:
        task = replace(task, language=await call.attended(speech.language(public_id, clips[0])))
    speech.model.check(task)
    params = speech.params(task, **({"logprobs": 0} if request.response_format == "verbose_json" else {}))
    prompt = await speech.prompt(task)

    async def open_clip(number: int) -> Any:
        return await speech.open(f"{public_id}-{number}", prompt, params, clips[number])

    with ClipFlow(len(clips), open_clip) as flow:
        answer = SpeechAnswer(
            request, task, speech.model, clips, flow.clip_of.__getitem__, name=call.model.name, public_id=public_id
        )
        if request.stream:
            await send_events(call, flow, answer)
        else:
            body = await drained(call, flow, answer)
            await call.reply(body, _TYPES.get(request.response_format, b"application/json"))


def _task(request: SpeechRequest, kind: str) -> SpeechTask:
    return SpeechTask(
        kind=kind,
        language=(request.language or "").strip().lower() or None,
        to_language=(request.to_language or "").strip().lower() or None if kind == TRANSLATE else None,
        prompt=request.prompt,
        with_timestamps=request.response_format in _TIMED,
    )


def _as_generate(request: SpeechRequest) -> GenerateRequest:
    """The same as any request that generates, for limits and parameters that hold for all."""
    values = {name: getattr(request, name) for name in _SAME}
    return GenerateRequest(**{name: value for name, value in values.items() if value is not None})


def _check_fields(request: SpeechRequest) -> None:
    if request.stream and request.response_format not in ("json", "text"):
        raise InputError(
            f"stream cannot be given with response_format {request.response_format}", param="response_format"
        )
    for name in _UNBUILT:
        value = (request.model_extra or {}).get(name)
        if value and value not in ("false", "False", "0"):
            raise NotBuiltError(f"{name} is not in this version of Quire", param=name)


# ---- audio ------------------------------------------------------------------------------------------------------


def _most_file_bytes() -> int:
    return env.MAX_AUDIO_CLIP_FILESIZE_MB.get() << 20


def _take_file(request: SpeechRequest) -> memoryview:
    """The file, which the request has no more: it may be forgotten once it is decoded."""
    data: memoryview = request.file.data
    request.file = None
    if len(data) > (most := _most_file_bytes()):
        raise TooLargeError(
            f"file has {len(data)} bytes; the limit is {most} (QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB)", param="file"
        )
    if not len(data):
        raise InputError("file is empty", param="file")
    return data


def _read_clips(data: memoryview, model: SpeechModel) -> list[Clip]:
    """In a worker's thread."""
    try:
        audio = decode_audio(data)
        samples = resample(audio, int(model.config.sample_rate))
    except InputError as wrong:
        raise type(wrong)(str(wrong), param="file") from wrong
    except MissingExtraError as wrong:
        raise NotBuiltError(f"file: {wrong}", param="file") from wrong
    except (ValueError, ArithmeticError, LookupError, TypeError, EOFError, RuntimeError, OSError) as wrong:
        raise InputError(
            f"file cannot be decoded as audio: {type(wrong).__name__}: {str(wrong)[:200]}", param="file"
        ) from wrong
    return cut_into_clips(samples, model.config)
