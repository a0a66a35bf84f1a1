"""The audio encoder of Ultravox: Whisper's, and a projector of stacked vectors, written here.

transformers has no class for it. Pieces of an item are encoded by themselves, each up to what Whisper hears at once;
of a piece that is shorter than the longest, what follows its end is masked. Must not know: steps, requests, samples.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel, WhisperConfig
from transformers.activations import ACT2FN
from transformers.models.whisper.modeling_whisper import WhisperEncoder, WhisperPreTrainedModel

from quire.checkpoint.limits import FFN, HEADS, LAYERS, WIDTH, Range, check_numbers
from quire.schema.errors import CheckpointError, ConfigError, NotBuiltError

_AT_ONCE = 8  # pieces
_EPS = 1e-6  # of the projector's norms
_OWN: dict[str, Range] = {"hidden_size": WIDTH, "stack_factor": Range(1, 1024)}
_AUDIO: dict[str, Range] = {
    "d_model": WIDTH, "encoder_layers": LAYERS, "encoder_attention_heads": HEADS, "encoder_ffn_dim": FFN,
    "num_mel_bins": Range(1, 1024), "max_source_positions": Range(1, 1 << 16),
}  # fmt: skip
_SWIGLU = "swiglu"
_WEIGHTS = (".safetensors", ".bin", ".pt")


class UltravoxConfig(PreTrainedConfig):
    model_type = "ultravox"
    sub_configs = {"audio_config": WhisperConfig}

    def __init__(
        self,
        audio_config: Mapping[str, Any] | None = None,
        text_config: Mapping[str, Any] | None = None,
        hidden_size: int = 4096,
        stack_factor: int = 8,
        projector_act: str = _SWIGLU,
        projector_ln_mid: bool = False,
        num_projector_layers: int = 0,
        audio_latency_block_size: int | None = None,
        **others: Any,
    ) -> None:
        for name, part in (("audio_config", audio_config), ("text_config", text_config)):
            if not isinstance(part, Mapping):
                raise CheckpointError(f"{name} must be a mapping, not {part!r:.60}", param=name)
        assert audio_config is not None and text_config is not None
        if (kind := audio_config.get("model_type", "whisper")) != "whisper":
            raise NotBuiltError(f"audio_config.model_type {kind!r:.60} is not built; whisper is", param="audio_config")
        if num_projector_layers:
            raise NotBuiltError(
                f"num_projector_layers = {num_projector_layers!r:.60} is not built: of Ultravox's projectors, those "
                "without layers of attention are",
                param="num_projector_layers",
            )
        if audio_latency_block_size:
            raise NotBuiltError(
                f"audio_latency_block_size = {audio_latency_block_size!r:.60} is not built", param="model"
            )
        if projector_act != _SWIGLU and projector_act not in ACT2FN:
            raise ConfigError(f"projector_act {projector_act!r:.60} is unknown", param="projector_act")
        check_numbers({"hidden_size": hidden_size, "stack_factor": stack_factor}, _OWN)
        check_numbers(audio_config, _AUDIO)
        check_numbers(text_config)
        heads, width = (audio_config.get(name) for name in ("encoder_attention_heads", "d_model"))
        if heads and width and width % heads:
            raise CheckpointError(f"audio_config: d_model {width} is not a multiple of {heads} heads", param="d_model")
        if projector_act == _SWIGLU and hidden_size % 2:
            raise CheckpointError(f"hidden_size is {hidden_size}; {_SWIGLU} wants an even number", param="hidden_size")
        self.audio_config = WhisperConfig(**{name: audio_config[name] for name in (*_AUDIO, "activation_function")
                                             if audio_config.get(name) is not None})  # fmt: skip
        self.text_width = int(text_config.get("hidden_size") or 4096)
        self.hidden_size, self.stack_factor = int(hidden_size), int(stack_factor)
        self.projector_act, self.projector_ln_mid = projector_act, bool(projector_ln_mid)
        self.audio_source: str | None = None  # the folder of Whisper's weights, if the checkpoint lacks them
        super().__init__(**{name: others[name] for name in ("architectures",) if name in others})


class SwiGLU(nn.Module):
    """The second half is the gate."""

    def forward(self, x: Tensor) -> Tensor:
        values, gate = x.chunk(2, -1)
        return functional.silu(gate) * values


class StackedProjector(nn.Module):
    """So many vectors of the encoder side by side -> one of the language model's width."""

    def __init__(self, config: UltravoxConfig) -> None:
        super().__init__()
        is_gated = config.projector_act == _SWIGLU
        width, self.stack = config.audio_config.d_model * config.stack_factor, config.stack_factor
        between = config.hidden_size // 2 if is_gated else config.hidden_size
        self.ln_pre = nn.RMSNorm(width, eps=_EPS)
        self.linear_1 = nn.Linear(width, config.hidden_size, bias=False)
        self.act = SwiGLU() if is_gated else ACT2FN[config.projector_act]
        self.linear_2 = nn.Linear(between, config.text_width, bias=False)
        self.ln_mid = nn.RMSNorm(between, eps=_EPS) if config.projector_ln_mid else nn.Identity()
        self.ln_post = nn.Identity() if config.projector_ln_mid else nn.RMSNorm(config.text_width, eps=_EPS)

    def forward(self, hidden: Tensor) -> Tensor:
        """[pieces, positions, width] -> [pieces, groups of positions, width of the language model]"""
        hidden = functional.pad(hidden, (0, 0, 0, -hidden.shape[1] % self.stack))
        stacked = hidden.reshape(len(hidden), -1, hidden.shape[-1] * self.stack)
        inner = self.ln_mid(self.act(self.linear_1(self.ln_pre(stacked))))
        projected: Tensor = self.ln_post(self.linear_2(inner))
        return projected


