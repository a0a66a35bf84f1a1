"""POST /v1/audio/transcriptions and /v1/audio/translations: an audio file in, what is said in it out.

In: a form with a file. Decoding, resampling and cutting run in threads of the media workers, for few files at once,
because an hour of audio takes hundreds of megabytes. Each clip is a request of the engine. Must not know: prompts of
models (media/speech), formats of answers (speech_answer.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from quire.base import env
from quire.checkpoint.media import hears_speech
from quire.llm.online import LONG_TEXT
from quire.media.audio import decode_audio, resample
from quire.media.speech import speech_model
from quire.media.speech.clips import Clip, cut_into_clips
from quire.media.speech.model import TRANSCRIBE, TRANSLATE, SpeechModel, SpeechTask
from quire.schema.errors import InputError, MissingExtraError, NotBuiltError, OverloadedError, TooLargeError
from quire.schema.params import SamplingParams
from quire.schema.prompt import Prompt
from quire.server.middleware import BodyLimit
from quire.server.openai.limits import check_request
from quire.server.openai.params import most_tokens, prepare_requests, sampling_params
from quire.server.openai.protocol import GenerateRequest
from quire.server.openai.speech_answer import SpeechAnswer
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
from quire.server.route import App, HttpCall, add_form_route
from quire.server.served import ServedModel
from quire.server.state import ServerState
from quire.server.stream import drained, send_events

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
_FIELDS_BYTES = 1 << 20  # of a form, beside the file
_DECODED_AT_ONCE, _QUEUE = 2, 64  # audio files
_MOST_SAMPLE_BYTES = 1 << 30  # of all audio that is being transcribed
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


def add_routes(app: App, state: ServerState) -> None:
    desk = SpeechDesk()
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


class SpeechDesk:
    """What all calls of the two routes share: the models' declarations, and how much audio is being worked on. Touched
    by one event loop."""

    def __init__(self) -> None:
        self._models: dict[str, SpeechModel] = {}
        self._sample_bytes = self._num_decoding = 0
        self._decoding = asyncio.Semaphore(_DECODED_AT_ONCE)

    async def model(self, served: ServedModel) -> SpeechModel:
        config = served.config.model_config
        if not hears_speech(config.hf_config) or not served.takes_media:
            raise InputError(f"The model {served.name!r:.100} does not support transcriptions", param="model")
        if (known := self._models.get(served.root)) is None:
            make = partial(speech_model, config.hf_config, config.path, served.tokenizer)
            known = self._models[served.root] = await served.engine.lanes.run(LONG_TEXT, make)
        return known

    async def clips(self, served: ServedModel, data: memoryview, model: SpeechModel) -> list[Clip]:
        """In the threads that decode all media, of which a few may be busy with this. A thread whose file nobody waits
        for any more is busy until it is done."""
        if self._num_decoding >= _DECODED_AT_ONCE + _QUEUE:
            raise OverloadedError(f"{self._num_decoding} audio files wait to be decoded, as many as may wait")
        self._num_decoding += 1
        try:
            await self._decoding.acquire()
        except BaseException:
            self._num_decoding -= 1
            raise
        try:
            engine = served.engine
            media = await engine.lanes.run(LONG_TEXT, lambda: engine.front.inputs.media)  # which may be made now
            (future,) = media.workers.submit_all([partial(_read_clips, data, model)])
        except BaseException:
            self._decoded()
            raise
        loop = asyncio.get_running_loop()

        def leave(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._decoded)

        future.add_done_callback(leave)
        return await asyncio.wrap_future(future)

    def _decoded(self) -> None:
        self._num_decoding -= 1
        self._decoding.release()

    def take(self, num_bytes: int) -> None:
        if self._sample_bytes and self._sample_bytes + num_bytes > _MOST_SAMPLE_BYTES:
            raise OverloadedError(
                f"audio of {self._sample_bytes} bytes is being transcribed; the limit is {_MOST_SAMPLE_BYTES}"
            )
        self._sample_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        self._sample_bytes -= num_bytes


async def _create(desk: SpeechDesk, call: HttpCall, request: SpeechRequest, kind: str) -> None:
    model = await desk.model(call.model)
    task = _task(request, kind)
    model.check(task)
    plain = _as_generate(request)
    check_request(plain, call.state.options, 1)
    most_tokens(call.model, request.max_completion_tokens, None, name="max_completion_tokens")
    _check_fields(request)
    clips = await call.attended(desk.clips(call.model, _take_file(request), model))
    size = sum(clip.samples.nbytes for clip in clips)
    desk.take(size)
    try:
        await _answer(_Speech(call, request, plain, model, clips), task)
    finally:
        desk.give(size)


class _Speech(NamedTuple):
    """One call."""

    call: HttpCall
    request: SpeechRequest
    plain: GenerateRequest
    model: SpeechModel
    clips: list[Clip]


async def _answer(speech: _Speech, task: SpeechTask) -> None:
    call, request = speech.call, speech.request
    public_id = f"{'trsc' if task.kind == TRANSCRIBE else 'trsl'}-{call.request_id(None)}"
    if task.language is None:
        task = replace(task, language=await call.attended(_language(speech, public_id)))
    speech.model.check(task)
    params = _params(speech, task)
    prompt = await call.model.engine.read(len(task.prompt), speech.model.prompt, task)

    async def open_clip(number: int) -> Any:
        return await _open(speech, f"{public_id}-{number}", prompt, params, speech.clips[number])

    with ClipFlow(len(speech.clips), open_clip) as flow:
        answer = SpeechAnswer(
            request, task, speech.model, speech.clips, flow.clip_of.__getitem__, name=call.model.name,
            public_id=public_id,
        )  # fmt: skip
        if request.stream:
            await send_events(call, flow, answer)
        else:
            body = await drained(call, flow, answer)
            await call.reply(body, _TYPES.get(request.response_format, b"application/json"))


async def _open(speech: _Speech, public_id: str, prompt: Prompt, params: SamplingParams, clip: Clip) -> tuple[str, Any]:
    media = {"audio": (clip.samples, int(speech.model.config.sample_rate))}
    try:
        (prepared,) = await prepare_requests(
            speech.call, speech.plain, public_id, [msgspec.structs.replace(prompt, media=media)], params,
            add_special_tokens=False, most=speech.request.max_completion_tokens,
        )  # fmt: skip
    except InputError as wrong:
        if wrong.param != "multi_modal_data":
            raise
        raise type(wrong)(str(wrong), param="file") from wrong
    return prepared.request_id, speech.call.model.engine.open([prepared])


async def _language(speech: _Speech, public_id: str) -> str | None:
    """That is spoken in the first clip, as the model hears it; None where it needs none."""
    detection = speech.model.detection()
    if detection is None:
        return speech.model.default_language
    params = SamplingParams(
        max_tokens=1, temperature=0.0, allowed_token_ids=sorted(detection.languages), detokenize=False,
        skip_clone=True,
    )  # fmt: skip
    _, flow = await _open(speech, f"{public_id}-language", detection.prompt, params, speech.clips[0])
    with flow:
        results = []
        while not flow.finished:
            results += await flow.next()
    token_ids = results[-1].outputs[0].token_ids
    if not token_ids:
        raise OverloadedError("the request was aborted while its language was being detected; send it again")
    return detection.languages[token_ids[0]]


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


def _params(speech: _Speech, task: SpeechTask) -> SamplingParams:
    decoding = speech.model.decoding(task)
    most = most_tokens(speech.call.model, speech.request.max_completion_tokens, None, name="max_completion_tokens")
    further: dict[str, Any] = {}
    if decoding.logit_bias:
        further["logit_bias"] = dict(decoding.logit_bias)
    if decoding.min_tokens:
        further["min_tokens"] = decoding.min_tokens
    if speech.request.response_format == "verbose_json":
        further["logprobs"] = 0
    return sampling_params(speech.plain, speech.call.model, max_tokens=most, **further)


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
        audio = decode_audio(bytes(data))
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
