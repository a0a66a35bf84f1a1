"""Both ends together: an item through LLM.generate, its arrays and ids through transformers' model: the same words."""

from __future__ import annotations

import base64
import io
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
from quire.schema.errors import InputError
from tests.media.test_pixels_oracle import picture
from tests.media.tokens import CANVAS, MOLMO, SPECIAL, write_tokenizer
from tests.media_models import QWEN3_5, as_phi4mm, without_timm
from tests.server.live import live

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


def gemma3(vocab: Tokenizer) -> Any:
    return tf.Gemma3Config(
        vision_config=tf.SiglipVisionConfig(**VISION, image_size=28, patch_size=7), mm_tokens_per_image=4,
        text_config=tf.Gemma3TextConfig(**text(vocab), head_dim=16, sliding_window=16),
        image_token_id=vocab.token_to_id("<image_soft_token>"), tie_word_embeddings=False,
    )  # fmt: skip


def paligemma(vocab: Tokenizer) -> Any:
    return tf.PaliGemmaConfig(
        vision_config=tf.SiglipVisionConfig(**VISION, image_size=28, patch_size=7, projection_dim=64),
        text_config=tf.GemmaConfig(**text(vocab), head_dim=16), image_token_index=vocab.token_to_id("<image>"),
        projection_dim=64, tie_word_embeddings=False,
    )  # fmt: skip


def glm4v(vocab: Tokenizer) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}
    return tf.Glm4vConfig(
        vision_config=dict(depth=2, hidden_size=32, out_hidden_size=64, intermediate_size=48, num_heads=4,
                           patch_size=14, image_size=56),
        text_config=text(vocab, rope_parameters=rope), tie_word_embeddings=False,
        image_token_id=vocab.token_to_id("<|image|>"), video_token_id=vocab.token_to_id("<|video|>"),
    )  # fmt: skip


def qwen3_vl(vocab: Tokenizer) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    return tf.Qwen3VLConfig(
        vision_config=dict(depth=2, hidden_size=32, out_hidden_size=64, intermediate_size=48, num_heads=4,
                           patch_size=14, num_position_embeddings=16, deepstack_visual_indexes=[0]),
        text_config=text(vocab, rope_parameters=rope, head_dim=16), image_token_id=vocab.token_to_id("<|image_pad|>"),
        video_token_id=vocab.token_to_id("<|video_pad|>"), vision_start_token_id=vocab.token_to_id("<|vision_start|>"),
        vision_end_token_id=vocab.token_to_id("<|vision_end|>"), tie_word_embeddings=False,
    )  # fmt: skip


def ovis2(vocab: Tokenizer) -> Any:
    marks = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
    return tf.Ovis2Config(
        vision_config=dict(**VISION, image_size=28, patch_size=7, hidden_stride=2, vocab_size=40),
        text_config=tf.Qwen2Config(**text(vocab)), image_token_id=vocab.token_to_id("<IMG_ATOM>"), hidden_size=64,
        visual_indicator_token_ids=[vocab.token_to_id(mark) for mark in marks], vocab_size=vocab.get_vocab_size(),
    )  # fmt: skip


def perception_lm(vocab: Tokenizer) -> Any:
    """Released ones see through an encoder of timm, which needs torchvision."""
    vision = tf.CLIPVisionConfig(
        **VISION, image_size=28, patch_size=7, projection_dim=32, model_args={"embed_dim": 32, "patch_size": 7}
    )
    return tf.PerceptionLMConfig(
        vision_config=vision, text_config=tf.LlamaConfig(**text(vocab)), projector_pooling_ratio=2,
        image_token_id=vocab.token_to_id("<|image|>"), video_token_id=vocab.token_to_id("<|video|>"),
    )  # fmt: skip


def phi_4(vocab: Tokenizer, image: str = "<|image|>", sound: str = "<|audio|>") -> Any:
    vision = dict(**VISION, image_size=28, crop_size=28, patch_size=7, image_token_id=vocab.token_to_id(image))
    audio = dict(
        hidden_size=32, intermediate_size=48, num_blocks=2, num_attention_heads=4, ext_pw_out_channel=32,
        depthwise_separable_out_channel=32, input_size=16, nemo_conv_channels=8, bias_max_distance=20,
        audio_token_id=vocab.token_to_id(sound),
    )  # fmt: skip
    return tf.Phi4MultimodalConfig(**text(vocab), vision_config=vision, audio_config=audio)


