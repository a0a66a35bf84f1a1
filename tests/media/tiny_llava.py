"""A whole checkpoint of a tiny random LLaVA: weights, tokenizer, processor and chat template.

And what transformers makes of prompts with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.media.tokens import write_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
IMAGES = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}


class TinyLlava:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_tokenizer(folder, chat_template=TEMPLATE)
        vocab = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.image_id = vocab.token_to_id("<image>")
        text = tf.LlamaConfig(
            vocab_size=vocab.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None,
            eos_token_id=vocab.token_to_id("</s>"), pad_token_id=None,
        )  # fmt: skip
        vision = tf.CLIPVisionConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=28,
            patch_size=7, projection_dim=16,
        )  # fmt: skip
        config = tf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=self.image_id)
        torch.manual_seed(6)
        self.model = tf.LlavaForConditionalGeneration(config).eval()
        with torch.no_grad():  # so that the image matters to the words
            for parameter in self.model.parameters():
                parameter.mul_(3.0) if parameter.dim() > 1 else None
        self.model.save_pretrained(folder)
        own = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor", **own}))
        images = {"image_processor_type": "CLIPImageProcessor", **IMAGES}
        (folder / "preprocessor_config.json").write_text(json.dumps(images))
        tokenizer = tf.AutoTokenizer.from_pretrained(folder)
        self.processor: Any = tf.LlavaProcessor(CLIPImageProcessorPil(**IMAGES), tokenizer, **own)

    def answer(self, text: str, images: Sequence[Image.Image], num_tokens: int = 8) -> tuple[list[int], list[int]]:
        """(the prompt's ids, the greedy answer's)."""
        inputs: Any = self.processor(text=text, images=list(images) or None, return_tensors="pt")
        with torch.no_grad():
            out = self.model.generate(
                **inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
                suppress_tokens=[self.image_id],
            )  # fmt: skip
        num = inputs["input_ids"].shape[1]
        return out[0, :num].tolist(), out[0, num:].tolist()
