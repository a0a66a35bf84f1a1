"""SpeechAnswer: the results of all clips of an audio as one text, in the order of the clips, in any of the formats.

A whole answer is the fold of what a stream writes. In: results of the engine. Out: bytes. Must not know: audio.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.media.speech.clips import Clip
from quire.media.speech.model import TRANSCRIBE, SpeechModel, SpeechTask
from quire.schema.errors import OverloadedError
from quire.schema.outputs import CompletionOutput, RequestOutput
from quire.server.openai.envelope import to_json
from quire.server.openai.protocol import Usage
from quire.server.openai.speech_protocol import (
    DurationUsage,
    SpeechChoice,
    SpeechChunk,
    SpeechDelta,
    SpeechRequest,
    SpeechSegment,
    SpeechText,
    SpeechTextVerbose,
)

_PER_SECOND = 100  # of `seek`


@dataclass
class _ClipText:
    """The text of one clip as it grows."""

    clip: Clip
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    num_prompt_tokens: int = 0


class JoinedText:
    """Texts of clips as one: the first has no space before it, those of two clips may have one between them."""

    def __init__(self, joint: str) -> None:
        self._joint, self._last = joint, -1  # the clip of the piece before
        self._pieces: list[str] = []

    def add(self, clip: int, text: str) -> str:
        """A piece as it stands behind those before."""
        if not self._pieces:
            text = text.lstrip()
        elif self._joint and self._last != clip:
            text = self._joint + text.lstrip()
        if text:
            self._pieces.append(text)
            self._last = clip
        return text

    @property
    def whole(self) -> str:
        return "".join(self._pieces)


class SpeechAnswer:
    def __init__(
        self, request: SpeechRequest, task: SpeechTask, model: SpeechModel, clips: Sequence[Clip],
        clip_of: Callable[[str], int], *, name: str, public_id: str,
    ) -> None:  # fmt: skip
        """`task`: with the language that was given or detected. `clip_of`: by the id of a request."""
        self._request, self._task, self._model, self._clip_of = request, task, model, clip_of
        self._clips = [_ClipText(clip) for clip in clips]
        self._seconds = clips[-1].start + clips[-1].seconds
        self._text = JoinedText(model.joint_of(task.language))
        self._current = 0  # the clip whose text is next
        kind: Literal["transcription", "translation"] = "transcription" if task.kind == TRANSCRIBE else "translation"
        self._head: dict[str, Any] = {
            "id": public_id, "object": f"{kind}.chunk", "created": int(time.time()), "model": name,
        }  # fmt: skip

    def _add(self, results: list[RequestOutput]) -> Iterator[tuple[int, str]]:
        """Which clip has which new text."""
        for result in results:
            number = self._clip_of(result.request_id)
            grown = self._clips[number]
            grown.num_prompt_tokens = len(result.prompt_token_ids or ())
            for output in result.outputs:
                grown.token_ids += output.token_ids
                grown.logprobs += _chosen(output)
                grown.finish_reason = output.finish_reason or grown.finish_reason
                yield number, self._model.clean(output.text)

    # ---- streamed ----------------------------------------------------------------------------------------------

    def chunk(self, results: list[RequestOutput]) -> bytes:
        """Texts of later clips wait for those before them."""
        for number, text in self._add(results):
            self._clips[number].pieces.append(text)
        news = []
        while True:
            grown = self._clips[self._current]
            if text := "".join(grown.pieces):
                news.append(self._text.add(self._current, text))
            grown.pieces.clear()
            if grown.finish_reason is None or self._current + 1 == len(self._clips):
                break
            self._current += 1
        text = "".join(news)
        return self._event(text) if text else b""

    def end(self) -> bytes:
        """The end as both clients know it, then the usage."""
        if not self._request.stream:
            return b""
        reasons = {one.finish_reason for one in self._clips}
        reason = next((one for one in ("abort", "length") if one in reasons), "stop")
        choice = SpeechChoice(delta=SpeechDelta(content=""), finish_reason=reason, stop_reason=None)
        last: dict[str, Any] = {}
        if self._task.kind == TRANSCRIBE:
            last = {"type": "transcript.text.done", "text": self._text.whole}
        data = self._encoded(SpeechChunk(**self._head, choices=[choice], **self._usage_so_far(), **last))
        if self._request.stream_include_usage:
            data += self._encoded(SpeechChunk(**self._head, choices=[], usage=self._usage()))
        return data

    def _event(self, text: str) -> bytes:
        choice = SpeechChoice(delta=SpeechDelta(content=text), finish_reason=None, stop_reason=None)
        further: dict[str, Any] = (
            {"type": "transcript.text.delta", "delta": text} if self._task.kind == TRANSCRIBE else {}
        )
        return self._encoded(SpeechChunk(**self._head, choices=[choice], **self._usage_so_far(), **further))

    def _encoded(self, chunk: SpeechChunk) -> bytes:
        return b"data: " + to_json(chunk) + b"\n\n"

    def _usage_so_far(self) -> dict[str, Any]:
        request = self._request
        wants = request.stream_include_usage and request.stream_continuous_usage_stats
        return {"usage": self._usage()} if wants else {}

    def _usage(self) -> Usage:
        heard = [one for one in self._clips if one.num_prompt_tokens]
        prompt = sum(one.num_prompt_tokens + self._model.audio_tokens(one.clip.seconds) for one in heard)
        answer = sum(len(one.token_ids) for one in self._clips)
        return Usage(prompt_tokens=prompt, completion_tokens=answer, total_tokens=prompt + answer)

    # ---- whole -------------------------------------------------------------------------------------------------

    def take(self, results: list[RequestOutput]) -> None:
        for number, text in self._add(results):
            self._clips[number].pieces.append(text)

    def whole(self) -> bytes:
        """After the last result. No format can say that some of the text is missing."""
        if num := sum(one.finish_reason == "abort" for one in self._clips):
            raise OverloadedError(f"{num} of {len(self._clips)} clips were aborted before their end; send it again")
        if self._request.response_format in ("json", "text"):
            text = self._plain_text()
            if self._request.response_format == "text":
                return text.encode() + b"\n"
            return to_json(SpeechText(text=text, usage=self._duration()))
        segments = list(self._segments())
        if self._request.response_format == "srt":
            return _srt(segments).encode()
        if self._request.response_format == "vtt":
            return _vtt(segments).encode()
        return to_json(
            SpeechTextVerbose(
                task="transcribe" if self._task.kind == TRANSCRIBE else "translate",
                language=self._task.language or "unknown",
                duration=round(self._seconds, 3),
                text="".join(one.text for one in segments).strip(),
                segments=segments,
                words=None,
                usage=self._duration(),
            )
        )

    def _plain_text(self) -> str:
        for number, grown in enumerate(self._clips):
            if text := "".join(grown.pieces):
                self._text.add(number, text)
        return self._text.whole

    def _duration(self) -> DurationUsage:
        return DurationUsage(type="duration", seconds=math.ceil(self._seconds))

    def _segments(self) -> Iterator[SpeechSegment]:
        """With times in the whole audio."""
        number = 0
        for grown in self._clips:
            offset = grown.clip.start
            for span in self._model.spans(grown.token_ids, grown.clip.seconds):
                token_ids = grown.token_ids[span.begin : span.stop]
                text = self._model.text(token_ids)
                logprobs = grown.logprobs[span.begin : span.stop]
                yield SpeechSegment(
                    id=number,
                    seek=round(offset * _PER_SECOND),
                    start=round(offset + span.start, 3),
                    end=round(offset + span.end, 3),
                    text=text,
                    tokens=token_ids,
                    temperature=self._request.temperature,
                    avg_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
                    compression_ratio=_compression_ratio(text),
                    no_speech_prob=None,
                )
                number += 1


def _chosen(output: CompletionOutput) -> Iterator[float]:
    """Log probabilities of the tokens themselves, where they were asked for."""
    for token_id, entries in zip(output.token_ids, output.logprobs or (), strict=False):
        if entries is not None:
            yield entries[token_id].logprob


def _compression_ratio(text: str) -> float:
    """How much repeats itself: bytes of the text to those of it compressed."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def _srt(segments: Sequence[SpeechSegment]) -> str:
    return "".join(
        f"{number}\n{_clock(one.start, ',')} --> {_clock(one.end, ',')}\n{_cue(one.text)}\n\n"
        for number, one in enumerate(segments, 1)
    )


def _vtt(segments: Sequence[SpeechSegment]) -> str:
    return "WEBVTT\n\n" + "".join(
        f"{_clock(one.start, '.')} --> {_clock(one.end, '.')}\n{_cue(one.text)}\n\n" for one in segments
    )


def _cue(text: str) -> str:
    """An empty line, or an arrow, would end the cue."""
    return " ".join(text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    whole = round(seconds * 1000)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{point}{whole % 1000:03}"