def gemma3n(vocab: Tokenizer) -> Any:
    num = vocab.get_vocab_size()
    return tf.Gemma3nConfig(
        vision_config=tf.Gemma3nVisionConfig(
            model_args={"channel_multiplier": 0.0625, "msfa_output_resolution": 2}, vocab_offset=num - 40, vocab_size=30
        ),
        audio_config=tf.Gemma3nAudioConfig(
            hidden_size=32, conf_num_attention_heads=4, conf_num_hidden_layers=1, vocab_offset=num - 10, vocab_size=10,
            input_feat_size=16, sscp_conv_channel_size=(8, 4),
        ),
        text_config=tf.Gemma3nTextConfig(
            **text(vocab), head_dim=16, sliding_window=16, laurel_rank=4, hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=num - 40, num_kv_shared_layers=0,
        ),
        image_token_id=vocab.token_to_id("<image_soft_token>"), audio_token_id=vocab.token_to_id("<audio_soft_token>"),
        vision_soft_tokens_per_image=4, audio_soft_tokens_per_image=9,
    )  # fmt: skip


def molmo2(vocab: Tokenizer) -> Any:
    heads = dict(num_attention_heads=4, num_key_value_heads=4, head_dim=8, initializer_range=0.2)
    start, end, patch, _, low, _, frame, frame_end = (vocab.token_to_id(token) for token in MOLMO)
    return tf.Molmo2Config(
        vision_config=VISION | heads | dict(image_size=[28, 28], patch_size=7),
        adapter_config=heads | dict(hidden_size=32, intermediate_size=48, text_hidden_size=64,
                                    vision_feature_layer=[1, 0]),
        text_config=text(vocab) | dict(vocab_size=start, additional_vocab_size=len(MOLMO), head_dim=16,
                                       initializer_range=0.2),
        image_start_token_id=start, image_end_token_id=end, image_patch_id=patch, low_res_image_start_token_id=low,
        frame_start_token_id=frame, frame_end_token_id=frame_end, initializer_range=0.2,
    )  # fmt: skip


def llava_next_video(vocab: Tokenizer) -> Any:
    return tf.LlavaNextVideoConfig(
        vision_config=tf.CLIPVisionConfig(**VISION, image_size=28, patch_size=7, projection_dim=32),
        text_config=tf.LlamaConfig(**text(vocab)), image_token_index=vocab.token_to_id("<image>"),
        video_token_index=vocab.token_to_id("<video>"), image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
    )  # fmt: skip


def video_llava(vocab: Tokenizer) -> Any:
    return tf.VideoLlavaConfig(
        vision_config=tf.CLIPVisionConfig(**VISION, image_size=28, patch_size=7, projection_dim=32),
        text_config=tf.LlamaConfig(**text(vocab)), image_token_index=vocab.token_to_id("<image>"),
        video_token_index=vocab.token_to_id("<video>"),
    )  # fmt: skip


def llama4(vocab: Tokenizer) -> Any:
    return tf.Llama4Config(
        vision_config=tf.Llama4VisionConfig(
            **VISION | dict(intermediate_size=128), image_size=28, patch_size=7, vision_output_dim=64,
            projector_input_dim=64, projector_output_dim=64, pixel_shuffle_ratio=0.5),
        text_config=tf.Llama4TextConfig(**text(vocab), intermediate_size_mlp=96, head_dim=16, num_local_experts=4),
        image_token_index=vocab.token_to_id("<|patch|>"), tie_word_embeddings=False,
    )  # fmt: skip


def cohere2_vision(vocab: Tokenizer) -> Any:
    """Without a scale of logits: transformers has it in the class of the language model alone."""
    return tf.Cohere2VisionConfig(
        vision_config=tf.SiglipVisionConfig(**VISION, image_size=28, patch_size=7), alignment_intermediate_size=64,
        text_config=tf.Cohere2Config(**text(vocab), sliding_window=16, head_dim=16, logit_scale=1.0),
        image_token_id=vocab.token_to_id("<|IMG_PATCH|>"),
    )  # fmt: skip


