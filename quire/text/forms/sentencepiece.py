"""A sentencepiece model file (tokenizer.model), read as what it is: a small protobuf message.

Comes in: the file and the Sidecar. Goes out: FastTokenizer; text is cut by `tokenizers`, so no further package is
needed. The message: repeated field 1 are the pieces (1 text, 2 score, 3 kind), field 2 how it was trained, field 3 how
text is normalized.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from quire.schema.errors import CheckpointError, NotBuiltError
from quire.text.forms.fast import FastTokenizer, finish
from quire.text.forms.marked import NORMAL, UNKNOWN, PieceVocabulary, bpe_pipeline, unigram_pipeline
from quire.text.forms.sidecar import Sidecar, read_sidecar

UNIGRAM, BPE = 1, 2
# numbers of the fields that matter here
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE = 3
_IDS = {40: ("unk_token", 0), 41: ("bos_token", 1), 42: ("eos_token", 2), 43: ("pad_token", -1)}
_CHARSMAP, _DUMMY_PREFIX, _EXTRA_SPACES = 2, 3, 4
# classes whose ids are not the places in the file
_SHIFTED = ("XLMRobertaTokenizer", "CamembertTokenizer", "BarthezTokenizer", "MBartTokenizer", "MBart50Tokenizer",
            "NllbTokenizer", "XGLMTokenizer", "PegasusTokenizer", "DebertaV2Tokenizer")  # fmt: skip


def load_sentencepiece(path: str, *, sidecar: Sidecar | None = None) -> FastTokenizer:
    sidecar = sidecar or read_sidecar(os.path.dirname(path) or ".")
    if sidecar.tokenizer_class in _SHIFTED:
        raise NotBuiltError(
            f"{path}: {sidecar.tokenizer_class} numbers its tokens otherwise than its sentencepiece file; "
            "a tokenizer.json is needed, or tokenizer_mode='slow'",
            param="tokenizer",
        )
    with open(path, "rb") as file:
        data = file.read()
    try:
        kind, vocabulary, named = read_model(data)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as wrong:
        raise CheckpointError(f"{path}: not a sentencepiece model ({wrong})") from None
    if kind not in (UNIGRAM, BPE):
        raise NotBuiltError(f"{path}: a sentencepiece model of kind {kind} (word or char) is not supported")
    config = dict(sidecar.config)
    ends_text = sidecar.tokenizer_class in ("T5Tokenizer", "UMT5Tokenizer")
    config.setdefault("add_bos_token", not ends_text)
    config.setdefault("add_eos_token", ends_text)
    pipeline = bpe_pipeline(vocabulary) if kind == BPE else unigram_pipeline(vocabulary)
    sidecar = replace(sidecar, special={**named, **sidecar.special}, config=config)
    return finish(path, pipeline, sidecar)


def read_model(data: bytes) -> tuple[int, PieceVocabulary, dict[str, str]]:
    """The kind of model, its vocabulary and its named special tokens."""
    tokens: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == _PIECES:
            fields = dict(_fields(value))
            tokens.append(fields.get(1, b"").decode())
            scores.append(struct.unpack("<f", fields[2])[0] if 2 in fields else 0.0)
            kinds.append(fields.get(3, NORMAL))
        elif number == _TRAINER:
            trainer = dict(_fields(value))
        elif number == _NORMALIZER:
            normalizer = dict(_fields(value))
    if not tokens:
        raise ValueError("it holds no pieces")
    vocabulary = PieceVocabulary(
        tokens=tokens,
        kinds=kinds,
        scores=scores,
        unknown=kinds.index(UNKNOWN) if UNKNOWN in kinds else None,
        space_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
        collapse_spaces=bool(normalizer.get(_EXTRA_SPACES, 1)),
        charsmap=normalizer.get(_CHARSMAP, b""),
    )
    return trainer.get(_MODEL_TYPE, UNIGRAM), vocabulary, _named(trainer, tokens)


def _named(trainer: dict[int, Any], tokens: list[str]) -> dict[str, str]:
    special = {}
    for number, (name, default) in _IDS.items():
        token_id = trainer.get(number, default)
        if token_id >= 1 << 63:  # a negative number as protobuf writes it
            token_id = -1
        if 0 <= token_id < len(tokens):
            special[name] = tokens[token_id]
    return special


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of one message: an int for varints, bytes for the rest."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire} at byte {at}")
        if at + size > end:
            raise ValueError(f"truncated: a field of {size} bytes at byte {at} of {end}")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError(f"a number runs on at byte {at}")
