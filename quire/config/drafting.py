"""SpeculativeConfig: drafting tokens and verifying them. The options, what they may be together, and their defaults.

In: the mapping that a user gave, or its shorthands. Out: a config whose method, number of tokens and limits are set,
but for the configuration of a draft model, which is a model's like any other (drafter.py, resolve.py).
Must not know: how a method drafts (quire/drafting), or anything about a checkpoint beyond its facts.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from quire.base.log import logger
from quire.config.kernels import ATTENTION_NAMES
from quire.config.memory import LoadConfig
from quire.config.model import ModelConfig, quantization_name
from quire.config.option import LATER, Group, group, option
from quire.schema.errors import ConfigError, NotBuiltError

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig

log = logger(__name__)

# Those that read hidden states of the model, from a checkpoint of their own.
HEAD_METHODS = ("medusa", "mlp_speculator", "eagle", "eagle3")
METHODS = ("ngram", "suffix", "draft_model", *HEAD_METHODS, "mtp", "custom_class")
# Documented methods that this version refuses by name.
UNBUILT = ("dflash", "dspark", "extract_hidden_states")
MODEL_METHODS = ("draft_model", *HEAD_METHODS)  # those with a checkpoint of their own
DRAFT_KEYS = (
    "revision", "quantization", "max_model_len", "draft_tensor_parallel_size", "draft_load_config", "attention_backend",
)  # fmt: skip
MOST_TOKENS = 128  # per row and step
_SUFFIX_TOKENS = 32
_PLACE = "speculative_config"


@dataclass(frozen=True)
class DrafterConfig:
    """A draft model's own configuration. Not a group: none of it is an option of the engine."""

    model_config: ModelConfig
    load_config: LoadConfig
    cache_dtype: str
    unknown_token: int | None = None  # of parallel drafting: stands for each token to come
    attention_backend: str | None = None  # None: the model's


@group
class SpeculativeConfig(Group):
    """Drafting tokens and verifying them."""

    method: str | None = option(
        None, "Where drafts come from; unset: as the model's configuration says, which is named by model.", flat=False,
        choices=METHODS,
    )  # fmt: skip
    model: str | None = option(
        None, "Drafter (a folder, a .gguf file or a hub id), or the import path of a class for custom_class.",
        flat=False,
    )  # fmt: skip
    num_speculative_tokens: int | None = option(
        None, "Tokens drafted per row and step, at most. Unset: as many as the drafter's configuration says.",
        flat=False, low=1, high=MOST_TOKENS,
    )  # fmt: skip
    prompt_lookup_max: int | None = option(None, "Longest n-gram that is looked up.", flat=False, low=1)
    prompt_lookup_min: int | None = option(None, "Shortest n-gram that is looked up.", flat=False, low=1)
    disable_by_batch_size: int | None = option(
        None, "Number of running requests from which on nothing is drafted.", flat=False, low=1
    )
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = option(
        None, "Triples (from, to, tokens): another limit for so many running requests.", flat=False
    )
    suffix_decoding_max_tree_depth: int = option(
        24, "Longest ending that suffix decoding compares, in tokens.", flat=False, low=1, high=1024
    )
    suffix_decoding_max_cached_requests: int = option(
        10000, "Past answers that suffix decoding remembers; 0: none.", flat=False, low=0
    )
    suffix_decoding_max_spec_factor: float = option(
        1.0, "Tokens drafted by suffix decoding per token that agrees.", flat=False, low=0
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, "Least frequency of what suffix decoding drafts.", flat=False, low=0, high=1
    )
    draft_sample_method: Literal["greedy", "probabilistic"] = option(
        "greedy", "How a drafter's tokens are chosen; probabilistic: for requests that draw, from its distributions, "
        "which changes what they draw, not how it is distributed.", flat=False,
    )  # fmt: skip
    adaptive: bool = option(
        True, "Verify as many drafts as are worth it, by acceptance and measured cost; False: all.", flat=False
    )

    revision: str | None = option(None, "Branch, tag or commit of a draft model from the hub.", flat=False)
    quantization: str | None = option(
        None, "Quantization of the draft model, as the option of the same name for the model.", flat=False,
        take=quantization_name,
    )  # fmt: skip
    max_model_len: int | None = option(
        None, "Context length of the draft model; nothing is drafted for longer texts. Unset: its own limit.",
        flat=False, low=1,
    )  # fmt: skip
    draft_tensor_parallel_size: int | None = option(
        None, "Ranks that share the drafter: those of the model (unset), or 1: each of them has all of it.", flat=False,
        low=1,
    )  # fmt: skip
    draft_load_config: dict[str, Any] | None = option(
        None, "How the draft model's weights are read, as a mapping of load options.", flat=False
    )
    attention_backend: str | None = option(
        None, "Attention kernel of the drafter; unset: as of the model.", LATER, flat=False, **ATTENTION_NAMES
    )
    enforce_eager: bool | None = option(
        None, "Capture no CUDA graphs of a draft model; unset: as enforce_eager says for the model.", flat=False
    )
    parallel_drafting: bool = option(
        False, "A draft model drafts all tokens in one pass, for which it must be trained: its configuration names the "
        "token that stands for those to come (pard_token or ptd_token_id).", flat=False,
    )  # fmt: skip
    rejection_sample_method: Literal["standard", "synthetic"] = option(
        "standard", "How drafts are judged; synthetic: a share of them is accepted whatever the model says, to measure "
        "speed. Answers are then meaningless.", flat=False,
    )  # fmt: skip
    synthetic_acceptance_rates: tuple[float, ...] | None = option(
        None, "For rejection_sample_method synthetic: how often each draft of a step is accepted, with all before it.",
        flat=False,
    )  # fmt: skip
    synthetic_acceptance_length: float | None = option(
        None, "The same as one number: tokens that a step brings on average.", flat=False
    )
    drafter: DrafterConfig | None = None  # a result: of methods with a checkpoint of their own

    @property
    def has_drafter(self) -> bool:
        """Whether there is something to load: also of multi-token prediction, whose weights are the model's."""
        return self.drafter is not None or self.method == "mtp"

    def __post_init__(self) -> None:
        super().__post_init__()
        for low, high, tokens in self.num_speculative_tokens_per_batch_size or ():
            if not (1 <= low <= high and 0 <= tokens <= MOST_TOKENS):
                raise ConfigError(
                    f"{_PLACE}: num_speculative_tokens_per_batch_size has ({low}, {high}, {tokens}); it takes triples "
                    f"of 1 <= from <= to and 0 to {MOST_TOKENS} tokens",
                    param=_PLACE,
                )


