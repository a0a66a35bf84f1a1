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
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from quire.base import registry
from quire.engine.adapters import NOT_ENABLED, absolute, lora_request_of, media_adapters
from quire.schema.adapters import LoRARequest
from quire.schema.errors import InputError, NotBuiltError, some
from quire.schema.media import MediaItem
from quire.schema.messages import EngineReady, EngineRequest
from quire.schema.params import PoolingParams, ResolvedParams, SamplingParams, SpeechRules, sampling_of
from quire.schema.prompt import Prompt

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.encoder_inputs import EncoderInputs
    from quire.engine.pooling import PoolingInputs
    from quire.media.inputs import LoadedItem, MediaInputs
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
    params: ResolvedParams  # of a request that is pooled: the defaults
    requests: tuple[EngineRequest, ...]
    arrival: float  # wall clock
    stream_interval: int | None = None  # tokens per streamed result; None: the engine's own
    lora_request: LoRARequest | None = None
    pooling: PoolingParams | None = None  # of a request that is pooled
    data_parallel_rank: int | None = None  # of the engine that must run it
    encoder_text: str | None = None  # of an encoder-decoder model whose encoder reads text
    encoder_ids: tuple[int, ...] | None = None


class _ReadPrompt(NamedTuple):
    """What a prompt is for an engine, and what results tell of it."""

    text: str | None
    token_ids: tuple[int, ...]
    media: tuple[MediaItem, ...]
    encoder_text: str | None = None
    encoder_ids: tuple[int, ...] | None = None


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may say besides prompt and params."""

    priority: int = 0
    lora_request: LoRARequest | None = None
    lora_name: str | None = None  # an adapter that the engine has loaded, by name
    tokenization_kwargs: Mapping[str, Any] | None = None
    trace_headers: Mapping[str, str] | None = None
    data_parallel_rank: int | None = None
    tenant: int = 0  # whose request it is (EngineRequest)
    arrival: float | None = None  # wall clock; now, if not given
    seed: int | None = None  # drawn beforehand with `draw_seed`, so that order of arrival decides it
    any_logprobs: bool = False  # set by Quire itself (beam search): max_logprobs does not apply
    stream_interval: int | None = None
    continues: bool = False  # the prompt ends within an answer, which is gone on with
    thinking: bool | None = None  # False: the request switched thinking off, which a prompt need not show


class InputProcessor:
    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, ready: EngineReady) -> None:
        self.max_model_len = ready.max_model_len
        self.vocab_size = ready.vocab_size
        self._model = config.model_config
        self._structured = config.structured_outputs_config
        self._thinks = config.thinks
        self._by_priority = config.scheduler_config.policy == "priority"
        lora = config.lora_config
        self._has_adapters = lora is not None
        self._media_adapters = {} if lora is None else media_adapters(lora.default_mm_loras)
        self._is_pooling = config.model_config.is_pooling
        self._is_encoder_decoder = config.model_config.is_encoder_decoder
        self._has_prefix_cache = bool(config.cache_config.enable_prefix_caching)
        self._ranks = config.parallel_config.engine_ranks
        self._mark = (
            f"@{ready.client}" if ready.client else ""
        )  # of several clients, each has names and seeds of its own
        self._random = random.Random(config.model_config.seed + (ready.client << 64))
        self._drawing = threading.Lock()
        self._serials = itertools.count()
        self._media: MediaInputs | None = None
        self._siblings: tuple[ResolvedParams, ResolvedParams] | None = None  # params seen last, and their siblings'
        self._processors = _processors(config.model_config.logits_processors)
        self.use_tokenizer(tokenizer)
        if self._is_encoder_decoder and self.takes_media:
            _ = self.media  # every request needs it: files that do not fit the model are named now

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
        self,
        request_id: str,
        source: object,
        params: SamplingParams | ResolvedParams | PoolingParams,
        options: Options | None = None,
    ) -> PreparedRequest:
        """`params`: a caller's, or what `resolve` made of them, for several prompts."""
        options = options or Options()
        if isinstance(params, PoolingParams):
            return self.process_pooled([(request_id, source)], params, options)[0]
        _check_id(request_id)
        prompt = source if isinstance(source, Prompt) else Prompt.of(source)
        self._check_options(options)
        if not isinstance(params, ResolvedParams):
            params = self.resolve(params, any_logprobs=options.any_logprobs)
        read = self._read(prompt, params, options.tokenization_kwargs or {})
        token_ids = read.token_ids
        if not token_ids:
            raise InputError("the decoder prompt cannot be empty: it needs at least one token", param="prompt")
        check_context(self.max_model_len, len(token_ids), params.min_tokens, name="min_tokens")
        self._check_ids("the prompt", token_ids, param="prompt")
        if self._media_adapters and options.lora_request is None and options.lora_name is None:
            options = msgspec.structs.replace(options, lora_request=self._media_adapter(read.media))
        arrival = time.time() if options.arrival is None else options.arrival
        requests = self._requests(request_id, read, params, options, arrival, prompt.cache_salt)
        return PreparedRequest(
            request_id, read.text, token_ids, params, requests, arrival, stream_interval=options.stream_interval,
            lora_request=options.lora_request, data_parallel_rank=options.data_parallel_rank,
            encoder_text=read.encoder_text, encoder_ids=read.encoder_ids,
        )  # fmt: skip

    def _read(self, prompt: Prompt, params: ResolvedParams, kwargs: Mapping[str, Any]) -> _ReadPrompt:
        """Tokens in the place of text, items in the place of media, vectors in the place of embeddings."""
        if self._is_encoder_decoder:
            pair = self.encoder.read(prompt, self._keep(params, kwargs), kwargs)
            return _ReadPrompt(pair.decoder_text, pair.decoder_ids, (pair.item,), pair.encoder_text, pair.encoder_ids)
        if prompt.encoder is not None:
            raise InputError("the model is not an encoder-decoder: it takes no encoder_prompt", param="encoder_prompt")
        media: tuple[MediaItem, ...] = ()
        has_media = prompt.media is not None or prompt.media_uuids is not None
        if has_media and not has_items(prompt):
            prompt, media = self._place_media(prompt, params, kwargs)
        if prompt.embeds is not None:
            media = self._embeds(prompt, params, kwargs)
            return _ReadPrompt(prompt.text, (0,) * sum(item.length for item in media), media)
        token_ids = self._token_ids(prompt, params, kwargs)
        if has_media and has_items(prompt):
            media = self._items(prompt, token_ids)
        return _ReadPrompt(prompt.text, token_ids, media)

    def _requests(
        self,
        request_id: str,
        read: _ReadPrompt,
        params: ResolvedParams,
        options: Options,
        arrival: float,
        cache_salt: str | None,
    ) -> tuple[EngineRequest, ...]:
        """One for each of the n answers."""
        room = self.max_model_len - len(read.token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        sibling = params if params.n == 1 else self._sibling_params(params)
        seed = params.seed if params.seed is not None else options.seed
        seed = self.draw_seed() if seed is None else seed
        # A caller may use an id again as soon as its request has ended here; what the engine still says of the old
        # request must not be taken for news of the new one, so the engine knows each by a name of its own.
        name = f"{request_id}#{next(self._serials)}{self._mark}"
        headers = dict(options.trace_headers or {})
        lora_id, lora_name, lora_path = self._adapter(options)
        return tuple(
            EngineRequest(
                request_id=name if params.n == 1 else f"{name}.{index}",
                prompt_token_ids=read.token_ids,
                params=params if index == 0 else sibling,
                seed=(seed + index) % _SEEDS,
                max_tokens=max_tokens,
                eos_token_id=self.eos_token_id,
                priority=options.priority,
                arrival=arrival,
                cache_salt=cache_salt,
                tenant=options.tenant,
                lora_id=lora_id,
                lora_name=lora_name,
                lora_path=lora_path,
                parent_id=None if params.n == 1 else request_id,
                media=read.media,
                trace_headers=headers,
                continues=options.continues,
                thinking=options.thinking,
            )
            for index in range(params.n)
        )

    def _media_adapter(self, items: Sequence[MediaItem]) -> LoRARequest | None:
        """That of the only kind of media in a prompt that has one."""
        kinds = {item.modality for item in items} & self._media_adapters.keys()
        return self._media_adapters[kinds.pop()] if len(kinds) == 1 else None

    def _adapter(self, options: Options) -> tuple[int, str | None, str | None]:
        """(id, name, path) of the adapter that a request brings or names."""
        lora = options.lora_request
        if lora is None:
            return 0, options.lora_name, None
        lora = lora_request_of(lora)
        if not self._has_adapters:
            raise InputError(f"a request has lora_request {lora.lora_name!r}, but {NOT_ENABLED}", param="lora_request")
        if lora.tensorizer_config_dict is not None:
            raise NotBuiltError("tensorizer_config_dict of a LoRARequest is not in this version of Quire")
        return lora.lora_int_id, lora.lora_name, absolute(lora.lora_path)

    def process_pooled(
        self, named: Sequence[tuple[str, object]], params: PoolingParams, options: Options
    ) -> list[PreparedRequest]:
        """Prompts that are pooled alike, each with its request's id: what they share is checked once, and texts are
        tokenized together."""
        pooling, prompts = self.pooling, []
        for request_id, source in named:
            _check_id(request_id)
            prompt = source if isinstance(source, Prompt) else Prompt.of(source)
            if prompt.embeds is not None or prompt.has_media:
                raise NotBuiltError(
                    "media and embeddings of a pooled request are not in this version of Quire",
                    param="multi_modal_data" if prompt.has_media else "prompt_embeds",
                )
            prompts.append(prompt)
        self._check_options(options)
        params = pooling.resolve(params)
        kwargs = options.tokenization_kwargs or {}
        keep = self._keep(params, kwargs)
        adapter, headers = self._adapter(options), dict(options.trace_headers or {})
        arrival = time.time() if options.arrival is None else options.arrival
        ready = []
        for (request_id, _), prompt in zip(
            named, pooling.tokenized(prompts, kwargs, is_cut=keep is not None), strict=True
        ):
            try:
                token_ids, type_start = pooling.token_ids(prompt, keep, kwargs)
                self._check_pooled_ids(token_ids)
            except InputError as wrong:
                wrong.request_id = request_id
                raise
            own = params if type_start is None else pooling.with_types(params, type_start)
            request = self._pooled_request(request_id, prompt, token_ids, own, options, adapter, arrival, headers)
            ready.append(
                PreparedRequest(
                    request_id, prompt.text, token_ids, sampling_of(own), (request,), arrival, pooling=own,
                    data_parallel_rank=options.data_parallel_rank,
                )
            )  # fmt: skip
        return ready

    def _check_pooled_ids(self, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            raise InputError("the prompt cannot be empty: it needs at least one token", param="prompt")
        self.pooling.check_length(len(token_ids))
        self._check_ids("the prompt", token_ids, param="prompt")

    def _pooled_request(
        self,
        request_id: str,
        prompt: Prompt,
        token_ids: tuple[int, ...],
        params: PoolingParams,
        options: Options,
        adapter: tuple[int, str | None, str | None],
        arrival: float,
        headers: dict[str, str],
    ) -> EngineRequest:
        lora_id, lora_name, lora_path = adapter
        return EngineRequest(
            request_id=f"{request_id}#{next(self._serials)}{self._mark}",
            prompt_token_ids=token_ids,
            params=params,
            seed=0,
            max_tokens=1,
            priority=options.priority,
            arrival=arrival,
            cache_salt=prompt.cache_salt,
            tenant=options.tenant,
            lora_id=lora_id,
            lora_name=lora_name,
            lora_path=lora_path,
            trace_headers=headers,
        )

    @cached_property
    def pooling(self) -> PoolingInputs:
        """For requests that are pooled; an InputError where the model generates."""
        from quire.engine.pooling import PoolingInputs  # lazy

        return PoolingInputs(self._model, self.vocab_size, self.max_model_len, lambda: self.tokenizer)

    @cached_property
    def encoder(self) -> EncoderInputs:
        """For prompts of an encoder-decoder model."""
        from quire.engine.encoder_inputs import EncoderInputs  # lazy

        def check_ids(what: str, ids: Collection[int]) -> None:
            self._check_ids(what, ids, param="encoder_prompt")

        return EncoderInputs(
            self._model, self.max_model_len, lambda: self.tokenizer, check_ids, self._encoder_item, self._encoder_place
        )

    @property
    def max_prompt_len(self) -> int:
        """Most tokens of a prompt that can be used: an encoder's, where that reads the prompt."""
        return self.encoder.most if self._is_encoder_decoder and self.encoder.reads_text else self.max_model_len

    def check_prompt_len(self, count: int) -> None:
        """InputError: a prompt of so many tokens is too long, whatever they are."""
        if self._is_encoder_decoder and self.encoder.reads_text:
            self.encoder.check_length(count)
        else:
            check_context(self.max_model_len, count)

    def _encoder_item(self, prompt: Prompt) -> MediaItem:
        """The media of a prompt, which the encoder of an encoder-decoder model reads."""
        if has_items(prompt):
            item: MediaItem = prompt.media[0]
            if len(prompt.media) > 1 or item.modality not in self._model.facts.modalities:
                raise InputError(
                    f"the encoder reads one item; the prompt has {len(prompt.media)}, of {item.modality}",
                    param="multi_modal_data",
                )
            return item
        media = self.media
        loaded = media.known(prompt.loaded_media or prompt.media)
        return media.encoder_item(media.loaded(self.begin_media(prompt)) if loaded is None else loaded)

    def _encoder_place(self, prompt: Prompt, encoder: Prompt) -> tuple[tuple[int, ...], MediaItem]:
        """The encoder's part of a prompt, with the prompt's one item in its place."""
        if has_items(prompt):
            raise InputError("the encoder's media must be given as they are, not as items", param="multi_modal_data")
        media, tokenizer = self.media, self.tokenizer
        if tokenizer is None:
            raise InputError("media need a tokenizer, and the engine has none (skip_tokenizer_init)", param="prompt")
        loaded = media.known(prompt.loaded_media or prompt.media)
        if loaded is None:
            loaded = media.loaded(self.begin_media(prompt))
        placed = media.place(encoder.text, encoder.token_ids, loaded, tokenizer, add_special_tokens=False)
        if len(placed.items) != 1:
            raise InputError(
                f"the encoder reads one item; the prompt has {len(placed.items)}", param="multi_modal_data"
            )
        return placed.token_ids, placed.items[0]

    @property
    def media(self) -> MediaInputs:
        """For prompts with media; an InputError where the model takes none. Not for event loops: it reads files."""
        if not self.takes_media:
            raise NotBuiltError(
                "this model takes text only: it has no encoder for multi_modal_data", param="multi_modal_data"
            )
        with self._drawing:  # threads may want it at once, and there is one cache
            if self._media is None:
                from quire.media.inputs import MediaInputs  # lazy

                most = self._model.facts.encoder_length or self.max_model_len
                self._media = MediaInputs.of(self._model, has_prefix_cache=self._has_prefix_cache, max_vectors=most)
            return self._media

    def forget_media(self) -> None:
        """Processed media are processed again; what a uuid names must be sent again."""
        if self._media is not None:
            self._media.clear()

    def close(self) -> None:
        if self._media is not None:
            self._media.close()

    @property
    def takes_media(self) -> bool:
        return bool(self._model.facts.modalities) and not self._is_pooling

    def begin_media(self, prompt: Prompt) -> dict[str, list[Future[LoadedItem]]]:
        """Fetch, decode and process the items of a prompt in other threads."""
        return self.media.load(
            prompt.media, prompt.media_uuids, prompt.media_options, prompt.media_io_options, prompt.cache_salt
        )

    def _place_media(
        self, prompt: Prompt, params: ResolvedParams, kwargs: Mapping[str, Any]
    ) -> tuple[Prompt, tuple[MediaItem, ...]]:
        """The prompt as ids, with room for its items."""
        if prompt.embeds is not None:
            raise InputError("a prompt has embeddings in place of tokens, and media besides", param="prompt_embeds")
        media, tokenizer = self.media, self.tokenizer
        if tokenizer is None:
            raise InputError("media need a tokenizer, and the engine has none (skip_tokenizer_init)", param="prompt")
        loaded = media.known(prompt.loaded_media or prompt.media)
        if loaded is None:
            loaded = media.loaded(self.begin_media(prompt))
        if prompt.token_ids is None:
            self.check_length(prompt.text or "")
        special = bool(kwargs.get("add_special_tokens", True))
        placed = media.place(prompt.text, prompt.token_ids, loaded, tokenizer, add_special_tokens=special)
        keep = self._keep(params, kwargs)
        if keep is not None and keep < len(placed.token_ids):
            raise InputError(
                f"the prompt has {len(placed.token_ids)} tokens with its media and would be cut to {keep}: a prompt "
                "with media cannot be truncated",
                param="truncate_prompt_tokens",
            )
        return msgspec.structs.replace(prompt, token_ids=placed.token_ids), placed.items

    def _sibling_params(self, params: ResolvedParams) -> ResolvedParams:
        """Of all answers to a prompt but the first, which brings the prompt's log probabilities for all of them. The
        same object for prompts with the same parameters, so that it is sent once (together.py)."""
        if params.prompt_logprobs is None:
            return params
        made = self._siblings
        if made is None or made[0] is not params:
            made = self._siblings = params, msgspec.structs.replace(params, prompt_logprobs=None)
        return made[1]

    def resolve(
        self, params: SamplingParams, *, any_logprobs: bool = False, is_private: bool = False
    ) -> ResolvedParams:
        """The one place where parameters are checked against the model. `any_logprobs`: max_logprobs does not apply.
        `is_private`: nobody else has them, so they are as they were when they were made, which checked their values."""
        if self._is_pooling:
            raise InputError(
                f"this model runs with runner=pooling, and cannot generate: it can {', '.join(self.pooling.tasks)}",
                param="model",
            )
        if not isinstance(params, SamplingParams):
            raise InputError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        params = params if is_private else params.checked()
        if params.n > _MOST_ANSWERS:
            raise InputError(f"n is {params.n}; at most {_MOST_ANSWERS} answers can be asked for", param="n")
        self._check_params(params, any_logprobs=any_logprobs)
        bad_words = self._bad_word_ids(params)
        stop_ids = self._stop_ids(params)
        if params.allowed_token_ids is not None:
            self._check_allowed(params, params.allowed_token_ids, bad_words, stop_ids)
        if params.speech_rules is not None:
            self._check_rules(params.speech_rules)
        if self._processors:
            from quire.sampling.processors import check_params  # lazy

            check_params(self._processors, params)
        only_named = bool(params.logprob_token_ids) and not any_logprobs  # and not the likeliest besides
        return params.freeze(
            stop_token_ids=stop_ids,
            logprobs=0 if only_named else params.logprobs,
            detokenize=params.detokenize and self.tokenizer is not None,
            bad_words_token_ids=bad_words,
            grammar=self._grammar(params),
        )

    # ---- prompt ------------------------------------------------------------------------------------------------

    def _token_ids(self, prompt: Prompt, params: ResolvedParams, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
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
            token_ids = tuple(self.tokenizer.encode_batch([prompt.text or ""], bool(special))[0])
        if keep is None:
            return token_ids
        return token_ids[:keep] if kwargs.get("truncation_side") == "right" else token_ids[-keep:]

    def _items(self, prompt: Prompt, token_ids: tuple[int, ...]) -> tuple[MediaItem, ...]:
        """Media that were processed already: items, beside the token ids that they stand in."""
        if token_ids is not prompt.token_ids:
            raise InputError("a prompt with media cannot be truncated", param="truncate_prompt_tokens")
        known = self._model.facts.modalities
        for item in prompt.media:
            if item.modality not in known:
                raise InputError(
                    f"a prompt has {item.modality}; this model takes {', '.join(known) or 'text only'}",
                    param="multi_modal_data",
                )
        items: tuple[MediaItem, ...] = prompt.media
        return items

    def _embeds(self, prompt: Prompt, params: ResolvedParams, kwargs: Mapping[str, Any]) -> tuple[MediaItem, ...]:
        """A prompt of vectors instead of tokens."""
        from quire.engine.embeds import NOT_ENABLED, decode_embeds, media_of  # lazy

        if not self._model.enable_prompt_embeds or self._is_pooling:
            raise InputError(NOT_ENABLED, param="prompt_embeds")
        if prompt.text is not None or prompt.token_ids is not None:
            raise InputError("a prompt is embeddings, or text or token ids; it has both", param="prompt_embeds")
        if params.prompt_logprobs is not None:
            raise InputError(
                "prompt_logprobs: a prompt of embeddings has no tokens to tell the log probabilities of",
                param="prompt_logprobs",
            )
        if params.repetition_penalty != 1.0:
            raise InputError(
                f"repetition_penalty is {params.repetition_penalty}: a prompt of embeddings has no tokens to penalize",
                param="repetition_penalty",
            )
        keep, width, embeds = self._keep(params, kwargs), self._model.facts.hidden_size, prompt.embeds
        if isinstance(embeds, str):
            embeds = decode_embeds(embeds, width=width, most=self.max_model_len)
        items: tuple[MediaItem, ...] = media_of(embeds, width=width, most=self.max_model_len, keep=keep)
        return items

    def check_length(self, text: str, *, is_cut: bool = False, param: str = "prompt") -> None:
        """A text that is too long whatever its tokens are is refused before it is tokenized. `is_cut`: so is one of
        which a part would do, when it is many times as long."""
        times = _LONGER if is_cut else 1
        if len(text) <= times * self.max_model_len:
            return
        least = -(-len(text) // self._longest_token)
        if least > times * self.max_model_len:
            known = f"the prompt has {len(text)} characters, which are at least {least} input tokens"
            known += f", more than the {times * self.max_model_len} that would be truncated," if is_cut else ""
            check_context(self.max_model_len, least, prompt=known, param=param)

    @cached_property
    def _longest_token(self) -> int:
        """In characters, or more: some vocabularies write bytes as characters."""
        assert self.tokenizer is not None
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def _keep(self, params: ResolvedParams | PoolingParams, kwargs: Mapping[str, Any]) -> int | None:
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
        room = 0 if isinstance(params, PoolingParams) else 1  # for an answer
        return self.max_model_len - room if keep == -1 else keep

    def _check_ids(self, what: str, token_ids: Collection[int], *, param: str) -> None:
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            return
        wrong = [token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size]
        noun = "token ids" if len(wrong) > 1 else "token id"
        raise InputError(
            f"{what} holds {noun} {some(list(map(str, wrong)), 32)} out of vocabulary; the vocabulary size is "
            f"{self.vocab_size}, this model's ids are 0 to {self.vocab_size - 1}",
            param=param,
            value=wrong[0],
        )

    # ---- params ------------------------------------------------------------------------------------------------

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        ends = () if params.ignore_eos else self._further_ends
        return tuple(dict.fromkeys((*(params.stop_token_ids or ()), *ends)))

    def _check_params(self, params: SamplingParams, *, any_logprobs: bool) -> None:
        if not any_logprobs:
            self._check_logprobs("logprobs", params.logprobs)
            self._check_logprobs("prompt_logprobs", params.prompt_logprobs)
        self._check_ids("stop_token_ids", params.stop_token_ids or (), param="stop_token_ids")
        self._check_ids("allowed_token_ids", params.allowed_token_ids or (), param="allowed_token_ids")
        self._check_ids("logit_bias", params.logit_bias or (), param="logit_bias")
        self._check_ids("logprob_token_ids", params.logprob_token_ids or (), param="logprob_token_ids")
        if params.stop and self.tokenizer is None:
            raise InputError("stop strings need a tokenizer, and skip_tokenizer_init=True", param="stop")
        if params.thinking_token_budget is not None and self._no_budget is not None:
            raise InputError(self._no_budget, param="thinking_token_budget", value=params.thinking_token_budget)

    def _check_allowed(
        self,
        params: SamplingParams,
        allowed: Sequence[int],
        bad_words: Iterable[Sequence[int]],
        stop_ids: Iterable[int],
    ) -> None:
        """What is allowed must leave something to say."""
        banned = {word[0] for word in bad_words if len(word) == 1}
        if params.min_tokens:
            banned.update(stop_ids)
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
        constraint = params.structured_outputs
        if constraint is None:
            return None
        if self.tokenizer is None:
            raise InputError(
                "structured_outputs need a tokenizer, and skip_tokenizer_init=True", param="structured_outputs"
            )
        from quire.grammar.request import make_spec  # lazy

        spec: GrammarSpec = make_spec(constraint, self._structured)
        return spec

    def _check_logprobs(self, name: str, value: int | None) -> None:
        if value is None:
            return
        limit = self._model.max_logprobs
        limit = self.vocab_size if limit == -1 else limit
        if value == -1 and limit >= self.vocab_size:
            return
        count = self.vocab_size if value == -1 else value
        if count > limit:
            shown = f"-1 (all {count})" if value == -1 else str(count)
            raise InputError(f"{name} is {shown}, which is more than max_logprobs ({limit})", param=name, value=value)

    def _check_rules(self, rules: SpeechRules) -> None:
        self._check_ids("speech_rules", rules.never_first, param="speech_rules")
        if (times := rules.times) is not None:
            self._check_ids("speech_rules", (times.first_id, times.end_id, times.plain_id), param="speech_rules")
            if times.first_id < 1:
                raise InputError(
                    f"speech_rules: first_id is {times.first_id}; it must be at least 1", param="speech_rules"
                )

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """As a word is written at the start of a text and after a space; without words, the ids as passed."""
        if not params.bad_words:
            words = tuple(tuple(word) for word in params.bad_words_token_ids or () if word)
            for word_ids in words:
                self._check_ids("bad_words_token_ids", word_ids, param="bad_words_token_ids")
            return words
        if self.tokenizer is None:
            raise InputError("bad_words need a tokenizer, and skip_tokenizer_init=True", param="bad_words")
        encoded: dict[tuple[int, ...], None] = {}
        for word in dict.fromkeys(word.lstrip() for word in params.bad_words):
            for form in (word, f" {word}"):
                encoded[tuple(self.tokenizer.encode(form, add_special_tokens=False))] = None
        for word_ids in encoded:
            self._check_ids("bad_words", word_ids, param="bad_words")
        return tuple(word_ids for word_ids in encoded if word_ids)

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
        if rank is not None and (isinstance(rank, bool) or rank not in self._ranks):
            ranks = self._ranks
            known = f"are engines {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"is engine {ranks[0]}"
            raise InputError(
                f"data_parallel_rank is {rank!r}; there {known} here", param="data_parallel_rank", value=rank
            )


def check_context(
    limit: int,
    num_prompt: int,
    num_output: int = 0,
    *,
    name: str = "max_tokens",
    prompt: str | None = None,
    param: str = "prompt",
) -> None:
    """Whether a prompt and so many output tokens, at least one, fit `limit`: the only such check, and its only message.

    `num_prompt` 0: there is no prompt yet. `name`: the parameter that asks for the output. `prompt`: what is known of a
    prompt whose tokens have not been counted; `num_prompt` is then the least that they can be.
    """
    total = num_prompt + max(1, num_output)
    if total <= limit:
        return
    is_prompt = num_prompt >= limit
    need = f"{name}={num_output}" if num_output > 1 else "at least one output token is needed"
    wrong = f"{need} cannot be greater than max_model_len={limit}"
    if num_prompt:
        known = prompt or f"the prompt has {num_prompt} input tokens"
        wrong = (
            f"The request is longer than the maximum model length. This model's maximum context length is {limit} "
            f"tokens (max_model_len={limit}); however, {known} and {need}, {total} in all"
        )
    advice = "shorten the prompt or request" if num_prompt else "request"
    raise InputError(
        f"{wrong}. Please {advice} fewer output tokens.",
        param=param if is_prompt else name,
        value=num_prompt if is_prompt else num_output,
    )


def _check_id(request_id: object) -> None:
    if not isinstance(request_id, str) or not _is_text(request_id):
        raise InputError(f"request_id must be a non-empty string, got {request_id!r}", param="request_id")


def _is_text(text: str) -> bool:
    """Not empty, and able to travel: no lone surrogates."""
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


def default_params(config: EngineConfig) -> SamplingParams:
    """What a request without parameters gets: the model's generation config, as far as generation_config selects it."""
    return SamplingParams(**config.model_config.default_sampling)


def has_items(prompt: Prompt) -> bool:
    """Its media were processed elsewhere."""
    media = prompt.media
    return isinstance(media, tuple) and bool(media) and all(isinstance(item, MediaItem) for item in media)


def _processors(names: Sequence[str]) -> list[Any]:
    """Custom LogitsProcessor classes, for their validate_params; the tensor side is only loaded if there are some."""
    if not names and not any(registry.entry_points(group=group) for group in PROCESSOR_GROUPS):
        return []
    from quire.sampling.processors import load_classes  # lazy

    classes: list[Any] = load_classes(names)
    return classes
