"""Media given as the vectors that transformers' encoder makes of them, with the grids that their positions follow: the
words that transformers says of the items themselves, in steps of every size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.sched.gates import TokenBudget
from quire.schema.errors import InputError
from tests.media.test_joined import CASES, FURTHER, NUM, TONE, VISION, text, write_model
from tests.media.test_pixels_oracle import picture
from tests.media.tokens import SPECIAL
from tests.media_models import QWEN3_5

FRAMES = [picture(100, 40), picture(100, 40).rotate(180), picture(100, 40)]
ITEMS: dict[str, Any] = {"image": picture(50, 90), "video": FRAMES, "audio": TONE}
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 2, "enable_mm_embeds": True}


def qwen2_5_vl(vocab: Tokenizer) -> Any:
    """Positions of a video follow its seconds."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    return tf.Qwen2_5_VLConfig(
        vision_config=dict(depth=2, hidden_size=32, out_hidden_size=64, intermediate_size=48, num_heads=4,
                           patch_size=14, window_size=56, fullatt_block_indexes=[1], tokens_per_second=4),
        text_config=text(vocab, rope_parameters=rope), image_token_id=vocab.token_to_id("<|image_pad|>"),
        video_token_id=vocab.token_to_id("<|video_pad|>"), vision_start_token_id=vocab.token_to_id("<|vision_start|>"),
        vision_end_token_id=vocab.token_to_id("<|vision_end|>"), tie_word_embeddings=False,
    )  # fmt: skip


def paddle(vocab: Tokenizer) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    start, place, _ = map(vocab.token_to_id, PADDLE)
    return tf.PaddleOCRVLConfig(
        vision_config=dict(**VISION, image_size=56, patch_size=14), tie_word_embeddings=False,
        text_config=text(vocab, rope_parameters=rope, head_dim=16), image_token_id=place, vision_start_token_id=start,
        video_token_id=vocab.token_to_id("<|video_pad|>"),
    )  # fmt: skip


def qwen3_5(vocab: Tokenizer) -> Any:
    return tf.Qwen3_5Config(
        vision_config=dict(depth=2, hidden_size=32, out_hidden_size=64, intermediate_size=48, num_heads=4,
                           patch_size=14, num_position_embeddings=64),
        text_config=QWEN3_5 | text(vocab, num_hidden_layers=3), image_token_id=vocab.token_to_id("<|image_pad|>"),
        video_token_id=vocab.token_to_id("<|video_pad|>"), vision_start_token_id=vocab.token_to_id("<|vision_start|>"),
        vision_end_token_id=vocab.token_to_id("<|vision_end|>"), tie_word_embeddings=False,
    )  # fmt: skip


def video_llama3(vocab: Tokenizer) -> Any:
    return tf.VideoLlama3Config(
        vision_config=dict(**VISION, patch_size=14), text_config=tf.Qwen2Config(**text(vocab)),
        image_token_id=vocab.token_to_id("<|image_pad|>"), video_token_id=vocab.token_to_id("<|video_pad|>"),
    )  # fmt: skip


PADDLE = ("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>")


@pytest.fixture(autouse=True, scope="module")
def further_cases() -> Any:
    own = {
        "qwen2.5 vl": (qwen2_5_vl, "Qwen2_5_VLForConditionalGeneration", *CASES["qwen2 vl"][2:]),
        "qwen2.5 vl, video": (qwen2_5_vl, "Qwen2_5_VLForConditionalGeneration", *CASES["qwen2 vl, video"][2:]),
        "paddleocr vl": (paddle, "PaddleOCRVLForConditionalGeneration", *CASES["qwen2 vl"][2:4], "".join(PADDLE)),
        "qwen3.5": (qwen3_5, "Qwen3_5ForConditionalGeneration", *CASES["qwen3 vl, video"][2:4],
                    "<|vision_start|><|image_pad|><|vision_end|>"),
        "videollama 3": (video_llama3, "VideoLlama3ForConditionalGeneration", {},
                         CASES["qwen2 vl"][3] | {"merge_size": 2}, "<|image_pad|>"),
        "qwen3 vl": (*CASES["qwen3 vl, video"][:4], "<|vision_start|><|image_pad|><|vision_end|>"),
    }  # fmt: skip
    CASES.update(own)
    FURTHER["paddleocr vl"] = PADDLE
    yield
    del FURTHER["paddleocr vl"]
    for name in own:
        del CASES[name]


