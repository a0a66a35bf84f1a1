"""A plain Ultravox: transformers' Whisper encoder and language model, and a projector in a few lines of torch.

transformers has no class of the whole. What follows the end of a piece is masked by hooks on the encoder's layers.
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
from torch.nn import functional

STACK, FRAMES, BINS = 4, 64, 16
AUDIO: dict[str, Any] = dict(
    d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48, num_mel_bins=BINS,
    max_source_positions=FRAMES // 2, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48, vocab_size=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip
HIDDEN = 40  # of the projector


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


class Projector(nn.Module):
    def __init__(self, width: int, act: str, has_mid: bool) -> None:
        super().__init__()
        self.is_gated, self.has_mid = act == "swiglu", has_mid
        between = HIDDEN // 2 if self.is_gated else HIDDEN
        self.ln_pre = nn.RMSNorm(AUDIO["d_model"] * STACK)
        self.linear_1 = nn.Linear(AUDIO["d_model"] * STACK, HIDDEN, bias=False)
        self.linear_2 = nn.Linear(between, width, bias=False)
        self.add_module("ln_mid" if has_mid else "ln_post", nn.RMSNorm(between if has_mid else width))

    def forward(self, hidden: Tensor) -> Tensor:
        count = len(hidden)
        rows = torch.cat([hidden, hidden.new_zeros(-count % STACK, hidden.shape[-1])]).reshape(
            -1, STACK, AUDIO["d_model"]
        )
        x = self.linear_1(normed(rows.flatten(1), self.ln_pre.weight))
        x = x[:, : HIDDEN // 2] * functional.silu(x[:, HIDDEN // 2 :]) if self.is_gated else functional.gelu(x)
        x = normed(x, self.ln_mid.weight) if self.has_mid else x
        x = self.linear_2(x)
        return x if self.has_mid else normed(x, self.ln_post.weight)


class Ultravox(nn.Module):
    """`config`: text (of transformers), act, has_mid."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.language_model = tf.AutoModelForCausalLM.from_config(config.text)
        whisper = tf.WhisperConfig(**AUDIO)
        self.audio_tower = tf.WhisperModel(whisper).encoder
        self.multi_modal_projector = Projector(config.text.hidden_size, config.act, config.has_mid)

    def get_input_embeddings(self) -> Any:
        return self.language_model.get_input_embeddings()

    def get_audio_features(self, input_features: Tensor, piece_lens: Tensor) -> Tensor:
        return torch.cat([self.hear(one, int(num)) for one, num in zip(input_features, piece_lens, strict=True)])

    def hear(self, features: Tensor, num: int) -> Tensor:
        num_places = (num + 1) // 2
        seen = (torch.arange(FRAMES // 2) < num_places)[None, None, None].expand(1, 1, FRAMES // 2, -1)

        def masked(layer: Any, args: Any) -> Any:
            return args[0], torch.where(seen, 0.0, torch.finfo(torch.float32).min)

        hooks = [layer.register_forward_pre_hook(masked) for layer in self.audio_tower.layers]
        padded = functional.pad(features, (0, FRAMES - features.shape[-1]))[None]
        hidden = self.audio_tower(padded).last_hidden_state[0, : features.shape[-1] // 2]
        for hook in hooks:
            hook.remove()
        return self.multi_modal_projector(hidden)[: -(-num // (2 * STACK))]

    def forward(self, input_ids: Tensor, clips: Any = (), token: int = 300) -> Any:
        embeds = self.get_input_embeddings()(input_ids).clone()
        if clips:
            vectors = torch.cat([self.get_audio_features(**clip) for clip in clips])
            embeds[input_ids == token] = vectors
        return self.language_model(inputs_embeds=embeds)

    def save_pretrained(self, folder: Path) -> None:
        """Tied weights once."""
        text = self.config.text.to_dict() | {"architectures": [type(self.language_model).__name__]}
        raw = {
            "architectures": ["UltravoxModel"], "model_type": "ultravox", "text_config": text,
            "audio_config": AUDIO | {"model_type": "whisper"}, "hidden_size": HIDDEN, "stack_factor": STACK,
            "projector_act": self.config.act, "audio_token_index": 300, "ignore_index": -100, "norm_init": 0.4,
            "vocab_size": self.config.text.vocab_size, "torch_dtype": "float32",
            "auto_map": {"AutoConfig": "ultravox_config.UltravoxConfig", "AutoModel": "ultravox_model.UltravoxModel"},
        }  # fmt: skip
        if self.config.has_mid:
            raw["projector_ln_mid"] = True
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(raw, default=str))
        tied = self.config.text.tie_word_embeddings
        state = {name: tensor.contiguous() for name, tensor in self.state_dict().items()
                 if not (tied and name == "language_model.lm_head.weight")}  # fmt: skip
        save_file(state, folder / "model.safetensors", {"format": "pt"})


def config_of(text: Any, act: str = "swiglu", has_mid: bool = False) -> Any:
    return SimpleNamespace(text=text, act=act, has_mid=has_mid)


def draw(generator: torch.Generator) -> dict[str, Tensor]:
    """One piece that is shorter than what is heard at once, or two, of which the second ends at an odd frame."""
    if int(torch.randint(2, (), generator=generator)):
        num = 2 * int(torch.randint(9, FRAMES // 2, (), generator=generator))
        return {"input_features": torch.randn((1, BINS, num), generator=generator), "piece_lens": torch.tensor([num])}
    features = torch.randn((2, BINS, FRAMES), generator=generator)
    features[1, :, 37:] = 0
    return {"input_features": features, "piece_lens": torch.tensor([FRAMES, 37])}
