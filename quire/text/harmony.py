"""The harmony format of gpt-oss: messages and tools -> the text of a prompt, as in the package oss-harmony.

    system: who the model is, the date, how hard to think · developer: instructions, functions as TypeScript
    assistant<|channel|>analysis: thought · commentary: words before calls, calls · final: the answer
Reasoning before the last final answer is left out. text/parse/tools/harmony.py parses the model's answers.
Must not know: engines, HTTP.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from quire.schema.errors import InputError
from quire.text.chat import normalize_messages
from quire.text.typescript import write_type

EFFORTS = ("low", "medium", "high")
IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_CUTOFF = "2024-06"
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_TOOLS_GO = "\nCalls to these tools must go to the commentary channel: 'functions'."


class _HarmonyMessage(NamedTuple):
    """One message."""

    author: str
    text: str
    channel: str = ""
    recipient: str = ""
    content_type: str = ""

    def written(self, end: str | None = None) -> str:
        head = f"<|start|>{self.author}"
        if self.channel:
            head += f"<|channel|>{self.channel}"
        if self.recipient:
            head += f" to={self.recipient}"
        if self.content_type:
            head += f" <|constrain|>{self.content_type}"
        is_call = self.author == "assistant" and bool(self.recipient)
        return f"{head}<|message|>{self.text}" + (("<|call|>" if is_call else "<|end|>") if end is None else end)


def render_harmony(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    options: Mapping[str, Any],
) -> str:
    """`options`: reasoning_effort, model_identity, current_date; others are for other templates."""
    plain = normalize_messages(messages, as_parts=False, wrap_strings=False, keep_none=False)
    for message, original in zip(plain, messages, strict=True):
        if original.get("tool_calls"):
            message["tool_calls"] = original["tool_calls"]  # arguments as the client wrote them
    first = next((n for n, one in enumerate(plain) if one["role"] not in ("system", "developer")), len(plain))
    rendered = [_system(options, bool(tools))]
    instructions = "\n\n".join(one["content"] for one in plain[:first])
    if instructions or tools:
        rendered.append(_developer(instructions, tools or ()))
    rendered += _without_old_thoughts([one for message in _with_names(plain[first:]) for one in _messages(message)])
    if not continue_final_message:
        return "".join(one.written() for one in rendered) + ("<|start|>assistant" if add_generation_prompt else "")
    if rendered[-1].author != "assistant" or rendered[-1].recipient:
        raise InputError("continue_final_message is set, but the last message is not the assistant's words",
                         param="continue_final_message")  # fmt: skip
    return "".join(one.written() for one in rendered[:-1]) + rendered[-1].written("")


def _system(options: Mapping[str, Any], has_tools: bool) -> _HarmonyMessage:
    effort = options.get("reasoning_effort") or "medium"
    if effort not in EFFORTS:
        raise InputError(
            f"reasoning_effort is {effort!r:.100}; this model supports {', '.join(EFFORTS)}",
            param="reasoning_effort",
            value=effort,
        )
    today = options.get("current_date") or datetime.date.today().isoformat()
    text = f"{options.get('model_identity') or IDENTITY}\nKnowledge cutoff: {_CUTOFF}\nCurrent date: {today}\n\n"
    return _HarmonyMessage("system", f"{text}Reasoning: {effort}\n\n{_CHANNELS}{_TOOLS_GO if has_tools else ''}")


def _developer(instructions: str, tools: Sequence[Mapping[str, Any]]) -> _HarmonyMessage:
    parts = [f"# Instructions\n\n{instructions}"] if instructions else []
    if tools:
        functions = "".join(_function(tool) for tool in tools)
        parts.append(f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{functions}}} // namespace functions")
    return _HarmonyMessage("developer", "\n\n".join(parts))


def _function(tool: Mapping[str, Any]) -> str:
    function = tool.get("function") or {}
    about = "".join(f"// {line}\n" for line in str(function.get("description") or "").splitlines())
    parameters = function.get("parameters")
    taken = "()" if parameters is None else f"(_: {write_type(parameters)})"
    return f"{about}type {function.get('name')} = {taken} => any;\n\n"


def _with_names(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Results with the names of the functions that returned them."""
    names: dict[Any, str] = {}
    last = ""
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call.get("id")] = last = str(call["function"]["name"])
        if message["role"] in ("tool", "function"):
            name = names.get(message.get("tool_call_id")) or message.get("name") or last
            if not name:
                raise InputError(
                    "a tool's message answers no call: it needs a tool_call_id or a name", param="messages"
                )
            message["name"] = name
        yield message


def _messages(message: dict[str, Any]) -> Iterator[_HarmonyMessage]:
    role, content = message["role"], message["content"]
    if role in ("tool", "function"):
        yield _HarmonyMessage(f"functions.{message['name']}", content, "commentary", "assistant")
    elif role in ("system", "developer"):
        yield _developer(content, ())
    elif role != "assistant":
        yield _HarmonyMessage(role, content)
    else:
        calls = message.get("tool_calls") or ()
        if thought := message.get("reasoning"):
            yield _HarmonyMessage("assistant", thought, "analysis")
        if content or not (calls or thought):
            yield _HarmonyMessage("assistant", content, "commentary" if calls else "final")
        for call in calls:
            function = call["function"]
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            yield _HarmonyMessage("assistant", text, "commentary", f"functions.{function['name']}", "json")


def _without_old_thoughts(rendered: list[_HarmonyMessage]) -> list[_HarmonyMessage]:
    finals = [n for n, one in enumerate(rendered) if one.channel == "final"]
    last = finals[-1] if finals else 0
    return [one for n, one in enumerate(rendered) if n > last or one.channel != "analysis"]
