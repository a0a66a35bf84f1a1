"""What completions and chat requests have in common: field names, types and defaults of the documented API.

Wire types only: they say what a body may hold, and the OpenAPI page is made from them. null means: not given. Limits
and what is not built are checked in limits.py; parameters are made in params.py. Must not know: engines.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from annotated_types import MaxLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field

INT64 = (1 << 63) - 1
Scalar = str | int | float
Entry = TypeVar("Entry")


class _FirstFault(FailFast):
    """FailFast that may stand in a union of Python 3.11."""

    __hash__ = object.__hash__


ListOf = Annotated[list[Entry], _FirstFault()]  # of a million wrong entries, the first tells enough
Tokens = ListOf[int]
MOST_ENTRIES = 1 << 13
_MOST_PROMPTS = 1 << 16


def _few(value: Any) -> Any:
    """Every wrong entry of an object is reported, so there may only be so many."""
    if isinstance(value, dict) and len(value) > MOST_ENTRIES:
        raise ValueError(f"it has {len(value)} entries; the limit is {MOST_ENTRIES}")
    return value


Few = BeforeValidator(_few)
Most = MaxLen(_MOST_PROMPTS)
ExtraArgs = Annotated[dict[str, Scalar | ListOf[Scalar]], Few]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = Field(False, description="End the stream with a chunk that holds the usage.")
    continuous_usage_stats: bool | None = Field(
        False, description="Every chunk holds the usage so far; needs include_usage."
    )


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str = Field(description="text, json_object, json_schema (with `json_schema`) or structural_tag.")


class RepetitionDetection(BaseModel):
    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class GenerateRequest(BaseModel):
    """Fields of every request that generates text."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)

    model: str | None = None
    """One of the served names; absent, the server's model."""
    n: int | None = Field(None, examples=[1])
    """Answers per prompt; 1."""
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = Field(None, examples=[0.7])
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    logit_bias: Annotated[dict[str, float], Few] | None = None
    """Token id (as a string) to a number added to its logit, from -100 to 100."""
    stop: str | ListOf[str] | None = Field(None, examples=[["\n\n"]])
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Keep so many tokens of the prompt; -1 is what the model can take."""
    truncation_side: Literal["left", "right"] | None = None
    """Which end of the prompt is cut off; left."""
    allowed_token_ids: Tokens | None = None
    bad_words: ListOf[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Tokens | None = None
    """Log probabilities of these tokens too, at every position; needs logprobs."""
    add_special_tokens: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    """Tokens per streamed chunk; the server's --stream-interval if absent."""
    priority: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    """Lower goes first; needs --scheduling-policy priority."""
    request_id: str | None = None
    """Part of the answer's id; the header X-Request-Id goes before it."""
    cache_salt: str | None = None
    """Prompts share cached blocks only with prompts of the same salt."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Tokens of logprobs are written as token_id:NUMBER."""
    return_token_offsets: bool | None = None
    """Of /render alone: where each token of the prompt stands in its text."""
    vllm_xargs: ExtraArgs | None = None
    """Further arguments for custom logits processors."""
    repetition_detection: RepetitionDetection | None = None
    user: str | None = None
    """Taken and not used."""
    session_id: str | None = None
    """Taken and not used: there is one engine."""

    response_format: ResponseFormat | None = None
    """What the answer must look like."""
    structured_outputs: dict[str, Any] | None = None
    """One of json, regex, choice, grammar, json_object, structural_tag, and options."""
    thinking_token_budget: Annotated[int, Field(ge=0, le=INT64)] | None = None
    """Tokens after which a thought is closed; needs --reasoning-parser."""

    use_beam_search: bool | None = None
    """The n likeliest answers of a beam search that is n (or best_of) wide; not streamed."""
    length_penalty: float | None = None
    """Of a beam search: a larger one favours longer answers; 1."""

    # In the documented API and not in this version: refused by name (limits.py).
    watermarking: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    routed_experts_prompt_start: int | None = None
    return_mm_kwargs: bool | None = None


class CompletionRequest(GenerateRequest):
    prompt: str | ListOf[str] | Tokens | Annotated[ListOf[Tokens], Most] | None = Field(None, examples=["The sea is"])
    """Text, token ids, or a list of either."""
    max_tokens: int | None = Field(None, examples=[16])
    """Most tokens of an answer; 16. With echo, 0 gives the prompt alone."""
    echo: bool | None = False
    """Put the prompt before the answer."""
    logprobs: int | None = None
    """So many most likely tokens with their log probabilities, per position."""
    suffix: str | None = None
    prompt_embeds: str | ListOf[str] | None = None


class PromptTokensDetails(BaseModel):
    cached_tokens: int | None = None


class Usage(BaseModel):
    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: dict[str, Any] | None = None


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: Tokens | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: Tokens | None = None
    routed_experts: Any = None


class CompletionChunkChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: Tokens | None = None
    token_ids: Tokens | None = None


class CompletionChunk(BaseModel):
    """One event of a stream. The last may hold the usage and no choice; an error is {"error": …}."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: Usage
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
