"""Server-sent events: an answer's chunks while it grows, an error as the last of them, and [DONE].

In: a Flow of results and an Answer that renders them as bytes. Out: one ASGI response. The status waits for the first
result, so that a refusal before it has a status of its own. A whole answer is the drained stream (`drained`).
Must not know: dialects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import ParamSpec, Protocol, TypeVar

from quire.schema.outputs import RequestOutput
from quire.server.errors import ClientGoneError, Refusal, refusal_of
from quire.server.flow import Results
from quire.server.route import HttpCall

Args = ParamSpec("Args")
Value = TypeVar("Value")
_MANY_POSITIONS = 1024
DONE = b"data: [DONE]\n\n"
_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Protocol):
    """A dialect's rendering of one call's results as events."""

    def chunk(self, results: list[RequestOutput]) -> bytes:
        """Events for what is new; may be empty."""

    def end(self) -> bytes:
        """Events after the last result."""


class WholeAnswer(Protocol):
    """The same as one answer: what the events would show is collected."""

    def take(self, results: list[RequestOutput]) -> None: ...
    def end(self) -> object: ...

    def whole(self) -> bytes:
        """After `end`."""


def _last_event(refusal: Refusal) -> bytes:
    return refusal.event + DONE


async def send_events(
    call: HttpCall,
    flow: Results,
    answer: Answer,
    *,
    done: bytes = DONE,
    failed: Callable[[Refusal], bytes] = _last_event,
) -> None:
    """The whole response. The caller closes the flow: leaving early, by an error or a client that went, ends it.
    `done` and `failed` are how the dialect ends a stream, well or not."""
    call.watch(flow)
    silence = call.state.options.sse_keep_alive_interval
    send = call.send
    try:
        results = await (_next_or_comment(call, flow, silence) if silence else flow.next())
        if not call.started:
            await start_events(call)
        while True:
            data = (
                answer.chunk(results) if _is_little(results) else await rendered(call, results, answer.chunk, results)
            )
            if flow.finished:
                break
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            results = await (_next_or_comment(call, flow, silence) if silence else flow.next())
        data += answer.end() + done
    except ClientGoneError:
        return
    except Exception as error:
        if not call.started:
            raise
        data = failed(refusal_of(error, full=call.state.options.queue_full_status))
    await send({"type": "http.response.body", "body": data})


async def rendered(
    call: HttpCall, results: Iterable[RequestOutput], render: Callable[Args, Value], *args: Args.args,
    **kwargs: Args.kwargs,
) -> Value:  # fmt: skip
    """What an answer makes of results: in a lane where log probabilities of a whole prompt, or a long answer that comes
    at once, would hold up the event loop."""
    size = sum(_num_positions(result) for result in results)
    if size <= _MANY_POSITIONS:
        return render(*args, **kwargs)
    return await call.state.engine.lanes.run(size, render, *args, **kwargs)


def _is_little(results: list[RequestOutput]) -> bool:
    """A quick look, for the results of nearly every step: some tokens of some requests."""
    return len(results) == 1 and results[0].prompt_logprobs is None and len(results[0].outputs) == 1


def _num_positions(result: RequestOutput) -> int:
    return len(result.prompt_logprobs or ()) + sum(len(output.token_ids) for output in result.outputs)


async def fold(call: HttpCall, flow: Results) -> dict[str, RequestOutput]:
    """All results of a call, each whole, by request id: for what is no answer in text."""
    call.watch(flow)
    whole: dict[str, RequestOutput] = {}
    while not flow.finished:
        for result in await flow.next():
            if (earlier := whole.get(result.request_id)) is None:
                whole[result.request_id] = result
            else:
                earlier.add(result)
    return whole


async def drained(call: HttpCall, flow: Results, answer: WholeAnswer) -> bytes:
    """The whole answer: what a stream would show, collected."""
    call.watch(flow)
    size = 0
    while not flow.finished:
        results = await flow.next()
        size += sum(map(_num_positions, results))
        await rendered(call, results, answer.take, results)
    answer.end()
    return answer.whole() if size <= _MANY_POSITIONS else await call.state.engine.lanes.run(size, answer.whole)


async def start_events(call: HttpCall) -> None:
    """The status and headers of a stream."""
    call.started = True
    await call.send({"type": "http.response.start", "status": 200, "headers": _HEADERS})


async def _next_or_comment(call: HttpCall, flow: Results, silence: float) -> list[RequestOutput]:
    while True:
        try:
            return await asyncio.wait_for(flow.next(), silence)
        except TimeoutError:
            if not call.started:
                await start_events(call)
            await call.send({"type": "http.response.body", "body": _ALIVE, "more_body": True})
