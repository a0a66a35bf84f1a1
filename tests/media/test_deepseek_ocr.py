"""Images of DeepSeek-OCR in every mode beside Pillow and torch, as the released code calls them: equal to the last bit.
And both ends together: a picture through LLM.generate, beside the model in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.media.families import family_name, make_family
from quire.media.settings import ProcessorFiles
from quire.sampling.no_repeat import NGramPerReqLogitsProcessor
from tests import deepseek_ocr
from tests.media.test_deepseek_vl2 import PROCESSOR
from tests.media.test_pixels_oracle import SIZES, picture
from tests.media.tokens import SPECIAL, write_tokenizer

OWN = PROCESSOR | {"candidate_resolutions": [[1024, 1024]], "downsample_ratio": 4, "patch_size": 16}
MODES: dict[str, tuple[int, int, bool]] = {
    "tiny": (512, 512, False), "small": (640, 640, False), "base": (1024, 1024, False), "large": (1280, 1280, False),
    "gundam": (1024, 640, True),
}  # fmt: skip


def grid_of(image: Image.Image, side: int, most: int) -> tuple[int, int]:
    """(columns, rows): the nearest proportions; of equals the later, if the image fills half of its pixels."""
    ratio, best, nearest = image.width / image.height, (1, 1), float("inf")
    grids = sorted(((w, h) for w in range(1, most + 1) for h in range(1, most + 1) if 2 <= w * h <= most),
                   key=lambda grid: grid[0] * grid[1])  # fmt: skip
    for grid in grids:
        far = abs(ratio - grid[0] / grid[1])
        is_full = image.width * image.height > 0.5 * side * side * grid[0] * grid[1]
        if far < nearest or (far == nearest and is_full):
            best, nearest = grid, far
    return best


def normalised(image: Image.Image) -> torch.Tensor:
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255) - 0.5) / 0.5


def views(
    image: Image.Image, base: int, side: int, crops: bool, most: int = 6, smallest: int = 640
) -> tuple[Any, list[Any], list[int]]:
    """The whole image, its tiles, and (columns, rows), as the released code has them, with Pillow."""
    if not crops:
        if side <= smallest:
            image = image.resize((side, side))
        return normalised(ImageOps.pad(image, (base, base), color=(127, 127, 127))), [], [1, 1]
    whole = normalised(ImageOps.pad(image, (base, base), color=(127, 127, 127)))
    if image.width <= smallest and image.height <= smallest:
        return whole, [], [1, 1]
    columns, rows = grid_of(image, side, most)
    large = image.resize((columns * side, rows * side))
    boxes = [(side * (i % columns), side * (i // columns)) for i in range(columns * rows)]
    return whole, [normalised(large.crop((x, y, x + side, y + side))) for x, y in boxes], [columns, rows]


@pytest.mark.parametrize("mode", MODES)
def test_pixels_equal_pillow_and_torch(mode: str) -> None:
    base, side, crops = MODES[mode]
    files = ProcessorFiles(config={"architectures": ["DeepseekOCRForCausalLM"]}, processor=OWN)
    assert family_name(files) == "DeepseekVLV2Processor"
    family = make_family("DeepseekVLV2Processor", files)
    options = {"base_size": base, "image_size": side, "crop_mode": crops} if mode != "gundam" else {}
    several = 0
    for width, height in ((333, 500), (1300, 700), (90, 1000), (641, 640), (640, 640)):
        ours = family.process("image", picture(width, height), options, 1)
        whole, tiles, grid = views(picture(width, height), base, side, crops)
        assert ours.arrays["images_spatial_crop"].tolist() == [grid]
        assert np.array_equal(ours.arrays["pixel_values"], whole[None].numpy())
        assert ("images_crop" in ours.arrays) == bool(tiles)
        if tiles:
            assert np.array_equal(ours.arrays["images_crop"], torch.stack(tiles).numpy())
        num = {512: 8, 640: 10, 1024: 16, 1280: 20}[base]
        local = grid[1] * 10 * (grid[0] * 10 + 1) if tiles else 0
        assert ours.num_vectors == num * (num + 1) + 1 + local and ours.text == "<image>" * ours.num_vectors
        several += bool(tiles)
    assert several == (3 if crops else 0)


def test_more_crops() -> None:
    files = ProcessorFiles(config={"architectures": ["DeepseekOCRForCausalLM"]}, processor=OWN)
    family = make_family("DeepseekVLV2Processor", files)
    for width, height in SIZES:
        ours = family.process("image", picture(width, height), {"max_crops": 9}, 1)
        assert ours.arrays["images_spatial_crop"].tolist() == [views(picture(width, height), 1024, 640, True, 9)[2]]


def write_model(folder: Path) -> tuple[deepseek_ocr.Oracle, Tokenizer]:
    write_tokenizer(folder)
    vocab = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw = deepseek_ocr.config(vocab_size=vocab.get_vocab_size())
    raw["language_config"]["vocab_size"] = vocab.get_vocab_size()
    torch.manual_seed(4)
    model = deepseek_ocr.Oracle(raw).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.2) if weight.ndim > 1 else None
    model.image_token = vocab.token_to_id("<image>")
    model.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(OWN | {"image_size": deepseek_ocr.TILE}))
    return model, vocab


def test_words_equal_the_model_in_torch(tmp_path: Path) -> None:
    model, vocab = write_model(tmp_path)
    images = [picture(300, 140), picture(60, 90)]  # with tiles, and without
    special = [vocab.token_to_id(one) for one in SPECIAL]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True,
                            logit_bias=dict.fromkeys(special, -100.0))  # fmt: skip
    user = [*[{"type": "image_pil", "image_pil": image} for image in images], {"type": "text", "text": "Free OCR. "}]
    small = {"base_size": 128, "image_size": 128, "crop_mode": False}
    with LLM(str(tmp_path), dtype="float32", max_model_len=512, max_num_seqs=2) as llm:
        (output,) = llm.chat([{"role": "user", "content": user}], params, use_tqdm=False)
        prompt = {
            "prompt": "<image>\nFree OCR.",
            "multi_modal_data": {"image": images[0]},
            "mm_processor_kwargs": small,
        }
        (other,) = llm.generate(prompt, params, use_tqdm=False)
        media = llm.llm_engine.front.inputs.media
        futures = media.load({"image": images}), media.load({"image": images[:1]}, processor_options=small)
        loaded = [media.loaded(one) for one in futures]
    arrays = [[{key: torch.from_numpy(np.array(array)) for key, array in one.item.arrays.items()}
               for one in each.items["image"]] for each in loaded]  # fmt: skip
    assert [one["images_spatial_crop"].tolist() for one in arrays[0]] == [[[2, 1]], [[1, 1]]]
    assert arrays[1][0]["pixel_values"].shape == (1, 3, 128, 128)
    ends = vocab.encode("\nFree OCR.", add_special_tokens=False).ids
    assert output.prompt_token_ids[0] == vocab.token_to_id("<s>") and output.prompt_token_ids[-len(ends) :] == ends
    for said, items in zip((output, other), arrays, strict=True):
        answer = list(said.outputs[0].token_ids)
        ids = torch.tensor([[*said.prompt_token_ids, *answer]])
        start = len(said.prompt_token_ids) - 1
        with torch.inference_mode():
            logits = model(ids, items).logits[0]
            without = model(ids, [one | {"pixel_values": -one["pixel_values"]} for one in items]).logits[0]
            logits[:, special] = -torch.inf
        assert logits[start:-1].argmax(-1).tolist() == answer
        assert float((without[start] - logits[start])[answer[0]].abs()) > 1e-3  # the images matter


def test_as_programs_ask_for_it(tmp_path: Path) -> None:
    """Two images at once, nothing cached, and no run of tokens twice."""
    write_model(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, skip_special_tokens=False,
                            extra_args=dict(ngram_size=1, window_size=90, whitelist_token_ids={3}))  # fmt: skip
    options: dict[str, Any] = dict(enable_prefix_caching=False, mm_processor_cache_gb=0)
    images = [picture(300, 140), picture(60, 90)]
    prompts = [{"prompt": "<image>\nFree OCR.", "multi_modal_data": {"image": image}} for image in images]
    with LLM(str(tmp_path), dtype="float32", max_model_len=512, logits_processors=[NGramPerReqLogitsProcessor],
             **options) as llm:  # fmt: skip
        answers = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
    assert all(len(set(answer) - {3}) == len([one for one in answer if one != 3]) for answer in answers)
    assert answers[0] != answers[1]
