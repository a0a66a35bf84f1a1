"""ClipFlow and SpeechAnswer: clips run side by side, and their texts stand in order, streamed or whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from quire.media.speech.clips import Clip
from quire.media.speech.model import TRANSLATE, SpeechTask
from quire.schema.errors import EngineGenerateError, OverloadedError
from quire.schema.outputs import CompletionOutput, Logprob, RequestOutput
from quire.server.forms import FormFile
from quire.server.openai.speech_answer import SpeechAnswer
from quire.server.openai.speech_flow import MOST_OPEN, ClipFlow
from quire.server.openai.speech_protocol import TranscriptionRequest
from tests.plain.media.test_speech import at, whisper


def result(name: str, text: str, *, last: bool = False, ids: Sequence[int] = ()) -> RequestOutput:
    token_ids = list(ids) or list(text.encode())
    logprobs = [{one: Logprob(-0.5)} for one in token_ids]
    output = CompletionOutput(0, text, token_ids, logprobs=logprobs, finish_reason="stop" if last else None)
    return RequestOutput(name, None, [1, 2, 3], None, [output], last)


class Scripted:
    """A flow that gives what it was fed."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self.finished = self.closed = False

    async def next(self) -> list[RequestOutput]:
        one = await self.queue.get()
        if isinstance(one, Exception):
            raise one
        self.finished = one.finished
        return [one]

    def fail(self, error: Exception) -> None: ...

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()


class Stage:
    def __init__(self, num: int) -> None:
        self.flows = [Scripted() for _ in range(num)]
        self.opened: list[int] = []
        self.flow = ClipFlow(num, self.open)

    async def open(self, number: int) -> tuple[str, Any]:
        self.opened.append(number)
        return f"r{number}", self.flows[number]

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


def test_few_clips_are_open_at_once() -> None:
    async def main() -> None:
        stage = Stage(MOST_OPEN + 3)
        waiting = asyncio.ensure_future(stage.flow.next())
        await stage.settle()
        assert stage.opened == list(range(MOST_OPEN))
        stage.flows[5].queue.put_nowait(result("r5", "x", last=True))
        (first,) = await waiting
        assert stage.flow.clip_of[first.request_id] == 5
        waiting = asyncio.ensure_future(stage.flow.next())
        await stage.settle()
        assert stage.opened == list(range(MOST_OPEN + 1))
        for number in range(MOST_OPEN + 3):
            stage.flows[number].queue.put_nowait(result(f"r{number}", "x", last=True))
        num = len(await waiting)
        while not stage.flow.finished:
            num += len(await stage.flow.next())
        assert num == MOST_OPEN + 2 and all(one.closed for one in stage.flows)

    asyncio.run(main())


def test_one_that_fails_ends_all() -> None:
    async def main() -> None:
        stage = Stage(3)
        waiting = asyncio.ensure_future(stage.flow.next())
        await stage.settle()
        stage.flows[1].queue.put_nowait(EngineGenerateError("no"))
        with pytest.raises(EngineGenerateError):
            await waiting
        await stage.settle()
        assert all(one.closed for one in stage.flows) and not stage.flow.finished
        with pytest.raises(EngineGenerateError):
            await stage.flow.next()

    asyncio.run(main())


def test_failing_and_closing_it() -> None:
    async def main() -> None:
        stage = Stage(2)
        waiting = asyncio.ensure_future(stage.flow.next())
        await stage.settle()
        stage.flow.fail(TimeoutError("late"))
        with pytest.raises(TimeoutError, match="late"):
            await waiting
        await stage.settle()
        assert all(one.closed for one in stage.flows)
        other = Stage(2)
        waiting = asyncio.ensure_future(other.flow.next())
        await other.settle()
        other.flow.close()
        await other.settle()
        assert all(one.closed for one in other.flows)
        waiting.cancel()

    asyncio.run(main())


def answer(num_clips: int = 2, *, kind: str = "transcribe", **fields: Any) -> SpeechAnswer:
    request = TranscriptionRequest(file=FormFile("a", memoryview(b"")), **fields)
    clips = [Clip(np.zeros(1, np.float32), 29.5 * number, 29.5) for number in range(num_clips)]
    task = SpeechTask(kind=kind, language="en", with_timestamps=request.response_format not in ("json", "text"))
    names = {f"r{number}": number for number in range(num_clips)}
    return SpeechAnswer(request, task, whisper(), clips, names.__getitem__, name="m", public_id="trsc-1")


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(piece.removeprefix("data: ")) for piece in data.decode().split("\n\n") if piece]