def choose_drafts(requested: Mapping[str, Any], config: "EngineConfig") -> "EngineConfig":
    """The method and its numbers; what cannot be drafted for is refused."""
    speculative = _with_shorthands(config)
    if speculative is None:
        return config
    method, most = _method(speculative), speculative.num_speculative_tokens
    is_drawn, in_one_pass = speculative.draft_sample_method != "greedy", speculative.parallel_drafting
    _check_model(config, method, drawn=is_drawn, in_one_pass=in_one_pass)
    if method in (None, *HEAD_METHODS, "mtp"):
        from quire.config.described import describe  # lazy

        described = describe(method, speculative, config)
        method, most = described.method, described.num_tokens
    if most is None:
        if method != "suffix":
            raise _wrong(f"method {method!r} needs num_speculative_tokens, at least 1")
        most = _SUFFIX_TOKENS
    changes: dict[str, Any] = {"method": method, "num_speculative_tokens": most} | _synthetic(speculative, most)
    if method == "ngram":
        changes |= _lookup(speculative)
    if speculative.parallel_drafting:  # what a pass costs is known for drafts that take one pass each
        changes["adaptive"] = False
    _check_draft_keys(speculative, method, config.parallel_config.tensor_parallel_size)
    speculative = replace(speculative, **changes)
    log.info("Speculative decoding: %s, up to %d tokens per step", method, most)
    return replace(config, speculative_config=speculative, spec_method=None, spec_model=None, spec_tokens=None)


def _with_shorthands(config: "EngineConfig") -> SpeculativeConfig | None:
    short = {"method": config.spec_method, "model": config.spec_model, "num_speculative_tokens": config.spec_tokens}
    named: dict[str, Any] = {key: value for key, value in short.items() if value is not None}
    if not named:
        return config.speculative_config
    if config.speculative_config is not None:
        raise _wrong("spec_method, spec_model and spec_tokens are shorthands for its keys; give either")
    return SpeculativeConfig(**named)


