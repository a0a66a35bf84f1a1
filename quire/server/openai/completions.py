"""POST /v1/completions: prompts in, continuations out.

In: a CompletionRequest. Out: one JSON answer, or its chunks. Choice i of prompt p has index p * n + i. A whole answer
is the fold of what a stream writes piece by piece; a chunk that holds nothing but text is put together from bytes
encoded beforehand. Must not know: engines, sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.config.server import ServerConfig
from quire.engine.inputs import InputProcessor, PreparedRequest
from quire.schema.errors import InputError
from quire.schema.outputs import CompletionOutput, RequestOutput
from quire.schema.params import SamplingParams
from quire.schema.prompt import Prompt
from quire.server.openai.envelope import Envelope, WireTemplate, encode, to_json
from quire.server.openai.limits import check_request
from quire.server.openai.logprobs import TokenNames, completion_logprobs, prompt_logprobs
from quire.server.openai.params import Opened, fitting_ids, most_tokens, open_requests, sampling_params
from quire.server.openai.protocol import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionRequest,
    CompletionResponse,
)
from quire.server.route import HttpCall
from quire.server.served import ServedModel
from quire.server.stream import drained, send_events

DEFAULT_MAX_TOKENS = 16
# a chunk that holds nothing but text, in two halves
_PLAIN = CompletionChunkChoice(
    index=0, text="", logprobs=None, finish_reason=None, stop_reason=None, prompt_token_ids=None, token_ids=None
)
_PLAIN_START, _PLAIN_END = (to_json(_PLAIN) + b"]}\n\n").split(b'""')
_LAST = WireTemplate(
    CompletionChunkChoice(
        index=-1, text="<text>", logprobs=None, finish_reason="<why>", stop_reason="<stop>", prompt_token_ids=None,
        token_ids=None,
    ),
    -1, "<text>", "<why>", "<stop>",
)  # fmt: skip


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
            await call.reply(await drained(call, opened.flow, answer))


class PreparedCompletion(NamedTuple):
    """What would be sent to the engine."""

    prompts: list[Prompt]
    params: SamplingParams
    most: int | None  # the max_tokens the client asked for
    special: bool  # special tokens are added
    only_echo: bool


def prepare_completion(options: ServerConfig, model: ServedModel, request: CompletionRequest) -> PreparedCompletion:
    check_request(request, options, num_prompts(request))
    prompts = read_prompts(request, model.engine.front.inputs)
    only_echo = bool(request.echo) and request.max_tokens == 0
    requested = None if only_echo else request.max_tokens
    most = 1 if only_echo else most_tokens(model, requested, DEFAULT_MAX_TOKENS)
    further: dict[str, Any] = {}
    if request.logprobs is None and request.logprob_token_ids:
        further["logprobs"] = 0
    if request.logprobs is not None:
        further["logprobs"] = request.logprobs
        if request.echo and request.prompt_logprobs is None:
            further["prompt_logprobs"] = request.logprobs
    params = sampling_params(request, model, max_tokens=most, **further)
    return PreparedCompletion(prompts, params, requested, request.add_special_tokens is not False, only_echo)


def num_prompts(request: CompletionRequest) -> int:
    """Told before a single one is read."""
    prompt: Any = request.prompt
    embeds = len(embeds_of(request))
    if prompt is None or (not prompt and prompt != ""):
        if not embeds:
            raise InputError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
        return embeds
    return embeds + (1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt))


def embeds_of(request: CompletionRequest) -> list[str]:
    embeds = request.prompt_embeds or []
    return [embeds] if isinstance(embeds, str) else embeds


def read_prompts(request: CompletionRequest, inputs: InputProcessor) -> list[Prompt]:
    """Text, ids, or a list of either, as a list of prompts, behind those that are embeddings. There are some
    (num_prompts)."""
    prompt: Any = request.prompt
    embeds = [Prompt(embeds=one) for one in embeds_of(request)]
    if embeds and request.echo:
        raise InputError("echo cannot be given with prompt_embeds: embeddings have no text", param="echo")
    if not prompt and prompt != "":
        return embeds
    if isinstance(prompt, str):
        return [*embeds, Prompt(text=prompt)]
    if isinstance(prompt[0], int):
        return [*embeds, Prompt(token_ids=fitting_ids(prompt, request, inputs))]
    if isinstance(prompt[0], str):
        return [*embeds, *(Prompt(text=text) for text in prompt)]
    return [*embeds, *(Prompt(token_ids=fitting_ids(ids, request, inputs)) for ids in prompt)]


class _TextChoice:
    """One growing answer. Its pieces are collected only where the answer is to be whole."""

    __slots__ = (
        "begun", "end", "index", "logprobs", "num_tokens", "offset", "pieces", "plain_start", "prompt", "token_ids",
    )  # fmt: skip

    def __init__(self, index: int, prompt: int) -> None:
        self.index, self.prompt = index, prompt
        self.plain_start = b""
        self.begun = False
        self.num_tokens = 0
        self.offset = 0  # where the next token's text begins
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: dict[str, list[Any]] | None = None
        self.end: tuple[str | None, int | str | None] = None, None


_Piece = tuple[str, Sequence[int], Any, bool]  # text, token ids and log probabilities; whether it is the first


class CompletionAnswer:
    """One call's results as OpenAI's text completions. `_piece` is the one producer of both forms: a stream writes its
    pieces, a whole answer is their fold."""

    def __init__(
        self, options: ServerConfig, model: ServedModel, request: CompletionRequest, opened: Opened, public_id: str,
        *, only_echo: bool,
    ) -> None:  # fmt: skip
        self._request, self._opened = request, opened
        self._tokenizer = model.engine.tokenizer
        self._only_echo = only_echo
        self._n = request.n or 1
        self._envelope = Envelope(options, model, request, opened, public_id, CompletionChunk)
        as_ids = request.return_tokens_as_token_ids
        as_ids = options.return_tokens_as_token_ids if as_ids is None else as_ids
        self._names = TokenNames(self._tokenizer, as_ids=as_ids)
        total = len(opened.requests) * self._n
        self._choices = [_TextChoice(index, index // self._n) for index in range(total)]
        self._echoes: list[str] = []
        self._with_logprobs = request.logprobs is not None or bool(request.logprob_token_ids)
        self._is_plain = not self._with_logprobs and not request.return_token_ids and not self._envelope.continuous
        self._needs_prompt = bool(request.echo) and request.logprobs is not None
        self._waiting: dict[str, RequestOutput] = {}  # for the log probabilities of their prompts
        self._prompts: dict[str, Sequence[Any]] = {}  # these, by request

    def find_echoes(self) -> None:
        """Before the first result, where prompts are to be shown."""
        self._echoes = [self._echo_of(one) for one in self._opened.requests]

    def _ready(self, results: Sequence[RequestOutput]) -> Sequence[RequestOutput]:
        """Those of which something can be shown."""
        ready = []
        for one in results:
            result = self._with_prompt(one) if self._needs_prompt else one
            if result is None:
                continue
            if result.finished:
                self._envelope.note_cached(result.request_id, result.num_cached_tokens)
            if result.prompt_logprobs is not None:  # before the next one, which may be of the same request
                self._prompts[result.request_id] = result.prompt_logprobs
            ready.append(result)
        return ready

    def _with_prompt(self, result: RequestOutput) -> RequestOutput | None:
        """None while the prompt's log probabilities, which come before all text, are not there yet."""
        if result.request_id in self._prompts:
            return result
        if (earlier := self._waiting.pop(result.request_id, None)) is not None:
            earlier.add(result)
            result = earlier
        if result.prompt_logprobs is None and not result.finished:
            self._waiting[result.request_id] = result
            return None
        return result

    def _piece(self, choice: _TextChoice, result: RequestOutput, output: CompletionOutput) -> _Piece:
        """What is new in an answer: the one way from results to what is shown of them."""
        if self._is_plain and choice.begun:
            choice.num_tokens += len(output.token_ids)
            return output.text, output.token_ids, None, False
        request = self._request
        text, token_ids, positions = output.text, output.token_ids, output.logprobs or ()
        if self._only_echo:
            text, token_ids, positions = "", [], ()
        choice.num_tokens += len(token_ids)
        first, choice.begun = not choice.begun, True
        all_ids: Sequence[int] = token_ids
        all_positions: Sequence[Any] = positions
        echo, num_echoed = "", 0
        if first and request.echo:
            echo = self._echoes[choice.prompt]
            text = echo + text
            if self._needs_prompt and result.request_id in self._prompts:
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
        return text, token_ids, logprobs, first

    # ---- streamed ----------------------------------------------------------------------------------------------

    def chunk(self, results: list[RequestOutput]) -> bytes:
        parts: list[bytes] = []
        for result in self._ready(results):
            first = self._opened.indices[result.request_id] * self._n
            for output in result.outputs:
                parts.append(self._event(self._choices[first + output.index], result, output))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def end(self) -> bytes:
        if not self._envelope.include_usage:
            return b""
        return self._envelope.usage_chunk(sum(choice.num_tokens for choice in self._choices))

    def _event(self, choice: _TextChoice, result: RequestOutput, output: CompletionOutput) -> bytes:
        text, token_ids, logprobs, first = self._piece(choice, result, output)
        if self._is_plain:
            if not first and output.finish_reason is None:
                return choice.plain_start + encode(text) + _PLAIN_END if text else b""
            if first:
                choice.plain_start = self._envelope.head + _PLAIN_START.replace(b"0", b"%d" % choice.index, 1)
            last = _LAST.fill(choice.index, text, output.finish_reason, output.stop_reason)
            return self._envelope.head + last + b"]}\n\n"
        shows_ids = self._request.return_token_ids
        prompt_ids = self._opened.requests[choice.prompt].token_ids
        news = CompletionChunkChoice(
            index=choice.index,
            text=text,
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            prompt_token_ids=list(prompt_ids) if shows_ids and first else None,
            token_ids=list(token_ids) if shows_ids else None,
        )
        usage = self._envelope.usage(choice.num_tokens, len(prompt_ids)) if self._envelope.continuous else None
        return self._envelope.event(news, usage)

    # ---- whole -------------------------------------------------------------------------------------------------

    def take(self, results: list[RequestOutput]) -> None:
        for result in self._ready(results):
            first = self._opened.indices[result.request_id] * self._n
            for output in result.outputs:
                self._collect(self._choices[first + output.index], result, output)

    def _collect(self, choice: _TextChoice, result: RequestOutput, output: CompletionOutput) -> None:
        text, token_ids, logprobs, _ = self._piece(choice, result, output)
        choice.pieces.append(text)
        if self._request.return_token_ids:
            choice.token_ids += token_ids
        if choice.logprobs is None:
            choice.logprobs = logprobs
        else:
            for name, entries in choice.logprobs.items():
                entries += logprobs[name]
        choice.end = output.finish_reason, output.stop_reason

    def whole(self) -> bytes:
        """After the last result."""
        choices = [self._whole_choice(choice) for choice in self._choices if choice.begun]
        return to_json(
            self._envelope.whole(CompletionResponse, choices, sum(choice.num_tokens for choice in self._choices))
        )

    def _whole_choice(self, choice: _TextChoice) -> CompletionChoice:
        request, prepared = self._request, self._opened.requests[choice.prompt]
        finish_reason, stop_reason = choice.end
        logprobs: Any = choice.logprobs
        positions = self._prompts.get(prepared.request_id) if request.prompt_logprobs is not None else None
        of_prompt: Any = prompt_logprobs(positions)
        return CompletionChoice(
            index=choice.index,
            text="".join(choice.pieces),
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            token_ids=choice.token_ids if request.return_token_ids else None,
            prompt_logprobs=of_prompt,
            prompt_token_ids=list(prepared.token_ids) if request.return_token_ids else None,
            routed_experts=None,
        )

    def _echo_of(self, prepared: PreparedRequest) -> str:
        """The prompt as it was given, unless only a part of it was used; of ids the whole text, as `tokens` has it."""
        if prepared.text is not None and self._request.truncate_prompt_tokens is None:
            return prepared.text
        return "" if self._tokenizer is None else self._tokenizer.decode(prepared.token_ids, skip_special_tokens=False)
