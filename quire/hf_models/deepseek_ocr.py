"""The image encoder of DeepSeek-OCR: transformers' SAM of DeepSeek-OCR 2, whose map of vectors CLIP reads in place of
patches; both side by side through a projection; vectors of the rows' ends and of the end of an image.

In: sizes as deepseek_sizes.py has checked them. Must not know: steps, requests, the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2SamVisionConfig
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2SamVisionEncoder

from quire.hf_models.deepseek_vl2 import joined, with_ends

_EPS = 1e-5


class ClipAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        images, places, width = hidden.shape
        split = self.qkv_proj(hidden).view(images, places, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(split[0], split[1], split[2])
        out: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(images, places, width))
        return out


class ClipMlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.fc1(hidden)
        out: Tensor = self.fc2(inner * torch.sigmoid(1.702 * inner))
        return out


class ClipLayer(nn.Module):
    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        width = int(sizes["width"])
        self.layer_norm1 = nn.LayerNorm(width, eps=_EPS)
        self.self_attn = ClipAttention(width, sizes["heads"])
        self.layer_norm2 = nn.LayerNorm(width, eps=_EPS)
        self.mlp = ClipMlp(width, width * sizes["mlp_ratio"])

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.layer_norm1(hidden))
        out: Tensor = hidden + self.mlp(self.layer_norm2(hidden))
        return out


class ClipPlaces(nn.Module):
    """A vector before all others, and positions that are stretched over maps of another size."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        width = int(sizes["width"])
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.position_embedding = nn.Embedding(1 + sizes["places"], width)

    def forward(self, map_: Tensor) -> Tensor:
        """[images, width, side, side] -> [images, 1 + side * side, width]"""
        images, width, side, _ = map_.shape
        first = self.class_embedding.expand(images, 1, width)
        return torch.cat((first, map_.flatten(2).mT), 1) + self._positions(side)

    def _positions(self, side: int) -> Tensor:
        table = self.position_embedding.weight
        own = round((len(table) - 1) ** 0.5)
        if own == side:
            return table
        square = table[1:].float().view(1, own, own, -1).permute(0, 3, 1, 2)
        other = functional.interpolate(square, (side, side), mode="bicubic", antialias=True, align_corners=False)
        return torch.cat((table[:1], other[0].flatten(1).T.to(table.dtype)))


class ClipTransformer(nn.Module):
    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ClipLayer(sizes) for _ in range(sizes["layers"])])


class ClipOfMaps(nn.Module):
    """CLIP that reads a map of vectors; its own embedding of patches is not used."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        self.embeddings = ClipPlaces(sizes)
        self.pre_layrnorm = nn.LayerNorm(sizes["width"], eps=_EPS)
        self.transformer = ClipTransformer(sizes)

    def forward(self, map_: Tensor) -> Tensor:
        hidden: Tensor = self.pre_layrnorm(self.embeddings(map_))
        for layer in self.transformer.layers:
            hidden = layer(hidden)
        return hidden[:, 1:]


class LinearProjector(nn.Module):
    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        self.layers = nn.Linear(sizes["input_dim"], sizes["n_embed"])


class DeepseekOcrEncoders(nn.Module):
    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        width = int(sizes["projector_config"]["n_embed"])
        self.sam_model = DeepseekOcr2SamVisionEncoder(DeepseekOcr2SamVisionConfig(**sizes["sam_config"]))
        self.vision_model = ClipOfMaps(sizes["clip_config"])
        self.projector = LinearProjector(sizes["projector_config"])
        self.image_newline = nn.Parameter(torch.empty(width))
        self.view_seperator = nn.Parameter(torch.empty(width))

    def get_image_features(
        self, pixel_values: Tensor, images_spatial_crop: Tensor, images_crop: Tensor | None = None
    ) -> Tensor:
        """[n, width] of one image: its tiles, row by row, if it has any, then the whole of it, then an end.
        `images_spatial_crop`: columns and rows of tiles."""
        columns, rows = (int(size) for size in images_spatial_crop[0])
        tiles = 0 if images_crop is None else len(images_crop)
        if len(pixel_values) != 1 or tiles != (0 if rows * columns == 1 else rows * columns):
            raise ValueError(f"{len(pixel_values)} whole images and {tiles} tiles for a grid of {rows}x{columns}")
        parts = [with_ends(self.squares(pixel_values)[0], self.image_newline), self.view_seperator[None]]
        if images_crop is not None:
            parts.insert(0, with_ends(joined(self.squares(images_crop), rows, columns), self.image_newline))
        return torch.cat(parts)

    def squares(self, pixels: Tensor) -> Tensor:
        """[images, side, side, width]"""
        map_ = self.sam_model(pixels).last_hidden_state
        both = torch.cat((self.vision_model(map_), map_.flatten(2).mT), -1)
        out: Tensor = self.projector.layers(both)
        return out.view(len(pixels), *map_.shape[2:], -1)


class DeepseekOcrTowers(PreTrainedModel):
    """Named as in checkpoints of the whole, but for SAM (equivalents.py)."""

    _keys_to_ignore_on_load_unexpected = [
        r"^lm_head\.", r"^model\.(?:layers|embed_tokens|norm)\.", r"\.embeddings\.(?:patch_embedding|position_ids)",
    ]  # fmt: skip

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.model = DeepseekOcrEncoders(config.__dict__)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        for weight in module.parameters(recurse=False):
            nn.init.normal_(weight, std=0.02)
