"""Encoders of MiniCPM-V up to 4.5: a vision encoder that takes pieces of any size, and attention of a fixed number of
learned vectors to the patches of a piece (or, in videos of 4.5, of several frames). MiniCPM-o has Whisper's encoder
too, in which audio is heard second by second: each sees all before it.

The layers of both encoders are transformers'. In: patches of pieces beside each other, and the pieces' sizes. Out: as
many vectors for each piece. Must not know: steps, requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Idefics2Config, PreTrainedModel, WhisperConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2Encoder, Idefics2PreTrainedModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from quire.hf_models.minicpm_config import HEAD

_BATCH = 16  # pieces that are encoded at once
_BASE = 10000.0  # of the frequencies of positions
_EPS = 1e-6
Size = tuple[int, int]  # patches: height, width


@lru_cache(maxsize=256)
def places(size: Size, side: int) -> Tensor:
    """[height * width]: of each patch, the nearest of the side x side places that have an embedding. Which of two a
    patch on their border gets is up to rounding, so the steps are those that models were trained with."""
    borders = torch.arange(1 / side, 1.0, 1 / side)
    rows, columns = (
        torch.bucketize(torch.arange(0, 1 - 1e-6, float(1 / torch.tensor(num)))[:num], borders, right=True)
        for num in size
    )
    return (rows[:, None] * side + columns).reshape(-1)


def waves(positions: Tensor, width: int) -> Tensor:
    """[n, width]: sines, then cosines."""
    steps = torch.arange(width // 2, dtype=torch.float32) / (width / 2)
    angles = positions.float()[:, None] * (1.0 / _BASE**steps)
    return torch.cat((angles.sin(), angles.cos()), -1)


@lru_cache(maxsize=4)  # of some 15 MB each
def grid_waves(size: Size, width: int) -> Tensor:
    """[height * width of a piece, width]: of columns, then of rows."""
    rows, columns = (waves(torch.arange(num), width // 2) for num in size)
    shape = (*size, width // 2)
    return torch.cat((columns[None].expand(shape), rows[:, None].expand(shape)), -1).reshape(-1, width)


class Embeddings(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.side = config.image_size // config.patch_size
        self.patch_embedding = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.position_embedding = nn.Embedding(self.side**2, config.hidden_size)

    def forward(self, strips: Tensor, size: Size) -> Tensor:
        patches = self.patch_embedding(strips).flatten(2).mT
        embedded: Tensor = patches + self.position_embedding(places(size, self.side).to(strips.device))
        return embedded


class VisionEncoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        config._attn_implementation = "sdpa"
        self.embeddings = Embeddings(config)
        self.encoder = Idefics2Encoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, strips: Tensor, size: Size) -> Tensor:
        """[pieces, 3, patch, patches * patch] -> [pieces, patches, width]"""
        hidden = self.encoder(inputs_embeds=self.embeddings(strips, size), attention_mask=None).last_hidden_state
        normed: Tensor = self.post_layernorm(hidden)
        return normed


class Resampler(nn.Module):
    def __init__(self, queries: int, width: int, encoder_width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(queries, width))
        same = encoder_width == width
        self.kv_proj = nn.Identity() if same else nn.Linear(encoder_width, width, bias=False)
        self.attn = nn.MultiheadAttention(width, width // HEAD, batch_first=True)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=_EPS) for _ in range(3))
        self.proj = nn.Parameter(torch.zeros(width, width))

    def values(self, hidden: Tensor) -> Tensor:
        made: Tensor = self.ln_kv(self.kv_proj(hidden))
        return made

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        """[n, patches, width] -> [n, queries, width]"""
        queries = self.ln_q(self.query).expand(len(keys), -1, -1)
        attended = self.attn(queries, keys, values, need_weights=False)[0]
        vectors: Tensor = self.ln_post(attended) @ self.proj
        return vectors


class MiniCPMVTowers(Idefics2PreTrainedModel):
    """Named as in checkpoints of the whole."""

    config: Idefics2Config
    _keys_to_ignore_on_load_unexpected = [r"^llm\.", r"^tts\."]

    def __init__(self, config: Idefics2Config) -> None:
        super().__init__(config)
        vision, resampling = config.vision_config, config.perceiver_config
        self.in_a_row = bool(vars(config)["places_in_a_row"])
        self.vpm = VisionEncoder(vision)
        self.resampler = Resampler(resampling.resampler_n_latents, resampling.hidden_size, vision.hidden_size)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        PreTrainedModel._init_weights(self, module)

    def get_image_features(self, pixel_values: Tensor, target_sizes: Tensor) -> Tensor:
        """[pieces * queries, width]. `pixel_values`: [1, 3, patch, patches of all pieces * patch]; `target_sizes`:
        [pieces, 2] heights and widths in patches."""
        made = [
            self.resampler(values + grid_waves(size, values.shape[-1]).to(values), values)
            for size, values in self._pieces(pixel_values, target_sizes)
        ]
        return torch.cat(made).flatten(0, 1)

    def get_video_features(
        self,
        pixel_values: Tensor,
        target_sizes: Tensor,
        temporal_ids: Tensor | None = None,
        packs: Tensor | None = None,
    ) -> Tensor:
        """Frames are images, unless they are told when they are seen (`temporal_ids`) and how many of them are seen at
        once (`packs`)."""
        if temporal_ids is None or packs is None:
            return self.get_image_features(pixel_values, target_sizes)
        lengths = [int(num) for num in packs]
        if sum(lengths) != len(target_sizes) or len(temporal_ids) != len(target_sizes) or min(lengths) < 1:
            raise ValueError(f"{len(target_sizes)} frames, {len(temporal_ids)} times and packs of {lengths[:20]}")
        keys, values = list[Tensor](), list[Tensor]()
        for size, made in self._pieces(pixel_values, target_sizes):
            seen = waves(temporal_ids[len(keys) : len(keys) + len(made)].cpu(), made.shape[-1]).to(made)
            keys += (made + grid_waves(size, made.shape[-1]).to(made) + seen[:, None]).unbind()
            values += made.unbind()
        ends = list(itertools.accumulate(lengths, initial=0))
        packed = [
            self.resampler(torch.cat(keys[start:end])[None], torch.cat(values[start:end])[None])[0]
            for start, end in itertools.pairwise(ends)
        ]
        return torch.cat(packed)

    def _pieces(self, pixel_values: Tensor, target_sizes: Tensor) -> Iterator[tuple[Size, Tensor]]:
        """Those of one size that follow each other, with what is attended to."""
        sizes = [(int(height), int(width)) for height, width in target_sizes]
        patch = pixel_values.shape[-2]
        if any(min(size) < 1 for size in sizes) or pixel_values.shape[-1] != sum(h * w for h, w in sizes) * patch:
            raise ValueError(f"patches of {list(pixel_values.shape)} for pieces of {sizes[:20]}")
        start = 0
        for size, num in _runs(sizes):
            length = size[0] * size[1] * patch
            strips = pixel_values[0, ..., start : start + num * length].unflatten(-1, (num, length)).permute(2, 0, 1, 3)
            start += num * length
            size_seen = (1, size[0] * size[1]) if self.in_a_row else size
            yield size, self.resampler.values(self.vpm(strips, size_seen))


class AudioProjector(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(width, out), nn.Linear(out, out)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.linear2(functional.relu(self.linear1(hidden)))
        return projected


class MiniCPMOTowers(MiniCPMVTowers):
    config: Idefics2Config

    def __init__(self, config: Idefics2Config) -> None:
        super().__init__(config)
        own = vars(config)
        self.chunk, self.step = own["chunk_places"], own["pool_step"]
        hearing = WhisperConfig(**own["hearing"])
        hearing._attn_implementation = "sdpa"
        self.apm = WhisperEncoder(hearing)
        self.audio_projection_layer = AudioProjector(hearing.d_model, config.perceiver_config.hidden_size)
        self.post_init()

    get_image_features = MiniCPMVTowers.get_image_features
    get_video_features = MiniCPMVTowers.get_video_features

    def get_audio_features(self, input_features: Tensor, piece_lens: Tensor) -> Tensor:
        """Features [pieces, mel bins, frames], of which each piece has so many -> [vectors, width]."""
        lens = [int(count) for count in piece_lens]
        most = min(input_features.shape[-1], 2 * self.apm.config.max_source_positions)
        if len(lens) != len(input_features) or not all(0 < count <= most for count in lens):
            raise ValueError(f"{len(input_features)} pieces of {most} frames at most have lengths of {lens[:8]}")
        made = []
        for features, count in zip(input_features, lens, strict=True):
            projected = self.audio_projection_layer(self._heard(features[None, :, :count]))
            made.append(functional.avg_pool1d(projected.mT, self.step)[0].mT if projected.shape[1] >= self.step
                        else projected[0, :0])  # fmt: skip
        return torch.cat(made)

    def _heard(self, features: Tensor) -> Tensor:
        """[1, positions, width]"""
        encoder = self.apm
        hidden = functional.gelu(encoder.conv2(functional.gelu(encoder.conv1(features)))).mT
        hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
        chunks = torch.arange(hidden.shape[1], device=hidden.device) // self.chunk
        mask = torch.zeros((len(chunks),) * 2, dtype=hidden.dtype, device=hidden.device)
        mask = mask.masked_fill(chunks > chunks[:, None], torch.finfo(hidden.dtype).min)[None, None]
        for layer in encoder.layers:
            hidden = layer(hidden, mask)
        normed: Tensor = encoder.layer_norm(hidden)
        return normed


def _runs(sizes: Sequence[Size]) -> Iterator[tuple[Size, int]]:
    for size, equal in itertools.groupby(sizes):
        left = sum(1 for _ in equal)
        while left:
            num = min(left, _BATCH)
            yield size, num
            left -= num
