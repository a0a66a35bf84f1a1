"""A draft model's own configuration: the options of speculative_config, resolved as those of any model are.

In: what the user requested for the model, and the keys for its drafter. Out: options to resolve, and then the model's
configuration with the drafter's in it. Must not know: how a drafter is built or computed.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.base.log import logger
from quire.config.drafting import DrafterConfig
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


def draft_options(requested: Mapping[str, Any], config: "EngineConfig") -> dict[str, Any]:
    """What a user would request to run the draft model by itself."""
    speculative = config.speculative_config
    assert speculative is not None
    return {
        **{name: requested[name] for name in _SHARED if requested.get(name) is not None},
        **_load_options(speculative.draft_load_config or {}),
        "model": speculative.model,
        "revision": speculative.revision,
        "quantization": speculative.quantization,
        "max_model_len": speculative.max_model_len,
        "device": config.device_config.device,
        "runner": "generate",
        "skip_tokenizer_init": True,
    }


def with_drafter(config: "EngineConfig", drafter: "EngineConfig") -> "EngineConfig":
    """`drafter`: resolved from those options."""
    speculative = config.speculative_config
    assert speculative is not None
    _check(config, drafter)
    log.info("Draft model: %s, %s", speculative.model, drafter.model_config.architecture)
    own = DrafterConfig(drafter.model_config, drafter.load_config, drafter.cache_config.cache_dtype)
    return replace(config, speculative_config=replace(speculative, drafter=own))


def _load_options(mapping: Mapping[str, Any]) -> dict[str, Any]:
    known = {one.option.name or name for name, one in declarations(LoadConfig).items()}
    for key in mapping:
        if key not in known:
            raise ConfigError(unknown(f"{_PLACE}: draft_load_config has no key", key, known), param=_PLACE)
    return dict(mapping)


def _check(config: "EngineConfig", drafter: "EngineConfig") -> None:
    ours, theirs = config.model_config.facts, drafter.model_config.facts
    if ours.vocab_size != theirs.vocab_size:
        raise ConfigError(
            f"{_PLACE}: the draft model has a vocabulary of {theirs.vocab_size} tokens, and the model one of "
            f"{ours.vocab_size}; drafts are token ids, so both must be the same",
            param=_PLACE,
        )
    if theirs.has_states:
        raise NotBuiltError(
            f"{_PLACE}: {drafter.model_config.architecture} has recurrent states, which cannot be rolled back to "
            "before wrong drafts",
            param=_PLACE,
        )
