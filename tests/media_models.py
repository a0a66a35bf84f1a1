"""Tiny random models that take media, written by transformers, and items for them made from random pixels.

FAMILIES: architecture -> Family: its configuration, the arrays of one item (as the family's processor returns them for
one item alone) and the token that stands in their place. How many vectors an item has is asked of transformers' model.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.hf_models.gemma3n import VisionTower
from quire.schema.media import ArrayData, MediaItem
from tests import deepseek_ocr, deepseek_vl2, minicpm_oracle, molmo_oracle, ultravox_model
from tests.tiny_models import VOCAB, write_tokenizer

IMAGE = 300  # the token of media
OVIS_MARKS = [301, 302, 303, 304, 305]  # start, end of the whole, of a column, of a row, end
NOT_SAID = [IMAGE, *OVIS_MARKS]  # tokens that answers never hold: they would be items without pixels
TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
VISION: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
Arrays = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    config: Callable[[], Any]
    draw: Callable[[torch.Generator], Arrays]
    modality: str = "image"
    joined_by: dict[str, int] | None = None  # the dimension along which arrays of several items are joined; 0
    types: str = (
        ""  # what transformers' forward wants to be told of tokens: "mm", "marks", "image", "suffix" (types_of)
    )
    between: tuple[int, ...] = ()  # tokens between two frames of a video
    written: Callable[[Arrays], list[int]] | None = None  # the tokens of an item, if they are not all the same
    join: Callable[[list[Arrays]], Arrays] | None = None  # several items as transformers takes them; None: joined_by
    make: Callable[[Any], Any] | None = None  # the model, where transformers has no class of this name
    rewrite: Callable[[Path], None] | None = None  # what transformers wrote, as checkpoints of the architecture are


def rand(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def clip(**over: Any) -> Any:
    return tf.CLIPVisionConfig(**VISION, image_size=28, patch_size=7, projection_dim=32, **over)


def siglip(**over: Any) -> Any:
    return tf.SiglipVisionConfig(**VISION, image_size=28, patch_size=7, **over)


def square(generator: torch.Generator) -> Arrays:
    return {"pixel_values": rand(generator, 1, 3, 28, 28)}


def both(cls: Any, vision: Any, text: Any, **more: Any) -> Callable[[], Any]:
    """A configuration of two parts. Untied, so that heads are tested too."""
    return lambda: cls(vision_config=vision(), text_config=text(), **({"tie_word_embeddings": False} | more))


def llama(**over: Any) -> Any:
    return tf.LlamaConfig(**TEXT | over)


def qwen2(**over: Any) -> Any:
    return tf.Qwen2Config(**TEXT | over)


def pixtral() -> Any:
    return tf.PixtralVisionConfig(**VISION, head_dim=8, image_size=56, patch_size=7)


MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def qwen2_vl() -> Any:
    vision = dict(depth=2, embed_dim=32, hidden_size=64, num_heads=4, patch_size=4, mlp_ratio=2)
    text = TEXT | {"rope_parameters": MROPE}
    return tf.Qwen2VLConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, video_token_id=IMAGE, vision_start_token_id=290,
        vision_end_token_id=291, tie_word_embeddings=False,
    )  # fmt: skip


def qwen2_5_vl() -> Any:
    vision = dict(
        depth=2, hidden_size=32, out_hidden_size=64, intermediate_size=48, num_heads=4, patch_size=4, window_size=16,
        fullatt_block_indexes=[1],
    )  # fmt: skip
    text = TEXT | {"rope_parameters": MROPE}
    return tf.Qwen2_5_VLConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, video_token_id=IMAGE, vision_start_token_id=290,
        vision_end_token_id=291, tie_word_embeddings=False,
    )  # fmt: skip


def qwen3_vl(cls: Any, image: int = IMAGE, **more: Any) -> Callable[[], Any]:
    vision = dict(
        depth=3, hidden_size=32, out_hidden_size=64, intermediate_size=48, num_heads=4, patch_size=4,
        num_position_embeddings=64, deepstack_visual_indexes=[0, 1],
    )  # fmt: skip
    text = TEXT | {"rope_parameters": MROPE, "head_dim": 16} | more
    return lambda: cls(
        vision_config=vision, text_config=text, image_token_id=image, video_token_id=IMAGE + 291 - image,
        vision_start_token_id=290, vision_end_token_id=292, tie_word_embeddings=False,
    )  # fmt: skip


GLM_VISION: dict[str, Any] = dict(
    depth=2, hidden_size=32, out_hidden_size=64, intermediate_size=48, num_heads=4, patch_size=4, image_size=32
)
GLM_ROPE = MROPE | {"mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}


def glm4v(cls: Any, **more: Any) -> Callable[[], Any]:
    text = TEXT | {"rope_parameters": GLM_ROPE} | more
    return lambda: cls(
        vision_config=GLM_VISION, text_config=text, image_token_id=IMAGE, video_token_id=IMAGE,
        tie_word_embeddings=False,
    )  # fmt: skip


def glm46v() -> Any:
    text = tf.Glm4vTextConfig(**TEXT, rope_parameters=GLM_ROPE)
    return tf.Glm46VConfig(vision_config=tf.Glm4vVisionConfig(**GLM_VISION), text_config=text, image_token_id=IMAGE,
                           video_token_id=IMAGE)  # fmt: skip


QWEN3_5: dict[str, Any] = TEXT | dict(
    rope_parameters=MROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
    head_dim=16, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)  # fmt: skip


def qwen3_5(cls: Any, image: int = IMAGE, **more: Any) -> Callable[[], Any]:
    vision = dict(
        depth=2, hidden_size=32, out_hidden_size=64, intermediate_size=48, num_heads=4, patch_size=4,
        num_position_embeddings=64,
    )  # fmt: skip
    return lambda: cls(
        vision_config=vision, text_config=QWEN3_5 | more, image_token_id=image, video_token_id=IMAGE + 291 - image,
        vision_start_token_id=290, vision_end_token_id=292, tie_word_embeddings=False,
    )  # fmt: skip


GLM_MOE: dict[str, Any] = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1, first_k_dense_replace=1,
    n_group=1, topk_group=1, attention_bias=True, head_dim=16,
)  # fmt: skip


def patches(name: str, grid: str, frames: int = 1) -> Callable[[torch.Generator], Arrays]:
    def draw(generator: torch.Generator) -> Arrays:
        height, width = (2 * int(torch.randint(2, 5, (), generator=generator)) for _ in range(2))
        numbers = rand(generator, frames * height * width, 3 * 2 * 4 * 4)
        return {name: numbers, grid: torch.tensor([[frames, height, width]])}

    return draw


def frames_of(*shape: int) -> Callable[[torch.Generator], Arrays]:
    """Patches that are not flat."""

    def draw(generator: torch.Generator) -> Arrays:
        height, width = (2 * int(torch.randint(2, 5, (), generator=generator)) for _ in range(2))
        numbers = rand(generator, height * width, *shape)
        return {"pixel_values": numbers, "image_grid_thw": torch.tensor([[1, height, width]])}

    return draw


def anyres(generator: torch.Generator) -> Arrays:
    return {"pixel_values": rand(generator, 1, 3, 3, 28, 28), "image_sizes": torch.tensor([[25, 56]])}


def sized(generator: torch.Generator) -> Arrays:
    return {"pixel_values": rand(generator, 1, 3, 28, 42), "image_sizes": torch.tensor([[28, 42]])}


def tiles(generator: torch.Generator) -> Arrays:
    return {
        "pixel_values": rand(generator, 1, 2, 3, 28, 28),
        "pixel_attention_mask": torch.ones((1, 2, 28, 28), dtype=torch.bool),
    }


def several_tiles(generator: torch.Generator) -> Arrays:
    return {"pixel_values": rand(generator, 2, 3, 28, 28)}


def mel(generator: torch.Generator) -> Arrays:
    return {"input_features": rand(generator, 1, 16, 60)}


def ovis_tiles(generator: torch.Generator) -> Arrays:
    rows, columns = (int(torch.randint(1, 3, (), generator=generator)) for _ in range(2))
    num = 1 if rows * columns == 1 else 1 + rows * columns
    return {"pixel_values": rand(generator, num, 3, 28, 28), "grids": torch.tensor([[rows, columns]])}


def ovis_tokens(arrays: Arrays) -> list[int]:
    start, whole, column, row, end = OVIS_MARKS
    rows, columns = arrays["grids"][0].tolist()
    tokens = [start, *[IMAGE] * 4, whole]
    for index in range(rows * columns if rows * columns > 1 else 0):
        last = index + 1 == rows * columns
        tokens += [*[IMAGE] * 4, *[end if last else column if (index + 1) % columns else row]]
    return tokens if rows * columns > 1 else [*tokens, end]


def phi4(longrope: bool = False, **over: Any) -> Any:
    """`longrope`: of part of each head, as released."""
    vision = dict(**VISION, image_size=28, crop_size=28, patch_size=7, image_token_id=over.get("image", IMAGE))
    audio = dict(
        hidden_size=32, intermediate_size=48, num_blocks=2, num_attention_heads=4, ext_pw_out_channel=32,
        depthwise_separable_out_channel=32, input_size=16, nemo_conv_channels=8, bias_max_distance=20,
        audio_token_id=over.get("audio", 291),
    )  # fmt: skip
    more: dict[str, Any] = {}
    if longrope:
        factors = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **factors}
        more = dict(original_max_position_embeddings=TEXT["max_position_embeddings"], rope_parameters=rope)
    return tf.Phi4MultimodalConfig(**TEXT, vision_config=vision, audio_config=audio, **more)


def phi4_crops(generator: torch.Generator) -> Arrays:
    """Two crops, the second half full."""
    mask = torch.ones(1, 3, 4, 4)
    mask[0, 2, :, 2:] = 0
    return {
        "image_pixel_values": rand(generator, 1, 3, 3, 28, 28), "image_sizes": torch.tensor([[28, 56]]),
        "image_attention_mask": mask,
    }  # fmt: skip


def phi4_audio(generator: torch.Generator) -> Arrays:
    return {"audio_input_features": rand(generator, 1, 60, 16), "audio_embed_sizes": torch.tensor([8])}


# names of tensors of transformers' Phi-4-multimodal -> those of its own repository
PHI4MM = {
    r"img_projection_up\.": "img_projection.0.",
    r"img_projection_down\.": "img_projection.2.",
    r"global_img_feature_extensor$": "glb_GN",
    r"sub_img_feature_extensor$": "sub_GN",
    r"up_proj_for_speech\.": "audio_projection.speech.0.",
    r"down_proj_for_speech\.": "audio_projection.speech.2.",
    r"up_proj_for_vision_speech\.": "audio_projection.vision.0.",
    r"down_proj_for_vision_speech\.": "audio_projection.vision.2.",
    r"(feed_forward_\w+)\.gate_up_proj\.": r"\1.net.0.linear.",
    r"(feed_forward_\w+)\.down_proj\.": r"\1.net.2.",
    r"(audio_embed\..*self_attn)\.([qkv])_proj\.": r"\1.linear_\2.",
    r"(audio_embed\..*self_attn)\.o_proj\.": r"\1.linear_out.",
    r"^(model\.layers\..*_proj)\.weight$": r"\1.base_layer.weight",
}
PHI4MM_RANKS = {"vision": 3, "speech": 5}


def as_phi4mm(folder: Path) -> None:
    """A checkpoint of Phi-4-multimodal as its own repository has it: another form of the configuration, and two
    adapters among the weights of the language model, which lie in folders besides and are random here."""
    raw = json.loads((folder / "config.json").read_text())
    vision, audio = raw.pop("vision_config"), raw.pop("audio_config")
    rope, generator = raw.pop("rope_parameters"), torch.Generator().manual_seed(5)
    scaling = {"type": rope["rope_type"]} | {name: rope.get(name) for name in ("short_factor", "long_factor")}
    encoder = {
        "attention_dim": audio["hidden_size"], "attention_heads": audio["num_attention_heads"],
        "linear_units": audio["intermediate_size"],
        "depthwise_seperable_out_channel": audio["depthwise_separable_out_channel"],
        "nemo_conv_settings": {"conv_channels": audio["nemo_conv_channels"]},
        "relative_attention_bias_args": {"t5_bias_max_distance": audio["bias_max_distance"], "type": "t5"},
        **{name: audio[name] for name in ("num_blocks", "ext_pw_out_channel", "input_size", "kernel_size",
                                          "depthwise_multiplier", "time_reduction", "activation", "chunk_size",
                                          "conv_activation", "conv_glu_type", "left_chunk")},
        "batch_norm": False, "bias_in_glu": True, "causal": True, "cnn_layer_norm": True, "ext_pw_kernel_size": 1,
        "input_layer": "nemo_conv", "encoder_embedding_config": {"input_size": audio["input_size"]},
    }  # fmt: skip
    raw |= {
        "architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm",
        "auto_map": {"AutoConfig": "configuration_phi4mm.Phi4MMConfig",
                     "AutoModelForCausalLM": "modeling_phi4mm.Phi4MMForCausalLM"},
        "rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_scaling": scaling if rope["rope_type"] == "longrope" else None,
        "audio_processor": {"name": "cascades", "config": encoder},
        "img_processor": {name: vision[name] for name in ("image_size", "patch_size", *VISION)},
        "embd_layer": {
            "embedding_cls": "image_audio",
            "audio_embd_layer": {"compression_rate": 8, "downsample_rate": 1, "embedding_cls": "audio",
                                 "projection_cls": "mlp", "use_conv_downsample": False, "use_qformer": False},
            "image_embd_layer": {"crop_size": vision["crop_size"], "embedding_cls": "tune_image",
                                 "hd_transform_order": "sub_glb", "image_token_compression_cls": "avg_pool_2d",
                                 "projection_cls": "mlp", "use_hd_transform": True,
                                 "with_learnable_separator": True}},
        **{f"{name}_lora": {"r": rank, "lora_alpha": 2 * rank, "layer": "layers.*((self_attn"}
           for name, rank in PHI4MM_RANKS.items()},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    rename(folder, PHI4MM)
    tensors = load_file(folder / "model.safetensors")
    stems = [name.removesuffix("base_layer.weight") for name in tensors if name.endswith(".base_layer.weight")]
    for kind, rank in PHI4MM_RANKS.items():
        own = {}
        for stem in stems:
            out, width = tensors[f"{stem}base_layer.weight"].shape
            own[f"{stem}lora_A"] = rand(generator, rank, width) / 8
            own[f"{stem}lora_B"] = rand(generator, out, rank) / 8
        tensors |= {f"{name}.{kind}.weight": matrix for name, matrix in own.items()}
        (folder / f"{kind}-lora").mkdir()
        save_file({f"base_model.model.{name}.weight": matrix for name, matrix in own.items()},
                  folder / f"{kind}-lora" / "adapter_model.safetensors", {"format": "pt"})  # fmt: skip
        (folder / f"{kind}-lora" / "adapter_config.json").write_text(json.dumps({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0,
            "bias": "none", "fan_in_fan_out": False, "modules_to_save": [], "use_dora": False, "use_rslora": False,
            "target_modules": "layers.*((self_attn\\.(qkv_proj|o_proj))|(mlp\\.(gate_up|down)_proj))",
        }))  # fmt: skip
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


OCR2_SAM: dict[str, Any] = {"width": 32, "layers": 2, "heads": 2, "global_attn_indexes": [1]}
OCR2_QWEN2: dict[str, Any] = {"dim": 24, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 32}


def deepseek_ocr2(**over: Any) -> Any:
    """What its own repository leaves open is small here."""
    sam = dict(
        hidden_size=OCR2_SAM["width"], num_hidden_layers=OCR2_SAM["layers"], num_attention_heads=OCR2_SAM["heads"],
        global_attn_indexes=OCR2_SAM["global_attn_indexes"], downsample_channels=[16, OCR2_QWEN2["dim"]],
    )  # fmt: skip
    encoder = dict(
        hidden_size=OCR2_QWEN2["dim"], num_hidden_layers=OCR2_QWEN2["layers"], vocab_size=1,
        num_attention_heads=OCR2_QWEN2["heads"], num_key_value_heads=OCR2_QWEN2["kv_heads"],
        intermediate_size=OCR2_QWEN2["ffn_dim"], rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    text = TEXT | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
                       num_key_value_heads=4, mlp_layer_types=["dense", "sparse", "sparse"]) | over  # fmt: skip
    return tf.DeepseekOcr2Config(
        vision_config=dict(sam_config=sam, encoder_config=encoder), text_config=text, image_token_id=IMAGE,
        tie_word_embeddings=False,
    )  # fmt: skip


def as_deepseek_ocr2(folder: Path) -> None:
    """A checkpoint of DeepSeek-OCR 2 with the configuration of its own repository, which says less and has the language
    model's part twice. Tensors have its names already: transformers writes those that it reads."""
    raw = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in raw["text_config"].items() if key not in ("model_type", "mlp_layer_types")}
    text |= {"architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1, "kv_lora_rank": None,
             "lm_head": True, "n_group": 1, "q_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0,
             "rm_head": False, "topk_group": 1, "topk_method": "greedy", "use_mla": False,
             "v_head_dim": 0}  # fmt: skip
    width = {"qwen2-0-5b": OCR2_QWEN2, "sam_vit_b": OCR2_SAM | {"downsample_channels": [16, 1024]}}
    raw = text | {
        "architectures": ["DeepseekOCR2ForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_deepseekocr2.DeepseekOCR2Config",
                     "AutoModel": "modeling_deepseekocr2.DeepseekOCR2ForCausalLM"},
        "candidate_resolutions": [[1024, 1024]], "global_view_pos": "head", "language_config": text,
        "model_type": "deepseek_vl_v2", "tile_tag": "2D", "torch_dtype": "float32",
        "projector_config": {"input_dim": OCR2_QWEN2["dim"], "model_type": "mlp_projector",
                             "n_embed": text["hidden_size"], "projector_type": "linear"},
        "vision_config": {"image_size": 1024, "mlp_ratio": 3.7362, "model_name": "deepencoderv2",
                          "model_type": "vision", "width": width},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))


