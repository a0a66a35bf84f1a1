"""Encoders of Gemma 3n: its audio encoder and projections out of transformers, beside our own vision encoder.

The class of the whole is not made: it would want timm, which wants torchvision. A vision encoder of another name than
that of released checkpoints is left to timm. Must not know: steps, requests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, Gemma3nConfig, Gemma3nVisionConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.gemma3n.modeling_gemma3n import (
    Gemma3nAudioEncoder,
    Gemma3nMultimodalEmbedder,
    Gemma3nPreTrainedModel,
)

from quire.hf_models.mobilenet import OUT, mobilenet_of
from quire.schema.errors import ConfigError

_OWN = "mobilenetv5_300m_enc"


class VisionTower(nn.Module):
    def __init__(self, config: Gemma3nVisionConfig) -> None:
        super().__init__()
        if config.hidden_size != OUT:
            raise ConfigError(
                f"vision_config.hidden_size is {config.hidden_size}; {_OWN} has {OUT}", param="vision_config"
            )
        self.timm_model = mobilenet_of(config.model_args)

    def forward(self, pixel_values: Tensor, **options: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.timm_model(pixel_values))


class Gemma3nEncoders(nn.Module):
    def __init__(self, config: Gemma3nConfig) -> None:
        super().__init__()
        vision, audio, text = config.vision_config, config.audio_config, config.text_config
        self.config = config
        self.vision_tower = VisionTower(vision) if vision.architecture == _OWN else AutoModel.from_config(vision)
        self.audio_tower = Gemma3nAudioEncoder(audio)
        self.embed_vision = Gemma3nMultimodalEmbedder(vision, text)
        self.embed_audio = Gemma3nMultimodalEmbedder(audio, text)
        self.last_token = text.vocab_size - 1

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """[images, vectors of an image, width]"""
        size, num = self.config.vision_config.hidden_size, self.config.vision_soft_tokens_per_image
        hidden = self.vision_tower(pixel_values=pixel_values, do_pooling=False, return_dict=True).last_hidden_state
        if hidden[0].numel() != size * num:
            raise ValueError(f"the encoder gave {list(hidden.shape[1:])} for an image; the model has {num} of {size}")
        vectors: Tensor = self.embed_vision(inputs_embeds=hidden.reshape(len(hidden), size, num).mT * size**0.5)
        return vectors

    def get_audio_features(self, input_features: Tensor, input_features_mask: Tensor) -> Tensor:
        """[items, vectors of an item, width]. `input_features_mask`: which frames are audio. What is not, and what an
        item lacks to be as long as all are, has the vector of the last token."""
        output = self.audio_tower(input_features, ~input_features_mask.bool())
        vectors: Tensor = self.embed_audio(inputs_embeds=output.last_hidden_state)
        missing = self.config.audio_soft_tokens_per_image - vectors.shape[1]
        if missing < 0:
            raise ValueError(f"the audio has {vectors.shape[1]} vectors; the model takes {missing + vectors.shape[1]}")
        filler = self.embed_audio(input_ids=torch.tensor([[self.last_token]], device=vectors.device))
        vectors = torch.where(output.audio_mel_mask[..., None], filler, vectors)
        return torch.cat((vectors, filler.expand(len(vectors), missing, -1)), 1)


class Gemma3nTowers(Gemma3nPreTrainedModel):
    """Named as in checkpoints of the whole."""

    config: Gemma3nConfig
    _keys_to_ignore_on_load_unexpected = [r"language_model\.", r"lm_head\."]

    def __init__(self, config: Gemma3nConfig) -> None:
        super().__init__(config)
        self.model = Gemma3nEncoders(config)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        PreTrainedModel._init_weights(self, module)
