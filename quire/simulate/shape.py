"""The sizes of a model that its cost depends on, read from its configuration.

In: a raw configuration (config.json). Out: parameters by kind, and what its layers keep in the KV cache. Models whose
cost this cannot tell (recurrent states, encoder-decoders, quantized weights) are refused by name.
Must not know: devices, requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.checkpoint.facts import ModelFacts, read_facts, text_part
from quire.schema.errors import CheckpointError, NotBuiltError
from quire.schema.kv import KVKind, KVSpec

BYTES = 2  # of a weight, an activation and a cached number: 16 bits
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Parameters are numbers of weights, per layer unless they say otherwise."""

    name: str
    num_layers: int
    num_moe_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int  # of a head
    attention_params: int
    ffn_params: int  # of a dense layer
    shared_params: int  # experts of a mixture that every token goes through, and its router
    expert_params: int  # of one expert
    num_experts: int
    top_k: int
    vocab_size: int
    has_tied_head: bool
    max_positions: int
    windows: tuple[int, ...]  # of each layer; 0: full attention
    latent_size: int  # numbers that a token keeps instead of keys and values (MLA); 0: keys and values

    @property
    def head_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All weights that lie in memory."""
        dense = self.num_layers * self.attention_params + (self.num_layers - self.num_moe_layers) * self.ffn_params
        mixture = self.num_moe_layers * (self.shared_params + self.num_experts * self.expert_params)
        return dense + mixture + self.head_params * (1 if self.has_tied_head else 2)

    def kv_specs(self, block_size: int, tensor_size: int, num_layers: int) -> tuple[KVSpec, ...]:
        """Of the first `num_layers` layers on one of `tensor_size` ranks."""
        heads = 1 if self.latent_size else max(1, self.num_kv_heads // tensor_size)
        return tuple(
            KVSpec(
                layer=f"layers.{number}",
                kind=KVKind.WINDOW if window else KVKind.FULL,
                block_size=block_size,
                num_kv_heads=heads,
                head_size=self.latent_size or self.head_size,
                v_head_size=0 if self.latent_size else self.value_size,
                dtype="bfloat16",
                window=window,
            )
            for number, window in enumerate(self.windows[:num_layers])
        )

    def kv_token_bytes(self, tensor_size: int) -> int:
        """Bytes of one token in one layer on one rank."""
        if self.latent_size:
            return self.latent_size * BYTES
        return max(1, self.num_kv_heads // tensor_size) * (self.head_size + self.value_size) * BYTES


def read_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """ModelShape of a raw configuration; an error names what is missing or cannot be simulated."""
    facts, text = read_facts(config), text_part(config)
    _refuse(facts, name)
    required = {
        "num_hidden_layers": facts.num_layers, "hidden_size": facts.hidden_size, "num_attention_heads": facts.num_heads,
        "vocab_size": facts.vocab_size, "head_dim": facts.head_size,
    }  # fmt: skip
    if missing := [key for key, value in required.items() if not value]:
        raise CheckpointError(f"the configuration of {name!r} lacks {', '.join(missing)}, which a simulation needs")
    ffn = _number(text, "intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * facts.hidden_size
    expert = _number(text, "moe_intermediate_size", "expert_intermediate_size") or ffn
    top_k = _number(text, *_TOP_K)
    if facts.num_experts and not top_k:
        raise CheckpointError(
            f"the configuration of {name!r} has {facts.num_experts} experts but none of {', '.join(_TOP_K)}"
        )
    shared = _number(text, "shared_expert_intermediate_size") or expert * _number(text, "n_shared_experts")
    value_size = _number(text, "v_head_dim") or facts.head_size
    return ModelShape(
        name=name,
        num_layers=facts.num_layers,
        num_moe_layers=_moe_layers(text, facts),
        hidden_size=facts.hidden_size,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_size=facts.head_size,
        value_size=value_size,
        attention_params=_attention_params(text, facts, value_size),
        ffn_params=3 * facts.hidden_size * ffn,
        shared_params=3 * facts.hidden_size * shared + facts.hidden_size * facts.num_experts,
        expert_params=3 * facts.hidden_size * expert,
        num_experts=facts.num_experts,
        top_k=min(top_k, facts.num_experts),
        vocab_size=facts.vocab_size,
        has_tied_head=bool(facts.tie_word_embeddings),
        max_positions=facts.max_positions or 2048,
        windows=_windows(facts),
        latent_size=_number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim") if facts.uses_mla else 0,
    )


def _refuse(facts: ModelFacts, name: str) -> None:
    if facts.is_encoder_decoder:
        kind = "an encoder-decoder model"
    elif facts.has_states:
        kind = "a model with recurrent states"
    elif facts.quantization:
        kind = f"quantized ({facts.quantization})"
    else:
        return
    raise NotBuiltError(f"{name!r} is {kind}, whose steps the cost model cannot time yet", param="model", value=name)


def _attention_params(text: Mapping[str, Any], facts: ModelFacts, value_size: int) -> int:
    hidden, heads = facts.hidden_size, facts.num_heads
    if not facts.uses_mla:
        return hidden * (heads * facts.head_size * 2 + facts.num_kv_heads * (facts.head_size + value_size))
    latent, rotary = _number(text, "kv_lora_rank"), _number(text, "qk_rope_head_dim")
    low_rank = _number(text, "q_lora_rank")
    query = heads * facts.head_size
    queries = low_rank * (hidden + query) if low_rank else hidden * query
    keys = hidden * (latent + rotary) + latent * heads * (facts.head_size - rotary + value_size)
    return queries + keys + heads * value_size * hidden


def _moe_layers(text: Mapping[str, Any], facts: ModelFacts) -> int:
    if not facts.num_experts:
        return 0
    dense = _number(text, "first_k_dense_replace", "num_dense_layers")
    only_dense = text.get("mlp_only_layers")
    if isinstance(only_dense, list):
        dense = max(dense, len(only_dense))
    every = _number(text, "decoder_sparse_step", "expert_layer_period", "moe_layer_interval") or 1
    return max(0, facts.num_layers - dense) // every


def _windows(facts: ModelFacts) -> tuple[int, ...]:
    if not facts.sliding_window:
        return (0,) * facts.num_layers
    if not facts.layer_types:
        return (facts.sliding_window,) * facts.num_layers
    kinds = (facts.layer_types * facts.num_layers)[: facts.num_layers]
    return tuple(facts.sliding_window if kind == "sliding_attention" else 0 for kind in kinds)


def _number(text: Mapping[str, Any], *keys: str) -> int:
    """The first of these keys that holds a number; read_facts has checked the ranges of all."""
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
