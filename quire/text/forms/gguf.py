"""A tokenizer from the metadata of a GGUF file, with no other file at hand.

Comes in: a .gguf path. Goes out: FastTokenizer. The four kinds of vocabulary are byte-level BPE ("gpt2"),
sentencepiece BPE ("llama", and "gemma4" with its merges written out), word pieces ("bert") and unigram ("t5").
Must not know: tensors. The file's structure is base/gguf.py's business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from quire.base.gguf import GGUFError, GGUFFile
from quire.base.log import logger, once
from quire.schema.errors import CheckpointError, NotBuiltError
from quire.text.forms.fast import FastTokenizer, add_ends
from quire.text.forms.merges import merges_by_rank
from quire.text.forms.splits import SPLITS, Split

log = logger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE_MARK = "▁"
_NAMED = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding",
    "cls_token": "cls", "mask_token": "mask",
}  # fmt: skip


class Metadata:
    """The tokenizer's share of a GGUF file, checked as it is read."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.all = GGUFFile(path).metadata
        except GGUFError as wrong:
            raise CheckpointError(str(wrong)) from None
        self.tokens: list[str] = self._list("tokens", str)
        if not self.tokens:
            raise CheckpointError(f"{path}: the file holds no tokenizer (tokenizer.ggml.tokens is missing)")
        self.types: list[int] = self._list("token_type", int) or [NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise CheckpointError(f"{path}: {len(self.tokens)} tokens but {len(self.types)} token types")

    def get(self, key: str, default: Any = None) -> Any:
        return self.all.get(f"tokenizer.ggml.{key}", default)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, default))

    def scores(self) -> list[float]:
        found = self._list("scores", float)
        if len(found) != len(self.tokens):
            raise CheckpointError(f"{self.path}: {len(self.tokens)} tokens but {len(found)} scores")
        return found

    def merges(self) -> list[tuple[str, str]]:
        pairs = [merge.partition(" ") for merge in self._list("merges", str)]
        return [(left, right) for left, _, right in pairs]

    def special(self) -> dict[str, str]:
        """Named special tokens; an id outside the vocabulary is an error."""
        found = {}
        for name, key in _NAMED.items():
            token_id = self.get(f"{key}_token_id")
            if token_id is None:
                continue
            if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
                raise CheckpointError(f"{self.path}: {name} is id {token_id!r}, the vocabulary has {len(self.tokens)}")
            found[name] = self.tokens[token_id]
        return found

    def chat_template(self) -> str | dict[str, str] | None:
        prefix = "tokenizer.chat_template."
        named = {key.removeprefix(prefix): text for key, text in self.all.items() if key.startswith(prefix)}
        main = self.all.get("tokenizer.chat_template")
        if not named:
            return main
        return {**({} if main is None else {"default": main}), **named}

    def _list(self, key: str, kind: type) -> list[Any]:
        found = self.get(key, [])
        if not isinstance(found, list) or (found and not isinstance(found[0], kind)):
            raise CheckpointError(f"{self.path}: tokenizer.ggml.{key} is not a list of {kind.__name__}")
        return found


def load_gguf(path: str) -> FastTokenizer:
    meta = Metadata(path)
    kind = meta.get("model")
    if kind not in _BUILDERS:
        raise NotBuiltError(
            f"{path}: a GGUF vocabulary of kind {kind!r} is not supported; known are {', '.join(_BUILDERS)}. "
            "Name another tokenizer (tokenizer=…)",
            param="tokenizer",
            value=kind,
        )
    special = meta.special()
    try:
        pipeline = _BUILDERS[kind](meta, special)
        _add_tokens(pipeline, meta)
    except (ValueError, UnicodeEncodeError) as wrong:
        raise CheckpointError(f"{path}: the vocabulary cannot be read ({wrong})") from None
    return FastTokenizer(path, pipeline, special=special, chat_template=meta.chat_template())


def _byte_level(meta: Metadata, special: dict[str, str]) -> Pipeline:
    split = _split_of(meta)
    vocab = {token: i for i, token in enumerate(meta.tokens)}
    pipeline = Pipeline(models.BPE(vocab, meta.merges(), ignore_merges=split.ignore_merges))
    if split.nfc:
        pipeline.normalizer = normalizers.NFC()
    cuts = [_cut(name, split.add_space) for name in split.cuts]
    if "<gpt2>" not in split.cuts:
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=split.add_space, use_regex=False))
    pipeline.pre_tokenizer = cuts[0] if len(cuts) == 1 else pre_tokenizers.Sequence(cuts)
    pipeline.decoder = decoders.ByteLevel()
    _add_ends(pipeline, meta, special, bos=split.add_bos, eos=False)
    return pipeline


def _split_of(meta: Metadata) -> Split:
    name = meta.get("pre")
    if name is None:
        once(log, logging.WARNING, "%s does not say how its text is cut into words; GPT-2's way is assumed", meta.path)
        return SPLITS["default"]
    if name not in SPLITS:
        raise NotBuiltError(
            f"{meta.path}: unknown way to cut text into words, tokenizer.ggml.pre={name!r}; known are "
            f"{', '.join(sorted(SPLITS))}. Name another tokenizer (tokenizer=…)",
            param="tokenizer",
            value=name,
        )
    return SPLITS[name]


