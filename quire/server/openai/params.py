"""From a request of the wire to SamplingParams and to requests of the engine.

Owns: which default goes where (the request's word, then the model's generation config, then SamplingParams'), what a
max_tokens may be, and opening all prompts of a call as one Flow. Must not know: how answers are rendered.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from quire.engine.inputs import InputProcessor, Options, PreparedRequest, check_context
from quire.llm.online import Flow, size_of
from quire.schema.errors import InputError
from quire.schema.params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from quire.schema.prompt import Prompt, check_ids
from quire.server.errors import in_words
from quire.server.openai.beams import open_beams
from quire.server.openai.limits import check_bytes, check_logprobs
from quire.server.openai.protocol import GenerateRequest
from quire.server.openai.structured import constraint_of, form_name
from quire.server.route import HttpCall
from quire.server.served import ServedModel

if TYPE_CHECKING:
    from quire.llm.beam_flow import BeamFlow

_SAME = (
    "n", "frequency_penalty", "presence_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "logit_bias", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "allowed_token_ids", "bad_words",
    "prompt_logprobs", "logprob_token_ids", "thinking_token_budget",
)  # fmt: skip
_LARGE = ("logit_bias", "allowed_token_ids", "bad_words", "logprob_token_ids", "vllm_xargs", "repetition_detection")
_FROM_MODEL = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Opened:
    """The requests of one call: one per prompt, in order."""

    flow: Flow | BeamFlow
    requests: tuple[PreparedRequest, ...]
    indices: dict[str, int]  # engine's request id -> which prompt

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(one.token_ids) for one in self.requests)


def sampling_params(
    request: GenerateRequest, model: ServedModel, *, max_tokens: int | None, **further: Any
) -> SamplingParams:
    """`further` is what the dialect decides: logprobs, prompt_logprobs."""
    _check_allowed(model, request.allowed_token_ids or ())
    values: dict[str, Any] = {
        name: model.default_sampling[name] for name in _FROM_MODEL if name in model.default_sampling
    }
    fields = request.model_fields_set
    for name in _SAME:
        if name in fields and (value := getattr(request, name)) is not None:
            values[name] = tuple(value) if isinstance(value, list | array) else value
    values.update(further)
    values["max_tokens"] = max_tokens
    values["output_kind"] = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    constraint = constraint_of(request) if _has_form(request) else None
    plain = all(value is None or isinstance(value, int) for value in further.values())
    if plain and constraint is None and fields.isdisjoint(_LARGE):
        return _same_again(tuple(values.items()))
    if constraint is not None:
        values["structured_outputs"] = constraint
    if request.vllm_xargs is not None:
        values["extra_args"] = dict(request.vllm_xargs)
    if request.repetition_detection is not None:
        values["repetition_detection"] = RepetitionDetectionParams(**request.repetition_detection.model_dump())
    return _made(values)


def _has_form(request: GenerateRequest) -> bool:
    """Whether anything is said that may be about the form of the answer."""
    return request.response_format is not None or bool(request.structured_outputs) or bool(request.model_extra)


def _check_allowed(model: ServedModel, allowed: Sequence[int]) -> None:
    if len(allowed) > (most := model.engine.front.inputs.vocab_size):
        raise InputError(
            f"allowed_token_ids has {len(allowed)} ids, and this model has {most}", param="allowed_token_ids"
        )


@functools.lru_cache(maxsize=256)
def _same_again(values: tuple[tuple[str, Any], ...]) -> SamplingParams:
    """A program sends the same parameters with every request; they are checked once and never changed."""
    return _made(dict(values))


def _made(values: Mapping[str, Any]) -> SamplingParams:
    plain: dict[str, Any] = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return SamplingParams(skip_clone=True, **plain)


def most_tokens(
    model: ServedModel, requested: int | None, default: int | None, *, name: str = "max_tokens"
) -> int | None:
    """What was requested, within the model's generation config; more than the model's length cannot be meant."""
    limit = model.max_model_len
    if requested is not None and requested < 1:
        raise InputError(f"{name} must be at least 1, got {requested}", param=name, value=requested)
    check_context(limit, 0, requested or 1, name=name)
    limits = [most for most in (requested or default, model.default_sampling.get("max_tokens")) if most is not None]
    return min(limits) if limits else None


def fitting_ids(ids: Sequence[int], request: GenerateRequest, inputs: InputProcessor) -> tuple[int, ...]:
    """Of ids that cannot all be used, those that may be; a Python object for each is made for no others."""
    if len(ids) > (most := inputs.max_prompt_len):
        if request.truncate_prompt_tokens is None:
            inputs.check_prompt_len(len(ids))
        ids = ids[:most] if request.truncation_side == "right" else ids[-most:]
    return check_ids(ids)


async def open_requests(
    call: HttpCall, request: GenerateRequest, public_id: str, prompts: Sequence[Prompt], params: SamplingParams,
    *, add_special_tokens: bool, most: int | None, continues: bool = False,
    thinking: bool | None = None,
) -> Opened:  # fmt: skip
    """Check and tokenize every prompt, then submit them all. `most`: a max_tokens the client itself asked for."""
    try:
        requests = await prepare_requests(
            call, request, public_id, prompts, params, add_special_tokens=add_special_tokens, most=most,
            continues=continues, thinking=thinking,
        )  # fmt: skip
    except InputError as wrong:
        names = {} if params.structured_outputs is None else {"structured_outputs": form_name(request)}
        if (renamed_error := in_words(wrong, names)) is wrong:
            raise
        raise renamed_error from wrong
    if request.use_beam_search:
        options = Options(
            priority=request.priority or 0,
            tenant=call.tenant,
            trace_headers=call.trace_headers(),
            data_parallel_rank=call.data_parallel_rank(),
            lora_name=call.model.adapter,
        )
        flow: Flow | BeamFlow = open_beams(call, request, requests, options, params.structured_outputs)
    else:
        flow = call.model.engine.open(requests)
    return Opened(flow, tuple(requests), {one.request_id: index for index, one in enumerate(requests)})


async def prepare_requests(
    call: HttpCall, request: GenerateRequest, public_id: str, prompts: Sequence[Prompt], params: SamplingParams,
    *, add_special_tokens: bool, most: int | None, continues: bool = False,
    thinking: bool | None = None,
) -> list[PreparedRequest]:  # fmt: skip
    """Check and tokenize every prompt; nothing runs yet. Every dialect comes by here: the salt is put in now."""
    state, model, engine = call.state, call.model, call.model.engine
    tokenizing: dict[str, Any] = {} if add_special_tokens else {"add_special_tokens": False}
    if request.truncation_side is not None:
        tokenizing["truncation_side"] = request.truncation_side
    own = f"{public_id}-{state.prefix}{next(state.serials):x}"
    salt = request.cache_salt if state.salts is None else state.salts.salt(call.caller, request.cache_salt)
    trace, tenant, rank = call.trace_headers(), call.tenant, call.data_parallel_rank()
    options = [
        Options(
            priority=request.priority or 0,
            tenant=tenant,
            lora_name=model.adapter,
            tokenization_kwargs=tokenizing or None,
            trace_headers=trace,
            data_parallel_rank=rank,
            seed=engine.front.inputs.draw_seed(),
            stream_interval=request.stream_interval,
            continues=continues,
            thinking=thinking,
        )
        for _ in prompts
    ]

    if any(prompt.media is not None or prompt.media_uuids is not None for prompt in prompts):
        salted_prompts = [msgspec.structs.replace(prompt, cache_salt=salt) for prompt in prompts]
        prompts = [await engine.load_media(prompt) for prompt in salted_prompts]

    def prepare_all() -> list[PreparedRequest]:
        check_bytes(prompts, params, request.cache_salt, state.options)
        requests: list[PreparedRequest] = []
        resolved = engine.front.inputs.resolve(params, is_private=True)
        for index, prompt in enumerate(prompts):
            name = own if len(prompts) == 1 else f"{own}-{index}"
            salted = msgspec.structs.replace(prompt, cache_salt=salt)
            requests.append(engine.front.prepare(name, salted, resolved, options[index]))
            check_context(model.max_model_len, len(requests[-1].token_ids), most or 1)
        check_logprobs(requests, engine.front.inputs.vocab_size, state.options)
        return requests

    return await engine.read(size_of(prompts, params), prepare_all)
