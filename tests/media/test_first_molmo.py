"""The first Molmo: pixels, squares and tokens beside the oracle's, whole answers out of pictures and words, and files
and requests that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.hf_models.towers import load_tower
from quire.media import pixels
from quire.media.families import make_family
from quire.media.families.base import Family
from quire.media.settings import ProcessorFiles
from quire.models.build import read_arch
from quire.schema.errors import CheckpointError, ConfigError, InputError, QuireError
from tests import molmo_oracle
from tests.media.test_pixels_oracle import picture
from tests.media.tokens import CORPUS, write_tokenizer
from tests.media_models import make_model, molmo
from tests.molmo_oracle import CONFIG, Molmo, image_inputs

# preprocessor_config.json of published checkpoints
RELEASED: dict[str, Any] = {
    "base_image_input_size": [336, 336], "do_normalize": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_padding_mask": True, "image_patch_size": 14, "image_processor_type": "MolmoImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711], "image_token_length_h": 12, "image_token_length_w": 12,
    "max_crops": 12, "overlap_margins": [4, 4], "processor_class": "MolmoProcessor",
}  # fmt: skip
SMALL = RELEASED | {"base_image_input_size": [56, 56], "image_patch_size": 7, "image_token_length_h": 4,
                    "image_token_length_w": 4, "overlap_margins": [2, 2]}  # fmt: skip
TINY = RELEASED | {"base_image_input_size": [28, 28], "image_patch_size": 7, "image_token_length_h": 2,
                   "image_token_length_w": 2, "overlap_margins": [0, 2], "max_crops": 4}  # fmt: skip


def family(**settings: Any) -> Family:
    return make_family("MolmoProcessor", ProcessorFiles(parts={"image": RELEASED | settings}))


def as_masks(padding: np.ndarray, masks: torch.Tensor) -> None:
    kinds = np.where(masks.numpy() == 1, 0, np.where(masks.numpy() == 0, 1, 2))
    assert np.array_equal(padding, kinds)


def check_image(made: Family, image: Image.Image, *geometry: Any, most: float = 2e-6) -> None:
    """Levels go up to 2.6, in steps of 0.014."""
    item = made.process("image", image, {}, 1)
    patches, masks, tokens, numbers = image_inputs(image, *geometry)
    assert item.arrays["pixel_values"].shape == tuple(patches.shape)
    assert np.abs(item.arrays["pixel_values"] - patches.numpy()).max() < most
    as_masks(item.arrays["patch_padding"], masks)
    assert item.text == "".join(tokens)
    flat = [number for crop in numbers for number in crop]
    order = [flat.index(number) for number in range(max(flat) + 1)]
    assert item.arrays["square_order"].tolist() == order and item.num_vectors == len(order)


@pytest.mark.parametrize("size", [(64, 48), (333, 500), (31, 29), (900, 300), (90, 600), (112, 112), (450, 1), (1, 99)])
def test_images_equal_the_oracle(size: tuple[int, int]) -> None:
    if min(size) == 1:  # a side would have no pixel, where the released processor fails
        assert family(**SMALL).process("image", picture(*size), {}, 1).num_vectors > 16
        return
    check_image(family(**SMALL), picture(*size), 56, 7, (2, 2), 12)
    check_image(family(**TINY), picture(*size), 28, 7, (0, 2), 4)


def test_an_image_of_the_released_size_equals_the_oracle() -> None:
    check_image(family(), picture(700, 450))
    check_image(family(), picture(336, 336))


@pytest.mark.parametrize("size", [(333, 500), (900, 300), (700, 450)])
def test_images_in_the_precision_of_the_released_processor(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(molmo_oracle, "PRECISION", [torch.float32])
    check_image(family(), picture(*size), most=1e-4)


def test_settings_are_those_released() -> None:
    bare = make_family("MolmoProcessor", ProcessorFiles())
    one, other = (made.process("image", picture(500, 380), {}, 1) for made in (bare, family()))
    assert one.text == other.text and np.array_equal(one.arrays["pixel_values"], other.arrays["pixel_values"])


@pytest.mark.parametrize(("settings", "said"), [
    ({"base_image_input_size": [336, 350]}, "a square of an even number of patches of 14 pixels a side; got 336x350"),
    ({"base_image_input_size": [350, 350]}, "a square of an even number of patches of 14"),
    ({"base_image_input_size": [10**6, 10**6]}, "a whole number from 1 to 4096, got 1000000"),
    ({"base_image_input_size": 336}, "must be two whole numbers, got 336"),
    ({"image_patch_size": 0}, "image_patch_size of the media processor must be a whole number from 1 to 1024, got 0"),
    ({"image_token_length_w": 11}, "image_token_length_w is 11; a crop of 336 pixels has 12 squares a side"),
    ({"overlap_margins": [3, 4]}, "must be even numbers of patches, together less than the 24 of a crop; got 3 and 4"),
    ({"overlap_margins": [12, 12]}, "together less than the 24"),
    ({"overlap_margins": [4]}, "overlap_margins must be two whole numbers"),
    ({"max_crops": 10**9}, "max_crops of the media processor must be a whole number from 1 to 64, got 1000000000"),
    ({"max_crops": 0}, "from 1 to 64, got 0"),
    ({"image_padding_mask": False}, "image_padding_mask must be true"),
    ({"image_std": [0, 1, 1]}, "image_std of the media processor must be three numbers other than 0"),
])  # fmt: skip
def test_hostile_settings(settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "averaged", lambda *_: pytest.fail("an image was resized"))
    with pytest.raises(InputError, match=said):
        family(**settings).process("image", picture(600, 500), {}, 1)


def test_crops_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "averaged", lambda *_: pytest.fail("an image was resized"))
    large = {"base_image_input_size": [4088, 4088], "image_token_length_h": 146, "image_token_length_w": 146}
    made = family(**large, max_crops=64, overlap_margins=[144, 146])
    with pytest.raises(InputError, match=r"crops of 4088x4088 pixels have \d+ pixels together; the limit is 671"):
        made.process("image", Image.new("RGB", (4186, 4186)), {}, 1)


# ---- configurations -------------------------------------------------------------------------------------------------

# config.json of published checkpoints
SEVEN_D: dict[str, Any] = {
    "architectures": ["MolmoForCausalLM"], "attention_layer_norm": False, "clip_qkv": None, "embedding_size": 152064,
    "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 37888, "layer_norm_eps": 1e-06,
    "layer_norm_type": "rms", "max_position_embeddings": 4096, "model_type": "molmo", "norm_after": False,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "qkv_bias": True,
    "rope_theta": 1000000.0, "tie_word_embeddings": False, "use_cache": True, "use_position_ids": True,
    "vocab_size": 152064, "weight_tying": False,
}  # fmt: skip


def test_a_released_configuration_is_read() -> None:
    arch = read_arch(SEVEN_D)
    assert (arch.vocab, arch.input_only, arch.width, len(arch.layers)) == (152064 + 128, 128, 3584, 28)
    assert (arch.ffn, arch.heads, arch.kv_heads, arch.qkv_bias, arch.tie) == (18944, 28, 4, True, False)
    assert (arch.order, arch.qk_norm, arch.norm.eps, arch.up_first) == ("pre", "", 1e-6, True)
    olmo = read_arch(SEVEN_D | {"norm_after": True, "attention_layer_norm": True, "vocab_size": 100278,
                                "embedding_size": 100352})  # fmt: skip
    assert (olmo.order, olmo.qk_norm, olmo.vocab) == ("post", "full", 100352 + 128)
    experts = read_arch(SEVEN_D | {"moe_num_experts": 64, "moe_top_k": 8, "intermediate_size": 2048})
    assert experts.moe is not None and all(layer.moe for layer in experts.layers)
    assert (experts.moe.experts, experts.moe.top_k, experts.moe.ffn, experts.moe.renorm) == (64, 8, 1024, False)


@pytest.mark.parametrize(("given", "said"), [
    ({"embedding_size": 10**12}, "embedding_size=1000000000000"), ({"embedding_size": "x"}, "embedding_size='x'"),
    ({"additional_vocab_size": 10**9}, "additional_vocab_size=1000000000"),
    ({"moe_num_experts": 10**9}, "moe_num_experts=1000000000"), ({"moe_num_experts": 4, "moe_top_k": 5}, "= 5"),
    ({"moe_num_experts": 4, "norm_after": True}, "experts have their norm before them"),
    ({"layer_norm_type": "default"}, "layer_norm_type = 'default' is not supported: known is 'rms'"),
    ({"weight_tying": True}, "weight_tying = True is not supported"),
    ({"clip_qkv": 8, "attention_layer_norm": True}, "clip_qkv = 8 is not supported"),
    ({"intermediate_size": [2]}, "cannot be read"), ({"hidden_size": 10**9}, "hidden_size=1000000000"),
])  # fmt: skip
def test_hostile_decoders(given: dict[str, Any], said: str) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=said):
        read_arch(SEVEN_D | given)


VISION = CONFIG["vision_backbone"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("molmo")
    make_model("MolmoForCausalLM", folder)
    return folder


@pytest.mark.parametrize(("given", "said"), [
    ({"vision_backbone": [1]}, "vision_backbone must be a mapping"),
    ({"vision_backbone": VISION | {"image_emb_dim": 10**9}}, "image_emb_dim = 1000000000; expected a number"),
    ({"vision_backbone": VISION | {"image_emb_dim": 32.5}}, "image_emb_dim = 32.5"),
    ({"vision_backbone": VISION | {"image_num_layers": 10**6}}, "image_num_layers = 1000000"),
    ({"vision_backbone": VISION | {"image_num_layers": 256, "image_emb_dim": 1 << 14, "image_mlp_dim": 1 << 17}},
     "has at least .* weights; the limit is 4294967296"),
    ({"vision_backbone": VISION | {"image_num_pos": 18}}, "image_num_pos = 18 is not one more than a square"),
    ({"vision_backbone": VISION | {"image_default_input_size": [28, 35]}}, "must be two equal numbers"),
    ({"vision_backbone": VISION | {"image_default_input_size": [21, 21]}}, "no even number of patches of 7 pixels"),
    ({"vision_backbone": VISION | {"image_norm_eps": "x"}}, "image_norm_eps must be a number"),
    ({"vision_backbone": VISION | {"image_mlp_activations": "gelu"}}, "image_mlp_activations = 'gelu' is not built"),
    ({"vit_layers": [-5]}, r"vit_layers must be up to 16 numbers of the encoder's 4 layers, got \[-5\]"),
    ({"vit_layers": []}, "vit_layers must be"), ({"vit_layers": [0] * 17}, "vit_layers must be"),
    ({"image_pooling_2d": "stack"}, "image_pooling_2d = 'stack' is not built"),
    ({"vision_backbone": VISION | {"image_emb_dim": 48}}, "cannot be read as MolmoTowers"),
    ({"vit_layers": [-1, -2, -3]}, "cannot be read as MolmoTowers"),
])  # fmt: skip
def test_hostile_encoders(given: dict[str, Any], said: str, checkpoint: Path) -> None:
    with pytest.raises(QuireError, match=said):
        load_tower(molmo() | given, str(checkpoint), dtype=torch.float32, device=torch.device("cpu"))


def test_a_hostile_encoder_ends_the_start(checkpoint: Path) -> None:
    config = molmo() | {"vision_backbone": VISION | {"image_emb_dim": 10**9}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="image_emb_dim = 1000000000"):
        LLM(str(checkpoint), dtype="float32", max_model_len=64)


# ---- words and pictures ---------------------------------------------------------------------------------------------


def write(folder: Path, **over: Any) -> tuple[Molmo, Tokenizer]:
    template = (
        "{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'] }}"
        "{% if not loop.last %}{{ ' ' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ ' Assistant:' }}"
        "{% endif %}"
    )
    write_tokenizer(folder, chat_template=template, bos_token=None)
    vocab = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = vocab.token_to_id("<im_start>")
    torch.manual_seed(5)
    config = molmo(embedding_size=first, vocab_size=first, additional_vocab_size=32, vit_layers=[-1, -3], **over)
    model = Molmo(config, vocab.token_to_id("<im_patch>")).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(TINY))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "MolmoProcessor"}))
    return model, vocab


def expected_ids(vocab: Tokenizer, images: list[Image.Image], said: str) -> list[int]:
    tokens = [token for image in images for token in image_inputs(image, 28, 7, (0, 2), 4)[2]]
    marks = [vocab.token_to_id(token) for token in ("</s>", *tokens)]
    return [*marks, *vocab.encode(said, add_special_tokens=False).ids]


def scored(model: Molmo, ids: list[int], images: list[Image.Image]) -> torch.Tensor:
    """Log probabilities behind every token."""
    parts, first = [], 0
    for image in images:
        patches, masks, _, numbers = image_inputs(image, 28, 7, (0, 2), 4)
        table = torch.tensor(numbers)
        parts.append((patches, masks, torch.where(table < 0, -1, table + first)))
        first += int((table >= 0).sum())
    with torch.inference_mode():
        joined = [torch.cat(part) for part in zip(*parts, strict=True)] if parts else []
        return model(torch.tensor([ids]), *joined).logits[0].log_softmax(-1)


def check_answer(model: Molmo, output: Any, images: list[Image.Image]) -> None:
    ids, (answer,) = list(output.prompt_token_ids), output.outputs
    scores = scored(model, ids + list(answer.token_ids[:-1]), images)[len(ids) - 1 :]
    for score, token, found in zip(scores, answer.token_ids, answer.logprobs, strict=True):
        assert int(score.argmax()) == token
        assert found[token].logprob == pytest.approx(float(score[token]), abs=1e-4)


PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)


def test_answers_equal_the_oracle(tmp_path: Path) -> None:
    """Whatever way a prompt comes; images stand first."""
    model, vocab = write(tmp_path)
    one, two = picture(50, 250), picture(64, 30)
    said = " User: What is shown here? Assistant:"
    with LLM(str(tmp_path), dtype="float32", max_model_len=512, max_num_seqs=4) as llm:
        prompts = ["What is shown here?", "User: What is shown here? Assistant:", "<|image|>What is shown here?",
                   "User: <|image|>\nWhat is shown here? Assistant:"]  # fmt: skip
        for prompt in prompts:
            (output,) = llm.generate({"prompt": prompt, "multi_modal_data": {"image": one}}, PARAMS, use_tqdm=False)
            assert output.prompt_token_ids == expected_ids(vocab, [one], said), prompt
        check_answer(model, output, [one])
        content = [{"type": "image_pil", "image_pil": one}, {"type": "text", "text": "What is shown here?"},
                   {"type": "image_pil", "image_pil": two}]  # fmt: skip
        (output,) = llm.chat([{"role": "user", "content": content}], PARAMS, use_tqdm=False)
        assert output.prompt_token_ids == expected_ids(vocab, [one, two], said)
        check_answer(model, output, [one, two])
        ids = [*vocab.encode("a").ids, vocab.token_to_id("<|image|>"), *vocab.encode(" picture").ids]
        (output,) = llm.generate({"prompt_token_ids": ids, "multi_modal_data": {"image": two}}, PARAMS, use_tqdm=False)
        check_answer(model, output, [two])
        (output,) = llm.generate(CORPUS[0], PARAMS, use_tqdm=False)
        check_answer(model, output, [])
        wrong = {"prompt": "<|image|>What?", "multi_modal_data": {"image": [one, two]}}
        with pytest.raises(InputError, match=r"the prompt has 1 placeholders '<\|image\|>' for 2 image items"):
            llm.generate(wrong, PARAMS, use_tqdm=False)
        for setting, value in (("overlap_margins", [2, 2]), ("base_image_input_size", [336, 336])):
            with pytest.raises(InputError, match=f"{setting} is .* it belongs to the model"):
                llm.generate({"prompt": "What?", "multi_modal_data": {"image": one},
                              "mm_processor_kwargs": {setting: value}}, PARAMS, use_tqdm=False)  # fmt: skip
        fewer = {"prompt": "What?", "multi_modal_data": {"image": one}, "mm_processor_kwargs": {"max_crops": 1}}
        (output,) = llm.generate(fewer, PARAMS, use_tqdm=False)
        patches = output.prompt_token_ids.count(vocab.token_to_id("<im_patch>"))
        assert patches == 8


def test_padding_matters(tmp_path: Path) -> None:
    """What the encoder is told of black edges moves the answer: the comparison above would notice."""
    model, vocab = write(tmp_path)
    image = picture(50, 250)
    ids = expected_ids(vocab, [image], " User: What? Assistant:")
    patches, masks, _, numbers = image_inputs(image, 28, 7, (0, 2), 4)
    assert {float(one) for one in masks.unique()} >= {-1.0, 0.0, 1.0}
    with torch.inference_mode():
        scores = [model(torch.tensor([ids]), patches, kind, torch.tensor(numbers)).logits[0, -1]
                  for kind in (masks, masks.roll(1, 0), torch.ones_like(masks))]  # fmt: skip
    assert (scores[0] - scores[1]).abs().max() > 1e-2 and (scores[0] - scores[2]).abs().max() > 1e-2


def test_tokens_within_the_vocabulary_cannot_be_patches(tmp_path: Path) -> None:
    """A tokenizer whose token of patches has another id than the model's fails its own request."""
    write(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"embedding_size": raw["embedding_size"] + 4, "additional_vocab_size": raw["additional_vocab_size"] - 4}
    model = Molmo(raw, 0)
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype="float32", max_model_len=512, max_num_seqs=4) as llm:
        with pytest.raises(QuireError, match=r"could not be encoded.*tokens other than the 28 from"):
            llm.generate({"prompt": "What?", "multi_modal_data": {"image": picture(50, 90)}}, PARAMS, use_tqdm=False)
        assert llm.generate("What?", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
