"""render_chat: messages, tools and documents -> the text of a prompt, through the model's chat template.

Owns: which template is used, its variables, how a last message is continued, and the form of messages: callers send
OpenAI's dicts, and `normalize_messages` makes plain dicts of them that a template can read. In: a Tokenizer (its
template and its special tokens) and what the caller sent. One rendering is a ChatJob, plain data that may be sent to
another process; `render_job` runs it, here or there. Media parts are refused unless the caller has put what stands for
them in their place (media/parts.py). Must not know: engines, HTTP, media. jinja2 is loaded on the first rendering.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.schema.errors import ConfigError, InputError, NotBuiltError
from quire.schema.prompt import TokensPrompt

if TYPE_CHECKING:
    from quire.text.template import TemplateLimits
    from quire.text.tokenizer import Tokenizer

CONTENT_FORMATS = ("auto", "string", "openai")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
                  "tokenize", "conversation", "padding", "truncation", "return_dict", "return_tensors")  # fmt: skip
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))
# names that every template has: Jinja's, and what the sandbox adds
_ALWAYS_THERE = ("self", "loop", "caller", "varargs", "kwargs", "super", "range", "dict", "namespace", "cycler",
                 "joiner", "lipsum", "raise_exception", "strftime_now")  # fmt: skip

# appended to a message to be continued; the space reveals whether the template trims
_MARK = "QUIRE-CONTINUES-HERE "

_MOST_DEPTH = 128  # of a tool call's arguments
Part = dict[str, Any]
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_MEDIA_TYPES = ("image_url", "input_image", "image", "image_pil", "image_embeds", "input_audio", "audio_url", "audio",
                "audio_embeds", "video_url", "video", "video_embeds", "prompt_embeds", "file",
                "input_file")  # fmt: skip
WRITTEN = "written"  # key of a media part that was replaced: what stands for it in content that is a string


@dataclass(frozen=True)
class ChatJob:
    """All that one rendering needs, as plain data: it may be sent to another process."""

    source: str  # the template's text
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    content_format: str = "auto"
    continues: bool = False  # the last message is continued
    mark: str = ""  # written around the model's parts, and at the very start if the template supports it
    media: str = ""  # replaced parts: "first" puts them before a message's texts, "between" where they stand; "": none


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    content_format: str = "auto",
    documents: Sequence[Mapping[str, Any]] | None = None,
    apart: Callable[[ChatJob], str] | None = None,
    mark: str = "",
    media: str = "",
) -> str:
    """The rendered prompt. It contains its special tokens, so encode it with add_special_tokens=False.

    `apart`: the template came with a request; this parses and renders it in a process with limits (template_child.py).
    `mark`: the text is for `find_answers`. `media`: parts of media were replaced, see ChatJob.
    """
    if add_generation_prompt and continue_final_message:
        raise InputError(
            "add_generation_prompt and continue_final_message cannot both be true: the first opens a new message, "
            "the second continues the last",
            param="continue_final_message",
        )
    if tokenizer.render_own_chat is not None and chat_template is None:
        further = dict(template_kwargs or {})
        return tokenizer.render_own_chat(messages, tools, add_generation_prompt, continue_final_message, further)
    source = choose_template(tokenizer, chat_template, with_tools=bool(tools))
    variables = {
        **tokenizer.special,
        **_checked_kwargs(template_kwargs),
        "tools": _checked_list("tools", tools),
        "documents": _checked_list("documents", documents),
        "add_generation_prompt": add_generation_prompt,
    }
    job = ChatJob(source, messages, variables, _checked_format(content_format), continue_final_message, mark, media)
    return render_job(job) if apart is None else apart(job)


def requested_job(tokenizer: Tokenizer, chat_template: str) -> ChatJob:
    """For conversations without tools, through a template that came with a request (`check_requested`)."""
    check_requested(chat_template)
    nothing = {"tools": None, "documents": None, "add_generation_prompt": False}
    return ChatJob(chat_template, (), {**tokenizer.special, **nothing})


def check_requested(chat_template: str) -> None:
    """A template that came with a request is Jinja text: it names no file of the server."""
    if "{" not in chat_template:
        raise InputError(
            f"chat_template must be Jinja text, and {chat_template!r:.100} has no braces", param="chat_template"
        )


def render_job(job: ChatJob, limits: TemplateLimits | None = None) -> str:
    """Parse the template, convert the messages to the form it expects, render it."""
    from quire.text.template_facts import read_facts  # lazy

    facts = read_facts(job.source)
    as_parts = facts.loops_content if job.content_format == "auto" else job.content_format == "openai"
    plain = normalize_messages(
        job.messages,
        as_parts=as_parts,
        wrap_strings=as_parts and not facts.tests_string,
        keep_none=facts.tests_none,
        media=job.media,
    )
    if job.continues:
        _mark_last(plain[-1])
    text = _render(job, plain, limits)
    text = _cut_at_mark(text) if job.continues else text
    return job.mark + text if facts.marks_answers else text


def _render(job: ChatJob, messages: list[dict[str, Any]], limits: TemplateLimits | None) -> str:
    from quire.text.template import render  # lazy

    bounds: dict[str, Any] = {"mark": job.mark} if limits is None else {"mark": job.mark, "limits": limits}
    try:
        return render(job.source, {**job.variables, "messages": messages}, **bounds)
    except InputError as wrong:
        textual = arguments_as_text(messages)
        if textual == messages or not isinstance(wrong.__cause__, TypeError):
            raise
    # some templates insert the arguments of a tool call as text
    return render(job.source, {**job.variables, "messages": textual}, **bounds)


def _mark_last(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _MARK
        return
    texts = [part for part in content or () if "text" in part]
    if not texts:
        raise InputError(
            f"continue_final_message is set, but the last message has no text to continue: {content!r}",
            param="continue_final_message",
        )
    texts[-1]["text"] += _MARK


def _cut_at_mark(text: str) -> str:
    index = text.rfind(_MARK.strip())
    if index < 0:
        raise InputError(
            "continue_final_message is set, but the chat template omits the last message",
            param="continue_final_message",
        )
    # if the template trimmed the mark's space, it would have trimmed the message's too
    return text[:index] if text.startswith(_MARK, index) else text[:index].rstrip()


def tokenize_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **how: Any) -> TokensPrompt:
    """A conversation as a prompt of token ids. `how`: the keywords of render_chat."""
    text = render_chat(tokenizer, messages, **how)
    return TokensPrompt(prompt=text, prompt_token_ids=tokenizer.encode(text, add_special_tokens=False))


def find_answers(marked: str, mark: str, text: str) -> list[tuple[int, int]] | None:
    """(start, end) characters of the model's parts of a `text`, from the same rendered with marks. None:
    the template has no {% generation %}, or it renders differently with marks in its text."""
    if not marked.startswith(mark):
        return None
    from quire.text.template import split_marks  # lazy

    plain, spans = split_marks(marked[len(mark) :], mark)
    return spans if plain == text else None


def check_variables(tokenizer: Tokenizer, variables: Mapping[str, Any] | None) -> None:
    """Variables of a request may add to a template's variables, but not replace any."""
    taken = {*_RESERVED, *_SPECIAL_TOKENS, *tokenizer.special, *_ALWAYS_THERE}
    for name in variables or ():
        if name in taken or not name.isidentifier():
            raise InputError(f"chat_template_kwargs cannot set {name!r:.100}", param="chat_template_kwargs", value=name)