def _method(speculative: SpeculativeConfig) -> str | None:
    """None: the drafter's configuration says."""
    method, model = speculative.method, speculative.model
    if method is None:
        if model is None:
            raise _wrong(f"it names neither a method nor a model; methods are {', '.join(METHODS)}")
        if model not in ("ngram", "[ngram]"):
            return None
        method = "ngram"
    if method == "ngram_gpu":
        log.info("speculative_config: method 'ngram_gpu' is 'ngram': n-grams are matched on the host beside the device")
        method, model = "ngram", None if model == "ngram_gpu" else model
    if method.endswith("_mtp"):
        log.warning("speculative_config: method %r is 'mtp', which goes by the model's own configuration", method)
        method = "mtp"
    if method in UNBUILT:
        raise NotBuiltError(
            f"{_PLACE}: method {method!r} is not available in this version of Quire; methods are {', '.join(METHODS)}",
            param=_PLACE,
        )
    if method not in METHODS:
        near = difflib.get_close_matches(method, (*METHODS, *UNBUILT), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise _wrong(f"method {method!r} is unknown; methods are {', '.join(METHODS)}{hint}")
    if (method == "custom_class") and not model:
        raise _wrong("method 'custom_class' needs model, the import path of a Proposer class")
    if method in MODEL_METHODS:
        if not model:
            raise _wrong(f"method {method!r} needs model, a folder, a .gguf file or a hub id")
    elif method not in ("custom_class", "mtp") and model not in (None, "ngram", "[ngram]", method):
        raise _wrong(f"method {method!r} has no draft model, and model is {model!r}")
    return method


def _synthetic(speculative: SpeculativeConfig, most: int) -> dict[str, Any]:
    """The share of drafts to be accepted at each place, where that is to be invented."""
    rates, length = speculative.synthetic_acceptance_rates, speculative.synthetic_acceptance_length
    if speculative.rejection_sample_method == "standard":
        if rates is not None or length is not None:
            raise _wrong("synthetic_acceptance_rates and _length need rejection_sample_method='synthetic'")
        return {}
    if (rates is None) == (length is None):
        raise _wrong(
            "rejection_sample_method='synthetic' needs synthetic_acceptance_rates or synthetic_acceptance_length, one "
            "of the two"
        )
    if speculative.draft_sample_method != "greedy":
        raise _wrong("rejection_sample_method='synthetic' judges no drafts that are drawn (draft_sample_method)")
    if length is not None:
        if not 1 <= length <= most + 1:
            raise _wrong(f"synthetic_acceptance_length={length} must be at least 1 and at most {most + 1}")
        rates = tuple(min(1.0, max(0.0, length - 1 - place)) for place in range(most))
    assert rates is not None
    falls = all(0 <= rate <= 1 for rate in rates) and list(rates) == sorted(rates, reverse=True)
    if len(rates) != most or not falls:
        raise _wrong(
            f"synthetic_acceptance_rates={list(rates)!r:.200} must be {most} numbers from 0 to 1 that do not rise, one "
            "for each draft"
        )
    log.warning("speculative_config: drafts are accepted whatever the model says; answers mean nothing")
    return {"synthetic_acceptance_rates": rates, "synthetic_acceptance_length": None}


def _check_draft_keys(speculative: SpeculativeConfig, method: str, num_ranks: int) -> None:
    for key in DRAFT_KEYS:
        value = getattr(speculative, key)
        if value is not None and method not in MODEL_METHODS:
            raise _wrong(f"{key}={value!r} is for draft models, and method {method!r} has none")
    if speculative.parallel_drafting and method != "draft_model":
        raise _wrong(f"parallel_drafting is for draft models that are trained for it, not for method {method!r}")
    if speculative.draft_sample_method != "greedy" and method not in (*MODEL_METHODS, "mtp"):
        raise _wrong(
            f"draft_sample_method={speculative.draft_sample_method!r} needs a drafter with distributions, and method "
            f"{method!r} has none"
        )
    size = speculative.draft_tensor_parallel_size
    if size not in (None, 1, num_ranks):
        raise _wrong(f"draft_tensor_parallel_size={size}: it may be 1 or that of the model, which is {num_ranks}")


def _lookup(speculative: SpeculativeConfig) -> dict[str, int]:
    """Either limit alone is both; neither is n-grams of 2 to 5 tokens."""
    low, high = speculative.prompt_lookup_min, speculative.prompt_lookup_max
    if low is None and high is None:
        low, high = 2, 5
    low, high = low or min(1, high or 1), high or low or 1
    if low > high:
        raise _wrong(f"prompt_lookup_min={low} is more than prompt_lookup_max={high}")
    return {"prompt_lookup_min": low, "prompt_lookup_max": high}


def _check_model(config: "EngineConfig", method: str | None, *, drawn: bool, in_one_pass: bool) -> None:
    """NotBuiltError: this model, or an option, and drafts exclude each other."""
    model, parallel, on_gpu = config.model_config, config.parallel_config, config.device_config.device != "cpu"
    reasons = {
        "pooling models generate nothing": model.is_pooling,
        "drafts with several ranks are built for CPU only": on_gpu and parallel.world_size > 1,
        "recurrent states after drafts are kept on CPU only": on_gpu and model.facts.has_states,
        "drafts are drawn on CPU only": on_gpu and drawn,
        "all tokens are drafted in one pass (parallel_drafting) on CPU only": on_gpu and in_one_pass,
        "custom logits processors see one token of a row at a time": bool(model.logits_processors),
        "a class of yours may draft otherwise on each rank": method == "custom_class" and parallel.world_size > 1,
        "drafts are not built for ranks that a launcher starts": parallel.world_size > 1
        and parallel.distributed_executor_backend == "external_launcher",
    }
    for reason, applies in reasons.items():
        if applies:
            which = "" if method is None else f" (method {method!r})"
            raise NotBuiltError(f"{_PLACE}{which}: {reason}", param=_PLACE)


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"{_PLACE}: {what}", param=_PLACE)
