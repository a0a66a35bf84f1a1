"""Mistral's native tokenizers: tekken.json, and versioned sentencepiece files (tokenizer.model.v3).

In: such a file or a folder with one. Text and ids are converted here; messages are converted by the
`mistral-common` package (extra `mistral`), because it knows each version's rules. Text never becomes a special token:
only chat rendering inserts those.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Pipeline

from quire.base.registry import load
from quire.schema.errors import CheckpointError, InputError, MissingExtraError
from quire.text.forms.fast import FastTokenizer, add_ends
from quire.text.forms.marked import bpe_pipeline
from quire.text.forms.ranks import ranks_pipeline
from quire.text.forms.sentencepiece import read_model
from quire.text.forms.sidecar import read_json, read_sidecar
from quire.text.forms.splits import Split
from quire.text.tokenizer import Tokenizer

_VERSIONED = re.compile(r".*\.model\.v\d+(m\d+)?")
# what files before version 7 leave to the reader, by id
_SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
            "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")  # fmt: skip
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class RenderedChat(str):
    """A prompt's text with its tokens: tokenizing the text again would give different ones."""

    token_ids: list[int]


class MistralTokenizer(FastTokenizer):
    def __init__(
        self, source: str, pipeline: Pipeline, *, special: Mapping[str, str], file: str, **options: Any
    ) -> None:
        pipeline.encode_special_tokens = True  # special tokens in a text are encoded as text
        super().__init__(source, pipeline, special=special, **options)
        self.file = file
        self._chat: Any = None
        self.render_own_chat = self._render

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        if any(isinstance(text, RenderedChat) for text in texts):
            return [
                list(text.token_ids) if isinstance(text, RenderedChat) else self.encode(text, add_special_tokens)
                for text in texts
            ]
        return super().encode_batch(texts, add_special_tokens)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        options: dict[str, Any],
    ) -> str:
        """Messages -> tokens by mistral-common; a message it rejects is an InputError with its message."""
        try:
            request_class = load("mistral_common.protocol.instruct.request:ChatCompletionRequest")
            self._chat = self._chat or load("mistral_common.tokens.tokenizers.mistral:MistralTokenizer").from_file(
                self.file
            )
        except ImportError as missing:
            raise MissingExtraError("a chat in Mistral's form", "mistral", missing.name or "mistral_common") from None
        try:
            request = request_class.from_openai(
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                continue_final_message=continue_final_message,
                **options,
            )
            token_ids = list(self._chat.encode_chat_completion(request).tokens)
        except (ValueError, TypeError, KeyError, AssertionError) as wrong:  # pydantic's and its own errors are these
            raise InputError(f"these messages cannot be a Mistral chat: {wrong}", param="messages") from wrong
        text = RenderedChat(self.decode(token_ids))
        text.token_ids = token_ids
        return text


def load_mistral(path: str, *, trust_remote_code: bool = False) -> Tokenizer:
    file = path if os.path.isfile(path) else _find(path)
    folder = os.path.dirname(file) or "."
    templates = read_sidecar(folder).chat_template  # only for callers who select one
    if file.endswith(".json"):
        return _load_tekken(file, templates)
    with open(file, "rb") as opened:
        data = opened.read()
    try:
        _, vocabulary, named = read_model(data)
    except (IndexError, UnicodeDecodeError, ValueError) as wrong:
        raise CheckpointError(f"{file}: not a sentencepiece model ({wrong})") from None
    pipeline = bpe_pipeline(vocabulary)
    add_ends(pipeline, bos=named.get("bos_token"), eos=None)
    return MistralTokenizer(path, pipeline, special=named, file=file, chat_template=templates)


def is_mistral(name: str) -> bool:
    """Whether a file of this name is one of Mistral's native tokenizers."""
    return name == "tekken.json" or _VERSIONED.fullmatch(name) is not None


def _find(folder: str) -> str:
    names = sorted(os.listdir(folder), reverse=True)  # the highest version first
    candidates = [name for name in names if is_mistral(name)]
    candidates.sort(key=lambda name: name != "tekken.json")
    if not candidates:
        raise CheckpointError(f"no Mistral tokenizer in {folder!r}: looked for tekken.json and *.model.v*")
    return os.path.join(folder, candidates[0])


def _load_tekken(file: str, templates: str | dict[str, str] | None) -> MistralTokenizer:
    data = read_json(os.path.dirname(file) or ".", os.path.basename(file))
    try:
        config = data["config"]
        num_special = int(config["default_num_special_tokens"])
        num_words = int(config["default_vocab_size"]) - num_special
        entries = data["vocab"][:num_words]
        tokens = [base64.b64decode(entry["token_bytes"]) for entry in entries]
        split = Split((config["pattern"],))
        special_tokens = {int(entry["rank"]): str(entry["token_str"]) for entry in data.get("special_tokens") or ()}
    except (KeyError, TypeError, ValueError) as wrong:
        raise CheckpointError(f"{file}: not a tekken file ({wrong!r})") from None
    names = special_tokens or dict(enumerate(_SPECIAL))
    special = [names.get(i, f"<SPECIAL_{i}>") for i in range(num_special)]
    pipeline = ranks_pipeline(tokens, split, first=special)
    pipeline.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    known = {name: token for name, token in _NAMED.items() if token in special}
    add_ends(pipeline, bos=known.get("bos_token"), eos=None)
    return MistralTokenizer(file, pipeline, special=known, file=file, chat_template=templates)
