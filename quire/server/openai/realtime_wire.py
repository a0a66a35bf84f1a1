"""Events of /v1/realtime on the wire, in both forms that clients know: vLLM's, and OpenAI's transcription sessions.

In: text frames of a client; what a session has to say. Out: checked events; text frames. A session speaks OpenAI's form
if its client does: the address has a query (`?model=`, `?intent=`), or a `session.update` holds a `session`.
Must not know: audio, engines, sockets.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from quire.schema.errors import InputError, NotBuiltError
from quire.server.errors import Refusal

VLLM_RATE, OPENAI_RATE = 16000, 24000  # samples per second, unless a client says otherwise
_RATES = (8000, 48000)
_Text = Annotated[str, Meta(max_length=1 << 15)]
_Name = Annotated[str, Meta(max_length=256)]


# ---- what clients send ----------------------------------------------------------------------------------------------


class TranscriptionSettings(Struct):
    model: _Name | None = None
    language: Annotated[str, Meta(max_length=16)] | None = None
    prompt: _Text | None = None


class AudioFormat(Struct):
    type: _Name = "audio/pcm"
    rate: int = OPENAI_RATE


class InputSettings(Struct):
    format: AudioFormat | None = None
    transcription: TranscriptionSettings | None = None
    turn_detection: Raw | UnsetType = UNSET
    noise_reduction: Raw | UnsetType = UNSET


class AudioSettings(Struct):
    input: InputSettings | None = None


class SessionSettings(Struct):
    type: _Name = "transcription"
    audio: AudioSettings | None = None
    include: Annotated[list[_Name], Meta(max_length=16)] | None = None


class ClientEvent(Struct):
    type: _Name
    event_id: _Name | None = None
    audio: str | None = None
    final: bool = False
    model: _Name | None = None  # vLLM's session.update
    session: SessionSettings | None = None  # OpenAI's


_decoder = msgspec.json.Decoder(ClientEvent)


def read_event(text: str | bytes) -> ClientEvent:
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError, ValueError) as wrong:
        raise InputError(f"the event cannot be read: {str(wrong)[:300]}", param="type") from None


@dataclass(frozen=True)
class SessionUpdate:
    """What a session.update asks for. None: as before."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    rate: int | None = None


def read_update(event: ClientEvent) -> SessionUpdate:
    session = event.session
    if session is None:
        return SessionUpdate(model=event.model)
    if session.type != "transcription":
        raise NotBuiltError(
            f"session.type is {session.type!r:.60}; sessions of this version of Quire transcribe: it must be "
            "'transcription'",
            param="session.type",
        )
    if session.include:
        raise NotBuiltError("session.include is not in this version of Quire", param="session.include")
    heard = session.audio.input if session.audio is not None else None
    if heard is None:
        return SessionUpdate()
    for name in ("turn_detection", "noise_reduction"):
        value = getattr(heard, name)
        if value is not UNSET and bytes(value) != b"null":
            raise NotBuiltError(
                f"session.audio.input.{name} is not in this version of Quire: it must be null",
                param=f"session.audio.input.{name}",
            )
    transcription = heard.transcription or TranscriptionSettings()
    return SessionUpdate(
        transcription.model, transcription.language, transcription.prompt, _rate(heard.format) if heard.format else None
    )


def _rate(form: AudioFormat) -> int:
    if form.type != "audio/pcm":
        raise NotBuiltError(
            f"session.audio.input.format.type is {form.type!r:.60}; it must be 'audio/pcm'",
            param="session.audio.input.format",
        )
    low, high = _RATES
    if not low <= form.rate <= high:
        raise InputError(
            f"session.audio.input.format.rate is {form.rate}; it must lie between {low} and {high}",
            param="session.audio.input.format",
        )
    return form.rate


# ---- what clients are sent ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """A session as its client sees it."""

    session_id: str
    model: str
    rate: int
    language: str | None = None
    prompt: str = ""


@dataclass
class ItemCounts:
    """Of one item."""

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


