"""View: a checkpoint's raw config.json over a family's defaults, and the common conversion to an Arch.

Both spellings work: that of hubs (rope_theta and rope_scaling at the top, patterns instead of layer_types) and that of
transformers 5 (rope_parameters, possibly one per layer type). An absent key means the family's default; a
null key means none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.layers.norm import NormKind
from quire.layers.rope import RopeKind
from quire.models.arch import Arch, Layer
from quire.ops.act import known
from quire.ops.rope import SCALINGS
from quire.schema.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
_ROPE_NAMES = {"su": "longrope", "mrope": "default"}
_TRAINED = ("llama3", "yarn", "longrope")  # scalings that need the length a model was trained on


class View:
    """`view.key` is the config's value, else the family's default, else a ConfigError that names the key."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any], arch: str) -> None:
        self._raw, self._defaults, self._arch = raw, defaults, arch

    def __getattr__(self, key: str) -> Any:
        if key in self._raw:
            return self._raw[key]
        if key in self._defaults:
            return self._defaults[key]
        raise ConfigError(f"config.json has no {key!r}, which {self._arch} needs", param=key)

    def get(self, *keys: str, default: Any = None) -> Any:
        """The first of these keys that is set (not null), in the config and then in the defaults."""
        for source in (self._raw, self._defaults):
            for key in keys:
                if source.get(key) is not None:
                    return source[key]
        return default

    @property
    def raw(self) -> Mapping[str, Any]:
        return self._raw

    def maybe(self, key: str) -> Any:
        """The config's value, null included; else the default; else None."""
        return self._raw[key] if key in self._raw else self._defaults.get(key)

    def refuse(self, key: str, why: str) -> None:
        raise ConfigError(f"{self._arch} with {key} = {self.get(key)!r} is not supported: {why}", param=key)


def read(c: View, *, kinds: Sequence[str] | None = None, ropes: Callable[[View, str], Mapping] | None = None,
         **over: Any) -> Arch:  # fmt: skip
    """The common conversion of a config. `kinds`: layer types if the config has none; `over`: overridden fields."""
    width = c.get("hidden_size", "n_embd", "n_embed", "d_model")
    heads = c.get("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads")
    count = c.get("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
    if not width or not heads or not count:
        raise ConfigError("config.json has no hidden_size, num_attention_heads or num_hidden_layers")
    head_dim = over.pop("head_dim", None) or c.maybe("head_dim") or width // heads
    kinds = list(c.get("layer_types", default=kinds or [FULL] * count))
    if len(kinds) < count:
        raise ConfigError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {count}", param="layer_types")
    read_rope = ropes or rope_parameters
    window = c.maybe("sliding_window")
    layers = tuple(
        Layer(rope=rope_kind(c, read_rope(c, kind), head_dim), window=(window or 0) if kind == SLIDING else 0)
        for kind in kinds[:count]
    )
    eps = c.get("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", default=1e-6)
    bias = bool(c.get("attention_bias", default=False))
    arch = Arch(
        vocab=c.vocab_size, width=width, heads=heads, kv_heads=c.maybe("num_key_value_heads") or heads,
        head_dim=head_dim, layers=layers,
        ffn=c.get("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "decoder_ffn_dim", default=4 * width),
        max_positions=c.get("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", default=2048),
        norm=NormKind(eps=eps), act=c.get("hidden_act", "hidden_activation", "activation_function", default="silu"),
        qkv_bias=bias, o_bias=bias, mlp_bias=bool(c.get("mlp_bias", default=False)),
        tie=bool(c.get("tie_word_embeddings", default=False)),
    )  # fmt: skip
    arch = replace(arch, **over)
    if not known(arch.act):
        raise ConfigError(f"unknown activation {arch.act!r} in config.json", param="hidden_act", value=arch.act)
    return arch


def rope_parameters(c: View, kind: str) -> Mapping[str, Any]:
    """The rope parameters of one layer type, in either spelling."""
    params = c.get("rope_scaling") or c.get("rope_parameters") or {}
    if FULL in params or SLIDING in params:
        params = params.get(kind) or {}
    return params


def full_only(c: View, kind: str) -> Mapping[str, Any]:
    """As rope_parameters, if an old-style rope_scaling applies to the full-attention layers only."""
    if c.get("rope_scaling") and kind != FULL and not c.get("rope_parameters"):
        return {}
    return rope_parameters(c, kind)


def rope_kind(c: View, params: Mapping[str, Any], head_dim: int) -> RopeKind:
    """Rope parameters of config.json -> what ops/rope.py reads."""
    theta = params.get("rope_theta") or c.get("rope_theta", "rotary_emb_base", default=10000.0)
    part = params.get("partial_rotary_factor") or c.get("partial_rotary_factor", "rotary_pct", "rope_pct", default=1.0)
    kind = params.get("rope_type") or params.get("type") or "default"
    kind = _ROPE_NAMES.get(kind, kind)
    if kind not in SCALINGS:
        raise ConfigError(f"unknown rope type {kind!r}; known: {', '.join(SCALINGS)}", param="rope_scaling", value=kind)
    if kind == "default":
        return RopeKind(theta, int(head_dim * part))
    longest = c.get("max_position_embeddings", default=2048)
    scaling = {k: v for k, v in params.items() if k not in ("type", "rope_theta", "partial_rotary_factor")}
    scaling |= {"rope_type": kind, "max_position_embeddings": longest}
    if kind in _TRAINED:
        trained = c.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
        scaling["original_max_position_embeddings"] = trained or longest
    return RopeKind(theta, int(head_dim * part), scaling=scaling)


def every(pattern: int, count: int) -> list[str]:
    """Layer types with every `pattern`-th layer full and the others sliding."""
    return [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(count)]
