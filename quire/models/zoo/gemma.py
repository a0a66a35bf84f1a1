"""Gemma 1 to 3: scaled embeddings, norm weights stored as distance from one, sandwich norms, soft caps, windows. 3n:
several streams, vectors of their own for each layer, layers that share keys and values, gates that are cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.models.arch import Arch, Layer, each
from quire.models.view import FULL, View, every, read, rope_parameters
from quire.schema.errors import ConfigError


def _gemma(c: View, **over: Any) -> Arch:
    arch = read(c, embed_scale=c.hidden_size**0.5, **over)
    return replace(arch, norm=replace(arch.norm, plus_one=True))


def gemma(c: View) -> Arch:
    return _gemma(
        c, act="gelu_pytorch_tanh" if c.hidden_act == "gelu" else c.hidden_act
    )  # releases that say gelu mean tanh


def _sandwich(c: View, **over: Any) -> Arch:
    return _gemma(
        c,
        act=c.hidden_activation or "gelu_pytorch_tanh",
        order="sandwich",
        attn_scale=c.query_pre_attn_scalar**-0.5,
        attn_softcap=c.maybe("attn_logit_softcapping") or 0.0,
        logit_softcap=c.maybe("final_logit_softcapping") or 0.0,
        **over,
    )


def gemma2(c: View) -> Arch:
    return _sandwich(c, kinds=every(2, c.num_hidden_layers))


def _local_rope(c: View, kind: str) -> Mapping[str, Any]:
    """Sliding layers have a separate rotary base and are never scaled."""
    if c.get("rope_parameters") or kind == FULL:
        return rope_parameters(c, kind)
    return {"rope_theta": c.rope_local_base_freq}


def gemma3(c: View) -> Arch:
    if c.get("use_bidirectional_attention"):
        c.refuse("use_bidirectional_attention", "it is an encoder")
    pattern = c.get("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _sandwich(c, kinds=every(pattern, c.num_hidden_layers), ropes=_local_rope, qk_norm="head")


def gemma3n(c: View) -> Arch:
    from quire.layers.altup import AltUpKind  # lazy

    count = c.num_hidden_layers
    kinds = list(c.get("layer_types", default=every(5, count)))[:count]
    sizes = _per_layer(c, "intermediate_size", [c.intermediate_size] * count, count)
    sparse = _per_layer(c, "activation_sparsity_pattern", _first_sparse(count), count)
    lenders = _lenders(c, kinds, count)
    arch = read(
        c, kinds=kinds, ropes=_local_rope, embed_scale=c.hidden_size**0.5, ffn=max(sizes), order="altup",
        act=c.hidden_activation or "gelu_pytorch_tanh", attn_scale=1.0, qk_norm="head", v_norm=True,
        logit_softcap=c.maybe("final_logit_softcapping") or 0.0,
        altup=AltUpKind(
            c.altup_num_inputs, c.altup_active_idx, c.laurel_rank, c.hidden_size_per_layer_input,
            c.vocab_size_per_layer_input, bool(c.altup_correct_scale),
        ),
        names=((r"^(embed_tokens_per_layer|per_layer_[a-z_]+|altup_[a-z_]+)\.", r"model.\1."),),
        unread=_unread(lenders),
    )  # fmt: skip

    def own(index: int, layer: Layer) -> dict[str, Any]:
        return {
            "ffn": sizes[index], "sparsity": float(sparse[index]), "kv_from": lenders[index], "lends": index in lenders,
        }  # fmt: skip

    return each(arch, own, norm=replace(arch.norm, wide=True))


def _first_sparse(count: int) -> list[float]:
    """As its configuration class says where a checkpoint does not."""
    return [0.95] * 10 + [0.0] * (count - 10) if count > 10 else [0.0] * count


def _per_layer(c: View, key: str, default: list, count: int) -> list:
    values = c.get(key)
    if not isinstance(values, list | tuple):
        values = default if values is None or key == "intermediate_size" else [values] * count
    if len(values) != count:
        raise ConfigError(f"{key} has {len(values)} values, num_hidden_layers is {count}", param=key)
    return list(values)


def _lenders(c: View, kinds: list[str], count: int) -> list[int]:
    """For each layer, the last one of its kind before the first that has no keys and values of its own; -1: it has."""
    shared = c.num_kv_shared_layers
    if not isinstance(shared, int) or not 0 <= shared < count:
        raise ConfigError(f"num_kv_shared_layers is {shared!r} of {count} layers", param="num_kv_shared_layers")
    first = count - shared
    last = {kind: index for index, kind in enumerate(kinds[:first])}
    absent = sorted({kind for kind in kinds[first:] if kind not in last})
    if absent:
        raise ConfigError(
            f"the last {shared} layers share keys and values (num_kv_shared_layers), and no layer before them is of "
            f"type {absent[0]!r}", param="num_kv_shared_layers", value=shared,
        )  # fmt: skip
    return [-1 if index < first else last[kind] for index, kind in enumerate(kinds)]


def _unread(lenders: list[int]) -> tuple[str, ...]:
    """Keys and values that checkpoints have for layers which read others'."""
    borrowers = "|".join(str(index) for index, lender in enumerate(lenders) if lender >= 0)
    return (rf"^model\.layers\.(?:{borrowers})\.self_attn\.[kv]_(?:proj|norm)\.",) if borrowers else ()
