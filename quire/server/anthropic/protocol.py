"""Wire types of Anthropic's Messages API: requests, answers, the events of a stream, errors.

Requests (pydantic) say what a body may hold; null means: not given. Blocks of a request's messages stay plain dicts and
are read in prompt.py, which refuses by name what this version does not have. What is sent (msgspec) has its fields in
the order of the wire; a tag is the field `type`, which comes first. Must not know: engines, templates.
"""

from __future__ import annotations

from typing import Any, Literal, Required

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from quire.server.openai.protocol import ExtraArgs, ListOf

_OPEN = ConfigDict(extra="allow")
Effort = Literal["low", "medium", "high", "xhigh", "max"]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ContentBlock(TypedDict, total=False):
    """Text, tool_use, tool_result or thinking."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    type: Required[str]
    text: str | None
    id: str | None
    tool_use_id: str | None
    name: str | None
    input: dict[str, Any] | None
    content: str | ListOf[dict[str, Any]] | None
    is_error: bool | None
    thinking: str | None
    signature: str | None


class AnthropicMessage(TypedDict, total=False):
    __pydantic_config__ = _OPEN  # type: ignore[misc]
    role: Required[Literal["user", "assistant", "system"]]
    content: Required[str | ListOf[ContentBlock]]


class AnthropicTool(TypedDict, total=False):
    """A function of the client. Anthropic's own tools (a `type` other than custom) are refused."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    name: Required[str]
    description: str | None
    input_schema: dict[str, Any]
    type: str | None
    strict: bool | None


class AnthropicToolChoice(BaseModel):
    model_config = _OPEN
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(BaseModel):
    model_config = _OPEN
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="Most tokens of thought; at least 1024.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted` leaves the thought out; it is never summarized here."
    )


class JsonOutputFormat(BaseModel):
    model_config = _OPEN
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    model_config = _OPEN
    effort: Effort | None = None
    format: JsonOutputFormat | None = None


class _PromptFields(BaseModel):
    """What both requests share: all that the prompt is made of."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)

    model: str | None = None
    """One of the served names; absent, the server's model."""
    messages: ListOf[AnthropicMessage] = Field(examples=[[{"role": "user", "content": "Say hi"}]])
    """A last message of the assistant is continued."""
    system: str | ListOf[ContentBlock] | None = None
    tools: ListOf[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None
    """An older name of output_config.format."""
    cache_control: dict[str, Any] | None = None
    """Taken and not used, here and in blocks: prefixes are cached without being asked for."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template; needs --trust-request-chat-template."""


class AnthropicCountTokensRequest(_PromptFields):
    pass


class AnthropicMessagesRequest(_PromptFields):
    max_tokens: int = Field(examples=[16])
    stop_sequences: ListOf[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    """Taken and not used."""
    service_tier: str | None = None
    """Taken and not used: there is one tier."""
    cache_salt: str | None = None
    """Prompts share cached blocks only with prompts of the same salt."""
    vllm_xargs: ExtraArgs | None = None
    """Further arguments for custom logits processors."""
    watermarking: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    return_mm_kwargs: bool | None = None


class AnthropicUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    output_tokens: int


class AnthropicText(msgspec.Struct, frozen=True, tag="text"):
    text: str


class AnthropicThinking(msgspec.Struct, frozen=True, tag="thinking"):
    thinking: str
    signature: str


class AnthropicToolUse(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnthropicContent = AnthropicText | AnthropicThinking | AnthropicToolUse


class AnthropicMessagesResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[AnthropicContent]
    model: str
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicCountTokensResponse(msgspec.Struct, frozen=True):
    input_tokens: int


class AnthropicTextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    text: str


class AnthropicThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class AnthropicSignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta"):
    signature: str


class AnthropicInputDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


AnthropicContentDelta = AnthropicTextDelta | AnthropicThinkingDelta | AnthropicSignatureDelta | AnthropicInputDelta


class AnthropicMessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    message: AnthropicMessagesResponse


class AnthropicPing(msgspec.Struct, frozen=True, tag="ping"):
    pass


class AnthropicContentStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: AnthropicContent


class AnthropicContentGrowth(msgspec.Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: AnthropicContentDelta


class AnthropicContentStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    index: int


class AnthropicMessageEnd(msgspec.Struct, frozen=True):
    stop_reason: StopReason | None
    stop_sequence: str | None


class AnthropicMessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    delta: AnthropicMessageEnd
    usage: AnthropicUsage


class AnthropicMessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    pass


# One event of a stream; its name is `type`.
AnthropicEvent = (
    AnthropicMessageStart
    | AnthropicPing
    | AnthropicContentStart
    | AnthropicContentGrowth
    | AnthropicContentStop
    | AnthropicMessageDelta
    | AnthropicMessageStop
)


class AnthropicError(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorResponse(msgspec.Struct, frozen=True, tag="error"):
    error: AnthropicError
    request_id: str | msgspec.UnsetType = msgspec.UNSET
