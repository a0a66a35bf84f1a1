"""The oldest forms: vocab.json with merges.txt (byte-level BPE) and vocab.txt (word pieces).

Comes in: a folder and its Sidecar. Goes out: FastTokenizer. What such files leave open is known by tokenizer class.
"""

from __future__ import annotations

import os
from dataclasses import replace

from tokenizers import Tokenizer as Pipeline
from tokenizers import models

from quire.schema.errors import CheckpointError, InputError
from quire.text.forms.fast import FastTokenizer, add_ends, add_tokens, finish
from quire.text.forms.gguf import set_split, word_piece_pipeline
from quire.text.forms.sidecar import Sidecar, read_json, read_text
from quire.text.forms.splits import SPLITS

_SPLIT_OF = {"": "gpt-2", "GPT2Tokenizer": "gpt-2", "CodeGenTokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2",
             "RobertaTokenizer": "gpt-2", "BartTokenizer": "gpt-2", "GPTNeoXTokenizer": "gpt-2"}  # fmt: skip
_BOTH_ENDS = ("RobertaTokenizer", "BartTokenizer")


def load_vocab_merges(folder: str, sidecar: Sidecar) -> FastTokenizer:
    kind = sidecar.tokenizer_class
    if kind not in _SPLIT_OF:
        raise InputError(
            f"{folder}: tokenizer class {kind!r} with vocab.json and merges.txt is not known here "
            f"(known: {', '.join(filter(None, _SPLIT_OF))}); a tokenizer.json is needed, or tokenizer_mode='slow'",
            param="tokenizer",
        )
    vocab = read_json(folder, "vocab.json")
    lines = read_text(os.path.join(folder, "merges.txt")).split("\n")
    merges = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if not right or " " in right:
            raise CheckpointError(f"{folder}: merges.txt line {number} is not two tokens: {line[:60]!r}")
        merges.append((left, right))
    try:
        pipeline = Pipeline(models.BPE(vocab, merges))
    except Exception as wrong:  # noqa: BLE001  # the library raises bare Exception for merges outside the vocabulary
        raise CheckpointError(f"{folder}: vocab.json and merges.txt do not fit together ({wrong})") from None
    set_split(pipeline, SPLITS[_SPLIT_OF[kind]])
    if kind in _BOTH_ENDS:
        pipeline, sidecar = _with_ends(pipeline, sidecar, "<s>", "</s>")
    return finish(folder, pipeline, sidecar)


def load_word_pieces(folder: str, sidecar: Sidecar) -> FastTokenizer:
    path = os.path.join(folder, "vocab.txt")
    vocab = {token: i for i, token in enumerate(read_text(path).rstrip("\n").split("\n"))}
    config = sidecar.config
    unknown = sidecar.special.get("unk_token", "[UNK]")
    if unknown not in vocab:
        raise CheckpointError(f"{path}: the unknown token {unknown!r} is not in it")
    pipeline = word_piece_pipeline(
        vocab,
        unknown=unknown,
        lowercase=bool(config.get("do_lower_case", True)),
        strip_accents=config.get("strip_accents"),
        chinese=bool(config.get("tokenize_chinese_chars", True)),
    )
    pipeline, sidecar = _with_ends(pipeline, sidecar, "[CLS]", "[SEP]")
    return finish(folder, pipeline, sidecar)


def _with_ends(pipeline: Pipeline, sidecar: Sidecar, begin: str, end: str) -> tuple[Pipeline, Sidecar]:
    """Both ends around every text, under the names the class gives them."""
    sidecar = replace(sidecar, special={"cls_token": begin, "sep_token": end, **sidecar.special})
    pipeline = add_tokens(pipeline, sidecar)
    add_ends(pipeline, bos=sidecar.special["cls_token"], eos=sidecar.special["sep_token"])
    return pipeline, sidecar
