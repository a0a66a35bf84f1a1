"""The inputs of requests that are pooled: their parameters checked against the model, their texts and pairs as tokens.

In: PoolingParams and prompts as callers gave them. Out: parameters in which nothing is left open, token ids, and for a
pair where its second text begins. Every refusal is an InputError that names value and limit. Must not know: requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config.pooling import (
    SEQUENCE_TASKS,
    embedding_width,
    num_labels,
    pooling_type,
    reads_both_ways,
    returns_vocabulary,
    score_type,
    tasks_of,
)
from quire.schema.errors import InputError, NotBuiltError
from quire.schema.params import PoolingParams
from quire.schema.prompt import Prompt

if TYPE_CHECKING:
    from quire.config.model import ModelConfig, PoolerConfig
    from quire.text.tokenizer import Tokenizer

TYPE_START = "compressed_token_type_ids"  # in extra_kwargs: the first position of token type 1
_EMBEDDING_TASKS = ("embed", "token_embed")
_MOST_COLUMNS = 1024
_TEXTS_AT_ONCE = 512  # that a tokenizer gets in one call
_TYPE_LIMIT = "token_type_ids must be zeros and then ones"


class PoolingInputs:
    def __init__(
        self, model: ModelConfig, vocab_size: int, max_model_len: int, tokenizer: Callable[[], Tokenizer | None]
    ) -> None:
        if not model.is_pooling or model.pooler_config is None:
            raise InputError(
                "this model runs with runner=generate, and cannot be pooled: start it with runner=pooling "
                "(--runner pooling, and --convert embed or classify)",
                param="model",
            )
        self.tasks = tasks_of(model)
        self.score_type = score_type(model)
        self.takes_pairs = reads_both_ways(model)  # else a pair is one text after the other
        self.max_model_len = max_model_len
        self.pooler: PoolerConfig = model.pooler_config
        self._vocab_size, self._tokenizer = vocab_size, tokenizer
        self._shared: PoolingParams | None = None
        self._outputs = embedding_width(model)
        labels = num_labels(model) if model.convert in ("classify", "reward") else model.facts.hidden_size
        self._num_columns = vocab_size if returns_vocabulary(model) else labels
        self._matryoshka = _matryoshka(model.hf_config)
        usual = 2 if model.architecture.startswith(("Bert", "Electra", "Ernie", "NomicBert")) else 0
        types = model.hf_config.get("type_vocab_size", usual)
        untyped = model.architecture.startswith(("Roberta", "XLMRoberta", "Camembert"))  # pairs without types
        self._has_types = isinstance(types, int) and types > 1 and not untyped

    @staticmethod
    def with_types(params: PoolingParams, start: int) -> PoolingParams:
        """`start`: the first position of token type 1."""
        return msgspec.structs.replace(params, extra_kwargs={**(params.extra_kwargs or {}), TYPE_START: start})

    # ---- parameters --------------------------------------------------------------------------------------------

    def resolve(self, params: PoolingParams) -> PoolingParams:
        """The same parameters with the task, and everything that depends on it, filled in. Resolved ones are returned
        as they are, the very object: what several prompts share is sent once (together.py)."""
        if params is self._shared:
            return params
        _check_few(params.returned_token_ids)
        params.check()
        pooler, task = self.pooler, self._task(params.task)
        self._check_dimensions(params.dimensions, task)
        activation = params.applies_activation
        kind = pooling_type(pooler, task)
        step_tag = pooler.step_tag_id if params.step_tag_id is None else params.step_tag_id
        if step_tag is not None and step_tag >= self._vocab_size:
            raise InputError(
                f"step_tag_id is {step_tag}; this model's ids are 0 to {self._vocab_size - 1}", param="step_tag_id"
            )
        resolved = msgspec.structs.replace(
            params,
            task=task,
            dimensions=params.dimensions or (pooler.dimensions if task in _EMBEDDING_TASKS else None),
            use_activation=bool(pooler.use_activation) if activation is None else activation,
            step_tag_id=step_tag,
            returned_token_ids=self._columns(params.returned_token_ids, task),
            skip_reading_prefix_cache=bool(params.skip_reading_prefix_cache) or kind != "LAST",
        )
        return params if resolved == params else resolved

    def share(self, params: PoolingParams) -> PoolingParams:
        """As `resolve`, for parameters that many prompts will bring and nobody changes: they are checked once."""
        self._shared = self.resolve(params)
        return self._shared

    def _columns(self, requested: list[int] | None, task: str) -> list[int] | None:
        """The columns of a result, all of which there are; None: every one."""
        name = "returned_token_ids"
        if task in _EMBEDDING_TASKS:
            if requested is not None:
                raise InputError(f"{name} is for classes and rewards, and the task is {task}", param=name)
            return None
        columns = list(self.pooler.returned_token_ids or ()) or None if requested is None else requested
        if columns is None:
            return None
        if not columns:
            raise InputError(f"{name} is empty; leave it out, or name at least one column", param=name)
        _check_few(columns)
        if wrong := [column for column in (min(columns), max(columns)) if not 0 <= column < self._num_columns]:
            raise InputError(
                f"{name} holds {wrong[0]}; this model's columns are 0 to {self._num_columns - 1}",
                param=name,
                value=wrong[0],
            )
        if len(set(columns)) < len(columns):
            raise InputError(f"{name} names a column twice", param=name)
        return columns

    def result_bytes(self, num_tokens: int, params: PoolingParams) -> int:
        """Of one prompt's result, with resolved parameters, at most."""
        task = str(params.task)
        if task in _EMBEDDING_TASKS:
            outputs = params.dimensions or self._outputs
        else:
            outputs = len(params.returned_token_ids or ()) or self._num_columns
        return (1 if task in SEQUENCE_TASKS else num_tokens) * outputs * 4

    def _task(self, task: str | None) -> str:
        if task is None:
            usual = self.pooler.task or self.tasks[0]
            return "classify" if usual == "score" else usual
        task = {"encode": self.tasks[0], "reward": "token_classify"}.get(task, task)
        if task == "score":
            task = "classify"
        if task not in self.tasks:
            raise InputError(
                f"task {task!r} is not one of this model's: it can {', '.join(self.tasks)}", param="task", value=task
            )
        return task

    def _check_dimensions(self, dimensions: int | None, task: str) -> None:
        if dimensions is None:
            return
        if task not in _EMBEDDING_TASKS:
            raise InputError(f"dimensions is for embeddings, and the task is {task}", param="dimensions")
        allowed = self._matryoshka
        if allowed is None:
            raise InputError(
                f"dimensions is {dimensions}, but this model was not trained for shorter embeddings (matryoshka "
                "representation); hf_overrides={'is_matryoshka': true} says that it was",
                param="dimensions",
                value=dimensions,
            )
        if dimensions > self._outputs or (allowed and dimensions not in allowed):
            limit = f"one of {', '.join(map(str, allowed))}" if allowed else f"from 1 to {self._outputs}"
            raise InputError(
                f"dimensions is {dimensions}; for this model it must be {limit}", param="dimensions", value=dimensions
            )

    # ---- texts -------------------------------------------------------------------------------------------------

    def check_length(self, num_tokens: int) -> None:
        if num_tokens > self.max_model_len:
            raise InputError(
                f"the input has {num_tokens} tokens, and this model takes {self.max_model_len} (max_model_len): "
                "shorten it, or set truncate_prompt_tokens",
                param="input",
                value=num_tokens,
            )

    def tokenized(self, prompts: Sequence[Prompt], kwargs: Mapping[str, Any], *, is_cut: bool) -> list[Prompt]:
        """The same prompts, with token ids beside all texts, which are tokenized together. `is_cut`: of a long text
        only a part is used. Holds no lock of Python's for most of its time, so that a thread may do it beforehand."""
        texts = [prompt.text or "" for prompt in prompts if prompt.token_ids is None]
        if not texts:
            return list(prompts)
        for text in texts:
            self._check_text(len(text), is_cut=is_cut)
        special, encode = bool(kwargs.get("add_special_tokens", True)), self.tokenizer.encode_batch
        parts = [texts[start : start + _TEXTS_AT_ONCE] for start in range(0, len(texts), _TEXTS_AT_ONCE)]
        encodings = iter([ids for part in parts for ids in encode(part, special)])
        return [
            Prompt(text=prompt.text, token_ids=tuple(next(encodings)), cache_salt=prompt.cache_salt)
            if prompt.token_ids is None
            else prompt
            for prompt in prompts
        ]

    def token_ids(
        self, prompt: Prompt, keep: int | None, kwargs: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], int | None]:
        """Token ids, and where tokens of type 1 begin (None: nowhere). `keep`: how many tokens stay."""
        if prompt.token_ids is None:
            (prompt,) = self.tokenized([prompt], kwargs, is_cut=keep is not None)
        ids, types = prompt.token_ids, prompt.token_type_ids
        assert ids is not None
        start = None if types is None else _type_start(types, len(ids))
        if start is not None and not self._has_types:
            raise InputError("token_type_ids: this model has no token types", param="token_type_ids")
        if keep is not None and len(ids) > keep:
            ids = tuple(self._cut(list(ids), keep, kwargs.get("truncation_side", "right")))
        return ids, start

    def pair(self, first: str, second: str, keep: int | None = None) -> Prompt:
        """Two texts as one prompt of a cross-encoder: by the tokenizer's rule for pairs, or one after the other."""
        self.check_pair(first, second, is_cut=keep is not None)
        ids, types = self.tokenizer.encode_pair(first, second)
        ids = self._cut(ids, keep, "right")
        has_types = self._has_types and any(types)
        return Prompt(token_ids=tuple(ids), token_type_ids=tuple(types[: len(ids)]) if has_types else None)

    def check_pair(self, first: str, second: str, *, is_cut: bool) -> None:
        """Before the two are put together."""
        self._check_text(len(first) + len(second), is_cut=is_cut)

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self._tokenizer()
        if tokenizer is None:
            raise InputError(
                "the engine has no tokenizer (skip_tokenizer_init=True): give token ids, not text", param="input"
            )
        return tokenizer

    def _check_text(self, num_chars: int, *, is_cut: bool) -> None:
        """A text that is many times too long, whatever its tokens are, is refused before it is tokenized."""
        longest = max(self.max_model_len, self.pooler.max_embed_len or 0)
        least = -(-num_chars // self._longest_token)
        if least > longest * (16 if is_cut else 1):
            self.check_length(least)

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def _cut(self, ids: list[int], keep: int | None, side: str) -> list[int]:
        """The first `keep` ids (with side left, the last). Special tokens that a tokenizer puts around a text stay."""
        if keep is None or len(ids) <= keep:
            return ids
        before, after = self._around
        head = _common(before, ids) if keep > len(before) + len(after) else 0
        tail = _common(after[::-1], ids[::-1]) if keep > len(before) + len(after) else 0
        if side == "left":
            return ids[:head] + ids[len(ids) - (keep - head) :]
        return ids[: keep - tail] + (ids[-tail:] if tail else [])

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Special tokens that the tokenizer puts before and after a text."""
        tokenizer = self._tokenizer()
        if tokenizer is None:
            return [], []
        whole, inner = tokenizer.encode("a", True), tokenizer.encode("a", False)
        for start in range(len(whole) - len(inner) + 1):
            if whole[start : start + len(inner)] == inner:
                return whole[:start], whole[start + len(inner) :]
        return [], []

    # ---- long inputs -------------------------------------------------------------------------------------------

    def parts(self, token_ids: Sequence[int]) -> list[tuple[int, ...]]:
        """An input longer than the model takes, in parts of its length (enable_chunked_processing)."""
        pooler, length = self.pooler, self.max_model_len
        if len(token_ids) <= length or not pooler.enable_chunked_processing:
            self.check_length(len(token_ids))
            return [tuple(token_ids)]
        most = pooler.max_embed_len
        if most is not None and len(token_ids) > most:
            raise InputError(
                f"the input has {len(token_ids)} tokens; the limit is max_embed_len ({most})", param="input"
            )
        return [tuple(token_ids[start : start + length]) for start in range(0, len(token_ids), length)]


def _check_few(columns: object) -> None:
    if isinstance(columns, list | tuple) and len(columns) > _MOST_COLUMNS:
        raise InputError(
            f"returned_token_ids has {len(columns)} entries; the limit is {_MOST_COLUMNS}",
            param="returned_token_ids",
            value=len(columns),
        )


def _common(expected: Sequence[int], ids: Sequence[int]) -> int:
    """How many ids are equal from the start."""
    for index, (one, other) in enumerate(zip(expected, ids, strict=False)):
        if one != other:
            return index
    return min(len(expected), len(ids))


def _type_start(types: Sequence[int], length: int) -> int | None:
    if len(types) != length:
        raise InputError(f"there are {len(types)} token_type_ids for {length} token ids", param="token_type_ids")
    start = next((index for index, kind in enumerate(types) if kind), length)
    if any(kind not in (0, 1) for kind in types) or not all(types[start:]):
        raise NotBuiltError(_TYPE_LIMIT, param="token_type_ids")
    return start if start < length else None


def _matryoshka(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Sizes that embeddings may be cut to; (): any; None: the model is not trained for it."""
    sizes = raw.get("matryoshka_dimensions")
    if isinstance(sizes, list) and sizes and all(isinstance(size, int) and size > 0 for size in sizes):
        return tuple(sizes)
    return () if raw.get("is_matryoshka") else None
