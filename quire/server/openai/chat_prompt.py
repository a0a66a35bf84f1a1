"""From the messages of a chat request to the text of its prompt.

Owns: which template a request may use, and where it is read and rendered: the server's own in this process, one that
came with the request (or variables that are more than words and numbers) apart, in a process with limits. The text
holds its special tokens. Must not know: answers, engines.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.schema.errors import InputError, OverloadedError
from quire.server.route import HttpCall
from quire.server.state import ServerState
from quire.text.chat import check_variables, render_chat

_LONG_WORD = 1024  # characters of a variable that is still a word
_MOST_APART = 64  # templates of requests that are rendered or wait for it


async def render_prompt(
    call: HttpCall,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template: str | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    reasoning_effort: str | None = None,
    mark: str = "",
) -> str:
    """The caller has checked that the request may bring a template, and that its variables are few and small."""
    state, model = call.state, call.model
    check_variables(model.tokenizer, chat_template_kwargs)
    if chat_template is not None and "{" not in chat_template:
        raise InputError(
            f"chat_template must be Jinja text, and {chat_template!r:.100} has no braces", param="chat_template"
        )
    variables = dict(state.options.default_chat_template_kwargs or {})
    if reasoning_effort is not None:
        variables["reasoning_effort"] = reasoning_effort
    variables.update(chat_template_kwargs or {})
    apart = chat_template is not None or not all(map(_is_word, (chat_template_kwargs or {}).values()))
    render = functools.partial(
        render_chat,
        model.tokenizer,
        messages,
        tools=tools,
        chat_template=chat_template if chat_template is not None else model.chat_template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=variables,
        content_format=state.options.chat_template_content_format,
        documents=documents,
        trusted=not apart,
        mark=mark,
    )
    if not apart:
        return await call.apart(render)
    return await _render_apart(state, render)


async def _render_apart(state: ServerState, render: Callable[[], str]) -> str:
    load = state.templates_load
    if load.count >= _MOST_APART:
        raise OverloadedError(
            f"{load.count} chat templates of requests wait to be rendered; the limit is {_MOST_APART}"
        )
    load.count += 1
    try:
        return await asyncio.get_running_loop().run_in_executor(state.templates, render)
    finally:
        load.count -= 1


def _is_word(value: Any) -> bool:
    return (
        value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= _LONG_WORD)
    )
