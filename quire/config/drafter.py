"""A drafter's own configuration: the options of speculative_config, resolved as those of any model are.

In: what the user requested for the model, and the keys for its drafter. Out: options to resolve, and then the model's
configuration with the drafter's in it. A checkpoint of the speculators library given as the model itself leads to the
model that it drafts for. Must not know: how a drafter is built or computed.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.base.log import logger
from quire.checkpoint.drafter import DraftFormat, speculators
from quire.config.drafting import HEAD_METHODS, DrafterConfig, SpeculativeConfig
from quire.config.engine import replace
from quire.config.memory import LoadConfig
from quire.config.option import declarations, unknown
from quire.schema.errors import ConfigError, NotBuiltError

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig

log = logger(__name__)
_PLACE = "speculative_config"
# options of the model that its drafter has too
_SHARED = ("dtype", "trust_remote_code", "hf_token", "download_dir", "model_impl", "seed")


def follow_speculators(raw: Mapping[str, Any], config: "EngineConfig") -> "EngineConfig":
    """For a checkpoint of the speculators library that was given as the model: the model it drafts for, and it as the
    drafter."""
    about, model = speculators(raw), config.model_config
    assert about is not None
    if about.verifier is None:
        raise ConfigError(
            f"{model.model!r} is a drafter, and its speculators_config does not say for which model; name the model, "
            "and this as speculative_config.model",
            param="model",
        )
    log.info("%s is a drafter (%s) for %s", model.model, about.method, about.verifier)
    own = SpeculativeConfig(method=about.method, model=model.model, num_speculative_tokens=about.num_tokens)
    changes: dict[str, Any] = {"model_config.model": about.verifier, "model_config.revision": None}
    if config.speculative_config is None and config.spec_method is None and config.spec_model is None:
        changes["speculative_config"] = own
    return replace(config, **changes)


def draft_options(requested: Mapping[str, Any], config: "EngineConfig") -> dict[str, Any]:
    """What a user would request to run the draft model by itself."""
    speculative = config.speculative_config
    assert speculative is not None
    method = speculative.method or ""
    heads: dict[str, Any] = {}
    if method in HEAD_METHODS:  # which compute with the model's own states
        heads = {"dtype": config.model_config.dtype, "hf_overrides": DraftFormat(method, config.model_config.hf_config)}
        heads["model_impl"] = "quire"
    return {
        **{name: requested[name] for name in _SHARED if requested.get(name) is not None},
        **_load_options(speculative.draft_load_config or {}),
        "model": speculative.model,
        "revision": speculative.revision,
        "quantization": speculative.quantization,
        "max_model_len": speculative.max_model_len,
        "attention_backend": speculative.attention_backend,
        "device": config.device_config.device,
        "runner": "generate",
        "skip_tokenizer_init": True,
        **heads,
    }


def with_drafter(config: "EngineConfig", drafter: "EngineConfig") -> "EngineConfig":
    """`drafter`: resolved from those options."""
    speculative = config.speculative_config
    assert speculative is not None
    _check(config, drafter)
    log.info("Draft model: %s, %s", speculative.model, drafter.model_config.architecture)
    own = DrafterConfig(
        drafter.model_config,
        drafter.load_config,
        drafter.cache_config.cache_dtype,
        _unknown_token(drafter) if speculative.parallel_drafting else None,
        None if speculative.attention_backend is None else drafter.attention_config.backend,
    )
    return replace(config, speculative_config=replace(speculative, drafter=own))


def _unknown_token(drafter: "EngineConfig") -> int:
    """What a drafter reads in the place of tokens to come."""
    raw, vocab = drafter.model_config.hf_config, drafter.model_config.facts.vocab_size
    token = raw.get("pard_token", raw.get("ptd_token_id"))
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
        raise _wrong(
            f"parallel_drafting needs a draft model whose configuration has a pard_token or ptd_token_id below "
            f"{vocab}, and it is {token!r:.100}"
        )
    return token


def _load_options(mapping: Mapping[str, Any]) -> dict[str, Any]:
    known = {one.option.name or name for name, one in declarations(LoadConfig).items()}
    for key in mapping:
        if key not in known:
            raise ConfigError(unknown(f"{_PLACE}: draft_load_config has no key", key, known), param=_PLACE)
    return dict(mapping)


def _check(config: "EngineConfig", drafter: "EngineConfig") -> None:
    ours, theirs = config.model_config.facts, drafter.model_config.facts
    speculative = config.speculative_config
    assert speculative is not None
    if ours.vocab_size != theirs.vocab_size:
        raise _wrong(
            f"the draft model has a vocabulary of {theirs.vocab_size} tokens, and the model one of "
            f"{ours.vocab_size}; drafts are token ids, so both must be the same"
        )
    if speculative.method in HEAD_METHODS:
        width = drafter.model_config.hf_config.get("target_hidden_size") or theirs.hidden_size
        if width != ours.hidden_size:
            raise _wrong(f"the drafter reads hidden states of {width} numbers, and the model's have {ours.hidden_size}")
        if config.model_config.model_impl == "transformers":
            raise NotBuiltError(
                f"{_PLACE}: method {speculative.method!r} reads hidden states of Quire's own declarations, not of "
                "transformers' code",
                param=_PLACE,
            )
    if theirs.has_states:
        raise NotBuiltError(
            f"{_PLACE}: {drafter.model_config.architecture} has recurrent states, which cannot be rolled back to "
            "before wrong drafts",
            param=_PLACE,
        )


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"{_PLACE}: {what}", param=_PLACE)