class UltravoxTowers(PreTrainedModel):
    """Named as in checkpoints of the whole."""

    config: UltravoxConfig
    config_class = UltravoxConfig
    base_model_prefix = "model"
    _keys_to_ignore_on_load_unexpected = [r"language_model\."]

    def __init__(self, config: UltravoxConfig) -> None:
        super().__init__(config)
        self.audio_tower = WhisperEncoder(config.audio_config)
        self.multi_modal_projector = StackedProjector(config)
        self.post_init()

    def get_audio_features(self, input_features: Tensor, piece_lens: Tensor) -> Tensor:
        """Features [pieces, mel bins, frames], of which each piece has so many -> [vectors, width]."""
        stride, lens = 2 * self.config.stack_factor, piece_lens.tolist()
        most = min(input_features.shape[-1], 2 * self.config.audio_config.max_source_positions)
        if len(lens) != len(input_features) or not all(0 < count <= most for count in lens):
            raise ValueError(f"{len(input_features)} pieces of {most} frames at most have lengths of {lens[:8]}")
        parts: list[Tensor] = []
        for first in range(0, len(lens), _AT_ONCE):
            counts = lens[first : first + _AT_ONCE]
            vectors = self.multi_modal_projector(self._hear(input_features[first : first + _AT_ONCE], counts))
            parts += [one[: -(-count // stride)] for one, count in zip(vectors, counts, strict=True)]
        return torch.cat(parts)

    def _hear(self, features: Tensor, counts: list[int]) -> Tensor:
        encoder = self.audio_tower
        hidden = functional.gelu(encoder.conv2(functional.gelu(encoder.conv1(features)))).mT
        hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
        mask = None
        if min(counts) < features.shape[-1]:
            ends = torch.tensor([(count - 1) // 2 + 1 for count in counts], device=hidden.device)
            is_audio = torch.arange(hidden.shape[1], device=hidden.device) < ends[:, None]
            mask = torch.zeros_like(is_audio, dtype=hidden.dtype)
            mask = mask.masked_fill(~is_audio, torch.finfo(hidden.dtype).min)[:, None, None]
        for layer in encoder.layers:
            hidden = layer(hidden, mask)
        normed: Tensor = encoder.layer_norm(hidden)
        return normed

    @classmethod
    def from_pretrained(cls, folder: str, *, config: UltravoxConfig, **how: Any) -> Any:
        """The encoder from its own folder, where the checkpoint has none; once it is known that all fits the files."""
        folders = [folder, *([config.audio_source] if config.audio_source else [])]
        _check_size(config, folders)
        model, report = super().from_pretrained(folder, config=config, **how)
        if config.audio_source is not None:
            how = {**how, "key_mapping": {r"^(?:model\.)?encoder\.": "encoder."}}
            alone, about = WhisperAlone.from_pretrained(config.audio_source, config=config.audio_config, **how)
            model.audio_tower = alone.encoder
            missing = {name for name in report["missing_keys"] if not name.startswith("audio_tower.")}
            report = {**report, "missing_keys": missing | {f"audio_tower {name}" for name in about["missing_keys"]}}
            report["mismatched_keys"] = {*report["mismatched_keys"], *about["mismatched_keys"]}
        return model, report


class WhisperAlone(WhisperPreTrainedModel):
    """Its encoder, out of a checkpoint of the whole."""

    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"proj_out\."]

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__(config)
        self.encoder = WhisperEncoder(config)
        self.post_init()


def _check_size(config: UltravoxConfig, folders: list[str]) -> None:
    """A number takes a byte at least."""
    audio = config.audio_config
    between = config.hidden_size // (2 if config.projector_act == _SWIGLU else 1)
    num = audio.d_model * config.stack_factor * config.hidden_size + between * config.text_width
    num += audio.encoder_layers * audio.d_model * (4 * audio.d_model + 2 * audio.encoder_ffn_dim)
    num += audio.max_source_positions * audio.d_model
    files = [entry for folder in folders for entry in os.scandir(folder) if entry.name.endswith(_WEIGHTS)]
    num_bytes = sum(entry.stat().st_size for entry in files)
    if num > num_bytes:
        raise CheckpointError(
            f"the configuration describes an audio encoder and a projector of {num} numbers; the files of "
            f"{' and '.join(folders)} have {num_bytes} bytes"
        )
