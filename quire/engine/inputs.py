"""From what a caller gave (a prompt and SamplingParams) to what an engine takes (EngineRequest), one per answer.

Owns: tokenizing, truncation, the checks that need the model (context length, vocabulary, max_logprobs), defaults that
come from it (end ids, max_tokens), seeds, and the fan-out of n. Every refusal is an InputError that names value and
limit, raised before anything is submitted. Must not know: where the engine is, or what becomes of the request.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from quire.base import registry
from quire.schema.errors import InputError, NotBuiltError, some
from quire.schema.messages import EngineReady, EngineRequest
from quire.schema.params import SamplingParams
from quire.schema.prompt import Prompt

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.schema.grammar import GrammarSpec
    from quire.text.parse.choose import ParserChoice
    from quire.text.tokenizer import Tokenizer

_SEEDS = 1 << 64
_MOST_ANSWERS = 16384
PROCESSOR_GROUPS = ("quire.logits_processors", "vllm.logits_processors")
_LONGER = 16  # how much longer than a prompt a text may be of which only a part is used
_TOKENIZING = ("add_special_tokens", "truncate_prompt_tokens", "truncation", "max_length", "truncation_side")


class PreparedRequest(msgspec.Struct, frozen=True):
    """One caller's request, ready to go: `requests` are its n answers-to-be."""

    request_id: str
    text: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    requests: tuple[EngineRequest, ...]
    arrival: float  # wall clock
    stream_interval: int | None = None  # tokens per streamed result; None: the engine's own


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may say besides prompt and params."""

    priority: int = 0
    lora_request: Any = None
    lora_name: str | None = None  # an adapter that the engine has loaded, by name
    tokenization_kwargs: Mapping[str, Any] | None = None
    trace_headers: Mapping[str, str] | None = None
    data_parallel_rank: int | None = None
    arrival: float | None = None  # wall clock; now, if not given
    seed: int | None = None  # drawn beforehand with `draw_seed`, so that order of arrival decides it
    any_logprobs: bool = False  # asked by Quire itself (beam search): max_logprobs does not apply
    stream_interval: int | None = None
    continues: bool = False  # the prompt ends within an answer, which is gone on with
    thinking: bool | None = None  # False: the request switched thinking off, which a prompt need not show
    private: bool = False  # nobody else holds the params, and they have not changed since they were checked
    like: PreparedRequest | None = None  # for an earlier prompt with these very params: its work is used again


class _Shared(NamedTuple):
    """What all requests of a call have in common: checked and made once, and sent once (together.py)."""

    sibling: SamplingParams  # of all answers to a prompt but the first
    stop_token_ids: tuple[int, ...]
    trace_headers: dict[str, str]
    grammar: GrammarSpec | None


def _shared_again(like: PreparedRequest) -> _Shared:
    first, last = like.requests[0], like.requests[-1]
    return _Shared(last.sampling, first.stop_token_ids, first.trace_headers, first.grammar)


class InputProcessor:
    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, ready: EngineReady) -> None:
        self.max_model_len = ready.max_model_len
        self.vocab_size = ready.vocab_size
        self._model = config.model_config
        self._structured = config.structured_outputs_config
        self._thinks = config.thinks
        self._by_priority = config.scheduler_config.policy == "priority"
        self._num_ranks = config.parallel_config.data_parallel_size
        self._mark = (
            f"@{ready.client}" if ready.client else ""
        )  # of several clients, each has names and seeds of its own
        self._random = random.Random(config.model_config.seed + (ready.client << 64))
        self._drawing = threading.Lock()
        self._serials = itertools.count()
        self._processors = _processors(config.model_config.logits_processors)
        self.use_tokenizer(tokenizer)

    def use_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """For prompts from now on."""
        self.tokenizer = tokenizer
        own_eos = tokenizer.eos_token_id if tokenizer is not None else None
        further = tuple(self._model.eos_token_ids)
        self.eos_token_id = own_eos if own_eos is not None else (further[0] if further else None)
        self._further_ends = tuple(i for i in further if i != self.eos_token_id)

    def draw_seed(self) -> int:
        """A seed for a request that has none. The engine's own seed decides the sequence, so runs repeat."""
        with self._drawing:
            return self._random.getrandbits(64)

    def process(
        self, request_id: str, given: object, params: SamplingParams, options: Options | None = None
    ) -> PreparedRequest:
        options = options or Options()
        if not isinstance(request_id, str) or not _is_text(request_id):
            raise InputError(f"request_id must be a non-empty string, got {request_id!r}", param="request_id")
        if not isinstance(params, SamplingParams):
            raise InputError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        prompt = Prompt.of(given)
        _refuse_unbuilt(prompt, params, options)
        self._check_options(options)
        if not options.private:
            params = params.clone()
            params.__post_init__()  # the caller may have changed it since it was checked
        token_ids = self._token_ids(prompt, params, options.tokenization_kwargs or {})
        self._check_prompt(token_ids)
        max_tokens = self._max_tokens(params, len(token_ids))
        shared = self._shared(params, options) if options.like is None else _shared_again(options.like)
        arrival = time.time() if options.arrival is None else options.arrival
        seed = params.seed if params.seed is not None else options.seed
        seed = self.draw_seed() if seed is None else seed
        # A caller may use an id again as soon as its request has ended here; what the engine still says of the old
        # request must not be taken for news of the new one, so the engine knows each by a name of its own.
        name = f"{request_id}#{next(self._serials)}{self._mark}"
        requests = tuple(
            EngineRequest(
                request_id=name if params.n == 1 else f"{name}.{index}",
                prompt_token_ids=token_ids,
                params=params if index == 0 else shared.sibling,
                seed=(seed + index) % _SEEDS,
                max_tokens=max_tokens,
                eos_token_id=self.eos_token_id,
                stop_token_ids=shared.stop_token_ids,
                priority=options.priority,
                arrival=arrival,
                cache_salt=prompt.cache_salt,
                lora_name=options.lora_name,
                parent_id=None if params.n == 1 else request_id,
                trace_headers=shared.trace_headers,
                grammar=shared.grammar,
                continues=options.continues,
                thinking=options.thinking,
            )
            for index in range(params.n)
        )
        return PreparedRequest(
            request_id, prompt.text, token_ids, params, requests, arrival, stream_interval=options.stream_interval
        )

    def _shared(self, params: SamplingParams, options: Options) -> _Shared:
        if params.n > _MOST_ANSWERS:
            raise InputError(f"n is {params.n}; at most {_MOST_ANSWERS} answers can be asked for", param="n")
        self._check_params(params, options)
        # The prompt's log probabilities are the same for all n: the first answer brings them.
        sibling = params if params.prompt_logprobs is None else msgspec.structs.replace(params, prompt_logprobs=None)
        grammar = self._grammar(params)
        return _Shared(sibling, self._stop_ids(params), dict(options.trace_headers or {}), grammar)

    # ---- prompt ------------------------------------------------------------------------------------------------

    def _token_ids(self, prompt: Prompt, params: SamplingParams, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        keep = self._keep(params, kwargs)
        if prompt.token_ids is not None:
            token_ids = prompt.token_ids
        elif self.tokenizer is None:
            raise InputError(
                "the engine has no tokenizer (skip_tokenizer_init=True): give prompt_token_ids, not text",
                param="prompt",
            )
        else:
            self.check_length(prompt.text or "", is_cut=keep is not None)
            special = kwargs.get("add_special_tokens", True)
            token_ids = tuple(self.tokenizer.encode(prompt.text or "", add_special_tokens=bool(special)))
        if keep is None:
            return token_ids
        return token_ids[:keep] if kwargs.get("truncation_side") == "right" else token_ids[-keep:]

    def check_length(self, text: str, *, is_cut: bool = False, param: str = "prompt") -> None:
        """A text that is too long whatever its tokens are is refused before it is tokenized. `is_cut`: so is one of
        which a part would do, when it is many times as long."""
        times = _LONGER if is_cut else 1
        if len(text) <= times * self.max_model_len or len(text) <= (
            most := times * self.max_model_len * self._longest_token
        ):
            return
        limit = f"{times} times max_model_len" if is_cut else "max_model_len"
        raise InputError(
            f"the prompt has {len(text)} characters and is longer than the maximum model length: {limit} "
            f"({self.max_model_len}) tokens of this model have {most} at the most",
            param=param,
            value=len(text),
        )

    @cached_property
    def _longest_token(self) -> int:
        """In characters, or more: some vocabularies write bytes as characters."""
        assert self.tokenizer is not None
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def _keep(self, params: SamplingParams, kwargs: Mapping[str, Any]) -> int | None:
        """How many of the last prompt tokens stay; None: all."""
        if kwargs and (unknown := set(kwargs) - set(_TOKENIZING)):
            raise InputError(
                f"tokenization_kwargs has {sorted(map(str, unknown))}; known are {', '.join(_TOKENIZING)}",
                param="tokenization_kwargs",
            )
        keep = kwargs.get("truncate_prompt_tokens", params.truncate_prompt_tokens)
        if keep is None and kwargs.get("truncation"):
            keep = kwargs.get("max_length", -1)
        if keep is None:
            return None
        if not isinstance(keep, int) or isinstance(keep, bool) or keep == 0 or keep < -1:
            raise InputError(
                f"truncate_prompt_tokens is {keep!r}; it must be -1 or at least 1", param="truncate_prompt_tokens"
            )
        if keep > self.max_model_len:
            raise InputError(
                f"truncate_prompt_tokens is {keep}, which is more than max_model_len ({self.max_model_len})",
                param="truncate_prompt_tokens",
                value=keep,
            )
        return self.max_model_len - 1 if keep == -1 else keep  # leaves room for an answer

    def _check_prompt(self, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            raise InputError("the decoder prompt cannot be empty: it needs at least one token", param="prompt")
        if len(token_ids) >= self.max_model_len:
            raise InputError(
                f"the prompt has {len(token_ids)} tokens; with at least one token of answer it is longer than the "
                f"maximum model length, max_model_len ({self.max_model_len})",
                param="prompt",
                value=len(token_ids),
            )
        self._check_ids("the prompt", token_ids, param="prompt")

    def _check_ids(self, what: str, token_ids: Iterable[int], *, param: str) -> None:
        given = list(token_ids)
        if not given or (min(given) >= 0 and max(given) < self.vocab_size):
            return
        wrong = [token_id for token_id in given if not 0 <= token_id < self.vocab_size]
        told = "token ids" if len(wrong) > 1 else "token id"
        raise InputError(
            f"{what} holds {told} {some(list(map(str, wrong)), 32)} out of vocabulary; the vocabulary size is "
            f"{self.vocab_size}, this model's ids are 0 to {self.vocab_size - 1}",
            param=param,
            value=wrong[0],
        )

    # ---- params ------------------------------------------------------------------------------------------------

    def _max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        room = self.max_model_len - num_prompt_tokens
        if params.min_tokens > room:
            raise InputError(
                f"min_tokens is {params.min_tokens}, but a prompt of {num_prompt_tokens} tokens leaves {room} of "
                f"max_model_len ({self.max_model_len})",
                param="min_tokens",
                value=params.min_tokens,
            )
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        ends = () if params.ignore_eos else self._further_ends
        return tuple(dict.fromkeys((*(params.stop_token_ids or ()), *ends)))

    def _check_params(self, params: SamplingParams, options: Options) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            asked = params.logprobs if name == "logprobs" else params.prompt_logprobs
            if asked is not None and not options.any_logprobs:
                self._check_logprobs(name, asked)
        self._check_ids("stop_token_ids", params.stop_token_ids or (), param="stop_token_ids")
        self._check_ids("allowed_token_ids", params.allowed_token_ids or (), param="allowed_token_ids")
        self._check_ids("logit_bias", params.logit_bias or (), param="logit_bias")
        self._check_ids("logprob_token_ids", params.logprob_token_ids or (), param="logprob_token_ids")
        if params.logprob_token_ids and not options.any_logprobs:
            params.logprobs = 0  # these ids are what is asked for, and not the likeliest besides
        if self.tokenizer is None:
            if params.stop:
                raise InputError("stop strings need a tokenizer, and skip_tokenizer_init=True", param="stop")
            params.detokenize = False
        if params.thinking_token_budget is not None and self._no_budget is not None:
            raise InputError(self._no_budget, param="thinking_token_budget", value=params.thinking_token_budget)
        if params.bad_words:
            params.bad_words_token_ids = self._bad_word_ids(params.bad_words)
        for word_ids in params.bad_words_token_ids or ():
            self._check_ids("bad_words", word_ids, param="bad_words")
        if params.allowed_token_ids is not None:
            self._check_allowed(params, params.allowed_token_ids)
        if self._processors:
            from quire.sampling.processors import check_params  # lazy

            check_params(self._processors, params)

    def _check_allowed(self, params: SamplingParams, allowed: Sequence[int]) -> None:
        """What is allowed must leave something to say."""
        banned = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
        if params.min_tokens:
            banned.update(self._stop_ids(params))
            banned.update(() if params.ignore_eos or self.eos_token_id is None else (self.eos_token_id,))
        if banned.issuperset(allowed):
            raise InputError(
                "allowed_token_ids leaves no token: all of them are forbidden by bad_words, or end the answer before "
                f"min_tokens ({params.min_tokens})",
                param="allowed_token_ids",
            )

    @cached_property
    def _no_budget(self) -> str | None:
        """Why a thought cannot be ended here, if so."""
        options, needs = self._structured, "thinking_token_budget needs to know where a thought ends, and"
        if not self._thinks:
            return f"{needs} no reasoning parser is set: start with reasoning_parser (--reasoning-parser NAME)"
        if self.tokenizer is None:
            return f"{needs} there is no tokenizer (skip_tokenizer_init=True)"
        from quire.text.parse.choose import ParserChoice  # lazy

        chosen: ParserChoice = ParserChoice.of(
            self.tokenizer, reasoning=options.reasoning_parser, reasoning_plugin=options.reasoning_parser_plugin
        )
        if options.reasoning_parser and chosen.reasoning_tokens() is None:
            return f"{needs} the reasoning parser {options.reasoning_parser!r} does not tell"
        return None

    def _grammar(self, params: SamplingParams) -> GrammarSpec | None:
        given = params.structured_outputs
        if given is None:
            return None
        if self.tokenizer is None:
            raise InputError(
                "structured_outputs need a tokenizer, and skip_tokenizer_init=True", param="structured_outputs"
            )
        from quire.grammar.request import make_spec  # lazy

        spec: GrammarSpec = make_spec(given, self._structured)
        return spec

    def _check_logprobs(self, name: str, asked: int) -> None:
        limit = self._model.max_logprobs
        limit = self.vocab_size if limit == -1 else limit
        if asked == -1 and limit >= self.vocab_size:
            return
        count = self.vocab_size if asked == -1 else asked
        if count > limit:
            shown = f"-1 (all {count})" if asked == -1 else str(count)
            raise InputError(f"{name} is {shown}, which is more than max_logprobs ({limit})", param=name, value=asked)

    def _bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """As a word is written at the start of a text and after a space."""
        if self.tokenizer is None:
            raise InputError("bad_words need a tokenizer, and skip_tokenizer_init=True", param="bad_words")
        found: dict[tuple[int, ...], None] = {}
        for word in dict.fromkeys(word.lstrip() for word in words):
            for form in (word, f" {word}"):
                found[tuple(self.tokenizer.encode(form, add_special_tokens=False))] = None
        return [list(word_ids) for word_ids in found if word_ids]

    def _check_options(self, options: Options) -> None:
        priority, rank = options.priority, options.data_parallel_rank
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InputError(f"priority must be an integer, got {priority!r}", param="priority")
        if priority and not self._by_priority:
            raise InputError(
                f"priority is {priority}, but the scheduling policy is fcfs: start with scheduling_policy='priority'",
                param="priority",
                value=priority,
            )
        if rank is not None and not 0 <= rank < self._num_ranks:
            raise InputError(
                f"data_parallel_rank is {rank}; there are {self._num_ranks} engines", param="data_parallel_rank"
            )


def _is_text(given: str) -> bool:
    """Not empty, and able to travel: no lone surrogates."""
    try:
        return bool(given.encode())
    except UnicodeEncodeError:
        return False


def default_params(config: EngineConfig) -> SamplingParams:
    """What a request without parameters gets: the model's generation config, as far as it was asked for."""
    return SamplingParams(**config.model_config.default_sampling)


def _refuse_unbuilt(prompt: Prompt, params: SamplingParams, options: Options) -> None:
    unbuilt: dict[str, Any] = {
        "prompt_embeds": prompt.embeds,
        "multi_modal_data": prompt.media,
        "multi_modal_uuids": prompt.media_uuids,
        "mm_processor_kwargs": prompt.media_options,
        "lora_request": options.lora_request,
    }
    for name, value in unbuilt.items():
        if value is not None:
            raise NotBuiltError(f"{name} is not in this version of Quire", param=name)


def _processors(names: Sequence[str]) -> list[Any]:
    """Custom LogitsProcessor classes, for their validate_params; the tensor side is only loaded if there are some."""
    if not names and not any(registry.entry_points(group=group) for group in PROCESSOR_GROUPS):
        return []
    from quire.sampling.processors import load_classes  # lazy

    found: list[Any] = load_classes(names)
    return found
