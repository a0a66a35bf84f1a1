"""use_beam_search: what a request that searches may say, and how its search is opened.

`n` is the number of answers and the width of the search, unless a larger `best_of` is. What steers sampling has no
meaning here and is refused by name; the model's generation config has no say. Must not know: dialects' answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.engine.inputs import Options, PreparedRequest
from quire.llm.beam_limits import BeamLimits
from quire.schema.errors import InputError, NotBuiltError
from quire.schema.params import BeamSearchParams, StructuredOutputsParams
from quire.server.openai.protocol import GenerateRequest
from quire.server.route import HttpCall

if TYPE_CHECKING:
    from quire.llm.beam_flow import BeamFlow

# fields that steer sampling, each with the value that asks for nothing
_STEERING: dict[str, Any] = {
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "top_p": 1, "top_k": -1, "min_p": 0,
    "logit_bias": None, "stop": None, "stop_token_ids": None, "min_tokens": 0, "allowed_token_ids": None,
    "bad_words": None, "logprob_token_ids": None, "thinking_token_budget": None, "vllm_xargs": None,
    "repetition_detection": None, "prompt_logprobs": None,
}  # fmt: skip


def beam_width(request: GenerateRequest) -> int:
    """How many beams; 1 where nothing is searched but the answers are drawn."""
    best_of = (request.model_extra or {}).get("best_of")
    n = request.n or 1
    if best_of is None:
        return n
    if not isinstance(best_of, int) or isinstance(best_of, bool) or best_of < n:
        raise InputError(f"best_of is {best_of!r:.100}; it must be a number of at least n ({n})", param="best_of")
    return best_of


def check_beams(request: GenerateRequest) -> None:
    """Whatever can be told without a model."""
    if not request.use_beam_search:
        if request.length_penalty is not None and request.length_penalty != 1.0:
            raise InputError("length_penalty is for beam search: use_beam_search is not true", param="length_penalty")
        return
    if request.stream:
        raise InputError("use_beam_search cannot be streamed: which beam is best is known at the end", param="stream")
    for name, idle in _STEERING.items():
        if (value := getattr(request, name)) and value != idle:
            raise InputError(f"{name} cannot be given with use_beam_search: no token is drawn", param=name)
    if request.prompt_logprobs is not None:
        raise InputError("prompt_logprobs cannot be given with use_beam_search", param="prompt_logprobs")


def open_beams(
    call: HttpCall, request: GenerateRequest, requests: Sequence[PreparedRequest], options: Options,
    constraint: StructuredOutputsParams | None,
) -> BeamFlow:  # fmt: skip
    """None of `requests` runs yet; all have the same parameters."""
    params = requests[0].params
    if params.prompt_logprobs is not None:
        raise InputError("echo with logprobs cannot be given with use_beam_search", param="echo")
    model, server = call.model, call.state
    structured = model.config.structured_outputs_config
    constrained, thinks = constraint is not None, model.parsers.reasoning is not None
    if constrained and thinks and not structured.enable_in_reasoning:
        raise NotBuiltError(
            "use_beam_search with a form of the answer holds from the first token on and leaves no room for thought: "
            "in this version of Quire it is not for a server with --reasoning-parser",
            param="use_beam_search",
        )
    beams = BeamSearchParams(
        beam_width=beam_width(request),
        max_tokens=max(one.requests[0].max_tokens for one in requests),
        ignore_eos=params.ignore_eos,
        temperature=0.0 if request.temperature is None else request.temperature,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
        structured_outputs=constraint,
    )
    most = BeamLimits(
        server.options.max_beam_tokens, server.options.max_logprobs_per_request, " (--max-beam-tokens)",
        " (--max-logprobs-per-request)",
    )  # fmt: skip
    return model.engine.open_beams(requests, beams, options, most)
