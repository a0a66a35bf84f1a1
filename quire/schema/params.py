"""What a caller may ask of one request: SamplingParams, BeamSearchParams, PoolingParams, and their validation.

Owns: names, defaults, ranges. Every check raises InputError with the field, the value and the limit. Callers may change
their SamplingParams at any time; what crosses to the engine is ResolvedParams, made once by engine/inputs.py, frozen,
neither changed nor checked again. Must not know: the model, or how a field is implemented.
"""

from __future__ import annotations

import copy
import enum
import math
import operator
from collections.abc import Mapping
from numbers import Integral, Real
from operator import attrgetter
from typing import Any

import msgspec

from quire.schema.errors import InputError
from quire.schema.grammar import GrammarSpec

SAMPLING_EPS = 1e-5  # below this a temperature means greedy
MIN_TEMPERATURE = 1e-2  # a smaller positive one would overflow the logits; it is raised to this
MAX_SEED = (1 << 63) - 1
_MAX_INT = (1 << 63) - 1  # what a message between processes can hold
_MAX_FLOAT = 3.4e38  # what a row of float32 can hold
_FLAGS = (
    "ignore_eos", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "skip_clone",
)  # fmt: skip


class RequestOutputKind(enum.IntEnum):
    """What each streamed RequestOutput holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # only what is new
    FINAL_ONLY = 2  # one output, at the end


class StructuredOutputsParams(msgspec.Struct, kw_only=True):
    """A constraint on the text. Exactly one of the constraint fields may be set.

    `json` is a JSON schema as text or mapping, or a pydantic model class.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        schema: Any = self.json
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
            self.json = schema.model_json_schema()
        if self.json_object is False:
            self.json_object = None
        forms = [n for n in names if getattr(self, n) is not None]
        if len(forms) != 1:
            raise InputError(
                f"structured_outputs takes exactly one of {', '.join(names)}; got {forms or 'none'}",
                param="structured_outputs",
            )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(value := getattr(self, name), bool):
                raise InputError(f"{name} must be True or False, got {value!r}", param="structured_outputs")
        if not isinstance(self.whitespace_pattern, str | None):
            raise InputError("whitespace_pattern must be a string", param="structured_outputs")