def sharpen(model: Any) -> None:
    """Random weights are so small that it would hardly matter where vectors stand, or what they are."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(8)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.add_(2)
            elif name.endswith(("v_proj.weight", "o_proj.weight")) or ("visual" in name and weight.ndim > 1):
                weight.mul_(3)


class Given:
    """A model, one item of it, and what transformers makes of that."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.model, self.modality = (
            write_model(name, folder),
            {"video": "video", "audio": "audio"}.get(name.split()[-1], "image"),
        )
        sharpen(self.model)
        self.model.save_pretrained(folder)
        self.vocab = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.special = [self.vocab.token_to_id(one) for one in SPECIAL]
        self.params = SamplingParams(
            temperature=0, max_tokens=NUM, ignore_eos=True, logprobs=1, logit_bias=dict.fromkeys(self.special, -100.0)
        )
        self.text = f"USER: {CASES[name][-1]}\nWhat is shown? Describe the image, then the next."
        self.llm = LLM(str(folder), **ENGINE)

    def ask(self, value: Any, words: str = "", **more: Any) -> Any:
        prompt = {"prompt": words or self.text, "multi_modal_data": {self.modality: value}, **more}
        (output,) = self.llm.generate(prompt, self.params, use_tqdm=False)
        return output

    def arrays(self) -> dict[str, torch.Tensor]:
        media = self.llm.llm_engine.front.inputs.media
        (one,) = media.loaded(media.load({self.modality: ITEMS[self.modality]})).items[self.modality]
        return {key: torch.from_numpy(np.array(array)) for key, array in one.item.arrays.items()}

    def vectors(self, arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        encode = getattr(self.model.model, f"get_{self.modality}_features")
        with torch.no_grad():
            made = encode(**{name: array for name, array in arrays.items() if name != "second_per_grid_ts"})
        parts = [made.pooler_output, *(getattr(made, "deepstack_features", None) or ())]
        return torch.cat([torch.cat(list(one)) if isinstance(one, (list, tuple)) else one for one in parts], -1)

    def expected(self, ids: list[int], arrays: dict[str, torch.Tensor]) -> list[int]:
        """What transformers answers."""
        prompt = torch.tensor([ids])
        is_media = torch.zeros_like(prompt, dtype=torch.bool)
        for token in (f"<|{self.modality}_pad|>", "<|image|>", PADDLE[1]):
            is_media |= prompt == (self.vocab.token_to_id(token) or -1)
        kind = type(self.model).__name__
        inputs = (
            dict(arrays)
            if "VideoLlama3" in kind
            else arrays | {"mm_token_type_ids": is_media.long() * (2 if self.modality == "video" else 1)}
        )
        if "Qwen2_5" not in kind:
            inputs.pop("second_per_grid_ts", None)
        with torch.no_grad():
            made = self.model.generate(
                prompt, **inputs, max_new_tokens=NUM, min_new_tokens=NUM, do_sample=False, suppress_tokens=self.special
            )
        answer: list[int] = made[0, len(ids) :].tolist()
        return answer

    def in_steps_of(self, size: int) -> None:
        loop: Any = self.llm.llm_engine.front.client.loop
        budget = next(gate for gate in loop.scheduler.planner.gates if isinstance(gate, TokenBudget))
        budget.most = size
        self.llm.reset_prefix_cache()


def apart(one: Any, other: Any) -> float:
    """The farthest that log probabilities of two answers are from each other."""
    ids, logprobs = (list(one.outputs[0].token_ids), [one.outputs[0].logprobs, other.outputs[0].logprobs])
    if ids != list(other.outputs[0].token_ids):
        return math.inf
    pairs = zip(ids, *logprobs, strict=True)
    return max(abs(float(ours[token].logprob) - float(theirs[token].logprob)) for token, ours, theirs in pairs)


def timed(given: Given, arrays: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What stands beside the vectors of an item: its grid, and of a video its times."""
    beside: dict[str, Any] = {name: arrays[name] for name in arrays if name.endswith("grid_thw")}
    if "second_per_grid_ts" in arrays and "Qwen2_5" in type(given.model).__name__:
        beside["second_per_grid_ts"] = arrays["second_per_grid_ts"]
    if given.modality == "video" and "Qwen2" not in type(given.model).__name__:
        # three frames at 24 a second, two and two; the last one stands for a fourth
        is_glm = "Glm" in type(given.model).__name__
        beside["timestamps"] = [0 / 24, 2 / 24] if is_glm else [(0 + 1) / 48, (2 + 2) / 48]
    return beside


GRIDS = ("qwen2 vl", "qwen2 vl, video", "qwen2.5 vl", "qwen2.5 vl, video", "qwen3 vl", "qwen3 vl, video", "glm 4.1v",
         "glm 4.1v, video", "qwen3.5", "paddleocr vl", "videollama 3")  # fmt: skip


@pytest.mark.parametrize("name", GRIDS)
def test_vectors_with_their_grid_say_what_the_item_says(name: str, tmp_path: Path) -> None:
    given = Given(name, tmp_path)
    with given.llm:
        arrays = given.arrays()
        vectors, beside, kind = given.vectors(arrays), timed(given, arrays), f"{given.modality}_embeds"
        shown = given.ask(ITEMS[given.modality])
        expected = given.expected(shown.prompt_token_ids, arrays)
        assert list(shown.outputs[0].token_ids) == expected
        for size in (2048, 7, 1):
            given.in_steps_of(size)
            output = given.ask({kind: vectors, **beside})
            assert output.prompt_token_ids == shown.prompt_token_ids
            assert list(output.outputs[0].token_ids) == expected, f"in steps of {size}"
            assert apart(output, shown) < 1e-4
        given.in_steps_of(2048)
        grid = next(one for one in beside if one.endswith("grid_thw"))
        turned = beside | {grid: beside[grid][:, [0, 2, 1]]}
        distance = apart(given.ask({kind: vectors, **turned}), shown)
        assert distance < 1e-4 if name == "videollama 3" else distance > 1e-3  # its language model knows no grids
        assert apart(given.ask({kind: vectors, **beside}), shown) < 1e-4  # nothing of the other grid's prefix is taken
        again = given.ask({kind: vectors, **beside})
        assert apart(again, shown) < 1e-4 and (again.num_cached_tokens or name == "qwen3.5")
        if "second_per_grid_ts" in beside:
            later = beside | {"second_per_grid_ts": 20.0}
            assert apart(given.ask({kind: vectors, **later}), shown) > 1e-3
        assert apart(given.ask({kind: -vectors, **beside}), shown) > 1e-3


def merged(given: Given, ids: list[int], arrays: dict[str, torch.Tensor]) -> torch.Tensor:
    """What transformers' language model gets in place of the item."""
    seen: list[torch.Tensor] = []
    inner = getattr(given.model, "model", None)
    language = given.model.language_model.model if inner is None else getattr(inner, "language_model", None)
    hook = (language or inner.text_model).register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    prompt, family = torch.tensor([ids]), given.llm.llm_engine.front.inputs.media.family
    is_media = prompt[0] == given.vocab.token_to_id(family.feature(given.modality))
    inputs = dict(arrays)
    if "MiniCPMV4_7" in type(given.model).__name__:
        inputs["mm_token_type_ids"] = is_media[None].long() * (2 if given.modality == "video" else 1)
    elif "Gemma" in type(given.model).__name__:
        inputs["token_type_ids"] = is_media[None].long()
    with torch.no_grad():
        given.model(prompt, **inputs)
    hook.remove()
    return seen[0][0, is_media]


COUNTED = (
    "llava next", "llava next video, video", "video llava", "llava onevision", "internvl", "internvl, video",
    "paligemma", "gemma 3", "perception lm", "perception lm, video", "cohere2 vision", "qwen2 audio",
)  # fmt: skip
SIZED = (
    "idefics3", "mistral 3", "llama 4", "lfm2 vl", "minicpm-v 4.6", "minicpm-v 4.6, video", "minicpm-v 4.7",
    "minicpm-v 4.7, video", "minicpm-ocr",
)  # fmt: skip


@pytest.mark.parametrize("name", (*COUNTED, *SIZED))
def test_vectors_alone_or_with_the_size_of_the_image(name: str, tmp_path: Path) -> None:
    given = Given(name, tmp_path)
    with given.llm:
        arrays, item, kind = given.arrays(), ITEMS[given.modality], f"{given.modality}_embeds"
        shown = given.ask(item)
        vectors = merged(given, shown.prompt_token_ids, arrays)
        forms: list[Any] = [{kind: vectors}, [vectors], vectors[None]]
        if name in SIZED:
            beside = "image_sizes" if given.modality == "image" else "video_image_sizes"
            size = item.size if given.modality == "image" else [frame.size for frame in item]
            forms = [{kind: vectors, beside: sizes} for sizes in (size, [size], torch.tensor([size]))]
        for size, value in zip((2048, 7, 2048), forms, strict=True):
            given.in_steps_of(max(size, 64) if name in ("gemma 3", "paligemma") else size)
            output = given.ask(value)
            assert output.prompt_token_ids == shown.prompt_token_ids
            assert output.outputs[0].token_ids == shown.outputs[0].token_ids
            assert apart(output, shown) < 1e-4
        other = {**forms[0], kind: -vectors}
        assert apart(given.ask(other), shown) > 1e-3
        if name in SIZED:
            with pytest.raises(InputError, match=f"{kind} has {len(vectors)} vectors, and an item with {beside}"):
                given.ask({kind: vectors, beside: [(90, 500)]})
            with pytest.raises(InputError, match=f"embeddings of this model come with {beside}"):
                given.ask({kind: vectors})


@pytest.mark.parametrize("without", [{"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0, "video": 0}}])
def test_without_an_encoder(without: dict[str, Any], tmp_path: Path) -> None:
    """Of a checkpoint that has none: embeddings are taken, and stand where they should; pixels are refused."""
    given = Given("qwen2.5 vl", tmp_path)
    with given.llm:
        arrays = given.arrays()
        shown = given.ask(ITEMS["image"])
        fields = {"image_embeds": given.vectors(arrays), "image_grid_thw": arrays["image_grid_thw"]}
    file = tmp_path / "model.safetensors"
    save_file({name: one for name, one in load_file(file).items() if "visual" not in name}, file, {"format": "pt"})
    with LLM(str(tmp_path), **ENGINE, **without) as given.llm:
        output = given.ask(fields)
        assert output.outputs[0].token_ids == shown.outputs[0].token_ids
        assert apart(output, shown) < 1e-4
        given.in_steps_of(3)
        assert given.ask(fields).outputs[0].token_ids == shown.outputs[0].token_ids
        named = {"multi_modal_uuids": {"image": ["a"]}}
        assert given.ask(fields, **named).outputs[0].token_ids == shown.outputs[0].token_ids
        assert given.ask(None, **named).outputs[0].token_ids == shown.outputs[0].token_ids
        for value in (ITEMS["image"], [fields, ITEMS["image"]]):
            with pytest.raises(InputError, match=r"At most 0 image\(s\) may be provided"):
                given.ask(value)
        assert len(given.ask([fields, fields], "<|image_pad|> and <|image_pad|>").outputs[0].token_ids) == NUM
