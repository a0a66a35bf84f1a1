"""render_chat: messages, tools and documents -> the text of a prompt, through the model's chat template.

Owns: which template is used, its variables, and how a last message is continued. In: a Tokenizer (its template and its
special tokens) and what the caller sent. Must not know: engines, HTTP. jinja2 is loaded on the first rendering.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.schema.errors import InputError
from quire.schema.prompt import TokensPrompt
from quire.text.chat_job import ChatJob, render_job
from quire.text.messages import MediaHook, refuse_media

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

CONTENT_FORMATS = ("auto", "string", "openai")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
                  "tokenize", "conversation", "padding", "truncation", "return_dict", "return_tensors")  # fmt: skip
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))
# names that every template has: Jinja's, and what the sandbox adds
_ALWAYS_THERE = ("self", "loop", "caller", "varargs", "kwargs", "super", "range", "dict", "namespace", "cycler",
                 "joiner", "lipsum", "raise_exception", "strftime_now")  # fmt: skip


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
    trusted: bool = True,
    mark: str = "",
) -> str:
    """The rendered prompt. It contains its special tokens, so encode it with add_special_tokens=False.

    `trusted=False`: the template came with a request; it is parsed and rendered in a separate process with hard limits.
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
    if trusted:
        return render_job(job, media=media)
    from quire.text.template_child import render_apart  # lazy

    return render_apart(job)


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
