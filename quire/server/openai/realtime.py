"""/v1/realtime: audio over a WebSocket as it is spoken, and its transcription back.

In: events of a client (realtime_wire.py). Out: events. A session has a reader, which takes events and holds audio, and
a writer, which transcribes utterances in turn, each clip a request of the engine; a client that goes ends both, and the
request with them. Whoever sends faster than is transcribed is read more slowly.
Must not know: forms of events, prompts of models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import NoReturn
from urllib.parse import parse_qs, urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from quire.base import env
from quire.base.log import logger
from quire.llm.online import LONG_TEXT
from quire.media.speech.clips import Clip
from quire.media.speech.model import SpeechModel, SpeechTask
from quire.schema.errors import (
    DeadlineError,
    EngineDeadError,
    InputError,
    MissingExtraError,
    OverloadedError,
    QuireError,
)
from quire.server.errors import Refusal, refusal, refusal_of
from quire.server.openai.protocol import GenerateRequest
from quire.server.openai.realtime_audio import LEAST_SECONDS, Utterance, Utterances, next_clip, read_pcm
from quire.server.openai.realtime_wire import (
    ClientEvent,
    ItemCounts,
    OpenAIWire,
    RealtimeWire,
    SessionUpdate,
    Shown,
    VllmWire,
    read_event,
    read_update,
)
from quire.server.openai.speech_answer import JoinedText
from quire.server.openai.speech_desk import SpeechDesk
from quire.server.openai.speech_requests import SpeechCall
from quire.server.route import App, HttpCall
from quire.server.served import ServedModel
from quire.server.state import ServerState

log = logger(__name__)
PATH = "/v1/realtime"
MOST_ERRORS = 16  # one after another
_MOST_FIELDS = 32  # of a query
_CLIP_SECONDS = 30  # of a model that does not say
_CLOSE_POLICY, _CLOSE_IDLE, _CLOSE_FAULT = 1008, 1001, 1011


@dataclass(frozen=True)
class _ListeningSettings:
    """How what comes next will be transcribed."""

    served: ServedModel
    model: SpeechModel
    rate: int
    language: str | None = None
    prompt: str = ""

    @property
    def task(self) -> SpeechTask:
        return SpeechTask(language=self.language, prompt=self.prompt)

    @property
    def clip_seconds(self) -> int:
        return self.model.config.max_audio_clip_s or _CLIP_SECONDS


class _EndedError(Exception):
    """The session ends: why, as a WebSocket says it."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


def add_routes(app: App, state: ServerState, desk: SpeechDesk) -> None:
    """Whoever asks without a WebSocket is told what is missing: also where it is a package of the server."""
    if any(find_spec(name) is None for name in ("websockets", "uvicorn.protocols.websockets.websockets_sansio_impl")):
        missing = MissingExtraError(PATH, "realtime", "websockets")
        answer = refusal(501, str(missing))
    else:
        app.sockets[PATH] = Sessions(state, desk)
        answer = refusal(
            426, f"{PATH} takes WebSockets: connect with ws:// or wss://", headers={"Upgrade": "websocket"}
        )

    async def refuse(request: Request) -> Response:
        return answer.response()

    app.router.routes.append(Route(PATH, refuse, methods=["GET", "POST"], include_in_schema=False))


class Sessions:
    """The route. Touched by one event loop."""

    def __init__(self, state: ServerState, desk: SpeechDesk) -> None:
        self._state, self._desk, self.count = state, desk, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        call = HttpCall(self._state, scope, receive, send)
        self.count += 1
        try:
            query = _query_of(scope)
            settings = await self._admitted(call, query.get("model", [None])[0])
        except Exception as error:  # noqa: BLE001  # whatever went wrong, its client is told
            self.count -= 1
            await refusal_of(error, full=self._state.options.queue_full_status).refuse_socket(send)
            return
        session_id = f"sess-{call.request_id(None)}"
        speaks_openai = bool(query.keys() & {"model", "intent"})
        wire: RealtimeWire = OpenAIWire(session_id) if speaks_openai else VllmWire()
        try:
            await send({"type": "websocket.accept"})
            session = Session(self, call, wire, replace(settings, rate=wire.rate), session_id)
            await session.run()
        except OSError:
            pass  # the client is gone
        finally:
            self.count -= 1
            call.close()

    async def _admitted(self, call: HttpCall, name: str | None) -> _ListeningSettings:
        """Refusals before the connection becomes a WebSocket."""
        _check_origin(call)
        if self.count > (most := env.MAX_REALTIME_SESSIONS.get()):
            raise OverloadedError(
                f"{self.count - 1} realtime sessions are open; the limit is {most} (QUIRE_MAX_REALTIME_SESSIONS)"
            )
        return await self.settings(name)

    async def settings(self, name: str | None) -> _ListeningSettings:
        state = self._state
        served = await state.adapters.find(name)
        return _ListeningSettings(served, await self._desk.model(served), VllmWire.rate)

    @property
    def desk(self) -> SpeechDesk:
        return self._desk

    @property
    def state(self) -> ServerState:
        return self._state


