"""Rounding at load: which names of `quantization=` round an unquantized checkpoint, and to what.

In: a name, and for torchao its configuration; `quantization_config=`. Out: weight forms (ModelConfig.weight_form and
head_form). Must not know: devices, how numbers are rounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.checkpoint.limits import shown
from quire.schema.errors import ConfigError, NotBuiltError

ONLINE = {  # name -> weight form
    "int8_wo": "int8", "int4_wo": "int4", "rtn": "int8", "fp8": "fp8", "ptpc_fp8": "fp8", "bitsandbytes": "int4",
    "torchao": "",
}  # fmt: skip
ONLINE_ONLY = ("int8_wo", "int4_wo", "rtn", "ptpc_fp8")  # not the name of any checkpoint's format
TORCHAO_KEY = "quantization_config_dict_json"
_TORCHAO = {  # classes of torchao's configurations; groups and granularities are not taken from them
    "Int8WeightOnlyConfig": "int8", "Int8DynamicActivationInt8WeightConfig": "int8", "Int4WeightOnlyConfig": "int4",
    "Float8WeightOnlyConfig": "fp8", "Float8DynamicActivationFloat8WeightConfig": "fp8",
}  # fmt: skip
_MOST_JSON = 1 << 20
_WITH_HEAD = ("int8_wo", "int4_wo", "fp8", "ptpc_fp8")  # names that round the output matrix too, to int8
HEAD = "lm_head"  # the only key of quantization_config
_HEAD_FORMS = ("int8", "fp8", None)


def rounding_settings(value: Any) -> Any:
    """`quantization_config=`: what the output matrix is rounded to."""
    if not isinstance(value, Mapping):
        return value
    if unknown := [key for key in value if key != HEAD]:
        raise NotBuiltError(
            f"quantization_config has {shown(unknown[0])}; the only key that is built is {HEAD!r}, all other matrices "
            "are rounded as quantization says",
            param="quantization_config",
            value=dict(value),
        )
    if HEAD in value and value[HEAD] not in _HEAD_FORMS:
        raise ConfigError(
            f"quantization_config has {HEAD!r}: {shown(value[HEAD])}; it may be 'int8' or 'fp8', or None for 16 bits",
            param="quantization_config",
        )
    return dict(value)


def head_form(name: str, settings: Mapping[str, Any] | None) -> str:
    """What the output matrix is rounded to; "": it is not."""
    if settings is not None and HEAD in settings:
        return settings[HEAD] or ""
    return "int8" if name in _WITH_HEAD else ""


def online_form(name: str, config: Mapping[str, Any]) -> str:
    """`config`: the checkpoint's, with overrides."""
    return ONLINE[name] or _torchao_form(config.get(TORCHAO_KEY))


def _torchao_form(text: Any) -> str:
    if text is None:
        raise ConfigError(
            "quantization='torchao' of an unquantized checkpoint needs torchao's configuration as JSON: "
            f"hf_overrides={{{TORCHAO_KEY!r}: ...}}",
            param="quantization",
        )
    try:
        settings = json.loads(text) if isinstance(text, str) and len(text) <= _MOST_JSON else None
    except (ValueError, RecursionError):
        settings = None
    kind = settings.get("_type") if isinstance(settings, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"{TORCHAO_KEY} is {shown(text)}; expected JSON of a mapping with _type", param=TORCHAO_KEY)
    if kind not in _TORCHAO:
        raise NotBuiltError(
            f"torchao's {shown(kind)} is not built as rounding at load; {', '.join(_TORCHAO)} are",
            param=TORCHAO_KEY,
            value=kind,
        )
    return _TORCHAO[kind]
