"""Running the inputs of a pooling call: checked, tokenized, submitted together, collected in their order.

In: a call, prompts and PoolingParams. Out: one PooledInput for each. Long inputs of embeddings go in parts, where the
configuration allows it. Whatever takes as long as inputs or results are large is done `apart` from the event loop.
Must not know: routes, how results are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from quire.config.server import ServerConfig
from quire.engine.inputs import Options, PreparedRequest
from quire.engine.pooling import PoolingInputs
from quire.llm.online import size_of
from quire.llm.pooling import whole_params
from quire.llm.scoring import join_parts
from quire.schema.errors import EngineGenerateError, InputError
from quire.schema.params import PoolingParams
from quire.schema.prompt import Prompt, check_ids
from quire.schema.step import Pooled
from quire.server.openai.chat_open import render_prompt
from quire.server.openai.limits import check_bytes, check_extra, check_sequences, check_size, check_template_trust
from quire.server.pooling.protocol import Input, InputFields, PoolingBody
from quire.server.route import HttpCall
from quire.server.stream import fold

Made = TypeVar("Made")
Groups = list[list[PreparedRequest]]  # per prompt, its parts
_SMALL = 1 << 16  # bytes of results that are dealt with at once


@dataclass(frozen=True)
class PooledInput:
    """What one input came to."""

    pooled: Pooled
    num_tokens: int
    num_cached: int


def pooling_of(call: HttpCall) -> PoolingInputs:
    """An InputError that names the runner, where the model generates."""
    return call.model.engine.front.inputs.pooling


async def prompts_of(call: HttpCall, request: InputFields) -> list[Prompt]:
    """The inputs of a request, or its conversation."""
    if (request.input is None) == (request.messages is None):
        raise InputError("a request needs input or messages, and not both", param="input")
    if request.messages is None:
        return await call.apart(list_inputs, request.input, call.state.options.max_prompts_per_request)
    if len(request.messages) > (most := call.state.options.max_messages):
        raise InputError(f"messages has {len(request.messages)} messages; the limit is {most} (--max-messages)",
                         param="messages")  # fmt: skip
    check_template_trust(request.chat_template, request.chat_template_kwargs, call.state.options)
    text = await render_prompt(
        call, request.messages, tools=None, add_generation_prompt=bool(request.add_generation_prompt),
        continue_final_message=bool(request.continue_final_message), chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
    )  # fmt: skip
    return [Prompt(text=text)]


def list_inputs(value: Input | None, most: int) -> list[Prompt]:
    if isinstance(value, str):
        return [Prompt(text=value)]
    items: list[Any] = list(value or ())
    if items and isinstance(items[0], int):
        return [Prompt(token_ids=check_ids(items))]
    if not items:
        raise InputError("input is empty; give at least one text or list of token ids", param="input")
    if len(items) > most:
        raise InputError(
            f"input has {len(items)} entries; the limit is {most} (--max-prompts-per-request)", param="input"
        )
    return [Prompt(text=item) if isinstance(item, str) else Prompt(token_ids=check_ids(item)) for item in items]


async def run_pooling(
    call: HttpCall, request: PoolingBody, public_id: str, prompts: Sequence[Prompt], params: PoolingParams,
    *, is_chat: bool = False, check: Callable[[Groups], None] | None = None,
) -> list[PooledInput]:  # fmt: skip
    """All prompts at once; any that is refused refuses the call. `check` may refuse what they came to, before any is
    run."""
    if request.model_extra:
        check_extra(request.model_extra)
    engine, pooling = call.model.engine, pooling_of(call)
    params = msgspec.structs.replace(params, truncate_prompt_tokens=request.truncate_prompt_tokens)
    params = pooling.resolve(params)
    tokenizing: dict[str, Any] = {}
    if request.truncation_side is not None:
        tokenizing["truncation_side"] = request.truncation_side
    if request.add_special_tokens is False or (is_chat and request.add_special_tokens is None):
        tokenizing["add_special_tokens"] = False
    state = call.state
    salt = request.cache_salt if state.salts is None else state.salts.salt(call.caller, request.cache_salt)
    options = Options(
        priority=request.priority or 0, lora_name=call.model.adapter, tokenization_kwargs=tokenizing or None,
        trace_headers=call.trace_headers(), tenant=call.tenant, data_parallel_rank=call.data_parallel_rank(),
    )  # fmt: skip
    own = f"{public_id}-{state.prefix}{next(state.serials):x}"

    def prepare_parts(salted: Sequence[Prompt]) -> Groups:
        of_part = pooling.resolve(whole_params(params, 2))  # one object for all parts: it is sent once
        groups: Groups = []
        count = 0
        for index, prompt in enumerate(pooling.tokenized(salted, tokenizing, is_cut=False)):
            parts = in_parts(pooling, prompt, tokenizing)
            count += len(parts)
            if count > index + 1:  # some are in parts
                check_sequences(count, state.options, param="input", what="parts of at most the model's length")
            each = params if len(parts) == 1 else of_part
            named = [(f"{own}-{index}.{at}", part) for at, part in enumerate(parts)]
            groups.append(engine.front.prepare_pooled(named, each, options))
        return groups

    def prepare_all() -> Groups:
        check_bytes(prompts, params, request.cache_salt, state.options)
        salted = [msgspec.structs.replace(prompt, cache_salt=salt) for prompt in prompts]
        if is_in_parts(pooling, params):
            groups = prepare_parts(salted)
        else:
            named = [(f"{own}-{index}.0", prompt) for index, prompt in enumerate(salted)]
            groups = [[one] for one in engine.front.prepare_pooled(named, params, options)]
        _check_results(pooling, groups, params, state.options)
        if check is not None:
            check(groups)
        return groups

    groups = await engine.read(size_of(prompts, params), prepare_all)
    with engine.open([one for group in groups for one in group]) as flow:
        results: dict[str, Any] = await fold(call, flow)
    for result in results.values():
        if result.outputs.data is None:
            raise EngineGenerateError("the request was aborted before its result was computed; it can be sent again")
    size = sum(len(result.outputs.data.data) for result in results.values())
    return await apart(call, size, lambda: [_joined(group, results, params) for group in groups])


async def apart(call: HttpCall, size: int, work: Callable[[], Made]) -> Made:
    """Work on results of `size` bytes: here, or in a lane, so that the event loop goes on."""
    return work() if size < _SMALL else await call.model.engine.lanes.run(size, work)


def _check_results(pooling: PoolingInputs, groups: Groups, params: PoolingParams, options: ServerConfig) -> None:
    requests = [one for group in groups for one in group]
    size = sum(pooling.result_bytes(len(one.token_ids), one.pooling or params) for one in requests)
    tokens = sum(len(one.token_ids) for one in requests)
    what = f"the result of {len(requests)} inputs with {tokens} tokens (task {params.task})"
    check_size(what, size, options, param="input")


def is_in_parts(pooling: PoolingInputs, params: PoolingParams) -> bool:
    """Whether long inputs are embedded in parts."""
    chunked = pooling.pooler.enable_chunked_processing and params.task == "embed"
    return bool(chunked) and params.truncate_prompt_tokens is None


def in_parts(pooling: PoolingInputs, prompt: Prompt, tokenizing: dict[str, Any]) -> list[Prompt]:
    """One prompt, or the parts of a long one."""
    ids, _ = pooling.token_ids(prompt, None, tokenizing)
    return [Prompt(token_ids=part, cache_salt=prompt.cache_salt) for part in pooling.parts(ids)]


def _joined(group: Sequence[PreparedRequest], results: dict[str, Any], params: PoolingParams) -> PooledInput:
    pooled = [(results[one.request_id], len(one.token_ids)) for one in group]
    tokens, cached = sum(count for _, count in pooled), sum(result.num_cached_tokens for result, _ in pooled)
    if len(pooled) == 1:
        return PooledInput(pooled[0][0].outputs.data, tokens, cached)
    weighed = [(result.outputs.data, count) for result, count in pooled]
    whole = join_parts(weighed, dimensions=params.dimensions, normalize=bool(params.use_activation))
    return PooledInput(whole, tokens, cached)


def usage_of(call: HttpCall, inputs: Sequence[PooledInput]) -> dict[str, Any]:
    tokens = sum(one.num_tokens for one in inputs)
    details = None
    if call.state.options.enable_prompt_tokens_details:
        details = {"cached_tokens": sum(one.num_cached for one in inputs)}
    return {
        "prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": details,
    }  # fmt: skip