def _query_of(scope: Scope) -> dict[str, list[str]]:
    try:
        return parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise InputError(f"the query has more than {_MOST_FIELDS} fields") from None


def _check_origin(call: HttpCall) -> None:
    """A web page may open a WebSocket to any server, and no browser asks the server first."""
    origin = call.header(b"origin")
    allowed = call.state.options.allowed_origins
    if origin is None or "*" in allowed or origin in allowed:
        return
    try:
        place = urlsplit(origin).netloc.lower()
    except ValueError:  # half of an address
        place = ""
    if not place or place != (call.header(b"host") or "").lower():
        raise _ForbiddenError(f"pages of {origin[:100]!r} may not open sessions: --allowed-origins has no such origin")


class _ForbiddenError(QuireError):
    status = 403


class Session:
    """One connection."""

    def __init__(
        self, sessions: Sessions, call: HttpCall, wire: RealtimeWire, settings: _ListeningSettings, session_id: str
    ) -> None:
        self._sessions, self._call, self._wire, self._settings, self._id = sessions, call, wire, settings, session_id
        self._utterances = Utterances()
        self._changed = asyncio.Event()  # something for the writer
        self._room = asyncio.Event()  # something for the reader
        self._is_writing = False
        self._num_items = self._num_errors = 0
        self._last_item: str | None = None
        self._idle = float(env.REALTIME_IDLE_SECONDS.get())
        self._most_seconds = float(env.MAX_REALTIME_SECONDS.get())
        self._held_bytes = 0  # of the desk's, by audio that waits

    async def run(self) -> None:
        """Until the client goes, or has to."""
        tasks = [asyncio.create_task(work) for work in (self._read(), self._write())]
        try:
            await self._send(self._wire.created(self._shown()))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except _EndedError as end:
            await self._sent({"type": "websocket.close", "code": end.code, "reason": end.reason[:120]})
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._sessions.desk.give(self._held_bytes)

    # ---- what comes in ----------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while (message := await self._next_message()) is not None:
            event_id = None
            try:
                event, data = await self._parsed(message)
                event_id = event.event_id
                await self._take(event, data)
                self._num_errors = 0
            except QuireError as wrong:
                await self._tell(refusal_of(wrong), _code(wrong), event_id)

    async def _next_message(self) -> Message | None:
        """None: the client is gone."""
        while True:
            try:
                async with asyncio.timeout(self._idle):
                    message = await self._call.receive()
            except TimeoutError:
                if self._is_writing:
                    continue
                words = f"nothing came for {self._idle:g} s, the limit (QUIRE_REALTIME_IDLE_SECONDS)"
                await self._end(refusal(408, words), "session_idle", _CLOSE_IDLE)
            return None if message["type"] == "websocket.disconnect" else message

    async def _parsed(self, message: Message) -> tuple[ClientEvent, bytes]:
        """The event and its audio: here, or in a lane where that takes long."""
        text = message.get("text")
        if text is None:
            raise InputError("events are text frames with JSON, and this frame is binary", param="type")
        if len(text) < LONG_TEXT:
            return _read(text)
        return await self._settings.served.engine.lanes.run(len(text), _read, text)

    async def _take(self, event: ClientEvent, data: bytes) -> None:
        match event.type:
            case "input_audio_buffer.append":
                await self._append(data)
            case "input_audio_buffer.commit":
                await self._commit(event.final)
            case "input_audio_buffer.clear":
                if (utterance := self._utterances.open) is not None:
                    utterance.clear()
                    self._hold()
                await self._send(self._wire.cleared())
            case "session.update":
                await self._update(event)
            case _:
                raise InputError(
                    f"type is {event.type!r:.100}; this version of Quire takes session.update, "
                    "input_audio_buffer.append, input_audio_buffer.commit and input_audio_buffer.clear",
                    param="type",
                )

    async def _update(self, event: ClientEvent) -> None:
        update, settings = read_update(event), self._settings
        wire = self._wire
        if event.session is not None and not isinstance(wire, OpenAIWire):
            wire = OpenAIWire(self._id)
            settings = replace(settings, rate=wire.rate)
        if update.model is not None:
            named = await self._sessions.settings(update.model)
            settings = replace(settings, served=named.served, model=named.model)
        self._change(_updated(settings, update))
        self._wire = wire
        await self._send(self._wire.updated(self._shown()))

    def _change(self, settings: _ListeningSettings) -> None:
        settings.model.check(settings.task)
        waiting = self._utterances.open
        if waiting is not None and waiting.num_samples and waiting.rate != settings.rate:
            raise InputError(
                f"the rate cannot become {settings.rate} while {waiting.seconds:.2f} s at {waiting.rate} wait: commit "
                "or clear them",
                param="session.audio.input.format",
            )
        self._settings = settings

    async def _append(self, data: bytes) -> None:
        utterance = self._utterances.open or self._begin()
        seconds = len(data) / (2 * utterance.rate)
        if (lasts := utterance.seconds + seconds) > (most := env.MAX_AUDIO_SECONDS.get()):
            raise _FullError(f"the utterance lasts {lasts:.1f} s; the limit is {most} s: commit it", param="audio")
        limit = max(self._most_seconds, 2.0 * self._settings.clip_seconds)
        while self._utterances.seconds + seconds > limit:
            first = self._utterances.first
            if not self._is_writing and (first is None or not first.is_ready):
                raise _FullError(
                    f"{self._utterances.seconds:.1f} s of audio wait and {seconds:.1f} s came; the limit is "
                    f"{limit:g} s (QUIRE_MAX_REALTIME_SECONDS): commit them",
                    param="audio",
                )
            self._room.clear()
            await self._room.wait()
        if utterance is not self._utterances.open:  # it failed meanwhile
            utterance = self._begin()
        self._hold(len(data))
        utterance.add(data)
        self._changed.set()

    def _hold(self, further: int = 0) -> None:
        """As much of the desk's memory as waiting audio takes, `further` bytes included that are about to wait.
        OverloadedError: there is not so much."""
        num_bytes = self._utterances.num_bytes + further
        if num_bytes > self._held_bytes:
            self._sessions.desk.take(num_bytes - self._held_bytes)
        else:
            self._sessions.desk.give(self._held_bytes - num_bytes)
        self._held_bytes = num_bytes

    def _begin(self, *, is_streamed: bool = False) -> Utterance:
        self._num_items += 1
        settings = self._settings
        item, longest = f"item_{self._id}_{self._num_items}", settings.clip_seconds * settings.rate
        utterance = Utterance(item, settings, settings.rate, longest, is_streamed=is_streamed)
        self._utterances.begin(utterance)
        return utterance

    async def _commit(self, is_final: bool) -> None:
        """With audio: its end. Without: in vLLM's form the beginning of an utterance that is heard as it comes."""
        utterance = self._utterances.open
        if utterance is None or not utterance.num_samples:
            if is_final or isinstance(self._wire, OpenAIWire):
                raise _EmptyError("no audio waits: append some before it is committed", param="audio")
            (utterance or self._begin()).is_streamed = True
            return
        if utterance.seconds < LEAST_SECONDS:
            raise _EmptyError(
                f"{utterance.seconds * 1000:.1f} ms of audio wait; an utterance has at least "
                f"{LEAST_SECONDS * 1000:g} ms",
                param="audio",
            )
        utterance.is_committed = True
        frames = self._wire.committed(utterance.item, self._last_item)
        self._last_item = utterance.item
        self._changed.set()
        await self._send(frames)

    # ---- what goes out ----------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            utterance = self._utterances.first
            if utterance is None or not utterance.is_ready:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                await self._transcribe(utterance)
            except (OSError, _EndedError):
                raise
            except Exception as error:  # the root of an utterance: whatever went wrong, its client is told
                why = refusal_of(error)
                await self._send(self._wire.failed(utterance.item, why))
                if isinstance(error, EngineDeadError):
                    raise _EndedError(_CLOSE_FAULT, why.message) from error
            finally:
                self._is_writing = False
                self._utterances.remove(utterance)
                self._hold()
                self._room.set()

    async def _transcribe(self, utterance: Utterance) -> None:
        settings: _ListeningSettings = utterance.settings
        state, model = self._sessions.state, settings.model
        call = HttpCall(state, self._call.scope, self._call.receive, self._call.send)
        call.model = settings.served
        plain = GenerateRequest.model_validate({"model": settings.served.name, "stream": True, "temperature": 0.0})
        hearing = _Hearing(SpeechCall(call, plain, model, source="audio"), settings.task, utterance.item)
        state.load.count += 1
        try:
            while await self._has_clip(utterance):
                self._is_writing = True
                work = partial(next_clip, utterance.head(), utterance.rate, model.config)
                num_clears = utterance.num_clears
                (clip,) = await self._sessions.desk.decoded(settings.served, work)
                if num_clears == utterance.num_clears:
                    utterance.drop(clip)
                    self._hold()
                self._sessions.desk.take(clip.samples.nbytes)
                try:
                    async with asyncio.timeout(state.options.request_timeout):
                        await hearing.hear(clip, self._say)
                except TimeoutError:
                    raise DeadlineError(
                        "a clip was not transcribed in the time it was given (--request-timeout)"
                    ) from None
                finally:
                    self._sessions.desk.give(clip.samples.nbytes)
                    self._is_writing = False
                    self._room.set()
            hearing.counts.seconds = utterance.seconds
            await self._send(self._wire.done(utterance.item, hearing.text.whole, hearing.counts))
        finally:
            state.load.count -= 1

    async def _has_clip(self, utterance: Utterance) -> bool:
        """Once the next one is known. False: it was the last."""
        while not utterance.is_ready:
            self._changed.clear()
            await self._changed.wait()
        return bool(utterance.pcm)

    async def _say(self, item: str, text: str) -> None:
        await self._send(self._wire.delta(item, text))

    def _shown(self) -> Shown:
        settings = self._settings
        return Shown(self._id, settings.served.name, settings.rate, settings.language, settings.prompt)

    async def _tell(self, why: Refusal, code: str, event_id: str | None) -> None:
        await self._send(self._wire.error(why, code, event_id))
        self._num_errors += 1
        if self._num_errors >= MOST_ERRORS:
            raise _EndedError(_CLOSE_POLICY, f"{self._num_errors} events in a row were refused, the limit")

    async def _end(self, why: Refusal, code: str, close: int) -> NoReturn:
        await self._send(self._wire.error(why, code))
        raise _EndedError(close, why.message)

    async def _send(self, frames: Iterable[str]) -> None:
        for frame in frames:
            await self._sent({"type": "websocket.send", "text": frame})

    async def _sent(self, message: Message) -> None:
        """A client that reads nothing is not waited for: it is gone."""
        try:
            async with asyncio.timeout(self._idle):
                await self._call.send(message)
        except TimeoutError:  # no deadline of a request, which has one of its own
            raise ConnectionAbortedError(f"the client read nothing for {self._idle:g} s") from None


