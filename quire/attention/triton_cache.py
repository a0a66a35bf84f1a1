"""TritonCache: one layer's keys and values on a GPU, as views of the worker's memory, in 16, 32 or 8 bits.

In memory a block is [kv heads, tokens, entries] of keys, then the same of values, then with int8 float32 scales of keys
and of values, [kv heads, tokens] each. Float8 has one scale for a layer's keys and one for its values, outside of the
blocks. Must not know: plans, steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.kv_codes import CacheScales, is_coded, measured_scales, read_codes
from quire.ops.triton.attention_cache import write_pages
from quire.schema.errors import ConfigError
from quire.schema.kv import KVSpec


class TritonCache:
    """`keys` and `values` [num_blocks, block_size, kv heads, size]; values None: latent, a slice of the keys.
    `scales`: of a cache in 8 bits, else None; `layer_scales` [2]: those of keys and values, where a layer has one."""

    def __init__(self, spec: KVSpec, num_blocks: int, memory: Tensor) -> None:
        self.spec = spec
        pages = memory.view(getattr(torch, spec.dtype))
        heads, page, size = spec.num_kv_heads, spec.block_size, spec.head_size
        value = size if spec.v_head_size < 0 else spec.v_head_size
        if memory.shape[0] < num_blocks or pages.shape[1] < heads * page * (size + value):
            raise ConfigError(
                f"KV memory {tuple(memory.shape)} is too small for {num_blocks} blocks of {spec.page_bytes} bytes"
            )
        at, stride = pages.storage_offset(), pages.stride(0)
        self.keys = pages.as_strided((num_blocks, page, heads, size), (stride, size, page * size, 1), at)
        self.values: Tensor | None = None
        if value:
            strides = (stride, value, page * value, 1)
            self.values = pages.as_strided((num_blocks, page, heads, value), strides, at + heads * page * size)
        self.layer_scales: Tensor | None = None
        self.uncalibrated = False
        self.scales: CacheScales | None = None
        if self.keys.dtype is torch.int8:
            self.scales = self._token_scales(memory, num_blocks, page * heads * (size + value))
        elif is_coded(self.keys.dtype):
            self.layer_scales = torch.ones(2, device=memory.device)
            k, v = self.layer_scales.split(1)
            self.scales = CacheScales(k, k if self.values is None else v)

    def _token_scales(self, memory: Tensor, num_blocks: int, codes: int) -> CacheScales:
        """codes: bytes of a block that come before its scales."""
        heads, page = self.spec.num_kv_heads, self.spec.block_size
        if codes % 4 or memory.shape[1] % 4:
            raise ConfigError(
                f"an int8 cache needs blocks whose codes are a multiple of 4 bytes, not {codes}: choose "
                "another block_size",
                param="block_size",
            )
        words = memory.view(torch.float32)
        shape, strides = (num_blocks, page, heads), (words.stride(0), 1, page)
        at = words.storage_offset() + codes // 4
        keys = words.as_strided(shape, strides, at)
        return CacheScales(keys, keys if self.values is None else words.as_strided(shape, strides, at + heads * page))

    def calibrate(self, k: Tensor, v: Tensor | None) -> None:
        """Let these keys and values choose the layer's scales."""
        assert self.layer_scales is not None
        self.layer_scales.copy_(measured_scales(k, v))
        self.uncalibrated = False

    def read(self, slots: Tensor, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tokens at slots [batch * L] -> keys and values [batch, Hkv, L, size]; for models with their own attention."""
        at = slots // self.spec.block_size, slots % self.spec.block_size
        both = [(self.keys, 0)] if self.values is None else [(self.keys, 0), (self.values, 1)]
        tokens = [
            pages[at].to(dtype) if self.scales is None else read_codes(pages, self.scales[which], *at, dtype)
            for pages, which in both
        ]
        k, v = (tensor.unflatten(0, (batch, -1)).transpose(1, 2) for tensor in (tokens[0], tokens[-1]))
        return k, v

    def write(self, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        write_kv(k, v, self, slots)


def write_kv(k: Tensor, v: Tensor | None, cache: TritonCache, slots: Tensor) -> None:
    """k [T, Hkv, D], v [T, Hkv, Dv] to slots [T]; -1: nowhere."""
    write_pages(dense(k), None if v is None else dense(v), cache.keys, cache.values, slots, cache.scales)


def dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
