"""ShownItem: one item of a response's output (a message, a thought, a call), and the events that tell of it.

In: a Part as it grows, and the result of a call that the server runs. Out: wire types: the item as it stands, and its
events with their numbers. Must not know: the response around it, results of the engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from quire.server.openai.responses_wire import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPart,
    ContentPartEvent,
    FunctionCallItem,
    ItemStatus,
    McpCallEvent,
    McpCallItem,
    McpState,
    MessageItem,
    OutputContent,
    OutputItem,
    OutputItemEvent,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseLogprob,
    ResponsesEvent,
)
from quire.server.parts import Kind, Part
from quire.server.tool_server import ToolResult

_PREFIXES = {Kind.TEXT: "msg_", Kind.THOUGHT: "rs_", Kind.CALL: "fc_"}


class ShownItem:
    """One item. `number`: gives the next event's. `label`: the tool server that runs this call. `called`: (namespace,
    name there) of a function that has one."""

    __slots__ = ("_called", "_logprobs", "_number", "_part", "id", "label", "result", "status")

    def __init__(
        self, part: Part, number: Callable[[], int], with_logprobs: bool, label: str | None = None,
        called: tuple[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._called = called
        self.id = (_PREFIXES[part.kind] if label is None else "mcp_") + secrets.token_hex(12)
        self.status: ItemStatus = "in_progress"
        self.label = label
        self.result: ToolResult | None = None
        self._part, self._number = part, number
        self._logprobs: list[ResponseLogprob] | None = [] if with_logprobs else None

    # ---- events ------------------------------------------------------------------------------------------------

    def opening(self) -> list[ResponsesEvent]:
        part = self._part
        added = OutputItemEvent(
            type="response.output_item.added",
            sequence_number=self._number(),
            output_index=part.index,
            item=self._shown("in_progress", "", []),
        )
        if part.kind is not Kind.CALL:
            is_text = part.kind is Kind.TEXT
            kind: ContentPart = "response.content_part.added" if is_text else "response.reasoning_part.added"
            return [added, self._part_event(kind, "")]
        return [added] if self.label is None else [added, self._mcp_event("response.mcp_call.in_progress")]

    def grown(self, text: str, logprobs: list[ResponseLogprob]) -> ResponsesEvent:
        number, index = self._number(), self._part.index
        if self._part.kind is Kind.CALL:
            return ArgumentsDelta(
                type="response.function_call_arguments.delta" if self.label is None
                else "response.mcp_call_arguments.delta",
                sequence_number=number, item_id=self.id, output_index=index, delta=text,
            )  # fmt: skip
        if self._part.kind is Kind.THOUGHT:
            return ReasoningTextDelta(
                type="response.reasoning_text.delta", sequence_number=number, item_id=self.id, output_index=index,
                content_index=0, delta=text,
            )  # fmt: skip
        if self._logprobs is not None:
            self._logprobs += logprobs
        return OutputTextDelta(
            type="response.output_text.delta", sequence_number=number, item_id=self.id, output_index=index,
            content_index=0, delta=text, logprobs=logprobs,
        )  # fmt: skip

    def closing(self) -> list[ResponsesEvent]:
        """Nothing more comes into it."""
        part, number, index = self._part, self._number(), self._part.index
        if part.kind is Kind.CALL:
            done = ArgumentsDone(
                type="response.function_call_arguments.done" if self.label is None
                else "response.mcp_call_arguments.done",
                sequence_number=number, item_id=self.id, output_index=index, name=self._name, arguments=part.text,
            )  # fmt: skip
            return [done]
        if part.kind is Kind.THOUGHT:
            thought = ReasoningTextDone(
                type="response.reasoning_text.done", sequence_number=number, item_id=self.id, output_index=index,
                content_index=0, text=part.text,
            )  # fmt: skip
            return [thought, self._part_event("response.reasoning_part.done", part.text)]
        text = OutputTextDone(
            type="response.output_text.done", sequence_number=number, item_id=self.id, output_index=index,
            content_index=0, text=part.text, logprobs=self._logprobs or [],
        )  # fmt: skip
        return [text, self._part_event("response.content_part.done", part.text)]

    def done(self) -> ResponsesEvent:
        return OutputItemEvent(
            type="response.output_item.done",
            sequence_number=self._number(),
            output_index=self._part.index,
            item=self.shown(),
        )

    def settled(self) -> list[ResponsesEvent]:
        """A call has its result."""
        failed = self.status == "failed"
        return [self._mcp_event("response.mcp_call.failed" if failed else "response.mcp_call.completed"), self.done()]

    def _part_event(self, kind: ContentPart, text: str) -> ContentPartEvent:
        return ContentPartEvent(
            type=kind,
            sequence_number=self._number(),
            item_id=self.id,
            output_index=self._part.index,
            content_index=0,
            part=self._content(text),
        )

    def _mcp_event(self, kind: McpState) -> McpCallEvent:
        return McpCallEvent(type=kind, sequence_number=self._number(), item_id=self.id, output_index=self._part.index)

    # ---- the item ----------------------------------------------------------------------------------------------

    def shown(self) -> OutputItem:
        """As it stands."""
        text = self._part.text
        return self._shown(self.status, text, [] if self._part.kind is Kind.CALL else [self._content(text)])

    def _shown(self, status: ItemStatus, text: str, content: list[OutputContent]) -> OutputItem:
        part = self._part
        if part.kind is Kind.TEXT:
            return MessageItem(id=self.id, content=content, role="assistant", type="message", phase=None, status=status)
        if part.kind is Kind.THOUGHT:
            return ReasoningItem(
                id=self.id, summary=[], type="reasoning", content=content, encrypted_content=None, status=status
            )
        namespace = msgspec.UNSET if self._called is None else self._called[0]
        if self.label is None:
            return FunctionCallItem(
                id=self.id, name=self._name, arguments=text, type="function_call", namespace=namespace,
                call_id=part.call_id, status=status,
            )  # fmt: skip
        result = self.result
        return McpCallItem(
            id=self.id,
            name=self._name,
            arguments=text,
            type="mcp_call",
            namespace=namespace,
            server_label=self.label,
            output=None if result is None or result.failed else result.text,
            error=result.text if result is not None and result.failed else None,
            approval_request_id=None,
            status=status,
        )

    @property
    def _name(self) -> str:
        return self._part.name if self._called is None else self._called[1]

    def _content(self, text: str) -> OutputContent:
        if self._part.kind is Kind.THOUGHT:
            return ReasoningText(type="reasoning_text", text=text)
        logprobs = self._logprobs if text else ([] if self._logprobs is not None else None)
        return OutputText(annotations=[], text=text, type="output_text", logprobs=logprobs)