class _Hearing:
    """One utterance as it becomes text."""

    def __init__(self, speech: SpeechCall, task: SpeechTask, item: str) -> None:
        self._speech, self._task, self._item = speech, task, item
        self._public_id = f"trsc-{item}"
        self._num_clips = 0
        self.text, self.counts = JoinedText(""), ItemCounts()

    async def hear(self, clip: Clip, say: Callable[[str, str], Awaitable[None]]) -> None:
        speech, number = self._speech, self._num_clips
        if number == 0:
            if self._task.language is None:
                language = await speech.language(self._public_id, clip)
                self._task = replace(self._task, language=language)
            self.text = JoinedText(speech.model.joint_of(self._task.language))
        params, prompt = speech.params(self._task), await speech.prompt(self._task)
        _, flow = await speech.open(f"{self._public_id}-{number}", prompt, params, clip)
        self._num_clips += 1
        with flow:
            while not flow.finished:
                for result in await flow.next():
                    if result.finished:
                        audio = speech.model.audio_tokens(clip.seconds)
                        self.counts.num_prompt_tokens += len(result.prompt_token_ids or ()) + audio
                    for output in result.outputs:
                        if output.finish_reason == "abort":
                            raise OverloadedError("the request was aborted before its end; send the audio again")
                        self.counts.num_tokens += len(output.token_ids)
                        if text := self.text.add(number, speech.model.clean(output.text)):
                            await say(self._item, text)


class _FullError(InputError):
    code = "input_audio_buffer_full"


class _EmptyError(InputError):
    code = "input_audio_buffer_commit_empty"


def _code(error: QuireError) -> str:
    if isinstance(error, _FullError | _EmptyError):
        return error.code
    return "model_not_found" if error.status == 404 else "invalid_event" if error.status < 500 else "server_error"


def _updated(settings: _ListeningSettings, update: SessionUpdate) -> _ListeningSettings:
    language = settings.language if update.language is None else update.language.strip().lower() or None
    return replace(
        settings,
        language=language,
        prompt=settings.prompt if update.prompt is None else update.prompt,
        rate=settings.rate if update.rate is None else update.rate,
    )


def _read(text: str) -> tuple[ClientEvent, bytes]:
    event = read_event(text)
    return event, read_pcm(event.audio) if event.type == "input_audio_buffer.append" else b""
