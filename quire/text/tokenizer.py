"""Tokenizer: the common interface of all tokenizers, and load_tokenizer, which detects the format of a source.

Owns: names and behaviour callers see (they follow the Hugging Face tokenizer, because programs rely on those).
In: a folder, a tokenizer file, a .gguf file or a hub id. Must not know: engines, or how a format is read
(text/forms, loaded by registry string so that nothing heavy is imported before a tokenizer is needed).
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

from quire.base.registry import Registry
from quire.schema.errors import InputError, ModelNotFoundError, NotBuiltError
from quire.text.chat import render_chat
from quire.text.pieces import Pieces

MODES = Registry(
    "tokenizer mode",
    {
        "auto": "quire.text.forms.find:load_auto",
        "hf": "quire.text.forms.find:load_hf",
        "slow": "quire.text.forms.foreign:load_slow",
        "mistral": "quire.text.forms.mistral:load_mistral",
    },
)
_HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|return|>", "<|end|>")
NOT_BUILT_MODES = ("cohere", "deepseek_v32", "deepseek_v4", "inkling", "kimi_audio", "kimi_k3", "terratorch")


# (messages, tools, add_generation_prompt, continue_final_message, options) -> the prompt
OwnChat = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, bool, bool, dict[str, Any]], str]


class Encoding(dict[str, Any]):
    """The result of calling a tokenizer: a dict whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Tokenizer(abc.ABC):
    """Text <-> token ids. Read-only after construction, so threads may share one."""

    is_fast = False
    pieces: Pieces | None = None  # bytes of each token, if they are known
    response_template: Any = None  # how its answers are parsed, in transformers' format
    render_own_chat: OwnChat | None = None  # renders messages without a template

    def __init__(
        self,
        source: str,
        *,
        special: Mapping[str, str],
        chat_template: str | dict[str, str] | None = None,
        max_length: int | None = None,
    ) -> None:
        self.name_or_path = source
        self.special = dict(special)  # "bos_token" -> "<s>" and so on
        self.chat_template = chat_template
        self.model_max_length = max_length or int(1e30)

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]: ...

    @abc.abstractmethod
    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str: ...

    @abc.abstractmethod
    def id_to_token(self, token_id: int) -> str | None: ...

    @abc.abstractmethod
    def token_to_id(self, token: str) -> int | None: ...

    @abc.abstractmethod
    def get_vocab(self) -> dict[str, int]: ...

    @abc.abstractmethod
    def get_added_vocab(self) -> dict[str, int]: ...

    @property
    @abc.abstractmethod
    def all_special_ids(self) -> list[int]: ...

    @property
    def skipped_ids(self) -> frozenset[int]:
        """The ids that skip_special_tokens omits."""
        return frozenset(self.all_special_ids)

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """The largest token id plus one."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise InputError(f"only a string can be encoded, got {type(text).__name__}", param="prompt")
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Two texts as one: token ids, and which text each belongs to; all 0 where there is no rule for pairs."""
        ids = self.encode(first) + self.encode(second, add_special_tokens=False)
        return ids, [0] * len(ids)

    def batch_decode(self, sequences: Iterable[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> Encoding:
        """{"input_ids", "attention_mask"}: lists of ids for a string, lists of lists for several."""
        batch = self.encode_batch([text] if isinstance(text, str) else list(text), add_special_tokens)
        if truncation:
            batch = [ids[: max_length or self.model_max_length] for ids in batch]
        masks = [[1] * len(ids) for ids in batch]
        if isinstance(text, str):
            return Encoding(input_ids=batch[0], attention_mask=masks[0])
        return Encoding(input_ids=batch, attention_mask=masks)

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens))

    @overload
    def convert_ids_to_tokens(self, ids: int, skip_special_tokens: bool = False) -> str: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int], skip_special_tokens: bool = False) -> list[str]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str | list[str]:
        """Tokens as the vocabulary writes them; an unknown id gives an empty string."""
        if isinstance(ids, int):
            return self.id_to_token(ids) or ""
        skipped = set(self.all_special_ids) if skip_special_tokens else ()
        return [self.id_to_token(i) or "" for i in ids if i not in skipped]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        """Ids of tokens; an unknown token gives the unknown token's id, or None where there is none."""
        if isinstance(tokens, str):
            token_id = self.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token stands for inside a text."""
        if self.pieces is not None:
            return self.pieces.of(token_id)
        return self.decode([token_id]).encode()

    def token_text(self, token_id: int) -> str:
        """The text of this token alone, as inside a text; an incomplete character is U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | list[int]:
        """Messages -> token ids (or text). Further keywords are variables of the template."""
        documents = kwargs.pop("documents", None)
        text = render_chat(
            self,
            messages,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=kwargs,
            documents=documents,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def __len__(self) -> int:
        return len(self.get_vocab())

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return dict(self.special)

    @property
    def all_special_tokens(self) -> list[str]:
        return self.convert_ids_to_tokens(self.all_special_ids)

    @property
    def bos_token(self) -> str | None:
        return self.special.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self.special.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._special_id("unk_token")

    def _special_id(self, name: str) -> int | None:
        token = self.special.get(name)
        return None if token is None else self.token_to_id(token)


def load_tokenizer(
    source: str,
    *,
    mode: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    download_dir: str | None = None,
) -> Tokenizer:
    """Load the tokenizer of a folder, a tokenizer file, a .gguf file or a hub id."""
    mode = mode.lower()
    if mode in NOT_BUILT_MODES:
        raise NotBuiltError(f"tokenizer_mode {mode!r} is not built yet", param="tokenizer_mode", value=mode)
    try:
        form = MODES.get(mode)
    except LookupError as unknown:
        raise InputError(str(unknown), param="tokenizer_mode", value=mode) from None
    path = os.path.expanduser(source)
    if not os.path.exists(path):
        path = _fetch(source, revision, download_dir)
    tokenizer: Tokenizer = form(path, trust_remote_code=trust_remote_code)
    tokenizer.name_or_path = source
    if tokenizer.render_own_chat is None and all(tokenizer.token_to_id(tag) is not None for tag in _HARMONY_TAGS):
        from quire.text.harmony import render_harmony  # lazy

        tokenizer.render_own_chat = render_harmony
    return tokenizer


def _fetch(source: str, revision: str | None, download_dir: str | None) -> str:
    """A hub id -> a local folder with everything except the weights."""
    if not source or source.startswith((".", "~", os.sep)) or source.count("/") > 1:
        raise ModelNotFoundError(f"no tokenizer at {source!r}: no such file or folder", param="tokenizer", value=source)
    from quire.checkpoint.source import locate  # lazy

    return str(locate(source, revision, download_dir, weights=False, option="tokenizer").path)
