"""From Anthropic's messages, tools and settings to a chat request. Each refusal names the field by its place.

In: a request of the Messages API. Out: a ChatRequest, and what the chat template is told beside it. Tool results become
messages of their own, thought goes with the message it led to. Must not know: templates, answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.schema.errors import InputError, NotBuiltError
from quire.server.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from quire.server.openai.chat_protocol import ChatRequest

LEAST_BUDGET = 1024
_SAME = (
    "temperature", "top_p", "top_k", "stream", "cache_salt", "vllm_xargs", "watermarking", "kv_transfer_params",
    "ec_transfer_params", "return_mm_kwargs", "chat_template_kwargs",
)  # fmt: skip
_UNBUILT = ("container", "mcp_servers", "context_management", "diagnostics", "fallbacks")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# How the fields of a chat request are called here, for refusals.
NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
}


def chat_request(
    request: AnthropicMessagesRequest | AnthropicCountTokensRequest, *, takes_media: bool = False
) -> ChatRequest:
    """Checked as far as this dialect goes; the rest is checked as for any chat."""
    extra = request.model_extra or {}
    for name in _UNBUILT:
        if extra.get(name):
            raise NotBuiltError(f"{name} is not in this version of Quire", param=name)
    for name in extra:
        if name in ChatRequest.model_fields and extra[name] is not None:
            raise InputError(f"{name} is not a field of the Messages API", param=name)
    fields: dict[str, Any] = {
        **extra,
        "model": request.model,
        "messages": read_messages(request, takes_media=takes_media),
    }
    for name in _SAME:
        if name in request.model_fields_set:
            fields[name] = getattr(request, name)
    if isinstance(request, AnthropicMessagesRequest):
        fields["max_tokens"] = request.max_tokens
        fields["stop"] = request.stop_sequences
    last = fields["messages"][-1]
    if last["role"] == "assistant" and last.get("content") and not last.get("tool_calls"):
        fields["continue_final_message"] = True
    fields |= _tools(request)
    fields |= _output(request)
    return ChatRequest(**{name: value for name, value in fields.items() if value is not None})


def template_variables(request: AnthropicMessagesRequest | AnthropicCountTokensRequest) -> dict[str, Any]:
    """Whether to think is the template's business, under the name that most templates know."""
    thinking = request.thinking
    if thinking is None or thinking.type == "adaptive":
        return {}
    return {"enable_thinking": thinking.type == "enabled"}


def read_messages(
    request: AnthropicMessagesRequest | AnthropicCountTokensRequest, *, takes_media: bool = False
) -> list[dict[str, Any]]:
    """Messages as a chat template reads them; images as parts of OpenAI's form."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _texts(request.system, "system")})
    if not request.messages:
        raise InputError("messages is empty; at least one message is needed", param="messages")
    for number, message in enumerate(request.messages):
        place, content = f"messages[{number}].content", message["content"]
        if isinstance(content, str):
            messages.append({"role": message["role"], "content": content})
        elif message["role"] == "assistant":
            messages.append(_assistant(content, place))
        elif message["role"] == "user":
            messages += _user(content, place, takes_media)
        else:
            messages.append({"role": message["role"], "content": _texts(content, place)})
    return messages


def _assistant(blocks: Sequence[Mapping[str, Any]], place: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        where = f"{place}[{number}]"
        if block["type"] == "text":
            texts.append(_word(block, "text", where))
        elif block["type"] == "thinking":
            thoughts.append(_word(block, "thinking", where))
        elif block["type"] == "tool_use":
            name, call_id = _word(block, "name", where), _word(block, "id", where)
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        else:
            raise _refused(block, where)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(blocks: Sequence[Mapping[str, Any]], place: str, takes_media: bool) -> list[dict[str, Any]]:
    """A tool's result is a message of its own, where it stands."""
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        where = f"{place}[{number}]"
        if block["type"] != "tool_result":
            parts.append(_part(block, where, takes_media))
            continue
        if parts:
            messages.append({"role": "user", "content": _content(parts)})
            parts = []
        content = block.get("content") or ""
        inner = [] if isinstance(content, str) else content
        shown = [_part(one, f"{where}.content[{index}]", takes_media) for index, one in enumerate(inner)]
        result: dict[str, Any] = {
            "role": "tool",
            "tool_call_id": _word(block, "tool_use_id", where),
            "content": content if isinstance(content, str) else _content(shown),
        }
        if block.get("is_error"):
            result["is_error"] = True
        messages.append(result)
    if parts or not messages:
        messages.append({"role": "user", "content": _content(parts)})
    return messages


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Texts alone are one string."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(block: Mapping[str, Any], where: str, takes_media: bool) -> dict[str, Any]:
    if block.get("type") == "text":
        return {"type": "text", "text": _word(block, "text", where)}
    if block.get("type") != "image" or not takes_media:
        raise _refused(block, where)
    source = block.get("source")
    if not isinstance(source, Mapping) or source.get("type") not in ("base64", "url"):
        raise InputError(f"{where}.source must be of type base64 or url", param=f"{where}.source")
    if source["type"] == "url":
        return {"type": "image_url", "image_url": {"url": _word(source, "url", f"{where}.source")}}
    data = _word(source, "data", f"{where}.source")
    return {"type": "image_url", "image_url": {"url": f"data:image/any;base64,{data}"}}


