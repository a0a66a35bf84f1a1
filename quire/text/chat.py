"""render_chat: messages, tools and documents -> the text of a prompt, through the model's chat template.

Owns: which template, what it is given, and how a last message is continued. Comes in: a Tokenizer (its template and its
special tokens) and what the caller sent. Must not know: engines, HTTP. jinja2 is loaded on the first rendering.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.base.registry import load
from quire.schema.errors import InputError
from quire.schema.prompt import TokensPrompt
from quire.text.messages import MediaHook, arguments_as_text, normalize_messages, refuse_media

if TYPE_CHECKING:
    from quire.text.template import TemplateLimits
    from quire.text.template_facts import TemplateFacts
    from quire.text.tokenizer import Tokenizer

CONTENT_FORMATS = ("auto", "string", "openai")
# written at the end of a message to be continued; the space tells whether the template trims
_MARK = "QUIRE-CONTINUES-HERE "
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
                  "tokenize", "conversation", "padding", "truncation", "return_dict", "return_tensors")  # fmt: skip
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))
# names that a template finds without being given them: Jinja's, and what the sandbox adds
_ALWAYS_THERE = ("self", "loop", "caller", "varargs", "kwargs", "super", "range", "dict", "namespace", "cycler",
                 "joiner", "lipsum", "raise_exception", "strftime_now")  # fmt: skip


@dataclass(frozen=True)
class ChatJob:
    """All that one rendering needs besides a media hook, as plain data: it may be sent to another process."""

    source: str  # the template's text
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    content_format: str = "auto"
    continues: bool = False  # the last message is gone on with
    mark: str = ""  # written around what the model wrote, and first of all if the template can tell


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
    """The rendered prompt. It holds its special tokens, so encode it with add_special_tokens=False.

    `trusted=False`: the template came with a request; it is read and rendered in a process of its own with hard limits.
    `mark`: the text is for `find_answers`.
    """
    if add_generation_prompt and continue_final_message:
        raise InputError(
            "add_generation_prompt and continue_final_message cannot both be true: the first opens a new message, "
            "the second goes on with the last",
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
    apart: Callable[[ChatJob], str] = load("quire.text.template_child:render_apart")
    return apart(job)


def tokenize_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **how: Any) -> TokensPrompt:
    """A conversation as a prompt of token ids. `how`: the keywords of render_chat."""
    text = render_chat(tokenizer, messages, **how)
    return TokensPrompt(prompt=text, prompt_token_ids=tokenizer.encode(text, add_special_tokens=False))


def render_job(job: ChatJob, limits: TemplateLimits | None = None, *, media: MediaHook = refuse_media) -> str:
    """Read the template, give it the messages in the form it wants, render it."""
    facts: TemplateFacts = load("quire.text.template_facts:read_facts")(job.source)
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


def find_answers(marked: str, mark: str, text: str) -> list[tuple[int, int]] | None:
    """(first, past the last) character of what the model wrote in a `text`, from the same rendered with marks. None:
    the template does not say ({% generation %}), or it renders otherwise with marks in its text."""
    if not marked.startswith(mark):
        return None
    split: Callable[[str, str], tuple[str, list[tuple[int, int]]]] = load("quire.text.template:split_marks")
    plain, places = split(marked[len(mark) :], mark)
    return places if plain == text else None


def check_variables(tokenizer: Tokenizer, given: Mapping[str, Any] | None) -> None:
    """Variables that came with a request may add to what a template is given, and replace nothing of it."""
    taken = {*_OWN_VARIABLES, *_SPECIAL_TOKENS, *tokenizer.special, *_ALWAYS_THERE}
    for name in given or ():
        if name in taken or not name.isidentifier():
            raise InputError(f"chat_template_kwargs cannot set {name!r:.100}", param="chat_template_kwargs", value=name)


def choose_template(tokenizer: Tokenizer, chat_template: str | None = None, *, with_tools: bool = False) -> str:
    """The template's text. `chat_template` is Jinja text, a file, or the name of one of the tokenizer's templates."""
    own = tokenizer.chat_template
    if chat_template is not None:
        return _given_template(chat_template, own)
    if isinstance(own, str):
        return own
    if own:
        name = "tool_use" if with_tools and "tool_use" in own else "default"
        if name in own:
            return own[name]
        raise InputError(
            f"this tokenizer has the chat templates {', '.join(sorted(own))} and no default one; name one "
            "(chat_template=…)",
            param="chat_template",
        )
    raise InputError(
        f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, so messages cannot be made into a prompt; "
        "pass one (chat_template=…: Jinja text or a file), or use a plain prompt",
        param="chat_template",
    )


def _given_template(given: str, own: str | dict[str, str] | None) -> str:
    if isinstance(own, dict) and given in own:
        return own[given]
    if "{" in given or "\n" in given:
        return given
    if os.path.isfile(given):
        with open(given, encoding="utf-8") as file:
            return file.read()
    near = difflib.get_close_matches(given, own, n=1) if isinstance(own, dict) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InputError(
        f"chat_template {given!r} is no Jinja text (it has no braces), no file and no template of the tokenizer{hint}",
        param="chat_template",
        value=given,
    )


def _checked_format(content_format: str) -> str:
    if content_format not in CONTENT_FORMATS:
        raise InputError(
            f"chat_template_content_format is one of {', '.join(CONTENT_FORMATS)}, got {content_format!r}",
            param="chat_template_content_format",
            value=content_format,
        )
    return content_format


def _checked_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    kwargs = dict(given or {})
    taken = [name for name in kwargs if name in _OWN_VARIABLES]
    if taken:
        raise InputError(f"chat_template_kwargs cannot set {', '.join(taken)}", param="chat_template_kwargs")
    return kwargs


def _checked_list(name: str, given: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """None for nothing, because templates ask whether there are any at all."""
    if not given:
        return None
    if isinstance(given, (str, bytes, Mapping)) or not all(isinstance(entry, Mapping) for entry in given):
        raise InputError(f"{name} must be a list of dicts, got {given!r:.200}", param=name)
    return [dict(entry) for entry in given]


def _render(job: ChatJob, messages: list[dict[str, Any]], limits: TemplateLimits | None) -> str:
    render: Callable[..., str] = load("quire.text.template:render")
    bounds: dict[str, Any] = {"mark": job.mark} if limits is None else {"mark": job.mark, "limits": limits}
    try:
        return render(job.source, {**job.variables, "messages": messages}, **bounds)
    except InputError as wrong:
        textual = arguments_as_text(messages)
        if textual == messages or not isinstance(wrong.__cause__, TypeError):
            raise
    # some templates join the arguments of a tool call into their text as they stand
    return render(job.source, {**job.variables, "messages": textual}, **bounds)


def _mark_last(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _MARK
        return
    texts = [part for part in content or () if "text" in part]
    if not texts:
        raise InputError(
            f"continue_final_message is set, but the last message has no text to go on with: {content!r}",
            param="continue_final_message",
        )
    texts[-1]["text"] += _MARK


def _cut_at_mark(text: str) -> str:
    place = text.rfind(_MARK.strip())
    if place < 0:
        raise InputError(
            "continue_final_message is set, but the chat template leaves the last message out",
            param="continue_final_message",
        )
    # where the template trimmed the mark's space it would have trimmed the message's own
    return text[:place] if text.startswith(_MARK, place) else text[:place].rstrip()
