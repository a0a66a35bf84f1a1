"""What a caller may hand in as a prompt, and the one normal form that everything behind LLM and the server uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, NotRequired, TypedDict, TypeVar

import msgspec

from quire.schema.errors import InputError


class TextPrompt(TypedDict):
    prompt: str
    multi_modal_data: NotRequired[Any]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[Any]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    token_type_ids: NotRequired[list[int]]
    multi_modal_data: NotRequired[Any]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[Any]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    prompt_embeds: Any
    cache_salt: NotRequired[str]


SingletonPrompt = str | TextPrompt | TokensPrompt | EmbedsPrompt
EncoderPrompt = TypeVar("EncoderPrompt")
DecoderPrompt = TypeVar("DecoderPrompt")


class ExplicitEncoderDecoderPrompt(TypedDict, Generic[EncoderPrompt, DecoderPrompt]):
    """Of an encoder-decoder model: what its encoder reads, and how the decoder's text begins."""

    encoder_prompt: EncoderPrompt
    decoder_prompt: DecoderPrompt | None
    mm_processor_kwargs: NotRequired[dict[str, Any]]


PromptType = SingletonPrompt | list[int] | ExplicitEncoderDecoderPrompt[Any, Any]

_PARTS = frozenset(("encoder_prompt", "decoder_prompt"))
_PAIR = _PARTS | {"mm_processor_kwargs"}
_KEYS = frozenset(TextPrompt.__annotations__) | frozenset(TokensPrompt.__annotations__) | {"prompt_embeds"}


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Text, ids, or both (text then is only echoed), and the media that their placeholders stand for."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    token_type_ids: tuple[int, ...] | None = None  # which text of a pair a token belongs to; only beside token_ids
    cache_salt: str | None = None
    media: Any = None
    media_uuids: Any = None
    media_options: dict[str, Any] | None = None
    media_io_options: dict[str, Any] | None = None
    loaded_media: Any = None  # what became of them, if that was done beforehand (media/inputs.py)
    embeds: Any = None
    encoder: Prompt | None = None  # text or ids of the encoder, given beside the decoder's; its media stand here

    @property
    def has_media(self) -> bool:
        return self.media is not None or self.media_uuids is not None

    @classmethod
    def of(cls, source: object) -> Prompt:
        """Read any accepted form; a wrong one is an InputError that names what is accepted."""
        if isinstance(source, Prompt):
            return source
        if isinstance(source, str):
            return cls(text=source)
        if isinstance(source, dict):
            return cls._of_dict(source)
        if hasattr(source, "tolist") or (isinstance(source, Sequence) and not isinstance(source, (bytes, bytearray))):
            return cls(token_ids=check_ids(source))
        raise InputError(
            f"a prompt is a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'; "
            f"got {type(source).__name__}",
            param="prompt",
        )

    @classmethod
    def _of_dict(cls, source: dict[str, Any]) -> Prompt:
        if "encoder_prompt" in source or "decoder_prompt" in source:
            return cls._of_pair(source)
        if len(source) == 1 and (only := source.get("prompt_token_ids")) is not None:  # nearly always, if many come
            return cls(token_ids=check_ids(only))
        unknown = set(source) - _KEYS
        if unknown:
            raise InputError(
                f"a prompt dict has unknown keys {sorted(map(str, unknown))}; known are {sorted(_KEYS)}", param="prompt"
            )
        text, ids, embeds = source.get("prompt"), source.get("prompt_token_ids"), source.get("prompt_embeds")
        if text is None and ids is None and embeds is None:
            raise InputError("a prompt dict needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'", param="prompt")
        if text is not None and not isinstance(text, str):
            raise InputError(f"'prompt' must be a string, got {type(text).__name__}", param="prompt")
        salt = source.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise InputError(f"cache_salt must be a non-empty string, got {salt!r}", param="cache_salt")
        if salt is not None and not _is_unicode(salt):
            raise InputError("cache_salt has a surrogate, which UTF-8 cannot write", param="cache_salt")
        types = source.get("token_type_ids")
        if types is not None and ids is None:
            raise InputError("token_type_ids need prompt_token_ids beside them", param="token_type_ids")
        return cls(
            text=text,
            token_ids=None if ids is None else check_ids(ids),
            token_type_ids=None if types is None else check_ids(types),
            cache_salt=salt,
            media=source.get("multi_modal_data"),
            media_uuids=source.get("multi_modal_uuids"),
            media_options=source.get("mm_processor_kwargs"),
            embeds=embeds,
        )

    @classmethod
    def _of_pair(cls, source: dict[str, Any]) -> Prompt:
        """An explicit prompt of an encoder-decoder model."""
        if unknown := set(source) - _PAIR:
            raise InputError(
                f"an encoder-decoder prompt has unknown keys {sorted(map(str, unknown))}; known are {sorted(_PAIR)}",
                param="prompt",
            )
        first, second = source.get("encoder_prompt"), source.get("decoder_prompt")
        if first is None:
            raise InputError("a prompt with 'decoder_prompt' needs 'encoder_prompt'", param="encoder_prompt")
        if any(isinstance(part, dict) and not _PARTS.isdisjoint(part) for part in (first, second)):
            raise InputError("a part of an encoder-decoder prompt cannot itself have parts", param="encoder_prompt")
        encoder, decoder = cls.of(first), cls() if second is None else cls.of(second)
        if decoder.has_media or decoder.embeds is not None or encoder.embeds is not None:
            raise InputError(
                "of an encoder-decoder prompt, the encoder's part may have media, and neither may have embeddings",
                param="decoder_prompt",
            )
        salts = {one.cache_salt for one in (encoder, decoder)} - {None}
        if len(salts) > 1:
            raise InputError("both parts of an encoder-decoder prompt have a cache_salt; give one", param="cache_salt")
        return cls(
            text=decoder.text,
            token_ids=decoder.token_ids,
            cache_salt=encoder.cache_salt or decoder.cache_salt,
            media=encoder.media,
            media_uuids=encoder.media_uuids,
            media_options=source.get("mm_processor_kwargs") or encoder.media_options,
            encoder=cls(text=encoder.text, token_ids=encoder.token_ids),
        )


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def check_ids(values: object) -> tuple[int, ...]:
    """Token ids as a tuple of plain ints: the one form they have from here to a worker's rows. A tuple is not copied.
    Range against the vocabulary is checked where the model is known."""
    if type(values) is not list and (not isinstance(values, Sequence) or isinstance(values, (str, bytes))):
        tolist = getattr(values, "tolist", None)  # numpy and torch arrays are welcome
        if tolist is None:
            raise InputError(f"token ids must be a list of integers, got {type(values).__name__}", param="prompt")
        values = tolist()
        if not isinstance(values, list):
            raise InputError("token ids must be a flat list of integers, got a scalar", param="prompt")
    if set(map(type, values)) <= {int}:  # nearly always, and prompts are long
        return tuple(values)
    ids = []
    for item in values:
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise InputError(f"token ids must be integers, got {item!r}", param="prompt", value=item)
        ids.append(item.__index__())
    return tuple(ids)


