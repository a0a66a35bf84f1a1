"""Media of chat requests: taken out of their messages, and counted where only the number of tokens is wanted.

In: a ChatRequest, which every dialect makes of its own. Out: the request with messages that a template can read, and a
Prompt without text that has the media, unread. Must not know: how media are fetched or decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from quire.llm.online import LONG_TEXT
from quire.media.embeds import MOST_NUMBERS, EmbedsPart
from quire.media.parts import collect, has_media
from quire.schema.errors import InputError
from quire.schema.media import ArrayData
from quire.schema.prompt import Prompt
from quire.server.openai.chat_protocol import ChatRequest
from quire.server.served import ServedModel

if TYPE_CHECKING:
    from quire.server.route import HttpCall

_EMBEDS = ("image_embeds", "audio_embeds", "video_embeds")
_MOST_FIELDS = 8  # of a part

__all__ = ["has_media", "media_token_ids", "take_media"]


def take_media(model: ServedModel, request: ChatRequest) -> tuple[ChatRequest, Prompt]:
    """Of a request that has media."""
    inputs = model.engine.front.inputs
    media = inputs.media
    if not media.options.enable_mm_embeds:
        _refuse_embeds(request.messages)
    messages = [_with_embeds(message, inputs.max_model_len, media.embeds_width or 0) for message in request.messages]
    collected = collect(messages, media.family, is_local=False)
    media.check_counts(collected.items)
    prompt = Prompt(
        media=collected.items,
        media_uuids=collected.given_uuids(),
        media_options=request.mm_processor_kwargs,
        media_io_options=request.media_io_kwargs,
    )
    return request.model_copy(update={"messages": collected.messages}), prompt


def _refuse_embeds(messages: Iterable[Any]) -> None:
    """Before any is read."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") in _EMBEDS:
                raise InputError(
                    f"{part['type']} is accepted only if the server was started with --enable-mm-embeds",
                    param="messages",
                )


def _with_embeds(message: Any, most: int, width: int) -> Any:
    """Embeddings of its parts as arrays."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": [_decoded(part, most, width) for part in content]}


def _decoded(part: Any, most: int, width: int) -> Any:
    """Their text alone, or by name with what stands beside it."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _EMBEDS or part.get(kind) is None:
        return part
    fields = part[kind] if isinstance(part[kind], Mapping) else {kind: part[kind]}
    if len(fields) > _MOST_FIELDS:
        raise InputError(f"{kind} has {len(fields)} fields; the limit is {_MOST_FIELDS}", param="messages")
    return {**part, kind: EmbedsPart({name: _array(kind, name, fields[name], most, width) for name in fields})}


def _array(kind: str, name: str, value: Any, most: int, width: int) -> Any:
    from quire.engine.embeds import decode_embeds, decode_numbers  # lazy

    if name != kind:
        if not isinstance(value, str):
            return value
        tensor = decode_numbers(value, most=MOST_NUMBERS, name=f"{name:.60}", param="messages")
    elif isinstance(value, str):
        tensor = decode_embeds(value, width=width, most=most, name=kind, param="messages")
    else:
        raise InputError(f"{kind} must be a tensor as torch.save writes it, in base64", param="messages")
    return ArrayData(tensor.shape, tensor.dtype, tensor.data)


async def media_token_ids(call: HttpCall, prompt: Prompt, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Media are loaded, because their sizes decide how many tokens they take. Salted as prompts that are answered:
    what one key's items are called says nothing about another's."""
    model, salts = call.model, call.state.salts
    engine = model.engine
    if salts is not None:
        prompt = msgspec.structs.replace(prompt, cache_salt=salts.salt(call.caller, prompt.cache_salt))
    loaded = await engine.load_media(prompt)
    placed = await engine.lanes.run(
        LONG_TEXT, engine.front.inputs.media.place, prompt.text, None, loaded.loaded_media, model.tokenizer,
        add_special_tokens=add_special_tokens,
    )  # fmt: skip
    return placed.token_ids
