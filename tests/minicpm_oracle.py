"""MiniCPM-V up to 4.5 and MiniCPM-o in plain torch, of which transformers has no class: what Quire's answers are
compared with.

Language models are transformers'. The encoder is written from the description of the model and shares nothing with
quire/hf_models/minicpm.py: pieces are whole images, encoded one by one with SigLIP's layers, places are fractions, and
all pieces are resampled at once, with padding. What is heard goes through Whisper's layers, and pairs of vectors are
averaged one by one.
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
from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer

QUERIES = 6
PATCH = 7
SIDE = 10  # places
CHUNK = 10  # positions of what is heard that see each other, and those before
AUDIO: dict[str, int] = dict(d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48,
                             num_mel_bins=16, max_source_positions=40)  # fmt: skip
LANGUAGE = {"2.5": tf.LlamaForCausalLM, "2.6": tf.Qwen2ForCausalLM, "4.0": tf.LlamaForCausalLM,
            "4.5": tf.Qwen3ForCausalLM}  # fmt: skip


@dataclass
class Config:
    release: str
    text: Any  # of transformers
    vision: dict[str, int]
    more: dict[str, Any] = field(default_factory=dict)
    audio: dict[str, int] = field(default_factory=dict)  # of MiniCPM-o

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
        } | self.more | (self.hears() if self.audio else {})  # fmt: skip

    def hears(self) -> dict[str, Any]:
        return {
            "architectures": ["MiniCPMO"], "model_type": "minicpmo", "audio_config": self.audio, "audio_pool_step": 2,
            "audio_chunk_length": CHUNK / 50, "init_tts": True, "tts_config": {"model_type": "conditional_chattts"},
            "auto_map": {"AutoModel": "modeling_minicpmo.MiniCPMO"},
        }  # fmt: skip


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


class Audio(nn.Module):
    def __init__(self, numbers: dict[str, int]) -> None:
        super().__init__()
        config = tf.WhisperConfig(**numbers, attn_implementation="eager")
        width = config.d_model
        self.conv1 = nn.Conv1d(config.num_mel_bins, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.max_source_positions, width)
        self.layers = nn.ModuleList([WhisperEncoderLayer(config) for _ in range(config.encoder_layers)])
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, features: Tensor) -> Tensor:
        """[mel bins, frames] -> [positions, width]"""
        gelu = nn.functional.gelu
        hidden = gelu(self.conv2(gelu(self.conv1(features[None]))))[0].T
        num = len(hidden)
        hidden = hidden + self.embed_positions(torch.arange(num))
        sees = [[later // CHUNK <= place // CHUNK for later in range(num)] for place in range(num)]
        mask = torch.where(torch.tensor(sees), 0.0, -torch.inf)[None, None]
        for layer in self.layers:
            out = layer(hidden[None], mask)
            hidden = (out[0] if isinstance(out, tuple) else out).reshape(num, -1)
        normed: Tensor = self.layer_norm(hidden)
        return normed


class MiniCPMO(MiniCPMV):
    """Released files have a part that speaks too, which nothing reads."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        width = config.text.hidden_size
        self.apm = Audio(config.audio)
        self.audio_projection_layer = nn.ModuleDict({
            "linear1": nn.Linear(config.audio["d_model"], width), "linear2": nn.Linear(width, width),
        })  # fmt: skip
        self.tts = nn.Embedding(3, 5)

    def get_audio_features(self, input_features: Tensor, piece_lens: Tensor) -> Tensor:
        vectors = []
        for features, count in zip(input_features, piece_lens.tolist(), strict=True):
            first = self.audio_projection_layer["linear1"](self.apm(features[:, :count]))
            projected = self.audio_projection_layer["linear2"](first.clamp(min=0))
            vectors += [(projected[at] + projected[at + 1]) / 2 for at in range(0, len(projected) - 1, 2)]
        return torch.stack(vectors)

    def forward(self, input_ids: Tensor, media: int = 300, **arrays: Tensor) -> Any:
        if "input_features" not in arrays:
            return super().forward(input_ids, media, **arrays)
        embeds = self.get_input_embeddings()(input_ids).clone()
        embeds[input_ids == media] = self.get_audio_features(**arrays)
        return SimpleNamespace(logits=self.llm(inputs_embeds=embeds).logits)
