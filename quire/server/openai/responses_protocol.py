"""Wire types of /v1/responses: the request, and the short answers about a stored response.

What a body may hold; null means: not given. Items of `input` stay plain dicts and are read in responses_input.py, which
refuses by name what this version does not have. The response and its events: responses_wire.py. Must not know: engines,
stores.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from quire.server.openai.protocol import INT64, ExtraArgs, Few, ListOf, Tokens

_OPEN = ConfigDict(extra="allow")
Includable = Literal[
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "message.output_text.logprobs", "reasoning.encrypted_content",
    "web_search_call.action.sources", "web_search_call.results",
]  # fmt: skip


class InputItem(TypedDict, total=False):
    """A message (with `role`), a function_call, a function_call_output, an mcp_call or a reasoning item."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    type: str | None
    role: str
    content: str | ListOf[dict[str, Any]] | None
    call_id: str
    name: str
    arguments: str
    output: str | ListOf[dict[str, Any]]
    summary: ListOf[dict[str, Any]]
    encrypted_content: str | None


class ResponseTool(TypedDict, total=False):
    """{"type": "function", "name", "description", "parameters", "strict"}, {"type": "namespace", "name", "tools"} with
    functions in it, or {"type": "mcp", "server_label"}."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    type: str
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None
    tools: ListOf[dict[str, Any]]


class ResponseTextConfig(BaseModel):
    model_config = _OPEN
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseReasoning(BaseModel):
    model_config = _OPEN
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Taken and not used: the thought itself is the item's content."""


class ResponsesRequest(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)

    input: str | ListOf[InputItem] = Field(examples=["Say hi"])
    """A text, or messages, function calls and their outputs, and reasoning."""
    model: str | None = None
    """One of the served names; absent, the server's model."""
    instructions: str | None = None
    """A system message of this answer alone; previous_response_id does not carry it over."""
    background: bool | None = False
    """Answer at once with `queued`; needs the store."""
    include: ListOf[Includable] | None = None
    """`message.output_text.logprobs` has an effect. Reasoning always comes in the clear."""
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    """Of the server's own tools (--tool-server), in all; then the model must answer without."""
    metadata: Annotated[dict[str, str], Few] | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    """Go on after an answer that was stored."""
    reasoning: ResponseReasoning | None = None
    include_reasoning: bool | None = True
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    """Taken and not used: there is one tier."""
    store: bool | None = True
    """Keep the answer, where the server keeps any (QUIRE_ENABLE_RESPONSES_API_STORE=1)."""
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    text: ResponseTextConfig | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: ListOf[ResponseTool] | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    """`auto` cuts off the beginning of a prompt that is too long."""
    temperature: float | None = Field(None, examples=[0.7])
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    top_logprobs: int | None = None
    """So many most likely tokens per position; needs include message.output_text.logprobs."""
    logit_bias: Annotated[dict[str, float], Few] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    request_id: str | None = None
    """Part of the answer's id; the header X-Request-Id goes before it."""
    cache_salt: str | None = None
    vllm_xargs: ExtraArgs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template; needs --trust-request-chat-template."""
    user: str | None = None
    """Taken and not used, as are the four below."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    session_id: str | None = None

    previous_input_messages: ListOf[dict[str, Any]] | None = None
    """Messages of a chat that come before `input`; for clients that keep the conversation themselves."""
    enable_response_messages: bool | None = None
    """The answer has `input_messages` and `output_messages`: the chat as the template saw it, and what it adds."""

    # In the documented API and not in this version: refused by name.
    prompt: dict[str, Any] | None = None
    conversation: str | dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    watermarking: bool | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_mm_kwargs: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ResponseItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