class RepetitionDetectionParams(msgspec.Struct, kw_only=True, frozen=True):
    """Stop a request whose output repeats itself."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _check_int(f"repetition_detection.{name}", getattr(self, name), 0)


class TimeRules(msgspec.Struct, kw_only=True, frozen=True):
    """How times may stand between words, in a vocabulary whose last ids are times (Whisper's): the first token is one;
    they come in pairs, but for the last before the end; none is before another; and where times together are likelier
    than any text, a time is next."""

    first_id: int  # of a time; all above are times
    end_id: int  # ids below are text
    plain_id: int  # says that no times follow: never written
    latest: int | None = None  # that the first may be, counted from first_id

    def __post_init__(self) -> None:
        for name in ("first_id", "end_id", "plain_id"):
            _check_int(f"speech_rules.{name}", getattr(self, name), 0)
        if self.latest is not None:
            _check_int("speech_rules.latest", self.latest, 0)


class SpeechRules(msgspec.Struct, kw_only=True, frozen=True):
    """What a speech model may write, beside its banned words."""

    never_first: tuple[int, ...] = ()  # token ids that no text begins with
    times: TimeRules | None = None


class ResolvedParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="sampling"):
    """How one request is sampled and reported: SamplingParams after every check, with what the model decides filled in.

    Custom logits processors see this, so fields have the names of SamplingParams. Lists are tuples.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: every token
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # the caller's, then the model's further end ids unless ignore_eos
    ignore_eos: bool = False
    max_tokens: int | None = 16  # the caller's; EngineRequest has what fits
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    flat_logprobs: bool = False
    detokenize: bool = True  # False where there is no tokenizer
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    grammar: GrammarSpec | None = None  # of structured_outputs
    logit_bias: Mapping[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_args: Mapping[str, Any] | None = None
    speech_rules: SpeechRules | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < SAMPLING_EPS


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True):
    """How one request is sampled and reported. Field names and defaults are the documented ones."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None  # used where bad_words is empty
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_args: dict[str, Any] | None = None
    skip_clone: bool = False
    logits_processors: Any = None  # refused: the engine has them, and not a request
    speech_rules: SpeechRules | None = None  # Quire's own: of a speech model

    def __post_init__(self) -> None:
        if self.logits_processors:
            raise _refuse_callables(self.logits_processors)
        try:
            self._check_values()
        except InputError:
            if not self._take_numbers():
                raise
            self._check_values()
        self._check_flags()

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Build from values of which any may be None, meaning: the default."""
        unknown = set(values) - set(cls.__struct_fields__)
        if unknown:
            raise InputError(f"unknown sampling parameter(s): {', '.join(sorted(unknown))}")
        return cls(**{name: value for name, value in values.items() if value is not None})

    @property
    def greedy(self) -> bool:
        return self.temperature < SAMPLING_EPS

    @property
    def sampling_type(self) -> str:
        if self.greedy:
            return "greedy"
        return "random" if self.seed is None else "random_seed"

    def clone(self) -> SamplingParams:
        """A private copy: deep, unless the caller promised the object is already private (skip_clone)."""
        return copy.copy(self) if self.skip_clone else copy.deepcopy(self)

    def checked(self) -> SamplingParams:
        """A copy that was checked, whatever became of this one since it was made."""
        own = copy.copy(self)
        own.__post_init__()
        if not self.skip_clone:
            own.extra_args = copy.deepcopy(self.extra_args)
        return own

    def freeze(self, **resolved: Any) -> ResolvedParams:
        """The values of a checked copy as a value of their own; `resolved` are those that the model decides."""
        values = dict(zip(_KEPT, _kept_values(self), strict=True))
        for name, value in zip(_TUPLES, _tuple_values(self), strict=True):
            if value:
                values[name] = tuple(value)
        if self.bad_words_token_ids:
            values["bad_words_token_ids"] = tuple(tuple(word) for word in self.bad_words_token_ids if word)
        if self.logit_bias:
            values["logit_bias"] = self.logit_bias
        values.update(resolved)
        return ResolvedParams(**values)

    def _check_values(self) -> None:
        self._normalize()
        self._check_numbers()
        self._check_lists()

    def _take_numbers(self) -> bool:
        """Numbers and arrays of other libraries (numpy's are no int) as Python's own; whether there were any. Only
        where a check failed: others need not pay for it."""
        changed = False
        for names, read in ((_WHOLE, _as_int), (_REAL, _as_float), (_ID_LISTS, _as_list)):
            for name in names:
                value = getattr(self, name)
                if (plain := read(value)) is not value:
                    setattr(self, name, plain)
                    changed = True
        return changed

    def _normalize(self) -> None:
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        if self.top_k == -1:
            self.top_k = 0
        if self.seed == -1:
            self.seed = None
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop_token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.bad_words = [] if self.bad_words is None else self.bad_words
        if not isinstance(self.output_kind, RequestOutputKind):
            self.output_kind = _output_kind(self.output_kind)
        if self.logit_bias is not None:
            self.logit_bias = _clean_bias(self.logit_bias)
        if isinstance(self.temperature, (int, float)) and SAMPLING_EPS <= self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE

    def _check_flags(self) -> None:
        for name in _FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise InputError(f"{name} must be True or False, got {value!r}", param=name, value=value)
        if not isinstance(self.skip_reading_prefix_cache, bool | None):
            raise InputError(
                f"skip_reading_prefix_cache must be True, False or None, got {self.skip_reading_prefix_cache!r}",
                param="skip_reading_prefix_cache",
            )

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, _MAX_FLOAT, open_low=True)
        _check_float("temperature", self.temperature, 0.0, _MAX_FLOAT)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, 0, hint="0 or -1 keeps every token")
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise InputError(
                    f"min_tokens is {self.min_tokens}, which is more than max_tokens ({self.max_tokens})",
                    param="min_tokens",
                    value=self.min_tokens,
                )
        if self.seed is not None:
            _check_int("seed", self.seed, -(1 << 63), MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _check_int(name, value, -1, hint="-1 asks for the whole vocabulary")
        if self.truncate_prompt_tokens is not None:
            _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, hint="-1 means the model's limit")
            if self.truncate_prompt_tokens == 0:
                raise InputError(
                    "truncate_prompt_tokens is 0; it must be -1 or at least 1", param="truncate_prompt_tokens"
                )
        if self.thinking_token_budget is not None:
            _check_int("thinking_token_budget", self.thinking_token_budget, 0)

    def _check_lists(self) -> None:
        _check_list("stop", self.stop, str)
        _check_list("stop_token_ids", self.stop_token_ids, int)
        _check_list("bad_words", self.bad_words, str)
        if any(not s for s in self.stop or ()):
            raise InputError("stop holds an empty string; every stop string needs at least one character", param="stop")
        if any(not s.strip() for s in self.bad_words or ()):
            raise InputError("bad_words holds an empty word", param="bad_words")
        if self.stop and not self.detokenize:
            raise InputError("stop strings need text: they cannot be used with detokenize=False", param="stop")
        if self.allowed_token_ids is not None:
            _check_list("allowed_token_ids", self.allowed_token_ids, int)
            if not self.allowed_token_ids:
                raise InputError("allowed_token_ids is empty, so no token could follow", param="allowed_token_ids")
        if self.logprob_token_ids is not None:
            _check_list("logprob_token_ids", self.logprob_token_ids, int)
        if self.bad_words_token_ids is not None:
            _check_list("bad_words_token_ids", self.bad_words_token_ids, (list, tuple))
            for word in self.bad_words_token_ids:
                _check_list("bad_words_token_ids", word, int)
        rule = self.repetition_detection
        if rule is not None and not isinstance(rule, RepetitionDetectionParams):
            raise InputError(
                f"repetition_detection must be RepetitionDetectionParams, got {rule!r}", param="repetition_detection"
            )
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InputError(
                f"structured_outputs must be StructuredOutputsParams, got {type(self.structured_outputs).__name__}",
                param="structured_outputs",
            )
        if not isinstance(self.speech_rules, SpeechRules | None):
            raise InputError(
                f"speech_rules must be SpeechRules, got {type(self.speech_rules).__name__}", param="speech_rules"
            )
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise InputError(f"extra_args must be a dict, got {type(self.extra_args).__name__}", param="extra_args")


