"""The harmony format of gpt-oss: messages and tools -> the text of a prompt, as the package oss-harmony writes it.

    system: who the model is, the date, how hard to think · developer: instructions, functions as TypeScript
    assistant<|channel|>analysis: thought · commentary: words before calls, calls · final: the answer
Thoughts before the last final answer are left out. text/parse/tools/harmony.py reads what the model answers.
Must not know: engines, HTTP.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from quire.schema.errors import InputError
from quire.text.messages import normalize_messages
from quire.text.typescript import write_type

EFFORTS = ("low", "medium", "high")
IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_CUTOFF = "2024-06"
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_TOOLS_GO = "\nCalls to these tools must go to the commentary channel: 'functions'."


class _Said(NamedTuple):
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
    for message, given in zip(plain, messages, strict=True):
        if given.get("tool_calls"):
            message["tool_calls"] = given["tool_calls"]  # arguments as they were written
    first = next((n for n, one in enumerate(plain) if one["role"] not in ("system", "developer")), len(plain))
    said = [_system(options, bool(tools))]
    instructions = "\n\n".join(one["content"] for one in plain[:first])
    if instructions or tools:
        said.append(_developer(instructions, tools or ()))
    said += _without_old_thoughts([one for message in _with_names(plain[first:]) for one in _messages(message)])
    if not continue_final_message:
        return "".join(one.written() for one in said) + ("<|start|>assistant" if add_generation_prompt else "")
    if said[-1].author != "assistant" or said[-1].recipient:
        raise InputError("continue_final_message is set, but the last message is not the assistant's words",
                         param="continue_final_message")  # fmt: skip
    return "".join(one.written() for one in said[:-1]) + said[-1].written("")


def _system(options: Mapping[str, Any], has_tools: bool) -> _Said:
    effort = options.get("reasoning_effort") or "medium"
    if effort not in EFFORTS:
        raise InputError(
            f"reasoning_effort is {effort!r:.100}; this model knows {', '.join(EFFORTS)}",
            param="reasoning_effort",
            value=effort,
        )
    today = options.get("current_date") or datetime.date.today().isoformat()
    text = f"{options.get('model_identity') or IDENTITY}\nKnowledge cutoff: {_CUTOFF}\nCurrent date: {today}\n\n"
    return _Said("system", f"{text}Reasoning: {effort}\n\n{_CHANNELS}{_TOOLS_GO if has_tools else ''}")


def _developer(instructions: str, tools: Sequence[Mapping[str, Any]]) -> _Said:
    parts = [f"# Instructions\n\n{instructions}"] if instructions else []
    if tools:
        functions = "".join(_function(tool) for tool in tools)
        parts.append(f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{functions}}} // namespace functions")
    return _Said("developer", "\n\n".join(parts))


def _function(tool: Mapping[str, Any]) -> str:
    function = tool.get("function") or {}
    about = "".join(f"// {line}\n" for line in str(function.get("description") or "").splitlines())
    given = function.get("parameters")
    taken = "()" if given is None else f"(_: {write_type(given)})"
    return f"{about}type {function.get('name')} = {taken} => any;\n\n"


def _with_names(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Results with the names of the functions that gave them."""
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


def _messages(message: dict[str, Any]) -> Iterator[_Said]:
    role, content = message["role"], message["content"]
    if role in ("tool", "function"):
        yield _Said(f"functions.{message['name']}", content, "commentary", "assistant")
    elif role in ("system", "developer"):
        yield _developer(content, ())
    elif role != "assistant":
        yield _Said(role, content)
    else:
        calls = message.get("tool_calls") or ()
        if thought := message.get("reasoning"):
            yield _Said("assistant", thought, "analysis")
        if content or not (calls or thought):
            yield _Said("assistant", content, "commentary" if calls else "final")
        for call in calls:
            function = call["function"]
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            yield _Said("assistant", text, "commentary", f"functions.{function['name']}", "json")


def _without_old_thoughts(said: list[_Said]) -> list[_Said]:
    finals = [n for n, one in enumerate(said) if one.channel == "final"]
    last = finals[-1] if finals else 0
    return [one for n, one in enumerate(said) if n > last or one.channel != "analysis"]
