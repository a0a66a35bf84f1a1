"""POST /inference/v1/generate: token ids in, token ids out, without a word of text.

In: ids and sampling parameters under SamplingParams' own names, as /v1/…/render gives them. Out: ids, streamed or not.
What is not said has SamplingParams' default: the model's generation config has no say here. Must not know: engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from quire.config.server import ServerConfig
from quire.schema.errors import InputError
from quire.schema.outputs import CompletionOutput, RequestOutput
from quire.schema.params import RequestOutputKind, SamplingParams
from quire.schema.prompt import Prompt
from quire.server.openai.chat_protocol import ChatLogprobs
from quire.server.openai.envelope import to_json
from quire.server.openai.limits import check_request
from quire.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from quire.server.openai.params import Opened, fitting_ids, most_tokens, open_requests
from quire.server.openai.protocol import INT64, CompletionRequest, PromptLogprobs, StreamOptions, Tokens, Usage
from quire.server.route import App, HttpCall, add_route
from quire.server.served import ServedModel
from quire.server.stream import drained, send_events

PATH = "/inference/v1/generate"
# Parameters that say how results are handed over: the server's own business.
_OURS = ("output_kind", "skip_clone", "flat_logprobs", "bad_words_token_ids", "logits_processors", "speech_rules")
NAMES = tuple(name for name in SamplingParams.__struct_fields__ if name not in _OURS)
_OTHER_NAMES = {"extra_args": "vllm_xargs"}  # of a parameter, where a request calls it otherwise


class TokensRequest(BaseModel):
    """What an engine is asked: ids and parameters."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    token_ids: Tokens = Field(examples=[[504, 5061, 314]])
    sampling_params: dict[str, Any] = Field({}, examples=[{"max_tokens": 5, "temperature": 0.0}])
    """Fields of SamplingParams."""
    request_id: str | None = None
    model: str | None = None
    """One of the served names; absent, the server's model."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    features: dict[str, Any] | None = None
    """Media; null in this version."""
    token_offsets: list[tuple[int, int]] | None = None
    """What /render says of the tokens' places; taken and not used."""
    assistant_tokens_mask: list[int] | None = None
    """What /render says of who wrote them; taken and not used."""
    kv_transfer_params: dict[str, Any] | None = None
    """Refused in this version."""


class TokensChoice(BaseModel):
    index: int
    token_ids: Tokens
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class TokensChunk(BaseModel):
    request_id: str
    choices: list[TokensChoice]
    usage: Usage | None = None