def lfm2_vl(vocab: Tokenizer) -> Any:
    return tf.Lfm2VlConfig(
        vision_config=tf.Siglip2VisionConfig(**VISION, num_patches=16, patch_size=7), projector_hidden_size=48,
        text_config=tf.Lfm2Config(**text(vocab), full_attn_idxs=[1], block_auto_adjust_ff_dim=False),
        image_token_id=vocab.token_to_id("<image>"),
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
    "gemma 3": (gemma3, "Gemma3ForConditionalGeneration", {"image_seq_length": 4}, {}, "<start_of_image>"),
    "paligemma": (paligemma, "PaliGemmaForConditionalGeneration", {}, {}, "<image>"),
    "glm 4.1v": (
        glm4v, "Glm4vForConditionalGeneration", {}, {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}},
        "<|begin_of_image|><|image|><|end_of_image|>",
    ),
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
CASES["glm 4.1v, video"] = (*CASES["glm 4.1v"][:4], "<|begin_of_video|><|video|><|end_of_video|>")
CASES["qwen3 vl, video"] = (
    qwen3_vl, "Qwen3VLForConditionalGeneration", {},
    {"patch_size": 14, "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}}, "<|video_pad|>",
)  # fmt: skip
CASES["internvl, video"] = (*CASES["internvl"][:4], "<video>")
CASES["qwen2 audio"] = (
    qwen2_audio, "Qwen2AudioForConditionalGeneration", {}, {"feature_size": 16, "chunk_length": 2},
    "<|audio_bos|><|AUDIO|><|audio_eos|>",
)  # fmt: skip


CASES["ovis2"] = (
    ovis2, "Ovis2ForConditionalGeneration", {"image_seq_length": 4},
    {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "max_patches": 4}, "<image>",
)  # fmt: skip
PERCEPTION = {"patch_size": 7, "tile_size": 28, "max_num_tiles": 4, "size": {"height": 28, "width": 28}}
CASES["perception lm"] = (
    perception_lm, "PerceptionLMForConditionalGeneration", {"patch_size": 7, "pooling_ratio": 2}, PERCEPTION,
    "<|image|>",
)  # fmt: skip
CASES["perception lm, video"] = (*CASES["perception lm"][:4], "<|video|>")
PHI_4 = {"size": {"height": 28, "width": 28}, "patch_size": 7, "dynamic_hd": 4, "feature_size": 16}
CASES["phi 4"] = (phi_4, "Phi4MultimodalForCausalLM", {}, PHI_4, "<|image|>")
MOLMO_2 = {"size": {"height": 28, "width": 28}, "patch_size": 7, "overlap_margins": [1, 1], "max_crops": 4}
CASES["molmo 2"] = (molmo2, "Molmo2ForConditionalGeneration", {}, MOLMO_2, "<|image|>")
CASES["molmo 2, video"] = (*CASES["molmo 2"][:4], "<|video|>")
PHI4MM_TOKENS = ("<|endoftext10|>", "<|endoftext11|>")
PHI4MM = PHI_4 | {"audio_compression_rate": 8, "audio_downsample_rate": 1, "audio_feat_stride": 1,
                  "processor_class": "Phi4MMProcessor"}  # fmt: skip
CASES["phi 4 mm"] = (
    lambda vocab: phi_4(vocab, *PHI4MM_TOKENS), "Phi4MultimodalForCausalLM", {}, PHI4MM, "<|image_1|>"
)  # fmt: skip
CASES["phi 4 mm, audio"] = (*CASES["phi 4 mm"][:4], "<|audio_1|>")
CASES["phi 4, audio"] = (phi_4, "Phi4MultimodalForCausalLM", {}, PHI_4, "<|audio|>")


def minicpm(make: Any) -> Callable[[Tokenizer], Any]:
    return lambda vocab: make(
        vision_config=dict(**VISION, image_size=70, patch_size=7), insert_layer_id=1,
        text_config=tf.Qwen3_5TextConfig(**QWEN3_5 | text(vocab, num_hidden_layers=3)),
        image_token_id=vocab.token_to_id("<|image_pad|>"), video_token_id=vocab.token_to_id("<|video_pad|>"),
    )  # fmt: skip


def minicpmv47(vocab: Tokenizer) -> Any:
    marks = {"image_start_id": "<image>", "image_end_id": "</image>", "slice_start_id": "<slice>",
             "slice_end_id": "</slice>", "newline_id": "Ċ"}  # fmt: skip
    ids = {name: vocab.token_to_id(token) for name, token in marks.items()}
    return minicpm(lambda **parts: tf.MiniCPMV4_7Config(**parts, **ids))(vocab)


MINICPM = {"scale_resolution": 56, "patch_size": 7}
CASES["minicpm-v 4.6"] = (
    minicpm(tf.MiniCPMV4_6Config), "MiniCPMV4_6ForConditionalGeneration", {}, MINICPM, "<|image_pad|>",
)  # fmt: skip
CASES["minicpm-v 4.6, video"] = (*CASES["minicpm-v 4.6"][:4], "<|video_pad|>")
CASES["minicpm-v 4.7"] = (minicpmv47, "MiniCPMV4_7ForConditionalGeneration", {}, MINICPM, "<|image_pad|>")
CASES["minicpm-v 4.7, video"] = (*CASES["minicpm-v 4.7"][:4], "<|video_pad|>")
CASES["minicpm-ocr"] = (
    minicpm(tf.MiniCPMOcrConfig), "MiniCPMOcrForConditionalGeneration", {}, MINICPM, "<|image_pad|>",
)  # fmt: skip

GEMMA_3N = {"size": {"height": 64, "width": 64}, "do_normalize": False, "feature_size": 16}
CASES["gemma 3n"] = (gemma3n, "Gemma3nForConditionalGeneration", {}, GEMMA_3N, "<image_soft_token>")
CASES["gemma 3n, audio"] = (gemma3n, "Gemma3nForConditionalGeneration", {}, GEMMA_3N, "<audio_soft_token>")


SQUARE = {"size": {"height": 28, "width": 28}}
CASES["llama 4"] = (
    llama4, "Llama4ForConditionalGeneration", {"patch_size": 7}, {**SQUARE, "max_patches": 5}, "<|image|>"
)  # fmt: skip
CASES["cohere2 vision"] = (
    cohere2_vision, "Cohere2VisionForConditionalGeneration", {}, {**SQUARE, "max_patches": 5, "patch_size": 2},
    "<|IMG_PATCH|>",
)  # fmt: skip
FURTHER = dict.fromkeys(("llama 4", "cohere2 vision", "lfm2 vl"), CANVAS) | dict.fromkeys(
    ("phi 4 mm", "phi 4 mm, audio"), PHI4MM_TOKENS
)
REWRITES = dict.fromkeys(("phi 4 mm", "phi 4 mm, audio"), as_phi4mm)  # into the form of another repository
LFM2 = {"encoder_patch_size": 7, "tile_size": 28, "min_image_tokens": 1, "max_image_tokens": 6, "max_tiles": 4}
CASES["lfm2 vl"] = (lfm2_vl, "Lfm2VlForConditionalGeneration", {}, LFM2, "<image>")
CASES["llava next video, image"] = (
    llava_next_video, "LlavaNextVideoForConditionalGeneration", *CASES["llava next"][2:]
)  # fmt: skip
CASES["llava next video, video"] = (*CASES["llava next video, image"][:3], PIXELS, "<video>")
CASES["video llava"] = (video_llava, "VideoLlavaForConditionalGeneration", {"patch_size": 7}, PIXELS, "<image>")


def write_model(name: str, folder: Path, seed: int = 3) -> Any:
    """A tiny random checkpoint of one of CASES; the model."""
    configure, cls, own, settings, _ = CASES[name]
    write_tokenizer(folder, FURTHER.get(name, ()))
    vocab = Tokenizer.from_file(str(folder / "tokenizer.json"))
    torch.manual_seed(seed)
    with without_timm():
        model = getattr(tf, cls)(configure(vocab)).eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 and not weight.any():  # Gemma 3's projection, as it is made
                weight.normal_(std=0.2)
    model.save_pretrained(folder)
    if name in REWRITES:
        REWRITES[name](folder)
    (folder / "processor_config.json").write_text(json.dumps({"patch_size": None, **own}))
    for kind in ("preprocessor", "video_preprocessor"):
        (folder / f"{kind}_config.json").write_text(json.dumps(settings))
    return model


@pytest.mark.parametrize("name", CASES)
def test_words_equal_transformers(name: str, tmp_path: Path) -> None:
    cls, token, model = CASES[name][1], CASES[name][-1], write_model(name, tmp_path)
    modality = {"video": "video", "audio": "audio"}.get(name.split()[-1], "image")
    vocab = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    item = ITEMS[modality]
    special = [number for one in (*SPECIAL, *CANVAS, *PHI4MM_TOKENS) if (number := vocab.token_to_id(one)) is not None]
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
    if any("grid_thw" in key for key in known) or "MiniCPMV4_7" in cls:
        is_media = (ids == vocab.token_to_id(f"<|{modality}_pad|>")) | (ids == vocab.token_to_id("<|image|>"))
        known["mm_token_type_ids"] = is_media.long() * (2 if modality == "video" else 1)
        known.pop("second_per_grid_ts", None)
    elif "Ovis2" in cls:
        known.pop("grids")
    elif "Molmo2" in cls:
        assert ids[0, 0] == vocab.token_to_id("<s>")
        known["mm_token_type_ids"] = torch.isin(ids, torch.tensor([vocab.token_to_id(one) for one in MOLMO])).int()
    elif "Gemma" in cls:
        known["token_type_ids"] = (ids == vocab.token_to_id("<image_soft_token>")).long()

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
    other = {key: -one if one.is_floating_point() and "mask" not in key else one for key, one in known.items()}
    assert abs(answered(other)[1] - logprob) > 1e-3  # the item matters


def test_images_or_one_video_of_molmo_2(tmp_path: Path) -> None:
    write_model("molmo 2", tmp_path)
    image, other, video = picture(50, 90), picture(30, 30), FRAMES
    with LLM(str(tmp_path), dtype="float32", max_model_len=512, max_num_seqs=2) as llm:
        inputs = llm.llm_engine.front.inputs
        for data, message in (({"video": [video, video]}, "At most 1 video"),
                              ({"video": video, "image": image}, "items of one modality; .* video and image"),
                              ({"audio": TONE}, "takes image, video and no audio")):  # fmt: skip
            text = "".join(f"<|{kind}|>" for kind in data)
            with pytest.raises(InputError, match=message):
                llm.generate({"prompt": text, "multi_modal_data": data}, use_tqdm=False)
        params = SamplingParams(temperature=0, max_tokens=2)
        prompt = {"prompt": "<|image|> and <|image|>", "multi_modal_data": {"image": [image, other]}}
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        again = {"prompt_token_ids": output.prompt_token_ids, "multi_modal_data": {"image": [image, other]}}
        (same,) = llm.generate(again, params, use_tqdm=False)
        assert same.prompt_token_ids == output.prompt_token_ids
        assert same.outputs[0].token_ids == output.outputs[0].token_ids
        media, tokenizer = inputs.media, llm.get_tokenizer()
        loaded = media.loaded(media.load({"image": [image, other]}))
        known = media.place(None, output.prompt_token_ids, loaded, tokenizer).items
        ids = list(output.prompt_token_ids)
        assert [list(np.frombuffer(item.arrays["token_ids"].data, np.int64)) for item in known] == [
            ids[item.offset : item.offset + item.length] for item in known
        ]
        ids[known[0].offset] = tokenizer.token_to_id("<frame_end>")  # vectors of marks are those of the prompt's own
        changed = media.place(None, ids, loaded, tokenizer).items
        assert changed[0].key != known[0].key and changed[1].key == known[1].key


TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type in ('image', 'video') %}"
    "<|begin_of_{{ part.type }}|><|{{ part.type }}|><|end_of_{{ part.type }}|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def test_image_and_video_that_share_a_token(tmp_path: Path) -> None:
    """GLM writes both with one token: which item is which is known from the order of the prompt, here of chat parts."""
    write_tokenizer(tmp_path, chat_template=TEMPLATE)
    vocab = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(3)
    model = tf.Glm4vForConditionalGeneration(glm4v(vocab)).eval().float()
    model.save_pretrained(tmp_path)
    settings = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}}
    for kind in ("preprocessor", "video_preprocessor"):
        (tmp_path / f"{kind}_config.json").write_text(json.dumps(settings))
    params = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True,
                            logit_bias={vocab.token_to_id(one): -100.0 for one in SPECIAL})  # fmt: skip
    data = {"image": ITEMS["image"], "video": FRAMES}
    with LLM(str(tmp_path), dtype="float32", max_model_len=512, max_num_seqs=2) as llm:
        parts = [{"type": "text", "text": "a "}, {"type": "video", "video": FRAMES}, {"type": "text", "text": " then "},
                 {"type": "image_pil", "image_pil": ITEMS["image"]}]  # fmt: skip
        (output,) = llm.chat([{"role": "user", "content": parts}], params)
        media = llm.llm_engine.front.inputs.media
        items = media.loaded(media.load(data)).items
    known = {key: torch.from_numpy(np.array(array)) for several in items.values() for one in several
             for key, array in one.item.arrays.items() if key != "second_per_grid_ts"}  # fmt: skip
    ids = torch.tensor([output.prompt_token_ids])
    is_media = ids == vocab.token_to_id("<|image|>")
    order = is_media.cumsum(-1)
    num = items["video"][0].item.num_vectors
    known["mm_token_type_ids"] = is_media.long() * torch.where(order <= num, 2, 1)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        parts = (
            model.model.get_video_features(known["pixel_values_videos"], known["video_grid_thw"]).pooler_output,
            model.model.get_image_features(known["pixel_values"], known["image_grid_thw"]).pooler_output,
        )
        embeds[is_media] = torch.cat([one for part in parts for one in part])
        positions, _ = model.model.get_rope_index(
            ids, known["mm_token_type_ids"], known["image_grid_thw"], known["video_grid_thw"]
        )
        logits = model(inputs_embeds=embeds, position_ids=positions).logits[0, -1]
        logits[[vocab.token_to_id(one) for one in SPECIAL]] = -torch.inf
    assert int(logits.argmax()) == output.outputs[0].token_ids[0]