def gemma3n(**over: Any) -> Any:
    """Ids from 200 on are embedded as those of images, from 308 on as those of audio; from 280 on, layers have no
    vectors of their own for a token. See tests/hf_models/test_mobilenet.py for the vision encoder."""
    text = tf.Gemma3nTextConfig(
        **TEXT | dict(num_hidden_layers=6, intermediate_size=[96, 64, 96, 64, 96, 96]), head_dim=16, sliding_window=12,
        num_kv_shared_layers=3, layer_types=["sliding_attention", "full_attention"] * 3, laurel_rank=4,
        activation_sparsity_pattern=[0.6, 0.0, 0.3, 0.0, 0.0, 0.0], hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=280, altup_num_inputs=3,
    )  # fmt: skip
    audio = tf.Gemma3nAudioConfig(
        vocab_size=12, vocab_offset=308, input_feat_size=16, hidden_size=32, conf_num_attention_heads=4,
        conf_num_hidden_layers=2, conf_attention_chunk_size=4, conf_attention_context_left=5,
        sscp_conv_channel_size=(8, 4),
    )  # fmt: skip
    vision = tf.Gemma3nVisionConfig(
        model_args={"channel_multiplier": 0.0625, "msfa_output_resolution": 4}, vocab_size=108, vocab_offset=200
    )
    return tf.Gemma3nConfig(
        text_config=text, vision_config=vision, audio_config=audio, vision_soft_tokens_per_image=16,
        audio_soft_tokens_per_image=6, tie_word_embeddings=True,
        **{"image_token_id": IMAGE, "audio_token_id": 291} | over,
    )  # fmt: skip


