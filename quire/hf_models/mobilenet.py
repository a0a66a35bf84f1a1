"""MobileNet V5, the vision encoder of Gemma 3n, with the names that checkpoints have from timm. Written here because
timm wants torchvision. In: pixels [images, 3, height, width]. Out: [images, 2048, side, side].

    stem (/2) ─▶ four stages of blocks (/4 .. /32) ─▶ the last two side by side ─▶ pointwise mlp ─▶ pooled

Blocks: `edge` (a wide convolution, then a pointwise one), `inverted` (depthwise convolutions around a pointwise mlp),
`attention` (one head of keys and values for all heads of queries). Must not know: the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.schema.errors import ConfigError

OUT = 2048
_STEM, _EPS = 64, 1e-6


class BlockKind(NamedTuple):
    kind: str  # edge | inverted | attention
    channels: int
    stride: int = 1
    expand: int = 1  # factor of the channels between pointwise convolutions
    first: int = 0  # size of the depthwise convolution before them; 0: none
    mid: int = 0  # of the one between them, or of the one that shrinks keys and values
    heads: int = 0
    size: int = 0  # of a head
    kv_stride: int = 1


def _attends(channels: int, heads: int, size: int, kv_stride: int, times: int) -> list[BlockKind]:
    attention = BlockKind("attention", channels, mid=3, heads=heads, size=size, kv_stride=kv_stride)
    return [attention, BlockKind("inverted", channels, expand=2)] * times


# those of mobilenetv5_300m_enc
STAGES: list[list[BlockKind]] = [
    [BlockKind("edge", 128, stride=2, expand=4, mid=3), *[BlockKind("edge", 128, expand=4, mid=3)] * 2],
    [
        BlockKind("inverted", 256, stride=2, expand=6, first=3, mid=5),
        *[BlockKind("inverted", 256, expand=4, first=size) for size in (5, 3, 5, 3)],
    ],
    [
        BlockKind("inverted", 640, stride=2, expand=6, first=5, mid=5),
        *[BlockKind("inverted", 640, expand=4, first=5)] * 7,
        BlockKind("inverted", 640),
        *_attends(640, 12, 64, 2, 14),
    ],
    [BlockKind("inverted", 1280, stride=2, expand=6, first=5, mid=5), *_attends(1280, 16, 96, 1, 19)],
]


class SamePadConv(nn.Conv2d):
    """Padded so that the output has ceil(size / stride) places, the odd one at the end."""

    def __init__(self, inner: int, outer: int, size: int, stride: int = 1, groups: int = 1, bias: bool = False) -> None:
        super().__init__(inner, outer, size, stride=stride, groups=groups, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for length, size, stride in zip(x.shape[:1:-1], self.kernel_size, self.stride, strict=True):
            missing = max((-(-length // stride) - 1) * stride + size - length, 0)
            pads += [missing // 2, missing - missing // 2]
        return super().forward(F.pad(x, pads) if any(pads) else x)


class ChannelNorm(nn.Module):
    """RMS over channels, and an activation where it has one."""

    def __init__(self, channels: int, *, acts: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.acts = acts

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + _EPS) * self.weight[:, None, None]
        return F.gelu(x, approximate="tanh") if self.acts else x


class NormedConv(nn.Module):
    def __init__(self, inner: int, outer: int, size: int = 1, *, stride: int = 1, depthwise: bool = False,
                 bias: bool = False, acts: bool = True) -> None:  # fmt: skip
        super().__init__()
        self.conv = SamePadConv(inner, outer, size, stride, inner if depthwise else 1, bias)
        self.bn = ChannelNorm(outer, acts=acts)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class ChannelScale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma[:, None, None]


class EdgeBlock(nn.Module):
    def __init__(self, inner: int, kind: BlockKind) -> None:
        super().__init__()
        wide = rounded(inner * kind.expand)
        self.is_added = inner == kind.channels and kind.stride == 1
        self.conv_exp = SamePadConv(inner, wide, kind.mid, kind.stride)
        self.bn1 = ChannelNorm(wide, acts=True)
        self.conv_pwl = SamePadConv(wide, kind.channels, 1)
        self.bn2 = ChannelNorm(kind.channels)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv_pwl(self.bn1(self.conv_exp(x))))
        return x + out if self.is_added else out


class InvertedBlock(nn.Module):
    def __init__(self, inner: int, kind: BlockKind, *, scaled: bool = True, added: bool = True) -> None:
        super().__init__()
        wide, alone = rounded(inner * kind.expand), kind.stride if not kind.mid else 1
        self.is_added = added and inner == kind.channels and kind.stride == 1
        parts: list[tuple[str, nn.Module]] = []
        if kind.first:
            parts.append(("dw_start", NormedConv(inner, inner, kind.first, stride=alone, depthwise=True, acts=False)))
        parts.append(("pw_exp", NormedConv(inner, wide)))
        if kind.mid:
            parts.append(("dw_mid", NormedConv(wide, wide, kind.mid, stride=kind.stride, depthwise=True)))
        parts.append(("pw_proj", NormedConv(wide, kind.channels, acts=False)))
        if scaled:
            parts.append(("layer_scale", ChannelScale(kind.channels)))
        for name, part in parts:
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for part in self.children():
            out = part(out)
        return x + out if self.is_added else out


class Shrunk(nn.Module):
    """Keys or values: a projection, of fewer places where these are shrunk before."""

    def __init__(self, inner: int, kind: BlockKind) -> None:
        super().__init__()
        if kind.kv_stride > 1:
            self.down_conv = SamePadConv(inner, inner, kind.mid, kind.kv_stride, inner)
            self.norm = ChannelNorm(inner)
        self.proj = SamePadConv(inner, kind.size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 1, places, size]"""
        for part in self.children():
            x = part(x)
        return x.flatten(2).mT[:, None]


