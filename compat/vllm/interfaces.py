"""Documented types that programs name and Quire has no need of: kinds of tasks, the engine, messages.

Also NoBadWordsLogitsProcessor and load_chat_template, for programs that call them by themselves; Quire's own sampling
and templates do not come through here.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict
from typing_extensions import TypedDict

from quire.text.parse.writer import random_id

# ---- vllm.tasks

GenerationTask = Literal["generate", "transcription"]
PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify", "plugin", "embed&token_classify"]
SupportedTask = Literal[GenerationTask, PoolingTask]
GENERATION_TASKS: tuple[str, ...] = get_args(GenerationTask)
POOLING_TASKS: tuple[str, ...] = get_args(PoolingTask)

# ---- vllm.inputs, vllm.multimodal: names of types that annotations use

ModalityData = Any
MultiModalDataDict = Mapping[str, Any]
MultiModalUUIDDict = Mapping[str, Any]

# ---- vllm.sequence

VLLM_INVALID_TOKEN_ID = -1
VLLM_TOKEN_ID_ARRAY_TYPE = "l"

# ---- vllm.engine.protocol

_ENGINE = ("generate", "encode", "abort", "check_health", "get_tokenizer", "is_tracing_enabled", "do_log_stats",
           "collective_rpc")  # fmt: skip


class EngineClient(ABC):  # noqa: B024  whoever has its methods is one
    """What an asynchronous engine can be asked; AsyncLLM is one, and so is any class with the same methods."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return all(any(name in parent.__dict__ for parent in other.__mro__) for name in _ENGINE)


# ---- vllm.logits_process

LogitsProcessor = Callable[[list[int], Any], Any] | Callable[[list[int], list[int], Any], Any]


class NoBadWordsLogitsProcessor:
    """Forbids the last token of a banned sequence where the others have just been said."""

    def __init__(self, bad_words_ids: list[list[int]]) -> None:
        self.bad_words_ids = bad_words_ids

    def __call__(self, past_tokens_ids: Sequence[int], logits: Any) -> Any:
        past, size = list(past_tokens_ids), int(logits.shape[-1])
        for word in self.bad_words_ids:
            if not all(0 <= token_id < size for token_id in word):
                raise ValueError(f"bad_words_ids holds {word}; this model's ids are 0 to {size - 1}")
            before = word[:-1]
            if not before or past[-len(before) :] == before:
                logits[word[-1]] = float("-inf")
        return logits


def get_bad_words_logits_processors(bad_words: list[str], tokenizer: Any) -> list[NoBadWordsLogitsProcessor]:
    """One for all words, each as it is written at the beginning of a text and after a blank."""
    found: list[list[int]] = []
    for word in bad_words:
        bare = list(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        later = list(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        found.append(bare)
        if later[0] != bare[0] and len(later) == len(bare):
            found.append(later)
    return [NoBadWordsLogitsProcessor(found)]


# ---- vllm.entrypoints.openai.responses.protocol


class ResponsesResponse(BaseModel):
    """A response as programs read one; what Quire sends has more fields (quire/server/openai/responses_wire.py)."""

    model_config = ConfigDict(extra="allow")
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]
    background: bool
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    temperature: float
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str
    usage: dict[str, Any] | None = None


# ---- vllm.entrypoints.chat_utils

ChatTemplateContentFormat = Literal["string", "openai"]
ChatTemplateContentFormatOption = Literal["auto", "string", "openai"]
ChatCompletionContentPartParam = dict[str, Any] | str


class CustomChatCompletionMessageParam(TypedDict, total=False):
    """A message of a chat, of any role."""

    role: str
    content: str | list[ChatCompletionContentPartParam] | None
    name: str
    tool_call_id: str | None
    tool_calls: list[dict[str, Any]] | None
    reasoning: str | None
    tools: list[dict[str, Any]] | None


ChatCompletionMessageParam = CustomChatCompletionMessageParam


class ConversationMessage(TypedDict, total=False):
    """A message as a template gets it."""

    role: str
    content: str | list[dict[str, str]] | None
    tool_call_id: str | None
    name: str | None
    tool_calls: list[dict[str, Any]] | None
    reasoning: str | None
    reasoning_content: str | None


def load_chat_template(chat_template: Path | str | None, *, is_literal: bool = False) -> str | None:
    """The text of a template: a file's, or with braces in it the words themselves."""
    if chat_template is None:
        return None
    if is_literal:
        if isinstance(chat_template, Path):
            raise TypeError("chat_template is a path, and is_literal says it is the text")
        return chat_template
    file = Path(chat_template)
    try:
        return file.read_text(encoding="utf-8")
    except OSError as wrong:
        if isinstance(chat_template, str) and any(mark in chat_template for mark in "{}\n"):
            return chat_template
        raise ValueError(f"The chat template {str(chat_template)!r:.200} is no file and no Jinja text") from wrong


def make_tool_call_id(id_type: str = "random", func_name: str | None = None, idx: int | None = None) -> str:
    """As Kimi K2's templates want it, or any."""
    return f"functions.{func_name}:{idx}" if id_type == "kimi_k2" else random_id("", 0)
