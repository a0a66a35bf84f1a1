"""render_chat: messages, tools and documents -> the text of a prompt, through the model's chat template.

Owns: which template is used, its variables, and how a last message is continued. In: a Tokenizer (its template and its
special tokens) and what the caller sent. One rendering is a ChatJob, plain data that may be sent to another process;
`render_job` runs it, here or there. Must not know: engines, HTTP. jinja2 is loaded on the first rendering.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.schema.errors import InputError
from quire.schema.prompt import TokensPrompt
from quire.text.messages import MediaHook, arguments_as_text, normalize_messages, refuse_media

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


@dataclass(frozen=True)
class ChatJob:
    """All that one rendering needs besides a media hook, as plain data: it may be sent to another process."""

    source: str  # the template's text
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    content_format: str = "auto"
    continues: bool = False  # the last message is continued
    mark: str = ""  # written around the model's parts, and at the very start if the template supports it


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
    media: MediaHook = refuse_media,
    apart: Callable[[ChatJob], str] | None = None,
    mark: str = "",
) -> str:
    """The rendered prompt. It contains its special tokens, so encode it with add_special_tokens=False.

    `apart`: the template came with a request; this parses and renders it in a process with limits (template_child.py).
    `mark`: the text is for `find_answers`.
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
    job = ChatJob(source, messages, variables, _checked_format(content_format), continue_final_message, mark)
    return render_job(job, media=media) if apart is None else apart(job)


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


def render_job(job: ChatJob, limits: TemplateLimits | None = None, *, media: MediaHook = refuse_media) -> str:
    """Parse the template, convert the messages to the form it expects, render it."""
    from quire.text.template_facts import read_facts  # lazy

    facts = read_facts(job.source)
    as_parts = facts.loops_content if job.content_format == "auto" else job.content_format == "openai"
    plain = normalize_messages(
        job.messages,
        as_parts=as_parts,
        wrap_strings=as_parts and not facts.tests_string,
        keep_none=facts.tests_none,
        media=media,
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
    if "{" in requested or "\n" in requested:
        return requested
    if os.path.isfile(requested):
        with open(requested, encoding="utf-8") as file:
            return file.read()
    near = difflib.get_close_matches(requested, templates, n=1) if isinstance(templates, dict) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InputError(
        f"chat_template {requested!r} is not Jinja text (no braces), a file or a template of the tokenizer{hint}",
        param="chat_template",
        value=requested,
    )


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
