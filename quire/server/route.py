"""Direct routes: a body is read once and handed to a handler together with the connection, past the framework.

FastAPI documents such a route from the same wire types that read its bodies, and does nothing else for it: no
dependencies, no response models, no exit stacks. In: path, wire type, handler. Out: a route of the app.
`HttpCall` is one HTTP request under way: its headers, its body, whether its client is still there.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.base import allocator
from quire.base.log import logger
from quire.schema.errors import DeadlineError, InputError
from quire.server.body import JsonLimits, memory_bytes, read_body
from quire.server.callers import Tenants, caller_of
from quire.server.errors import ERROR_RESPONSES, ClientGoneError, refusal_of
from quire.server.flow import Results
from quire.server.middleware import route_path
from quire.server.served import ServedModel
from quire.server.state import ServerState

log = logger(__name__)
Args = ParamSpec("Args")
Value = TypeVar("Value")
_SMALL = 1 << 15  # bytes; what is in a larger body is read in a lane, and so is what is done with it
_LONGEST_ID = 256
_LONGEST_RANK = 6  # digits
_SCHEMA = "#/components/schemas/{model}"
WireType = type[BaseModel] | type[msgspec.Struct]


class HttpCall:
    """One HTTP request under way."""

    __slots__ = (
        "_budget", "_deadline", "_ended", "_fail", "_listening", "model", "receive", "scope", "send", "size", "started",
        "state",
    )  # fmt: skip

    model: ServedModel  # that the body names; there once the body is read

    def __init__(self, state: ServerState, scope: Scope, receive: Receive, send: Send) -> None:
        self.state, self.scope, self.receive, self.send = state, scope, receive, send
        self.started = False  # the status is out
        self.size = 0  # bytes of the body
        self._budget = 0  # bytes this body has taken from the budget of all bodies
        self._listening: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._fail: Callable[[Exception], None] | None = None  # ends what the call is waiting for
        self._ended: Exception | None = None  # why nobody waits for an answer any more

    async def read(self, weigh: Callable[[bytearray], int] = memory_bytes) -> bytes | bytearray:
        """`weigh`: bytes of memory that reading the body takes."""
        message = await self._receive()
        body: bytes = message.get("body", b"")
        self.size = len(body)
        if not message.get("more_body"):
            return body
        whole = bytearray(body)
        while message.get("more_body"):
            self._hold(self.size - self._budget)
            message = await self._receive()
            whole += message.get("body", b"")
            self.size = len(whole)
        weight = await self.apart(weigh, whole)
        self._hold(min(weight, self.state.bodies.most) - self._budget)  # alone, any body fits
        return whole

    def _hold(self, count: int) -> None:
        self.state.bodies.take(count)
        self._budget += count

    def _let_go(self) -> None:
        if self._budget:
            self.state.bodies.give(self._budget)
            self._budget = 0

    async def apart(self, work: Callable[Args, Value], *args: Args.args, **kwargs: Args.kwargs) -> Value:
        """Do what takes as long as the body is large: here, or in a lane, so that the event loop goes on."""
        if self.size <= _SMALL:
            return work(*args, **kwargs)
        return await self.state.engine.lanes.run(self.size, work, *args, **kwargs)

    async def _receive(self) -> Message:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        return message

    def header(self, name: bytes) -> str | None:
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value).decode("latin-1")
        return None

    @property
    def caller(self) -> int:
        """The number of the key that was shown."""
        return caller_of(self.scope)

    @property
    def tenant(self) -> int:
        """Whom the engine counts this request to."""
        tenants = self.state.tenants
        return Tenants.EVERYBODY if tenants is None else tenants.tenant(self.scope)

    def check_type(self) -> None:
        """JSON only: a web page may send any other type to any server without asking it first."""
        content_type = (self.header(b"content-type") or "").partition(";")[0].strip().lower()
        if content_type != "application/json" and not content_type.endswith("+json"):
            raise HTTPException(
                415, f"the body must be sent as Content-Type: application/json, not {content_type[:100]!r}"
            )

    def request_id(self, client_id: str | None) -> str:
        """The client's own name of this request (header, then body), or a new one."""
        state = self.scope.get("state") or {}
        if state.get("request_id_given") or (client_id is None and "request_id" in state):
            return str(state["request_id"])
        if client_id is None:
            return f"{self.state.prefix}{next(self.state.serials):08x}"
        if len(client_id) > _LONGEST_ID or not client_id.isprintable():
            raise InputError(
                f"request_id has {len(client_id)} characters; it may have {_LONGEST_ID}, all printable",
                param="request_id",
            )
        return client_id

    def trace_headers(self) -> dict[str, str] | None:
        headers = {}
        for key, value in self.scope["headers"]:
            if key in (b"traceparent", b"tracestate"):
                headers[key.decode()] = value.decode("latin-1")
        return headers or None

    def data_parallel_rank(self) -> int | None:
        """Of the engine that the client wants its request to run on: X-data-parallel-rank."""
        text = self.header(b"x-data-parallel-rank")
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_RANK):
            raise InputError(
                f"X-data-parallel-rank must be the rank of an engine, got {text[:40]!r}", param="X-data-parallel-rank"
            )
        return int(text)

    def watch(self, flow: Results) -> None:
        """From now on, a client that goes takes its requests with it, and so does time that is up. The body is read."""
        self._let_go()
        self._attend(flow.fail)

    async def attended(self, work: Coroutine[Any, Any, Value]) -> Value:
        """What has to be done before there is a flow to watch: a client that goes, or time that is up, cancels it."""
        task = asyncio.get_running_loop().create_task(work)
        ends: list[Exception] = []

        def fail(error: Exception) -> None:
            ends.append(error)
            task.cancel()

        try:
            self._attend(fail)
            return await task
        except asyncio.CancelledError:
            if ends:
                raise ends[0] from None
            raise
        finally:
            task.cancel()

    def _attend(self, fail: Callable[[Exception], None]) -> None:
        self._fail = fail
        if self._ended is not None:
            fail(self._ended)
        if self._listening is not None:
            return
        loop = asyncio.get_running_loop()
        self._listening = loop.create_task(self._listen())
        if (seconds := self._seconds()) is not None:
            words = f"the request was not finished after {seconds:g} s, the time it was given"
            self._deadline = loop.call_later(seconds, self._end, DeadlineError(words))

    def _end(self, error: Exception) -> None:
        self._ended = self._ended or error
        if self._fail is not None:
            self._fail(error)

    def _seconds(self) -> float | None:
        """The time this request may take: the server's limit, or less if the client says so in X-Request-Timeout."""
        limit, text = self.state.options.request_timeout, self.header(b"x-request-timeout")
        if text is None:
            return limit
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not 0.0 < seconds < float("inf"):
            raise InputError(f"X-Request-Timeout must be seconds above 0, got {text[:40]!r}", param="timeout")
        return seconds if limit is None else min(seconds, limit)

    async def _listen(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self._end(ClientGoneError())

    def close(self) -> None:
        self._let_go()
        if self._listening is not None:
            self._listening.cancel()
        if self._deadline is not None:
            self._deadline.cancel()
        self._fail = None

    async def reply(self, body: bytes, content_type: bytes = b"application/json") -> None:
        """A whole answer."""
        self.started = True
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


Handler = Callable[[HttpCall, Any], Awaitable[None]]
Reader = Callable[[bytes | bytearray, JsonLimits], Any]
CallReader = Callable[[HttpCall], Awaitable[Any]]  # reads the body of a call, and what it means


class App(FastAPI):
    """A FastAPI whose direct routes are reached past its own layers. Layers added to it are in front of both."""

    direct: dict[str, APIRoute]

    def __init__(self, **kwargs: Any) -> None:
        self._page: asyncio.Future[dict[str, Any]] | None = None
        super().__init__(**kwargs)
        self.direct = {}
        self._wire_types: dict[str, WireType] = {}  # those that FastAPI does not see, by name
        self._unions: dict[str, Any] = {}  # schemas of those that stand for several
        self.sockets: dict[str, ASGIApp] = {}  # path -> what takes its WebSockets
        self.dialects: dict[str, Callable[[ASGIApp], ASGIApp]] = {}  # path -> a layer outside all others, from there on

    def include_router(self, router: APIRouter, **options: Any) -> None:
        """Its routes stand in `routes`, where newer releases of FastAPI have only the router, which tells no paths."""
        if options:
            super().include_router(router, **options)
        else:
            self.router.routes.extend(router.routes)

    def schema_of(self, model: WireType) -> dict[str, str]:
        """A reference to its schema, which the OpenAPI page then holds."""
        self._wire_types[model.__name__] = model
        return {"$ref": _SCHEMA.format(model=model.__name__)}

    def document_kinds(self, model: type[msgspec.Struct], kinds: Iterable[type[msgspec.Struct]]) -> None:
        """A value of the type `model` is one of `kinds`, its subclasses: msgspec has unions of tagged structs only."""
        self._unions[model.__name__] = {"anyOf": [self.schema_of(kind) for kind in kinds]}

    def _schemas(self) -> dict[str, Any]:
        """Of the wire types that FastAPI does not see."""
        models = self._wire_types.values()
        structs = [model for model in models if issubclass(model, msgspec.Struct)]
        _, schemas = msgspec.json.schema_components(structs, ref_template=_SCHEMA.format(model="{name}"))
        for model in models:
            if issubclass(model, BaseModel):
                schema = model.model_json_schema(ref_template=_SCHEMA, mode="serialization")
                schemas |= schema.pop("$defs", {}) | {model.__name__: schema}
        return schemas | self._unions

    def documented(self, responses: Mapping[int | str, dict[str, Any]]) -> dict[int | str, dict[str, Any]]:
        """Responses as FastAPI takes them: it knows pydantic's types, and a struct by reference."""
        return {status: self._documented(response) for status, response in responses.items()}

    def _documented(self, response: dict[str, Any]) -> dict[str, Any]:
        model = response.get("model")
        if not isinstance(model, type) or not issubclass(model, msgspec.Struct):
            return response
        content = {"application/json": {"schema": self.schema_of(model)}, **response.get("content", {})}
        return {**response, "model": None, "content": content}

    def setup(self) -> None:
        if self.openapi_url:
            self.add_route(self.openapi_url, self._show_page, include_in_schema=False)
        super().setup()

    async def _show_page(self, request: Request) -> Response:
        """Making the page takes half a second: in another thread, and once however many ask for it."""
        if self._page is None:
            self._page = asyncio.get_running_loop().run_in_executor(None, self.openapi)
        page = await asyncio.shield(self._page)
        root = request.scope.get("root_path", "").rstrip("/")
        return JSONResponse({**page, "servers": [{"url": root}]} if root else page)

    def openapi(self) -> dict[str, Any]:
        """The framework would promise 422 and a form of its own for what we answer with 400 and ours."""
        if self.openapi_schema is not None:
            return self.openapi_schema
        page = super().openapi()
        schemas = page.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for name, schema in self._schemas().items():
            schemas.setdefault(name, schema)
        wrong = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
        for operations in page["paths"].values():
            for operation in operations.values():
                if operation["responses"].pop("422", None) is not None:
                    operation["responses"].setdefault("400", {"description": "Not a valid request.", "content": wrong})
        return page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As the framework's own, without its telemetry (observe/ has ours)."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if self.root_path:
            scope["root_path"] = self.root_path
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        scope["app"] = self
        await self.middleware_stack(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        layers, self.user_middleware = self.user_middleware, []
        rest = super().build_middleware_stack()
        self.user_middleware = layers
        direct, sockets = self.direct, self.sockets

        async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "websocket" and (takes := sockets.get(route_path(scope))) is not None:
                await takes(scope, receive, send)
                return
            if scope["type"] == "http" and scope["method"] == "POST":
                route = direct.get(route_path(scope))
                if route is not None:
                    scope["route"] = route
                    await route.app(scope, receive, send)
                    return
            await rest(scope, receive, send)

        app: ASGIApp = dispatch
        for layer in reversed(layers):
            app = layer.cls(app, *layer.args, **layer.kwargs)
        return _by_dialect(app, {path: layer(app) for path, layer in self.dialects.items()})


def _by_dialect(app: ASGIApp, dialects: Mapping[str, ASGIApp]) -> ASGIApp:
    """Requests to the paths of a dialect go through its own layer, whoever answers or refuses them."""

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        chosen = app
        if scope["type"] == "http":
            path = route_path(scope)
            for place, layered in dialects.items():
                if path == place or path.startswith(f"{place}/"):
                    chosen = layered
        await chosen(scope, receive, send)

    return choose


def add_route(
    app: App,
    path: str,
    handler: Handler,
    body: Any,
    *,
    answer: Any,
    streams: WireType | tuple[WireType, ...] = (),
    tag: str,
    read: Reader | None = None,
    errors: Mapping[int | str, dict[str, Any]] = ERROR_RESPONSES,
    ends_with_done: bool = True,
) -> None:
    """POST `path`. `body` is the wire type (or a union, then `read` says which), `answer` the type of its 200 (or a
    union), `streams` that of a chunk (or several), where it can stream; `errors` what else it may answer. A body has a
    field `model`: the handler finds what it names in `call.model`, and asks nothing else for an engine."""
    reader = read or functools.partial(read_body, body)
    _add(app, path, handler, functools.partial(_read_json, reader), answer=answer, streams=streams, tag=tag,
         errors=errors, ends_with_done=ends_with_done, body=body)  # fmt: skip


def add_form_route(
    app: App,
    path: str,
    handler: Handler,
    form: type[BaseModel],
    *,
    answer: Any,
    streams: WireType | tuple[WireType, ...] = (),
    tag: str,
    lists: frozenset[str] = frozenset(),
    errors: Mapping[int | str, dict[str, Any]] = ERROR_RESPONSES,
) -> None:
    """POST `path` with a body of multipart/form-data, as `add_route`. `lists`: fields that may come several times."""
    content = {"multipart/form-data": {"schema": app.schema_of(form)}}
    _add(app, path, handler, functools.partial(_read_form, form, lists), answer=answer, streams=streams, tag=tag,
         errors=errors, extra={"requestBody": {"content": content, "required": True}})  # fmt: skip


def _add(
    app: App,
    path: str,
    handler: Handler,
    read: CallReader,
    *,
    answer: Any,
    streams: WireType | tuple[WireType, ...],
    tag: str,
    errors: Mapping[int | str, dict[str, Any]],
    ends_with_done: bool = True,
    body: Any = None,
    extra: dict[str, Any] | None = None,
) -> None:
    async def with_body(body: Any) -> None:
        """Documented by FastAPI, never called."""

    async def without_body() -> None:
        """The same, for a body that FastAPI cannot describe."""

    endpoint: Callable[..., Awaitable[None]] = without_body
    if body is not None:
        endpoint = with_body
        endpoint.__annotations__ = {"body": body}
    endpoint.__name__ = handler.__name__
    endpoint.__doc__ = handler.__doc__
    response: dict[str, Any] = {"model": answer, "description": "The answer."}
    if streams:
        ended = ", ended by [DONE]" if ends_with_done else ""
        response["description"] = f"The answer; with `stream: true` its chunks as server-sent events{ended}."
        failed = app.schema_of(errors[400]["model"])
        kinds = streams if isinstance(streams, tuple) else (streams,)
        chunk = {"anyOf": [*map(app.schema_of, kinds), failed]}
        data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": chunk}
        if ends_with_done:
            data = {"anyOf": [data, {"const": "[DONE]"}]}
        event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        response["content"] = {"text/event-stream": {"itemSchema": event}}
    route = APIRoute(
        path,
        endpoint,
        methods=["POST"],
        tags=[tag],
        operation_id=handler.__name__,
        response_model=None,
        responses=app.documented({200: response, **errors}),
        openapi_extra=extra,
    )
    route.app = functools.partial(_run, app, handler, read)
    app.router.routes.append(route)
    app.direct[path] = route


async def _read_json(reader: Reader, call: HttpCall) -> Any:
    """The body, whose bytes are gone when this is done."""
    raw = await call.read()
    call.check_type()
    return await call.apart(reader, raw, call.state.json_limits)


async def _read_form(form: type[BaseModel], lists: frozenset[str], call: HttpCall) -> Any:
    from quire.server.forms import boundary_of, read_form  # lazy

    boundary = boundary_of(call.header(b"content-type") or "")
    raw = await call.read(len)
    return await call.apart(read_form, form, lists, raw, boundary)


async def _run(app: App, handler: Handler, read: CallReader, scope: Scope, receive: Receive, send: Send) -> None:
    state: ServerState = app.state.quire
    call = HttpCall(state, scope, receive, send)
    state.load.count += 1
    try:
        request = await read(call)
        call.model = state.served.get(request.model) or await state.adapters.find(request.model)
        await handler(call, request)
    except ClientGoneError:
        pass
    except Exception as error:  # the root of a request: whatever went wrong, its client is told
        if call.started:
            raise
        refused = refusal_of(error, full=state.options.queue_full_status)
        if state.options.log_error_stack:
            log.info("%s answered %d", scope["path"], refused.status, exc_info=error)
        await refused.send(send)
    finally:
        call.close()
        state.load.count -= 1
        if call.size > _SMALL and state.bodies.wants_trim():
            asyncio.get_running_loop().run_in_executor(None, allocator.trim)
