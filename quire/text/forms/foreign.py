"""A tokenizer of the `transformers` package behind Quire's interface: slow ones, and those of a model's own code.

The only module of this package that imports transformers, and only if one of these is requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from quire.base.registry import load
from quire.schema.errors import CheckpointError, InputError, MissingExtraError
from quire.text.forms.sidecar import NAMES
from quire.text.tokenizer import Tokenizer


class ForeignTokenizer(Tokenizer):
    """Calls are passed through; the bytes of a token are unknown, so `pieces` stays None."""

    def __init__(self, source: str, inner: Any) -> None:
        special = {name: str(token) for name, token in inner.special_tokens_map.items() if name in NAMES}
        super().__init__(
            source, special=special, chat_template=inner.chat_template, max_length=int(inner.model_max_length)
        )
        self.inner = inner

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [list(self.inner.encode(text, add_special_tokens=add_special_tokens)) for text in texts]

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self.inner.decode(ids, skip_special_tokens=skip_special_tokens))

    def id_to_token(self, token_id: int) -> str | None:
        token = self.inner.convert_ids_to_tokens(token_id)
        return None if token is None else str(token)

    def token_to_id(self, token: str) -> int | None:
        known_id: int | None = self._vocab.get(token)
        return known_id

    def get_vocab(self) -> dict[str, int]:
        return dict(self._vocab)

    def get_added_vocab(self) -> dict[str, int]:
        return dict(self.inner.get_added_vocab())

    @property
    def all_special_ids(self) -> list[int]:
        return list(self.inner.all_special_ids)

    @cached_property
    def vocab_size(self) -> int:
        return max(self._vocab.values(), default=-1) + 1

    @cached_property
    def _vocab(self) -> dict[str, int]:
        return dict(self.inner.get_vocab())


def load_slow(path: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """tokenizer_mode='slow': the Python implementation of the tokenizer."""
    return ForeignTokenizer(path, _auto(path, use_fast=False, trust_remote_code=trust_remote_code))


def load_remote(path: str) -> Tokenizer:
    """A tokenizer class that comes with the model; the caller has set trust_remote_code."""
    return ForeignTokenizer(path, _auto(path, trust_remote_code=True))


def _auto(path: str, **options: Any) -> Any:
    try:
        auto = load("transformers:AutoTokenizer")
    except ImportError as missing:
        raise MissingExtraError("this tokenizer", "transformers", missing.name or "transformers") from None
    try:
        return auto.from_pretrained(path, **options)
    except (OSError, ValueError, ImportError) as wrong:
        raise CheckpointError(f"transformers cannot load a tokenizer from {path!r}: {wrong}") from None


def wrap_tokenizer(inner: Any) -> ForeignTokenizer:
    """One created by the calling program; any other object is refused."""
    if not isinstance(inner, load("transformers:PreTrainedTokenizerBase")):
        raise InputError(
            f"expected a tokenizer of Quire or transformers, got {type(inner).__name__}", param="tokenizer"
        )
    return ForeignTokenizer(str(inner.name_or_path), inner)
