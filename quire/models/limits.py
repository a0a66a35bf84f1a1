"""Whether the sizes of an architecture are consistent: the last check before modules and kernels use them.

In: an Arch as read by a declaration. Out: a ConfigError that names the size, its value and its limit. Kernels divide by
these numbers and address memory with them, so every architecture is checked, whoever declared it. Must not know:
files, names of models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from itertools import islice
from typing import TYPE_CHECKING, Any

from quire.checkpoint.limits import (
    EXPERTS,
    FFN,
    HEAD_DIM,
    HEADS,
    INT32,
    LAYERS,
    POSITIONS,
    VOCAB,
    WIDTH,
    WINDOW,
    Range,
    check_config,
    shown,
)
from quire.layers.moe import MoeKind
from quire.layers.rope import RopeKind
from quire.layers.shared import SharedKind
from quire.layers.ssm import DeltaKind, Mamba2Kind
from quire.models.arch import Arch, Layer, Mla
from quire.ops.act import known
from quire.ops.rope import frequencies
from quire.schema.errors import ConfigError, InputError

if TYPE_CHECKING:
    from quire.layers.altup import AltUpKind
    from quire.layers.modality_tokens import ModalityTokensKind

_SIZE = Range(1, 1 << 24)
_STREAMS = Range(1, 64)
_MAY_BE_NONE = Range(0, 1 << 24)
_PAIRED = ("fold",)  # names with factors
_OPEN_ENDED = ("dt_limit",)
_SCALES = 5  # of gate, x, B, C and dt
_ZERO_MEANS_NONE = ("rank", "q_rank", "shared_ffn", "latent")


@contextmanager
def reading(raw: Mapping[str, Any], name: str) -> Iterator[None]:
    """Around a declaration that reads a config.json: any exception is an error in that file."""
    check_config(raw)
    try:
        yield
    except InputError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as wrong:
        what = f"{type(wrong).__name__}: {shown(str(wrong))}"
        raise ConfigError(f"the configuration of this {name} cannot be read ({what})", param="architectures") from wrong


def check_arch(arch: Arch) -> Arch:
    """The same Arch."""
    _within("num_hidden_layers", len(arch.layers), LAYERS)
    _within("vocab_size", arch.vocab, VOCAB)
    _within("hidden_size", arch.width, WIDTH)
    _within("intermediate_size", arch.ffn, FFN)
    _within("embed_width", arch.embed_width, Range(0, WIDTH.most))
    _within("positions", arch.positions, POSITIONS)
    _within("max_position_embeddings", arch.max_positions, Range(1, 1 << 62))
    if any(layer.mixer in ("attention", "both") for layer in arch.layers):
        _check_attention(arch)
    for layer in arch.layers:
        _check_layer(arch, layer)
    if arch.moe is not None and any(layer.moe for layer in arch.layers):
        _check_experts(arch.moe)
    if arch.state is not None:
        _check_state(arch.state)
    if arch.shared is not None:
        _check_shared(arch.shared)
    if arch.altup is not None:
        _check_altup(arch.altup)
    for tokens in arch.modality_tokens:
        _check_modality_tokens(tokens)
    records = (arch.norm, arch.moe, arch.state, arch.shared, arch.altup)
    for record in (arch, *records, *arch.modality_tokens, *arch.layers):
        if record is not None:
            _check_factors(record)
    return arch


def check_files(arch: Arch, num_bytes: int) -> None:
    """Before a model is built that its files are too small for: no format needs less than a bit per weight."""
    numbers = arch.vocab * (arch.embed_width or arch.width)
    if arch.shared is None:
        numbers += sum(_least_numbers(arch, layer) for layer in arch.layers)
    if numbers > 8 * num_bytes:
        raise ConfigError(
            f"the model's configuration (num_hidden_layers = {len(arch.layers)}, hidden_size = {arch.width}, "
            f"vocab_size = {arch.vocab}) describes at least {numbers} weights, but its files have {num_bytes} bytes",
            param="num_hidden_layers",
        )


def _least_numbers(arch: Arch, layer: Layer) -> int:
    """The weights of matrices that every layer of its kind has."""
    attends = layer.mixer in ("attention", "both") and arch.mla is None
    return 2 * arch.width * arch.heads * arch.head_dim if attends else arch.width


def _check_attention(arch: Arch) -> None:
    _within("num_attention_heads", arch.heads, HEADS)
    if arch.mla is not None:
        return _check_latent(arch.mla)
    _check_heads(arch.heads, arch.kv_heads, arch.head_dim)


def _check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    _within("num_attention_heads", heads, HEADS)
    _within("num_key_value_heads", kv_heads, Range(1, heads))
    _divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    _within("head_dim", head_dim, HEAD_DIM)
    _within("num_attention_heads * head_dim", heads * head_dim, _SIZE)


def _check_latent(mla: Mla) -> None:
    _check_sizes(mla)


def _check_layer(arch: Arch, layer: Layer) -> None:
    _within("sliding_window", layer.window, WINDOW)
    _within("attention_chunk_size", layer.chunk, WINDOW)
    _within("intermediate_size", layer.ffn, Range(0, FFN.most))
    if not 0 <= layer.sparsity < 1:
        raise ConfigError(
            f"activation_sparsity_pattern has {layer.sparsity!r}; expected shares from 0 to below 1",
            param="activation_sparsity_pattern",
        )
    if layer.rope is not None and layer.mixer in ("attention", "both"):
        _check_rope(layer.rope, arch.mla.rope if arch.mla is not None else arch.head_dim)


def _check_rope(rope: RopeKind, size: int) -> None:
    """Pairs within a head (an odd width has one value more); one factor of a per-frequency scaling for each pair."""
    pairs = -(-rope.dim // 2) if isinstance(rope.dim, int) else 0
    _within("rotary width (head_dim * partial_rotary_factor)", rope.dim, Range(1, size - size % 2))
    if not _is_finite(rope.theta) or rope.theta <= 0:
        raise ConfigError(f"rope_theta = {rope.theta!r}; expected a number above 0", param="rope_theta")
    for name in ("short_factor", "long_factor"):
        values = (rope.scaling or {}).get(name)
        if values is not None and (not isinstance(values, list | tuple) or len(values) != pairs):
            count = len(values) if isinstance(values, list | tuple) else shown(values)
            raise ConfigError(f"{name} has {count} values for {pairs} frequencies", param=name)
    _check_frequencies(rope)


def _check_frequencies(rope: RopeKind) -> None:
    """Frequencies are finite whatever the scaling: for short texts and for long ones."""
    try:
        spectra = [frequencies(rope.theta, rope.dim, rope.scaling, length) for length in (1, INT32)]
        fine = all(bool(inverse.isfinite().all()) and math.isfinite(gain) for inverse, gain in spectra)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError) as wrong:
        raise _unusable(rope, f"{type(wrong).__name__}: {wrong}") from wrong
    if not fine:
        raise _unusable(rope, "its frequencies are not finite")


def _unusable(rope: RopeKind, why: str) -> ConfigError:
    values = {**(rope.scaling or {}), "rope_theta": rope.theta}
    few = ", ".join(f"{key}={shown(value)}" for key, value in islice(values.items(), 16))
    return ConfigError(f"rope_parameters cannot be used ({why[:200]}): {few}", param="rope_parameters")


def _check_experts(moe: MoeKind) -> None:
    _within("num_experts", moe.experts, Range(1, EXPERTS.most))
    _within("num_experts_per_tok", moe.top_k, Range(1, moe.experts))
    _within("moe_intermediate_size", moe.ffn, _SIZE)
    _within("n_group", moe.groups, Range(1, moe.experts))
    _divides("num_experts", moe.experts, "n_group", moe.groups)
    _within("topk_group", moe.top_groups, Range(1, moe.groups))
    _within("num_experts_per_tok", moe.top_k, Range(1, moe.experts // moe.groups * moe.top_groups))
    _within("shared expert's intermediate_size", moe.shared_ffn, _MAY_BE_NONE)
    _within("latent width of experts", moe.latent, _MAY_BE_NONE)


def _check_state(kind: Any) -> None:
    _check_sizes(kind)
    if isinstance(kind, Mamba2Kind):
        _divides("heads of a state", kind.heads, "their groups", kind.groups)
        _divides("width of a state's output", kind.heads * kind.head_dim, "groups of its norm", kind.norm_groups)
    if isinstance(kind, DeltaKind):
        _divides("linear_num_value_heads", kind.value_heads, "linear_num_key_heads", kind.key_heads)


def _check_shared(kind: SharedKind) -> None:
    _check_heads(kind.heads, kind.kv_heads, kind.head_dim)
    _within("intermediate_size of the shared block", kind.ffn, _SIZE)
    _within("number of shared blocks", kind.blocks, LAYERS)


def _check_altup(kind: AltUpKind) -> None:
    _within("altup_num_inputs", kind.streams, _STREAMS)
    _within("altup_active_idx", kind.active, Range(0, kind.streams - 1))
    _within("laurel_rank", kind.laurel, WIDTH)
    _within("hidden_size_per_layer_input", kind.per_layer, WIDTH)
    _within("vocab_size_per_layer_input", kind.per_layer_vocab, VOCAB)


def _check_modality_tokens(kind: ModalityTokensKind) -> None:
    _within(f"vocab_offset of {kind.name}", kind.first, Range(0, VOCAB.most))
    _within(f"vocab_size of {kind.name}", kind.rows, VOCAB)
    _within(f"hidden_size of {kind.name}", kind.width, WIDTH)
    _within(f"the id behind the tokens of {kind.name}", kind.end, Range(kind.first, kind.first + kind.rows))


def _check_sizes(record: Any) -> None:
    """Every integer of a record is a size; 0 only where it means none."""
    for field in fields(record):
        if field.type in ("int", int):
            allowed = _MAY_BE_NONE if field.name in _ZERO_MEANS_NONE else _SIZE
            _within(f"{type(record).__name__}.{field.name}", getattr(record, field.name), allowed)


def _within(name: str, value: Any, allowed: Range) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not allowed.least <= value <= allowed.most:
        raise ConfigError(f"the model's configuration gives {name} = {value!r}; expected {allowed}", param=name)


def _divides(name: str, value: int, other: str, divisor: int) -> None:
    if divisor < 1 or value % divisor:
        raise ConfigError(
            f"the model's configuration gives {name} = {value}, which is not a multiple of {other} = {divisor}",
            param=name,
        )


def _check_factors(record: Any) -> None:
    """Every factor of a record is finite, and every activation is known."""
    for field in fields(record):
        value, name = getattr(record, field.name), f"{type(record).__name__}.{field.name}"
        if field.name == "act":
            _check_act(value)
        elif field.name in _PAIRED:
            _check_numbers(name, [factor for _, factor in value])
        elif str(field.type).startswith("tuple[float"):
            _check_numbers(name, list(value), may_be_infinite=field.name in _OPEN_ENDED)
        elif field.type in ("float", float):
            _check_numbers(name, [value])
        if field.name.endswith("eps") and value < 0:
            raise ConfigError(f"the model's configuration gives {name} = {value!r}; expected 0 or more", param=name)
    scales = vars(record).get("scales", ())
    if scales and len(scales) != _SCALES:
        raise ConfigError(f"the model's configuration gives {len(scales)} ssm_multipliers; expected {_SCALES}")


def _check_act(name: Any) -> None:
    if not isinstance(name, str) or not known(name):
        raise ConfigError(
            f"the model's configuration names the activation {shown(name)}, which is unknown", param="hidden_act"
        )


def _check_numbers(name: str, values: list[Any], *, may_be_infinite: bool = False) -> None:
    for value in values:
        if not (_is_finite(value) or (may_be_infinite and value in (math.inf, -math.inf))):
            raise ConfigError(f"the model's configuration gives {name} = {shown(value)}; expected a number", param=name)


def _is_finite(value: Any) -> bool:
    """Within the range of a tensor: an integer has 64 bits there."""
    if isinstance(value, int):
        return abs(value) < 1 << 53
    return isinstance(value, float) and abs(value) <= INT32**4 and not math.isnan(value)
