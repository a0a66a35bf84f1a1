"""Both ends together: an item through LLM.generate, its arrays and ids through transformers' model: the same words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from tests.media.test_pixels_oracle import picture
from tests.media.tokens import write_tokenizer

NUM = 6
VISION: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def text(vocab: Tokenizer, **over: Any) -> dict[str, Any]:
    return dict(
        vocab_size=vocab.get_vocab_size(), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    ) | over  # fmt: skip


def llava_next(vocab: Tokenizer) -> Any:
    return tf.LlavaNextConfig(
        vision_config=tf.CLIPVisionConfig(**VISION, image_size=28, patch_size=7, projection_dim=32),
        text_config=tf.LlamaConfig(**text(vocab)), image_token_index=vocab.token_to_id("<image>"),
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
    )  # fmt: skip


def llava_onevision(vocab: Tokenizer) -> Any:
    return tf.LlavaOnevisionConfig(
        vision_config=tf.SiglipVisionConfig(**VISION, image_size=28, patch_size=7),
        text_config=tf.Qwen2Config(**text(vocab)), image_token_index=vocab.token_to_id("<image>"),
        video_token_index=vocab.token_to_id("<video>"), image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip


def qwen2_vl(vocab: Tokenizer) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    return tf.Qwen2VLConfig(
        vision_config=dict(depth=2, embed_dim=32, hidden_size=64, num_heads=4, patch_size=14, mlp_ratio=2),
        text_config=text(vocab, rope_parameters=rope), image_token_id=vocab.token_to_id("<|image_pad|>"),
        video_token_id=vocab.token_to_id("<|video_pad|>"), vision_start_token_id=vocab.token_to_id("<|vision_start|>"),
        vision_end_token_id=vocab.token_to_id("<|vision_end|>"), tie_word_embeddings=False,
    )  # fmt: skip


def idefics3(vocab: Tokenizer) -> Any:
    return tf.Idefics3Config(
        vision_config=dict(**VISION, image_size=32, patch_size=8), scale_factor=2, tie_word_embeddings=False,
        text_config=tf.LlamaConfig(**text(vocab)), image_token_id=vocab.token_to_id("<image>"), pad_token_id=0,
    )  # fmt: skip


def internvl(vocab: Tokenizer) -> Any:
    return tf.InternVLConfig(
        vision_config=dict(**VISION, image_size=[28, 28], patch_size=[7, 7]), downsample_ratio=0.5,
        text_config=tf.Qwen2Config(**text(vocab)), image_token_id=vocab.token_to_id("<IMG_CONTEXT>"),
    )  # fmt: skip


def mistral3(vocab: Tokenizer) -> Any:
    return tf.Mistral3Config(
        vision_config=tf.PixtralVisionConfig(**VISION, head_dim=8, image_size=56, patch_size=7),
        text_config=tf.MistralConfig(**text(vocab), sliding_window=None), image_token_index=vocab.token_to_id("[IMG]"),
        spatial_merge_size=2, vision_feature_layer=-1,
    )  # fmt: skip


PIXELS = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
# configuration, class, processor's own settings, settings of the image processor, what a template writes for an item
CASES: dict[str, tuple[Callable[[Tokenizer], Any], str, dict[str, Any], dict[str, Any], str]] = {
    "llava next": (
        llava_next, "LlavaNextForConditionalGeneration", {"num_additional_image_tokens": 1},
        {**PIXELS, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}, "<image>",
    ),
    "llava onevision": (llava_onevision, "LlavaOnevisionForConditionalGeneration", {}, {}, "<image>"),
    "qwen2 vl": (
        qwen2_vl, "Qwen2VLForConditionalGeneration", {}, {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 8},
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "idefics3": (idefics3, "Idefics3ForConditionalGeneration", {}, {"size": {"longest_edge": 64}}, "<image>"),
    "internvl": (internvl, "InternVLForConditionalGeneration", {}, {"max_patches": 3}, "<IMG_CONTEXT>"),
    "mistral 3": (
        mistral3, "Mistral3ForConditionalGeneration", {"spatial_merge_size": 2, "patch_size": 7}, {}, "[IMG]",
    ),
}  # fmt: skip


def qwen2_audio(vocab: Tokenizer) -> Any:
    audio = dict(d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48, num_mel_bins=16)
    return tf.Qwen2AudioConfig(
        audio_config=dict(**audio, max_source_positions=100), text_config=tf.Qwen2Config(**text(vocab)),
        audio_token_index=vocab.token_to_id("<|AUDIO|>"),
    )  # fmt: skip


FRAMES = [picture(40, 30), picture(40, 30).rotate(90), picture(40, 30).rotate(180)]
TONE = np.sin(np.arange(16000) / 7).astype(np.float32), 16000
ITEMS: dict[str, Any] = {"image": picture(50, 90), "video": FRAMES, "audio": TONE}
CASES["qwen2 vl, video"] = (
    *CASES["qwen2 vl"][:3], {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 8},
    "<|vision_start|><|video_pad|><|vision_end|>",
)  # fmt: skip
CASES["qwen2 audio"] = (
    qwen2_audio, "Qwen2AudioForConditionalGeneration", {}, {"feature_size": 16, "chunk_length": 2},
    "<|audio_bos|><|AUDIO|><|audio_eos|>",
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_words_equal_transformers(name: str, tmp_path: Path) -> None:
    configure, cls, own, settings, token = CASES[name]
    modality = {"video": "video", "audio": "audio"}.get(name.split()[-1], "image")
    write_tokenizer(tmp_path)
    vocab = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(3)
    model = getattr(tf, cls)(configure(vocab)).eval().float()
    model.save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"patch_size": None, **own}))
    for kind in ("preprocessor", "video_preprocessor"):
        (tmp_path / f"{kind}_config.json").write_text(json.dumps(settings))
    item = ITEMS[modality]
    special = [vocab.token_to_id(one) for one in ("<image>", "<video>", "<|image_pad|>", "<|video_pad|>", "[IMG]",
                                                  "<IMG_CONTEXT>", "<|vision_start|>", "<|AUDIO|>")]  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True, logprobs=1,
                            logit_bias=dict.fromkeys(special, -100.0))  # fmt: skip
    with LLM(str(tmp_path), dtype="float32", max_model_len=512, max_num_seqs=2) as llm:
        prompt = {"prompt": f"USER: {token}\nWhat is shown?", "multi_modal_data": {modality: item}}
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        media = llm.llm_engine.front.inputs.media
        arrays = media.loaded(media.load({modality: item})).items[modality][0].item.arrays
        assert media.cache.hits
    known = {key: torch.from_numpy(np.array(array)) for key, array in arrays.items()}
    ids = torch.tensor([output.prompt_token_ids])
    if cls == "Qwen2VLForConditionalGeneration":
        types = [(ids == vocab.token_to_id(f"<|{kind}_pad|>")).long() for kind in ("image", "video")]
        known["mm_token_type_ids"] = types[0] + 2 * types[1]
        known.pop("second_per_grid_ts", None)

    def answered(inputs: dict[str, Any]) -> tuple[list[int], float]:
        """The answer, and the log probability of its first token before any bias."""
        with torch.no_grad():
            made = model.generate(
                ids, **inputs, max_new_tokens=NUM, min_new_tokens=NUM, do_sample=False, suppress_tokens=special,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        tokens = made.sequences[0, ids.shape[1] :].tolist()
        return tokens, float(made.logits[0][0].log_softmax(-1)[output.outputs[0].token_ids[0]])

    expected, logprob = answered(known)
    ours = output.outputs[0]
    assert ours.token_ids == expected
    assert ours.logprobs[0][expected[0]].logprob == pytest.approx(logprob, abs=1e-4)
    other = {key: -one if one.is_floating_point() else one for key, one in known.items()}
    assert abs(answered(other)[1] - logprob) > 1e-3  # the item matters
