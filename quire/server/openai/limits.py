"""What a request may not ask: too much of something, or what this version does not have. Each refusal names the field.

In: a request of the wire, the server's limits; then its prompts and parameters, before and after tokenizing. Out:
nothing, or one InputError. Checked before anything is allocated.
Must not know: models (engine/inputs.py checks what depends on one), dialects' answers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.base.log import logger, once
from quire.config.server import ServerConfig
from quire.engine.inputs import PreparedRequest
from quire.schema.errors import InputError, NotBuiltError
from quire.schema.params import PoolingParams, SamplingParams
from quire.schema.prompt import Prompt
from quire.server.openai.beams import beam_width, check_beams
from quire.server.openai.chat_protocol import ChatRequest
from quire.server.openai.protocol import GenerateRequest
from quire.server.openai.structured import GUIDED, GUIDED_WHITESPACE

log = logger(__name__)
_MOST_LOGPROB_IDS = 1024
_MOST_BAD_CHARS = 1 << 16
_MOST_TEMPLATE_VARIABLES = 64
_MOST_TEMPLATE_CHARS = 1 << 16
_WARNED_FIELDS = 100  # so many unknown names are reported; a client may send any number
_warned: set[str] = set()
# Refused whenever they ask for something. Names that clients of older servers send are here too.
_UNBUILT = (
    "suffix", "watermarking",
    "kv_transfer_params", "ec_transfer_params", "routed_experts_prompt_start", "return_mm_kwargs",
)  # fmt: skip
_UNBUILT_EXTRA = (
    "return_assistant_tokens_mask",
    "guided_decoding_backend", "functions", "function_call", "prompt_cache_breakpoint", "audio",
    "web_search_options", "prediction", "early_stopping", "logits_processors",
)  # fmt: skip
_HINTS = {
    "suffix": "suffix (fill in the middle) is not in this version of Quire; put the model's own fill-in tokens into "
    "the prompt",
    "kv_transfer_params": "kv_transfer_params: KV transfer between engines is not in this version of Quire",
    "guided_decoding_backend": "guided_decoding_backend: the backend is chosen when the server starts "
    "(--structured-outputs-config.backend)",
    "functions": "functions is not in this version of Quire; give tools, which the chat template is shown",
}

_BYTES_PER_ID = 8  # a token id in a list
# Parameters of any size, each with the name that a request has for it.
_LARGE = {
    "structured_outputs": "structured_outputs", "logit_bias": "logit_bias", "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words", "stop": "stop", "stop_token_ids": "stop_token_ids",
    "logprob_token_ids": "logprob_token_ids", "extra_args": "vllm_xargs",
}  # fmt: skip
_LARGE_OF_POOLING = {"returned_token_ids": "returned_token_ids"}


def check_request(request: GenerateRequest, options: ServerConfig, num_prompts: int) -> None:
    """Everything but the prompt itself."""
    _check_unbuilt(request)
    if request.model_extra:
        check_extra(request.model_extra)
    width = request.n or 1
    if request.use_beam_search or request.length_penalty is not None or "best_of" in (request.model_extra or ()):
        check_beams(request)
        width = beam_width(request)
    if width != (request.n or 1):
        if not request.use_beam_search:
            raise InputError(f"best_of is {width}; it can only be n ({request.n or 1}): use n", param="best_of")
        _check_most("best_of", width, options.max_num_choices, "max-num-choices")
    if request.n is not None:
        _check_most("n", request.n, options.max_num_choices, "max-num-choices")
    _check_most("prompt", num_prompts, options.max_prompts_per_request, "max-prompts-per-request", "prompts")
    many = num_prompts * max(width, 1)
    _check_most("n", many, options.max_sequences_per_request, "max-sequences-per-request", "answers (prompts times n)")
    if request.stop:
        _check_stops([request.stop] if isinstance(request.stop, str) else request.stop, options)
    for name, limit, flag in (
        ("stop_token_ids", options.max_stop_strings, "max-stop-strings"),
        ("logit_bias", options.max_logit_bias, "max-logit-bias"),
        ("bad_words", options.max_bad_words, "max-bad-words"),
        ("logprob_token_ids", _MOST_LOGPROB_IDS, None),
    ):
        if entries := getattr(request, name):
            _check_most(name, len(entries), limit, flag, "entries")
    if request.bad_words:
        _check_most("bad_words", sum(map(len, request.bad_words)), _MOST_BAD_CHARS, None, "characters")
    if request.cache_salt is not None and not request.cache_salt:
        raise InputError("cache_salt is an empty string; leave it out or give one", param="cache_salt")
    if request.stream_options is not None and not request.stream:
        raise InputError("stream_options can only be given with stream: true", param="stream_options")
    if request.stream_interval is not None and request.stream_interval < 1:
        raise InputError(f"stream_interval must be at least 1, got {request.stream_interval}", param="stream_interval")
    if request.stream and request.prompt_logprobs is not None:
        raise InputError("prompt_logprobs cannot be given with stream: true", param="prompt_logprobs")


def check_chat(request: ChatRequest, options: ServerConfig) -> None:
    _check_most("messages", len(request.messages), options.max_messages, "max-messages", "messages")
    check_template_trust(request.chat_template, request.chat_template_kwargs, options)
    if request.top_logprobs and not request.logprobs:
        raise InputError(f"top_logprobs is {request.top_logprobs}, but logprobs is not true", param="top_logprobs")


def check_template_trust(template: str | None, variables: Mapping[str, Any] | None, options: ServerConfig) -> None:
    """A template is a program, so it is taken from those who are trusted; its variables from all, within bounds."""
    if template and not options.trust_request_chat_template:
        raise InputError(
            "chat_template is taken from requests only where the server was started with --trust-request-chat-template",
            param="chat_template",
        )
    if variables:
        name = "chat_template_kwargs"
        _check_most(name, len(variables), _MOST_TEMPLATE_VARIABLES, None, "entries")
        _check_most(name, _num_chars(variables), _MOST_TEMPLATE_CHARS, None, "characters")


def _num_chars(value: Any) -> int:
    """About what it would be as JSON; numbers and words count for a few."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _num_chars(one) for key, one in value.items())
    if isinstance(value, list):
        return sum(map(_num_chars, value))
    return len(str(value)) if isinstance(value, int) and abs(value) < 10**15 else 16