def _texts(content: str | Sequence[Mapping[str, Any]], place: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, block in enumerate(content):
        where = f"{place}[{number}]"
        if block.get("type") != "text":
            raise _refused(block, where)
        texts.append(_word(block, "text", where))
    return "\n".join(texts)


def _word(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InputError(f"{where}.{name} must be a string, got {value!r:.100}", param=f"{where}.{name}")
    return value


def _refused(block: Mapping[str, Any], where: str) -> InputError:
    kind = block.get("type")
    words = f"{where}.type is {kind!r:.100}: "
    if kind in ("image", "document", "file"):
        words += "this model takes text only" if kind == "image" else "this version of Quire takes text and images only"
    elif kind in ("text", "tool_use", "tool_result", "thinking"):
        words += "such a block does not belong there"
    else:
        words += "blocks may be text, thinking, tool_use and tool_result"
    return NotBuiltError(words, param=f"{where}.type")


def _tools(request: AnthropicMessagesRequest | AnthropicCountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    tools = []
    for number, tool in enumerate(request.tools or ()):
        place = f"tools[{number}]"
        if tool.get("type") not in (None, "custom"):
            raise NotBuiltError(
                f"{place}.type is {tool['type']!r:.100}: tools that the server runs are not in this version of Quire",
                param=f"{place}.type",
            )
        if tool.get("defer_loading"):
            raise NotBuiltError(
                f"{place}.defer_loading is not in this version of Quire", param=f"{place}.defer_loading"
            )
        schema = tool.get("input_schema")
        if schema is None:
            raise InputError(f"{place}.input_schema is missing", param=f"{place}.input_schema")
        function: dict[str, Any] = {"name": tool["name"], "parameters": schema}
        for name in ("description", "strict"):
            if tool.get(name) is not None:
                function[name] = tool[name]
        tools.append({"type": "function", "function": function})
    if tools:
        fields["tools"] = tools
    choice = request.tool_choice
    if choice is None:
        return fields
    if not tools and choice.type != "none":
        raise InputError(f"tool_choice is {choice.type!r}, but there are no tools", param="tool_choice")
    if choice.type == "tool":
        if not choice.name:
            raise InputError("tool_choice.name is missing", param="tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = _CHOICES[choice.type]
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _output(request: AnthropicMessagesRequest | AnthropicCountTokensRequest) -> dict[str, Any]:
    """Thinking, effort and form."""
    fields: dict[str, Any] = {}
    thinking, config = request.thinking, request.output_config
    if thinking is not None:
        if thinking.display == "omitted":
            fields["include_reasoning"] = False
        budget = thinking.budget_tokens
        if thinking.type == "enabled":
            if budget is None or budget < LEAST_BUDGET:
                raise InputError(
                    f"thinking.budget_tokens is {budget}; it must be at least {LEAST_BUDGET}",
                    param="thinking.budget_tokens",
                )
            fields["thinking_token_budget"] = budget
    if config is not None:
        fields["reasoning_effort"] = config.effort
    form = request.output_format if config is None or config.format is None else config.format
    if form is not None:
        schema = {"name": "answer", "schema": form.json_schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields
