"""From a request of /v1/responses to a chat request. Each refusal names the field by its place.

In: a ResponsesRequest, and the messages of the answer it goes on after. Out: a ChatRequest. Reasoning, the assistant's
text and its calls that follow each other are one message. Must not know: templates, answers, stores.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from quire.schema.errors import InputError, NotBuiltError
from quire.server.openai.chat_protocol import ChatRequest
from quire.server.openai.responses_protocol import InputItem, ResponsesRequest

LOGPROBS = "message.output_text.logprobs"
Messages = list[dict[str, Any]]
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "logit_bias", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "skip_special_tokens", "priority", "cache_salt", "vllm_xargs", "chat_template_kwargs", "structured_outputs",
    "watermarking", "media_io_kwargs", "mm_processor_kwargs", "return_mm_kwargs", "kv_transfer_params",
    "ec_transfer_params", "user", "session_id", "parallel_tool_calls", "include_reasoning",
)  # fmt: skip
_UNBUILT = ("prompt", "conversation")
# Tools that a tool server may run (responses_rounds.py).
OWN_TOOLS = ("mcp", "web_search_preview", "web_search", "code_interpreter", "container")
_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}
_TEXTS = ("input_text", "output_text", "text")
_IMAGES = ("input_image", "input_file")
# How the fields of a chat request are called here, for refusals.
NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "truncate_prompt_tokens": "truncation",
}


def chat_request(
    request: ResponsesRequest, messages: Messages, *, in_pieces: bool, own: Messages | None = None
) -> ChatRequest:
    """`messages`: all of them. `in_pieces`: results are wanted while they grow. `own`: tools that the server runs."""
    _check(request)
    extra = request.model_extra or {}
    for name in extra:
        if name in ChatRequest.model_fields and extra[name] is not None:
            raise InputError(f"{name} is not a field of /v1/responses", param=name)
    fields: dict[str, Any] = {**extra, "model": request.model, "messages": messages, "stream": in_pieces}
    for name in _SAME:
        if name in request.model_fields_set:
            fields[name] = getattr(request, name)
    fields["max_tokens"] = request.max_output_tokens
    if request.include is not None and LOGPROBS in request.include:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    elif request.top_logprobs:
        raise InputError(
            f"top_logprobs is {request.top_logprobs}, but include does not have {LOGPROBS}", param="top_logprobs"
        )
    if request.truncation == "auto":
        fields["truncate_prompt_tokens"] = -1
    if request.reasoning is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    fields |= _tools(request, own or [])
    if request.text is not None and request.text.format is not None:
        fields["response_format"] = _format(request.text.format)
    return ChatRequest(**{name: value for name, value in fields.items() if value is not None})


def read_input(request: ResponsesRequest, *, takes_media: bool = False) -> Messages:
    """What the request itself adds to the conversation; images as parts of a chat message."""
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    if not request.input:
        raise InputError("input is empty; give a text or at least one item", param="input")
    reader = _MessageBuilder(takes_media)
    for number, item in enumerate(request.input):
        reader.add(item, f"input[{number}]")
    return reader.done()


def earlier_messages(request: ResponsesRequest) -> Messages:
    """Messages of a chat that the client kept, as `input_messages` and `output_messages` of earlier answers are."""
    messages = request.previous_input_messages or []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            place = f"previous_input_messages[{number}]"
            raise InputError(f"{place} must be a message with a role, got {message!r:.100}", param=place)
    return [dict(message) for message in messages]


def input_items(request: ResponsesRequest) -> Messages:
    """The input as items, each with its type and an id."""
    items: Sequence[Mapping[str, Any]] = (
        [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    )
    with_ids = []
    for item in items:
        kind = item.get("type") or "message"
        one = {"id": _PREFIXES.get(kind, "item_") + secrets.token_hex(12), **item, "type": kind}
        if kind == "message" and isinstance(item.get("content"), str):
            text_type = "output_text" if item.get("role") == "assistant" else "input_text"
            one["content"] = [{"type": text_type, "text": item["content"]}]
        with_ids.append(one)
    return with_ids


class _MessageBuilder:
    """Puts items together to messages."""

    def __init__(self, takes_media: bool) -> None:
        self._takes_media = takes_media
        self._messages: Messages = []
        self._turn: dict[str, Any] = {}  # of the assistant, as far as it has come

    def done(self) -> Messages:
        self._flush()
        return self._messages

    def add(self, item: InputItem, where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            name = _full_name(item.get("namespace"), _word(item, "name", where))
            function = {"name": name, "arguments": _word(item, "arguments", where)}
            call = {"id": _word(item, "call_id", where), "type": "function", "function": function}
            self._turn.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            self._flush()
            output = self._content(item.get("output"), f"{where}.output")
            self._messages.append({"role": "tool", "tool_call_id": _word(item, "call_id", where), "content": output})
        elif kind == "mcp_call":
            self._server_call(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind != "mcp_list_tools":
            raise NotBuiltError(
                f"{where}.type is {kind!r:.100}: items may be message, function_call, function_call_output, mcp_call "
                "and reasoning in this version of Quire",
                param=f"{where}.type",
            )

    def _message(self, item: InputItem, where: str) -> None:
        role, place = _word(item, "role", where), f"{where}.content"
        if role != "assistant":
            self._flush()
            self._messages.append({"role": role, "content": self._content(item.get("content"), place)})
            return
        text = _texts(item.get("content"), place)
        if "content" in self._turn or "tool_calls" in self._turn:
            self._flush()
        self._turn["content"] = text

    def _content(self, content: Any, place: str) -> str | Messages:
        """Texts alone are one string."""
        has_media = isinstance(content, list) and any(part.get("type") in _IMAGES for part in content)
        if not has_media or not self._takes_media:
            return _texts(content, place)
        return [
            dict(part) if part.get("type") in _IMAGES else {"type": "text", "text": _texts([part], place)}
            for part in content
        ]

    def _server_call(self, item: InputItem, where: str) -> None:
        """A call that a server ran, with its result in the same item."""
        fields: Mapping[str, Any] = item
        call_id = _word(fields, "id", where)
        function = {"name": _word(fields, "name", where), "arguments": _word(fields, "arguments", where)}
        self._turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._flush()
        output = fields.get("output") if fields.get("output") is not None else fields.get("error")
        text = output if isinstance(output, str) else json.dumps(output)
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _reasoning(self, item: InputItem, where: str) -> None:
        if item.get("encrypted_content"):
            raise NotBuiltError(
                f"{where}.encrypted_content: encrypted reasoning cannot be read here; send its content",
                param=f"{where}.encrypted_content",
            )
        if "content" in self._turn or "tool_calls" in self._turn:
            self._flush()
        parts = item.get("content") or item.get("summary") or []
        texts = (
            [part.get("text") for part in parts if isinstance(part, Mapping)] if not isinstance(parts, str) else [parts]
        )
        self._turn["reasoning"] = self._turn.get("reasoning", "") + "".join(map(str, filter(None, texts)))

    def _flush(self) -> None:
        if self._turn:
            self._messages.append({"role": "assistant", "content": None, **self._turn})
            self._turn = {}


def _texts(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{place} must be a string or a list of parts, got {content!r:.100}", param=place)
    texts = []
    for number, part in enumerate(content):
        where = f"{place}[{number}]"
        kind = part.get("type")
        if kind not in (*_TEXTS, "refusal"):
            raise NotBuiltError(
                f"{where}.type is {kind!r:.100}: this version of Quire takes text only", param=f"{where}.type"
            )
        texts.append(_word(part, "refusal" if kind == "refusal" else "text", where))
    return "\n".join(texts)


def _word(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InputError(f"{where}.{name} must be a string, got {value!r:.100}", param=f"{where}.{name}")
    return value


def _check(request: ResponsesRequest) -> None:
    for name in _UNBUILT:
        if getattr(request, name):
            raise NotBuiltError(f"{name} is not in this version of Quire", param=name)
    if (request.stream_options or {}).get("include_obfuscation"):
        raise NotBuiltError(
            "stream_options.include_obfuscation is not in this version of Quire", param="stream_options"
        )
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise NotBuiltError(
            f"text.verbosity is {request.text.verbosity!r}; only 'medium' is in this version of Quire",
            param="text.verbosity",
        )


def _tools(request: ResponsesRequest, own: Messages) -> dict[str, Any]:
    """Flat tools in the nested form of a chat, and those that the server runs."""
    tools = list(own)
    for number, tool in enumerate(request.tools or ()):
        place = f"tools[{number}]"
        if own and tool.get("type") in OWN_TOOLS:
            continue
        if tool.get("type") == "namespace":
            named = _word(tool, "name", place)
            for inner, one in enumerate(_inner_tools(tool, place)):
                tools.append(_function(one, f"{place}.tools[{inner}]", named))
        else:
            tools.append(_function(tool, place))
    choice = request.tool_choice
    if own and choice is None:
        choice = "auto"  # what the server runs, it must find
    if not tools:
        if choice not in (None, "auto", "none"):
            raise InputError(f"tool_choice is {choice!r:.100}, but there are no tools", param="tool_choice")
        return {}
    return {"tools": tools, "tool_choice": _choice(choice)}


def _function(tool: Mapping[str, Any], place: str, namespace: str | None = None) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise NotBuiltError(
            f"{place}.type is {tool.get('type')!r:.100}: only functions of the client, and namespaces of them, are in "
            "this version of Quire",
            param=f"{place}.type",
        )
    function: dict[str, Any] = {"name": _full_name(namespace, _word(tool, "name", place))}
    for name in ("description", "parameters", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _inner_tools(tool: Mapping[str, Any], place: str) -> list[Mapping[str, Any]]:
    inner = tool.get("tools")
    if not isinstance(inner, list) or not all(isinstance(one, Mapping) for one in inner):
        raise InputError(f"{place}.tools must be a list of functions, got {inner!r:.100}", param=f"{place}.tools")
    return inner


def _full_name(namespace: object, name: str) -> str:
    """What the model calls a function of a namespace; templates and parsers know one name for each."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def namespaces(request: ResponsesRequest) -> dict[str, tuple[str, str]]:
    """{the model's name of a function: (its namespace, its name there)}."""
    by_full_name: dict[str, tuple[str, str]] = {}
    for tool in request.tools or ():
        if tool.get("type") == "namespace":
            inner: Any = tool.get("tools")
            named = str(tool.get("name"))
            by_full_name |= {_full_name(named, one["name"]): (named, one["name"]) for one in inner}
    return by_full_name


def _choice(choice: str | Mapping[str, Any] | None) -> Any:
    if not isinstance(choice, Mapping) or choice.get("type") == "allowed_tools":
        return choice
    if choice.get("type") != "function":
        raise NotBuiltError(
            f"tool_choice.type is {choice.get('type')!r:.100}: function and allowed_tools are in this version of Quire",
            param="tool_choice.type",
        )
    name = _full_name(choice.get("namespace"), _word(choice, "name", "tool_choice"))
    return {"type": "function", "function": {"name": name}}


def _format(form: Mapping[str, Any]) -> dict[str, Any]:
    """A text format in the form of a chat's response_format."""
    kind = _word(form, "type", "text.format")
    if kind != "json_schema":
        return {"type": kind}
    inner = {name: form[name] for name in ("name", "description", "schema", "strict") if form.get(name) is not None}
    return {"type": kind, "json_schema": inner}


def assistant_message(texts: Sequence[str], thoughts: Sequence[str], calls: Messages) -> dict[str, Any]:
    """An answer as the next request's template is to see it."""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
