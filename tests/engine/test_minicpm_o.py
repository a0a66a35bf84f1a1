"""A whole checkpoint of MiniCPM-o as on hubs, with its processor's files and names of code that is never run: audio and
images of one prompt are answered as a plain model in torch would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.schema.errors import InputError, NotBuiltError
from tests import minicpm_oracle
from tests.engine.test_minicpm import PROCESSOR, TEMPLATE
from tests.media.test_pixels_oracle import picture
from tests.media.tokens import write_tokenizer
from tests.media_models import TEXT, VISION

MARKS = ("<|audio_start|>", "<|audio_end|>")
HEARS: dict[str, Any] = {"feature_size": 16, "chunk_length": 2, "hop_length": 160, "n_fft": 400, "sampling_rate": 16000}
RATE = 16000


def tone(seconds: float, step: int) -> Any:
    noise = np.random.default_rng(step).standard_normal(int(seconds * RATE)) / 9
    return (np.sin(np.arange(int(seconds * RATE)) / step) + noise).astype(np.float32)


class Tiny:
    def __init__(self, folder: Path) -> None:
        write_tokenizer(folder, MARKS, chat_template=TEMPLATE)
        self.vocab = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.token = self.vocab.token_to_id("<unk>")
        numbers = TEXT | dict(vocab_size=self.vocab.get_vocab_size(), hidden_size=256, num_attention_heads=8)
        audio = minicpm_oracle.AUDIO | {"max_source_positions": 100}
        self.config = minicpm_oracle.Config("2.6", tf.Qwen2Config(**numbers), VISION, audio=audio)
        torch.manual_seed(3)
        self.model = minicpm_oracle.MiniCPMO(self.config).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.2)
        self.model.save_pretrained(folder)
        own = PROCESSOR | HEARS | {"processor_class": "MiniCPMOProcessor", "version": 2.6}
        (folder / "preprocessor_config.json").write_text(json.dumps(own))
        self.llm = LLM(str(folder), dtype="float32", max_model_len=1024, max_num_seqs=4, block_size=16)
        self.greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias={self.token: -100.0})

    def items(self, modality: str, values: list[Any], **options: Any) -> list[Any]:
        media = self.llm.llm_engine.front.inputs.media
        loaded = media.loaded(media.load({modality: values}, processor_options=options))
        return [one.item for one in loaded.items[modality]]

    @torch.inference_mode()
    def vectors(self, item: Any) -> torch.Tensor:
        arrays = {name: torch.from_numpy(np.array(array)) for name, array in item.arrays.items()}
        method = self.model.get_audio_features if "piece_lens" in arrays else self.model.get_image_features
        made: torch.Tensor = method(**arrays)
        assert len(made) == item.num_vectors
        return made

    @torch.inference_mode()
    def check(self, output: Any, items: list[Any]) -> None:
        """Whether the model would have said so, of these items, which are in the order of the prompt."""
        ids, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        whole = torch.tensor([ids + answer])
        embeds = self.model.get_input_embeddings()(whole).clone()
        embeds[whole == self.token] = torch.cat([self.vectors(item) for item in items])
        logits = self.model.llm(inputs_embeds=embeds).logits[0]
        logits[:, self.token] = -torch.inf
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == answer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    made = Tiny(tmp_path_factory.mktemp("minicpm"))
    yield made
    made.llm.close()


def test_audio_and_images_of_one_prompt(tiny: Tiny) -> None:
    """In turns, as text, ids and a chat. Both get the vectors of the same token."""
    sounds, image = [tone(1.2, 7), tone(4.5, 3)], picture(100, 60)
    first, second = tiny.items("audio", sounds)
    (seen,) = tiny.items("image", [image])
    data = {"multi_modal_data": {"image": image, "audio": [(one, RATE) for one in sounds]}}
    text = "a (<audio>./</audio>) b (<image>./</image>) c (<audio>./</audio>) What is shown here?"
    ids = tiny.llm.get_tokenizer().encode(text)
    outputs = tiny.llm.generate([{"prompt": text, **data}, {"prompt_token_ids": ids, **data}], tiny.greedy)
    for output in outputs:
        tiny.check(output, [first, seen, second])
    written = tiny.llm.get_tokenizer().decode(outputs[0].prompt_token_ids)
    start, end = MARKS
    counts = [[25, 5], [25, 25, 25, 25, 12]]
    one, two = ("".join(f"{start}{'<unk>' * count}{end}" for count in several) for several in counts)
    assert f"a {one} b <image_id>0</image_id>" in written and f" c {two} What" in written
    parts = [{"type": "audio", "audio": (sounds[0], RATE)}, {"type": "image_pil", "image_pil": image},
             {"type": "text", "text": "What is shown here?"}]  # fmt: skip
    (output,) = tiny.llm.chat([{"role": "user", "content": parts}], tiny.greedy)
    tiny.check(output, [first, seen])


def test_features_equal_transformers(tiny: Tiny) -> None:
    """Of what is longer than is heard at once: each part is filled up with silence, of which nothing is kept."""
    extractor = tf.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    for seconds, lens in ((1.2, [120]), (2.0, [200]), (4.5, [200, 200, 50]), (4.0041, [200, 200, 1])):
        sound = tone(seconds, 5)
        (item,) = tiny.items("audio", [sound])
        assert item.arrays["piece_lens"].tolist() == lens
        for number, piece in enumerate(item.arrays["input_features"]):
            part = sound[number * 2 * RATE : (number + 1) * 2 * RATE]
            made = extractor(part, sampling_rate=RATE, return_attention_mask=True, padding="max_length")
            assert int(made["attention_mask"].sum()) == lens[number]
            count = lens[number]
            np.testing.assert_allclose(piece[:, :count], made["input_features"][0][:, :count], atol=2e-4)
            assert not piece[:, count:].any()
        assert item.num_vectors == sum((count + 1) // 2 // 2 for count in lens)


def test_audio_that_is_too_short(tiny: Tiny) -> None:
    prompt = {"prompt": "(<audio>./</audio>)", "multi_modal_data": {"audio": (np.ones(320, np.float32), RATE)}}
    with pytest.raises(InputError, match="the audio is too small: it has no vectors"):
        tiny.llm.generate(prompt, tiny.greedy)


def test_settings_of_images_beside_audio(tiny: Tiny) -> None:
    """They say nothing of audio, and are not refused for it."""
    image, sound = picture(100, 60), tone(1.2, 7)
    prompt = {"prompt": "(<image>./</image>) (<audio>./</audio>)", "mm_processor_kwargs": {"max_slice_nums": 1},
              "multi_modal_data": {"image": image, "audio": (sound, RATE)}}  # fmt: skip
    (output,) = tiny.llm.generate(prompt, tiny.greedy)
    tiny.check(output, [*tiny.items("image", [image], max_slice_nums=1), *tiny.items("audio", [sound])])


def test_another_release_is_refused_by_name(tmp_path: Path) -> None:
    config = {"architectures": ["MiniCPMO"], "model_type": "minicpmo", "version": "4.5", "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotBuiltError, match=r"MiniCPMO with version = '4.5' is not .*; built are 2.6"):
        LLM(str(tmp_path))