def check_template(chat_template: str) -> None:
    """ConfigError where an option's template is wrong, before a tokenizer is there: any word that is neither text nor
    a path may be the name of one of the tokenizer's templates."""
    from quire.text.template import compile_template  # lazy

    try:
        if _is_jinja(chat_template) or "/" in chat_template or os.path.exists(chat_template):
            compile_template(_resolve_template(chat_template, None))
    except InputError as wrong:
        words = str(wrong).removeprefix("chat_template ")
        raise ConfigError(f"chat_template: {words}", param="chat_template", value=chat_template) from None


def choose_template(tokenizer: Tokenizer, chat_template: str | None = None, *, with_tools: bool = False) -> str:
    """The template's text. `chat_template` is Jinja text, a file, or the name of one of the tokenizer's templates."""
    templates = tokenizer.chat_template
    if chat_template is not None:
        return _resolve_template(chat_template, templates)
    if isinstance(templates, str):
        return templates
    if templates:
        name = "tool_use" if with_tools and "tool_use" in templates else "default"
        if name in templates:
            return templates[name]
        raise InputError(
            f"this tokenizer has the chat templates {', '.join(sorted(templates))} and no default one; name one "
            "(chat_template=…)",
            param="chat_template",
        )
    raise InputError(
        f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, so messages cannot become a prompt; "
        "pass one (chat_template=…: Jinja text or a file), or use a plain prompt",
        param="chat_template",
    )


