"""From a chat request to requests of the engine: checked, rendered, opened. Every dialect with messages comes through.

In: a ChatRequest (other dialects make one of their own). Out: PreparedChat, which is what would be sent, and
OpenedChat, which runs and knows the parser of its answers. Owns: which template a request may use, and where it is read
and rendered: the server's own in this process, one that came with the request (or variables that are more than words
and numbers) apart, in a process with limits. Must not know: how answers are written.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from quire.config.server import ServerConfig
from quire.llm.online import LONG_TEXT
from quire.schema.errors import InputError, NotBuiltError, OverloadedError
from quire.schema.params import SamplingParams, StructuredOutputsParams
from quire.schema.prompt import Prompt
from quire.server.openai.chat_protocol import ChatRequest
from quire.server.openai.limits import check_chat, check_request
from quire.server.openai.params import Opened, most_tokens, open_requests, sampling_params
from quire.server.openai.tool_choice import NO_TOOLS, ToolUse, read_tool_use
from quire.server.route import HttpCall
from quire.server.served import ServedModel
from quire.server.state import ServerState
from quire.text.chat import check_requested, check_variables, render_chat
from quire.text.parse.base import OutputParser, PlainParser
from quire.text.parse.compose import ParseRequest
from quire.text.parse.reasoning import ReasoningFormat

Rendered = TypeVar("Rendered")
_LONG_WORD = 1024  # characters of a variable that is still a word
_MOST_APART = 64  # templates of requests that are rendered or wait for it


@dataclass(frozen=True)
class PreparedChat:
    """What would be sent to the engine."""

    request: ChatRequest
    prompt: Prompt
    params: SamplingParams
    most: int | None  # the max_tokens the client asked for
    opens: bool  # a new message begins; else the last one goes on
    tools: ToolUse = NO_TOOLS
    thinking: bool | None = None  # what the template was told about it


@dataclass(frozen=True)
class OpenedChat:
    options: ServerConfig
    model: ServedModel
    prepared: PreparedChat
    opened: Opened

    @property
    def role(self) -> str:
        request = self.prepared.request
        return self.options.response_role if self.prepared.opens else str(request.messages[-1]["role"])

    @property
    def is_parsed(self) -> bool:
        """False: all text of an answer is content."""
        return bool(self.prepared.tools.tools) or self.model.parsers.reasoning is not None

    def new_parser(self) -> OutputParser:
        """One for each answer."""
        prepared, request = self.prepared, self.prepared.request
        if not self.is_parsed:
            return PlainParser()
        ask = ParseRequest(
            prompt=prepared.prompt.text,
            continues=bool(request.continue_final_message),
            thinking=prepared.thinking,
            tools=prepared.tools.tools,
            forced=prepared.tools.forced,
            parallel=prepared.tools.parallel,
            include_reasoning=request.include_reasoning is not False,
            request=request,
        )
        return self.model.parsers.parser(ask)


def check_reasoning(model: ServedModel, param: str) -> None:
    """For dialects in which thought must be asked for."""
    if model.parsers.reasoning is None:
        raise InputError(f"{param}: this server has no reasoning parser (--reasoning-parser)", param=param)


class _ChatSettings(NamedTuple):
    """What a chat request asks, all but its prompt."""

    request: ChatRequest
    tools: ToolUse
    opens: bool
    most: int | None
    params: SamplingParams


def _settle(options: ServerConfig, model: ServedModel, request: ChatRequest) -> _ChatSettings:
    check_request(request, options, 1)
    check_chat(request, options)
    tools = NO_TOOLS if request.tool_choice is None and not request.tools else read_tool_use(request, options)
    if tools.tools:
        request = model.parsers.adjusted(request)
    opens = request.add_generation_prompt
    opens = not request.continue_final_message if opens is None else opens
    name = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    requested = request.max_completion_tokens if name == "max_completion_tokens" else request.max_tokens
    most = most_tokens(model, requested, None, name=name)
    further: dict[str, Any] = {"logprobs": request.top_logprobs or 0} if request.logprobs else {}
    if request.skip_special_tokens is None and model.keeps_special[bool(tools.tools)]:
        further["skip_special_tokens"] = False
    params = sampling_params(request, model, max_tokens=most, **further)
    if (constraint := _held_to(model, tools, params)) is not None:
        params = replace(params, structured_outputs=constraint)
    return _ChatSettings(request, tools, opens, requested, params)


async def prepare_chat(
    call: HttpCall, request: ChatRequest, variables: Mapping[str, Any] | None = None
) -> PreparedChat:
    """`variables` of the template are the dialect's own; those of the request go before them."""
    options, model = call.state.options, call.model
    request, tools, opens, requested, params = await call.apart(_settle, options, model, request)
    variables = {**(variables or {}), **(request.chat_template_kwargs or {})}
    thinking = _thinking({**(options.default_chat_template_kwargs or {}), **variables})
    request, media = await _take_media(call, request)
    text = await chat_text(call, request, opens, variables, has_media=media is not None)
    if tools.schema is not None and model.config.structured_outputs_config.enable_in_reasoning:
        _check_no_thought(model, text, bool(request.continue_final_message), thinking)
    prompt = Prompt(text=text) if media is None else replace(media, text=text)
    return PreparedChat(request, prompt, params, requested, opens, tools, thinking)


