"""Wire types of Anthropic's Messages API: requests, answers, the events of a stream, errors.

What a body may hold; null means: not given. Blocks of a message stay plain dicts and are read in prompt.py, which
refuses by name what this version does not have. Must not know: engines, templates.
"""

from __future__ import annotations

from typing import Any, Literal, Required

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from quire.server.openai.protocol import ExtraArgs, ListOf

_OPEN = ConfigDict(extra="allow")
Effort = Literal["low", "medium", "high", "xhigh", "max"]


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


class AnthropicUsage(BaseModel):
    input_tokens: int
    output_tokens: int


class AnthropicBlock(BaseModel):
    model_config = _OPEN
    type: Literal["text", "thinking", "tool_use"]


class AnthropicMessagesResponse(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[AnthropicBlock]
    model: str
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicCountTokensResponse(BaseModel):
    input_tokens: int


class AnthropicEvent(BaseModel):
    """One event of a stream; its name is `type`."""

    model_config = _OPEN
    type: Literal[
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip


class AnthropicError(BaseModel):
    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    type: Literal["error"]
    error: AnthropicError
    request_id: str | None = None
