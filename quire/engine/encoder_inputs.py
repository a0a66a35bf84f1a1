"""Prompts of encoder-decoder models: what the encoder reads, and the tokens that the decoder's text begins with.

In: a Prompt, explicit (a part for each) or implicit: of a model that reads text, a prompt is the encoder's, and the
model says how the decoder begins; of one that hears, its media are the encoder's and its text is the decoder's; of one
that reads both, all of it is the encoder's.
Out: an item for the encoder (a MediaItem without a place in the prompt) and the decoder's token ids. Must not know:
how an item is encoded, where the engine is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.schema.errors import InputError
from quire.schema.media import ArrayData, MediaItem
from quire.schema.prompt import Prompt

if TYPE_CHECKING:
    from quire.config import ModelConfig
    from quire.text.tokenizer import Tokenizer

MODALITY = "text"
_ARRAY = "token_ids"
_LONGER = 16  # how much longer than what is read a text may be of which only a part is used


class EncoderDecoderInputs(NamedTuple):
    decoder_ids: tuple[int, ...]
    decoder_text: str | None
    encoder_ids: tuple[int, ...] | None  # None: the encoder reads no text
    encoder_text: str | None
    item: MediaItem


class EncoderInputs:
    """Of one model. `check_ids`: whether the model has such tokens. `item_of`: a prompt's media as an item. `placed`:
    the encoder's part of a prompt as token ids, with the prompt's one item in its place."""

    def __init__(
        self,
        model: ModelConfig,
        max_model_len: int,
        tokenizer: Callable[[], Tokenizer | None],
        check_ids: Callable[[str, Collection[int]], None],
        item_of: Callable[[Prompt], MediaItem],
        placed: Callable[[Prompt, Prompt], tuple[tuple[int, ...], MediaItem]],
    ) -> None:
        facts = model.facts
        self._check_ids, self._placed = check_ids, placed
        self.reads_text = facts.encoder_reads_text
        self._max_model_len = max_model_len
        self.most = facts.encoder_length or max_model_len  # tokens of the encoder
        self._start, self._forced = facts.decoder_start, facts.forced_start
        self._modalities, self._tokenizer, self._item_of = facts.modalities, tokenizer, item_of

    def read(self, prompt: Prompt, keep: int | None, kwargs: Mapping[str, Any]) -> EncoderDecoderInputs:
        """`keep`: how many of the last tokens of a prompt stay; None: all."""
        if prompt.embeds is not None:
            raise InputError("an encoder-decoder model takes no embeddings as a prompt", param="prompt_embeds")
        if not self.reads_text:
            return self._heard(prompt, keep)
        if prompt.has_media and not self._modalities:
            raise InputError("this model's encoder reads text: it takes no multi_modal_data", param="multi_modal_data")
        encoder = prompt if prompt.encoder is None else prompt.encoder
        decoder = Prompt() if prompt.encoder is None else prompt
        if prompt.has_media:
            return self._read_both(prompt, encoder, decoder, keep)
        special = bool(kwargs.get("add_special_tokens", True))
        most = self.most if keep is None else _LONGER * self.most
        ids = self._ids(encoder, special=special, most=most, param="encoder_prompt")
        if keep is not None:
            ids = ids[:keep] if kwargs.get("truncation_side") == "right" else ids[-keep:]
        if not ids:
            raise InputError("the encoder's prompt is empty: it needs at least one token", param="encoder_prompt")
        self.check_length(len(ids))
        self._check_ids("the encoder's prompt", ids)
        item = text_item(ids, prompt.cache_salt)
        return EncoderDecoderInputs(self._decoder_ids(decoder), decoder.text, ids, encoder.text, item)

    def _read_both(self, prompt: Prompt, encoder: Prompt, decoder: Prompt, keep: int | None) -> EncoderDecoderInputs:
        length, most = len(encoder.text or ""), _LONGER * self.most
        if length > most:
            raise InputError(f"the encoder's text has {length} characters; the limit is {most}", param="encoder_prompt")
        ids, item = self._placed(prompt, encoder)
        if keep is not None and keep < len(ids):
            raise InputError(
                f"the encoder's prompt has {len(ids)} tokens with its media and would be cut to {keep}: it cannot be "
                "truncated",
                param="truncate_prompt_tokens",
            )
        self.check_length(len(ids))
        self._check_ids("the encoder's prompt", ids)
        text = text_item(ids, item.key)
        both = MediaItem(
            modality=item.modality, key=f"{item.modality} {text.key}", offset=0, length=len(ids),
            arrays=item.arrays | text.arrays,
        )  # fmt: skip
        return EncoderDecoderInputs(self._decoder_ids(decoder), decoder.text, ids, encoder.text, both)

    def check_length(self, count: int) -> None:
        """InputError: the encoder cannot read a text of so many tokens."""
        if count > self.most:
            raise InputError(
                f"the encoder's prompt has {count} tokens; this model's encoder reads {self.most} at most",
                param="encoder_prompt",
                value=count,
            )

    def _heard(self, prompt: Prompt, keep: int | None) -> EncoderDecoderInputs:
        if not prompt.has_media:
            names = " or ".join(self._modalities)
            raise InputError(
                f"this model's encoder reads {names}, and the prompt has none: give it as "
                f"multi_modal_data={{{self._modalities[0]!r}: ...}}, or that within encoder_prompt",
                param="multi_modal_data",
            )
        encoder = prompt.encoder
        if encoder is not None and (encoder.text or encoder.token_ids):
            raise InputError(
                f"this model's encoder reads {' or '.join(self._modalities)}, not text: leave its prompt's text ''",
                param="encoder_prompt",
            )
        ids = self._decoder_ids(prompt)
        if keep is not None and keep < len(ids):
            raise InputError(
                f"the decoder's prompt has {len(ids)} tokens and would be cut to {keep}: it cannot be truncated",
                param="truncate_prompt_tokens",
            )
        return EncoderDecoderInputs(ids, prompt.text, None, None, self._item_of(prompt))

    def _decoder_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Begins with the model's first token. Where a model hears, an earlier text may stand before that."""
        ids = self._ids(prompt, special=False, most=self._max_model_len, param="decoder_prompt")
        if self._start is None:
            return ids
        if not ids:
            return (self._start,) if self._forced is None else (self._start, self._forced)
        is_begun = ids[0] == self._start if self.reads_text else self._start in ids
        return ids if is_begun else (self._start, *ids)

    def _ids(self, prompt: Prompt, *, special: bool, most: int, param: str) -> tuple[int, ...]:
        """`most`: a text that has more tokens, whatever they are, is refused before it is tokenized."""
        if prompt.token_ids is not None:
            return prompt.token_ids
        text = prompt.text or ""
        if not text and not special:
            return ()
        tokenizer = self._tokenizer()
        if tokenizer is None:
            raise InputError(
                "the engine has no tokenizer (skip_tokenizer_init=True): give prompt_token_ids, not text", param=param
            )
        if len(text) > most:
            least = -(-len(text) // max(map(len, tokenizer.get_vocab()), default=1))
            if least > most:
                raise InputError(
                    f"the text has {len(text)} characters, which are at least {least} tokens; the limit is {most}",
                    param=param,
                )
        return tuple(tokenizer.encode(text, add_special_tokens=special))


def text_item(ids: tuple[int, ...], salt: str | None) -> MediaItem:
    """Equal texts have equal keys, within one salt."""
    data = b"".join(one.to_bytes(8, "little", signed=True) for one in ids)
    digest = blake2b(data, digest_size=32, key=blake2b((salt or "").encode()).digest()).hexdigest()
    array = ArrayData((len(ids),), "int64", data)
    return MediaItem(modality=MODALITY, key=f"{MODALITY} {digest}", offset=0, length=len(ids), arrays={_ARRAY: array})
