"""MiniCPM-V up to 4.5 in plain torch, of which transformers has no class: what Quire's answers are compared with.

Language models are transformers'. The encoder is written from the description of the model and shares nothing with
quire/hf_models/minicpm.py: pieces are whole images, encoded one by one with SigLIP's layers, places are fractions, and
all pieces are resampled at once, with padding.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers as tf
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.siglip.modeling_siglip import SiglipEncoder

QUERIES = 6
PATCH = 7
SIDE = 10  # places
LANGUAGE = {"2.5": tf.LlamaForCausalLM, "2.6": tf.Qwen2ForCausalLM, "4.0": tf.LlamaForCausalLM,
            "4.5": tf.Qwen3ForCausalLM}  # fmt: skip


@dataclass
class Config:
    release: str
    text: Any  # of transformers
    vision: dict[str, int]
    more: dict[str, Any] = field(default_factory=dict)

    def written(self) -> dict[str, Any]:
        """As config.json on hubs: the language model's numbers at the top, and code that is not needed."""
        text = {name: value for name, value in self.text.to_dict().items() if value is not None}
        vision = self.vision | {"image_size": PATCH * SIDE, "patch_size": PATCH, "model_type": "siglip"}
        number = self.release if self.release == "2.5" else float(self.release)
        return text | {
            "architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": number, "query_num": QUERIES,
            "vision_config": vision, "drop_vision_last_layer": False, "patch_size": PATCH, "image_size": 448,
            "slice_config": {"max_slice_nums": 9, "patch_size": PATCH, "model_type": "minicpmv"}, "slice_mode": True,
            "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMVConfig",
                         "AutoModelForCausalLM": "modeling_minicpmv.MiniCPMV"},
        } | self.more  # fmt: skip


class Vision(nn.Module):
    def __init__(self, numbers: dict[str, int]) -> None:
        super().__init__()
        config = tf.SiglipVisionConfig(**numbers, image_size=PATCH * SIDE, patch_size=PATCH)
        width = config.hidden_size
        self.embeddings = nn.ModuleDict({
            "patch_embedding": nn.Conv2d(3, width, PATCH, PATCH), "position_embedding": nn.Embedding(SIDE**2, width),
        })  # fmt: skip
        config._attn_implementation = "eager"
        self.encoder = SiglipEncoder(config)
        self.post_layernorm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, image: Tensor, in_a_row: bool) -> Tensor:
        height, width = image.shape[-2] // PATCH, image.shape[-1] // PATCH
        patches = self.embeddings["patch_embedding"](image[None]).flatten(2).transpose(1, 2)
        if in_a_row:
            ids = [nearest(place, height * width) for place in range(height * width)]
        else:
            ids = [nearest(y, height) * SIDE + nearest(x, width) for y in range(height) for x in range(width)]
        embedded = patches + self.embeddings["position_embedding"](torch.tensor(ids))
        hidden = self.encoder(inputs_embeds=embedded).last_hidden_state
        normed: Tensor = self.post_layernorm(hidden)[0]
        return normed


def nearest(place: int, num: int) -> int:
    """Of the places that have an embedding, the one this patch of so many begins in."""
    return math.floor(Fraction(place, num) * SIDE)


def waves(position: int, width: int) -> list[float]:
    angles = [position / 10000 ** (index / (width / 2)) for index in range(width // 2)]
    return [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]


class Resampler(nn.Module):
    def __init__(self, width: int, from_width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(QUERIES, width))
        self.kv_proj = nn.Linear(from_width, width, bias=False)
        self.attn = nn.MultiheadAttention(width, width // 128)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.randn(width, width))

    def forward(self, packs: list[list[tuple[Tensor, tuple[int, int], int]]]) -> Tensor:
        """Pieces with their sizes and when they are seen, or -1."""
        width = self.query.shape[1]
        keys, values = [], []
        for pack in packs:
            known = [self.ln_kv(self.kv_proj(hidden)) for hidden, _, _ in pack]
            where = [
                [a + b for a, b in zip(waves(x, width // 2) + waves(y, width // 2),
                                       waves(time, width) if time >= 0 else [0.0] * width, strict=True)]
                for _, size, time in pack for y in range(size[0]) for x in range(size[1])
            ]  # fmt: skip
            values.append(torch.cat(known))
            keys.append(values[-1] + torch.tensor(where))
        longest = max(map(len, keys))
        mask = torch.arange(longest)[None] >= torch.tensor([len(one) for one in keys])[:, None]
        padded = [nn.utils.rnn.pad_sequence(several) for several in (keys, values)]
        queries = self.ln_q(self.query)[:, None].repeat(1, len(keys), 1)
        attended = self.attn(queries, *padded, key_padding_mask=mask)[0].transpose(0, 1)
        vectors: Tensor = self.ln_post(attended) @ self.proj
        return vectors


class MiniCPMV(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, width = config, config.text.hidden_size
        self.llm = LANGUAGE[config.release](config.text)
        self.vpm = Vision(config.vision)
        self.resampler = Resampler(width, config.vision["hidden_size"])

    def get_input_embeddings(self) -> nn.Module:
        table: nn.Module = self.llm.get_input_embeddings()
        return table

    def save_pretrained(self, folder: Path) -> None:
        tensors = {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(self.config.written()))

    def get_image_features(
        self, pixel_values: Tensor, target_sizes: Tensor, temporal_ids: Tensor | None = None,
        packs: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        pieces, start = [], 0
        for number, (height, width) in enumerate(target_sizes.tolist()):
            strip = pixel_values[0, :, :, start : start + height * width * PATCH]
            start += height * width * PATCH
            rows = strip.unflatten(-1, (height, width * PATCH)).unbind(2)
            image = torch.cat(rows, 1)
            time = -1 if temporal_ids is None else int(temporal_ids[number])
            pieces.append((self.vpm(image, self.config.release == "2.5"), (height, width), time))
        lengths = [1] * len(pieces) if packs is None else packs.tolist()
        grouped, rest = [], iter(pieces)
        for length in lengths:
            grouped.append([next(rest) for _ in range(length)])
        return self.resampler(grouped).flatten(0, 1)

    get_video_features = get_image_features

    def forward(self, input_ids: Tensor, media: int = 300, **arrays: Tensor) -> Any:
        embeds = self.get_input_embeddings()(input_ids).clone()
        if arrays:
            embeds[input_ids == media] = self.get_image_features(**arrays)
        return SimpleNamespace(logits=self.llm(inputs_embeds=embeds).logits)
