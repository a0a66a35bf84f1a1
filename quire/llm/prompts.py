"""What LLM's methods accept, as plain lists: prompts, parameters and priorities one to one; conversations as prompts.

Must not know: engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from quire.base import registry
from quire.schema.errors import InputError
from quire.schema.prompt import TokensPrompt

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

RENDER_CHAT = "quire.text.chat:render_chat"
Conversation = Sequence[Mapping[str, Any]]
Item = TypeVar("Item")


def list_prompts(given: Any) -> list[Any]:
    """One prompt (text, ids or dict) or several -> a list of prompts."""
    given = _plain(given)
    if isinstance(given, (str, bytes, bytearray, Mapping)) or not isinstance(given, Iterable):
        return [given]
    items = [_plain(item) for item in given]
    if items and all(hasattr(item, "__index__") for item in items):
        return [items]  # one prompt of token ids
    return items


def _plain(given: Any) -> Any:
    """Arrays of numpy and torch as lists: an array has __index__ too, and is no number."""
    return given.tolist() if hasattr(given, "tolist") else given


def pair(given: Any, num_prompts: int, kind: type[Item], name: str) -> list[Item]:
    """One for all, or one for each."""
    if isinstance(given, kind):
        return [given] * num_prompts
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise InputError(f"{name} must be {kind.__name__} or a list of them, got {type(given).__name__}", param=name)
    if len(given) != num_prompts:
        raise InputError(f"{len(given)} {name} were given for {num_prompts} prompts", param=name)
    wrong = [item for item in given if not isinstance(item, kind)]
    if wrong:
        raise InputError(f"{name} holds {wrong[0]!r}; every entry must be {kind.__name__}", param=name)
    return list(given)


def list_conversations(given: Any) -> list[Conversation]:
    """One conversation (a list of messages) or several -> a list of conversations."""
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)) or not given:
        raise InputError(f"messages must be a non-empty list of messages, got {given!r}", param="messages")
    if isinstance(given[0], Mapping):
        return [given]
    for conversation in given:
        if not isinstance(conversation, Sequence) or not all(isinstance(m, Mapping) for m in conversation):
            raise InputError("messages must be one list of message dicts, or a list of such lists", param="messages")
    return list(given)


def render(
    tokenizer: Tokenizer,
    conversation: Conversation,
    *,
    chat_template: str | None = None,
    content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> TokensPrompt:
    if add_generation_prompt and continue_final_message:
        raise InputError(
            "add_generation_prompt and continue_final_message cannot both be true: the first opens a new message, "
            "the second goes on with the last",
            param="continue_final_message",
        )
    text: str = registry.load(RENDER_CHAT)(
        tokenizer,
        conversation,
        tools=tools,
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=dict(template_kwargs or {}),
        content_format=content_format,
    )
    # The template has written the special tokens itself.
    return TokensPrompt(prompt=text, prompt_token_ids=tokenizer.encode(text, add_special_tokens=False))