def _check_unbuilt(request: GenerateRequest) -> None:
    fields = request.model_fields_set
    for name in _UNBUILT:
        if name in fields and getattr(request, name):
            raise NotBuiltError(_HINTS.get(name) or f"{name} is not in this version of Quire", param=name)


def check_extra(extra: dict[str, Any]) -> None:
    """Unknown fields are let through, as every server of this API does, and reported once."""
    for name in _UNBUILT_EXTRA:
        if extra.get(name):
            raise NotBuiltError(_HINTS.get(name) or f"{name} is not in this version of Quire", param=name)
    for name in extra:
        if name in GUIDED or name in (GUIDED_WHITESPACE, "best_of"):
            continue
        if extra[name] is not None and name not in _warned and len(_warned) < _WARNED_FIELDS:
            _warned.add(name)
            once(log, logging.WARNING, "Requests have the field %s, which is unknown here and has no effect",
                 ascii(name[:64]))  # fmt: skip
    forget_unused(extra)


def forget_unused(extra: dict[str, Any] | None) -> None:
    """A request lives until its answer is whole; lists and objects that nobody will look at do not."""
    known = (*GUIDED, GUIDED_WHITESPACE, *_UNBUILT_EXTRA)
    for name in [name for name, value in (extra or {}).items() if isinstance(value, list | dict) and name not in known]:
        del extra[name]  # type: ignore[union-attr]


def _check_stops(stops: Sequence[str], options: ServerConfig) -> None:
    _check_most("stop", len(stops), options.max_stop_strings, "max-stop-strings", "strings")
    longest = max(map(len, stops))
    _check_most("stop", longest, options.max_stop_length, "max-stop-length", "characters in one string")