def gemma3n_audio(generator: torch.Generator) -> Arrays:
    """The last frames are padding."""
    return {"input_features": rand(generator, 1, 72, 16), "input_features_mask": (torch.arange(72) < 50)[None]}


MOLMO_SIDE = 4  # patches


def molmo2(**over: Any) -> Any:
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    patch, *_, end = IMAGE, *OVIS_MARKS
    start, low, column, frame, _ = OVIS_MARKS
    return tf.Molmo2Config(
        vision_config=VISION | heads | dict(image_size=[28, 28], patch_size=7),
        adapter_config=heads | dict(hidden_size=32, intermediate_size=48, text_hidden_size=64,
                                    vision_feature_layer=[2, -2]),
        text_config=TEXT | dict(vocab_size=IMAGE, additional_vocab_size=VOCAB - IMAGE, head_dim=16) | over,
        image_patch_id=patch, image_start_token_id=start, low_res_image_start_token_id=low, image_end_token_id=end,
        frame_start_token_id=frame, frame_end_token_id=end, image_col_id=column,
    )  # fmt: skip


def molmo2_olmo() -> Any:
    """As Molmo2-O: norms over all heads and after sublayers, and some layers with scaled rotary embeddings."""
    rope = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=256)
    return molmo2(qk_norm_type="olmo", norm_after=True, attention_bias=True, rope_parameters=rope,
                  rope_scaling_layers=[0, 2])  # fmt: skip


def molmo2_crops(generator: torch.Generator) -> Arrays:
    """The whole image and two crops, of which some patches are pooled."""
    rows, columns = (int(torch.randint(1, 3, (), generator=generator)) for _ in range(2))
    each = MOLMO_SIDE**2
    whole = torch.randperm(each, generator=generator).reshape(4, 4)
    parts = each + torch.randperm(2 * each, generator=generator)[: rows * columns * 4].reshape(-1, 4)
    parts[0, 1:] = -1
    parts[-1, 2] = -1
    arrays = {
        "pixel_values": rand(generator, 3, each, 147), "image_token_pooling": torch.cat((whole, parts)),
        "image_grids": torch.tensor([[2, 2, rows, columns]]),
    }  # fmt: skip
    return arrays | {"token_ids": torch.tensor(molmo2_tokens(arrays))}


def molmo2_tokens(arrays: Arrays) -> list[int]:
    start, low, column, _, end = OVIS_MARKS
    wholes, across, rows, columns = arrays["image_grids"][0].tolist()
    return [low, *([IMAGE] * across + [column]) * wholes, end, start, *([IMAGE] * columns + [column]) * rows, end]


def molmo2_frames(generator: torch.Generator) -> Arrays:
    frames, each = 2, MOLMO_SIDE**2
    pooled = torch.stack([torch.randperm(each, generator=generator)[:9] for _ in range(4)])
    pooled[1, 3:] = -1
    indices = torch.cat([torch.where(pooled < 0, -1, pooled + frame * each) for frame in range(frames)])
    arrays = {
        "pixel_values_videos": rand(generator, frames, each, 147), "video_token_pooling": indices,
        "video_grids": torch.tensor([[frames, 2, 2]]),
    }  # fmt: skip
    return arrays | {"token_ids": torch.tensor([token for token in molmo2_times(arrays) if token in NOT_SAID])}


def molmo2_times(arrays: Arrays) -> list[int]:
    """Times are written before the frames but the first, whose item begins with it."""
    frames, rows, columns = arrays["video_grids"][0].tolist()
    frame = [OVIS_MARKS[3], *[IMAGE] * (rows * columns), OVIS_MARKS[4]]
    return [token for index in range(frames) for token in ([17 + index, 16] if index else []) + frame]


def molmo2_joined(items: list[Arrays]) -> Arrays:
    """Patches are counted over all items."""
    out, first = dict[str, list[Tensor]](), 0
    for arrays in items:
        for name, tensor in arrays.items():
            if name.endswith("_pooling"):
                tensor = torch.where(tensor < 0, -1, tensor + first)
            if name != "token_ids":
                out.setdefault(name, []).append(tensor)
        pixels = next(tensor for name, tensor in arrays.items() if name.startswith("pixel_values"))
        first += pixels.shape[0] * pixels.shape[1]
    return {name: torch.cat(tensors) for name, tensors in out.items()}


MOLMO_WORDS = 290  # tokens of the head; those beyond stand in prompts only
MOLMO_ROW, MOLMO_END, MOLMO_START = 291, 292, 293


def molmo(**over: Any) -> dict[str, Any]:
    """With tied numbers of a head's tokens and others, as the first Molmo has them."""
    config = molmo_oracle.CONFIG | dict(embedding_size=MOLMO_WORDS, vocab_size=MOLMO_WORDS - 3)
    return config | dict(additional_vocab_size=VOCAB - MOLMO_WORDS) | over


def molmo_crops(generator: torch.Generator) -> Arrays:
    """The whole image and two crops, some squares of which are left out; all kinds of padding."""
    rows, columns = (int(torch.randint(1, 3, (), generator=generator)) for _ in range(2))
    each = MOLMO_SIDE**2
    parts = 4 + torch.randperm(8, generator=generator)[: rows * columns]
    return {
        "pixel_values": rand(generator, 3, each, 147), "square_order": torch.cat((torch.arange(4), parts)),
        "patch_padding": torch.randint(0, 3, (3, each), generator=generator),
        "token_ids": torch.full((4 + rows * columns,), IMAGE), "rows": torch.tensor([rows]),
    }  # fmt: skip