def test_an_image_and_audio_in_one_prompt(tmp_path: Path) -> None:
    """Of Gemma 3n, in an order of their own, beside transformers; and with the vectors of the image in its place."""
    model = write_model("gemma 3n", tmp_path)
    vocab = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    special = [vocab.token_to_id(one) for one in SPECIAL]
    params = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True, logprobs=1,
                            logit_bias=dict.fromkeys(special, -100.0))  # fmt: skip
    data = {"image": ITEMS["image"], "audio": TONE}
    with LLM(str(tmp_path), dtype="float32", max_model_len=512, max_num_seqs=2, enable_mm_embeds=True) as llm:
        prompt = {"prompt": "a <audio_soft_token> b <image_soft_token> c", "multi_modal_data": data}
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        media = llm.llm_engine.front.inputs.media
        items = media.loaded(media.load(data)).items
        known = {key: torch.from_numpy(np.array(array)) for several in items.values() for one in several
                 for key, array in one.item.arrays.items()}  # fmt: skip
        with torch.no_grad():
            vectors = model.model.get_image_features(known["pixel_values"]).pooler_output
        prompt["multi_modal_data"] = {"image": vectors.numpy(), "audio": TONE}
        assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert known.keys() == {"pixel_values", "input_features", "input_features_mask"}
    said = output.outputs[0]
    ids = torch.tensor([[*output.prompt_token_ids, *said.token_ids]])
    with torch.no_grad():
        logits = model(ids, **known).logits[0, -NUM - 1 : -1]
    assert said.logprobs[0][said.token_ids[0]].logprob == pytest.approx(
        float(logits[0].log_softmax(-1)[said.token_ids[0]]), abs=1e-4
    )
    logits[:, special] = -torch.inf
    assert logits.argmax(-1).tolist() == list(said.token_ids)