def _cut(name: str, add_space: bool) -> pre_tokenizers.PreTokenizer:
    if name == "<digits>":
        return pre_tokenizers.Digits(individual_digits=True)
    if name == "<numbers>":
        return pre_tokenizers.Digits(individual_digits=False)
    if name == "<punctuation>":
        return pre_tokenizers.Punctuation("contiguous")
    if name == "<gpt2>":
        return pre_tokenizers.ByteLevel(add_prefix_space=add_space, use_regex=True)
    return pre_tokenizers.Split(Regex(name), "isolated")


def _sentencepiece(meta: Metadata, special: dict[str, str]) -> Pipeline:
    usable = (NORMAL, USER_DEFINED, UNUSED)
    scores = meta.scores()
    ranked = [i for i, kind in enumerate(meta.types) if kind in usable]
    ranked.sort(key=lambda i: -scores[i])
    return _marked_bpe(meta, special, merges_by_rank([meta.tokens[i] for i in ranked]), space=True)


def _gemma(meta: Metadata, special: dict[str, str]) -> Pipeline:
    pipeline = _marked_bpe(meta, special, meta.merges(), space=False)
    return pipeline


def _marked_bpe(
    meta: Metadata, special: dict[str, str], merges: list[tuple[str, str]], *, space: bool
) -> Pipeline:
    """BPE over text whose spaces are written as a mark, with byte tokens for characters it does not know."""
    unknown = special.get("unk_token")
    vocab = {token: i for i, token in enumerate(meta.tokens)}
    pipeline = Pipeline(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in meta.types))
    prefixed = meta.flag("add_space_prefix", space)
    marks = normalizers.Replace(" ", SPACE_MARK)
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marks]) if prefixed else marks
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    pipeline.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    _add_ends(pipeline, meta, special, bos=True, eos=False)
    return pipeline


def _word_piece(meta: Metadata, special: dict[str, str]) -> Pipeline:
    """In the file a token that starts a word carries the space mark and one that continues it carries nothing."""
    tokens = []
    for token, kind in zip(meta.tokens, meta.types, strict=True):
        if kind in (CONTROL, UNKNOWN):
            tokens.append(token)
        else:
            tokens.append(token.removeprefix(SPACE_MARK) if token.startswith(SPACE_MARK) else f"##{token}")
    meta.tokens = tokens
    unknown = special.get("unk_token", "[UNK]")
    vocab = {token: i for i, token in enumerate(tokens)}
    pipeline = Pipeline(models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=100))
    pipeline.normalizer = normalizers.BertNormalizer(
        lowercase=meta.flag("normalizer.lowercase", True),
        strip_accents=meta.flag("normalizer.strip_accents", True),
    )
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pipeline.decoder = decoders.WordPiece(prefix="##")
    begin = special.get("cls_token", special.get("bos_token", "[CLS]"))
    end = special.get("sep_token", special.get("eos_token", "[SEP]"))
    add_ends(
        pipeline,
        bos=begin if meta.flag("add_bos_token", True) and begin in vocab else None,
        eos=end if meta.flag("add_eos_token", True) and end in vocab else None,
    )
    return pipeline


def _unigram(meta: Metadata, special: dict[str, str]) -> Pipeline:
    unknown = meta.get("unknown_token_id")
    pieces = list(zip(meta.tokens, meta.scores(), strict=True))
    pipeline = Pipeline(models.Unigram(pieces, unk_id=unknown, byte_fallback=BYTE in meta.types))
    steps: list[Any] = []
    charsmap = meta.get("precompiled_charsmap")
    if charsmap:
        steps.append(normalizers.Precompiled(bytes(c & 0xFF for c in charsmap)))
    if meta.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        pipeline.normalizer = normalizers.Sequence(steps)
    scheme = "always" if meta.flag("add_space_prefix", True) else "never"
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    pipeline.decoder = decoders.Metaspace(prepend_scheme=scheme)
    _add_ends(pipeline, meta, special, bos=False, eos=True)
    return pipeline


def _add_ends(pipeline: Pipeline, meta: Metadata, special: dict[str, str], *, bos: bool, eos: bool) -> None:
    """`bos` and `eos` are what holds where the file does not say."""
    add_ends(
        pipeline,
        bos=special.get("bos_token") if meta.flag("add_bos_token", bos) else None,
        eos=special.get("eos_token") if meta.flag("add_eos_token", eos) else None,
    )


def _add_tokens(pipeline: Pipeline, meta: Metadata) -> None:
    """Control tokens are special; user-defined ones are text that is never cut."""
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(meta.tokens, meta.types, strict=True)
        if kind in (CONTROL, USER_DEFINED) and token
    ]
    pipeline.add_tokens(added)


_BUILDERS: dict[str, Callable[[Metadata, dict[str, str]], Pipeline]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma,
    "bert": _word_piece,
    "t5": _unigram,
}
