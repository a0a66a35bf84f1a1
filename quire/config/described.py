"""What a drafter's files say about it, before anything is resolved: the method, and how many tokens it drafts.

In: the keys of speculative_config that name a drafter, and the model's configuration. Out: Described. Must not know:
other keys, tensors.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from quire.base.log import logger
from quire.checkpoint.drafter import method_of, num_tokens
from quire.checkpoint.raw import read_raw
from quire.checkpoint.source import locate
from quire.schema.errors import ConfigError, InputError

if TYPE_CHECKING:
    from quire.config.drafting import SpeculativeConfig
    from quire.config.engine import EngineConfig

log = logger(__name__)
_PLACE = "speculative_config"
_HEADS = ("medusa", "mlp_speculator")  # with a head for each token
# Models published with one module for multi-token prediction, of which their configurations may say nothing.
_WITH_MODULE = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "LongcatFlashForCausalLM")


class Described(NamedTuple):
    method: str
    num_tokens: int | None


def describe(method: str | None, speculative: "SpeculativeConfig", config: "EngineConfig") -> Described:
    """The method (None: not given) and the number of tokens, from the drafter's configuration where they are unset."""
    requested = speculative.num_speculative_tokens
    if method == "mtp":
        return Described(method, _mtp_tokens(speculative, config))
    raw = _read(speculative, config)
    method = method or method_of(raw, speculative.model or "")
    most = num_tokens(raw)
    if most is not None and requested is not None and method in _HEADS and requested > most:
        raise _wrong(f"num_speculative_tokens={requested}, and the drafter has {most} heads, one for each token")
    return Described(method, most if requested is None else requested)


def _mtp_tokens(speculative: "SpeculativeConfig", config: "EngineConfig") -> int | None:
    model = config.model_config
    if speculative.model not in (None, model.model, model.path, "mtp"):
        raise _wrong(f"method 'mtp' drafts with the model's own weights, and model is {speculative.model!r}")
    raw = model.hf_config
    layers = raw.get("num_nextn_predict_layers", raw.get("mtp_num_hidden_layers"))
    if layers is None and model.architecture in _WITH_MODULE:
        layers = 1
    if not isinstance(layers, int) or layers < 1:
        raise _wrong(
            f"method 'mtp' needs a model with modules for multi-token prediction, and the configuration of "
            f"{model.architecture} has no num_nextn_predict_layers"
        )
    most = speculative.num_speculative_tokens or 1
    if most > 1 or layers > 1:
        log.info("mtp: the first of %d modules drafts %d tokens one after another", layers, most)
    return most


def _read(speculative: "SpeculativeConfig", config: "EngineConfig") -> dict[str, Any]:
    model, files = config.model_config, config.load_config
    try:
        located = locate(speculative.model, speculative.revision, files.download_dir, model.hf_token)
        return read_raw(located.path, "auto")
    except InputError as wrong:
        raise type(wrong)(f"{_PLACE}: draft model {speculative.model!r}: {wrong}", param=_PLACE) from None


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"{_PLACE}: {what}", param=_PLACE)