async def _take_media(call: HttpCall, request: ChatRequest) -> tuple[ChatRequest, Prompt | None]:
    """The request with messages in which something stands for their media, and a prompt that has these."""
    if not call.model.takes_media:
        for name in ("media_io_kwargs", "mm_processor_kwargs"):
            if getattr(request, name):
                raise NotBuiltError(f"{name}: this model takes text only", param=name)
        return request, None
    from quire.server.media import has_media, take_media  # lazy

    if not await call.apart(has_media, request.messages):
        return request, None
    return await call.model.engine.lanes.run(max(call.size, LONG_TEXT), take_media, call.model, request)


async def chat_text(
    call: HttpCall,
    request: ChatRequest,
    opens: bool,
    variables: Mapping[str, Any],
    *,
    mark: str = "",
    has_media: bool = False,
) -> str:
    """`mark`: see render_chat."""
    hidden = request.tool_choice == "none" and call.state.options.exclude_tools_when_tool_choice_none
    return await render_prompt(
        call,
        request.messages,
        tools=None if hidden else request.tools,
        documents=request.documents,
        add_generation_prompt=opens,
        continue_final_message=bool(request.continue_final_message),
        chat_template=request.chat_template,
        chat_template_kwargs=variables,
        reasoning_effort=request.reasoning_effort,
        mark=mark,
        has_media=has_media,
    )


def _thinking(variables: Mapping[str, Any]) -> bool | None:
    """What the variables of a template say; there are two names for it."""
    choices = [variables[name] for name in ("enable_thinking", "thinking") if isinstance(variables.get(name), bool)]
    return choices[0] if choices else None


def _held_to(model: ServedModel, tools: ToolUse, params: SamplingParams) -> StructuredOutputsParams | None:
    """What calls ask of the answer."""
    if tools.schema is not None:
        return StructuredOutputsParams(json=tools.schema)
    if not tools.tools or params.structured_outputs is not None:  # a form of the whole answer leaves no room for calls
        return None
    tag = model.parsers.strict_tag(tools.tools, parallel=tools.parallel)
    return None if tag is None else StructuredOutputsParams(structural_tag=tag)


def _check_no_thought(model: ServedModel, prompt: str, continues: bool, thinking: bool | None) -> None:
    """The grammar holds from the first token on, and that one would be a thought's."""
    reasoning = model.parsers.reasoning
    if not isinstance(reasoning, ReasoningFormat):
        return
    if reasoning.begins_inside(prompt, continues=continues, thinking=thinking):
        raise InputError(
            "tool_choice 'required' or a named function leaves no room for the thought that this prompt opens, because "
            "the server was started with enable_in_reasoning; switch thinking off in the chat template, or use 'auto'",
            param="tool_choice",
        )


async def open_chat(call: HttpCall, prepared: PreparedChat, public_id: str) -> OpenedChat:
    """It runs from now on; close its flow."""
    request = prepared.request
    opened = await open_requests(
        call, request, public_id, [prepared.prompt], prepared.params,
        add_special_tokens=bool(request.add_special_tokens), most=prepared.most,
        continues=bool(request.continue_final_message), thinking=prepared.thinking,
    )  # fmt: skip
    return OpenedChat(call.state.options, call.model, prepared, opened)


# ---- the prompt's text ----------------------------------------------------------------------------------------------


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
    has_media: bool = False,
) -> str:
    """The caller has checked that the request may bring a template, and that its variables are few and small."""
    state, model = call.state, call.model
    check_variables(model.tokenizer, chat_template_kwargs)
    if chat_template is not None:
        check_requested(chat_template)
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
        mark=mark,
        media=model.media_order if has_media else "",
    )
    if not apart:
        return await call.apart(render)
    from quire.text.template_child import render_apart  # lazy

    return await rendered_in_turn(state, functools.partial(render, apart=render_apart))


async def rendered_in_turn(state: ServerState, render: Callable[[], Rendered]) -> Rendered:
    """What a child process renders with a request's template; so many may wait for it."""
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
