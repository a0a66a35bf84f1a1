"""How keys and values are rounded to 8 bits in a cache, and read back. The torch arithmetic that kernels reproduce.

    per layer   float8: one scale for a layer's keys and one for its values. number = code * scale
    per token   int8: a scale for each token and head, its largest number / 127. number = code * scale

Numbers beyond the largest code become the largest code. In: numbers and scales; out: codes, or numbers. Must not know:
blocks, layers, where scales come from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}  # code of a dtype
HEADROOM = {"keys": 200.0, "values": 100.0}  # measured scales: the code of the largest number that was seen
PLAIN, PER_LAYER, PER_TOKEN = 0, 1, 2  # ways of coding


class CacheScales(NamedTuple):
    """Per layer: float32 [1] each. Per token: float32 [num_blocks, tokens, kv heads] each, views like keys and values.
    Where values are a slice of the keys, both are those of the keys."""

    keys: Tensor
    values: Tensor

    @property
    def coding(self) -> int:
        return PER_LAYER if self.keys.dim() == 1 else PER_TOKEN


def is_coded(dtype: torch.dtype) -> bool:
    return dtype in LARGEST


def encode(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of x. The scale broadcasts to x; one that is not finite marks a vector that is not numbers: codes of 0."""
    codes = x.float() / scale
    if dtype is torch.int8:
        codes = torch.where(scale.isfinite(), codes, 0.0).round_()
    return codes.clamp_(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scale).to(dtype)


def token_scales(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales of x [T, H, D], [T, H]: 1 for zeros, infinite if there is anything that is not a number."""
    top = torch.where(x.isnan(), torch.inf, x.float().abs()).amax(-1)
    return torch.where(top > 0, top / LARGEST[dtype], 1.0)


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [T, H, D] as it will be read from a cache of this dtype. scale: [1], or with per-token scales ignored."""
    if dtype is torch.int8:
        scale = token_scales(x, dtype)[..., None]
    return decode(encode(x, scale, dtype), scale, x.dtype)


def write_codes(pages: Tensor, scales: Tensor, block: Tensor, offset: Tensor, x: Tensor) -> None:
    """x [T, H, D] to pages [num_blocks, tokens, H, D]; scales as in CacheScales."""
    scale = scales
    if scales.dim() > 1:
        scales[block, offset] = token_scales(x, pages.dtype)
        scale = scales[block, offset][..., None]
    pages[block, offset] = encode(x, scale, pages.dtype)


def read_codes(pages: Tensor, scales: Tensor, block: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H, D]."""
    scale = scales if scales.dim() == 1 else scales[block, offset][..., None]
    return decode(pages[block, offset], scale, dtype)


def measured_scales(k: Tensor, v: Tensor | None) -> Tensor:
    """float32 [2]: scales under which the largest of these keys and values get the codes of HEADROOM, which leaves room
    for larger ones to come; 1 where there is nothing to measure."""
    tops = [0.0 if x is None or not x.numel() else x.abs().amax().float() / room
            for x, room in zip((k, v), HEADROOM.values(), strict=True)]  # fmt: skip
    scales = torch.stack([torch.as_tensor(top, device=k.device) for top in tops])
    return torch.where((scales > 0) & scales.isfinite(), scales, 1.0)
