"""A tokenizer from the metadata of a GGUF file, with no other file at hand.

Comes in: a .gguf path. Goes out: FastTokenizer. The four kinds of vocabulary are byte-level BPE ("gpt2"),
sentencepiece BPE ("llama", and "gemma4" with its merges written out), word pieces ("bert") and unigram ("t5").
Must not know: tensors. The file's structure is base/gguf.py's business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from quire.base.gguf import GGUFError, shared
from quire.base.log import logger, once
from quire.schema.errors import CheckpointError, NotBuiltError
from quire.text.forms.fast import FastTokenizer, add_ends
from quire.text.forms.marked import (
    CONTROL,
    NORMAL,
    SPACE_MARK,
    UNKNOWN,
    PieceVocabulary,
    add_marked_tokens,
    bpe_pipeline,
    unigram_pipeline,
)
from quire.text.forms.splits import SPLITS, Split

log = logger(__name__)

_NAMED = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding",
    "cls_token": "cls", "mask_token": "mask",
}  # fmt: skip


class Metadata:
    """The tokenizer's share of a GGUF file, checked as it is read."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.all = shared(path).metadata
        except GGUFError as wrong:
            raise CheckpointError(str(wrong)) from None
        self.tokens: list[str] = self._list("tokens", str)
        if not self.tokens:
            raise CheckpointError(f"{path}: the file holds no tokenizer (tokenizer.ggml.tokens is missing)")
        self.kinds: list[int] = self._list("token_type", int) or [NORMAL] * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            raise CheckpointError(f"{path}: {len(self.tokens)} tokens but {len(self.kinds)} token types")

    def get(self, key: str, default: Any = None) -> Any:
        return self.all.get(f"tokenizer.ggml.{key}", default)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, default))

    def merges(self) -> list[tuple[str, str]]:
        pairs = (merge.partition(" ") for merge in self._list("merges", str))
        return [(left, right) for left, _, right in pairs]

    def vocabulary(self, *, space_prefix: bool = True) -> PieceVocabulary:
        """For the sentencepiece family; `space_prefix` is what holds where the file does not say."""
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise CheckpointError(f"{self.path}: {len(self.tokens)} tokens but {len(scores)} scores")
        return PieceVocabulary(
            tokens=self.tokens,
            kinds=self.kinds,
            scores=scores,
            unknown=self.get("unknown_token_id"),
            space_prefix=self.flag("add_space_prefix", space_prefix),
            collapse_spaces=self.flag("remove_extra_whitespaces", False),
            charsmap=bytes(c & 0xFF for c in self.get("precompiled_charsmap", ())),
        )

    def special(self) -> dict[str, str]:
        """Named special tokens; an id outside the vocabulary is an error."""
        special = {}
        for name, key in _NAMED.items():
            token_id = self.get(f"{key}_token_id")
            if token_id is None:
                continue
            if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
                raise CheckpointError(f"{self.path}: {name} is id {token_id!r}, the vocabulary has {len(self.tokens)}")
            special[name] = self.tokens[token_id]
        return special

    def chat_template(self) -> str | dict[str, str] | None:
        prefix = "tokenizer.chat_template."
        named = {key.removeprefix(prefix): text for key, text in self.all.items() if key.startswith(prefix)}
        main = self.all.get("tokenizer.chat_template")
        for text in (main, *named.values()):
            if text is not None and not isinstance(text, str):
                raise CheckpointError(f"{self.path}: tokenizer.chat_template is not text: {text!r}")
        if not named:
            return main
        return {**({} if main is None else {"default": main}), **named}

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self.get(key, [])
        if not isinstance(values, list) or (values and not isinstance(values[0], kind)):
            raise CheckpointError(f"{self.path}: tokenizer.ggml.{key} is not a list of {kind.__name__}")
        return values


def load_gguf(path: str) -> FastTokenizer:
    meta = Metadata(path)
    kind = meta.get("model")
    if not isinstance(kind, str) or kind not in _BUILDERS:
        raise NotBuiltError(
            f"{path}: a GGUF vocabulary of kind {kind!r} is not supported; known are {', '.join(_BUILDERS)}. "
            "Name another tokenizer (tokenizer=…)",
            param="tokenizer",
            value=kind,
        )
    special = meta.special()
    try:
        pipeline = _BUILDERS[kind](meta, special)
    except (NotBuiltError, CheckpointError):
        raise
    except Exception as wrong:  # noqa: BLE001  # the library raises bare Exception for a vocabulary that does not fit together
        raise CheckpointError(f"{path}: the vocabulary cannot be read ({wrong})") from None
    return FastTokenizer(path, pipeline, special=special, chat_template=meta.chat_template())


