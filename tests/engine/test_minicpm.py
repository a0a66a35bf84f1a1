"""A whole checkpoint of MiniCPM-V as on hubs, with its processor's files and names of code that is never run: texts,
ids, chats and videos are answered as a plain model in torch would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.media.families import make_family
from quire.media.settings import ProcessorFiles
from quire.media.video import Video
from quire.schema.errors import InputError, NotBuiltError
from tests import minicpm_oracle
from tests.media.test_pixels_oracle import picture
from tests.media.tokens import write_tokenizer
from tests.media_models import TEXT, VISION

TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message.role + '\n' + message.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "MiniCPMVImageProcessor", "processor_class": "MiniCPMVProcessor", "max_slice_nums": 9,
    "scale_resolution": 42, "patch_size": minicpm_oracle.PATCH, "use_image_id": True,
    "image_feature_size": minicpm_oracle.QUERIES, "im_start": "<image>", "im_end": "</image>", "unk": "<unk>",
    "slice_start": "<slice>", "slice_end": "</slice>", "im_id_start": "<image_id>", "im_id_end": "</image_id>",
    "slice_mode": True, "norm_mean": [0.5, 0.5, 0.5], "norm_std": [0.5, 0.5, 0.5], "version": 4.5,
    "auto_map": {"AutoProcessor": "processing_minicpmv.MiniCPMVProcessor",
                 "AutoImageProcessor": "image_processing_minicpmv.MiniCPMVImageProcessor"},
}  # fmt: skip


class Tiny:
    def __init__(self, folder: Path) -> None:
        code = {"AutoTokenizer": [None, "tokenization_minicpmv_fast.MiniCPMVTokenizerFast"]}
        write_tokenizer(folder, chat_template=TEMPLATE, tokenizer_class="MiniCPMVTokenizerFast", auto_map=code)
        vocab = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.token = vocab.token_to_id("<unk>")
        numbers = TEXT | dict(vocab_size=vocab.get_vocab_size(), hidden_size=256, num_attention_heads=8, head_dim=32)
        self.config = minicpm_oracle.Config("4.5", tf.Qwen3Config(**numbers), VISION)
        torch.manual_seed(3)
        self.model = minicpm_oracle.MiniCPMV(self.config).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.2)
        self.model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        files = ProcessorFiles(config=self.config.written(), parts={"image": PROCESSOR})
        self.family: Any = make_family("MiniCPMVProcessor", files)
        self.llm = LLM(
            str(folder), dtype="float32", max_model_len=1024, max_num_seqs=4, block_size=16, enable_mm_embeds=True
        )
        self.greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias={self.token: -100.0})

    @torch.inference_mode()
    def check(self, output: Any, items: list[Any]) -> None:
        """Whether the model would have said so, of these items."""
        ids, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        arrays: dict[str, torch.Tensor] = {}
        for name in items[0].arrays:
            arrays[name] = torch.cat([torch.from_numpy(item.arrays[name]) for item in items],
                                     -1 if name == "pixel_values" else 0)  # fmt: skip
        assert ids.count(self.token) == sum(item.num_vectors for item in items)
        logits = self.model(torch.tensor([ids + answer]), media=self.token, **arrays).logits[0]
        logits[:, self.token] = -torch.inf
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == answer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    made = Tiny(tmp_path_factory.mktemp("minicpm"))
    yield made
    made.llm.close()


def test_texts_and_ids(tiny: Tiny) -> None:
    images = [picture(100, 60), picture(30, 40), picture(60, 200)]
    items = [tiny.family.process("image", image, {}, 3) for image in images]
    text = "USER: (<image>./</image>)\n(<image>./</image>)\nthen (<image>./</image>)\nWhat is shown here?"
    ids = tiny.llm.get_tokenizer().encode(text)
    media = {"multi_modal_data": {"image": images}}
    outputs = tiny.llm.generate([{"prompt": text, **media}, {"prompt_token_ids": ids, **media}, "hello"], tiny.greedy)
    tiny.check(outputs[0], items)
    assert outputs[1].prompt_token_ids == outputs[0].prompt_token_ids
    assert outputs[1].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    written = tiny.llm.get_tokenizer().decode(outputs[0].prompt_token_ids)
    assert [written.count(f"<image_id>{number}</image_id><image><unk>") for number in range(4)] == [1, 1, 1, 0]
    once = tiny.llm.generate({"prompt": text, **media, "mm_processor_kwargs": {"max_slice_nums": 1}}, tiny.greedy)
    tiny.check(once[0], [tiny.family.process("image", image, {"max_slice_nums": 1}, 3) for image in images])


@torch.inference_mode()
def test_embeddings(tiny: Tiny) -> None:
    """With the sizes of their images, of which slices follow: as the images themselves."""
    images = [picture(100, 60), picture(30, 40), picture(60, 200)]
    items = [tiny.family.process("image", image, {}, 3) for image in images]
    vectors = [
        tiny.model.get_image_features(
            *map(torch.from_numpy, (item.arrays["pixel_values"], item.arrays["target_sizes"]))
        )
        for item in items
    ]
    text = "USER: (<image>./</image>)\n(<image>./</image>)\nthen (<image>./</image>)\nWhat is shown here?"
    sizes = [image.size for image in images]
    for value in ({"image_embeds": torch.cat(vectors), "image_sizes": sizes},
                  {"image_embeds": vectors, "image_sizes": torch.tensor(sizes)}):  # fmt: skip
        (output,) = tiny.llm.generate({"prompt": text, "multi_modal_data": {"image": value}}, tiny.greedy)
        tiny.check(output, items)
    with pytest.raises(InputError, match=r"has 30 vectors, and an item with image_sizes \[60, 200\] has 54"):
        turned = {"image_embeds": vectors, "image_sizes": sizes[::-1]}
        tiny.llm.generate({"prompt": text, "multi_modal_data": {"image": turned}}, tiny.greedy)


def test_chats(tiny: Tiny) -> None:
    image = picture(100, 60)
    content = [{"type": "text", "text": "What is shown here?"}, {"type": "image_pil", "image_pil": image}]
    (output,) = tiny.llm.chat([{"role": "user", "content": content}], tiny.greedy)
    written = tiny.llm.get_tokenizer().decode(output.prompt_token_ids)
    assert "user\n<image_id>0</image_id><image>" in written and "</slice>\nWhat is shown here?</s>" in written
    tiny.check(output, [tiny.family.process("image", image, {}, 1)])


def test_videos(tiny: Tiny) -> None:
    frames = [picture(50, 40 + index) for index in range(5)]
    video = Video(frames, list(range(5)), 2.0, 5)
    text = "(<video>./</video>)\nWhat is shown here?"
    for options, num in (({}, 5), ({"packing_nums": 3}, 2)):
        given = {
            "prompt": text,
            "multi_modal_data": {"video": [(frames, {"fps": 2.0})]},
            "mm_processor_kwargs": options,
        }
        (output,) = tiny.llm.generate(given, tiny.greedy)
        item = tiny.family.process("video", video, options, 1)
        assert item.num_vectors == num * minicpm_oracle.QUERIES and len(item.arrays["packs"]) == num
        tiny.check(output, [item])


def test_a_release_that_is_not_built(tmp_path: Path) -> None:
    config = {"architectures": ["MiniCPMV"], "model_type": "minicpmv", "hidden_size": 2304, "query_num": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        NotBuiltError, match=r"MiniCPMV with version = '2.0' is not in this version of Quire; built are"
    ):
        LLM(str(tmp_path))
