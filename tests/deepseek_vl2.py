"""DeepSeek-VL2 of tiny sizes in plain torch, beside which Quire is tested: transformers has no class of it.

The encoder is transformers' SigLIP, the language model one of its DeepSeek classes; what lies between them is written
here, vector by vector. Checkpoints have the names, configuration and further tensors of released ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers as tf
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.tiny_models import VOCAB

IMAGE = 300  # the token of images
SIDE, PATCH, MERGE = 28, 8, 2  # 3x3 patches, of which 2x2 squares are made; 4 pixels are left over
NUM = 2  # squares along a side
Arrays = dict[str, Tensor]

_EXPERTS: dict[str, Any] = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=2, first_k_dense_replace=1,
)  # fmt: skip
_TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, **_EXPERTS,
)  # fmt: skip
_LATENT: dict[str, Any] = dict(q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16)
# as released: tiny has plain attention, small latent attention, and the largest routes as V3 does
KINDS: dict[str, dict[str, Any]] = {
    "tiny": dict(use_mla=False, q_lora_rank=None, kv_lora_rank=None, qk_nope_head_dim=0, qk_rope_head_dim=0,
                 v_head_dim=0, topk_method="greedy", n_group=1, topk_group=1),
    "small": dict(_LATENT, topk_method="greedy", n_group=1, topk_group=1),
    "base": dict(_LATENT, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, n_group=1, topk_group=1,
                 routed_scaling_factor=2.0),
}  # fmt: skip


def config(kind: str, **over: Any) -> dict[str, Any]:
    """As config.json of a released checkpoint."""
    return {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_deepseek_vl_v2.DeepseekVLV2Config",
                     "AutoModel": "modeling_deepseek_vl_v2.DeepseekVLV2ForCausalLM"},
        "candidate_resolutions": [[SIDE, SIDE], [2 * SIDE, SIDE], [SIDE, 2 * SIDE]],
        "global_view_pos": "head",
        "language_config": {"architectures": ["DeepseekV2ForCausalLM"], "lm_head": True, "rm_head": False, **_TEXT,
                            **KINDS[kind]},
        "model_type": "deepseek_vl_v2",
        "projector_config": {"model_type": "mlp_projector", "input_dim": 32, "n_embed": 64},
        "tile_tag": "2D",
        "torch_dtype": "float32",
        "vision_config": {"layers": 2, "mlp_ratio": 1.5, "model_name": "siglip_so400m_patch14_384", "heads": 4,
                          "model_type": "vision", "patch_size": PATCH, "width": 32, "image_size": SIDE},
        **over,
    }  # fmt: skip


def drawn(generator: torch.Generator) -> Arrays:
    rows, columns = (int(torch.randint(1, 3, (), generator=generator)) for _ in range(2))
    pixels = torch.randn((1 + rows * columns, 3, SIDE, SIDE), generator=generator)
    return {"pixel_values": pixels, "images_spatial_crop": torch.tensor([[columns, rows]])}


def tokens(arrays: Arrays) -> list[int]:
    columns, rows = arrays["images_spatial_crop"][0].tolist()
    return [IMAGE] * (NUM * (NUM + 1) + 1 + rows * NUM * (columns * NUM + 1))


class PlainLanguage(nn.Module):
    """Experts of V2, and attention of Llama."""

    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        kinds = ["dense", "sparse", "sparse"]
        self.model = tf.DeepseekOcr2TextModel(tf.DeepseekOcr2TextConfig(**text, mlp_layer_types=kinds))
        self.lm_head = nn.Linear(text["hidden_size"], text["vocab_size"], bias=False)

    def forward(self, inputs_embeds: Tensor) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.model(inputs_embeds=inputs_embeds).last_hidden_state))


def language_of(raw: dict[str, Any]) -> nn.Module:
    text = {key: value for key, value in raw["language_config"].items() if key not in ("architectures", "lm_head")}
    if not text.get("use_mla", True):
        names = (*_LATENT, "use_mla", "n_group", "topk_group")
        return PlainLanguage({key: value for key, value in text.items() if key not in names})
    if text["topk_method"] == "noaux_tc":
        return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**text, rope_interleave=True))
    return tf.DeepseekV2ForCausalLM(tf.DeepseekV2Config(**text))


class Oracle(nn.Module):
    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        self.raw, vision = raw, raw["vision_config"]
        width, out = vision["width"], raw["projector_config"]["n_embed"]
        self.vision = tf.SiglipVisionModel(tf.SiglipVisionConfig(
            hidden_size=width, intermediate_size=int(width * vision["mlp_ratio"]), num_hidden_layers=vision["layers"],
            num_attention_heads=vision["heads"], image_size=SIDE, patch_size=PATCH, vision_use_head=False,
        ))  # fmt: skip
        self.first, self.second = nn.Linear(width * MERGE**2, out), nn.Linear(out, out)
        self.image_newline, self.view_seperator = (nn.Parameter(torch.randn(out)) for _ in range(2))
        self.language, self.image_token = language_of(raw), IMAGE
        for name, buffer in self.language.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)

    def get_input_embeddings(self) -> nn.Module:
        inner: Any = self.language.model
        return inner.embed_tokens

    def squares(self, pixels: Tensor) -> list[list[Tensor]]:
        """Of one picture: the vector of each square, by row and column."""
        patches = self.vision(pixel_values=pixels[None]).last_hidden_state[0]
        side, nothing = SIDE // PATCH, torch.zeros(patches.shape[1])

        def patch(row: int, column: int) -> Tensor:
            return patches[row * side + column] if max(row, column) < side else nothing

        out = []
        for top in range(0, side, MERGE):
            out.append([])
            for left in range(0, side, MERGE):
                four = [patch(top + down, left + right) for down in range(MERGE) for right in range(MERGE)]
                flat = torch.stack([one[channel] for channel in range(patches.shape[1]) for one in four])
                out[-1].append(self.second(nn.functional.gelu(self.first(flat))))
        return out

    def image(self, pictures: Tensor, columns: int, rows: int) -> list[Tensor]:
        whole, *tiles = [self.squares(one) for one in pictures]
        first = [vector for line in whole for vector in (*line, self.image_newline)]
        rest = []
        for row in range(rows):
            for line in range(len(whole)):
                for column in range(columns):
                    rest += tiles[row * columns + column][line]
                rest.append(self.image_newline)
        parts = (first, rest) if self.raw["global_view_pos"] == "head" else (rest, first)
        return [*parts[0], self.view_seperator, *parts[1]]

    def get_image_features(self, pixel_values: Tensor, images_spatial_crop: Tensor) -> Tensor:
        vectors, start = [], 0
        for columns, rows in images_spatial_crop.tolist():
            end = start + 1 + columns * rows
            vectors += self.image(pixel_values[start:end], columns, rows)
            start = end
        return torch.stack(vectors)

    def forward(self, input_ids: Tensor, **images: Tensor) -> Any:
        embeds = self.get_input_embeddings()(input_ids).clone()
        if images:
            embeds[input_ids == self.image_token] = self.get_image_features(**images)
        return self.language(inputs_embeds=embeds)

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(self.raw))
        tensors = vision_tensors(self.vision)
        tensors |= {f"language.{name}": tensor for name, tensor in by_expert(self.language.state_dict()).items()}
        tensors |= {"image_newline": self.image_newline, "view_seperator": self.view_seperator}
        for index, layer in ((0, self.first), (2, self.second)):
            tensors |= {f"projector.layers.{index}.{name}": one for name, one in layer.state_dict().items()}
        save_file({name: one.detach().clone() for name, one in tensors.items()}, folder / "model.safetensors",
                  {"format": "pt"})  # fmt: skip


def by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As released: three matrices for each expert."""
    out = {}
    for name, tensor in tensors.items():
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            out[name] = tensor
            continue
        prefix, last = name.rsplit(".", 1)
        for number, matrix in enumerate(tensor):
            parts = matrix.chunk(2) if last == "gate_up_proj" else (matrix,)
            names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            out |= {f"{prefix}.{number}.{one}.weight": part for one, part in zip(names, parts, strict=True)}
    return out


