"""Configurations of drafters in the formats they are published in, brought to one form.

In: the raw configuration of a drafter's checkpoint, and that of the model it drafts for. Out: which method it is for,
how many tokens it drafts, and a configuration with the keys that models/draft_heads.py and models/draft_layers.py read.
Formats: the methods' own repositories, those converted for vLLM, and `speculators_config` (the speculators library),
which also names the model that it drafts for. Must not know: options, tensors.
"""

from collections.abc import Mapping
from typing import Any

from quire.checkpoint.facts import read_facts
from quire.schema.errors import CheckpointError, ConfigError, NotBuiltError

_PLACE = "speculative_config"
_METHOD_OF = {"medusa": "medusa", "mlp_speculator": "mlp_speculator", "eagle": "eagle", "eagle3": "eagle3"}
# layers that drafters are made of, by model_type
_LAYERS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "mistral": "MistralForCausalLM"}


def method_of(raw: Mapping[str, Any], name: str) -> str:
    """The method that a checkpoint is for; any causal model is a draft_model."""
    if (about := speculators(raw)) is not None:
        return about.method
    kind, architectures = str(raw.get("model_type") or ""), [str(one) for one in raw.get("architectures") or ()]
    if kind in _METHOD_OF:
        return _METHOD_OF[kind]
    if "medusa_num_heads" in raw:
        return "medusa"
    named = [name.rstrip("/").rpartition("/")[2], *architectures]
    if any("eagle3" in one.lower() or "eagle-3" in one.lower() for one in named):
        return "eagle3"
    if any("eagle-" in one.lower() or "eagleforcausal" in one.lower() for one in named):
        return "eagle"
    return "draft_model"


def num_tokens(raw: Mapping[str, Any]) -> int | None:
    """How many tokens a checkpoint drafts; None: any number."""
    if (about := speculators(raw)) is not None:
        return about.num_tokens
    for key in ("medusa_num_heads", "n_predict", "num_heads" if raw.get("model_type") == "medusa" else ""):
        value = raw.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


class Speculators:
    """What `speculators_config` says."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        inner = raw["speculators_config"]
        if not isinstance(inner, Mapping):
            raise CheckpointError(f"speculators_config is {inner!r:.100}; expected a mapping", param=_PLACE)
        self.method = str(raw.get("speculators_model_type") or inner.get("algorithm") or "")
        verifier = inner.get("verifier")
        verifier = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
        self.verifier = verifier if isinstance(verifier, str) and verifier else None
        self.num_tokens = _proposed(inner)
        if self.method not in ("eagle", "eagle3"):
            raise NotBuiltError(
                f"a checkpoint of the speculators library for {self.method or 'no method'!r} cannot be used; eagle and "
                "eagle3 can",
                param=_PLACE,
            )


def _proposed(inner: Mapping[str, Any]) -> int | None:
    """The number of tokens of the default method, or of the first one."""
    methods = inner.get("proposal_methods")
    known = [one for one in methods if isinstance(one, Mapping)] if isinstance(methods, list) else []
    default = inner.get("default_proposal_method")
    known.sort(key=lambda one: one.get("proposal_type") != default)
    count = known[0].get("speculative_tokens") if known else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


def speculators(raw: Mapping[str, Any]) -> Speculators | None:
    return Speculators(raw) if "speculators_config" in raw else None


class DraftFormat:
    """hf_overrides of a drafter."""

    def __init__(self, method: str, target: Mapping[str, Any]) -> None:
        """`target`: the configuration of the model."""
        self._method, self._target = method, target

    def __str__(self) -> str:
        return f"the format of {self._method} drafters"

    def __call__(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        if self._method == "medusa":
            return self._medusa(raw)
        if self._method == "mlp_speculator":
            return self._speculator(raw)
        return self._layers(raw)

    def _like_target(self, raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
        """Heads have no text of their own: lengths, and what their files leave out, are the model's."""
        facts = read_facts(self._target)
        sizes = {"hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size}
        return {
            **sizes, **raw, "architectures": [architecture], "max_position_embeddings": facts.max_positions or 2048,
        }  # fmt: skip

    def _medusa(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        heads = _first(raw, "num_heads", "medusa_num_heads")
        if heads is None:
            raise ConfigError(
                f"{_PLACE}: the configuration of these medusa heads has neither num_heads nor medusa_num_heads",
                param=_PLACE,
            )
        depth = _first(raw, "num_hidden_layers", "medusa_num_layers")
        return self._like_target(
            {**raw, "num_heads": heads, "num_hidden_layers": 1 if depth is None else depth}, "MedusaModel"
        )

    def _speculator(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        if raw.get("n_predict") is None:
            raise ConfigError(f"{_PLACE}: the configuration of this MLP speculator has no n_predict", param=_PLACE)
        width = {} if raw.get("emb_dim") is None else {"hidden_size": raw["emb_dim"]}
        return self._like_target({**raw, **width}, "MLPSpeculatorPreTrainedModel")

    def _layers(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        flat = dict(raw)
        inner = flat.pop("transformer_layer_config", None)
        if isinstance(inner, Mapping):
            flat = {**inner, **flat}
            flat["model_type"] = inner.get("model_type", "llama")
        for key in ("norm_before_fc", "layernorms"):
            if flat.get(key):
                raise NotBuiltError(f"{_PLACE}: a drafter with {key}={flat[key]!r} is not built", param=_PLACE)
        kind = str(flat.get("model_type") or "llama")
        if kind not in _LAYERS:
            raise NotBuiltError(
                f"{_PLACE}: the drafter has layers of model_type {kind!r}; built are {', '.join(_LAYERS)}", param=_PLACE
            )
        return {**flat, "architectures": [_LAYERS[kind]], "model_type": kind}


def _first(raw: Mapping[str, Any], *keys: str) -> Any:
    return next((raw[key] for key in keys if raw.get(key) is not None), None)
