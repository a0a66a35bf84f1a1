"""Configurations of classes that stand in for those transformers lacks: what is wrong with the files is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.hf_models.equivalents import equivalent_of
from quire.hf_models.towers import load_tower
from quire.schema.errors import CheckpointError, NotBuiltError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vision_config": [1]}, "vision_config must be a mapping, not"),
        ({"text_config": "x"}, "text_config must be a mapping, not"),
        ({"vision_config": {"init_pos_emb_height": 10**9}}, "init_pos_emb_height"),
    ],
)
def test_a_hostile_kimi_vl(given: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        equivalent_of({"architectures": ["KimiVLForConditionalGeneration"], **given})


PHI4MM: dict[str, Any] = {
    "architectures": ["Phi4MMForCausalLM"], "hidden_size": 64, "vocab_size": 320, "img_processor": None,
    "embd_layer": {"image_embd_layer": {"crop_size": 448}, "audio_embd_layer": {}},
    "audio_processor": {"name": "cascades", "config": {"attention_dim": 32, "attention_heads": 4}},
}  # fmt: skip


def test_phi_4_as_released() -> None:
    """Its configuration says nothing of the image encoder."""
    config, _ = equivalent_of(PHI4MM)
    vision = config["vision_config"]
    assert (vision["hidden_size"], vision["num_hidden_layers"], vision["image_size"]) == (1152, 27, 448)
    assert config["audio_config"] == {"hidden_size": 32, "num_attention_heads": 4}


def test_phi_4_of_released_sizes() -> None:
    """Shapes alone: nothing is computed."""
    encoder = {
        "activation": "swish", "attention_dim": 1024, "attention_heads": 16, "batch_norm": False, "bias_in_glu": True,
        "causal": True, "chunk_size": -1, "cnn_layer_norm": True, "conv_activation": "swish", "conv_glu_type": "swish",
        "depthwise_multiplier": 1, "depthwise_seperable_out_channel": 1024, "dropout_rate": 0.0,
        "encoder_embedding_config": {"input_size": 80}, "ext_pw_kernel_size": 1, "ext_pw_out_channel": 1024,
        "input_layer": "nemo_conv", "input_size": 80, "kernel_size": 3, "left_chunk": 18, "linear_units": 1536,
        "nemo_conv_settings": {"conv_channels": 1024}, "num_blocks": 24, "time_reduction": 8,
        "relative_attention_bias_args": {"t5_bias_max_distance": 500, "type": "t5"},
    }  # fmt: skip
    raw = PHI4MM | {"hidden_size": 3072, "vocab_size": 200064, "pad_token_id": 199999, "tie_word_embeddings": True,
                    "audio_processor": {"name": "cascades", "config": encoder}}  # fmt: skip
    tower = load_tower(raw, "", dtype=torch.bfloat16, device=torch.device("meta"), is_dummy=True)
    shapes = {name: tuple(one.shape) for name, one in tower.module.named_parameters()}
    image, audio = (f"model.embed_tokens_extend.{kind}_embed." for kind in ("image", "audio"))
    assert shapes[image + "img_projection_up.weight"] == (3072, 1152)
    assert shapes[image + "img_processor.embeddings.position_embedding.weight"] == (1024, 1152)
    assert shapes[audio + "encoder.relative_attention_bias_layer.bias_values.weight"] == (1000, 16)
    assert shapes[audio + "encoder.encoders.23.feed_forward_in.gate_up_proj.weight"] == (3072, 1024)
    assert shapes[audio + "up_proj_for_vision_speech.weight"] == (3072, 1024)
    assert not any("layers" in name and image not in name for name in shapes)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"embd_layer": "default"}, CheckpointError, "embd_layer must be a mapping, not 'default'"),
        ({"hidden_size": 10**9}, CheckpointError, "hidden_size=1000000000"),
        ({"img_processor": {"image_size": 10**9}}, CheckpointError, "image_size=1000000000"),
        ({"img_processor": {"image_size": 448, "patch_size": 256}}, CheckpointError, "fewer than two patches of 256"),
        ({"img_processor": {"num_attention_heads": 7}}, CheckpointError, "1152 is not a multiple of its 7 heads"),
        ({"img_processor": {"type_feature": "cls_patch"}}, NotBuiltError, "type_feature = 'cls_patch' in img_proc"),
        ({"embd_layer": {"image_embd_layer": {"crop_size": 336}}}, CheckpointError, "336; the encoder reads 448"),
        ({"embd_layer": {"image_embd_layer": {"hd_transform_order": "glb_sub"}}}, NotBuiltError, "'sub_glb' is"),
        ({"embd_layer": {"audio_embd_layer": {"use_qformer": True}}}, NotBuiltError, "use_qformer = True"),
        ({"embd_layer": {"audio_embd_layer": {"downsample_rate": 2}}}, NotBuiltError, "downsample_rate = 2"),
        ({"audio_processor": {"name": "other"}}, NotBuiltError, "name = 'other' in audio_processor"),
        ({"audio_processor": {"config": [1]}}, CheckpointError, "config must be a mapping"),
        ({"audio_processor": {"config": {"num_blocks": [1]}}}, CheckpointError, r"num_blocks is \[1\]; expected"),
        ({"audio_processor": {"config": {"attention_dim": 1 << 16, "num_blocks": 1024}}}, CheckpointError, "weights;"),
        ({"audio_processor": {"config": {"num_blocks": -1}}}, CheckpointError, "num_blocks=-1"),
        ({"audio_processor": {"config": {"time_reduction": 6}}}, CheckpointError, "time_reduction is 6; .* power of"),
        ({"audio_processor": {"config": {"attention_heads": 7}}}, CheckpointError, "1024 is not a multiple of its 7"),
        ({"audio_processor": {"config": {"chunk_size": 18}}}, NotBuiltError, "chunk_size = 18 .* -1 is"),
        ({"audio_processor": {"config": {"relative_attention_bias_args": {"t5_bias_max_distance": 1 << 40}}}},
         CheckpointError, "t5_bias_max_distance=1099511627776"),
    ],
)  # fmt: skip
def test_a_hostile_phi_4(given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        equivalent_of(PHI4MM | given)


def test_others_are_their_own() -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "vision_config": [1]}
    assert equivalent_of(raw) == (raw, {})
