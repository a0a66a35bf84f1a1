"""/v1/responses: create (streamed, whole or in the background), retrieve, input items, cancel, delete.

In: a ResponsesRequest. Out: a response or its events. Inside it is a chat like any other (chat_open.py). Answers are
kept only where the server was told to (QUIRE_ENABLE_RESPONSES_API_STORE), each for whoever showed the key that it was
made with. Must not know: engines, templates.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.responses import StreamingResponse

from quire.base.log import logger
from quire.schema.errors import DeadlineError, InputError, OverloadedError
from quire.server.callers import caller_of
from quire.server.errors import ERROR_RESPONSES, refusal_of, renamed
from quire.server.openai.chat_open import OpenedChat, open_chat, prepare_chat
from quire.server.openai.envelope import encode
from quire.server.openai.limits import forget_unused
from quire.server.openai.responses_answer import ResponseAnswer, ResponseStream, WholeResponse
from quire.server.openai.responses_input import (
    LOGPROBS,
    NAMES,
    Messages,
    chat_request,
    earlier_messages,
    input_items,
    read_input,
)
from quire.server.openai.responses_protocol import DeletedResponse, ResponseItemList, ResponsesRequest
from quire.server.openai.responses_rounds import MOST_ROUNDS, Rounds, ServerTools, server_tools, shown
from quire.server.openai.responses_store import NoSuchResponseError, Record, ResponseStore
from quire.server.openai.responses_wire import (
    CONTENTS,
    EVENTS,
    ITEMS,
    InputTokens,
    OutputContent,
    OutputItem,
    ResponsesEvent,
    ResponsesResponse,
    event_bytes,
)
from quire.server.route import App, HttpCall, add_route
from quire.server.state import ServerState
from quire.server.stream import drained, send_events

log = logger(__name__)
PATH = "/v1/responses"
_TAG = "responses"
_OFF = "this server keeps no responses; start it with QUIRE_ENABLE_RESPONSES_API_STORE=1"
_EVENTS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_ERRORS: dict[int | str, dict[str, Any]] = {status: ERROR_RESPONSES[status] for status in (400, 401, 404, 500)}


class CancelledResponseError(Exception):
    """Its client asked to end it."""


def add_routes(app: App, state: ServerState) -> None:
    routes = Responses(state, ResponseStore.of_environment())
    add_route(
        app, PATH, routes.create_response, ResponsesRequest, answer=ResponsesResponse, streams=EVENTS,
        tag=_TAG, ends_with_done=False,
    )  # fmt: skip
    add_route(app, f"{PATH}/input_tokens", routes.count_input_tokens, ResponsesRequest, answer=InputTokens, tag=_TAG)
    app.document_kinds(OutputItem, ITEMS)
    app.document_kinds(OutputContent, CONTENTS)
    router = APIRouter(tags=[_TAG])
    one = PATH + "/{response_id}"
    responses = app.documented({200: {"model": ResponsesResponse, "description": "As it stands."}, **_ERRORS})
    router.add_api_route(one, routes.retrieve_response, methods=["GET"], operation_id="retrieve_response",
                         response_model=None, responses=responses)  # fmt: skip
    router.add_api_route(one, routes.delete_response, methods=["DELETE"], operation_id="delete_response",
                         responses=_ERRORS)  # fmt: skip
    router.add_api_route(f"{one}/input_items", routes.list_input_items, methods=["GET"],
                         operation_id="list_response_input_items", responses=_ERRORS)  # fmt: skip
    router.add_api_route(f"{one}/cancel", routes.cancel_response, methods=["POST"], operation_id="cancel_response",
                         response_model=None, responses=responses)  # fmt: skip
    app.include_router(router)


def _input_messages(request: ResponsesRequest, takes_media: bool) -> Messages:
    return earlier_messages(request) + read_input(request, takes_media=takes_media)


class Responses:
    """The routes, and the store they share."""

    def __init__(self, state: ServerState, store: ResponseStore | None) -> None:
        self._state, self._store = state, store

    # ---- create ------------------------------------------------------------------------------------------------

    async def create_response(self, call: HttpCall, request: ResponsesRequest) -> None:
        """Answer an input.

        Streams with `stream: true`; with `background: true` it answers at once and goes on by itself.
        """
        own_messages = await call.apart(_input_messages, request, call.model.takes_media)
        messages = self._conversation(call, request, own_messages)
        public_id = self._new_id(call, request)
        store = self._store
        with contextlib.nullcontext() if store is None else store.take(call.caller, public_id):
            await self._create(call, request, messages, public_id)

    async def count_input_tokens(self, call: HttpCall, request: ResponsesRequest) -> None:
        """How many tokens the prompt of such a request has."""
        model = call.model
        first: Messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
        tools = await server_tools(request, self._state.tool_server)
        with renamed(NAMES):
            own = [shown(tool) for tool in tools.values()]
            own_messages = await call.apart(_input_messages, request, model.takes_media)
            messages = self._conversation(call, request, own_messages)
            chat = chat_request(request, first + messages, in_pieces=False, own=own)
            prompt = (await prepare_chat(call, chat)).prompt
        text = prompt.text or ""
        model.engine.front.inputs.check_length(text, is_cut=True, param="input")
        ids: Sequence[int]
        if prompt.has_media:
            from quire.server.media import media_token_ids  # lazy

            ids = await media_token_ids(call, prompt, add_special_tokens=False)
        else:
            ids = await model.engine.read(len(text), model.tokenizer.encode, text, False)
        await call.reply(encode(InputTokens(object="response.input_tokens", input_tokens=len(ids))))

    async def _create(self, call: HttpCall, request: ResponsesRequest, messages: Messages, public_id: str) -> None:
        first: Messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
        tools = await server_tools(request, self._state.tool_server)
        chat = await self._open(call, request, first + messages, public_id, tools)
        answer = ResponseAnswer(chat, request, public_id, tools)
        answer.input_messages = first + messages if request.enable_response_messages else None
        flow = self._rounds(call, chat, answer, request, first + messages, tools) if tools else chat.opened.flow
        if request.background:
            items = input_items(request)
            record = Record(answer, messages, call.caller, items=items, flow=flow, with_events=bool(request.stream))
            self._begin(record, answer)
            await self._reply_from(call, record)
            return
        with flow:
            if self._store is not None and request.store is not False:
                answer.keep = lambda: self._keep(Record(answer, messages, call.caller, items=input_items(request)))
            if request.stream:
                stream = ResponseStream(answer)
                await send_events(call, flow, stream, done=b"", failed=stream.failed)
            else:
                await call.reply(await drained(call, flow, WholeResponse(answer)))

    async def _open(
        self, call: HttpCall, request: ResponsesRequest, messages: Messages, public_id: str, tools: ServerTools
    ) -> OpenedChat:
        in_pieces = bool(request.stream or request.background or LOGPROBS in (request.include or ()))
        own = [shown(tool) for tool in tools.values()]
        with renamed(NAMES):
            chat_body = await call.apart(chat_request, request, messages, in_pieces=in_pieces, own=own)
            forget_unused(request.model_extra)
            return await open_chat(call, await prepare_chat(call, chat_body), public_id)

    def _rounds(
        self, call: HttpCall, chat: OpenedChat, answer: ResponseAnswer, request: ResponsesRequest, messages: Messages,
        tools: ServerTools,
    ) -> Rounds:  # fmt: skip
        """Later requests have the results so far, may call again as long as the bounds allow, and need not."""
        server = self._state.tool_server
        assert server is not None
        most = request.max_tool_calls

        async def open_next(rounds: int) -> OpenedChat:
            over = rounds >= MOST_ROUNDS or (most is not None and answer.num_calls() >= most)
            may = self._state.options.enable_auto_tool_choice and not over
            changes = {"tool_choice": "auto" if may else "none", "max_output_tokens": answer.num_left()}
            later = request.model_copy(update=changes)
            return await self._open(call, later, messages + answer.messages(), answer.id, tools)

        return Rounds(chat, answer, tools, server, open_next)

    def _conversation(self, call: HttpCall, request: ResponsesRequest, messages: Messages) -> Messages:
        """All messages but the instructions. Whether the store can do what is asked is checked here too."""
        if request.background and self._store is None:
            raise InputError(f"background: {_OFF}", param="background")
        if request.background and request.store is False:
            raise InputError("background needs store: true, for the response to be retrieved", param="background")
        if request.previous_response_id is None:
            return messages
        if request.previous_input_messages:
            raise InputError(
                "previous_input_messages and previous_response_id both say what came before; give one of them",
                param="previous_input_messages",
            )
        if self._store is None:
            raise InputError(f"previous_response_id: {_OFF}", param="previous_response_id")
        record = self._store.get(call.caller, request.previous_response_id, "previous_response_id")
        if not record.ended:
            raise InputError(
                f"previous_response_id: the response {record.id!r:.100} is still being made",
                param="previous_response_id",
            )
        return record.messages() + messages

    def _new_id(self, call: HttpCall, request: ResponsesRequest) -> str:
        """Not to be guessed, unless the client names it."""
        named = request.request_id is not None or call.header(b"x-request-id") is not None
        own = call.request_id(request.request_id).removeprefix("resp_") if named else secrets.token_hex(16)
        return f"resp_{own}"

    def _keep(self, record: Record) -> None:
        """Where there is no room, the client has its answer all the same."""
        assert self._store is not None
        try:
            self._store.put(record)
        except OverloadedError as full:
            log.warning("A response is not kept: %s", full)
            return
        self._store.grow(record, record.end())

    # ---- in the background -------------------------------------------------------------------------------------

    def _begin(self, record: Record, answer: ResponseAnswer) -> None:
        assert self._store is not None and record.flow is not None
        try:
            self._store.put(record)
        except BaseException:
            record.flow.close()
            raise
        self._add(record, answer.queued_events())
        record.task = asyncio.get_running_loop().create_task(self._make(record, answer))

    def _add(self, record: Record, events: list[ResponsesEvent]) -> None:
        if record.events is not None:  # somebody may follow it
            assert self._store is not None
            self._store.grow(record, record.add(list(map(event_bytes, events))))

    async def _make(self, record: Record, answer: ResponseAnswer) -> None:
        """Until it is whole. It counts as a request in flight, so that a server that ends waits for it."""
        state, store, flow = self._state, self._store, record.flow
        assert store is not None and flow is not None
        deadline = None
        if (seconds := state.options.request_timeout) is not None:
            error = DeadlineError(f"the response was not finished after {seconds:g} s, the time it was given")
            deadline = asyncio.get_running_loop().call_later(seconds, flow.fail, error)
        state.load.count += 1
        try:
            with flow:
                while not flow.finished:
                    self._add(record, answer.events(await flow.next()))
                self._add(record, answer.last_events())
        except CancelledResponseError:
            self._add(record, answer.cancelled_events())
        except Exception as error:  # noqa: BLE001  # its client is told when it asks
            refused = refusal_of(error, full=state.options.queue_full_status)
            self._add(record, [*answer.first_events(), *answer.failed_events(refused)])
        finally:
            state.load.count -= 1
            if deadline is not None:
                deadline.cancel()
            store.grow(record, record.end())

    async def _reply_from(self, call: HttpCall, record: Record) -> None:
        if record.events is None:
            await call.reply(record.body)
            return
        call.started = True
        await _stream(record.follow(0))(call.scope, call.receive, call.send)

    # ---- retrieve, cancel, delete ------------------------------------------------------------------------------

    async def retrieve_response(
        self,
        request: Request,
        response_id: str,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0)] = None,
    ) -> Response:
        """A response that was stored. With `stream`, the events of one that was made in the background as a stream."""
        record = self._record(request, response_id)
        if not stream:
            return Response(record.body, media_type="application/json")
        if record.events is None:
            raise InputError(
                f"stream: the events of {response_id!r:.100} were not kept; create it with background and stream",
                param="stream",
            )
        return _stream(record.follow(0 if starting_after is None else starting_after + 1))

    async def list_input_items(
        self,
        request: Request,
        response_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> ResponseItemList:
        """What the request of a stored response gave as its input, the last item first unless asked otherwise."""
        items = self._record(request, response_id).items()
        if order == "desc":
            items.reverse()
        if after is not None:
            places = [number for number, item in enumerate(items) if item["id"] == after]
            if not places:
                raise InputError(f"after: {response_id!r:.100} has no input item {after!r:.100}", param="after")
            items = items[places[0] + 1 :]
        shown = items[:limit]
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        return ResponseItemList(data=shown, first_id=first, last_id=last, has_more=len(items) > limit)

    async def cancel_response(self, request: Request, response_id: str) -> Response:
        """End a response that is made in the background."""
        record = self._record(request, response_id)
        if not record.background:
            raise InputError(f"{response_id!r:.100} is not made in the background", param="response_id")
        await _end(record)
        return Response(record.body, media_type="application/json")

    async def delete_response(self, request: Request, response_id: str) -> DeletedResponse:
        """Forget a response; one that is being made is ended first."""
        record = self._record(request, response_id)
        await _end(record)
        if self._store is not None:
            self._store.remove(record)
        return DeletedResponse(id=response_id)

    def _record(self, request: Request, response_id: str) -> Record:
        if self._store is None:
            raise NoSuchResponseError(f"response {response_id!r:.100}: {_OFF}", param="response_id")
        return self._store.get(caller_of(request.scope), response_id)


async def _end(record: Record) -> None:
    """Make sure that it is made no further."""
    if record.flow is not None and record.task is not None:
        record.flow.fail(CancelledResponseError())
        await asyncio.wait([record.task])


def _stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    return StreamingResponse(events, headers=_EVENTS, media_type="text/event-stream")
