"""The first Molmo in plain torch, of which transformers has no class: written from the names and shapes of published
checkpoints and from what is published of its arithmetic, apart from Quire's own code, with which it shares nothing.

A model is made from a config.json as hubs have it (beside the sizes of the image encoder, which those leave out), holds
its tensors under their published names, and computes one text at a time: no cache, no batch, a loop over heads, experts
and squares wherever that is plainer.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

CONFIG: dict[str, Any] = dict(
    architectures=["MolmoForCausalLM"], model_type="molmo", attention_layer_norm=False, clip_qkv=None, hidden_size=64,
    intermediate_size=192, layer_norm_eps=1e-6, layer_norm_type="rms", max_position_embeddings=1024, norm_after=False,
    num_attention_heads=4, num_hidden_layers=3, num_key_value_heads=2, qkv_bias=True, rope_theta=10000.0,
    tie_word_embeddings=False, weight_tying=False, use_cache=True, use_position_ids=True, torch_dtype="float32",
    auto_map={"AutoConfig": "config_molmo.MolmoConfig", "AutoModelForCausalLM": "modeling_molmo.MolmoForCausalLM"},
    vision_backbone=dict(
        image_model_type="openai", image_default_input_size=[28, 28], image_patch_size=7, image_emb_dim=32,
        image_num_heads=4, image_head_dim=8, image_num_layers=4, image_mlp_dim=48, image_num_pos=17,
        image_norm_eps=1e-5, image_mlp_activations="quick_gelu",
    ), vit_layers=[-2, -4],
)  # fmt: skip


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Published names, with their shapes."""
    width, inner, vision = config["hidden_size"], config["intermediate_size"], config["vision_backbone"]
    head = width // config["num_attention_heads"]
    kv = head * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.embedding": (config["embedding_size"], width),
        "transformer.wte.new_embedding": (config["additional_vocab_size"], width),
        "transformer.ln_f.weight": (width,),
        "transformer.ff_out.weight": (config["embedding_size"], width),
    }
    experts = config.get("moe_num_experts") or 0
    for layer in range(config["num_hidden_layers"]):
        block = f"transformer.blocks.{layer}."
        attn, mlp = (block + "attn.", block + "mlp.") if experts else (block, block)
        shapes[attn + "att_proj.weight"] = (width + 2 * kv, width)
        if config["qkv_bias"]:
            shapes[attn + "att_proj.bias"] = (width + 2 * kv,)
        shapes |= {attn + "attn_out.weight": (width, width), attn + "attn_norm.weight": (width,)}
        shapes[mlp + "ff_norm.weight"] = (width,)
        if config["attention_layer_norm"]:
            shapes |= {attn + "q_norm.weight": (width,), attn + "k_norm.weight": (kv,)}
        if not experts:
            shapes |= {block + "ff_proj.weight": (inner, width), block + "ff_out.weight": (width, inner // 2)}
            continue
        shapes[mlp + "gate.weight"] = (experts, width)
        for expert in range(experts):
            for name in ("gate_proj", "up_proj"):
                shapes[f"{mlp}experts.{expert}.{name}.weight"] = (inner // 2, width)
            shapes[f"{mlp}experts.{expert}.down_proj.weight"] = (width, inner // 2)
    dim, all_heads = vision["image_emb_dim"], vision["image_num_heads"] * vision["image_head_dim"]
    tower, read = "vision_backbone.image_vit.", dim * len(config["vit_layers"])
    shapes |= {
        tower + "class_embedding": (dim,), tower + "positional_embedding": (vision["image_num_pos"], dim),
        tower + "patch_embedding.weight": (dim, 3 * vision["image_patch_size"] ** 2),
        tower + "pre_ln.weight": (dim,), tower + "pre_ln.bias": (dim,), "vision_backbone.pad_embed": (2, read),
    }  # fmt: skip
    for layer in range(vision["image_num_layers"]):
        block = f"{tower}transformer.resblocks.{layer}."
        shapes |= attention_shapes(block + "attention.", dim, all_heads, dim)
        shapes |= {block + "feed_forward.w1.weight": (vision["image_mlp_dim"], dim),
                   block + "feed_forward.w1.bias": (vision["image_mlp_dim"],),
                   block + "feed_forward.w2.weight": (dim, vision["image_mlp_dim"]),
                   block + "feed_forward.w2.bias": (dim,)}  # fmt: skip
        for norm in ("attention_norm", "ffn_norm"):
            shapes |= {f"{block}{norm}.weight": (dim,), f"{block}{norm}.bias": (dim,)}
    shapes |= attention_shapes("vision_backbone.image_pooling_2d.", read, all_heads, dim)
    for name in ("w1", "w3"):
        shapes[f"vision_backbone.image_projector.{name}.weight"] = (inner // 2, dim)
    shapes["vision_backbone.image_projector.w2.weight"] = (width, inner // 2)
    return {"model." + name: shape for name, shape in shapes.items()}


def attention_shapes(name: str, dim: int, heads: int, out: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {name + "wo.weight": (out, heads), name + "wo.bias": (out,)}
    for part in ("wq", "wk", "wv"):
        shapes |= {f"{name}{part}.weight": (heads, dim), f"{name}{part}.bias": (heads,)}
    return shapes


class Molmo(nn.Module):
    def __init__(self, config: dict[str, Any], patch_id: int) -> None:
        super().__init__()
        self.config, self.patch_id = config, patch_id
        self.tensors = nn.ParameterDict()
        for name, shape in shapes_of(config).items():
            is_norm = (len(shape) == 1 and "norm" in name) or "ln_" in name
            start = torch.ones(shape) if is_norm and name.endswith("weight") else torch.zeros(shape)
            self.tensors[name.replace(".", "/")] = nn.Parameter(start)

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace()

    def save_pretrained(self, folder: Path | str) -> None:
        folder = Path(folder)
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name.replace("/", "."): tensor.detach().contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def of(self, name: str) -> Tensor:
        return self.tensors["model/" + name.replace(".", "/")]

    def linear(self, name: str, x: Tensor) -> Tensor:
        bias = f"{name}.bias"
        has_bias = "model/" + bias.replace(".", "/") in self.tensors
        return x @ self.of(f"{name}.weight").T + (self.of(bias) if has_bias else 0)

    # ---- the image encoder -----------------------------------------------------------------------------------------

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.config["vision_backbone"]["image_norm_eps"]
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * self.of(f"{name}.weight") + self.of(
            f"{name}.bias"
        )

    def attend(self, name: str, queries: Tensor, states: Tensor) -> Tensor:
        """[q, dim], [k, dim]"""
        size = self.config["vision_backbone"]["image_head_dim"]
        q, k, v = (self.linear(f"{name}.{part}", x) for part, x in (("wq", queries), ("wk", states), ("wv", states)))
        heads = []
        for first in range(0, q.shape[-1], size):
            here = slice(first, first + size)
            scores = (q[:, here] @ k[:, here].T / math.sqrt(size)).softmax(-1)
            heads.append(scores @ v[:, here])
        return self.linear(f"{name}.wo", torch.cat(heads, -1))

    def positions(self) -> Tensor:
        vision = self.config["vision_backbone"]
        table, grid = self.of("vision_backbone.image_vit.positional_embedding"), self.grid
        side = math.isqrt(vision["image_num_pos"] - 1)
        if side == grid:
            return table
        plane = table[1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
        plane = functional.interpolate(plane, size=(grid, grid), mode="bicubic", align_corners=False, antialias=True)
        return torch.cat([table[:1], plane.permute(0, 2, 3, 1).reshape(grid * grid, -1)])

    @property
    def grid(self) -> int:
        vision = self.config["vision_backbone"]
        return int(vision["image_default_input_size"][0] // vision["image_patch_size"])

    def encode_crop(self, patches: Tensor) -> Tensor:
        """[patches, numbers] -> [patches, dim of all layers that are read]"""
        tower = "vision_backbone.image_vit."
        x = torch.cat([self.of(tower + "class_embedding")[None], self.linear(tower + "patch_embedding", patches)])
        x = self.layer_norm(tower + "pre_ln", x + self.positions())
        outputs = []
        for layer in range(self.config["vision_backbone"]["image_num_layers"]):
            block = f"{tower}transformer.resblocks.{layer}."
            normed = self.layer_norm(block + "attention_norm", x)
            x = x + self.attend(block + "attention", normed, normed)
            inner = self.linear(block + "feed_forward.w1", self.layer_norm(block + "ffn_norm", x))
            x = x + self.linear(block + "feed_forward.w2", inner / (1 + torch.exp(-1.702 * inner)))
            outputs.append(x)
        return torch.cat([outputs[layer] for layer in self.config["vit_layers"]], -1)[1:]

    def encode_image(self, images: Tensor, masks: Tensor) -> Tensor:
        """[crops, patches, numbers] and how much of each patch is image -> [crops, squares, width]"""
        pad = self.of("vision_backbone.pad_embed")
        out, half = [], self.grid // 2
        for patches, mask in zip(images, masks, strict=True):
            x = self.encode_crop(patches)
            x = x + (mask == 0).float()[:, None] * pad[0] + ((mask < 1) & (mask != 0)).float()[:, None] * pad[1]
            x = x.reshape(self.grid, self.grid, -1)
            for row in range(half):
                for column in range(half):
                    square = x[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].reshape(4, -1)
                    pooled = self.attend("vision_backbone.image_pooling_2d", square.mean(0, keepdim=True), square)[0]
                    gate, up = (self.linear(f"vision_backbone.image_projector.{name}", pooled) for name in ("w1", "w3"))
                    out.append(self.linear("vision_backbone.image_projector.w2", functional.silu(gate) * up))
        return torch.stack(out).reshape(len(images), half * half, -1)

    # ---- the language model ----------------------------------------------------------------------------------------

    def rms(self, name: str, x: Tensor) -> Tensor:
        eps = self.config["layer_norm_eps"]
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.of(f"{name}.weight")

    def turn(self, x: Tensor) -> Tensor:
        """[tokens, heads, size]"""
        size = x.shape[-1]
        rates = self.config["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
        angles = torch.arange(len(x)).double()[:, None, None] * rates
        first, second = x[..., : size // 2].double(), x[..., size // 2 :].double()
        turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
        return torch.cat(turned, -1).float()

    def self_attention(self, block: str, x: Tensor) -> Tensor:
        c = self.config
        heads, groups, width = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"]
        size = width // heads
        qkv = self.linear(block + "att_proj", x)
        if c["clip_qkv"]:
            qkv = qkv.clamp(-c["clip_qkv"], c["clip_qkv"])
        q, k, v = qkv.split([width, groups * size, groups * size], -1)
        if c["attention_layer_norm"]:
            q, k = self.rms(block + "q_norm", q), self.rms(block + "k_norm", k)
        q, k = self.turn(q.unflatten(-1, (heads, size))), self.turn(k.unflatten(-1, (groups, size)))
        v = v.unflatten(-1, (groups, size))
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        out = []
        for head in range(heads):
            own = head * groups // heads
            scores = (q[:, head] @ k[:, own].T / math.sqrt(size)).masked_fill(later, -torch.inf)
            out.append(scores.softmax(-1) @ v[:, own])
        return self.linear(block + "attn_out", torch.cat(out, -1))

    def experts(self, mlp: str, x: Tensor) -> Tensor:
        shares = self.linear(mlp + "gate", x).softmax(-1)
        out = torch.zeros_like(x)
        for token, share in enumerate(shares):
            weights, chosen = share.topk(self.config["moe_top_k"])
            for weight, expert in zip(weights, chosen.tolist(), strict=True):
                name = f"{mlp}experts.{expert}."
                inner = functional.silu(self.linear(name + "gate_proj", x[token])) * self.linear(
                    name + "up_proj", x[token]
                )
                out[token] += weight * self.linear(name + "down_proj", inner)
        return out

    def layer(self, number: int, x: Tensor) -> Tensor:
        c, block = self.config, f"transformer.blocks.{number}."
        if c.get("moe_num_experts"):
            x = x + self.self_attention(block + "attn.", self.rms(block + "attn.attn_norm", x))
            return x + self.experts(block + "mlp.", self.rms(block + "mlp.ff_norm", x))

        def feed(y: Tensor) -> Tensor:
            up, gate = self.linear(block + "ff_proj", y).chunk(2, -1)
            return self.linear(block + "ff_out", functional.silu(gate) * up)

        if c["norm_after"]:
            x = x + self.rms(block + "attn_norm", self.self_attention(block, x))
            return x + self.rms(block + "ff_norm", feed(x))
        x = x + self.self_attention(block, self.rms(block + "attn_norm", x))
        return x + feed(self.rms(block + "ff_norm", x))

    def forward(
        self,
        input_ids: Tensor,
        images: Tensor | None = None,
        image_masks: Tensor | None = None,
        image_numbers: Tensor | None = None,  # [crops, squares]: which of the tokens of patches; below 0: none
    ) -> Any:
        table = torch.cat([self.of("transformer.wte.embedding"), self.of("transformer.wte.new_embedding")])
        x = table[input_ids[0]]
        if images is not None and image_masks is not None and image_numbers is not None:
            features, places = self.encode_image(images, image_masks), (input_ids[0] == self.patch_id).nonzero()[:, 0]
            for crop, numbers in enumerate(image_numbers.tolist()):
                for square, number in enumerate(numbers):
                    if number >= 0:
                        x[places[number]] += features[crop, square]
        for number in range(self.config["num_hidden_layers"]):
            x = self.layer(number, x)
        return SimpleNamespace(logits=self.linear("transformer.ff_out", self.rms("transformer.ln_f", x))[None])


# ---- images ---------------------------------------------------------------------------------------------------------

PRECISION = [torch.float64]  # of resizing
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def framed(image: Image.Image, height: int, width: int) -> tuple[Tensor, Tensor]:
    """[height, width, 3] with the image in the middle, and where it is. Resized in float64: in float32, as the released
    processor does, torch's places of pixels are off by up to a thousandth."""
    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).to(PRECISION[0]) / 255
    scale = min(np.float32(height) / np.float32(image.height), np.float32(width) / np.float32(image.width))
    tall, wide = int(np.float32(image.height) * scale), int(np.float32(image.width) * scale)
    small = (
        functional.interpolate(pixels[None], size=(tall, wide), mode="bilinear", antialias=True)[0].clamp(0, 1).float()
    )
    out, where = torch.zeros(3, height, width), torch.zeros(height, width)
    top, left = (height - tall) // 2, (width - wide) // 2
    out[:, top : top + tall, left : left + wide] = small
    where[top : top + tall, left : left + wide] = 1
    return ((out - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]).permute(1, 2, 0), where


def best_tiling(height: int, width: int, window: int, most: int) -> tuple[int, int]:
    """Of as many windows: where an image need not shrink and grows least, or else where it shrinks least."""
    best: tuple[Any, ...] | None = None
    for count in range(1, most + 1):
        for rows in range(1, count + 1):
            if count % rows:
                continue
            columns = count // rows
            scale = min(
                np.float32(rows * window) / np.float32(height), np.float32(columns * window) / np.float32(width)
            )
            rank = (scale >= 1, -scale if scale >= 1 else scale)
            if best is None or rank > best[0]:
                best = rank, (rows, columns)
    assert best is not None
    return best[1]  # type: ignore[no-any-return]


def image_inputs(
    image: Image.Image, side: int = 336, patch: int = 14, margins: tuple[int, int] = (4, 4), most: int = 12
) -> tuple[Tensor, Tensor, list[str], list[list[int]]]:
    """Patches [crops, patches, numbers]; how much of each is image, as the released processor has it; the tokens; and,
    for each square of each crop, the number of its token among those of patches, or -1."""
    window, margin = side - sum(margins) * patch, sum(margins) * patch
    rows, columns = best_tiling(image.height - margin, image.width - margin, window, most)
    whole, _ = framed(image, side, side)
    canvas, where = framed(image, rows * window + margin, columns * window + margin)
    crops, masks = [whole], []
    half = side // patch // 2
    owner: dict[tuple[int, int], tuple[int, int]] = {}  # row and column of all squares -> crop, square
    for i in range(rows):
        for j in range(columns):
            here = np.s_[i * window : i * window + side, j * window : j * window + side]
            crops.append(canvas[here])
            masks.append(blocks(where[here][..., None], patch).mean(-1))
            for row in range(margins[0] // 2 if i else 0, half - (margins[1] // 2 if i < rows - 1 else 0)):
                for column in range(margins[0] // 2 if j else 0, half - (margins[1] // 2 if j < columns - 1 else 0)):
                    place = (i * window // patch // 2 + row, j * window // patch // 2 + column)
                    assert place not in owner
                    owner[place] = (1 + i * columns + j, row * half + column)
    masks.append(torch.full_like(masks[0], -1))  # behind the others, though the whole image is before them
    tall, wide = (max(place[axis] for place in owner) + 1 for axis in (0, 1))
    assert len(owner) == tall * wide
    tokens = ["<im_start>", *(["<im_patch>"] * half + ["<im_col>"]) * half, "<im_end>"]
    tokens += ["<im_start>", *(["<im_patch>"] * wide + ["<im_col>"]) * tall, "<im_end>"]
    numbers = [[-1] * (half * half) for _ in crops]
    numbers[0] = list(range(half * half))
    for number, (crop, square) in enumerate(owner[place] for place in sorted(owner)):
        numbers[crop][square] = half * half + number
    return torch.stack([blocks(crop, patch) for crop in crops]), torch.stack(masks), tokens, numbers


def blocks(plane: Tensor, patch: int) -> Tensor:
    """[height, width, channels] -> [patches, numbers], channels last."""
    rows = [
        plane[top : top + patch, left : left + patch].reshape(-1)
        for top in range(0, plane.shape[0], patch)
        for left in range(0, plane.shape[1], patch)
    ]
    return torch.stack(rows)
