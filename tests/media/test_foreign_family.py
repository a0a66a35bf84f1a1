"""A family without data of its own: transformers' processor, item by item, as if called at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers as tf
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from quire.media.expand import expand_text
from quire.media.fallback import ForeignFamily
from quire.media.settings import ProcessorFiles
from quire.schema.errors import InputError
from quire.text.tokenizer import load_tokenizer
from tests.media.test_pixels_oracle import picture
from tests.media.tokens import write_tokenizer


def test_ids_and_arrays(tmp_path: Any) -> None:
    write_tokenizer(tmp_path)
    tokenizer = tf.AutoTokenizer.from_pretrained(tmp_path)
    processor = _processor(tokenizer)
    family = ForeignFamily(ProcessorFiles(config={"model_type": "ours"}), processor)
    assert family.placeholders == {"image": "<image>"}
    pictures = [picture(60, 40), picture(100, 30)]
    text = "hello <image> then <image>\nthe"
    expected = processor(text=[text], images=pictures, return_tensors="np")
    items = {"image": [family.process("image", one, {}, 2) for one in pictures]}
    ours = load_tokenizer(str(tmp_path))
    assert ours.encode(expand_text(family, text, items)) == expected["input_ids"][0].tolist()
    arrays = [item.arrays["pixel_values"] for item in items["image"]]
    np.testing.assert_array_equal(np.concatenate(arrays), expected["pixel_values"])
    num = expected["input_ids"][0].tolist().count(processor.image_token_id)
    assert sum(item.num_vectors for item in items["image"]) == num == 8
    with pytest.raises(InputError, match="not supported for this model"):
        family.process("image", pictures[0], {"max_patches": 1}, 1)
    with pytest.raises(InputError, match="takes image and no audio"):
        family.process("audio", None, {}, 1)


def _processor(tokenizer: Any) -> Any:
    """LLaVA's, for instance, which Quire has data for: nothing here knows that."""
    tokenizer.image_token, tokenizer.image_token_id = "<image>", tokenizer.convert_tokens_to_ids("<image>")
    plain = GotOcr2ImageProcessorPil(size={"height": 28, "width": 28})
    return tf.LlavaProcessor(plain, tokenizer, patch_size=14, vision_feature_select_strategy="full")
