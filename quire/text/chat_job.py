"""ChatJob: one rendering of a chat template as plain data, and render_job, which runs it, here or in another process.

Owns: the form of messages that a template expects, and how a last message is continued. jinja2 is loaded on the first
rendering. Must not know: tokenizers, which template is used, or whether it is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.schema.errors import InputError
from quire.text.messages import MediaHook, arguments_as_text, normalize_messages, refuse_media

if TYPE_CHECKING:
    from quire.text.template import TemplateLimits

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