def _resolve_template(requested: str, templates: str | dict[str, str] | None) -> str:
    if isinstance(templates, dict) and requested in templates:
        return templates[requested]
    if _is_jinja(requested):
        return requested
    if os.path.isfile(requested):
        return _read_template(requested)
    near = difflib.get_close_matches(requested, templates, n=1) if isinstance(templates, dict) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InputError(
        f"chat_template {requested!r} is not Jinja text (no braces), a file or a template of the tokenizer{hint}",
        param="chat_template",
        value=requested,
    )


def _is_jinja(requested: str) -> bool:
    return "{" in requested or "\n" in requested


def _read_template(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as wrong:
        raise InputError(f"chat_template {path!r} cannot be read: {wrong}", param="chat_template") from None


def _checked_format(content_format: str) -> str:
    if content_format not in CONTENT_FORMATS:
        raise InputError(
            f"chat_template_content_format is one of {', '.join(CONTENT_FORMATS)}, got {content_format!r}",
            param="chat_template_content_format",
            value=content_format,
        )
    return content_format


def _checked_kwargs(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    kwargs = dict(variables or {})
    taken = [name for name in kwargs if name in _RESERVED]
    if taken:
        raise InputError(f"chat_template_kwargs cannot set {', '.join(taken)}", param="chat_template_kwargs")
    return kwargs


def _checked_list(name: str, entries: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """None for an empty list, because templates test whether there are any."""
    if not entries:
        return None
    if isinstance(entries, (str, bytes, Mapping)) or not all(isinstance(entry, Mapping) for entry in entries):
        raise InputError(f"{name} must be a list of dicts, got {entries!r:.200}", param=name)
    return [dict(entry) for entry in entries]


# ---- messages as callers send them -> as a template reads them ------------------------------------------------------


def normalize_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    as_parts: bool,
    wrap_strings: bool,
    keep_none: bool,
    media: str = "",
) -> list[dict[str, Any]]:
    """`as_parts`: lists of parts stay lists; else their texts are joined. `wrap_strings`: a string becomes one part.
    `keep_none`: no content stays None; else it is empty content. `media`: as in ChatJob."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InputError(f"messages must be a list of dicts, got {type(messages).__name__}", param="messages")
    if not messages:
        raise InputError("messages is empty; a chat needs at least one message", param="messages")
    converted = []
    for number, message in enumerate(messages):
        clean = _checked_message(message, number)
        content = clean.get("content")
        if content is None:
            if not keep_none:
                clean["content"] = [] if wrap_strings else ""
        elif isinstance(content, str):
            if wrap_strings:
                clean["content"] = [{"type": "text", "text": content}]
        else:
            parts = [_part(part, number, bool(media)) for part in content]
            clean["content"] = list(map(_shown, parts)) if as_parts else _joined(parts, media)
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


def _checked_message(message: Any, number: int) -> dict[str, Any]:
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
    for _ in range(_MOST_DEPTH + 1):
        parts = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        if not parts:
            return False
        level = list(itertools.chain.from_iterable(parts))
    return True


def _too_deep(where: str) -> InputError:
    return InputError(
        f"{where} has a tool call whose arguments are nested deeper than {_MOST_DEPTH} levels", param="messages"
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
    if text.count("[") + text.count("{") > _MOST_DEPTH and _is_deep(data):
        raise _too_deep(where)
    return {**call, "function": {**function, "arguments": data}}


def _part(part: Any, number: int, has_media: bool) -> Part:
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
        if not has_media or WRITTEN not in part:
            raise NotBuiltError(
                f"content parts of type {kind!r} (images, audio, video) are not supported by this model",
                param="messages",
            )
        return dict(part)
    raise InputError(f"{where} has a content part of unknown type {kind!r}", param="messages", value=kind)


def _text_of(part: Part) -> str:
    return str(part.get("text", part.get("thinking", part.get(WRITTEN, ""))))


def _shown(part: Part) -> Part:
    """A replaced part as templates expect it: its type alone."""
    return {"type": part["type"]} if WRITTEN in part else part


def _joined(parts: Sequence[Part], media: str) -> str:
    """Content as a string. A placeholder that the text has already is not written again."""
    if media != "first" or not any(WRITTEN in part for part in parts):
        return "\n".join(map(_text_of, parts))
    text = "\n".join(_text_of(part) for part in parts if WRITTEN not in part)
    before, seen = list[str](), dict[str, int]()
    for written in (part[WRITTEN] for part in parts if WRITTEN in part):
        seen[written] = seen.get(written, 0) + 1
        if seen[written] > text.count(written):
            before.append(written)
    return "\n".join([*before, text] if text else before)