def vision_tensors(model: nn.Module) -> dict[str, Tensor]:
    """With the names of timm; released checkpoints have a pooling head too, which nothing reads."""
    own = {name.removeprefix("vision_model."): tensor for name, tensor in model.state_dict().items()}
    out = {"vision.attn_pool.latent": torch.randn(1, 1, 32), "vision.attn_pool.norm.weight": torch.randn(32)}
    for name, tensor in own.items():
        if ".self_attn." not in name:
            changed = name.replace("encoder.layers.", "blocks.").replace("layer_norm", "norm")
            changed = changed.replace("post_layernorm", "norm").replace(
                "embeddings.patch_embedding", "patch_embed.proj"
            )
            is_table = name == "embeddings.position_embedding.weight"
            out["vision.pos_embed" if is_table else f"vision.{changed}"] = tensor[None] if is_table else tensor
        elif ".q_proj." in name:
            joined = torch.cat([own[name.replace(".q_proj.", f".{one}_proj.")] for one in "qkv"])
            block, last = name.split(".")[2], name.rsplit(".", 1)[1]
            out[f"vision.blocks.{block}.attn.qkv.{last}"] = joined
            out[f"vision.blocks.{block}.attn.proj.{last}"] = own[name.replace(".q_proj.", ".out_proj.")]
    return out