# Fields by what they hold.
_WHOLE = (
    "n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens",
    "thinking_token_budget",
)  # fmt: skip
_REAL = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
_ID_LISTS = ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "bad_words_token_ids")
# Fields that a ResolvedParams takes over as they are, and those that become tuples.
_TUPLES = ("stop", "stop_token_ids", "logprob_token_ids", "allowed_token_ids", "bad_words")
_KEPT = tuple(
    name
    for name in ResolvedParams.__struct_fields__
    if name not in (*_TUPLES, "logit_bias", "bad_words_token_ids", "grammar")
)
_kept_values, _tuple_values = attrgetter(*_KEPT), attrgetter(*_TUPLES)
_MOST_PENALTY = 32.0  # a length to this power, and to its inverse, is still a number


class BeamSearchParams(msgspec.Struct, omit_defaults=True, dict=True):
    """How LLM.beam_search searches."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None  # what constrains every beam

    def __post_init__(self) -> None:
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InputError(
                f"structured_outputs must be StructuredOutputsParams, got {type(self.structured_outputs).__name__}",
                param="structured_outputs",
            )
        self.beam_width, self.max_tokens = _as_int(self.beam_width), _as_int(self.max_tokens)
        self.temperature, self.length_penalty = _as_float(self.temperature), _as_float(self.length_penalty)
        _check_int("beam_width", self.beam_width, 1)
        _check_int("max_tokens", self.max_tokens, 1)
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_float("length_penalty", self.length_penalty, -_MOST_PENALTY, _MOST_PENALTY)


class PoolingParams(msgspec.Struct, omit_defaults=True, dict=True, tag="pooling"):
    """How a pooling model's hidden states become a result. None is what the model and its pooler_config say."""

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    task: str | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def clone(self) -> PoolingParams:
        return copy.deepcopy(self)

    def check(self) -> None:
        """InputError for a value that no model takes."""
        if self.truncate_prompt_tokens is not None:
            _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
        if self.dimensions is not None:
            _check_int("dimensions", self.dimensions, 1)
        if self.step_tag_id is not None:
            _check_int("step_tag_id", self.step_tag_id, 0)
        if self.returned_token_ids is not None:
            _check_list("returned_token_ids", self.returned_token_ids, int)
        for name in ("normalize", "use_activation", "softmax", "activation", "skip_reading_prefix_cache"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise InputError(f"{name} must be true or false, got {value!r}", param=name, value=value)
        if not isinstance(self.task, str | None):
            raise InputError(f"task must be a string, got {self.task!r}", param="task")

    @property
    def applies_activation(self) -> bool | None:
        """use_activation, under its own or one of its older names; None: not set."""
        for value in (self.use_activation, self.normalize, self.softmax, self.activation):
            if value is not None:
                return value
        return None


def _refuse_callables(value: object) -> InputError:
    many = f" ({len(value)} given)" if isinstance(value, (list, tuple)) else ""
    return InputError(
        f"logits_processors on a request{many} are not supported: pass a LogitsProcessor class to the "
        "engine (logits_processors=[...]); AdapterLogitsProcessor wraps a per-request callable",
        param="logits_processors",
    )


def _clean_bias(bias: object) -> dict[int, float]:
    """Keys may arrive as strings (JSON); values are clamped to the documented [-100, 100]."""
    if not isinstance(bias, dict):
        raise InputError(f"logit_bias must map token ids to numbers, got {type(bias).__name__}", param="logit_bias")
    clean: dict[int, float] = {}
    for key, value in bias.items():
        try:
            token, number = int(key), float(value)
        except (TypeError, ValueError):
            raise InputError(
                f"logit_bias has {key!r}: {value!r}; keys are token ids and values numbers", param="logit_bias"
            ) from None
        if math.isnan(number):
            raise InputError(f"logit_bias for token {token} is NaN", param="logit_bias")
        clean[token] = min(100.0, max(-100.0, number))
    return clean


def _as_int(value: Any) -> Any:
    """An integer of any library as Python's; anything else, and a bool, as it is."""
    if isinstance(value, int) or not isinstance(value, Integral):
        return value
    return operator.index(value)


def _as_float(value: Any) -> Any:
    return value if type(value) in (int, float, bool) or not isinstance(value, Real) else float(value)


def _as_list(value: Any) -> Any:
    """An array as a list, and its items as Python's own, in lists of lists too."""
    if hasattr(value, "tolist"):
        return _as_list(value.tolist())
    if not isinstance(value, (list, tuple)):
        return _as_int(value)
    plain = [_as_list(item) for item in value]
    return value if all(map(operator.is_, plain, value)) else plain


def _check_int(name: str, value: object, low: int, high: int | None = None, *, hint: str = "") -> None:
    if type(value) is int and low <= value <= (_MAX_INT if high is None else high):
        return
    limit = f"at least {low}" if high is None else f"between {low} and {high}"
    tail = f" ({hint})" if hint else ""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} must be an integer {limit}{tail}, got {value!r}", param=name, value=value)
    if value < low or (high is not None and value > high):
        raise InputError(f"{name} must be {limit}{tail}, got {value}", param=name, value=value)
    if high is None and value > _MAX_INT:
        raise InputError(f"{name} must be at most {_MAX_INT}, got {value}", param=name, value=value)


