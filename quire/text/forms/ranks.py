"""Vocabularies that are a list of byte strings in order of rank: tiktoken files, and Mistral's tekken.json.

Comes in: the file. Goes out: a byte-level BPE pipeline. Such a file does not say how text is cut into words or which
special tokens there are: tekken.json does, for the others it is known by tokenizer class or file name.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Sequence
from dataclasses import replace

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Pipeline

from quire.schema.errors import CheckpointError, InputError
from quire.text.forms.fast import FastTokenizer, finish
from quire.text.forms.gguf import set_split
from quire.text.forms.merges import merges_by_rank
from quire.text.forms.sidecar import Sidecar, read_sidecar
from quire.text.forms.splits import SPLITS, Split
from quire.text.pieces import ALPHABET

_LETTERS = "".join(sorted(ALPHABET, key=lambda char: ALPHABET[char]))  # the letter of each byte
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
# by tokenizer class, or by file name without its ending
_SPLIT_OF = {
    "QWenTokenizer": "qwen2",
    "qwen": "qwen2",
    "TikTokenTokenizer": "kimi-k2",
    "ChatGLM4Tokenizer": "chatglm-bpe",
    "DbrxTokenizer": "dbrx",
    "cl100k_base": "dbrx",
    "o200k_base": "gpt-4o",
}
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))


def is_ranks(path: str) -> bool:
    """True for a text of `base64 rank` lines, whatever the file is called."""
    with open(path, "rb") as file:
        return _LINE.match(file.read(512)) is not None


def load_ranks(path: str, *, sidecar: Sidecar | None = None) -> FastTokenizer:
    sidecar = sidecar or read_sidecar(os.path.dirname(path) or ".")
    stem = os.path.basename(path).rsplit(".", 1)[0]
    name = _SPLIT_OF.get(sidecar.tokenizer_class) or _SPLIT_OF.get(stem)
    if name is None:
        raise InputError(
            f"{path}: a tiktoken file does not say how text is cut into words, and tokenizer class "
            f"{sidecar.tokenizer_class!r} is not known here (known: {', '.join(_SPLIT_OF)}). "
            "A tokenizer.json is needed, or trust_remote_code=True for the model's own code",
            param="tokenizer",
        )
    pipeline = ranks_pipeline(read_ranks(path), SPLITS[name])
    if name == "qwen2" and not sidecar.added:  # its special tokens stand in its code only
        pipeline.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _QWEN_SPECIAL])
        sidecar = replace(sidecar, special={"eos_token": "<|endoftext|>", **sidecar.special})
    return finish(path, pipeline, sidecar)


def ranks_pipeline(tokens: Sequence[bytes], split: Split, *, first: Sequence[str] = ()) -> Pipeline:
    """`tokens` best first; the id of a token is its rank, counted from after the tokens of `first`."""
    letters = [bytes_to_letters(token) for token in tokens]
    vocab = {token: i for i, token in enumerate((*first, *letters))}
    pipeline = Pipeline(models.BPE(vocab, merges_by_rank(letters), ignore_merges=True))
    set_split(pipeline, split)
    return pipeline


def bytes_to_letters(token: bytes) -> str:
    """How a byte-level vocabulary writes these bytes."""
    return token.decode("latin-1").translate(_LETTERS)


def read_ranks(path: str) -> list[bytes]:
    tokens = []
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                tokens.append(base64.b64decode(token, validate=True))
                right = int(rank) == number
            except (ValueError, binascii.Error):
                right = False
            if not right:
                raise CheckpointError(f"{path}: line {number + 1} is not `base64 {number}`: {line[:60]!r}")
    return tokens
