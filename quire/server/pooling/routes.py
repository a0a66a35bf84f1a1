"""POST /v1/embeddings, /v2/embed, /pooling, /classify, /score and /rerank: pooled results in the documented forms.

In: a body of protocol.py. Out: JSON, or bytes. Must not know: how inputs are run (running.py), how numbers are written
(encoding.py).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

from quire.llm.scoring import (
    Pair,
    check_scoring,
    cosine,
    cross_prompts,
    floats,
    max_sim,
    pair_messages,
    pair_up,
    texts_of,
)
from quire.schema.errors import InputError
from quire.schema.params import PoolingParams
from quire.schema.prompt import Prompt
from quire.server.openai.chat_open import rendered_in_turn
from quire.server.openai.envelope import encode
from quire.server.openai.limits import check_size, check_template_trust
from quire.server.pooling.encoding import (
    bytes_answer,
    json_answer,
    json_base64,
    json_numbers,
    json_value,
    wants_bytes,
)
from quire.server.pooling.protocol import (
    ClassificationRequest,
    ClassificationResponse,
    CohereEmbedRequest,
    CohereEmbedResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    EncodingFields,
    PoolingBody,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from quire.server.pooling.running import Groups, PooledInput, apart, pooling_of, prompts_of, run_pooling, usage_of
from quire.server.route import App, HttpCall, add_route
from quire.text.chat import requested_job

PATHS = (
    "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
    "/v2/rerank",
)  # fmt: skip
_TAG = "pooling"
_COHERE_TYPES = ("float", "base64")


def add_routes(app: App) -> None:
    add_route(app, "/v1/embeddings", create_embedding, EmbeddingRequest, answer=EmbeddingResponse, tag=_TAG)
    add_route(app, "/v2/embed", create_cohere_embedding, CohereEmbedRequest, answer=CohereEmbedResponse, tag=_TAG)
    add_route(app, "/pooling", create_pooling, PoolingRequest, answer=PoolingResponse, tag=_TAG)
    add_route(app, "/classify", create_classification, ClassificationRequest, answer=ClassificationResponse, tag=_TAG)
    for path, scores in (("/score", create_score), ("/v1/score", create_score_prefixed)):
        add_route(app, path, scores, ScoreRequest, answer=ScoreResponse, tag=_TAG)
    for path, ranks in (("/rerank", rerank), ("/v1/rerank", rerank_as_jina), ("/v2/rerank", rerank_as_cohere)):
        add_route(app, path, ranks, RerankRequest, answer=RerankResponse, tag=_TAG)


async def create_embedding(call: HttpCall, request: EmbeddingRequest) -> None:
    """Embeddings of texts, of token ids, or of a conversation."""
    pooling_of(call)
    public_id = f"embd-{call.request_id(request.request_id)}"
    params = PoolingParams(
        task="embed", dimensions=request.dimensions, use_activation=request.use_activation, normalize=request.normalize
    )
    prompts = await prompts_of(call, request)
    inputs = await run_pooling(call, request, public_id, prompts, params, is_chat=request.messages is not None)
    await _reply(call, request, _common(call, public_id, inputs), inputs, ("embedding", "embedding"))


async def create_cohere_embedding(call: HttpCall, request: CohereEmbedRequest) -> None:
    """Embeddings of texts, in Cohere's form."""
    pooling_of(call)
    kinds = request.embedding_types or ["float"]
    if wrong := [kind for kind in kinds if kind not in _COHERE_TYPES]:
        raise InputError(
            f"embedding_types holds {wrong[0]!r:.100}; this server writes {', '.join(_COHERE_TYPES)}",
            param="embedding_types",
        )
    truncate = request.truncate or "END"
    body = EmbeddingRequest.model_validate({
        "model": request.model, "input": request.texts, "dimensions": request.output_dimension,
        "priority": request.priority, "truncate_prompt_tokens": None if truncate == "NONE" else -1,
        "truncation_side": {"START": "left"}.get(truncate),
    })  # fmt: skip
    public_id = f"embd-{call.request_id(request.request_id)}"
    params = PoolingParams(task="embed", dimensions=request.output_dimension)
    inputs = await run_pooling(call, body, public_id, await prompts_of(call, body), params)

    def data() -> bytes:
        by_kind = []
        if "float" in kinds:
            by_kind.append(b'"float":[%b]' % b",".join(json_numbers(one.pooled) for one in inputs))
        if "base64" in kinds:
            by_kind.append(b'"base64":[%b]' % b",".join(json_base64(one.pooled.data) for one in inputs))
        units = {"input_tokens": sum(one.num_tokens for one in inputs)}
        meta = {"api_version": {"version": "2"}, "billed_units": units}
        further = encode({"texts": request.texts, "meta": meta})
        head = encode({"id": public_id})
        return b"".join((head[:-1], b',"embeddings":{', b",".join(by_kind), b"},", further[1:]))

    await call.reply(await apart(call, _size_of(inputs), data))