def _check_float(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if type(value) is float and low < value <= high and value != math.inf:
        return
    limit = f"in {'(' if open_low else '['}{low}, {high}{')' if math.isinf(high) else ']'}"
    if not (type(value) is int or type(value) is float):
        raise InputError(f"{name} must be a number {limit}, got {value!r}", param=name, value=value)
    if math.isnan(value) or math.isinf(value) or value < low or value > high or (open_low and value == low):
        raise InputError(f"{name} must be {limit}, got {value}", param=name, value=value)


def _check_list(name: str, value: object, kind: type | tuple[type, ...]) -> None:
    word = kind.__name__ if isinstance(kind, type) else kind[0].__name__
    if not isinstance(value, (list, tuple)):
        raise InputError(f"{name} must be a list of {word}, got {type(value).__name__}", param=name)
    for item in value:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise InputError(f"{name} holds {item!r}; every entry must be {word}", param=name, value=item)


def _output_kind(value: object) -> RequestOutputKind:
    if not isinstance(value, int) or isinstance(value, bool) or value not in list(RequestOutputKind):
        known = ", ".join(f"{kind.name} ({kind.value})" for kind in RequestOutputKind)
        raise InputError(f"output_kind must be one of {known}, got {value!r}", param="output_kind", value=value)
    return RequestOutputKind(value)


def sampling_of(params: ResolvedParams | PoolingParams) -> ResolvedParams:
    """How tokens are chosen: for a request that is pooled nothing is, so the defaults."""
    return params if isinstance(params, ResolvedParams) else _NOT_SAMPLED


_NOT_SAMPLED = ResolvedParams()
