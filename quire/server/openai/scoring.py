"""POST /generative_scoring: how likely a token is to come next after a query with each of several items.

In: a query, items, the ids of label tokens. Out: per item the probability of the first label, among the labels or
(without apply_softmax) among all tokens. One step of the engine for each item. Must not know: templates, sockets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

from quire.schema.errors import InputError
from quire.schema.outputs import Logprob, RequestOutput
from quire.schema.params import RequestOutputKind, SamplingParams
from quire.schema.prompt import Prompt
from quire.server.openai.envelope import encode
from quire.server.openai.params import open_requests
from quire.server.openai.protocol import CompletionRequest, ListOf, Tokens, Usage
from quire.server.route import App, HttpCall, add_route
from quire.server.stream import fold

PATH = "/generative_scoring"
_MOST_LABELS = 1024


class GenerativeScoringRequest(BaseModel):
    model: str | None = None
    query: str | Tokens = Field(examples=["Is this a city? "])
    items: ListOf[str] | ListOf[Tokens] = Field(examples=[["Paris", "Tuesday"]])
    label_token_ids: Annotated[list[int], Field(min_length=1, max_length=_MOST_LABELS)] = Field(examples=[[19556, 905]])
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None


class GenerativeScore(BaseModel):
    index: int
    object: str = "score"
    score: float


class GenerativeScoringResponse(BaseModel):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[GenerativeScore]
    usage: Usage


def add_routes(app: App) -> None:
    add_route(app, PATH, score_items, GenerativeScoringRequest, answer=GenerativeScoringResponse, tag="generate")


async def score_items(call: HttpCall, request: GenerativeScoringRequest) -> None:
    """How likely the first label is to follow the query and each item."""
    model = call.model
    _check(request, model.engine.front.inputs.vocab_size, call.state.options.max_prompts_per_request)
    public_id = f"generative-scoring-{call.request_id(request.request_id)}"
    labels = tuple(dict.fromkeys(request.label_token_ids))
    params = SamplingParams(
        temperature=0, max_tokens=1, detokenize=False, logprob_token_ids=list(labels), skip_clone=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    prompts = [_joined(request, item) for item in request.items]
    same = {"model": request.model, "prompt": "", "cache_salt": request.cache_salt, "priority": request.priority}
    completion = CompletionRequest.model_validate(same)
    opened = await open_requests(
        call, completion, public_id, prompts, params, add_special_tokens=request.add_special_tokens, most=1
    )
    with opened.flow as flow:
        results = await fold(call, flow)
    data = [
        {"index": index, "object": "score", "score": _score(results[one.request_id], request)}
        for index, one in enumerate(opened.requests)
    ]
    tokens = sum(len(one.token_ids) for one in opened.requests)
    usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    response = {"id": public_id, "object": "list", "created": int(time.time()), "model": model.name, "data": data,
             "usage": usage}  # fmt: skip
    await call.reply(encode(response))


def _check(request: GenerativeScoringRequest, vocab_size: int, most: int) -> None:
    if not request.items:
        raise InputError("items is empty; give at least one", param="items")
    if len(request.items) > most:
        raise InputError(
            f"items has {len(request.items)} entries; the limit is {most} (--max-prompts-per-request)", param="items"
        )
    for token_id in request.label_token_ids:
        if not 0 <= token_id < vocab_size:
            raise InputError(
                f"label_token_ids holds {token_id}; this model's ids are 0 to {vocab_size - 1}",
                param="label_token_ids",
                value=token_id,
            )
    if isinstance(request.query, str) != isinstance(request.items[0], str):
        raise InputError("query and items must both be text, or both token ids", param="items")


def _joined(request: GenerativeScoringRequest, item: Any) -> Prompt:
    query: Any = request.query
    both = item + query if request.item_first else query + item
    return Prompt(text=both) if isinstance(both, str) else Prompt(token_ids=tuple(both))


def _score(result: RequestOutput, request: GenerativeScoringRequest) -> float:
    logprobs: Mapping[int, Logprob] = (result.outputs[0].logprobs or [{}])[0] or {}
    logs = [logprobs[token_id].logprob for token_id in request.label_token_ids]
    if not request.apply_softmax:
        return math.exp(logs[0])
    top = max(logs)
    if top == -math.inf:
        return 0.0
    powers = [math.exp(one - top) for one in logs]
    return powers[0] / sum(powers)
