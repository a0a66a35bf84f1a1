"""POST /v1/completions: prompts in, continuations out.

In: a CompletionRequest. Out: one JSON answer, or its chunks. Choice i of prompt p has index p * n + i. Both forms are
made from the same results; a chunk that holds nothing but text is put together from bytes encoded beforehand.
Must not know: engines, sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.config.server import ServerConfig
from quire.engine.inputs import PreparedRequest
from quire.schema.errors import InputError
from quire.schema.outputs import CompletionOutput, RequestOutput
from quire.schema.params import SamplingParams
from quire.schema.prompt import Prompt
from quire.server.openai.envelope import Envelope, encode
from quire.server.openai.limits import check_request
from quire.server.openai.logprobs import TokenNames, completion_logprobs, prompt_logprobs
from quire.server.openai.params import Opened, fitting_ids, most_tokens, open_requests, sampling_params
from quire.server.openai.protocol import CompletionRequest
from quire.server.route import HttpCall
from quire.server.served import ServedModel
from quire.server.stream import fold, rendered, send_events

DEFAULT_MAX_TOKENS = 16
_PLAIN_END = b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'


async def create_completion(call: HttpCall, request: CompletionRequest) -> None:
    """Continue a text.

    Streams with `stream: true`.
    """
    ready = await call.apart(prepare_completion, call.state.options, call.model, request)
    public_id = f"cmpl-{call.request_id(request.request_id)}"
    opened = await open_requests(
        call, request, public_id, ready.prompts, ready.params, add_special_tokens=ready.special, most=ready.most
    )
    with opened.flow:
        answer = CompletionAnswer(call.state.options, call.model, request, opened, public_id, only_echo=ready.only_echo)
        if request.echo:
            await call.model.engine.read(opened.num_prompt_tokens, answer.find_echoes)
        if request.stream:
            await send_events(call, opened.flow, answer)
        else:
            results = await fold(call, opened.flow)
            await call.reply(await rendered(call, results.values(), answer.whole, results))


class PreparedCompletion(NamedTuple):
    """What would be sent to the engine."""

    prompts: list[Prompt]
    params: SamplingParams
    most: int | None  # the max_tokens the client asked for
    special: bool  # special tokens are added
    only_echo: bool


def prepare_completion(options: ServerConfig, model: ServedModel, request: CompletionRequest) -> PreparedCompletion:
    check_request(request, options, num_prompts(request))
    prompts = read_prompts(request, model.max_model_len)
    only_echo = bool(request.echo) and request.max_tokens == 0
    asked = None if only_echo else request.max_tokens
    most = 1 if only_echo else most_tokens(model, asked, DEFAULT_MAX_TOKENS)
    further: dict[str, Any] = {}
    if request.logprobs is None and request.logprob_token_ids:
        further["logprobs"] = 0
    if request.logprobs is not None:
        further["logprobs"] = request.logprobs
        if request.echo and request.prompt_logprobs is None:
            further["prompt_logprobs"] = request.logprobs
    params = sampling_params(request, model, max_tokens=most, **further)
    return PreparedCompletion(prompts, params, asked, request.add_special_tokens is not False, only_echo)


def num_prompts(request: CompletionRequest) -> int:
    """Told before a single one is read."""
    given: Any = request.prompt
    if given is None or (not given and given != ""):
        raise InputError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    return 1 if isinstance(given, str) or isinstance(given[0], int) else len(given)


def read_prompts(request: CompletionRequest, max_model_len: int) -> list[Prompt]:
    """Text, ids, or a list of either, as a list of prompts. There are some (num_prompts)."""
    given: Any = request.prompt
    if isinstance(given, str):
        return [Prompt(text=given)]
    if isinstance(given[0], int):
        return [Prompt(token_ids=fitting_ids(given, request, max_model_len))]
    if isinstance(given[0], str):
        return [Prompt(text=text) for text in given]
    return [Prompt(token_ids=fitting_ids(ids, request, max_model_len)) for ids in given]


class _CompletionChoiceStream:
    """One growing answer."""

    __slots__ = ("begun", "head", "index", "num_tokens", "offset")

    def __init__(self, index: int, head: bytes) -> None:
        self.index = index
        self.head = head + b'{"index":%d,"text":' % index
        self.begun = False
        self.num_tokens = 0
        self.offset = 0  # where the next token's text begins


class CompletionAnswer:
    """One call's results as OpenAI's text completions."""

    def __init__(
        self, options: ServerConfig, model: ServedModel, request: CompletionRequest, opened: Opened, public_id: str,
        *, only_echo: bool,
    ) -> None:  # fmt: skip
        self._request, self._opened = request, opened
        self._tokenizer = model.engine.tokenizer
        self._only_echo = only_echo
        self._n = request.n or 1
        self._envelope = Envelope(options, model, request, opened, public_id, "text_completion")
        as_ids = request.return_tokens_as_token_ids
        as_ids = options.return_tokens_as_token_ids if as_ids is None else as_ids
        self._names = TokenNames(self._tokenizer, as_ids=as_ids)
        total = len(opened.requests) * self._n
        self._choices = [_CompletionChoiceStream(index, self._envelope.head) for index in range(total)]
        self._echoes: list[str] = []
        self._with_logprobs = request.logprobs is not None or bool(request.logprob_token_ids)
        self._is_plain = not self._with_logprobs and not request.return_token_ids and not self._envelope.continuous
        self._needs_prompt = bool(request.echo) and request.logprobs is not None
        self._held: dict[str, RequestOutput] = {}  # until the prompt's log probabilities are there
        self._prompts: dict[str, Sequence[Any]] = {}

    def find_echoes(self) -> None:
        """Before the first result, where prompts are to be shown."""
        self._echoes = [self._echo_of(one) for one in self._opened.requests]

    # ---- streamed ----------------------------------------------------------------------------------------------

    def chunk(self, results: list[RequestOutput]) -> bytes:
        parts: list[bytes] = []
        for found in results:
            result = self._with_prompt(found) if self._needs_prompt else found
            if result is None:
                continue
            if result.finished:
                self._envelope.note_cached(result.request_id, result.num_cached_tokens)
            first = self._opened.indices[result.request_id] * self._n
            for output in result.outputs:
                parts.append(self._event(self._choices[first + output.index], result, output))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def end(self) -> bytes:
        if not self._envelope.include_usage:
            return b""
        return self._envelope.usage_chunk(sum(choice.num_tokens for choice in self._choices))

    def _event(self, choice: _CompletionChoiceStream, result: RequestOutput, output: CompletionOutput) -> bytes:
        if self._is_plain and choice.begun and output.finish_reason is None:
            choice.num_tokens += len(output.token_ids)
            return choice.head + encode(output.text) + _PLAIN_END if output.text else b""
        first = not choice.begun
        shown = self._choice(choice, result, output)
        ids = shown["prompt_token_ids"] if first else None
        if self._is_plain and not shown["text"] and shown["finish_reason"] is None and not first:
            return b""
        fields = {
            "index": choice.index,
            "text": shown["text"],
            "logprobs": shown["logprobs"],
            "finish_reason": shown["finish_reason"],
            "stop_reason": shown["stop_reason"],
            "prompt_token_ids": ids,
            "token_ids": shown["token_ids"],
        }
        end = b"]}\n\n"
        if self._envelope.continuous:
            prompt_tokens = len(result.prompt_token_ids or ())
            end = b'],"usage":' + encode(self._envelope.usage(choice.num_tokens, prompt_tokens)) + b"}\n\n"
        return self._envelope.head + encode(fields) + end

    def _with_prompt(self, result: RequestOutput) -> RequestOutput | None:
        """None while the prompt's log probabilities, which come before all text, are not there yet."""
        if result.request_id in self._prompts:
            return result
        if (earlier := self._held.pop(result.request_id, None)) is not None:
            earlier.add(result)
            result = earlier
        if result.prompt_logprobs is None:
            self._held[result.request_id] = result
            return None
        self._prompts[result.request_id] = result.prompt_logprobs
        return result

    # ---- whole -------------------------------------------------------------------------------------------------

    def whole(self, results: dict[str, RequestOutput]) -> bytes:
        shown = []
        for prepared in self._opened.requests:
            result = results[prepared.request_id]
            self._envelope.note_cached(prepared.request_id, result.num_cached_tokens)
            if self._needs_prompt:
                self._prompts[prepared.request_id] = result.prompt_logprobs or ()
            first = self._opened.indices[prepared.request_id] * self._n
            for output in sorted(result.outputs, key=lambda one: one.index):
                shown.append(self._choice(self._choices[first + output.index], result, output))
        return self._envelope.whole(shown, sum(choice.num_tokens for choice in self._choices))

    # ---- both --------------------------------------------------------------------------------------------------

    def _choice(
        self, choice: _CompletionChoiceStream, result: RequestOutput, output: CompletionOutput
    ) -> dict[str, Any]:
        """A choice of a whole answer, or what is new in one."""
        request = self._request
        text, token_ids, positions = output.text, output.token_ids, list(output.logprobs or ())
        if self._only_echo:
            text, token_ids, positions = "", [], []
        choice.num_tokens += len(token_ids)
        first, choice.begun = not choice.begun, True
        all_ids: Sequence[int] = token_ids
        all_positions: Sequence[Any] = positions
        echo, num_echoed = "", 0
        if first and request.echo:
            echo = self._echoes[self._opened.indices[result.request_id]]
            text = echo + text
            if self._needs_prompt:
                num_echoed = len(result.prompt_token_ids or ())
                all_ids = [*(result.prompt_token_ids or ()), *token_ids]
                all_positions = [*self._prompts[result.request_id], *positions]
            else:
                choice.offset = len(echo)
        logprobs = None
        if self._with_logprobs:
            logprobs, choice.offset = completion_logprobs(
                self._names, all_ids, all_positions, choice.offset, echo=echo, num_echoed=num_echoed,
                skips_special=request.skip_special_tokens is not False,
            )  # fmt: skip
        wanted = request.prompt_logprobs is not None
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": token_ids if request.return_token_ids else None,
            "prompt_logprobs": prompt_logprobs(result.prompt_logprobs) if wanted else None,
            "prompt_token_ids": result.prompt_token_ids if request.return_token_ids else None,
            "routed_experts": None,
        }

    def _echo_of(self, prepared: PreparedRequest) -> str:
        """The prompt as it was given, unless only a part of it was used; of ids the whole text, as `tokens` has it."""
        if prepared.text is not None and self._request.truncate_prompt_tokens is None:
            return prepared.text
        return "" if self._tokenizer is None else self._tokenizer.decode(prepared.token_ids, skip_special_tokens=False)
