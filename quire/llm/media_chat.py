"""Conversations with media as prompts of token ids, for a model that takes media.

In: a conversation whose parts may be URLs, PIL images or arrays. Out: a prompt that is expanded, with its media loaded.
Must not know: how media are processed, how templates are rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.engine.inputs import InputProcessor
from quire.media.parts import collect, has_media
from quire.schema.errors import InputError
from quire.schema.prompt import Prompt, TokensPrompt
from quire.text.chat import render_chat, tokenize_chat


def tokenize_media_chat(
    inputs: InputProcessor,
    messages: Sequence[Mapping[str, Any]],
    processor_options: Mapping[str, Any] | None,
    how: Mapping[str, Any],
) -> TokensPrompt:
    """`how`: the keywords of render_chat."""
    tokenizer = inputs.tokenizer
    if tokenizer is None:
        raise InputError("the engine has no tokenizer (skip_tokenizer_init=True)")
    if not has_media(messages):
        return tokenize_chat(tokenizer, messages, **how)
    media = inputs.media
    collected = collect(messages, media.family, is_local=True)
    order = "between" if media.options.interleave_mm_strings else "first"
    text = render_chat(tokenizer, collected.messages, media=order, **how)
    options = None if processor_options is None else dict(processor_options)
    prompt = Prompt(text=text, media=collected.items, media_uuids=collected.given_uuids(), media_options=options)
    loaded = media.loaded(inputs.begin_media(prompt))
    placed = media.place(text, None, loaded, tokenizer, add_special_tokens=False)
    loaded = loaded._replace(order=placed.order)
    return TokensPrompt(prompt=text, prompt_token_ids=list(placed.token_ids), multi_modal_data=loaded)