@pytest.mark.parametrize(
    ("name", "audio", "image"), [("phi 4", "<|audio|>", "<|image|>"), ("phi 4 mm", "<|audio_1|>", "<|image_1|>")]
)
def test_audio_beside_an_image_has_a_projection_of_its_own(name: str, audio: str, image: str, tmp_path: Path) -> None:
    """Of Phi 4. The same audio is encoded twice, alone and beside an image."""
    model = write_model(name, tmp_path)
    vocab = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    special = [vocab.token_to_id(one) for one in (*SPECIAL, *FURTHER.get(name, ()))]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, logit_bias=dict.fromkeys(special, -100.0))
    both = {"audio": TONE, "image": ITEMS["image"]}
    with LLM(str(tmp_path), dtype="float32", max_model_len=512, max_num_seqs=2) as llm:
        media = llm.llm_engine.front.inputs.media
        for data, words in (({"audio": TONE}, f"a {audio} b"), (both, f"a {audio} b {image} c")):
            (output,) = llm.generate({"prompt": words, "multi_modal_data": data}, params, use_tqdm=False)
            items = media.loaded(media.load(data)).items
            known = {key: torch.from_numpy(np.array(array)) for several in items.values() for one in several
                     for key, array in one.item.arrays.items()}  # fmt: skip
            assert (known.pop("is_beside", None) is not None) == ("image" in data)
            check_first(model, output, known, special)


