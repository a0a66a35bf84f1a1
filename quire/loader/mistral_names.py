"""Mistral's own tensor names (consolidated*.safetensors), translated to the names of a Hugging Face checkpoint.

Its rotary positions turn neighbouring entries; those of the Hugging Face form turn halves: so the rows of queries and
keys are put in that order while they are read. In: pieces of files. Out: pieces. Must not know: parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from quire.loader.files import Named, WeightPiece
from quire.schema.errors import CheckpointError

_NAMES = (
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^output\.", "lm_head."),
    (r"^norm\.", "model.norm."),
    (r"^layers\.", "model.layers."),
    (r"\.attention\.w([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.(gate|experts)\.", r".\1."),
    (r"\.(\d+)\.(gate|experts)\.", r".\1.block_sparse_moe.\2."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
)
_PATTERNS = [(re.compile(pattern), new) for pattern, new in _NAMES]
_TURNED = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")


def hf_name(name: str) -> str:
    for pattern, new in _PATTERNS:
        name = pattern.sub(new, name)
    return name


def renamed(pieces: Iterable[WeightPiece], config: Mapping[str, Any]) -> Iterator[WeightPiece]:
    """The same pieces under Hugging Face names. `config` gives the numbers of heads."""
    heads = {"q": int(config["num_attention_heads"]), "k": int(config["num_key_value_heads"])}
    for piece in pieces:
        yield WeightPiece(piece.num_bytes, partial(_read, piece, heads))


def _read(piece: WeightPiece, heads: Mapping[str, int]) -> Named:
    for name, tensor in piece.read():
        if name.endswith((".qscale_weight", ".qscale_act")):
            raise CheckpointError(f"tensor {name!r}: quantized weights in Mistral's own form are not built")
        new = hf_name(name)
        match = _TURNED.search(new)
        if match is not None and isinstance(tensor, Tensor):
            tensor = halves_of(tensor, heads[match[1]])
        yield new, tensor


def halves_of(rows: Tensor, heads: int) -> Tensor:
    """Rows (even, odd), (even, odd), ... of each head -> all even ones, then all odd ones."""
    if rows.shape[0] % (2 * heads):
        raise CheckpointError(f"{rows.shape[0]} rows of queries or keys are not {heads} heads of an even size")
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
