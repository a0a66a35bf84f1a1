"""The image encoder of DeepSeek-VL2: SigLIP with the names that timm gives its weights, and the projector that merges
squares of its vectors; vectors of the rows' ends and of the border between whole image and tiles.

In: sizes as deepseek_sizes.py has checked them. Must not know: steps, requests, the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

_EPS = 1e-6


class SiglipAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        images, places, width = hidden.shape
        split = self.qkv(hidden).view(images, places, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(split[0], split[1], split[2])
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(images, places, width))
        return out


class SiglipMlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.fc2(functional.gelu(self.fc1(hidden), approximate="tanh"))
        return out


class SiglipBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=_EPS)
        self.attn = SiglipAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=_EPS)
        self.mlp = SiglipMlp(width, inner)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden))
        out: Tensor = hidden + self.mlp(self.norm2(hidden))
        return out


class SiglipPatches(nn.Module):
    """Pixels beyond the last whole patch are not seen."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, pixels: Tensor) -> Tensor:
        out: Tensor = self.proj(pixels).flatten(2).mT
        return out


class SiglipEncoder(nn.Module):
    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        width, self.side = int(sizes["width"]), int(sizes["image_size"])
        self.num = (self.side // sizes["patch_size"]) ** 2
        self.patch_embed = SiglipPatches(width, sizes["patch_size"])
        self.pos_embed = nn.Parameter(torch.empty(1, self.num, width))
        inner = int(width * sizes["mlp_ratio"])
        self.blocks = nn.ModuleList([SiglipBlock(width, sizes["heads"], inner) for _ in range(sizes["layers"])])
        self.norm = nn.LayerNorm(width, eps=_EPS)

    def forward(self, pixels: Tensor) -> Tensor:
        """[images, 3, side, side] -> [images, places, width], row by row."""
        if pixels.shape[1:] != (3, self.side, self.side):
            raise ValueError(f"images of {list(pixels.shape[1:])}; the encoder takes [3, {self.side}, {self.side}]")
        hidden = self.patch_embed(pixels) + self.pos_embed
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.norm(hidden)
        return out


class SquareProjector(nn.Module):
    """Squares of vectors side by side, each dimension of all of them next to each other, through a perceptron."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        self.merge, out = int(sizes["downsample_ratio"]), int(sizes["n_embed"])
        inner = out * sizes["mlp_ratio"]
        layers: list[nn.Module] = [nn.Linear(sizes["input_dim"] * self.merge**2, inner)]
        for last in [inner] * (sizes["depth"] - 2) + [out]:
            layers += [nn.GELU(), nn.Linear(inner, last)]
        self.layers = nn.Sequential(*layers)

    def forward(self, hidden: Tensor) -> Tensor:
        """[images, side * side, width] -> [images, h, h, width]; zeros below and to the right up to whole squares."""
        images, places, width = hidden.shape
        side, merge = round(places**0.5), self.merge
        missing = -side % merge
        padded = functional.pad(hidden.view(images, side, side, width), (0, 0, 0, missing, 0, missing))
        num = (side + missing) // merge
        squares = padded.view(images, num, merge, num, merge, width).permute(0, 1, 3, 5, 2, 4)
        out: Tensor = self.layers(squares.reshape(images, num, num, width * merge**2))
        return out


class DeepseekVL2Towers(PreTrainedModel):
    """Named as in checkpoints of the whole."""

    _keys_to_ignore_on_load_unexpected = [r"^language\.", r"^vision\.attn_pool\.", r"^vision\.head\."]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        sizes: Mapping[str, Any] = config.__dict__
        width = int(sizes["projector_config"]["n_embed"])
        self.is_whole_first = bool(sizes["is_whole_first"])
        self.vision = SiglipEncoder(sizes["vision_config"])
        self.projector = SquareProjector(sizes["projector_config"])
        self.image_newline = nn.Parameter(torch.empty(width))
        self.view_seperator = nn.Parameter(torch.empty(width))
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        for weight in module.parameters(recurse=False):
            nn.init.normal_(weight, std=0.02)

    def get_image_features(self, pixel_values: Tensor, images_spatial_crop: Tensor) -> Tensor:
        """[n, width] of one image: the whole of it, then tiles row by row. `images_spatial_crop`: columns and rows."""
        columns, rows = (int(size) for size in images_spatial_crop[0])
        if len(pixel_values) != 1 + rows * columns:
            raise ValueError(f"{len(pixel_values)} pictures for the whole image and a grid of {rows}x{columns} tiles")
        squares = self.projector(self.vision(pixel_values))
        whole, border = with_ends(squares[0], self.image_newline), self.view_seperator[None]
        tiles = with_ends(joined(squares[1:], rows, columns), self.image_newline)
        return torch.cat((whole, border, tiles) if self.is_whole_first else (tiles, border, whole))


def joined(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """[rows * columns, h, w, width] -> [rows * h, columns * w, width]."""
    _, tall, wide, width = tiles.shape
    grid = tiles.view(rows, columns, tall, wide, width).transpose(1, 2)
    return grid.reshape(rows * tall, columns * wide, width)


def with_ends(square: Tensor, end: Tensor) -> Tensor:
    """[rows, columns, width] -> [rows * (columns + 1), width]: a vector ends each row."""
    rows, _, width = square.shape
    return torch.cat((square, end.expand(rows, 1, width)), 1).reshape(-1, width)
