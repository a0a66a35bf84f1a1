"""FastTokenizer: a `tokenizers` pipeline behind Quire's interface, and the reader of tokenizer.json.

In: a tokenizers.Tokenizer (from tokenizer.json or built from another format) and its Sidecar.
The pipeline's post-processor adds begin and end tokens; without one, the config decides.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Pipeline

from quire.schema.errors import CheckpointError, InputError
from quire.text.forms.sidecar import Added, Sidecar, read_sidecar
from quire.text.pieces import REPLACEMENT, Pieces, make_pieces
from quire.text.tokenizer import Tokenizer

_LONG = 1024  # tokens


class FastTokenizer(Tokenizer):
    """Encoding and decoding run in Rust without the interpreter lock."""

    is_fast = True

    def __init__(
        self,
        source: str,
        pipeline: Pipeline,
        *,
        special: Mapping[str, str],
        chat_template: str | dict[str, str] | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__(source, special=special, chat_template=chat_template, max_length=max_length)
        pipeline.no_truncation()
        pipeline.no_padding()
        self.pipeline = pipeline
        self.pieces = _pieces(pipeline)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        try:
            encodings = self.pipeline.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError:
            raise _no_text(texts) from None
        return [encoding.ids for encoding in encodings]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        try:
            encoding = self.pipeline.encode(first, second)
        except TypeError:
            raise _no_text([first, second]) from None
        return list(encoding.ids), list(encoding.type_ids)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        try:
            if len(ids) > _LONG:  # only this call releases the lock
                (text,) = self.pipeline.decode_batch([ids], skip_special_tokens=skip_special_tokens)
            else:
                text = self.pipeline.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            raise InputError(f"token ids are numbers from 0 to 2**32 - 1, got {ids[:8]!r}…", param="tokens") from None
        if REPLACEMENT in text and self.pieces is not None and self.pieces.errors != "replace":
            # one bad byte token makes the library drop its entire run of byte tokens; we keep the valid characters
            skipped = self.skipped_ids if skip_special_tokens else frozenset()
            text = self.pieces.decode(i for i in ids if i not in skipped)
        return str(text)

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self.pipeline.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        return token

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self.pipeline.token_to_id(token)
        return token_id

    def get_vocab(self) -> dict[str, int]:
        return dict(self.pipeline.get_vocab(with_added_tokens=True))

    def get_added_vocab(self) -> dict[str, int]:
        return {str(added.content): token_id for token_id, added in self._added.items()}

    @cached_property
    def all_special_ids(self) -> list[int]:
        named = (self.token_to_id(token) for token in self.special.values())
        return sorted(self.skipped_ids | {i for i in named if i is not None})

    @cached_property
    def vocab_size(self) -> int:
        return max(self.pipeline.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def _added(self) -> dict[int, Any]:
        return dict(self.pipeline.get_added_tokens_decoder())

    @cached_property
    def skipped_ids(self) -> frozenset[int]:
        return frozenset(token_id for token_id, added in self._added.items() if added.special)


def load_json(path: str, *, sidecar: Sidecar | None = None) -> FastTokenizer:
    """A tokenizer.json and the files beside it."""
    try:
        pipeline = Pipeline.from_file(path)
    except Exception as wrong:  # noqa: BLE001  # the library raises bare Exception for a file it cannot read
        raise CheckpointError(f"{path}: not a readable tokenizer.json ({wrong})") from None
    return finish(path, pipeline, sidecar or read_sidecar(os.path.dirname(path) or "."))


def finish(source: str, pipeline: Pipeline, sidecar: Sidecar) -> FastTokenizer:
    """Add tokens that the config has and the pipeline lacks, then wrap it."""
    pipeline = add_tokens(pipeline, sidecar)
    if pipeline.post_processor is None:
        add_ends(
            pipeline,
            bos=sidecar.special.get("bos_token") if sidecar.config.get("add_bos_token") else None,
            eos=sidecar.special.get("eos_token") if sidecar.config.get("add_eos_token") else None,
        )
    special = {name: token for name, token in sidecar.special.items() if pipeline.token_to_id(token) is not None}
    made = FastTokenizer(
        source,
        pipeline,
        special=special,
        chat_template=sidecar.chat_template,
        max_length=sidecar.max_length,
    )
    made.response_template = sidecar.config.get("response_template")
    return made


def add_tokens(pipeline: Pipeline, sidecar: Sidecar) -> Pipeline:
    """Added tokens of the config (in order of id, so that new ones get the id they had), then named special ones."""
    known = {str(added.content): added for added in pipeline.get_added_tokens_decoder().values()}
    absent = [added for added in sidecar.added if added.content not in known]
    taken = {
        added.token_id: added.content
        for added in absent
        if added.token_id is not None
        and pipeline.token_to_id(added.content) is None
        and pipeline.id_to_token(added.token_id) is not None
    }
    if taken:
        pipeline = _rename(pipeline, taken)
    if absent:
        pipeline.add_tokens([_added_token(added) for added in absent])
        for added in absent:
            if added.token_id is not None and pipeline.token_to_id(added.content) != added.token_id:
                raise CheckpointError(
                    f"added token {added.content!r} should have id {added.token_id}, "
                    f"but the vocabulary has it at {pipeline.token_to_id(added.content)}"
                )
    known_now = known.keys() | {added.content for added in absent}
    named = [*sidecar.special.values(), *sidecar.extra_special]
    missing = [token for token in dict.fromkeys(named) if token not in known_now]
    if missing:
        pipeline.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])
    return pipeline


def _rename(pipeline: Pipeline, names: dict[int, str]) -> Pipeline:
    """The same pipeline, with reserved tokens of its vocabulary renamed as in the config."""
    data = json.loads(pipeline.to_str())
    model = data["model"]
    old = {pipeline.id_to_token(token_id) for token_id in names}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token_id, token): token_id for token, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(i, entry[0]), entry[1]] for i, entry in enumerate(model["vocab"])]
    if "merges" in model:
        model["merges"] = [
            pair for pair in model["merges"] if not old & {pair[0], pair[1], "".join(pair)}
        ]  # a spare token is never spelled out
    return Pipeline.from_str(json.dumps(data))


def add_ends(pipeline: Pipeline, *, bos: str | None, eos: str | None) -> None:
    """Put a begin and an end token around every text that is encoded with special tokens."""
    ends = [token for token in (bos, eos) if token is not None]
    if not ends:
        return
    single = [*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])]
    pair = [*single, *(part.replace("$A", "$B")[:-1] + "1" for part in single)]
    ids = [(token, pipeline.token_to_id(token)) for token in dict.fromkeys(ends)]
    pipeline.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def _added_token(added: Added) -> AddedToken:
    return AddedToken(
        added.content,
        special=added.special,
        lstrip=added.lstrip,
        rstrip=added.rstrip,
        single_word=added.single_word,
        normalized=added.normalized,
    )


def _pieces(pipeline: Pipeline) -> Pieces | None:
    decoder = pipeline.decoder
    return make_pieces(None if decoder is None else json.loads(decoder.__getstate__()), pipeline.id_to_token)


def _no_text(texts: Sequence[str]) -> InputError:
    for text in texts:
        if not isinstance(text, str):
            return InputError(f"only strings can be encoded, got {type(text).__name__}", param="prompt")
    return InputError("the text contains a lone surrogate, which is not a Unicode character", param="prompt")