def test_later_clips_wait_for_earlier_ones() -> None:
    told = answer(3, stream=True, stream_include_usage=True, stream_continuous_usage_stats=True)
    assert told.chunk([result("r1", " two", last=True)]) == b""
    assert told.chunk([result("r2", " th")]) == b""
    (first,) = events(told.chunk([result("r0", " o")]))
    assert first["choices"][0]["delta"]["content"] == first["delta"] == "o"
    assert first["object"] == "transcription.chunk" and first["type"] == "transcript.text.delta"
    assert first["usage"]["completion_tokens"] == 9 and first["usage"]["prompt_tokens"] == 9 + 3 * 2950
    (second,) = events(told.chunk([result("r0", "ne", last=True)]))
    assert second["delta"] == "ne two th"
    (third,) = events(told.chunk([result("r2", "ree", last=True)]))
    done, usage = events(told.end())
    assert third["delta"] == "ree" and done["text"] == "one two three" and done["type"] == "transcript.text.done"
    assert done["choices"] == [{"delta": {"content": ""}, "finish_reason": "stop", "stop_reason": None}]
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 9 + 3 * 2950 + 14


def test_a_translation_has_its_own_chunks() -> None:
    told = answer(1, kind=TRANSLATE, stream=True)
    (first,) = events(told.chunk([result("r0", " Hi", last=True)]))
    assert first["object"] == "translation.chunk" and "type" not in first and "usage" not in first
    (last,) = events(told.end())
    assert last["choices"][0]["finish_reason"] == "stop"


def whole(told: SpeechAnswer, *results: RequestOutput) -> str:
    for one in results:
        told.take([one])
    assert told.end() == b""
    return told.whole().decode()


def test_json_and_text() -> None:
    results = [result("r1", " you", last=True), result("r0", " Hi", last=True)]
    assert json.loads(whole(answer(), *results)) == {"text": "Hi you", "usage": {"type": "duration", "seconds": 59}}
    assert whole(answer(response_format="text"), *results) == "Hi you\n"


def test_an_aborted_clip_is_told() -> None:
    """Where no field can say so, an answer with a part missing is none."""
    lost = RequestOutput("r1", None, [1], None, [CompletionOutput(0, "", [], finish_reason="abort")], True)
    with pytest.raises(OverloadedError, match="1 of 2 clips"):
        whole(answer(), result("r0", " Hi", last=True), lost)
    told = answer(stream=True)
    told.chunk([result("r0", " Hi", last=True), lost])
    assert events(told.end())[0]["choices"][0]["finish_reason"] == "abort"


TIMED = [
    result("r1", "", last=True, ids=[at(0.5), *b" you -->\n\nx", at(2)]),
    result("r0", "", last=True, ids=[at(0), *b" Hi", at(1.26), at(1.5), *b" all", at(3)]),
]


def test_verbose_json() -> None:
    found = json.loads(whole(answer(response_format="verbose_json", temperature=0.25), *TIMED))
    segments = found.pop("segments")
    assert found == {"task": "transcribe", "language": "en", "duration": 59.0, "text": "Hi all you -->\n\nx",
                     "words": None, "usage": {"type": "duration", "seconds": 59}}  # fmt: skip
    assert [(one["id"], one["seek"], one["start"], one["end"]) for one in segments] == [
        (0, 0, 0.0, 1.26), (1, 0, 1.5, 3.0), (2, 2950, 30.0, 31.5),
    ]  # fmt: skip
    assert segments[0]["tokens"] == [at(0), *b" Hi", at(1.26)] and segments[0]["text"] == " Hi"
    assert {one["avg_logprob"] for one in segments} == {-0.5} and segments[0]["temperature"] == 0.25
    assert 0 < segments[0]["compression_ratio"] < 1 and segments[0]["no_speech_prob"] is None


def test_srt_and_vtt() -> None:
    assert whole(answer(response_format="srt"), *TIMED) == (
        "1\n00:00:00,000 --> 00:00:01,260\nHi\n\n2\n00:00:01,500 --> 00:00:03,000\nall\n\n"
        "3\n00:00:30,000 --> 00:00:31,500\nyou -> x\n\n"
    )
    assert whole(answer(response_format="vtt"), *TIMED).startswith(
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.260\nHi\n\n00:00:01.500"
    )
