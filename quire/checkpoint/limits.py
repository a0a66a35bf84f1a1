"""Limits of the numbers in a model's configuration: buffer sizes, divisors and loop bounds.

In: an untrusted raw configuration, before anything is computed from it. Out: a CheckpointError that names the
key, its value and what is allowed. Consistency between numbers is checked once a declaration has read them
(models/limits.py). Must not know: architectures.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.schema.errors import CheckpointError

INT32 = (1 << 31) - 1


class Range(NamedTuple):
    least: int
    most: int

    def __str__(self) -> str:
        return f"a number from {self.least} to {self.most} (whole)"


LAYERS = Range(1, 4096)
SOME_LAYERS = Range(0, LAYERS.most)
HEADS = Range(1, 1 << 16)
HEAD_DIM = Range(1, 1 << 16)
WIDTH = Range(1, 1 << 20)
FFN = Range(0, 1 << 24)  # 0: none, if every layer has experts
VOCAB = Range(1, 1 << 28)
EXPERTS = Range(0, 1 << 16)  # 0: none
WINDOW = Range(0, INT32)
POSITIONS = Range(0, INT32)

_RANGES: dict[str, Range] = {
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
         "num_decoder_layers"), LAYERS),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads",
         "encoder_attention_heads", "num_key_value_heads", "num_kv_heads", "n_head_kv",
         "multi_query_group_num"), HEADS),
    **dict.fromkeys(("head_dim", "head_size", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), HEAD_DIM),
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "d_model", "model_dim"), WIDTH),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff",
         "moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size",
         "kv_lora_rank", "q_lora_rank"), FFN),
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), VOCAB),
    **dict.fromkeys(
        ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok",
         "n_shared_experts", "zero_expert_num", "moe_topk"), EXPERTS),
    **dict.fromkeys(
        ("num_nextn_predict_layers", "mtp_num_hidden_layers", "first_k_dense_replace", "num_dense_layers",
         "num_mem_blocks"), SOME_LAYERS),
    "sliding_window": WINDOW,
    "rotary_dim": HEAD_DIM,
}  # fmt: skip
_PARTS_OF_A_HEAD = ("partial_rotary_factor", "rotary_pct", "rope_pct")
_LISTS_OF_NAMES = ("architectures", "layer_types", "layers_block_type")
_ROPES = ("rope_parameters", "rope_scaling")


def check_numbers(config: Mapping[str, Any], ranges: Mapping[str, Range] = _RANGES) -> None:
    """Check every number whose key is known. Absent and null keys are skipped; a list has one per layer."""
    for key, allowed in ranges.items():
        if (value := config.get(key)) is not None:
            check_number(key, value, allowed)


def check_config(config: Mapping[str, Any]) -> None:
    """One level of a config.json: its numbers, its lists of names, and the rotary dimensions."""
    for key in _LISTS_OF_NAMES:
        check_names(key, config.get(key))
    check_numbers(config)
    for key in _PARTS_OF_A_HEAD:
        check_share(key, config.get(key))
    for key in _ROPES:
        _check_rope(key, config.get(key))


def check_number(key: str, value: Any, allowed: Range) -> None:
    if not is_within(value, allowed):
        raise _refusal(key, value, str(allowed))


def is_within(value: Any, allowed: Range) -> bool:
    """Every entry of a list (one per layer); an entry may be null."""
    if not isinstance(value, list):
        return _is_whole(value) and allowed.least <= value <= allowed.most
    return 0 < len(value) <= LAYERS.most and all(_is_whole(entry) and 0 <= entry <= allowed.most for entry in value)


def check_share(key: str, value: Any) -> None:
    """The rotary part of a head: more than the head would write past its end."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise _refusal(key, value, "a number above 0 and at most 1")


def check_names(key: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise _refusal(key, value, "a list of names")
    if len(value) > LAYERS.most:
        raise CheckpointError(f"the model's configuration has {len(value)} {key}; at most {LAYERS.most}", param=key)


def _check_rope(key: str, rope: Any, inner: bool = False) -> None:
    """Of all layers, or one per layer type."""
    if rope is None or (inner and not isinstance(rope, Mapping)):
        return
    if not isinstance(rope, Mapping):
        raise _refusal(key, rope, "a mapping")
    check_share("partial_rotary_factor", rope.get("partial_rotary_factor"))
    for name in ("rope_theta", "factor"):
        value = rope.get(name)
        if value is not None and (not isinstance(value, int | float) or not 0 < value < math.inf):
            raise _refusal(name, value, "a number above 0")
    if not inner:
        for part in rope.values():
            _check_rope(key, part, inner=True)


def _is_whole(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _refusal(key: str, value: Any, expected: str) -> CheckpointError:
    return CheckpointError(f"the model's configuration says {key}={shown(value)}; expected {expected}", param=key)


def shown(value: Any) -> str:
    """A value of any size, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
