"""DeepSeek-OCR of tiny sizes in plain torch, beside which Quire is tested: transformers has no class of it.

SAM is transformers' Segment Anything, made anew for each size of picture with its tables of positions stretched; CLIP
is transformers' too. What lies between them is written here, vector by vector. Checkpoints have the names and the
configuration of released ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.sam.modeling_sam import SamVisionEncoder

from tests import deepseek_vl2
from tests.deepseek_vl2 import IMAGE, Arrays, by_expert, language_of

PATCH, RATIO = 16, 4
SIZE, BASE, TILE = 256, 256, 128  # what SAM is made for, the whole image, a tile
SAM: dict[str, Any] = {
    "downsample_channels": [24, 32],
    "global_attn_indexes": [1],
    "heads": 4,
    "layers": 2,
    "width": 32,
}
CLIP: dict[str, Any] = {"heads": 4, "image_size": 56, "layers": 2, "patch_size": 14, "width": 32}


def config(**over: Any) -> dict[str, Any]:
    """As config.json of a released checkpoint: the language model's part is there twice."""
    raw = deepseek_vl2.config("tiny")
    text = {key: value for key, value in raw["language_config"].items() if key != "architectures"}
    return {
        **raw,
        **text,
        "architectures": ["DeepseekOCRForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_deepseekocr.DeepseekOCRConfig",
                     "AutoModel": "modeling_deepseekocr.DeepseekOCRForCausalLM"},
        "candidate_resolutions": [[SIZE, SIZE]],
        "projector_config": {"input_dim": 64, "model_type": "mlp_projector", "n_embed": 64, "projector_type": "linear"},
        "vision_config": {"image_size": SIZE, "mlp_ratio": 3.7362, "model_name": "deeplip_b_l", "model_type": "vision",
                          "width": {"clip-l-14-224": CLIP, "sam_vit_b": SAM}},
        **over,
    }  # fmt: skip


def drawn(generator: torch.Generator) -> Arrays:
    """Some have no tiles."""
    rows, columns = (int(torch.randint(1, 3, (), generator=generator)) for _ in range(2))
    arrays = {
        "pixel_values": torch.randn((1, 3, BASE, BASE), generator=generator),
        "images_spatial_crop": torch.tensor([[columns, rows]]),
    }
    if rows * columns > 1:
        arrays["images_crop"] = torch.randn((rows * columns, 3, TILE, TILE), generator=generator)
    return arrays


