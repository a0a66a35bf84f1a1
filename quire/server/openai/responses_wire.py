"""What /v1/responses sends: the response, the items of its output, and the events of a stream.

Wire types only: fields in the order of the wire; all answers and events of the dialect are encoded from them. Items and
events are known by their base class, whose subclasses are listed for the OpenAPI page. `type` is a field like any other
rather than a tag, which would come first. Must not know: where the values come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from quire.server.openai.envelope import encode

Status = Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]
ItemStatus = Literal["in_progress", "completed", "incomplete", "calling", "failed"]
ResponseState = Literal[
    "response.created", "response.queued", "response.in_progress", "response.completed", "response.incomplete",
    "response.failed", "response.cancelled",
]  # fmt: skip
ContentPart = Literal[
    "response.content_part.added", "response.content_part.done", "response.reasoning_part.added",
    "response.reasoning_part.done",
]  # fmt: skip
McpState = Literal["response.mcp_call.in_progress", "response.mcp_call.completed", "response.mcp_call.failed"]


# ---- items -------------------------------------------------------------------------------------------------------


class ResponseTopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ResponseLogprob(ResponseTopLogprob, frozen=True, kw_only=True):
    top_logprobs: list[ResponseTopLogprob]


class OutputContent(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message, or of a thought."""


class OutputText(OutputContent, frozen=True, kw_only=True):
    annotations: list[Any]
    text: str
    type: Literal["output_text"]
    logprobs: list[ResponseLogprob] | None


class ReasoningText(OutputContent, frozen=True, kw_only=True):
    type: Literal["reasoning_text"]
    text: str


class OutputItem(msgspec.Struct, frozen=True, kw_only=True):
    id: str


class MessageItem(OutputItem, frozen=True, kw_only=True):
    content: list[OutputContent]
    role: Literal["assistant"]
    type: Literal["message"]
    phase: str | None
    status: ItemStatus


class ReasoningItem(OutputItem, frozen=True, kw_only=True):
    summary: list[Any]
    type: Literal["reasoning"]
    content: list[OutputContent]
    encrypted_content: str | None
    status: ItemStatus


class FunctionCallItem(OutputItem, frozen=True, kw_only=True):
    name: str
    arguments: str
    type: Literal["function_call"]
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    call_id: str
    status: ItemStatus


class McpCallItem(OutputItem, frozen=True, kw_only=True):
    """A call of a tool that the server runs."""

    name: str
    arguments: str
    type: Literal["mcp_call"]
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    server_label: str
    output: str | None
    error: str | None
    approval_request_id: str | None
    status: ItemStatus


CONTENTS = (OutputText, ReasoningText)
ITEMS = (MessageItem, ReasoningItem, FunctionCallItem, McpCallItem)


# ---- the response ------------------------------------------------------------------------------------------------


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    code: Literal["rate_limit_exceeded", "server_error"]
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    reason: str


class ResponsesResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created_at: int
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    metadata: dict[str, str] | None
    model: str
    object: Literal["response"]
    output: list[OutputItem]
    parallel_tool_calls: bool
    temperature: float
    tool_choice: str | dict[str, Any]
    tools: Sequence[Mapping[str, Any]]
    top_p: float
    background: bool
    max_output_tokens: int | None
    max_tool_calls: int | None
    previous_response_id: str | None
    prompt: dict[str, Any] | None
    reasoning: dict[str, Any] | None
    service_tier: str
    status: Status
    text: dict[str, Any] | None
    top_logprobs: int | None
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    presence_penalty: float
    frequency_penalty: float
    kv_transfer_params: dict[str, Any] | None
    ec_transfer_params: dict[str, Any] | None
    input_messages: list[dict[str, Any]] | None
    output_messages: list[dict[str, Any]] | None


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["response.input_tokens"]
    input_tokens: int


# ---- events ------------------------------------------------------------------------------------------------------


class ResponsesEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream; its name is `type`."""

    type: str
    sequence_number: int


class ResponseStateEvent(ResponsesEvent, frozen=True, kw_only=True):
    """How the response stands."""

    type: ResponseState
    response: ResponsesResponse


class ErrorEvent(ResponsesEvent, frozen=True, kw_only=True):
    type: Literal["error"]
    code: str
    message: str
    param: str | None


class OutputItemEvent(ResponsesEvent, frozen=True, kw_only=True):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ContentPartEvent(ResponsesEvent, frozen=True, kw_only=True):
    type: ContentPart
    item_id: str
    output_index: int
    content_index: int
    part: OutputContent


class OutputTextDelta(ResponsesEvent, frozen=True, kw_only=True):
    type: Literal["response.output_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ResponseLogprob]


class OutputTextDone(ResponsesEvent, frozen=True, kw_only=True):
    type: Literal["response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ResponseLogprob]


class ReasoningTextDelta(ResponsesEvent, frozen=True, kw_only=True):
    type: Literal["response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningTextDone(ResponsesEvent, frozen=True, kw_only=True):
    type: Literal["response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDelta(ResponsesEvent, frozen=True, kw_only=True):
    type: Literal["response.function_call_arguments.delta", "response.mcp_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(ResponsesEvent, frozen=True, kw_only=True):
    type: Literal["response.function_call_arguments.done", "response.mcp_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str


class McpCallEvent(ResponsesEvent, frozen=True, kw_only=True):
    type: McpState
    item_id: str
    output_index: int


EVENTS = (
    ResponseStateEvent, ErrorEvent, OutputItemEvent, ContentPartEvent, OutputTextDelta, OutputTextDone,
    ReasoningTextDelta, ReasoningTextDone, ArgumentsDelta, ArgumentsDone, McpCallEvent,
)  # fmt: skip


def event_bytes(event: ResponsesEvent) -> bytes:
    return b"event: " + event.type.encode() + b"\ndata: " + encode(event) + b"\n\n"