class RealtimeWire(Protocol):
    """One form of events. Each method makes the frames that say so."""

    rate: int  # of audio, unless the client says otherwise

    def created(self, session: Shown) -> list[str]: ...
    def updated(self, session: Shown) -> list[str]: ...
    def committed(self, item: str, previous: str | None) -> list[str]: ...
    def cleared(self) -> list[str]: ...
    def delta(self, item: str, text: str) -> list[str]: ...
    def done(self, item: str, text: str, counts: ItemCounts) -> list[str]: ...
    def failed(self, item: str, why: Refusal) -> list[str]: ...
    def error(self, why: Refusal, code: str, event_id: str | None = None) -> list[str]: ...


class VllmWire:
    rate = VLLM_RATE

    def created(self, session: Shown) -> list[str]:
        return [_frame("session.created", id=session.session_id, created=int(time.time()))]

    def updated(self, session: Shown) -> list[str]:
        return []

    def committed(self, item: str, previous: str | None) -> list[str]:
        return []

    def cleared(self) -> list[str]:
        return []

    def delta(self, item: str, text: str) -> list[str]:
        return [_frame("transcription.delta", delta=text)]

    def done(self, item: str, text: str, counts: ItemCounts) -> list[str]:
        prompt, answer = counts.num_prompt_tokens, counts.num_tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        return [_frame("transcription.done", text=text, usage=usage)]

    def failed(self, item: str, why: Refusal) -> list[str]:
        return self.error(why, "transcription_failed")

    def error(self, why: Refusal, code: str, event_id: str | None = None) -> list[str]:
        return [_frame("error", error=why.message, code=code)]


class OpenAIWire:
    rate = OPENAI_RATE
    _SAID = "conversation.item.input_audio_transcription"

    def __init__(self, session_id: str) -> None:
        self._ids = (f"event_{session_id}_{number}" for number in itertools.count())

    def created(self, session: Shown) -> list[str]:
        return [self._frame("session.created", session=self._session(session))]

    def updated(self, session: Shown) -> list[str]:
        return [self._frame("session.updated", session=self._session(session))]

    def committed(self, item: str, previous: str | None) -> list[str]:
        content = [{"type": "input_audio", "transcript": None}]
        added = {
            "id": item, "object": "realtime.item", "type": "message", "role": "user", "status": "completed",
            "content": content,
        }  # fmt: skip
        return [
            self._frame("input_audio_buffer.committed", item_id=item, previous_item_id=previous),
            self._frame("conversation.item.added", item=added, previous_item_id=previous),
        ]

    def cleared(self) -> list[str]:
        return [self._frame("input_audio_buffer.cleared")]

    def delta(self, item: str, text: str) -> list[str]:
        return [self._frame(f"{self._SAID}.delta", item_id=item, content_index=0, delta=text)]

    def done(self, item: str, text: str, counts: ItemCounts) -> list[str]:
        usage = {"type": "duration", "seconds": round(counts.seconds, 3)}
        return [self._frame(f"{self._SAID}.completed", item_id=item, content_index=0, transcript=text, usage=usage)]

    def failed(self, item: str, why: Refusal) -> list[str]:
        error = self._error(why, "transcription_failed")
        return [self._frame(f"{self._SAID}.failed", item_id=item, content_index=0, error=error)]

    def error(self, why: Refusal, code: str, event_id: str | None = None) -> list[str]:
        return [self._frame("error", error={**self._error(why, code), "event_id": event_id})]

    @staticmethod
    def _error(why: Refusal, code: str) -> dict[str, Any]:
        kind = "server_error" if why.status >= 500 else "invalid_request_error"
        return {"type": kind, "code": code, "message": why.message, "param": why.param}

    @staticmethod
    def _session(session: Shown) -> dict[str, Any]:
        transcription = {"model": session.model, "language": session.language, "prompt": session.prompt}
        heard = {
            "format": {"type": "audio/pcm", "rate": session.rate}, "transcription": transcription,
            "turn_detection": None, "noise_reduction": None,
        }  # fmt: skip
        return {
            "id": session.session_id, "object": "realtime.transcription_session", "type": "transcription",
            "audio": {"input": heard}, "include": None,
        }  # fmt: skip

    def _frame(self, kind: str, **values: Any) -> str:
        return _frame(kind, event_id=next(self._ids), **values)


def _frame(kind: str, **values: Any) -> str:
    return msgspec.json.encode({"type": kind, **values}).decode()