def check_first(model: Any, output: Any, known: dict[str, Any], special: list[int]) -> None:
    """The first token of an answer, and its probability."""
    with torch.no_grad():
        logits = model(torch.tensor([output.prompt_token_ids]), **known).logits[0, -1]
    expected = logits.clone()
    expected[special] = -torch.inf
    token = int(expected.argmax())
    assert output.outputs[0].token_ids[0] == token
    logprob = output.outputs[0].logprobs[0][token].logprob
    assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-4)


def test_a_conversation_of_phi_4_in_the_form_of_its_repository(tmp_path: Path) -> None:
    """Two images and audio between them, as parts of a chat, for which the template wants a text; the same prompt as
    text, with the tokens themselves, and as ids."""
    model = write_model("phi 4 mm", tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ '<s>' + message['content'] + '</s>' }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    vocab = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    special = [vocab.token_to_id(one) for one in (*SPECIAL, *PHI4MM_TOKENS)]
    params = SamplingParams(temperature=0, max_tokens=NUM, logprobs=1, ignore_eos=True,
                            logit_bias=dict.fromkeys(special, -100.0))  # fmt: skip
    images = [ITEMS["image"], ITEMS["image"].rotate(180)]
    first, second = ({"type": "image_pil", "image_pil": image} for image in images)
    parts = [first, {"type": "audio", "audio": TONE}, second, {"type": "text", "text": "What is shown?"}]
    data = {"image": images, "audio": TONE}
    with LLM(str(tmp_path), dtype="float32", max_model_len=512, max_num_seqs=2) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
        text = "<s><|image_1|>\n<|audio_1|>\n<|image_2|>\nWhat is shown?</s>"
        image, audio = PHI4MM_TOKENS
        same = {"prompt": f"<s>{image}\n{audio}\n{image}\nWhat is shown?</s>", "multi_modal_data": data}
        ids = {"prompt_token_ids": output.prompt_token_ids, "multi_modal_data": data}
        for prompt in ({"prompt": text, "multi_modal_data": data}, same, ids):
            (again,) = llm.generate(prompt, params, use_tqdm=False)
            assert again.prompt_token_ids == output.prompt_token_ids
            assert again.outputs[0].token_ids == output.outputs[0].token_ids
        with pytest.raises(InputError, match=r"3 placeholders '<\|endoftext10\|>' for 2 image items"):
            llm.generate({"prompt": text + "<|image_3|>", "multi_modal_data": data}, use_tqdm=False)
        media = llm.llm_engine.front.inputs.media
        items = media.loaded(media.load(data)).items
    known: dict[str, Any] = {}
    for several in items.values():
        for name in several[0].item.arrays:
            known[name] = torch.cat([torch.from_numpy(np.array(one.item.arrays[name])) for one in several])
    known.pop("is_beside")
    numbers = [vocab.token_to_id(one) for one in PHI4MM_TOKENS]
    counts = [sum(one.item.num_vectors for one in items[kind]) for kind in ("image", "audio")]
    assert [output.prompt_token_ids.count(number) for number in numbers] == counts
    check_first(model, output, known, special)


def test_gemma_3_over_http(tmp_path: Path) -> None:
    """An image part of a chat: the words that LLM.chat says, which tests above compare."""
    write_tokenizer(tmp_path, chat_template=TEMPLATE.replace(
        "<|begin_of_{{ part.type }}|><|{{ part.type }}|><|end_of_{{ part.type }}|>", "<start_of_image>"))  # fmt: skip
    vocab = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(3)
    model = tf.Gemma3ForConditionalGeneration(gemma3(vocab)).eval().float()
    with torch.no_grad():
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_seq_length": 4}))
    engine = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 2}
    text_part, out = {"type": "text", "text": "What is shown?"}, io.BytesIO()
    ITEMS["image"].save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    params = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True)
    with LLM(str(tmp_path), **engine) as llm:
        (expected,) = llm.chat(
            [{"role": "user", "content": [{"type": "image_pil", "image_pil": ITEMS["image"]}, text_part]}], params
        )
    assert expected.prompt_token_ids.count(vocab.token_to_id("<image_soft_token>")) == 4
    content = [{"type": "image_url", "image_url": {"url": url}}, text_part]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": NUM, "ignore_eos": True}
    with live(str(tmp_path), engine=engine) as server:
        answer = server.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
