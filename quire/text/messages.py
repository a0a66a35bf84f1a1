"""Chat messages as callers send them -> the plain dicts a template reads.

In: dicts in OpenAI's format (content a string, a list of parts, or none). Out: new dicts, whose content is a
string or a list of parts, as the template expects. Must not know: templates' text, or how media parts are handled (one
hook, which refuses them until media are supported).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.schema.errors import InputError, NotBuiltError

MOST_DEPTH = 128  # of a tool call's arguments
Part = dict[str, Any]
MediaHook = Callable[[Part], Part | str]
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_MEDIA_TYPES = ("image_url", "input_image", "image", "image_pil", "image_embeds", "input_audio", "audio_url", "audio",
                "audio_embeds", "video_url", "video", "prompt_embeds", "file")  # fmt: skip


def refuse_media(part: Part) -> Part | str:
    raise NotBuiltError(
        f"content parts of type {part['type']!r} (images, audio, video) are not supported yet", param="messages"
    )


def normalize_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    as_parts: bool,
    wrap_strings: bool,
    keep_none: bool,
    media: MediaHook = refuse_media,
) -> list[dict[str, Any]]:
    """`as_parts`: lists of parts stay lists; else their texts are joined. `wrap_strings`: a string becomes one part.
    `keep_none`: no content stays None; else it is empty content."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InputError(f"messages must be a list of dicts, got {type(messages).__name__}", param="messages")
    if not messages:
        raise InputError("messages is empty; a chat needs at least one message", param="messages")
    converted = []
    for number, message in enumerate(messages):
        clean = _checked(message, number)
        content = clean.get("content")
        if content is None:
            if not keep_none:
                clean["content"] = [] if wrap_strings else ""
        elif isinstance(content, str):
            if wrap_strings:
                clean["content"] = [{"type": "text", "text": content}]
        else:
            parts = [_part(part, number, media) for part in content]
            clean["content"] = parts if as_parts else "\n".join(map(_text_of, parts))
        converted.append(clean)
    return converted


def arguments_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with the arguments of tool calls written as JSON text, for templates that put them in as they are."""
    return [{**message, "tool_calls": [_call_as_text(call) for call in message["tool_calls"]]}
            if message.get("tool_calls") else message for message in messages]  # fmt: skip


def _call_as_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    text = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _checked(message: Any, number: int) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise InputError(f"{where} must be a dict with 'role' and 'content', got {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InputError(f"{where} needs a 'role', a non-empty string; got {role!r}", param="messages")
    if content is not None and (not isinstance(content, (str, Sequence)) or isinstance(content, bytes)):
        raise InputError(
            f"{where} has content of type {type(content).__name__}; it is a string, a list of parts, or None",
            param="messages",
        )
    clean = dict(message)
    if clean.get("tool_calls"):
        clean["tool_calls"] = [_call_as_data(call, where) for call in clean["tool_calls"]]
    for one, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if clean.get(one) is not None and clean.get(other) is None:
            clean[other] = clean[one]
    # a third name, of gpt-oss' template, which wants either words or a thought before calls
    if clean.get("reasoning") is not None and not (content and clean.get("tool_calls")):
        clean.setdefault("thinking", clean["reasoning"])
    return clean


def _is_deep(data: Any) -> bool:
    level = [data]
    for _ in range(MOST_DEPTH + 1):
        parts = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        if not parts:
            return False
        level = list(itertools.chain.from_iterable(parts))
    return True


def _too_deep(where: str) -> InputError:
    return InputError(
        f"{where} has a tool call whose arguments are nested deeper than {MOST_DEPTH} levels", param="messages"
    )


def _call_as_data(call: Any, where: str) -> Any:
    """Templates expect the arguments of a call as data; clients send them as JSON text."""
    if not isinstance(call, Mapping):
        raise InputError(f"{where} has a tool call that is not a dict: {call!r}", param="messages")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    text = function["arguments"]
    try:
        data = json.loads(text) if text.strip() else {}
    except ValueError:
        data = text  # what the model wrote then; it may well be broken
    except RecursionError:
        raise _too_deep(where) from None
    if text.count("[") + text.count("{") > MOST_DEPTH and _is_deep(data):
        raise _too_deep(where)
    return {**call, "function": {**function, "arguments": data}}


def _part(part: Any, number: int, media: MediaHook) -> Part:
    where = f"messages[{number}]"
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise InputError(f"{where} has a content part of type {type(part).__name__}; it is a dict", param="messages")
    kind = part.get("type")
    if kind is None:
        kind = next((key for key in (*_TEXT_KEYS, *_MEDIA_TYPES) if key in part), None)
    if kind in _TEXT_KEYS:
        text = part.get(_TEXT_KEYS[kind])
        if not isinstance(text, str):
            raise InputError(
                f"{where} has a {kind!r} part whose {_TEXT_KEYS[kind]!r} is {text!r}, not a string", param="messages"
            )
        return {"type": "thinking", "thinking": text} if kind == "thinking" else {"type": "text", "text": text}
    if kind in _MEDIA_TYPES:
        placed = media({**part, "type": kind})
        return {"type": "text", "text": placed} if isinstance(placed, str) else placed
    raise InputError(f"{where} has a content part of unknown type {kind!r}", param="messages", value=kind)


def _text_of(part: Part) -> str:
    return str(part.get("text", part.get("thinking", "")))
