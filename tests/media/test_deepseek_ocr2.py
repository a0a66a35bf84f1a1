"""Images of DeepSeek-OCR 2 as its own repository has it, beside Pillow and torch as its code calls them: equal to the
last bit. And both ends together: pictures through LLM.chat, beside transformers' model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.media.families import family_name, make_family
from quire.media.families.base import Family
from quire.media.settings import ProcessorFiles
from quire.schema.errors import InputError
from tests.media.test_deepseek_ocr import OWN, views
from tests.media.test_pixels_oracle import picture
from tests.media.tokens import SPECIAL, write_tokenizer
from tests.media_models import as_deepseek_ocr2, deepseek_ocr2

MODES = {"default": (1024, 768, True), "768": (768, 768, False), "1024": (1024, 1024, False)}


def family() -> Family:
    files = ProcessorFiles(config={"architectures": ["DeepseekOCR2ForCausalLM"]}, processor=OWN)
    assert family_name(files) == "DeepseekVLV2Processor"
    return make_family("DeepseekVLV2Processor", files)


@pytest.mark.parametrize("mode", MODES)
def test_pixels_equal_pillow_and_torch(mode: str) -> None:
    base, side, crops = MODES[mode]
    options = {"base_size": base, "image_size": side, "crop_mode": crops} if mode != "default" else {}
    several = 0
    for width, height in ((333, 500), (1300, 700), (90, 1000), (769, 768), (768, 768)):
        ours = family().process("image", picture(width, height), options, 1)
        whole, tiles, grid = views(picture(width, height), base, side, crops, smallest=768)
        assert np.array_equal(ours.arrays["pixel_values"], whole[None].numpy())
        assert ours.arrays["num_local_patches"].tolist() == [len(tiles)] and len(tiles) in (0, grid[0] * grid[1])
        assert ("pixel_values_local" in ours.arrays) == bool(tiles)
        if tiles:
            assert np.array_equal(ours.arrays["pixel_values_local"], torch.stack(tiles).numpy())
        assert ours.num_vectors == {768: 144, 1024: 256}[base] + 144 * len(tiles) + 1
        assert ours.text == "<image>" * ours.num_vectors
        several += bool(tiles)
    assert several == (3 if crops else 0)


@pytest.mark.parametrize(("name", "value"), [("base_size", 640), ("image_size", 512), ("base_size", 1000)])
def test_sizes_without_vectors_are_refused(name: str, value: int) -> None:
    with pytest.raises(InputError, match=f"{name} is {value}; the encoder reads squares of 768 or 1024 pixels"):
        family().process("image", picture(90, 90), {name: value}, 1)
    with pytest.raises(InputError, match=r"base_size .* from 16 to 1024, got 1280"):
        family().process("image", picture(90, 90), {"base_size": 1280}, 1)


def test_words_equal_transformers(tmp_path: Path) -> None:
    """An image with tiles and one without."""
    write_tokenizer(tmp_path)
    vocab = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    token = vocab.token_to_id("<image>")
    torch.manual_seed(4)
    config = deepseek_ocr2(vocab_size=vocab.get_vocab_size(), max_position_embeddings=2048)
    config.image_token_id = token
    model = tf.DeepseekOcr2ForConditionalGeneration(config).eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.2) if weight.ndim > 1 else None
    model.save_pretrained(tmp_path)
    as_deepseek_ocr2(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps(OWN))
    images = [picture(900, 500), picture(60, 90)]
    special = [vocab.token_to_id(one) for one in SPECIAL]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True,
                            logit_bias=dict.fromkeys(special, -100.0))  # fmt: skip
    user = [*[{"type": "image_pil", "image_pil": image} for image in images], {"type": "text", "text": "Free OCR. "}]
    with LLM(str(tmp_path), dtype="float32", max_model_len=1536, max_num_batched_tokens=700, max_num_seqs=2) as llm:
        (output,) = llm.chat([{"role": "user", "content": user}], params, use_tqdm=False)
        media = llm.llm_engine.front.inputs.media
        items = [one.item for one in media.loaded(media.load({"image": images})).items["image"]]
    assert [one.num_vectors for one in items] == [257 + 2 * 144, 257]
    assert output.prompt_token_ids.count(token) == sum(one.num_vectors for one in items)
    ends = vocab.encode("\nFree OCR.", add_special_tokens=False).ids
    assert output.prompt_token_ids[0] == vocab.token_to_id("<s>") and output.prompt_token_ids[-len(ends) :] == ends
    known = {
        "pixel_values": torch.from_numpy(np.concatenate([one.arrays["pixel_values"] for one in items])),
        "num_local_patches": torch.tensor([2, 0]),
        "pixel_values_local": torch.from_numpy(items[0].arrays["pixel_values_local"]),
    }
    answer = list(output.outputs[0].token_ids)
    ids = torch.tensor([[*output.prompt_token_ids, *answer]])
    start = len(output.prompt_token_ids) - 1
    with torch.inference_mode():
        logits = model(ids, **known).logits[0]
        other = model(ids, **known | {"pixel_values_local": -known["pixel_values_local"]}).logits[0]
        logits[:, special] = -torch.inf
    assert logits[start:-1].argmax(-1).tolist() == answer
    assert float((other[start] - logits[start])[answer[0]].abs()) > 1e-3  # the tiles matter
