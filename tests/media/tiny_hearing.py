"""A whole checkpoint of a tiny random Qwen2-Audio, whose words depend on what it hears."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer

from tests.media.test_joined import qwen2_audio
from tests.media.tokens import SPECIAL, write_tokenizer

TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|audio_bos|><|AUDIO|><|audio_eos|>{% endif %}{% endfor %}{% endfor %}"
)
PLACE = "<|audio_bos|><|AUDIO|><|audio_eos|>"


class TinyHearing:
    def __init__(self, folder: Path) -> None:
        write_tokenizer(folder, chat_template=TEMPLATE)
        vocab = Tokenizer.from_file(str(folder / "tokenizer.json"))
        torch.manual_seed(4)
        self.model: Any = tf.Qwen2AudioForConditionalGeneration(qwen2_audio(vocab)).eval().float()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(3.0) if parameter.dim() > 1 else None
        self.model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": 16, "chunk_length": 2}))
        self.folder, self.bias = folder, {vocab.token_to_id(one): -100.0 for one in SPECIAL}