def _check_most(name: str, value: int, limit: int, flag: str | None, what: str = "") -> None:
    if value > limit:
        where = f" (--{flag})" if flag else ""
        raise InputError(f"{name} has {value} {what}; the limit is {limit}{where}" if what else
                         f"{name} is {value}; the limit is {limit}{where}", param=name, value=value)  # fmt: skip


# ---- products that a small body can make large: what it brings, and what it asks for, times prompts times n ---------
# Parameters are sent to the engine once per call (engine/together.py), but every answer is held to them, and holds its
# prompt.


def check_bytes(
    prompts: Sequence[Prompt], params: SamplingParams | PoolingParams, salt: str | None, options: ServerConfig
) -> None:
    """n × (prompts × bytes of the parameters + bytes of all prompts)."""
    is_pooled = isinstance(params, PoolingParams)
    n, large = (1, _LARGE_OF_POOLING) if isinstance(params, PoolingParams) else (params.n, _LARGE)
    if n * len(prompts) == 1:
        return  # no more than the body
    sizes = {name: _size(name, getattr(params, field)) for field, name in large.items() if getattr(params, field)}
    sizes["cache_salt"] = len(salt or "")
    own, texts = sum(sizes.values()), sum(map(_prompt_size, prompts))
    size, limit = n * (len(prompts) * own + texts), options.max_fan_out_bytes
    if size > limit:
        largest = max(sizes, key=lambda name: sizes[name])
        raise InputError(
            f"n ({n}) times {len(prompts)} prompts with {own} bytes of parameters (most of them {largest}), and "
            f"{texts} bytes of prompts in all, is {size} bytes; the limit is {limit} (--max-fan-out-bytes)",
            param=largest if len(prompts) * own > texts else "input" if is_pooled else "prompt",
            value=size,
        )


def check_size(what: str, size: int, options: ServerConfig, *, param: str) -> None:
    """Bytes that a request comes to once texts are paired, or tokens have results."""
    if size > options.max_fan_out_bytes:
        raise InputError(
            f"{what} is {size} bytes; the limit is {options.max_fan_out_bytes} (--max-fan-out-bytes)",
            param=param,
            value=size,
        )


def check_sequences(count: int, options: ServerConfig, *, param: str, what: str) -> None:
    _check_most(param, count, options.max_sequences_per_request, "max-sequences-per-request", what)


def check_logprobs(requests: Sequence[PreparedRequest], vocab_size: int, options: ServerConfig) -> None:
    """n × positions × log probabilities at each, of answers at their longest and of prompts."""
    params, limit = requests[0].params, options.max_logprobs_per_request
    named = len(params.logprob_token_ids or ())
    each = 0 if params.logprobs is None and not named else _at_each(params.logprobs or 0, vocab_size) + named
    of_prompts = 0 if params.prompt_logprobs is None else _at_each(params.prompt_logprobs, vocab_size)
    if not each and not of_prompts:
        return
    tokens = params.n * sum(one.requests[0].max_tokens for one in requests)
    prompts = params.n * sum(len(one.token_ids) for one in requests)
    total = tokens * each + prompts * of_prompts
    if total > limit:
        raise InputError(
            f"n ({params.n}) times {len(requests)} prompts may have {tokens} tokens of answers with {each} log "
            f"probabilities each, and {prompts} of prompts with {of_prompts} each: {total}; the limit is {limit} "
            "(--max-logprobs-per-request): ask for fewer logprobs, or give a max_tokens",
            param="logprobs" if tokens * each >= prompts * of_prompts else "prompt_logprobs",
            value=total,
        )


def _at_each(most_likely: int, vocab_size: int) -> int:
    """And the token itself."""
    return (vocab_size if most_likely == -1 else most_likely) + 1


def _prompt_size(prompt: Prompt) -> int:
    embeds = len(prompt.embeds) if isinstance(prompt.embeds, str) else 0
    return _BYTES_PER_ID * len(prompt.token_ids or ()) + len(prompt.text or "") + embeds


def _size(name: str, value: Any) -> int:
    try:
        return len(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as wrong:
        raise InputError(f"{name} cannot be sent to the engine: {wrong}", param=name) from None
