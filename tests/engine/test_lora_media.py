"""Adapters of models that take media: of the layers that read text, as merged weights; and those that media bring."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from quire import LLM, EngineArgs, LoRARequest, SamplingParams
from quire.schema.errors import ConfigError, InputError
from tests.media_models import NOT_SAID, draw_item, is_greedy, make_model, prompt_of
from tests.tiny_adapters import TinyAdapter, linear_modules, merge, write_adapter
from tests.tiny_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logit_bias=dict.fromkeys(NOT_SAID, -100.0))
LAYERS = ("q_proj", "v_proj", "o_proj", "down_proj", "up_proj")
FAMILIES = [
    "LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Gemma3ForConditionalGeneration",
    "Qwen3VLForConditionalGeneration", "Qwen2AudioForConditionalGeneration",
]  # fmt: skip


def start(folder: Path, **more: Any) -> LLM:
    options: dict[str, Any] = dict(max_model_len=512, max_num_seqs=8, enable_lora=True, max_loras=2, max_lora_rank=8)
    return LLM(str(folder), dtype="float32", block_size=16, **(options | more))


def adapter_of(model: Any, folder: Path, seed: int) -> TinyAdapter:
    """Of the layers of text alone: the encoder's may have the same last names."""
    found = {name: size for name, size in linear_modules(model, LAYERS).items() if "language_model" in name}
    assert len(found) >= 6
    return write_adapter(model, folder, modules=found, seed=seed)


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_are_merged_weights(name: str, tmp_path: Path) -> None:
    """One batch of the base model and two adapters, with the same item and the same text; again after prefix hits."""
    model = make_model(name, tmp_path / "model")
    adapters = [adapter_of(model, tmp_path / f"a{seed}", seed) for seed in (1, 2)]
    models = [model, *(merge(model, one) for one in adapters)]
    item = draw_item(name, model, 0)
    pieces: list[Any] = [[11, 12, 13, 14, 15], item, [21, 22, 23]]
    loras = [None, *(LoRARequest(f"a{n}", n, one.path) for n, one in enumerate(adapters, 1))]
    with start(tmp_path / "model") as llm:
        for _ in range(2):
            outputs = llm.generate([prompt_of(pieces)] * 3, GREEDY, lora_request=loras, use_tqdm=False)
            answers = [list(one.outputs[0].token_ids) for one in outputs]
            for merged, answer in zip(models, answers, strict=True):
                assert is_greedy(name, merged, pieces, answer)
    assert len({tuple(answer) for answer in answers}) > 1


def test_media_bring_their_adapter(tmp_path: Path) -> None:
    """default_mm_loras: items of one kind that has an adapter; not text, not two such kinds; a named one goes first."""
    name = "Qwen2VLForConditionalGeneration"
    model = make_model(name, tmp_path / "model")
    image, video, other = (adapter_of(model, tmp_path / kind, seed) for seed, kind in enumerate(("i", "v", "o"), 1))
    item = draw_item(name, model, 0)
    seen: list[Any] = [[11, 12, 13], item, [21, 22, 23]]
    text: list[Any] = [[11, 12, 13, 14, 21, 22, 23]]
    folders = {"video": video.path, "image": image.path}
    with start(tmp_path / "model", default_mm_loras=folders) as llm:
        own = LoRARequest("own", 9, other.path)
        prompts = [prompt_of(pieces) for pieces in (seen, text, seen)]
        outputs = llm.generate(prompts, GREEDY, lora_request=[None, None, own], use_tqdm=False)
        chosen = [one.lora_request for one in outputs]
        expected = [merge(model, image), model, merge(model, other)]
        for pieces, merged, output in zip((seen, text, seen), expected, outputs, strict=True):
            assert is_greedy(name, merged, pieces, list(output.outputs[0].token_ids))
        assert not is_greedy(name, model, seen, list(outputs[0].outputs[0].token_ids)), "the adapter changes nothing"
        assert chosen[0] is not None and (chosen[0].lora_name, chosen[0].lora_int_id) == ("image", 1)
        assert chosen[1:] == [None, own]
        front = llm.llm_engine.front
        moving = dataclasses.replace(item, modality="video")
        for pieces, lora_id in (([moving], 2), ([item, [12], moving], None), ([item, [12], item], 1)):
            prepared = front.prepare("one", prompt_of([[11], *pieces, [21]]), GREEDY)
            found = None if prepared.lora_request is None else prepared.lora_request.lora_int_id
            assert found == lora_id and prepared.requests[0].lora_id == (lora_id or 0)


def test_the_adapters_in_the_repository_of_phi_4(tmp_path: Path) -> None:
    """Its own checkpoint: the weights of the file are the base model's, with the adapter of its folder for an image."""
    name = "Phi4MMForCausalLM"
    model = make_model(name, tmp_path)
    item, text = draw_item(name, model, 0), [21, 22, 23]
    pieces: list[list[Any]] = [[[11, 12, 13], item, text], [[11, 12, 13], text]]
    folders = {"image": str(tmp_path / "vision-lora"), "audio": str(tmp_path / "speech-lora")}
    prompts = [prompt_of(one) for one in (*pieces, pieces[1])]
    with start(tmp_path, default_mm_loras=folders) as llm:
        speech = LoRARequest("speech", 9, folders["audio"])
        outputs = llm.generate(prompts, GREEDY, lora_request=[None, None, speech], use_tqdm=False)
    answers = [list(one.outputs[0].token_ids) for one in outputs]
    merged = {}
    for kind in ("vision", "speech"):
        tensors = load_file(tmp_path / f"{kind}-lora" / "adapter_model.safetensors")
        merged[kind] = copy.deepcopy(model)
        for stem in {one.removesuffix(".lora_A.weight") for one in tensors if ".lora_A." in one}:
            matrix = merged[kind].get_submodule(stem.removeprefix("base_model.model.")).weight.data
            matrix += 2 * tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"]
    assert is_greedy(name, merged["vision"], pieces[0], answers[0])
    assert is_greedy(name, model, pieces[1], answers[1])
    assert is_greedy(name, merged["speech"], pieces[1], answers[2])
    assert not is_greedy(name, model, pieces[0], answers[0]), "the adapter changes nothing"


def test_an_adapter_that_cannot_be_read_is_one_request_s_error(tmp_path: Path) -> None:
    name = "LlavaForConditionalGeneration"
    model = make_model(name, tmp_path / "model")
    with start(tmp_path / "model", default_mm_loras={"image": str(tmp_path / "nowhere")}) as llm:
        with pytest.raises(InputError, match="not a folder"):
            llm.generate(prompt_of([[11], draw_item(name, model, 0), [21]]), GREEDY, use_tqdm=False)
        (answer,) = llm.generate(prompt_of([[11, 12, 21]]), GREEDY, use_tqdm=False)
    assert is_greedy(name, model, [[11, 12, 21]], list(answer.outputs[0].token_ids))


def test_kinds_that_the_model_does_not_take(tmp_path: Path) -> None:
    write_tiny("LlamaForCausalLM", tmp_path / "text")
    make_model("LlavaForConditionalGeneration", tmp_path / "images")

    def refused(folder: str, value: Any, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            EngineArgs(
                model=str(tmp_path / folder), enable_lora=True, default_mm_loras=value
            ).create_engine_config()  # fmt: skip

    refused("text", {"image": "/a"}, "'image': this model takes no media")
    refused("images", {"audio": "/a"}, "'audio': this model takes image")
    refused("images", {"image": ""}, "the folder is empty")
    refused("images", {"image": 3}, "default_mm_loras")