def tokens(arrays: Arrays) -> list[int]:
    columns, rows = arrays["images_spatial_crop"][0].tolist()
    whole, tile = (size // PATCH // RATIO for size in (arrays["pixel_values"].shape[-1], TILE))
    num = whole * (whole + 1) + 1
    return [IMAGE] * (num + (rows * tile * (columns * tile + 1) if rows * columns > 1 else 0))


def several(items: list[Arrays]) -> dict[str, Any]:
    return {"items": items}


def stretched(table: Tensor, side: int) -> Tensor:
    """[own, own, width] -> [side, side, width]"""
    if len(table) == side:
        return table
    square = table.permute(2, 0, 1)[None]
    other = functional.interpolate(square, size=(side, side), mode="bicubic", antialias=True, align_corners=False)
    return other[0].permute(1, 2, 0)


class Oracle(nn.Module):
    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        self.raw, out = raw, raw["projector_config"]["n_embed"]
        self.sam = self.made_for(SIZE)
        first, second = SAM["downsample_channels"]
        self.net_2 = nn.Conv2d(256, first, 3, stride=2, padding=1, bias=False)
        self.net_3 = nn.Conv2d(first, second, 3, stride=2, padding=1, bias=False)
        self.clip = tf.CLIPVisionModel(tf.CLIPVisionConfig(
            hidden_size=CLIP["width"], intermediate_size=4 * CLIP["width"], num_hidden_layers=CLIP["layers"],
            num_attention_heads=CLIP["heads"], image_size=CLIP["image_size"], patch_size=CLIP["patch_size"],
        ))  # fmt: skip
        self.projector = nn.Linear(2 * CLIP["width"], out)
        self.image_newline, self.view_seperator = (nn.Parameter(torch.randn(out)) for _ in range(2))
        self.language, self.image_token = language_of(raw), IMAGE

    def made_for(self, size: int) -> SamVisionEncoder:
        return SamVisionEncoder(tf.SamVisionConfig(
            hidden_size=SAM["width"], num_hidden_layers=SAM["layers"], num_attention_heads=SAM["heads"],
            image_size=size, patch_size=PATCH, window_size=14, global_attn_indexes=SAM["global_attn_indexes"],
            output_channels=256, mlp_dim=4 * SAM["width"], attn_implementation="eager",
        )).eval()  # fmt: skip

    def get_input_embeddings(self) -> nn.Module:
        inner: Any = self.language.model
        return inner.embed_tokens

    def map_of(self, picture: Tensor) -> Tensor:
        """[width, side, side]"""
        side = picture.shape[-1] // PATCH
        sam, tensors = self.made_for(picture.shape[-1]), dict(self.sam.state_dict())
        tensors["pos_embed"] = stretched(tensors["pos_embed"][0], side)[None]
        for layer in SAM["global_attn_indexes"]:
            for axis in "hw":
                name = f"layers.{layer}.attn.rel_pos_{axis}"
                tensors[name] = functional.interpolate(tensors[name].T[None], size=2 * side - 1, mode="linear")[0].T
        sam.load_state_dict(tensors)
        return self.net_3(self.net_2(sam(picture[None]).last_hidden_state))[0]

    def squares(self, picture: Tensor) -> list[list[Tensor]]:
        map_ = self.map_of(picture)
        width, side, _ = map_.shape
        own: Any = getattr(self.clip, "vision_model", self.clip)
        table, places = own.embeddings.position_embedding.weight, CLIP["image_size"] // CLIP["patch_size"]
        rest = stretched(table[1:].view(places, places, width), side).reshape(-1, width)
        hidden = torch.cat((own.embeddings.class_embedding[None], map_.flatten(1).T)) + torch.cat((table[:1], rest))
        read = own.encoder(inputs_embeds=own.pre_layrnorm(hidden)[None]).last_hidden_state[0, 1:]
        return [
            [self.projector(torch.cat((read[row * side + column], map_[:, row, column]))) for column in range(side)]
            for row in range(side)
        ]

    def image(self, arrays: Arrays) -> list[Tensor]:
        columns, rows = arrays["images_spatial_crop"][0].tolist()
        tiles = [self.squares(one) for one in arrays.get("images_crop", ())]
        vectors = []
        for row in range(rows if tiles else 0):
            for line in range(len(tiles[0])):
                for column in range(columns):
                    vectors += tiles[row * columns + column][line]
                vectors.append(self.image_newline)
        whole = self.squares(arrays["pixel_values"][0])
        return [*vectors, *(one for line in whole for one in (*line, self.image_newline)), self.view_seperator]

    def forward(self, input_ids: Tensor, items: list[Arrays] = ()) -> Any:
        embeds = self.get_input_embeddings()(input_ids).clone()
        if items:
            embeds[input_ids == self.image_token] = torch.stack([one for item in items for one in self.image(item)])
        return self.language(inputs_embeds=embeds)

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(self.raw))
        tensors = sam_tensors(self.sam) | clip_tensors(self.clip) | by_expert(self.language.state_dict())
        tensors |= {
            "model.sam_model.net_2.weight": self.net_2.weight,
            "model.sam_model.net_3.weight": self.net_3.weight,
        }
        tensors |= {f"model.projector.layers.{name}": one for name, one in self.projector.state_dict().items()}
        tensors |= {"model.image_newline": self.image_newline, "model.view_seperator": self.view_seperator}
        save_file({name: one.detach().clone().contiguous() for name, one in tensors.items()},
                  folder / "model.safetensors", {"format": "pt"})  # fmt: skip


def sam_tensors(model: nn.Module) -> dict[str, Tensor]:
    """With the names of Segment Anything's own code."""
    names = {"layers.": "blocks.", "layer_norm": "norm", "patch_embed.projection": "patch_embed.proj"}
    neck = {"neck.conv1": "neck.0", "neck.layer_norm1": "neck.1", "neck.conv2": "neck.2", "neck.layer_norm2": "neck.3"}
    out = {}
    for name, tensor in model.state_dict().items():
        for old, new in (neck if name.startswith("neck.") else names).items():
            name = name.replace(old, new)
        out[f"model.sam_model.{name}"] = tensor
    return out


def clip_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Queries, keys and values in one matrix; the embedding of patches is there, and nothing reads it."""
    own = {name.removeprefix("vision_model."): tensor for name, tensor in model.state_dict().items()}
    out = {"embeddings.position_ids": torch.arange(17)[None]}
    for name, tensor in own.items():
        changed = name.replace("encoder.layers.", "transformer.layers.")
        if ".q_proj." in name:
            joined = torch.cat([own[name.replace(".q_proj.", f".{one}_proj.")] for one in "qkv"])
            out[changed.replace(".q_proj.", ".qkv_proj.")] = joined
        elif not any(part in name for part in (".k_proj.", ".v_proj.", "post_layernorm")):
            out[changed] = tensor
    return {f"model.vision_model.{name}": tensor for name, tensor in out.items()}
