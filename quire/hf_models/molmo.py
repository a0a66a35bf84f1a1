"""The image encoder of the first Molmo, with its projector: transformers has no class for it.

CLIP's vision transformer, several of whose layers are read; squares of two by two patches, each pooled by attention
from their mean; a gated projection. What comes out is added to the embedding of the token in whose place it stands.
Released configurations do not describe the encoder: its sizes are those of VISION, unless `vision_backbone` and
`vit_layers`, as the training code names them, say otherwise. Must not know: steps, requests, pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from quire.checkpoint.limits import FFN, WIDTH, Range
from quire.schema.errors import ConfigError

VISION: dict[str, Any] = {
    "image_default_input_size": [336, 336], "image_patch_size": 14, "image_emb_dim": 1024, "image_num_heads": 16,
    "image_head_dim": 64, "image_num_layers": 23, "image_mlp_dim": 4096, "image_num_pos": 577, "image_norm_eps": 1e-5,
}  # fmt: skip
# what other encoders of the same training code would need
_FIXED = {
    "image_model_type": "openai", "image_mlp_activations": "quick_gelu", "image_padding_embed": "pad_and_partial_pad",
    "image_pooling_2d": "attention-meanq", "image_projector": "mlp", "image_pooling_h": 2, "image_pooling_w": 2,
}  # fmt: skip
_RANGES = {
    "image_patch_size": Range(1, 1024), "image_emb_dim": Range(1, 1 << 14), "image_num_heads": Range(1, 1 << 10),
    "image_head_dim": Range(1, 1 << 12), "image_num_layers": Range(1, 256), "image_mlp_dim": Range(1, 1 << 17),
    "image_num_pos": Range(2, 1 << 17),
}  # fmt: skip
_SIDE = Range(1, 4096)
_MOST_READ = 16  # layers
_MOST_NUMBERS = 1 << 32  # of all weights
_POOL = 2


class MolmoTowersConfig(PreTrainedConfig):
    """Of the whole model, as far as the encoder goes."""

    model_type = "molmo"

    def __init__(
        self,
        hidden_size: int = 4096,
        intermediate_size: int = 22016,
        vision_backbone: Mapping[str, Any] | None = None,
        vit_layers: list[int] | None = None,
        embedding_size: int | None = None,
        vocab_size: int = 50304,
        additional_vocab_size: int = 128,
        **more: Any,
    ) -> None:
        source = {} if vision_backbone is None else vision_backbone
        if not isinstance(source, Mapping):
            raise ConfigError(f"vision_backbone must be a mapping, not {source!r:.60}", param="vision_backbone")
        self.vision = {**VISION, **{name: value for name, value in source.items() if value is not None}}
        _check_vision({**more, **self.vision})
        self.read_layers = _layers([-2, -9] if vit_layers is None else vit_layers, self.vision["image_num_layers"])
        _whole("additional_vocab_size", additional_vocab_size, Range(1, 1 << 20))
        _whole("hidden_size", hidden_size, WIDTH)
        _whole("intermediate_size", intermediate_size, Range(2, FFN.most))
        self.hidden_size, self.inner_size = hidden_size, intermediate_size // 2
        self.first_mark, self.num_marks = embedding_size or vocab_size, additional_vocab_size
        if (numbers := self._numbers()) > _MOST_NUMBERS:
            raise ConfigError(
                f"the image encoder of this configuration has at least {numbers} weights; the limit is {_MOST_NUMBERS}",
                param="vision_backbone",
            )
        super().__init__()

    def _numbers(self) -> int:
        size = self.vision
        width, heads, read = size["image_emb_dim"], size["image_num_heads"] * size["image_head_dim"], self.read_layers
        layer = 4 * width * heads + 2 * width * size["image_mlp_dim"]
        pooling = 3 * len(read) * width * heads + heads * width
        ends = width * (size["image_num_pos"] + 3 * size["image_patch_size"] ** 2) + self.num_marks * self.hidden_size
        projector = self.inner_size * (2 * width + self.hidden_size)
        return (max(read) + 1) * layer + pooling + ends + projector

    @property
    def grid(self) -> int:
        """Patches along a side."""
        return int(self.vision["image_default_input_size"][0]) // int(self.vision["image_patch_size"])


def _check_vision(source: Mapping[str, Any]) -> None:
    for name, allowed in _RANGES.items():
        _whole(name, source[name], allowed)
    eps = source["image_norm_eps"]
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps <= 1:
        raise ConfigError(f"image_norm_eps must be a number from 0 to 1, got {eps!r:.60}", param="image_norm_eps")
    for name, built in _FIXED.items():
        if source.get(name, built) != built:
            raise ConfigError(
                f"{name} = {source[name]!r:.60} is not built for this encoder, only {built!r}", param=name
            )
    sides, patch = source["image_default_input_size"], source["image_patch_size"]
    if not isinstance(sides, list | tuple) or len(sides) != 2 or sides[0] != sides[1]:
        raise ConfigError(f"image_default_input_size must be two equal numbers, got {sides!r:.60}")
    _whole("image_default_input_size", sides[0], _SIDE)
    if sides[0] % (_POOL * patch):
        raise ConfigError(f"image_default_input_size = {sides[0]} has no even number of patches of {patch} pixels")
    places = source["image_num_pos"] - 1
    if round(places**0.5) ** 2 != places:
        raise ConfigError(f"image_num_pos = {places + 1} is not one more than a square", param="image_num_pos")


def _whole(name: str, value: Any, allowed: Range) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not allowed.least <= value <= allowed.most:
        raise ConfigError(f"{name} = {value!r:.60}; expected {allowed}", param=name)


def _layers(source: Any, num: int) -> list[int]:
    """Counted from the first."""
    known = isinstance(source, list | tuple) and 0 < len(source) <= _MOST_READ
    if not known or any(isinstance(one, bool) or not isinstance(one, int) or not -num <= one < num for one in source):
        raise ConfigError(
            f"vit_layers must be up to {_MOST_READ} numbers of the encoder's {num} layers, got {source!r:.100}",
            param="vit_layers",
        )
    return [one % num for one in source]


class PatchAttention(nn.Module):
    def __init__(self, width: int, out: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv = (nn.Linear(width, heads * head_dim) for _ in range(3))
        self.wo = nn.Linear(heads * head_dim, out)

    def forward(self, queries: Tensor, states: Tensor) -> Tensor:
        """[n, q, width] and [n, k, width] -> [n, q, out]"""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.wq(queries), self.wk(states), self.wv(states))
        )
        attended: Tensor = self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return attended


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, states: Tensor) -> Tensor:
        inner = self.w1(states)
        out: Tensor = self.w2(inner * torch.sigmoid(1.702 * inner))
        return out


class EncoderLayer(nn.Module):
    def __init__(self, size: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = size["image_emb_dim"], size["image_norm_eps"]
        self.attention = PatchAttention(width, width, size["image_num_heads"], size["image_head_dim"])
        self.feed_forward = FeedForward(width, size["image_mlp_dim"])
        self.attention_norm, self.ffn_norm = (nn.LayerNorm(width, eps=eps) for _ in range(2))

    def forward(self, states: Tensor) -> Tensor:
        normed = self.attention_norm(states)
        states = states + self.attention(normed, normed)
        out: Tensor = states + self.feed_forward(self.ffn_norm(states))
        return out


class ImageEncoder(nn.Module):
    """Without the layers behind the last one that is read."""

    def __init__(self, config: MolmoTowersConfig) -> None:
        super().__init__()
        size = config.vision
        width = size["image_emb_dim"]
        self.grid, self.read_layers = config.grid, config.read_layers
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros(size["image_num_pos"], width))
        self.patch_embedding = nn.Linear(3 * size["image_patch_size"] ** 2, width, bias=False)
        self.pre_ln = nn.LayerNorm(width, eps=size["image_norm_eps"])
        self.transformer = nn.Module()
        self.transformer.resblocks = nn.ModuleList(EncoderLayer(size) for _ in range(max(self.read_layers) + 1))

    def forward(self, patches: Tensor) -> Tensor:
        """[crops, patches, numbers] -> [crops, patches, width of all layers that are read]"""
        states = self.patch_embedding(patches)
        first = self.class_embedding.to(states.dtype).expand(len(states), 1, -1)
        states = self.pre_ln(torch.cat((first, states), 1) + self._positions().to(states.dtype))
        of_layer = []
        for layer in self.transformer.resblocks:  # type: ignore[union-attr]
            states = layer(states)
            of_layer.append(states)
        return torch.cat([of_layer[index] for index in self.read_layers], -1)[:, 1:]

    def _positions(self) -> Tensor:
        own = self.positional_embedding
        side = round((len(own) - 1) ** 0.5)
        if side == self.grid:
            return own
        plane = own[1:].unflatten(0, (side, side)).permute(2, 0, 1)[None]
        size = (self.grid, self.grid)
        plane = F.interpolate(plane.float(), size=size, mode="bicubic", align_corners=False, antialias=True)
        return torch.cat((own[:1], plane[0].flatten(1).T.to(own.dtype)))


class Projector(nn.Module):
    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, out, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(states)) * self.w3(states))
        return out


class VisionBackbone(nn.Module):
    def __init__(self, config: MolmoTowersConfig) -> None:
        super().__init__()
        size = config.vision
        width, read = size["image_emb_dim"], len(config.read_layers) * size["image_emb_dim"]
        self.image_vit = ImageEncoder(config)
        self.image_pooling_2d = PatchAttention(read, width, size["image_num_heads"], size["image_head_dim"])
        self.image_projector = Projector(width, config.inner_size, config.hidden_size)
        self.pad_embed = nn.Parameter(torch.zeros(2, read))

    def forward(self, patches: Tensor, padding: Tensor, order: Tensor) -> Tensor:
        """`padding` of each patch: 0 none, 1 all of it, 2 some. `order`: the squares that are wanted."""
        states, grid = self.image_vit(patches), self.image_vit.grid
        shape = (len(patches), grid * grid)
        if padding.shape != shape or not bool(((padding >= 0) & (padding <= 2)).all()):
            raise ValueError(f"paddings {list(padding.shape)} for {shape} patches")
        states = states + torch.cat((torch.zeros_like(self.pad_embed[:1]), self.pad_embed))[padding]
        rows = states.unflatten(1, (grid // _POOL, _POOL, grid // _POOL, _POOL))
        squares = rows.transpose(2, 3).reshape(-1, _POOL * _POOL, states.shape[-1])
        if len(order) and (int(order.min()) < 0 or int(order.max()) >= len(squares)):
            raise ValueError(f"the item has {len(squares)} squares, of which {int(order.max())} is wanted")
        squares = squares[order]
        pooled = self.image_pooling_2d(squares.mean(1, keepdim=True), squares)
        vectors: Tensor = self.image_projector(pooled[:, 0])
        return vectors


class MolmoTowers(PreTrainedModel):
    """Named as in checkpoints of the whole."""

    config: MolmoTowersConfig
    config_class = MolmoTowersConfig
    _keys_to_ignore_on_load_unexpected = [r"model\.transformer\.(blocks|ln_f|ff_out|wte\.embedding)"]

    def __init__(self, config: MolmoTowersConfig) -> None:
        super().__init__(config)
        self.model = nn.Module()
        self.model.vision_backbone = VisionBackbone(config)
        self.model.transformer = nn.ModuleDict({"wte": nn.Module()})
        marks = nn.Parameter(torch.zeros(config.num_marks, config.hidden_size))
        self.model.transformer["wte"].new_embedding = marks
        self.post_init()

    def get_image_features(
        self, pixel_values: Tensor, patch_padding: Tensor, square_order: Tensor, token_ids: Tensor
    ) -> Tensor:
        """[n, width]: each added to the embedding of its token, which is one of those beyond the vocabulary."""
        model: Any = self.model
        table, first = model.transformer["wte"].new_embedding, self.config.first_mark
        if not bool(((token_ids >= first) & (token_ids < first + len(table))).all()):
            raise ValueError(f"an item has tokens other than the {len(table)} from {first} on")
        vectors: Tensor = model.vision_backbone(pixel_values, patch_padding, square_order)
        if len(vectors) != len(token_ids):
            raise ValueError(f"{len(token_ids)} tokens of patches for {len(vectors)} vectors")
        return vectors + table[token_ids - first]
