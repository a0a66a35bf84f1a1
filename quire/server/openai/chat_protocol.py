"""Wire types of /v1/chat/completions: messages in all their roles and forms, the request, the answer.

Messages stay plain dicts, as a template reads them; a role's further keys are let through. Must not know: templates.
"""

from __future__ import annotations

from typing import Any, Literal, Required

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from quire.server.openai.protocol import GenerateRequest, ListOf, PromptLogprobs, Tokens, Usage

_OPEN = ConfigDict(extra="allow")


class ContentPart(TypedDict, total=False):
    """A text part: {"type": "text", "text": "..."}, {"type": "refusal", "refusal": "..."} and so on."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    type: str
    text: str


class ToolCallFunction(TypedDict, total=False):
    __pydantic_config__ = _OPEN  # type: ignore[misc]
    name: Required[str]
    arguments: str | dict[str, Any] | None


class MessageToolCall(TypedDict, total=False):
    __pydantic_config__ = _OPEN  # type: ignore[misc]
    id: str | None
    type: str
    function: ToolCallFunction


class Message(TypedDict, total=False):
    """One message. Roles: system, developer, user, assistant, tool, function, or whatever the template knows."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    role: Required[str]
    content: str | ListOf[str | ContentPart] | None
    name: str | None
    tool_call_id: str | None
    tool_calls: ListOf[MessageToolCall] | None


class FunctionDefinition(TypedDict, total=False):
    __pydantic_config__ = _OPEN  # type: ignore[misc]
    name: Required[str]
    description: str | None
    parameters: dict[str, Any] | None


class Tool(TypedDict, total=False):
    __pydantic_config__ = _OPEN  # type: ignore[misc]
    type: str
    function: Required[FunctionDefinition]


class ChatRequest(GenerateRequest):
    messages: ListOf[Message] = Field(
        examples=[[{"role": "user", "content": "Say hi"}]], json_schema_extra={"minItems": 1}
    )
    max_tokens: int | None = None
    """Most tokens of an answer; all that fit if absent. max_completion_tokens goes before it."""
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    """So many most likely tokens per position; needs logprobs."""
    tools: ListOf[Tool] | None = None
    """Shown to the template; their calls are found with --enable-auto-tool-choice and --tool-call-parser."""
    tool_choice: str | dict[str, Any] | None = None
    """`none`, `auto`, `required`, or {"type": "function", "function": {"name": ...}}."""
    parallel_tool_calls: bool | None = None
    """False keeps the first call of an answer only."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """A variable of the chat template."""
    include_reasoning: bool | None = None
    """False leaves the model's thinking out of the answer."""
    echo: bool | None = False
    """Put the last message before the answer, if it has the answer's role."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    """Go on with the last message instead of opening a new one; needs add_generation_prompt false."""
    documents: ListOf[dict[str, Any]] | None = None
    chat_template: str | None = None
    """Jinja text; needs --trust-request-chat-template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the server's template, such as {"enable_thinking": false}."""
    return_prompt_text: bool | None = None
    return_assistant_tokens_mask: bool | None = None
    """Of /render alone: 1 for each token of the prompt that the model wrote, 0 for the others."""
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob] | None = None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ChatToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    role: str
    content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None
    tool_calls: list[ChatToolCall] = []
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same by its older name; only where there is any."""


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: Tokens | None = None
    routed_experts: Any = None


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: Tokens | None = None
    prompt_text: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None


class FunctionDelta(BaseModel):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(BaseModel):
    """The first of a call holds its id and name, later ones more of its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class ChatDelta(BaseModel):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: Tokens | None = None


class ChatChunk(BaseModel):
    """One event of a stream. The first of a choice holds its role; the last may hold the usage and no choice."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: Tokens | None = None
    prompt_text: str | None = None
    system_fingerprint: str | None = None
