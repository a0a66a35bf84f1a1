"""Blocks of every type of GGUF files as kernels of a device keep them, for tests: random bytes with sane scales, as
matrices and as small models."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import quants
from torch import Tensor

from quire.loader import gguf_types
from quire.loader.gguf_codes import open_blocks
from quire.ops.coded import CodedWeight
from quire.quant.coded import GGUFBlocks
from quire.quant.device_codes import device_codes

TYPES = {kind.name: type_id for type_id, kind in gguf_types._TYPES.items() if kind.plain is None}
# Where the float16 factors of a block lie: random bits would make them any size, or no numbers at all.
_FLOATS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ3_XXS": (0,), "IQ1_S": (0,),
    "IQ4_NL": (0,), "IQ3_S": (0,), "IQ2_S": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (),
    "NVFP4": (), "IQ1_M": (),
}  # fmt: skip


@cache
def raw_blocks(name: str, rows: int, width: int, seed: int = 0) -> Tensor:
    """uint8 [rows, bytes of a row]: every code and every small scale is as likely as others; numbers are about 0.05."""
    drawn = _drawn(name, rows, width, seed, 0.01)
    return _drawn(name, rows, width, seed, 0.01 * 0.05 / numbers_of(name, drawn).std().item())


def _drawn(name: str, rows: int, width: int, seed: int, size: float) -> Tensor:
    kind = gguf_types.tensor_type(TYPES[name])
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * width // kind.elements, kind.num_bytes), dtype=np.uint8)
    for at in _FLOATS[name]:
        sizes = rng.uniform(0.5, 1.0, len(blocks)) * size
        if name in ("Q4_1", "Q5_1") and at == 2:
            sizes *= -8 if name == "Q4_1" else -16  # the least number
        elif name in ("Q2_K", "Q4_K", "Q5_K") and at % 10 == 2:
            sizes *= {"Q2_K": 1.5, "Q4_K": 8, "Q5_K": 16}[name]
        blocks[:, at : at + 2] = sizes.astype(np.float16)[:, None].view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(118, 123, len(blocks))
    elif name == "NVFP4":
        blocks[:, :4] = rng.integers(1, 30, (len(blocks), 4))
    elif name == "IQ1_M":
        bits = (rng.uniform(0.5, 1.0, len(blocks)) * size).astype(np.float16).view(np.uint16)
        for word in range(4):
            top = (bits >> 4 * word & 15).astype(np.uint8)
            blocks[:, 49 + 2 * word] = blocks[:, 49 + 2 * word] & 15 | top << 4
    return torch.from_numpy(blocks.reshape(rows, -1))


def numbers_of(name: str, raw: Tensor) -> Tensor:
    """By the gguf package: float32 [rows, width]."""
    return torch.from_numpy(quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(TYPES[name])))


def blocks_of(name: str, raw: Tensor, width: int) -> GGUFBlocks:
    type_id = TYPES[name]

    def decode(raw: Tensor) -> Tensor:
        return gguf_types.dequantize(raw.reshape(-1), type_id, (raw.shape[0], width), torch.float32)

    elements = gguf_types.tensor_type(type_id).elements
    return GGUFBlocks(raw, type_id, width, decode, elements, opens=lambda raw: open_blocks(raw, type_id))


def weight_of(name: str, rows: int, width: int, device: str = "cpu") -> CodedWeight:
    made = device_codes(blocks_of(name, raw_blocks(name, rows, width), width).to(torch.device(device)))
    assert made is not None
    return made


SIZES = {
    "embedding_length": 256, "feed_forward_length": 512, "block_count": 2, "attention.head_count": 4,
    "attention.head_count_kv": 2, "vocab_size": 320, "rope.dimension_count": 64, "context_length": 512,
}  # fmt: skip


def write_model(file: Path, name: str | dict[str, str], *, tied: bool = True, seed: int = 0) -> Path:
    """A small Llama whose matrices are blocks of this type, or of the type that their last name has in a table ("":
    all others)."""
    table = {"": name} if isinstance(name, str) else name
    writer = gguf.GGUFWriter(str(file), "llama")
    for key, value in SIZES.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    width, ffn, vocab = SIZES["embedding_length"], SIZES["feed_forward_length"], SIZES["vocab_size"]
    shapes = {"token_embd": (vocab, width)} | ({} if tied else {"output": (vocab, width)})
    for layer in range(SIZES["block_count"]):
        inner = {"attn_q": (width, width), "attn_k": (width // 2, width), "attn_v": (width // 2, width),
                 "attn_output": (width, width), "ffn_gate": (ffn, width), "ffn_up": (ffn, width),
                 "ffn_down": (width, ffn)}  # fmt: skip
        shapes |= {f"blk.{layer}.{leaf}": shape for leaf, shape in inner.items()}
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(width, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for at, (stem, (rows, columns)) in enumerate(shapes.items()):
        kind = table.get(stem.rpartition(".")[2], table[""])
        raw = raw_blocks(kind, rows, columns, seed + at).numpy()
        writer.add_tensor(f"{stem}.weight", raw, raw_dtype=gguf.GGMLQuantizationType(TYPES[kind]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
