"""Scales of an fp8 KV cache in a checkpoint: which tensors they are, under any exporter's names, and their values.

    ….3.self_attn.k_scale   ….attn.k_scale   ….k_proj.k_scale   ….k_proj.output_scale      of keys; v likewise
    ….kv_scale   ….kv_cache_scale   ….kv_proj.output_scale   ….qkv_proj.output_scale        of both

In: a checkpoint's files. Out: a pair of numbers for each layer, by its number. Must not know: models, caches.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from quire.checkpoint.weight_files import WeightFiles
from quire.loader.files import read_some
from quire.schema.errors import CheckpointError

_ANY = re.compile(  # whatever belongs to a quantized cache, scales of queries and of attention weights among it
    r"\.(?:[kvq]_scale|kv_scale|prob_scale|kv_cache_scale|[kv]_zero_point|(?:[kvq]_proj|qkv_proj|kv_proj)\.output_scale)$"
)
_SCALE = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*(?P<layer>\d{1,6})\.(?:\w+\.)*?"
    r"(?:(?P<one>[kv])_scale|(?P<projection>[kv])_proj\.output_scale"
    r"|(?P<both>kv_scale|kv_cache_scale|(?:kv|qkv)_proj\.output_scale))$"
)


class LayerScales(NamedTuple):
    keys: float = 1.0
    values: float = 1.0


def is_cache_scale(name: str) -> bool:
    return _ANY.search(name) is not None


def read_kv_scales(files: WeightFiles) -> dict[int, LayerScales]:
    """By the number of the layer; a layer without scales is not among them. CheckpointError: a scale that is none."""
    scales: dict[int, dict[str, float]] = {}
    names: dict[tuple[int, str], str] = {}
    for name, tensor in read_some(files, lambda name: _SCALE.search(name) is not None):
        match = _SCALE.search(name)
        assert match is not None
        if tensor.numel() != 1:
            raise CheckpointError(
                f"{name} has {tensor.numel()} numbers; scales of the KV cache are built as one number for each layer's "
                "keys and one for its values",
                param=name,
            )
        value = float(tensor.reshape(()).float())
        if not (math.isfinite(value) and value > 0):
            raise CheckpointError(f"{name} is {value}; a scale of the KV cache is a number above 0", param=name)
        layer, one = int(match["layer"]), match["one"] or match["projection"]
        for kind in [one] if one else ["k", "v"]:
            known = scales.setdefault(layer, {}).setdefault(kind, value)
            other = names.setdefault((layer, kind), name)
            if known != value:
                raise CheckpointError(f"{other} is {known}, and {name} is {value}: they are the same scale", param=name)
    return {layer: LayerScales(own.get("k", 1.0), own.get("v", 1.0)) for layer, own in scales.items()}


def layer_number(layer: str) -> int:
    """Of a layer's name in the model, `model.layers.3.self_attn.attn`: 3; -1 if it has none."""
    numbers = re.findall(r"(?:^|\.)(\d{1,6})(?=\.|$)", layer)
    return int(numbers[0]) if numbers else -1
