"""Products that a small body can make large: what it brings, and what it asks for, times prompts times n.

In: the prompts and parameters of one call, before and after tokenizing. Out: nothing, or one InputError that names the
product and the limit. Parameters are sent to the engine once per call (engine/together.py), but every answer is held to
them, and holds its prompt. Must not know: dialects, engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.config.server import ServerConfig
from quire.engine.inputs import PreparedRequest
from quire.schema.errors import InputError
from quire.schema.params import SamplingParams
from quire.schema.prompt import Prompt

_BYTES_PER_ID = 8  # a token id in a list
# Parameters of any size, each with the name that a request has for it.
_LARGE = {
    "structured_outputs": "structured_outputs", "logit_bias": "logit_bias", "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words", "stop": "stop", "stop_token_ids": "stop_token_ids",
    "logprob_token_ids": "logprob_token_ids", "extra_args": "vllm_xargs",
}  # fmt: skip


def check_bytes(prompts: Sequence[Prompt], params: SamplingParams, salt: str | None, options: ServerConfig) -> None:
    """n × (prompts × bytes of the parameters + bytes of all prompts)."""
    if params.n * len(prompts) == 1:
        return  # no more than the body
    sizes = {name: _size(name, getattr(params, field)) for field, name in _LARGE.items() if getattr(params, field)}
    sizes["cache_salt"] = len(salt or "")
    own, texts = sum(sizes.values()), sum(map(_prompt_size, prompts))
    found, limit = params.n * (len(prompts) * own + texts), options.max_fan_out_bytes
    if found > limit:
        largest = max(sizes, key=lambda name: sizes[name])
        raise InputError(
            f"n ({params.n}) times {len(prompts)} prompts with {own} bytes of parameters (most of them {largest}), and "
            f"{texts} bytes of prompts in all, is {found} bytes; the limit is {limit} (--max-fan-out-bytes)",
            param=largest if len(prompts) * own > texts else "prompt",
            value=found,
        )


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
    found = tokens * each + prompts * of_prompts
    if found > limit:
        raise InputError(
            f"n ({params.n}) times {len(requests)} prompts may have {tokens} tokens of answers with {each} log "
            f"probabilities each, and {prompts} of prompts with {of_prompts} each: {found}; the limit is {limit} "
            "(--max-logprobs-per-request): ask for fewer logprobs, or give a max_tokens",
            param="logprobs" if tokens * each >= prompts * of_prompts else "prompt_logprobs",
            value=found,
        )


def _at_each(most_likely: int, vocab_size: int) -> int:
    """And the token itself."""
    return (vocab_size if most_likely == -1 else most_likely) + 1


def _prompt_size(prompt: Prompt) -> int:
    return _BYTES_PER_ID * len(prompt.token_ids or ()) + len(prompt.text or "")


def _size(name: str, value: Any) -> int:
    try:
        return len(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as wrong:
        raise InputError(f"{name} cannot be sent to the engine: {wrong}", param=name) from None