def build_explicit_enc_dec_prompt(
    encoder_prompt: EncoderPrompt,
    decoder_prompt: DecoderPrompt | None,
    mm_processor_kwargs: dict[str, Any] | None = None,
) -> ExplicitEncoderDecoderPrompt[EncoderPrompt, DecoderPrompt]:
    return ExplicitEncoderDecoderPrompt(
        encoder_prompt=encoder_prompt, decoder_prompt=decoder_prompt, mm_processor_kwargs=mm_processor_kwargs or {}
    )


def zip_enc_dec_prompts(
    enc_prompts: Iterable[EncoderPrompt],
    dec_prompts: Iterable[DecoderPrompt | None],
    mm_processor_kwargs: Iterable[dict[str, Any]] | dict[str, Any] | None = None,
) -> list[ExplicitEncoderDecoderPrompt[EncoderPrompt, DecoderPrompt]]:
    """A prompt for each pair; options for all of them, or for each."""
    pairs = list(zip(enc_prompts, dec_prompts, strict=True))
    options: list[dict[str, Any]]
    if mm_processor_kwargs is None or isinstance(mm_processor_kwargs, dict):
        options = [mm_processor_kwargs or {}] * len(pairs)
    else:
        options = list(mm_processor_kwargs)
    return [
        build_explicit_enc_dec_prompt(encoder, decoder, own)
        for (encoder, decoder), own in zip(pairs, options, strict=True)
    ]


def to_enc_dec_tuple_list(
    enc_dec_prompts: Iterable[ExplicitEncoderDecoderPrompt[EncoderPrompt, DecoderPrompt]],
) -> list[tuple[EncoderPrompt, DecoderPrompt | None]]:
    return [(prompt["encoder_prompt"], prompt["decoder_prompt"]) for prompt in enc_dec_prompts]
