"""Pipelines of the sentencepiece family, where a space is written as a mark (▁) inside the tokens.

Comes in: a PieceVocabulary, from a GGUF file or a sentencepiece model. Goes out: a `tokenizers` pipeline without begin
and end tokens. Must not know: files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from quire.text.forms.merges import merges_by_rank

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE_MARK = "▁"


@dataclass(frozen=True)
class PieceVocabulary:
    """Tokens by id with their kinds, and how text is prepared before it meets them."""

    tokens: list[str]
    kinds: list[int]
    scores: list[float]
    unknown: int | None
    space_prefix: bool = True  # text starts as if a space came before it
    collapse_spaces: bool = False  # runs of spaces count as one; none at either end
    charsmap: bytes = b""  # sentencepiece's compiled character normalisation


def bpe_pipeline(vocabulary: PieceVocabulary, merges: list[tuple[str, str]] | None = None) -> Pipeline:
    """`merges` None: sentencepiece's own rule, the pair with the best score first."""
    v = vocabulary
    ids = {token: i for i, token in enumerate(v.tokens)}
    model = models.BPE(
        ids,
        _merges(v) if merges is None else merges,
        unk_token=None if v.unknown is None else v.tokens[v.unknown],
        fuse_unk=True,
        byte_fallback=BYTE in v.kinds,
    )
    pipeline = Pipeline(model)
    pipeline.normalizer = _normalizer(v)
    pipeline.decoder = _decoder(v)
    add_marked_tokens(pipeline, v.tokens, v.kinds)
    return pipeline


def unigram_pipeline(vocabulary: PieceVocabulary) -> Pipeline:
    v = vocabulary
    pieces = list(zip(v.tokens, v.scores, strict=True))
    pipeline = Pipeline(models.Unigram(pieces, unk_id=v.unknown, byte_fallback=BYTE in v.kinds))
    pipeline.normalizer = _normalizer(v)
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # no token reaches over two words
    pipeline.decoder = _decoder(v)
    add_marked_tokens(pipeline, v.tokens, v.kinds)
    return pipeline


def add_marked_tokens(pipeline: Pipeline, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are special; user-defined ones are text that is never cut."""
    pipeline.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED) and token
        ]
    )


def _merges(v: PieceVocabulary) -> list[tuple[str, str]]:
    usable = [i for i, kind in enumerate(v.kinds) if kind in (NORMAL, USER_DEFINED, UNUSED)]
    usable.sort(key=lambda i: -v.scores[i])
    return merges_by_rank([v.tokens[i] for i in usable])


def _normalizer(v: PieceVocabulary) -> Any:
    steps: list[Any] = []
    if v.charsmap:
        steps.append(normalizers.Precompiled(v.charsmap))
    if v.collapse_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if v.space_prefix:
        steps.append(normalizers.Prepend(SPACE_MARK))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])


def _decoder(v: PieceVocabulary) -> Any:
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if v.space_prefix else steps)
