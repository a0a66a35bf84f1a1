"""What a model is, read once from its raw configuration. (Filled in below.)"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Plain numbers and names; 0 or () where the configuration does not say."""

    architectures: tuple[str, ...] = ()
    model_type: str = ""
    vocab_size: int = 0
    hidden_size: int = 0
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_size: int = 0
    max_positions: int = 0  # as trained, rope scaling included
    dtype: str = ""
    sliding_window: int = 0
    layer_types: tuple[str, ...] = ()
    num_experts: int = 0
    quantization: str = ""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    is_encoder_decoder: bool = False
    tie_word_embeddings: bool = False
    uses_mla: bool = False
    has_states: bool = False
    is_multimodal: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
