"""LLM: many prompts in, their answers out, in order. The engine runs in this process by default.

In: prompts, conversations, parameters. Out: lists of RequestOutput (or BeamSearchOutput). Either every prompt of a
call is taken or, when one is refused, none: where prompts run while later ones are read (those with media, and texts
that are pooled), the ones before are aborted. Whatever interrupts a call leaves the engine ready for the next one.
Calls from several threads take turns; control verbs come between the steps of a call. Must not know: how a request
is run.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

import msgspec

from quire.base.turns import ThreadTurns, in_turn
from quire.engine.adapters import located, pair_adapters
from quire.engine.inputs import Options, PreparedRequest
from quire.llm.engine import LLMEngine
from quire.llm.progress import Progress
from quire.llm.verbs import verb
from quire.observe.reader import Metric
from quire.schema.adapters import LoRARequest
from quire.schema.errors import InputError, NotBuiltError, QuireError, make_each, name_prompt
from quire.schema.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from quire.schema.params import BeamSearchParams, PoolingParams, RequestOutputKind, ResolvedParams, SamplingParams
from quire.schema.prompt import TokensPrompt

if TYPE_CHECKING:
    from quire.llm.beam import BeamSearchOutput
    from quire.llm.media_ahead import MediaAhead
    from quire.llm.pooling import PoolingCalls
    from quire.text.tokenizer import Tokenizer

Tqdm = bool | Callable[..., Any]
Conversation = Sequence[Mapping[str, Any]]
Item = TypeVar("Item")


class LLM:
    """A model to generate with. `options` are those of EngineArgs; unset `model` is the small one Quire comes with."""

    engine_class: ClassVar[type[LLMEngine]] = LLMEngine

    def __init__(self, model: str | None = None, **options: Any) -> None:
        options.setdefault("disable_log_stats", True)
        from quire.config import EngineArgs  # lazy

        engine_args = EngineArgs(model=model, **options)
        self.llm_engine = self.engine_class.from_engine_args(engine_args, usage_context="LLM_CLASS")
        self.model_config = self.llm_engine.model_config
        self.input_processor = self.llm_engine.input_processor
        self.io_processor = None
        self.default_sampling_params: dict[str, Any] = dict(self.model_config.default_sampling)
        self.turns = ThreadTurns()
        self._ids = itertools.count()
        self._finalizer = weakref.finalize(self, self.llm_engine.front.close)

    def close(self) -> None:
        """Free the model and its memory. `del llm` does the same."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---- generating --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Any = None,
        use_tqdm: Tqdm = True,
        lora_request: Any = None,
        priority: Sequence[int] | int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts. Parameters: one for all, one for each, or the model's defaults."""
        options = Options(tokenization_kwargs=tokenization_kwargs)
        listed = _join_legacy(prompts, prompt_token_ids)
        return self._answer(listed, sampling_params, use_tqdm, priority, options, lora_request)

    @in_turn
    def _answer(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: Tqdm,
        priority: Sequence[int] | int | None,
        options: Options,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        adapters = [None] * len(prompts) if lora_request is None else pair_adapters(lora_request, len(prompts))
        params = pair(
            self.get_default_sampling_params() if sampling_params is None else sampling_params,
            len(prompts),
            SamplingParams,
            "sampling_params",
        )
        priorities = pair(0 if priority is None else priority, len(prompts), int, "priority")
        final = self._resolve_each(params)
        how = zip(params, priorities, adapters, strict=True)

        places = dict[str, int]()

        def prepared(prompts: Iterable[Any]) -> Iterator[PreparedRequest]:
            for prompt, (one, urgency, lora) in zip(prompts, how, strict=True):
                own = msgspec.structs.replace(options, priority=urgency, lora_request=lora)
                request_id = str(next(self._ids))
                places[request_id] = len(places)
                yield self._prepare(prompt, final[id(one)], own, request_id)

        try:
            if len(prompts) == 1 or not self.llm_engine.front.inputs.takes_media:
                return self._run(list(prepared(prompts)), use_tqdm)
            from quire.llm.media_ahead import MediaAhead  # lazy

            ahead: MediaAhead = MediaAhead(self.llm_engine.front.inputs, prompts)
            with closing(ahead):
                return self._run([], use_tqdm, _PromptsAhead(prepared(ahead), ahead, len(prompts)))
        except QuireError as failed:
            name_prompt(failed, places, len(prompts))
            raise

    def _resolve_each(self, params: Sequence[SamplingParams]) -> dict[int, ResolvedParams]:
        """By identity: what several prompts share is checked and sent once."""
        first = {id(one): place for place, one in reversed(list(enumerate(params)))}
        final = {}
        for key, place in first.items():
            try:
                final[key] = self._resolve(params[place])
            except InputError as wrong:
                if len(first) > 1:
                    wrong.at(f"sampling_params[{place}]")
                raise
        return final

    def _resolve(self, params: SamplingParams) -> ResolvedParams:
        """Only whole answers are handed out."""
        resolved = self.llm_engine.front.inputs.resolve(params)
        return msgspec.structs.replace(resolved, output_kind=RequestOutputKind.FINAL_ONLY)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Tqdm = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One conversation or a list of them, through the model's chat template."""
        prompts = self.preprocess_chat(
            messages,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        options = Options(continues=continue_final_message)
        return self._answer(list_prompts(prompts), sampling_params, use_tqdm, None, options, lora_request)

    def preprocess_chat(
        self,
        messages: Any,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[TokensPrompt]:
        """Conversations as token prompts, which every other method takes."""
        tokenizer = self.get_tokenizer()
        from quire.text.chat import tokenize_chat  # lazy

        how: dict[str, Any] = {
            "chat_template": chat_template,
            "content_format": chat_template_content_format,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "template_kwargs": chat_template_kwargs,
        }
        conversations = list_conversations(messages)
        if self.llm_engine.front.inputs.takes_media:
            from quire.llm.media_chat import tokenize_media_chat  # lazy

            inputs = self.llm_engine.front.inputs
            return make_each(
                "messages", conversations, lambda one: tokenize_media_chat(inputs, one, mm_processor_kwargs, how)
            )
        if mm_processor_kwargs is not None:
            raise NotBuiltError("mm_processor_kwargs: this model takes text only", param="mm_processor_kwargs")
        return make_each("messages", conversations, lambda one: tokenize_chat(tokenizer, one, **how))

    @in_turn
    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: Tqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` likeliest continuations of each prompt; at most `concurrency_limit` prompts at once."""
        if not isinstance(params, BeamSearchParams):
            raise InputError(f"params must be BeamSearchParams, got {type(params).__name__}", param="params")
        if concurrency_limit is not None and concurrency_limit < 1:
            raise InputError(f"concurrency_limit must be at least 1, got {concurrency_limit}")
        from quire.llm.beam_calls import BeamCalls  # lazy

        prompts = list_prompts(prompts)
        adapters = pair_adapters(lora_request, len(prompts))
        calls: BeamCalls = BeamCalls(self.llm_engine, self._prepare, self._run)
        return calls.search(prompts, params, adapters, use_tqdm, concurrency_limit)

    def _prepare(
        self, prompt: Any, params: SamplingParams | ResolvedParams, options: Options, request_id: str = ""
    ) -> PreparedRequest:
        request_id = request_id or str(next(self._ids))
        try:
            return self.llm_engine.front.prepare(request_id, prompt, params, options)
        except InputError as wrong:
            wrong.request_id = request_id
            raise

    def _run(
        self,
        requests: list[PreparedRequest],
        use_tqdm: Tqdm,
        coming: RequestsAhead | None = None,
        made: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """Turn the engine until all of these, and of `coming`, have ended; results of the requested kind, or what
        `made` makes of each, while a device computes the next."""
        engine, results = self.llm_engine, dict[str, Any]()
        mine = {one.request_id for one in requests}
        engine.add(requests)
        total = len(requests) if coming is None else coming.total
        bar = None
        try:
            if use_tqdm is not False:
                bar = Progress.make(use_tqdm, total=total, words="Processed prompts")
            while len(results) < total:
                if coming is not None and (new := coming.take(len(requests) - len(results))):
                    mine |= {one.request_id for one in new}  # first: whatever happens, they are aborted
                    engine.add(new)
                    requests += new
                done = [one for one in engine.step() if one.finished and one.request_id in mine]
                for result in done:
                    results[result.request_id] = result if made is None else made(result)
                if bar is not None:
                    bar.advance(done)
        except BaseException:
            engine.abort_request(mine - results.keys())
            raise
        finally:
            if bar is not None:
                bar.close()
        return [results[one.request_id] for one in requests]

    # ---- the model and the engine ------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        return self.llm_engine.get_tokenizer()

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Another tokenizer from now on, of Quire or transformers."""
        self.llm_engine.set_tokenizer(tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """From the model's generation config, unless generation_config='vllm'."""
        return self.llm_engine.front.default_params()

    def get_metrics(self) -> list[Metric]:
        """Every metric as it is now; needs disable_log_stats=False."""
        return self.llm_engine.get_metrics()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A control verb of engine/control.py."""
        return self.llm_engine.front.call(name, *args, **kwargs)

    apply_model = verb("apply_model")
    reset_prefix_cache = verb("reset_prefix_cache")
    reset_mm_cache = verb("reset_mm_cache")
    sleep = verb("sleep")
    wake_up = verb("wake_up")
    is_sleeping = verb("is_sleeping")
    add_lora = verb("add_lora", located)
    remove_lora = verb("remove_lora")

    def list_loras(self) -> set[int]:
        """Ids of loaded adapters."""
        return set(self.call("list_loras"))

    pin_lora = verb("pin_lora")
    start_profile = verb("start_profile")
    stop_profile = verb("stop_profile")

    # ---- pooling -----------------------------------------------------------------------------------------------

    @property
    def request_ids(self) -> Iterator[int]:
        return self._ids

    @cached_property
    def _pooling(self) -> PoolingCalls:
        from quire.llm.pooling import PoolingCalls  # lazy

        return PoolingCalls(self, self._run)

    @in_turn
    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Tqdm = True,
        lora_request: Any = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pooled hidden states as tensors. `pooling_task`: one that the model supports; unset is its first."""
        options = Options(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        return self._pooling.encode(
            list_prompts(prompts), pooling_params, pooling_task, use_tqdm, options, truncate_prompt_tokens
        )

    @in_turn
    def embed(
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Tqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One embedding per prompt."""
        options = Options(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        return self._pooling.embed(list_prompts(prompts), pooling_params, use_tqdm, options, truncate_prompt_tokens)

    @in_turn
    def classify(
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Tqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of the model's classes, per prompt."""
        options = Options(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        return self._pooling.classify(list_prompts(prompts), pooling_params, use_tqdm, options, truncate_prompt_tokens)

    def reward(
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Tqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The values of a reward model: one row per token, or per step."""
        return self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request, pooling_task="token_classify",
            truncate_prompt_tokens=truncate_prompt_tokens, tokenization_kwargs=tokenization_kwargs,
        )  # fmt: skip

    @in_turn
    def score(
        self,
        data_1: Any,
        data_2: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Tqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts fit each other: 1 to 1, 1 to N or N to N."""
        options = Options(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        return self._pooling.score(
            data_1, data_2, pooling_params, use_tqdm, options, truncate_prompt_tokens, chat_template
        )


class RequestsAhead(Protocol):
    """Requests of a call that are not all prepared yet."""

    @property
    def total(self) -> int: ...

    def take(self, num_running: int) -> list[PreparedRequest]:
        """Those that should run from now on, besides so many that do; where none runs, one at least, if any is left."""


class _PromptsAhead(NamedTuple):
    """Requests whose prompts are being read."""

    requests: Iterator[PreparedRequest]
    prompts: MediaAhead
    total: int

    def take(self, num_running: int) -> list[PreparedRequest]:
        """Those that are ready; where none is and none runs, the next."""
        new: list[PreparedRequest] = []
        while (self.prompts.is_ready or not num_running + len(new)) and (one := next(self.requests, None)) is not None:
            new.append(one)
        return new


def list_prompts(prompts: Any) -> list[Any]:
    """One prompt (text, ids or dict) or several -> a list. The first item tells which; ids are not copied."""
    prompts = _plain(prompts)
    if isinstance(prompts, (str, bytes, bytearray, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    items = prompts if isinstance(prompts, Sequence) else list(prompts)
    if len(items) and hasattr(_plain(items[0]), "__index__"):
        return [items]  # one prompt of token ids
    return [_plain(item) for item in items]


def _plain(value: Any) -> Any:
    """Arrays of numpy and torch as lists: an array has __index__ too, but is not a number."""
    return value.tolist() if hasattr(value, "tolist") else value


def pair(values: Any, num_prompts: int, kind: type[Item], name: str) -> list[Item]:
    """One for all, or one for each."""
    if isinstance(values, kind):
        return [values] * num_prompts
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise InputError(f"{name} must be {kind.__name__} or a list of them, got {type(values).__name__}", param=name)
    if len(values) != num_prompts:
        raise InputError(f"{len(values)} {name} were given for {num_prompts} prompts", param=name)
    wrong = [item for item in values if not isinstance(item, kind)]
    if wrong:
        raise InputError(f"{name} holds {wrong[0]!r}; every entry must be {kind.__name__}", param=name)
    return list(values)


def list_conversations(conversations: Any) -> list[Conversation]:
    """One conversation (a list of messages) or several -> a list of conversations."""
    if not isinstance(conversations, Sequence) or isinstance(conversations, (str, bytes)) or not conversations:
        raise InputError(f"messages must be a non-empty list of messages, got {conversations!r}", param="messages")
    if isinstance(conversations[0], Mapping):
        return [conversations]
    for conversation in conversations:
        if not isinstance(conversation, Sequence) or not all(isinstance(m, Mapping) for m in conversation):
            raise InputError("messages must be one list of message dicts, or a list of such lists", param="messages")
    return list(conversations)


def _join_legacy(prompts: Any, prompt_token_ids: Any) -> list[Any]:
    """The older keyword `prompt_token_ids`, alone or beside texts that are then only echoed."""
    if prompt_token_ids is None:
        if prompts is None:
            raise InputError("generate needs prompts", param="prompts")
        return list_prompts(prompts)
    ids = list_prompts(prompt_token_ids)
    if prompts is None:
        return ids
    texts = list_prompts(prompts)
    if len(texts) != len(ids):
        raise InputError(f"{len(texts)} prompts and {len(ids)} prompt_token_ids were given", param="prompt_token_ids")
    return [{"prompt": text, "prompt_token_ids": token_ids} for text, token_ids in zip(texts, ids, strict=True)]