class Projected(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.proj = SamePadConv(inner, outer, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class SharedKeyAttention(nn.Module):
    """All heads of queries read the same keys and values."""

    def __init__(self, kind: BlockKind) -> None:
        super().__init__()
        inner, self.heads = kind.channels, kind.heads
        self.query = Projected(inner, kind.heads * kind.size)
        self.key, self.value = Shrunk(inner, kind), Shrunk(inner, kind)
        self.output = Projected(kind.heads * kind.size, inner)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(1, (self.heads, -1)).flatten(3).mT  # [N, heads, places, size]
        k, v = self.key(x).expand(-1, self.heads, -1, -1), self.value(x).expand(-1, self.heads, -1, -1)
        out = F.scaled_dot_product_attention(q, k, v).mT.flatten(1, 2)
        return self.output(out.unflatten(2, x.shape[2:]))


class AttentionBlock(nn.Module):
    def __init__(self, inner: int, kind: BlockKind) -> None:
        super().__init__()
        if inner != kind.channels:
            raise ValueError(f"an attention block of {kind.channels} channels behind one of {inner}")
        self.norm = ChannelNorm(inner)
        self.attn = SharedKeyAttention(kind)
        self.layer_scale = ChannelScale(inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer_scale(self.attn(self.norm(x)))


class Fusion(nn.Module):
    """The last two stages side by side, at the size of the first of them, through a pointwise mlp."""

    def __init__(self, inner: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.ffn = InvertedBlock(inner, BlockKind("inverted", OUT, expand=2), scaled=False, added=False)
        self.norm = ChannelNorm(OUT)

    def forward(self, large: Tensor, small: Tensor) -> Tensor:
        if small.shape[2:] != large.shape[2:]:
            small = F.interpolate(small, size=large.shape[2:], mode="nearest")
        out = self.ffn(torch.cat((large, small), 1))
        height, width = out.shape[2:]
        if height % self.side or width % self.side:
            out = F.interpolate(out, size=(self.side, self.side), mode="bilinear")
        elif (height, width) != (self.side, self.side):
            out = F.avg_pool2d(out, (height // self.side, width // self.side))
        return self.norm(out)


_BLOCKS: dict[str, Any] = {"edge": EdgeBlock, "inverted": InvertedBlock, "attention": AttentionBlock}


class MobileNetV5(nn.Module):
    def __init__(self, *, side: int = 16, multiplier: float = 1.0) -> None:
        """`multiplier`: of channels, for models that are smaller or larger than the released one."""
        super().__init__()
        inner = _STEM if multiplier < 1 else rounded(_STEM * multiplier)
        self.conv_stem = NormedConv(3, inner, 3, stride=2, bias=True)
        stages, ends = [], []
        for kinds in STAGES:
            blocks = []
            for kind in kinds:
                kind = kind._replace(channels=rounded(kind.channels * multiplier))
                blocks.append(_BLOCKS[kind.kind](inner, kind))
                inner = kind.channels
            stages.append(nn.Sequential(*blocks))
            ends.append(inner)
        self.blocks = nn.Sequential(*stages)
        self.msfa = Fusion(sum(ends[-2:]), side)

    def forward(self, pixels: Tensor) -> Tensor:
        x, outputs = self.conv_stem(pixels), []
        for stage in self.blocks:
            x = stage(x)
            outputs.append(x)
        return self.msfa(*outputs[-2:])


def rounded(channels: float, step: int = 8) -> int:
    """To a multiple of `step`, no more than a tenth lower."""
    near = max(step, int(channels + step / 2) // step * step)
    return near + step if near < 0.9 * channels else near


def mobilenet_of(arguments: Mapping[str, Any] | None) -> MobileNetV5:
    """From `model_args` of a configuration."""
    rest = dict(arguments or {})
    side, multiplier = rest.pop("msfa_output_resolution", 16), rest.pop("channel_multiplier", 1.0)
    if (
        rest or not isinstance(side, int) or not 1 <= side <= 256
        or not isinstance(multiplier, int | float) or not 0 < multiplier <= 8
    ):  # fmt: skip
        raise ConfigError(
            f"vision_config.model_args is {str(arguments)[:200]}: expected msfa_output_resolution from 1 to 256 and "
            "channel_multiplier above 0, up to 8", param="vision_config",
        )  # fmt: skip
    return MobileNetV5(side=side, multiplier=multiplier)