async def create_pooling(call: HttpCall, request: PoolingRequest) -> None:
    """Pooled results of any task that the model has."""
    pooling_of(call)
    public_id = f"pool-{call.request_id(request.request_id)}"
    params = PoolingParams(
        task=request.task, dimensions=request.dimensions, use_activation=request.use_activation,
        normalize=request.normalize, softmax=request.softmax, activation=request.activation,
        step_tag_id=request.step_tag_id, returned_token_ids=request.returned_token_ids,
    )  # fmt: skip
    prompts = await prompts_of(call, request)
    inputs = await run_pooling(call, request, public_id, prompts, params, is_chat=request.messages is not None)
    await _reply(call, request, _common(call, public_id, inputs), inputs, ("pooling", "data"))


async def create_classification(call: HttpCall, request: ClassificationRequest) -> None:
    """Classes of texts, with their probabilities."""
    pooling_of(call)
    public_id = f"classify-{call.request_id(request.request_id)}"
    params = PoolingParams(
        task="classify", use_activation=request.use_activation, softmax=request.softmax, activation=request.activation
    )
    prompts = await prompts_of(call, request)
    inputs = await run_pooling(call, request, public_id, prompts, params, is_chat=request.messages is not None)
    labels = call.model.config.model_config.hf_config.get("id2label")
    common = _common(call, public_id, inputs)

    def item(index: int, one: PooledInput) -> bytes:
        probs = floats(one.pooled)
        best = max(range(len(probs)), key=probs.__getitem__)
        label = encode(_label(labels, best))
        return b'{"index":%d,"label":%b,"probs":%b,"num_classes":%d}' % (
            index, label, json_numbers(one.pooled), len(probs)
        )  # fmt: skip

    def data() -> bytes:
        return json_answer(common, "data", (item(index, one) for index, one in enumerate(inputs)))

    await call.reply(await apart(call, _size_of(inputs), data))


async def create_score(call: HttpCall, request: ScoreRequest) -> None:
    """How well texts fit each other: 1 to 1, 1 to N or N to N."""
    public_id = f"score-{call.request_id(request.request_id)}"
    scores, inputs = await _scores(
        call, request, public_id, texts_of(request.text_1, "text_1"), texts_of(request.text_2, "text_2"),
        ("text_1", "text_2"), request.chat_template,
    )  # fmt: skip
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    await call.reply(encode({**_common(call, public_id, inputs), "data": data}))


async def create_score_prefixed(call: HttpCall, request: ScoreRequest) -> None:
    """As /score."""
    await create_score(call, request)


async def rerank(call: HttpCall, request: RerankRequest) -> None:
    """Documents by how well they fit a query, the best first."""
    texts = [_document(document) for document in request.documents]
    public_id = f"rerank-{call.request_id(request.request_id)}"
    names = ("query", "documents")
    scores, inputs = await _scores(
        call, request, public_id, [request.query], texts_of(texts, "documents"), names, request.chat_template
    )
    order = sorted(range(len(texts)), key=lambda index: -scores[index])
    if request.top_n is not None and request.top_n > 0:
        order = order[: request.top_n]
    results: list[dict[str, Any]] = []
    for index in order:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if request.return_documents is not False:
            result["document"] = {"text": texts[index]}
        results.append(result)
    tokens = sum(one.num_tokens for one in inputs)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    await call.reply(encode({"id": public_id, "model": call.model.name, "usage": usage, "results": results}))


async def rerank_as_jina(call: HttpCall, request: RerankRequest) -> None:
    """As /rerank."""
    await rerank(call, request)


async def rerank_as_cohere(call: HttpCall, request: RerankRequest) -> None:
    """As /rerank."""
    await rerank(call, request)


