"""Rotary embeddings: frequencies of every scaling, their cosine and sine tables, and the rotation itself.

Two layouts of the pairs that are rotated together: halves (i, i + d/2) and neighbours (2i, 2i + 1), called `pairs`.
The sign of the rotation is folded into the sine table, so rotating is x * cos + swapped(x) * sin in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.op import op, same_bits


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _default(theta: float, dim: int, scaling: Mapping[str, Any], length: int) -> tuple[Tensor, float]:
    return _plain(theta, dim), 1.0


def _linear(theta: float, dim: int, scaling: Mapping[str, Any], length: int) -> tuple[Tensor, float]:
    return _plain(theta, dim) / scaling["factor"], 1.0


def _dynamic(theta: float, dim: int, scaling: Mapping[str, Any], length: int) -> tuple[Tensor, float]:
    """NTK base for sequences up to `length`; the plain base if that is within the trained length."""
    trained, factor = scaling["max_position_embeddings"], scaling["factor"]
    stretch = (factor * max(length, trained) / trained) - (factor - 1)
    return _plain(theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(theta: float, dim: int, scaling: Mapping[str, Any], length: int) -> tuple[Tensor, float]:
    inv = _plain(theta, dim)
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wave = 2 * math.pi / inv
    slow = torch.where(wave > context / low, inv / factor, inv)
    mix = (context / wave - low) / (high - low)
    smooth = (1 - mix) * slow / factor + mix * slow
    between = ~(wave < context / high) & ~(wave > context / low)
    return torch.where(between, smooth, slow), 1.0


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature, which grows with the extension of the context."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(theta: float, dim: int, scaling: Mapping[str, Any], length: int) -> tuple[Tensor, float]:
    context = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or scaling["max_position_embeddings"] / context

    def dim_of(rotations: float) -> float:
        return (dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dim_of(scaling.get("beta_fast") or 32), dim_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = theta ** (torch.arange(0, dim, 2).float() / dim)
    inv = 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep
    gain = scaling.get("attention_factor")
    if gain is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        gain = yarn_mscale(factor)
        if mscale and all_dim:
            gain = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return inv, float(gain)


def _longrope(theta: float, dim: int, scaling: Mapping[str, Any], length: int) -> tuple[Tensor, float]:
    """The long factors if sequences may exceed the trained length, else the short ones."""
    trained = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or scaling["max_position_embeddings"] / trained
    gain = scaling.get("attention_factor")
    if gain is None:
        gain = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    stretch = torch.tensor(scaling["long_factor" if length > trained else "short_factor"], dtype=torch.float32)
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    return 1.0 / (stretch * powers), float(gain)


SCALINGS: dict[str, Callable[[float, int, Mapping[str, Any], int], tuple[Tensor, float]]] = {
    "default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
    "longrope": _longrope,
}  # fmt: skip


def frequencies(theta: float, dim: int, scaling: Mapping[str, Any] | None, length: int) -> tuple[Tensor, float]:
    """(inverse frequencies [dim / 2] float32, gain of cosine and sine). `length`: the longest sequence to serve."""
    scaling = scaling or {}
    return SCALINGS[scaling.get("rope_type", "default")](theta, dim, scaling, length)


@op
def rope_tables(
    positions: Tensor, inv_freq: Tensor, gain: float, pairs: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and signed sin, each [T, 1, dim], for positions [T]; computed in float32."""
    angle = positions[:, None].float() * inv_freq
    return _laid_out(angle.cos() * gain, angle.sin() * gain, pairs, dtype)


_LANES, _SERIAL = 16, 2048  # elements of torch's widest vector; elements that it leaves to one thread


@rope_tables.form("cpu")
def rope_tables_cpu(
    positions: Tensor, inv_freq: Tensor, gain: float, pairs: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A position's bits are always the same. torch computes in vectors, and the largest value of a vector decides how
    all of it is computed; so rows start with a vector, and there are fewer than torch would share among threads."""
    return _tables(positions, inv_freq, gain, pairs, dtype, most=_SERIAL)


@rope_tables.form("cpu", same_bits)
def rope_tables_apart(
    positions: Tensor, inv_freq: Tensor, gain: float, pairs: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Only cosines and sines are left to a library, and it gets one row at a time: whole vectors, which lie alike."""
    return _tables(positions, inv_freq, gain, pairs, dtype, most=1)


def _tables(
    positions: Tensor, inv_freq: Tensor, gain: float, pairs: bool, dtype: torch.dtype, *, most: int
) -> tuple[Tensor, Tensor]:
    """`most`: angles of a call, or one row."""
    half = len(inv_freq)
    if half % _LANES:
        inv_freq = F.pad(inv_freq, (0, -half % _LANES))
    angle, rows = positions[:, None].float() * inv_freq, max(1, most // len(inv_freq))
    if len(angle) <= rows:
        cos, sin = angle.cos(), angle.sin()
    else:
        parts = angle.split(rows)
        cos, sin = torch.cat([part.cos() for part in parts]), torch.cat([part.sin() for part in parts])
    if half % _LANES:
        cos, sin = cos[:, :half], sin[:, :half]
    if gain != 1.0:
        cos, sin = cos * gain, sin * gain
    return _laid_out(cos, sin, pairs, dtype)


def _laid_out(cos: Tensor, sin: Tensor, pairs: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """From [T, dim / 2] to the arguments of `rotate`."""
    if pairs:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return cos[:, None].to(dtype), sin[:, None].to(dtype)


@op
def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """Rotate the first `cos.shape[-1]` entries of each head of x [T, H, D]; the rest passes through."""
    dim = cos.shape[-1]
    head = x if dim == x.shape[-1] else x[..., :dim]
    if pairs:
        swapped = torch.stack((head[..., 1::2], head[..., ::2]), -1).flatten(-2)
    else:
        swapped = torch.cat((head[..., dim // 2 :], head[..., : dim // 2]), -1)
    turned = (head * cos).add_(swapped * sin).to(x.dtype)
    return turned if head is x else torch.cat((turned, x[..., dim:]), -1)


@op
def turn_heads_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate all of each head of x [T, H, D], halves, in place and in float32, by cos and sin [T, D], both unsigned."""
    wide, half = x.float(), x.shape[-1] // 2
    swapped = torch.cat((-wide[..., half:], wide[..., :half]), -1)
    x.copy_(wide * cos[:, None].float() + swapped * sin[:, None].float())