def molmo_tokens(arrays: Arrays) -> list[int]:
    """Without the marks before the first patch and behind the last."""
    rows = int(arrays["rows"][0])
    row = [*[IMAGE] * ((len(arrays["square_order"]) - 4) // rows), MOLMO_ROW]
    return [*[IMAGE, IMAGE, MOLMO_ROW] * 2, MOLMO_END, MOLMO_START, *(row * rows)[:-1]]


def molmo_joined(items: list[Arrays]) -> Arrays:
    """As the oracle wants them: by square the number of its token, over all items."""
    images, masks, numbers, first = [], [], [], 0
    for arrays in items:
        order = arrays["square_order"]
        own = torch.full((12,), -1)
        own[order] = first + torch.arange(len(order))
        numbers.append(own.reshape(3, 4))
        images.append(arrays["pixel_values"])
        masks.append(torch.tensor([1.0, 0.0, 0.25])[arrays["patch_padding"]])
        first += len(order)
    return {"images": torch.cat(images), "image_masks": torch.cat(masks), "image_numbers": torch.cat(numbers)}


def make_molmo(config: dict[str, Any]) -> molmo_oracle.Molmo:
    return molmo_oracle.Molmo(config, IMAGE)


def kimi_k25(**more: Any) -> Any:
    text = tf.DeepseekV3Config(
        **TEXT | dict(num_key_value_heads=4), q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1,
        first_k_dense_replace=1,
    )  # fmt: skip
    return tf.Kimi_K25Config(
        vision_config=dict(**VISION, patch_size=4, pos_emb_height=8, pos_emb_width=8), image_token_id=IMAGE,
        video_token_id=291, projection_hidden_size=32, text_config=text, **more,
    )  # fmt: skip


def as_kimi_vl(folder: Path) -> None:
    """A checkpoint of Kimi-K2.5 with the names of Kimi-VL, whose images and language model are computed in the same
    way."""
    raw = json.loads((folder / "config.json").read_text())
    vision = raw["vision_config"]
    vision = {name: vision[name] for name in ("patch_size", "merge_kernel_size", *VISION)} | {
        "init_pos_emb_height": vision["pos_emb_height"], "init_pos_emb_width": vision["pos_emb_width"],
        "model_type": "moonvit",
    }  # fmt: skip
    raw = {
        "architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl", "vision_config": vision,
        "text_config": raw["text_config"], "media_placeholder_token_id": IMAGE, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    rename(folder, {
        r"^mm_projector\.proj\.0\.": "multi_modal_projector.linear_1.",
        r"^mm_projector\.proj\.2\.": "multi_modal_projector.linear_2.",
        r"^(model\.)?mm_projector\.pre_norm\.": "multi_modal_projector.pre_norm.",
        r"^vision_tower\.encoder\.patch_embed\.": "vision_tower.patch_embed.",
        r"^language_model\.model\.blocks\.": "language_model.model.layers.",
    })  # fmt: skip


def rename(folder: Path, names: dict[str, str]) -> None:
    """Patterns of tensors' names, and what they become."""
    tensors = load_file(folder / "model.safetensors")
    for pattern, name in names.items():
        tensors = {re.sub(pattern, name, one): tensor for one, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def minicpmv(release: str, **over: Any) -> Callable[[], Any]:
    """Heads that resample have 128 numbers, so the language model has two of them."""
    text = {"2.6": tf.Qwen2Config, "4.5": tf.Qwen3Config}.get(release, tf.LlamaConfig)
    own = {"head_dim": 32} if release == "4.5" else {}
    return lambda: minicpm_oracle.Config(
        release, text(**TEXT | dict(hidden_size=256, num_attention_heads=8), **own, **over), VISION
    )


def minicpmv_pieces(generator: torch.Generator) -> Arrays:
    """An image as a whole, and two pieces of it."""
    whole, piece = (torch.randint(2, 8, (2,), generator=generator).tolist() for _ in range(2))
    sizes, patch = [whole, piece, piece], minicpm_oracle.PATCH
    pixels = rand(generator, 1, 3, patch, patch * sum(height * width for height, width in sizes))
    return {"pixel_values": pixels, "target_sizes": torch.tensor(sizes)}


def minicpmv_frames(generator: torch.Generator) -> Arrays:
    """Five frames, of which up to two are seen at once."""
    size, patch = torch.randint(2, 6, (2,), generator=generator).tolist(), minicpm_oracle.PATCH
    return {
        "pixel_values": rand(generator, 1, 3, patch, patch * 5 * size[0] * size[1]),
        "target_sizes": torch.tensor([size] * 5), "temporal_ids": torch.tensor([0, 3, 7, 10, 31]),
        "packs": torch.tensor([2, 2, 1]),
    }  # fmt: skip


MINICPM_MARKS = dict(image_start_id=290, image_end_id=292, slice_start_id=293, slice_end_id=294, newline_id=295)


def minicpmv47(**tokens: int) -> Any:
    return tf.MiniCPMV4_7Config(
        vision_config=dict(**VISION, image_size=64, patch_size=4, insert_layer_id=1), insert_layer_id=1,
        text_config=tf.Qwen3_5TextConfig(**QWEN3_5), **MINICPM_MARKS, **tokens,
    )  # fmt: skip


def canvas_slices(generator: torch.Generator) -> Arrays:
    """Of two rows of two, or none."""
    height, width = (4 * int(torch.randint(1, 4, (), generator=generator)) for _ in range(2))
    sizes = [[8, 4]] + [[height, width]] * (4 * int(torch.randint(0, 2, (), generator=generator)))
    pixels = rand(generator, 1, 3, 4, 4 * sum(one * other for one, other in sizes))
    return {"pixel_values": pixels, "target_sizes": torch.tensor(sizes)}


def canvas_frames(generator: torch.Generator) -> Arrays:
    """One after another."""
    sizes = [[8, 4], [4, 12], [4, 4]]
    pixels = rand(generator, 1, 3, 4, 4 * sum(one * other for one, other in sizes))
    return {"pixel_values_videos": pixels, "target_sizes_videos": torch.tensor(sizes)}


def canvas_tokens(arrays: Arrays) -> list[int]:
    start, end, slice_start, slice_end, newline = MINICPM_MARKS.values()
    sizes = arrays["target_sizes" if "target_sizes" in arrays else "target_sizes_videos"]
    first, *others = ([IMAGE] * (height * width // 16) for height, width in sizes.tolist())
    if "target_sizes" not in arrays:
        return [token for frame in (first, *others) for token in (start, *frame, end)]
    slices = [token for number, one in enumerate(others)
              for token in ([newline] if number == 2 else []) + [slice_start, *one, slice_end]]  # fmt: skip
    return [start, *first, end, *slices]


def minicpmv_tokens(arrays: Arrays) -> list[int]:
    """With marks between pieces."""
    num = len(arrays.get("packs", arrays["target_sizes"]))
    return ([*[IMAGE] * minicpm_oracle.QUERIES, 17, 18] * num)[:-2]


def minicpmo() -> Any:
    return minicpm_oracle.Config(
        "2.6", tf.Qwen2Config(**TEXT | dict(hidden_size=256, num_attention_heads=8)), VISION,
        audio=minicpm_oracle.AUDIO,
    )  # fmt: skip


def minicpmo_audio(generator: torch.Generator) -> Arrays:
    """Two half minutes, of which the second is shorter."""
    count = int(torch.randint(21, 60, (), generator=generator))
    return {"input_features": rand(generator, 2, 16, 60), "piece_lens": torch.tensor([60, count])}


def minicpmo_tokens(arrays: Arrays) -> list[int]:
    """Ten at most between marks."""
    num = sum((count + 1) // 2 // 2 for count in arrays["piece_lens"].tolist())
    tokens = [token for at in range(num) for token in ([17, 18] if at and at % 10 == 0 else []) + [IMAGE]]
    return tokens


def minicpmv_family(release: str, **over: Any) -> Family:
    return Family(
        minicpmv(release, **over), minicpmv_pieces, joined_by={"pixel_values": 3}, written=minicpmv_tokens,
        make=minicpm_oracle.MiniCPMV,
    )  # fmt: skip


IDEFICS = {"pixel_values": 1, "pixel_attention_mask": 1}
FAMILIES: dict[str, Family] = {
    "LlavaForConditionalGeneration": Family(both(tf.LlavaConfig, clip, llama, image_token_index=IMAGE), square),
    "LlavaForConditionalGeneration pixtral": Family(
        both(tf.LlavaConfig, pixtral, lambda: tf.MistralConfig(**TEXT, sliding_window=None), image_token_index=IMAGE,
             vision_feature_layer=-1, vision_feature_select_strategy="full"), sized,
    ),
    "VipLlavaForConditionalGeneration": Family(
        both(tf.VipLlavaConfig, clip, llama, image_token_index=IMAGE, vision_feature_layers=[-2, -1, 1]), square
    ),
    "LlavaNextForConditionalGeneration": Family(
        both(tf.LlavaNextConfig, clip, llama, image_token_index=IMAGE, image_grid_pinpoints=[[28, 56], [56, 28]]),
        anyres,
    ),
    "LlavaOnevisionForConditionalGeneration": Family(
        both(tf.LlavaOnevisionConfig, siglip, qwen2, image_token_index=IMAGE, video_token_index=291,
             image_grid_pinpoints=[[28, 56], [56, 28]]), anyres,
    ),
    "Qwen2VLForConditionalGeneration": Family(qwen2_vl, patches("pixel_values", "image_grid_thw"), types="mm"),
    "Qwen2VLForConditionalGeneration video": Family(
        qwen2_vl, patches("pixel_values_videos", "video_grid_thw", 3), modality="video", types="mm"
    ),
    "Qwen2_5_VLForConditionalGeneration": Family(
        qwen2_5_vl, patches("pixel_values", "image_grid_thw"), types="mm"
    ),
    "Qwen2_5_VLForConditionalGeneration video": Family(
        qwen2_5_vl, patches("pixel_values_videos", "video_grid_thw", 3), modality="video", types="mm"
    ),
    "Qwen3VLForConditionalGeneration": Family(
        qwen3_vl(tf.Qwen3VLConfig), patches("pixel_values", "image_grid_thw"), types="mm"
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        qwen3_vl(tf.Qwen3VLMoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                 decoder_sparse_step=1), patches("pixel_values", "image_grid_thw"), types="mm",
    ),
    "Qwen3VLMoeForConditionalGeneration video": Family(
        qwen3_vl(tf.Qwen3VLMoeConfig, image=291, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                 decoder_sparse_step=1), patches("pixel_values_videos", "video_grid_thw", 3), modality="video",
        types="mm", between=(292, 17, 290),
    ),
    "Qwen3VLForConditionalGeneration video": Family(
        qwen3_vl(tf.Qwen3VLConfig, image=291), patches("pixel_values_videos", "video_grid_thw", 3), modality="video",
        types="mm", between=(292, 17, 290),
    ),
    "Glm4vForConditionalGeneration": Family(
        glm4v(tf.Glm4vConfig), patches("pixel_values", "image_grid_thw"), types="mm"
    ),
    "Glm4vForConditionalGeneration video": Family(
        glm4v(tf.Glm4vConfig), patches("pixel_values_videos", "video_grid_thw", 3), modality="video", types="mm",
        between=(292, 17, 290),
    ),
    "Glm4vMoeForConditionalGeneration": Family(
        glm4v(tf.Glm4vMoeConfig, **GLM_MOE), patches("pixel_values", "image_grid_thw"), types="mm"
    ),
    "Glm4vMoeForConditionalGeneration video": Family(
        glm4v(tf.Glm4vMoeConfig, **GLM_MOE), patches("pixel_values_videos", "video_grid_thw", 3), modality="video",
        types="mm", between=(292, 17, 290),
    ),
    "Gemma3ForConditionalGeneration": Family(
        both(tf.Gemma3Config, siglip, lambda: tf.Gemma3TextConfig(
            **TEXT, head_dim=16, sliding_window=12,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
            image_token_id=IMAGE, mm_tokens_per_image=16), square, types="image",
    ),
    "Gemma3nForConditionalGeneration": Family(
        gemma3n, lambda generator: {"pixel_values": rand(generator, 1, 3, 64, 64)}
    ),
    "Gemma3nForConditionalGeneration audio": Family(
        lambda: gemma3n(image_token_id=291, audio_token_id=IMAGE), gemma3n_audio, modality="audio",
        written=lambda arrays: [IMAGE] * 6,
    ),
    "PaliGemmaForConditionalGeneration": Family(
        both(tf.PaliGemmaConfig, lambda: siglip(projection_dim=64), lambda: tf.GemmaConfig(**TEXT, head_dim=16),
             image_token_index=IMAGE, projection_dim=64), square, types="suffix",
    ),
    "PaliGemmaForConditionalGeneration 2": Family(
        both(tf.PaliGemmaConfig, lambda: siglip(projection_dim=64), lambda: tf.Gemma2Config(
            **TEXT, head_dim=16, sliding_window=12), image_token_index=IMAGE, projection_dim=64), square,
        types="suffix",
    ),
    "Idefics3ForConditionalGeneration": Family(
        both(tf.Idefics3Config, lambda: tf.Idefics3VisionConfig(**VISION, image_size=28, patch_size=7), llama,
             image_token_id=IMAGE, scale_factor=2), tiles, joined_by=IDEFICS,
    ),
    "SmolVLMForConditionalGeneration": Family(
        both(tf.SmolVLMConfig, lambda: tf.SmolVLMVisionConfig(**VISION, image_size=28, patch_size=7), llama,
             image_token_id=IMAGE, scale_factor=2), tiles, joined_by=IDEFICS,
    ),
    "InternVLForConditionalGeneration": Family(
        both(tf.InternVLConfig, lambda: tf.InternVLVisionConfig(**VISION, image_size=[28, 28], patch_size=[7, 7]),
             qwen2, image_token_id=IMAGE), several_tiles,
    ),
    "InternVLForConditionalGeneration video": Family(
        both(tf.InternVLConfig, lambda: tf.InternVLVisionConfig(**VISION, image_size=[28, 28], patch_size=[7, 7]),
             qwen2, image_token_id=IMAGE), several_tiles, modality="video", written=lambda arrays: [IMAGE] * 8,
    ),
    "Mistral3ForConditionalGeneration": Family(
        both(tf.Mistral3Config, pixtral, lambda: tf.MistralConfig(**TEXT, sliding_window=None),
             image_token_index=IMAGE), sized,
    ),
    "AyaVisionForConditionalGeneration": Family(
        both(tf.AyaVisionConfig, siglip, lambda: tf.Cohere2Config(**TEXT, sliding_window=16, head_dim=16),
             image_token_index=IMAGE), several_tiles,
    ),
    "Cohere2VisionForConditionalGeneration": Family(
        both(tf.Cohere2VisionConfig, siglip, lambda: tf.Cohere2Config(**TEXT, sliding_window=16, head_dim=16),
             image_token_id=IMAGE, alignment_intermediate_size=64), several_tiles,
    ),
    "AriaForConditionalGeneration": Family(
        both(tf.AriaConfig, lambda: tf.Idefics3VisionConfig(**VISION, image_size=28, patch_size=7),
             lambda: tf.AriaTextConfig(**TEXT, moe_num_experts=4, head_dim=16), image_token_index=IMAGE,
             projector_patch_to_query_dict={16: 8}), square,
    ),
    "GotOcr2ForConditionalGeneration": Family(
        both(tf.GotOcr2Config, lambda: tf.GotOcr2VisionConfig(
            hidden_size=32, output_channels=16, num_hidden_layers=2, num_attention_heads=4, image_size=64, patch_size=4,
            window_size=4, global_attn_indexes=[1], mlp_dim=48), qwen2, image_token_index=IMAGE),
        lambda generator: {"pixel_values": rand(generator, 1, 3, 64, 64)},
    ),
    "VideoLlavaForConditionalGeneration": Family(
        both(tf.VideoLlavaConfig, clip, llama, image_token_index=IMAGE, video_token_index=291),
        lambda generator: {"pixel_values_images": rand(generator, 1, 3, 28, 28)},
    ),
    "VoxtralForConditionalGeneration": Family(
        lambda: tf.VoxtralConfig(
            audio_config=dict(hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                              num_mel_bins=16, max_source_positions=32), text_config=llama(), audio_token_id=IMAGE),
        lambda generator: {"input_features": rand(generator, 1, 16, 64)}, modality="audio",
    ),
    "LlavaOnevisionForConditionalGeneration video": Family(
        both(tf.LlavaOnevisionConfig, siglip, qwen2, image_token_index=291, video_token_index=IMAGE,
             image_grid_pinpoints=[[28, 56], [56, 28]]),
        lambda generator: {"pixel_values_videos": rand(generator, 1, 2, 3, 28, 28)}, modality="video",
    ),
    "LlavaNextVideoForConditionalGeneration": Family(
        both(tf.LlavaNextVideoConfig, clip, llama, image_token_index=IMAGE, video_token_index=291,
             image_grid_pinpoints=[[28, 56], [56, 28]]), anyres,
    ),
    "LlavaNextVideoForConditionalGeneration video": Family(
        both(tf.LlavaNextVideoConfig, clip, llama, image_token_index=291, video_token_index=IMAGE,
             image_grid_pinpoints=[[28, 56], [56, 28]]),
        lambda generator: {"pixel_values_videos": rand(generator, 1, 2, 3, 28, 28)}, modality="video",
    ),
    "DeepseekVLForConditionalGeneration": Family(
        both(tf.DeepseekVLConfig, siglip, llama, image_token_id=IMAGE), square
    ),
    "Lfm2VlForConditionalGeneration": Family(
        both(tf.Lfm2VlConfig, lambda: tf.Siglip2VisionConfig(**VISION, num_patches=16, patch_size=7),
             lambda: tf.Lfm2Config(**TEXT, full_attn_idxs=[1], block_auto_adjust_ff_dim=False), image_token_id=IMAGE,
             projector_hidden_size=48),
        lambda generator: {
            "pixel_values": rand(generator, 1, 16, 147), "spatial_shapes": torch.tensor([[4, 4]]),
            "pixel_attention_mask": torch.ones((1, 16), dtype=torch.int32)},
    ),
    "Llama4ForConditionalGeneration": Family(
        both(tf.Llama4Config, lambda: tf.Llama4VisionConfig(
            **VISION | dict(intermediate_size=128), image_size=28, patch_size=7, vision_output_dim=64,
            projector_input_dim=64, projector_output_dim=64, pixel_shuffle_ratio=0.5),
            lambda: tf.Llama4TextConfig(**TEXT | dict(num_hidden_layers=4), intermediate_size_mlp=96, head_dim=16,
                                        num_local_experts=4, attention_chunk_size=128), image_token_index=IMAGE),
        several_tiles,
    ),
    "FuyuForCausalLM": Family(
        lambda: tf.FuyuConfig(text_config=tf.PersimmonConfig(**{k: v for k, v in TEXT.items()
                                                                if k != "num_key_value_heads"}).to_dict(),
                              patch_size=4, image_token_id=IMAGE, vocab_size=VOCAB, hidden_size=64,
                              tie_word_embeddings=False),
        lambda generator: {"image_patches": rand(generator, 1, 9, 48)},
    ),
    "AudioFlamingo3ForConditionalGeneration": Family(
        lambda: tf.AudioFlamingo3Config(
            audio_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                              num_mel_bins=16, max_source_positions=32), text_config=qwen2(), audio_token_id=IMAGE),
        lambda generator: {"input_features": rand(generator, 1, 16, 64),
                           "input_features_mask": torch.ones((1, 64), dtype=torch.int32)}, modality="audio",
    ),
    "Qwen2AudioForConditionalGeneration": Family(
        lambda: tf.Qwen2AudioConfig(
            audio_config=dict(d_model=32, encoder_ffn_dim=48, encoder_layers=2, encoder_attention_heads=4,
                              num_mel_bins=16, max_source_positions=32), text_config=qwen2(), audio_token_index=IMAGE),
        lambda generator: {"input_features": rand(generator, 1, 16, 64),
                           "feature_attention_mask": (torch.arange(64) < 50)[None].int()}, modality="audio",
    ),
    "LightOnOcrForConditionalGeneration": Family(
        both(tf.LightOnOcrConfig, pixtral, lambda: tf.Qwen3Config(**TEXT, head_dim=16), image_token_id=IMAGE), sized,
    ),
    "Glm46VForConditionalGeneration": Family(glm46v, patches("pixel_values", "image_grid_thw"), types="mm"),
    "Glm46VForConditionalGeneration video": Family(
        glm46v, patches("pixel_values_videos", "video_grid_thw", 3), modality="video", types="mm",
        between=(292, 17, 290),
    ),
    "GlmOcrForConditionalGeneration": Family(
        glm4v(tf.GlmOcrConfig, head_dim=16), patches("pixel_values", "image_grid_thw"), types="mm"
    ),
    "Qwen3_5ForConditionalGeneration": Family(
        qwen3_5(tf.Qwen3_5Config), patches("pixel_values", "image_grid_thw"), types="mm"
    ),
    "Qwen3_5ForConditionalGeneration video": Family(
        qwen3_5(tf.Qwen3_5Config, image=291), patches("pixel_values_videos", "video_grid_thw", 3), modality="video",
        types="mm", between=(292, 17, 290),
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        qwen3_5(tf.Qwen3_5MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                shared_expert_intermediate_size=32), patches("pixel_values", "image_grid_thw"), types="mm",
    ),
    "Qwen3_5MoeForConditionalGeneration video": Family(
        qwen3_5(tf.Qwen3_5MoeConfig, image=291, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                shared_expert_intermediate_size=32), patches("pixel_values_videos", "video_grid_thw", 3),
        modality="video", types="mm", between=(292, 17, 290),
    ),
    "Exaone4_5_ForConditionalGeneration": Family(
        lambda: tf.Exaone4_5_Config(
            vision_config=dict(depth=2, hidden_size=32, out_hidden_size=64, intermediate_size=48, num_heads=4,
                               num_key_value_heads=2, patch_size=4, window_size=16, fullatt_block_indexes=[1]),
            text_config=tf.Exaone4Config(**TEXT, sliding_window=16), image_token_id=IMAGE, video_token_id=291),
        patches("pixel_values", "image_grid_thw"),
    ),
    "PaddleOCRVLForConditionalGeneration": Family(
        lambda: tf.PaddleOCRVLConfig(
            vision_config=dict(**VISION, image_size=32, patch_size=4), tie_word_embeddings=False,
            text_config=TEXT | dict(head_dim=16, rope_parameters=MROPE), image_token_id=IMAGE, video_token_id=291),
        frames_of(3, 4, 4), types="mm",
    ),
    "VideoLlama3ForConditionalGeneration": Family(
        lambda: tf.VideoLlama3Config(
            vision_config=dict(**VISION, patch_size=4), text_config=qwen2(), image_token_id=IMAGE, video_token_id=291),
        lambda generator: frames_of(48)(generator) | {"image_merge_sizes": torch.tensor([2])},
    ),
    "Kimi_K25ForConditionalGeneration": Family(kimi_k25, frames_of(3, 4, 4)),
    "KimiVLForConditionalGeneration": Family(
        lambda: kimi_k25(tie_word_embeddings=False), frames_of(3, 4, 4), make=tf.Kimi_K25ForConditionalGeneration,
        rewrite=as_kimi_vl,
    ),
    "DeepseekVLV2ForCausalLM": Family(
        lambda: deepseek_vl2.config("tiny"), deepseek_vl2.drawn, written=deepseek_vl2.tokens, make=deepseek_vl2.Oracle
    ),
    "DeepseekVLV2ForCausalLM small": Family(
        lambda: deepseek_vl2.config("small"), deepseek_vl2.drawn, written=deepseek_vl2.tokens, make=deepseek_vl2.Oracle
    ),
    "DeepseekVLV2ForCausalLM base": Family(
        lambda: deepseek_vl2.config("base", global_view_pos="tail"), deepseek_vl2.drawn, written=deepseek_vl2.tokens,
        make=deepseek_vl2.Oracle,
    ),
    "DeepseekOCRForCausalLM": Family(
        deepseek_ocr.config, deepseek_ocr.drawn, written=deepseek_ocr.tokens, join=deepseek_ocr.several,
        make=deepseek_ocr.Oracle,
    ),
    "QianfanOCRForConditionalGeneration": Family(
        both(tf.QianfanOCRConfig, lambda: tf.QianfanOCRVisionConfig(**VISION, image_size=[28, 28], patch_size=[7, 7]),
             lambda: tf.Qwen3Config(**TEXT, head_dim=16), image_token_id=IMAGE), several_tiles,
    ),
    "Idefics2ForConditionalGeneration": Family(
        lambda: tf.Idefics2Config(
            vision_config=dict(**VISION, image_size=28, patch_size=7), image_token_id=IMAGE,
            perceiver_config=dict(hidden_size=64, resampler_n_latents=6, resampler_depth=1, resampler_n_heads=2,
                                  resampler_head_dim=16, num_key_value_heads=1),
            text_config=tf.MistralConfig(**TEXT, sliding_window=None)), tiles, joined_by=IDEFICS,
    ),
    "MiniCPMV4_6ForConditionalGeneration": Family(
        lambda: tf.MiniCPMV4_6Config(
            vision_config=dict(**VISION, image_size=64, patch_size=4, insert_layer_id=1), image_token_id=IMAGE,
            text_config=tf.Qwen3_5TextConfig(**QWEN3_5), insert_layer_id=1),
        lambda generator: {"pixel_values": rand(generator, 1, 3, 4, 4 * 32), "target_sizes": torch.tensor([[4, 8]])},
        joined_by={"pixel_values": 3},
    ),
    "MiniCPMOcrForConditionalGeneration": Family(
        lambda: tf.MiniCPMOcrConfig(
            vision_config=dict(**VISION, image_size=64, patch_size=4, insert_layer_id=1), image_token_id=IMAGE,
            text_config=tf.Qwen3_5TextConfig(**QWEN3_5), insert_layer_id=1),
        lambda generator: {"pixel_values": rand(generator, 1, 3, 4, 4 * (32 + 2 * 24)),
                           "target_sizes": torch.tensor([[4, 8], [6, 4], [6, 4]])},
        joined_by={"pixel_values": 3},
    ),
    **{f"{name}ForConditionalGeneration video": Family(
        lambda make=make: make(
            vision_config=dict(**VISION, image_size=64, patch_size=4, insert_layer_id=1), image_token_id=291,
            video_token_id=IMAGE, text_config=tf.Qwen3_5TextConfig(**QWEN3_5), insert_layer_id=1),
        lambda generator: {"pixel_values_videos": rand(generator, 1, 3, 4, 4 * 64),
                           "target_sizes_videos": torch.tensor([[4, 8]] * 2)},
        modality="video", joined_by={"pixel_values_videos": 3},
    ) for name, make in (("MiniCPMV4_6", tf.MiniCPMV4_6Config), ("MiniCPMOcr", tf.MiniCPMOcrConfig))},
    "MiniCPMV4_7ForConditionalGeneration": Family(
        lambda: minicpmv47(image_token_id=IMAGE, video_token_id=291), canvas_slices, joined_by={"pixel_values": 3},
        written=canvas_tokens, types="mm",
    ),
    "MiniCPMV4_7ForConditionalGeneration video": Family(
        lambda: minicpmv47(image_token_id=291, video_token_id=IMAGE), canvas_frames, modality="video",
        joined_by={"pixel_values_videos": 3}, written=canvas_tokens, types="mm",
    ),
    "MiniCPMV 2.5": minicpmv_family("2.5"),
    "MiniCPMV 2.6": minicpmv_family("2.6"),
    "MiniCPMV 4.0": minicpmv_family("4.0"),
    "MiniCPMV 4.5": minicpmv_family("4.5"),
    "MiniCPMV video": Family(
        minicpmv("4.5"), minicpmv_frames, modality="video", joined_by={"pixel_values": 3}, written=minicpmv_tokens,
        make=minicpm_oracle.MiniCPMV,
    ),
    "MiniCPMO": Family(
        minicpmo, minicpmv_pieces, joined_by={"pixel_values": 3}, written=minicpmv_tokens, make=minicpm_oracle.MiniCPMO
    ),
    "MiniCPMO audio": Family(
        minicpmo, minicpmo_audio, modality="audio", written=minicpmo_tokens, make=minicpm_oracle.MiniCPMO
    ),
    "JanusForConditionalGeneration": Family(
        both(tf.JanusConfig, lambda: tf.JanusVisionConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=7, mlp_ratio=2.0,
            projection_dim=64, num_image_tokens=16), llama, image_token_id=IMAGE,
            vq_config=dict(embed_dim=4, num_embeddings=16, latent_channels=32, base_channels=32, projection_dim=64,
                           channel_multiplier=[1, 1], num_res_blocks=1, image_token_embed_dim=64)), square,
    ),
    "DeepseekVLHybridForConditionalGeneration": Family(
        both(tf.DeepseekVLHybridConfig, lambda: siglip(), llama, image_token_id=IMAGE, high_res_vision_config=dict(
            hidden_size=32, output_channels=16, num_hidden_layers=2, num_attention_heads=4, image_size=64, patch_size=4,
            window_size=4, global_attn_indexes=[1], mlp_dim=48)),
        lambda generator: {"pixel_values": rand(generator, 1, 3, 28, 28),
                           "high_res_pixel_values": rand(generator, 1, 3, 64, 64)},
    ),
    "GraniteSpeechForConditionalGeneration": Family(
        lambda: tf.GraniteSpeechConfig(
            encoder_config=dict(input_dim=8, num_layers=2, hidden_dim=32, num_heads=4, output_dim=8, context_size=10,
                                max_pos_emb=16, conv_kernel_size=3), text_config=tf.GraniteConfig(**TEXT),
            projector_config=dict(model_type="blip_2_qformer", hidden_size=32, num_hidden_layers=1,
                                  num_attention_heads=4, intermediate_size=48, encoder_hidden_size=32, vocab_size=8),
            audio_token_index=IMAGE, has_lora_adapter=False, downsample_rate=5, window_size=15,
            tie_word_embeddings=False),
        lambda generator: {"input_features": rand(generator, 1, 40, 8),
                           "input_features_mask": torch.arange(9)[None] < 8}, modality="audio",
    ),
    "DeepseekOcr2ForConditionalGeneration": Family(
        lambda: tf.DeepseekOcr2Config(
            vision_config=dict(
                sam_config=dict(hidden_size=32, output_channels=16, num_hidden_layers=2, num_attention_heads=4,
                                image_size=64, patch_size=4, window_size=4, global_attn_indexes=[1], mlp_dim=48,
                                downsample_channels=[16, 24]),
                encoder_config=dict(hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                                    num_key_value_heads=2, vocab_size=8)),
            text_config=TEXT | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                    n_shared_experts=1, mlp_layer_types=["dense", "sparse", "sparse"]),
            image_token_id=IMAGE),
        lambda generator: {"pixel_values": rand(generator, 1, 3, 64, 64), "num_local_patches": torch.tensor([0])},
    ),
    "DeepseekOCR2ForCausalLM": Family(
        deepseek_ocr2,
        lambda generator: {"pixel_values": rand(generator, 1, 3, 128, 128), "num_local_patches": torch.tensor([0])},
        make=tf.DeepseekOcr2ForConditionalGeneration, rewrite=as_deepseek_ocr2,
    ),
    "Ovis2ForConditionalGeneration": Family(
        lambda: tf.Ovis2Config(
            vision_config=dict(**VISION, image_size=28, patch_size=7, hidden_stride=2, vocab_size=40),
            text_config=qwen2(), image_token_id=IMAGE, visual_indicator_token_ids=OVIS_MARKS, hidden_size=64,
            vocab_size=VOCAB, tie_word_embeddings=False),
        ovis_tiles, written=ovis_tokens,
    ),
    "PerceptionLMForConditionalGeneration": Family(
        both(tf.PerceptionLMConfig, lambda: clip(model_args={"embed_dim": 32}), llama, image_token_id=IMAGE,
             video_token_id=291, projector_pooling_ratio=2),
        lambda generator: {"pixel_values": rand(generator, 1, 3, 3, 28, 28)},
    ),
    "PerceptionLMForConditionalGeneration video": Family(
        both(tf.PerceptionLMConfig, lambda: clip(model_args={"embed_dim": 32}), llama, image_token_id=291,
             video_token_id=IMAGE, projector_pooling_ratio=2),
        lambda generator: {"pixel_values_videos": rand(generator, 1, 2, 3, 28, 28)}, modality="video",
        written=lambda arrays: [IMAGE] * 8,
    ),
    "MolmoForCausalLM": Family(
        lambda: molmo(clip_qkv=4.0), molmo_crops, written=molmo_tokens, join=molmo_joined, make=make_molmo
    ),
    "MolmoForCausalLM olmo": Family(
        lambda: molmo(attention_layer_norm=True, norm_after=True, qkv_bias=False, num_key_value_heads=4,
                      vision_backbone=molmo_oracle.CONFIG["vision_backbone"] | {"image_num_pos": 10}),
        molmo_crops, written=molmo_tokens, join=molmo_joined, make=make_molmo,
    ),
    "MolmoForCausalLM experts": Family(
        lambda: molmo(attention_layer_norm=True, qkv_bias=False, num_key_value_heads=4, moe_num_experts=4, moe_top_k=2,
                      intermediate_size=64),
        molmo_crops, written=molmo_tokens, join=molmo_joined, make=make_molmo,
    ),
    "Molmo2ForConditionalGeneration": Family(
        molmo2, molmo2_crops, written=molmo2_tokens, join=molmo2_joined, types="marks"
    ),
    "Molmo2ForConditionalGeneration olmo": Family(
        molmo2_olmo, molmo2_crops, written=molmo2_tokens, join=molmo2_joined, types="marks"
    ),
    "Molmo2ForConditionalGeneration video": Family(
        molmo2, molmo2_frames, modality="video", written=molmo2_times, join=molmo2_joined, types="marks"
    ),
    "Phi4MultimodalForCausalLM": Family(
        phi4, phi4_crops, written=lambda arrays: [IMAGE] * (2 * (3 + 1) + 1 + 2 * (2 + 1))
    ),
    "Phi4MultimodalForCausalLM audio": Family(
        lambda: phi4(image=291, audio=IMAGE), phi4_audio, modality="audio", written=lambda arrays: [IMAGE] * 8
    ),
    "Phi4MMForCausalLM": Family(
        lambda: phi4(longrope=True), phi4_crops, written=lambda arrays: [IMAGE] * (2 * (3 + 1) + 1 + 2 * (2 + 1)),
        make=tf.Phi4MultimodalForCausalLM, rewrite=as_phi4mm,
    ),
    "Phi4MMForCausalLM audio": Family(
        lambda: phi4(longrope=True, image=291, audio=IMAGE), phi4_audio, modality="audio",
        written=lambda arrays: [IMAGE] * 8, make=tf.Phi4MultimodalForCausalLM, rewrite=as_phi4mm,
    ),
    "UltravoxModel": Family(
        lambda: ultravox_model.config_of(llama()), ultravox_model.draw, modality="audio",
        join=lambda items: {"clips": items}, make=ultravox_model.Ultravox,
    ),
    "UltravoxModel mid": Family(
        lambda: ultravox_model.config_of(tf.Qwen3Config(**TEXT, head_dim=16, tie_word_embeddings=True), "gelu", True),
        ultravox_model.draw, modality="audio", join=lambda items: {"clips": items}, make=ultravox_model.Ultravox,
    ),
    "GlmAsrForConditionalGeneration": Family(
        lambda: tf.GlmAsrConfig(
            audio_config=dict(model_type="glmasr_encoder", hidden_size=32, intermediate_size=128, num_hidden_layers=2,
                              num_attention_heads=4, num_mel_bins=16, max_position_embeddings=64),
            text_config=llama(), audio_token_id=IMAGE, tie_word_embeddings=False),
        lambda generator: {"input_features": rand(generator, 1, 16, 64),
                           "input_features_mask": (torch.arange(64) < 50)[None].int()}, modality="audio",
    ),
    "Qwen3ASRForConditionalGeneration": Family(
        lambda: tf.Qwen3ASRConfig(
            audio_config=dict(model_type="qwen3_asr_encoder", d_model=32, encoder_ffn_dim=48, encoder_layers=2,
                              encoder_attention_heads=4, num_mel_bins=16, n_window_infer=100, output_dim=64,
                              downsample_hidden_size=8), text_config=tf.Qwen3Config(**TEXT, head_dim=16),
            audio_token_id=IMAGE, tie_word_embeddings=False),
        lambda generator: {"input_features": rand(generator, 1, 16, 200),
                           "input_features_mask": (torch.arange(200) < 150)[None].int()}, modality="audio",
    ),
}  # fmt: skip


def without_timm() -> Any:
    """transformers' Gemma 3n takes its vision encoder from timm, which wants torchvision: here it gets ours."""
    make = tf.AutoModel.from_config

    def from_config(config: Any, *args: Any, **options: Any) -> Any:
        return VisionTower(config) if isinstance(config, tf.Gemma3nVisionConfig) else make(config, *args, **options)

    return mock.patch.object(tf.AutoModel, "from_config", from_config)


def make_model(name: str, folder: Path, seed: int = 0) -> Any:
    """The transformers model; its checkpoint is in `folder`."""
    family = FAMILIES[name]
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    with warnings.catch_warnings(), without_timm():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        config = family.config()
        make = family.make or getattr(tf, name.partition(" ")[0])
        model = make(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        table = model.get_input_embeddings()
        if hasattr(table, "scalar_embed_scale"):
            table.weight.div_(table.scalar_embed_scale)
    model.save_pretrained(folder)
    if family.rewrite is not None:
        family.rewrite(folder)
    write_tokenizer(folder)
    return model


METHODS = {"image": "get_image_features", "video": "get_video_features", "audio": "get_audio_features"}


def vectors_of(model: Any, modality: str, arrays: Arrays) -> int:
    if "image_patches" in arrays:
        return arrays["image_patches"].shape[1]
    if "feature_attention_mask" in arrays:  # one of two frames, twice
        return (int(arrays["feature_attention_mask"].sum() - 1) // 2 + 1 - 2) // 2 + 1
    if "GraniteSpeech" in type(model).__name__:
        return int(arrays["input_features_mask"].sum())
    method = getattr(model.model if hasattr(model, "model") else model, METHODS[modality])
    known = inspect.signature(method).parameters
    if "pixel_values_videos" in arrays and "pixel_values_videos" not in known:  # transformers before 5.22
        ends = "Onevision" in type(model).__name__  # a vector that the forward pass adds
        return ends + vectors_of(model, modality, {"pixel_values": arrays["pixel_values_videos"]})
    if "vision_feature_select_strategy" in known and "Llama4" in type(model).__name__:
        method = partial(method, vision_feature_select_strategy="default")
    with torch.inference_mode():
        out = method(**arrays)
    if not isinstance(out, list | tuple | Tensor):
        out = out.last_hidden_state if out.pooler_output is None else out.pooler_output
    parts = [out] if isinstance(out, Tensor) else out
    return sum(part.numel() // part.shape[-1] for part in parts)


def array_of(tensor: Tensor) -> ArrayData:
    return ArrayData(
        tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.contiguous().numpy().tobytes()
    )


@dataclass(frozen=True)
class DrawnItem:
    modality: str
    arrays: Arrays
    count: int
    between: tuple[int, ...] = ()
    written: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """What stands for it in a prompt."""
        if self.written:
            return list(self.written)
        if not self.between:
            return [IMAGE] * self.count
        frames = int(self.arrays["video_grid_thw"][0, 0])
        each = [*[IMAGE] * (self.count // frames), *self.between]
        return (each * frames)[: -len(self.between)]

    def at(self, offset: int) -> MediaItem:
        arrays = {name: array_of(tensor) for name, tensor in self.arrays.items()}
        key = hashlib.sha256(b"".join(array.data for array in arrays.values())).hexdigest()
        tokens = self.tokens
        mask = bytes([token == IMAGE if self.between else token in NOT_SAID for token in tokens])
        mask = b"" if all(mask) else mask
        return MediaItem(
            modality=self.modality, key=key, offset=offset, length=len(tokens), arrays=arrays, takes_vector=mask
        )


def draw_item(name: str, model: Any, seed: int) -> DrawnItem:
    family = FAMILIES[name]
    arrays = family.draw(torch.Generator().manual_seed(seed))
    if family.written:
        tokens = tuple(family.written(arrays))
        return DrawnItem(family.modality, arrays, len(tokens), written=tokens)
    return DrawnItem(family.modality, arrays, vectors_of(model, family.modality, arrays), family.between)


Piece = list[int] | DrawnItem


def prompt_of(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Tokens, and items between them, as a prompt of Quire's."""
    ids: list[int] = []
    items: list[MediaItem] = []
    for piece in pieces:
        if isinstance(piece, DrawnItem):
            items.append(piece.at(len(ids)))
            ids += piece.tokens
        else:
            ids += piece
    return {"prompt_token_ids": ids} | ({"multi_modal_data": tuple(items)} if items else {})


def types_of(family: Family, ids: Tensor, num_prompt: int) -> Arrays:
    is_prompt = torch.arange(ids.shape[1])[None] < num_prompt
    is_media = (ids == IMAGE) & is_prompt
    match family.types:
        case "mm":
            return {"mm_token_type_ids": is_media.int() * (2 if family.modality == "video" else 1)}
        case "marks":
            return {"mm_token_type_ids": (torch.isin(ids, torch.tensor(NOT_SAID)) & is_prompt).int()}
        case "image":
            return {"token_type_ids": is_media.long()}
        case "suffix":
            return {"token_type_ids": (~is_prompt).long()}
    return {}


def is_greedy(name: str, model: Any, pieces: Sequence[Piece], answer: list[int]) -> bool:
    """Whether transformers, scoring prompt and answer in one pass, would have said every token of the answer, if it may
    not say the token of media: that would be an item without pixels."""
    family, prompt = FAMILIES[name], prompt_of(pieces)
    drawn = [piece for piece in pieces if isinstance(piece, DrawnItem)]
    dims, inputs = family.joined_by or {}, {}
    if family.join is not None and drawn:
        inputs = family.join([one.arrays for one in drawn])
    for key in drawn[0].arrays if drawn and family.join is None else ():
        inputs[key] = torch.cat([one.arrays[key] for one in drawn], dims.get(key, 0))
    ids = torch.tensor([prompt["prompt_token_ids"] + answer])
    inputs |= types_of(family, ids, len(prompt["prompt_token_ids"]))
    with torch.inference_mode():
        logits = model(input_ids=ids, **inputs).logits[0].clone()
        logits[:, [token for token in NOT_SAID if token < logits.shape[1]]] = -torch.inf
    start = len(prompt["prompt_token_ids"]) - 1
    return bool((logits[start:-1].argmax(-1) == torch.tensor(answer)).all())