async def _scores(
    call: HttpCall, request: PoolingBody, public_id: str, first: list[str], second: list[str], names: tuple[str, str],
    template: str | None,
) -> tuple[list[float], list[PooledInput]]:  # fmt: skip
    """One score per pair, and what was run for it."""
    pooling, options = pooling_of(call), call.state.options
    check_scoring(pooling)
    check_template_trust(template, None, options)
    pairs, most = pair_up(first, second, names), options.max_prompts_per_request
    if len(pairs) > most:
        raise InputError(
            f"{names[1]} has {len(pairs)} texts; the limit is {most} (--max-prompts-per-request)", param=names[1]
        )
    if pooling.score_type == "cross-encoder":
        prompts = await _pair_prompts(call, pairs, request.truncate_prompt_tokens, names, template)
        inputs = await run_pooling(call, request, public_id, prompts, PoolingParams(task="classify",
                                   use_activation=request.use_activation))  # fmt: skip
        return [floats(one.pooled)[0] for one in inputs], inputs
    is_late = pooling.score_type == "late-interaction"
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))

    def check_products(groups: Groups) -> None:
        counts = {text: len(group[0].token_ids) for text, group in zip(texts, groups, strict=True)}
        size = 4 * sum(counts[one] * counts[other] for one, other in pairs)
        check_size(f"comparing every token of {len(pairs)} pairs", size, options, param=names[1])

    inputs = await run_pooling(
        call, request, public_id, [Prompt(text=text) for text in texts],
        PoolingParams(task="token_embed" if is_late else "embed"), check=check_products if is_late else None,
    )  # fmt: skip

    def compare() -> list[float]:
        by_text = {text: one.pooled for text, one in zip(texts, inputs, strict=True)}
        if is_late:
            return [max_sim(by_text[one], by_text[other]) for one, other in pairs]
        values = {text: floats(pooled) for text, pooled in by_text.items()}
        return [cosine(values[one], values[other]) for one, other in pairs]

    return await apart(call, _size_of(inputs), compare), inputs


async def _pair_prompts(
    call: HttpCall, pairs: list[Pair], keep: int | None, names: tuple[str, str], template: str | None
) -> list[Prompt]:
    """The prompts of a cross-encoder. One text may stand in many pairs, so what they come to is larger than the body;
    a request's own template is rendered for all of them by one child process."""
    pooling = pooling_of(call)
    size = sum(len(one) + len(other) for one, other in pairs)
    check_size(f"the text of {len(pairs)} pairs", size, call.state.options, param=names[1])
    room = pooling.max_model_len if keep == -1 else keep
    if not template:
        return await call.model.engine.read(size, cross_prompts, pooling, pairs, room, call.model.chat_template)
    from quire.text.template_child import render_all_apart  # lazy

    for one, other in pairs:
        pooling.check_pair(one, other, is_cut=room is not None)
    job = requested_job(pooling.tokenizer, template)
    texts = await rendered_in_turn(
        call.state, functools.partial(render_all_apart, job, [pair_messages(pair) for pair in pairs])
    )
    return [Prompt(text=text) for text in texts]


def _document(document: str | Mapping[str, Any]) -> str:
    """A text, alone or as {"text": ...}."""
    text = document.get("text") if isinstance(document, Mapping) else document
    if not isinstance(text, str):
        raise InputError("documents are texts, or objects with a text; other content is not built", param="documents")
    return text


def _label(labels: object, index: int) -> str | None:
    """The class's name in the model's configuration."""
    if not isinstance(labels, Mapping):
        return None
    label = labels.get(str(index), labels.get(index))
    return None if label is None else str(label)


def _common(call: HttpCall, public_id: str, inputs: list[PooledInput]) -> dict[str, Any]:
    return {
        "id": public_id, "object": "list", "created": int(time.time()), "model": call.model.name,
        "usage": usage_of(call, inputs),
    }  # fmt: skip


def _size_of(inputs: list[PooledInput]) -> int:
    return sum(len(one.pooled.data) for one in inputs)


async def _reply(
    call: HttpCall, request: EncodingFields, common: dict[str, Any], inputs: list[PooledInput], names: tuple[str, str]
) -> None:
    """Vectors in the form that the request wants. `names`: of an entry's type, and of the field with its values."""
    name, field = names
    size = _size_of(inputs)
    if wants_bytes(request):
        vectors = [one.pooled for one in inputs]
        headers, body = await apart(call, size, lambda: bytes_answer(request, common, vectors, name))
        call.started = True
        await call.send({"type": "http.response.start", "status": 200, "headers": headers})
        await call.send({"type": "http.response.body", "body": body})
        return

    def item(index: int, one: PooledInput) -> bytes:
        head = encode({"index": index, "object": name})
        return b"".join((head[:-1], b",", encode(field), b":", json_value(one.pooled, request), b"}"))

    def data() -> bytes:
        return json_answer(common, "data", (item(index, one) for index, one in enumerate(inputs)))

    await call.reply(await apart(call, size, data))
