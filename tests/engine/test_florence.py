"""Florence-2: an encoder-decoder whose encoder reads an image in its text, beside transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from PIL.Image import Image
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.media.families import make_family
from quire.media.families.florence import question_of
from quire.media.settings import ProcessorFiles
from tests.media.test_pixels_oracle import picture
from tests.media.tokens import write_tokenizer
from tests.preempting import preempting

NUM, SIDE, LENGTH = 6, 32, 5  # tokens of an answer; pixels of a side; vectors of an image
PARAMS = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True, logprobs=1)
SETTINGS = {"size": {"height": SIDE, "width": SIDE}, "image_seq_length": LENGTH}
PICTURES = [picture(50, 40), picture(31, 90)]


class Florence:
    def __init__(self, folder: Path) -> None:
        write_tokenizer(folder)
        self.vocab = Tokenizer.from_file(str(folder / "tokenizer.json"))
        text = tf.BartConfig(
            vocab_size=self.vocab.get_vocab_size(), d_model=32, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=40,
            max_position_embeddings=128, scale_embedding=True, decoder_start_token_id=2, forced_eos_token_id=None,
            pad_token_id=1, bos_token_id=0, eos_token_id=2,
        )  # fmt: skip
        vision = dict(
            depths=[1, 1], embed_dim=[8, 16], num_heads=[2, 4], num_groups=[2, 4], patch_size=[7, 3],
            patch_stride=[8, 2], patch_padding=[3, 1], patch_prenorm=[False, True], window_size=2, projection_dim=32,
            max_temporal_embeddings=4, max_position_embeddings=8,
        )  # fmt: skip
        config = tf.Florence2Config(
            vision_config=vision, text_config=text, image_token_id=self.vocab.token_to_id("<image>")
        )
        config._attn_implementation = "eager"
        torch.manual_seed(4)
        self.model: Any = tf.Florence2ForConditionalGeneration(config).eval().float()
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if weight.ndim > 1:
                    weight.normal_(std=0.1 if "shared" in name else 1.0 if "embed_positions" in name else 0.4)
        self.model.tie_weights()
        self.model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Florence2Processor"}))
        self.family = make_family("Florence2Processor", ProcessorFiles(parts={"image": SETTINGS}))
        self.llm = LLM(str(folder), dtype="float32", max_model_len=64, max_num_seqs=4, block_size=16)

    def answer(self, ids: list[int], image: Image | None) -> tuple[list[int], float]:
        """Greedy tokens by transformers, and the log probability of the first."""
        inputs: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        if image is not None:
            arrays = self.family.process("image", image, {}, 1).arrays
            inputs["pixel_values"] = torch.from_numpy(np.array(arrays["pixel_values"]))
        tokens, first = [2], 0.0
        with torch.inference_mode():
            for number in range(NUM):
                logits = self.model(**inputs, decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
                best = logits.log_softmax(-1).max(-1)
                tokens.append(int(best.indices))
                first = float(best.values) if number == 0 else first
        return tokens[1:], first


@pytest.fixture(scope="module")
def florence(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Florence]:
    made = Florence(tmp_path_factory.mktemp("florence"))
    yield made
    made.llm.close()


def said(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_tokens_equal_transformers(florence: Florence) -> None:
    prompts: list[dict[str, Any]] = [
        {"prompt": "What is shown here?", "multi_modal_data": {"image": PICTURES[0]}},
        {"prompt": "<CAPTION>", "multi_modal_data": {"image": PICTURES[0]}},
        {"prompt": "<CAPTION>", "multi_modal_data": {"image": PICTURES[1]}},
        {"prompt": "Only a text."},
        {
            "encoder_prompt": {"prompt": "<OD>", "multi_modal_data": {"image": PICTURES[1]}},
            "decoder_prompt": {"prompt_token_ids": [2]},
        },
    ]
    whole = florence.llm.generate(prompts, PARAMS, use_tqdm=False)
    images = [PICTURES[0], PICTURES[0], PICTURES[1], None, PICTURES[1]]
    for output, image in zip(whole, images, strict=True):
        ids = output.encoder_prompt_token_ids
        assert ids.count(florence.vocab.token_to_id("<image>")) == (LENGTH if image else 0)
        expected, logprob = florence.answer(ids, image)
        assert said(output) == expected
        assert output.outputs[0].logprobs[0][expected[0]].logprob == pytest.approx(logprob, abs=1e-4)
    first, second = (one.outputs[0].logprobs[0] for one in whole[1:3])
    assert first != second  # the image matters
    for prompt, output in zip(prompts, whole, strict=True):
        assert said(florence.llm.generate(prompt, PARAMS, use_tqdm=False)[0]) == said(output)


def test_preempted_answers_are_the_same(florence: Florence) -> None:
    prompts = [{"prompt": f"words {i}", "multi_modal_data": {"image": PICTURES[i % 2]}} for i in range(4)]
    expected = [said(one) for one in florence.llm.generate(prompts, PARAMS, use_tqdm=False)]
    florence.llm.reset_prefix_cache()
    loop: Any = florence.llm.llm_engine.front.client.loop
    with preempting(loop.scheduler) as seen:
        assert [said(one) for one in florence.llm.generate(prompts, PARAMS, use_tqdm=False)] == expected
    assert seen.count >= 2


def test_the_words_of_a_prompt_are_those_of_transformers(florence: Florence) -> None:
    (output,) = florence.llm.generate(
        {"prompt": "<CAPTION>", "multi_modal_data": {"image": PICTURES[0]}}, PARAMS, use_tqdm=False
    )
    words = florence.vocab.encode("<s>What does the image describe?</s>", add_special_tokens=False).ids
    assert output.encoder_prompt_token_ids == [florence.vocab.token_to_id("<image>")] * LENGTH + words
    assert question_of("<OPEN_VOCABULARY_DETECTION> a {cat} ") == "Locate a {cat} in the image."


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": PICTURES}}, "At most 1 image"),
        ({"prompt": "<CAPTION> of it", "multi_modal_data": {"image": PICTURES[0]}}, "takes no further words"),
        ({"prompt": "a " * 200, "multi_modal_data": {"image": PICTURES[0]}}, "reads 128 at most"),
        ({"prompt": "a", "multi_modal_data": {"audio": (np.zeros(9), 9)}}, "no audio"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": PICTURES[0]}}, "0 placeholders"),
    ],
)
def test_wrong_prompts(florence: Florence, prompt: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        florence.llm.generate(prompt, PARAMS, use_tqdm=False)


def test_an_image_that_cannot_be_encoded_fails_alone(florence: Florence, monkeypatch: pytest.MonkeyPatch) -> None:
    media = florence.llm.llm_engine.front.inputs.media
    monkeypatch.setattr(media.family, "num", LENGTH + 1)
    prompt = {"prompt": "other words", "multi_modal_data": {"image": picture(20, 20)}}
    with pytest.raises(Exception, match="could not be encoded"):
        florence.llm.generate(prompt, PARAMS, use_tqdm=False)
    assert florence.llm.generate("Only a text.", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
