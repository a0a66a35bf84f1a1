"""Images of DeepSeek-VL2 beside Pillow's own padding and torch's arithmetic, as the released processor calls them:
equal to the last bit. And both ends together: pictures through LLM.generate, beside the model in plain torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.media.families import family_name, make_family
from quire.media.families.base import Family
from quire.media.settings import ProcessorFiles
from tests import deepseek_vl2
from tests.media.test_pixels_oracle import SIZES, picture
from tests.media.tokens import SPECIAL, write_tokenizer

SIDE = 56
CHOICES = [[wide * SIDE, tall * SIDE] for wide in range(1, 6) for tall in range(1, 6) if wide * tall <= 5]
PROCESSOR: dict[str, Any] = {
    "add_special_token": False, "candidate_resolutions": CHOICES, "downsample_ratio": 2, "ignore_id": -100,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "image_token": "<image>", "mask_prompt": False,
    "normalize": True, "pad_token": "<pad>", "patch_size": 14, "processor_class": "DeepseekVLV2Processor",
    "sft_format": "deepseek",
}  # fmt: skip


def family_of(**over: Any) -> Family:
    files = ProcessorFiles(config={"architectures": ["DeepseekVLV2ForCausalLM"]}, processor=PROCESSOR | over)
    name = family_name(files)
    assert name == "DeepseekVLV2Processor"
    return make_family(name, files)


def views(image: Image.Image, count: int, mean: list[float], std: list[float]) -> tuple[torch.Tensor, list[int]]:
    """The released processor's, with Pillow: normalised pictures, and (columns, rows)."""

    def kept(choice: list[int]) -> tuple[int, int]:
        scale = min(choice[0] / image.width, choice[1] / image.height)
        pixels = int(image.width * scale) * int(image.height * scale)
        used = min(pixels, image.width * image.height)
        return used, -(choice[0] * choice[1] - used)

    wide, tall = max(CHOICES, key=kept) if count <= 2 else [SIDE, SIDE]
    grey = tuple(int(one * 255) for one in mean)
    large = ImageOps.pad(image, (wide, tall), color=grey)
    boxes = [(left, top, left + SIDE, top + SIDE) for top in range(0, tall, SIDE) for left in range(0, wide, SIDE)]
    parts = [ImageOps.pad(image, (SIDE, SIDE), color=grey), *(large.crop(box) for box in boxes)]
    numbers = torch.stack([torch.from_numpy(np.array(part)).permute(2, 0, 1).float().div(255) for part in parts])
    scaled = (numbers - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    return scaled, [wide // SIDE, tall // SIDE]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize(("mean", "std"), [([0.5] * 3, [0.5] * 3), ([0.48, 0.45, 0.4], [0.26, 0.25, 0.27])])
def test_pixels_equal_pillow_and_torch(count: int, mean: list[float], std: list[float]) -> None:
    family, grids = family_of(image_mean=mean, image_std=std), set[tuple[int, ...]]()
    for width, height in (*SIZES, (57, 112), (113, 56), (4, 400), (100, 1)):
        ours = family.process("image", picture(width, height), {}, count)
        expected, grid = views(picture(width, height), count, mean, std)
        assert ours.arrays["images_spatial_crop"].tolist() == [grid]
        assert np.array_equal(ours.arrays["pixel_values"], expected.numpy())
        grids.add(tuple(grid))
        side = math.ceil((SIDE // 14) / 2)
        tokens = side * (side + 1) + 1 + (grid[1] * side) * (grid[0] * side + 1)
        assert ours.num_vectors == tokens and ours.text == "<image>" * tokens
    assert len(grids) >= 4 if count <= 2 else grids == {(1, 1)}


def test_released_sizes() -> None:
    """27 patches along a side make 14 squares."""
    choices = [[wide * 384, tall * 384] for wide in range(1, 10) for tall in range(1, 10) if wide * tall <= 9]
    for family in (family_of(candidate_resolutions=choices), make_family("DeepseekVLV2Processor", ProcessorFiles())):
        item = family.process("image", picture(800, 600), {}, 1)
        assert item.arrays["images_spatial_crop"].tolist() == [[3, 2]]  # 800x600 pixels fit into 1152x768
        assert item.num_vectors == 14 * 15 + 1 + 28 * 43
        assert item.arrays["pixel_values"].shape == (7, 3, 384, 384)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_words_equal_the_model_in_torch(count: int, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    vocab = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw = deepseek_vl2.config("small")
    raw["language_config"]["vocab_size"] = vocab.get_vocab_size()
    torch.manual_seed(4)
    model = deepseek_vl2.Oracle(raw).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.2) if weight.ndim > 1 else None
    model.image_token = vocab.token_to_id("<image>")
    model.save_pretrained(tmp_path)
    sides = [[wide * 28, tall * 28] for wide, tall in ((1, 1), (2, 1), (1, 2), (2, 2))]
    own = PROCESSOR | {"candidate_resolutions": sides, "patch_size": deepseek_vl2.PATCH}
    (tmp_path / "processor_config.json").write_text(json.dumps(own))
    images = [picture(20, 90), picture(90, 20), picture(30, 30)][:count]
    special = [vocab.token_to_id(one) for one in SPECIAL]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True,
                            logit_bias=dict.fromkeys(special, -100.0))  # fmt: skip
    user = [*[{"type": "image_pil", "image_pil": image} for image in images], {"type": "text", "text": "What? "}]
    with LLM(str(tmp_path), dtype="float32", max_model_len=512, max_num_seqs=2) as llm:
        (chat,) = llm.chat([{"role": "user", "content": user}], params, use_tqdm=False)
        text = "<image>\n".join(["What is ", *["and "] * (count - 1), "shown?"])
        prompt = {"prompt": text, "multi_modal_data": {"image": images}}
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        media = llm.llm_engine.front.inputs.media
        arrays = [one.item.arrays for one in media.loaded(media.load({"image": images})).items["image"]]
        alone = media.loaded(media.load({"image": images[:1]})).items["image"][0].item.arrays
    ends = vocab.encode("\nWhat?\n\n<|Assistant|>:", add_special_tokens=False).ids
    assert chat.prompt_token_ids[0] == vocab.token_to_id("<s>") and chat.prompt_token_ids[-len(ends) :] == ends
    assert chat.prompt_token_ids.count(model.image_token) == output.prompt_token_ids.count(model.image_token)
    grids = [one["images_spatial_crop"].tolist()[0] for one in arrays]
    assert grids == [[1, 2], [2, 1]][:count] if count < 3 else grids == [[1, 1]] * 3
    assert np.array(alone["images_spatial_crop"]).tolist() == [[1, 2]]  # kept apart from that of a prompt of three
    names = ("pixel_values", "images_spatial_crop")
    inputs = {name: torch.cat([torch.from_numpy(np.array(one[name])) for one in arrays]) for name in names}
    answer = list(output.outputs[0].token_ids)
    with torch.inference_mode():
        ids = torch.tensor([[*output.prompt_token_ids, *answer]])
        logits = model(ids, **inputs).logits[0]
        other = model(ids, **inputs | {"pixel_values": -inputs["pixel_values"]}).logits[0]
        logits[:, special] = -torch.inf
    start = len(output.prompt_token_ids) - 1
    assert logits[start:-1].argmax(-1).tolist() == answer
    assert float((other[start] - logits[start])[answer[0]].abs()) > 1e-3  # the images matter