def _byte_level(meta: Metadata, special: dict[str, str]) -> Pipeline:
    split = _split_of(meta)
    vocab = {token: i for i, token in enumerate(meta.tokens)}
    pipeline = Pipeline(models.BPE(vocab, meta.merges(), ignore_merges=split.ignore_merges))
    set_split(pipeline, split)
    add_marked_tokens(pipeline, meta.tokens, meta.kinds)
    _add_ends(pipeline, meta, special, bos=split.add_bos, eos=False)
    return pipeline


def _split_of(meta: Metadata) -> Split:
    name = meta.get("pre")
    if name is None:
        once(log, logging.WARNING, "%s does not say how its text is cut into words; GPT-2's way is assumed", meta.path)
        return SPLITS["default"]
    if not isinstance(name, str) or name not in SPLITS:
        raise NotBuiltError(
            f"{meta.path}: unknown way to cut text into words, tokenizer.ggml.pre={name!r}; known are "
            f"{', '.join(sorted(SPLITS))}. Name another tokenizer (tokenizer=…)",
            param="tokenizer",
            value=name,
        )
    return SPLITS[name]


def set_split(pipeline: Pipeline, split: Split) -> None:
    """Everything around a byte-level model: normalisation, cutting into words, bytes, and back."""
    if split.nfc:
        pipeline.normalizer = normalizers.NFC()
    cuts = [_cut(name) for name in split.cuts]
    if "<gpt2>" not in split.cuts:
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    pipeline.pre_tokenizer = cuts[0] if len(cuts) == 1 else pre_tokenizers.Sequence(cuts)
    pipeline.decoder = decoders.ByteLevel()


def _cut(name: str) -> Any:
    if name == "<digits>":
        return pre_tokenizers.Digits(individual_digits=True)
    if name == "<numbers>":
        return pre_tokenizers.Digits(individual_digits=False)
    if name == "<punctuation>":
        return pre_tokenizers.Punctuation("contiguous")
    if name == "<gpt2>":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Split(Regex(name), "isolated")


def _sentencepiece(meta: Metadata, special: dict[str, str]) -> Pipeline:
    pipeline = bpe_pipeline(meta.vocabulary())
    _add_ends(pipeline, meta, special, bos=True, eos=False)
    return pipeline


def _gemma(meta: Metadata, special: dict[str, str]) -> Pipeline:
    pipeline = bpe_pipeline(meta.vocabulary(space_prefix=False), meta.merges())
    _add_ends(pipeline, meta, special, bos=True, eos=False)
    return pipeline


def _unigram(meta: Metadata, special: dict[str, str]) -> Pipeline:
    pipeline = unigram_pipeline(meta.vocabulary())
    _add_ends(pipeline, meta, special, bos=False, eos=True)
    return pipeline


def _word_piece(meta: Metadata, special: dict[str, str]) -> Pipeline:
    """In the file a token that starts a word carries the space mark and one that continues it carries nothing."""
    tokens = []
    for token, kind in zip(meta.tokens, meta.kinds, strict=True):
        if kind in (CONTROL, UNKNOWN):
            tokens.append(token)
        else:
            tokens.append(token.removeprefix(SPACE_MARK) if token.startswith(SPACE_MARK) else f"##{token}")
    vocab = {token: i for i, token in enumerate(tokens)}
    pipeline = word_piece_pipeline(
        vocab,
        unknown=special.get("unk_token", "[UNK]"),
        lowercase=meta.flag("normalizer.lowercase", True),
        strip_accents=meta.flag("normalizer.strip_accents", True),
    )
    add_marked_tokens(pipeline, tokens, meta.kinds)
    begin = special.get("cls_token", special.get("bos_token", "[CLS]"))
    end = special.get("sep_token", special.get("eos_token", "[SEP]"))
    add_ends(
        pipeline,
        bos=begin if meta.flag("add_bos_token", True) and begin in vocab else None,
        eos=end if meta.flag("add_eos_token", True) and end in vocab else None,
    )
    return pipeline


def word_piece_pipeline(
    vocab: dict[str, int], *, unknown: str, lowercase: bool, strip_accents: bool | None, chinese: bool = True
) -> Pipeline:
    pipeline = Pipeline(models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=100))
    pipeline.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=chinese
    )
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pipeline.decoder = decoders.WordPiece(prefix="##")
    return pipeline


def _add_ends(pipeline: Pipeline, meta: Metadata, special: dict[str, str], *, bos: bool, eos: bool) -> None:
    """`bos` and `eos` are what holds where the file does not say."""
    add_ends(
        pipeline,
        bos=special.get("bos_token") if meta.flag("add_bos_token", bos) else None,
        eos=special.get("eos_token") if meta.flag("add_eos_token", eos) else None,
    )


_BUILDERS: dict[str, Callable[[Metadata, dict[str, str]], Pipeline]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma,
    "bert": _word_piece,
    "t5": _unigram,
}