class TokensResponse(BaseModel):
    request_id: str
    choices: list[TokensChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: dict[str, Any] | None = None


def add_routes(app: App) -> None:
    add_route(
        app, PATH, generate_tokens, TokensRequest, answer=TokensResponse, streams=TokensChunk, tag="tokens"
    )  # fmt: skip


async def generate_tokens(call: HttpCall, request: TokensRequest) -> None:
    """Continue token ids.

    Streams with `stream: true`.
    """
    state, model = call.state, call.model
    if request.features:
        raise InputError("features: media are not in this version of Quire", param="features")
    completion = await call.apart(_as_completion, request)
    check_request(completion, state.options, 1)
    params = await call.apart(_params, request)
    most_tokens(model, params.max_tokens, None)
    public_id = call.request_id(request.request_id)
    prompt = Prompt(token_ids=fitting_ids(request.token_ids, completion, model.engine.front.inputs))
    opened = await open_requests(
        call, completion, public_id, [prompt], params, add_special_tokens=False, most=completion.max_tokens
    )
    with opened.flow as flow:
        answer = TokensAnswer(state.options, model, request, params, opened, public_id)
        if request.stream:
            await send_events(call, flow, answer)
        else:
            await call.reply(await drained(call, flow, answer))


def _as_completion(request: TokensRequest) -> CompletionRequest:
    """The same as a completion request, less its prompt, for the limits that hold for all requests."""
    wrong = [name for name in request.sampling_params if name not in NAMES]
    if wrong:
        raise InputError(
            f"sampling_params has {wrong[0]!r:.100}; known are {', '.join(NAMES)}", param="sampling_params"
        )
    fields = {_OTHER_NAMES.get(name, name): value for name, value in request.sampling_params.items()}
    fields = {name: value for name, value in fields.items() if name in CompletionRequest.model_fields}
    for name in ("stream", "stream_options", "cache_salt", "priority", "request_id", "kv_transfer_params"):
        fields[name] = getattr(request, name)
    return CompletionRequest(**{name: value for name, value in fields.items() if value is not None})


def _params(request: TokensRequest) -> SamplingParams:
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    values = {name: value for name, value in request.sampling_params.items() if value is not None}
    try:
        params = msgspec.convert({"detokenize": True, **values}, SamplingParams, strict=False)
    except msgspec.ValidationError as wrong:
        raise InputError(f"sampling_params: {wrong}", param="sampling_params") from None
    params.output_kind, params.skip_clone = kind, True
    params.detokenize = params.detokenize and bool(params.stop)  # no other text is wanted
    return params


class TokensAnswer:
    """One call's results as ids. A whole answer is the fold of what a stream writes."""

    def __init__(
        self, options: ServerConfig, model: ServedModel, request: TokensRequest, params: SamplingParams,
        opened: Opened, public_id: str,
    ) -> None:  # fmt: skip
        self._id = public_id
        self._most, self._named = params.logprobs, params.logprob_token_ids
        self._names = TokenNames(model.engine.tokenizer, as_ids=options.return_tokens_as_token_ids)
        self._num_prompt_tokens = opened.num_prompt_tokens
        self._num_tokens = 0
        self._with_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._choices: dict[int, TokensChoice] = {}
        self._prompt_logprobs: Any = None

    def _news(self, results: list[RequestOutput]) -> Iterator[TokensChoice]:
        for result in results:
            if result.prompt_logprobs is not None:
                self._prompt_logprobs = prompt_logprobs(result.prompt_logprobs)
            for output in result.outputs:
                self._num_tokens += len(output.token_ids)
                yield TokensChoice(
                    index=output.index,
                    token_ids=list(output.token_ids),
                    logprobs=self._logprobs(output),
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                )

    def _logprobs(self, output: CompletionOutput) -> Any:
        if self._most is None:
            return None
        return chat_logprobs(self._names, output.token_ids, output.logprobs or (), self._most, self._named)

    def _usage(self) -> Usage:
        prompt, answer = self._num_prompt_tokens, self._num_tokens
        return Usage(prompt_tokens=prompt, completion_tokens=answer, total_tokens=prompt + answer)

    def chunk(self, results: list[RequestOutput]) -> bytes:
        return b"".join([_event(TokensChunk(request_id=self._id, choices=[news])) for news in self._news(results)])

    def end(self) -> bytes:
        if not self._with_usage:
            return b""
        return _event(TokensChunk(request_id=self._id, choices=[], usage=self._usage()))

    def take(self, results: list[RequestOutput]) -> None:
        for news in self._news(results):
            if (earlier := self._choices.get(news.index)) is not None:
                news.token_ids = earlier.token_ids + news.token_ids
                if earlier.logprobs is not None and news.logprobs is not None:
                    news.logprobs.content = [*(earlier.logprobs.content or ()), *(news.logprobs.content or ())]
            self._choices[news.index] = news

    def whole(self) -> bytes:
        return to_json(
            TokensResponse(
                request_id=self._id,
                choices=[self._choices[index] for index in sorted(self._choices)],
                usage=self._usage(),
                prompt_logprobs=self._prompt_logprobs,
                kv_transfer_params=None,
            )
        )


def _event(chunk: TokensChunk) -> bytes:
    return b"data: " + to_json(chunk) + b"\n\n"
