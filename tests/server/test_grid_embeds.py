"""Parts of chats that are embeddings with a grid, through OpenAI's client to a live server: the words that transformers
says of the image itself, and a 400 for each part that is not what it should be, after which the server answers."""

from __future__ import annotations

import base64
import io
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.engine.test_given_embeds import ENGINE, ITEMS, Given
from tests.media.test_joined import NUM
from tests.media.tiny_hearing import PLACE, TEMPLATE
from tests.media.tokens import write_tokenizer
from tests.server.live import Live, live
from tests.server.test_media_api import data_url

QUESTION = {"type": "text", "text": "What is it?"}
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


def encoded(value: object, **options: Any) -> str:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return base64.b64encode(out.getvalue()).decode()


class Asked(Given):
    """A live server, and what it should say of the image."""

    def __init__(self, folder: Path) -> None:
        super().__init__("qwen2 vl", folder)
        with self.llm:
            arrays = self.arrays()
            shown = self.ask(ITEMS["image"], f"{MARK}What is it?")
            self.expected_answer = self.expected(shown.prompt_token_ids, arrays)
        self.grid, self.made = arrays["image_grid_thw"], self.vectors(arrays)
        write_tokenizer(folder, chat_template=TEMPLATE.replace(PLACE, MARK))
        self.server: Live

    def said(self, *parts: Any) -> list[int]:
        client = openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": list(parts)}], temperature=0, max_tokens=NUM,
            logit_bias={str(one): -100.0 for one in self.special},
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        choice: Any = answer.choices[0]
        return list(choice.token_ids)

    def part(self, vectors: Any = None, grid: Any = None) -> dict[str, Any]:
        fields = {"image_embeds": encoded(self.made) if vectors is None else vectors}
        fields["image_grid_thw"] = encoded(self.grid) if grid is None else grid
        return {"type": "image_embeds", "image_embeds": fields}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    one = Asked(tmp_path_factory.mktemp("qwen"))
    options = {**ENGINE, "served_model_name": "tiny", "limit_mm_per_prompt": {"image": 2}}
    with live(str(one.folder), engine=options) as one.server:
        yield one


def test_embeddings_with_their_grid(asked: Asked) -> None:
    assert asked.said({"type": "image_url", "image_url": {"url": data_url(ITEMS["image"])}}, QUESTION) == (
        asked.expected_answer
    )
    for part in (
        asked.part(), asked.part(encoded(asked.made[None]), encoded(asked.grid[0].int())),
        asked.part(grid=asked.grid[0].tolist()), asked.part(grid=asked.grid.tolist()),
    ):  # fmt: skip
        assert asked.said(part, QUESTION) == asked.expected_answer
    named = asked.part() | {"uuid": "a"}
    assert asked.said(named, QUESTION) == asked.expected_answer
    again = {"type": "image_embeds", "image_embeds": None, "uuid": "a"}
    assert asked.said(again, QUESTION) == asked.expected_answer
    two = asked.said(asked.part(), {"type": "text", "text": "and"}, asked.part(), QUESTION)
    assert len(two) == NUM
    with pytest.raises(openai.BadRequestError, match=r"At most 2 image\(s\) may be provided in one prompt; got 3"):
        asked.said(*[asked.part()] * 3, QUESTION)


def foreign(text: str) -> str:
    """The same archive, which says that its numbers are of another byte order."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(text))) as source, zipfile.ZipFile(out, "w") as target:
        for entry in source.infolist():
            stored = source.read(entry)
            target.writestr(entry.filename, b"big" if entry.filename.endswith("byteorder") else stored)
    return base64.b64encode(out.getvalue()).decode()


VECTORS = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
HOSTILE: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "no grid": (lambda: (encoded(VECTORS), ...), "come with image_grid_thw"),
    "vectors as a list": (lambda: ([[1.0] * 64], None), "must be a tensor as torch.save writes it, in base64"),
    "a list of tensors": (lambda: (encoded([VECTORS, VECTORS]), None), "image_embeds is not a tensor as torch.save"),
    "odd entries": (lambda: (encoded({"a": VECTORS, "b": [None]}), None), "image_embeds is not a tensor as torch.save"),
    "nested": (lambda: (encoded(torch.nested.nested_tensor([VECTORS, VECTORS[:1]])), None), "is not a tensor"),
    "sparse": (lambda: (encoded(VECTORS.to_sparse()), None), "is not a tensor as torch.save"),
    "quantized": (lambda: (encoded(torch.quantize_per_tensor(VECTORS, 0.1, 0, torch.qint8)), None), "is not a tensor"),
    "without data": (lambda: (encoded(torch.empty(6, 64, device="meta")), None), "is not a tensor as torch.save"),
    "a view of one number": (lambda: (encoded(torch.zeros(1).expand(6, 64)), None), "used more than once"),
    "another byte order": (lambda: (foreign(encoded(VECTORS)), None), "its numbers are not little-endian"),
    "the older format": (lambda: (encoded(VECTORS, _use_new_zipfile_serialization=False), None), "is not a tensor"),
    "whole numbers": (lambda: (encoded(VECTORS.long()), None), "numbers must be float32, float16 or bfloat16"),
    "a grid of another byte order": (lambda: (None, foreign(encoded(torch.tensor([1, 4, 6])))), "not little-endian"),
    "a grid of floats": (lambda: (None, encoded(torch.tensor([1.0, 4.0, 6.0]))), "has 1.0; expected whole numbers"),
    "a grid of bytes": (lambda: (None, encoded(torch.tensor([1, 4, 6], dtype=torch.uint8))), "holds a torch Byte"),
    "three dimensions": (lambda: (None, encoded(torch.ones(1, 1, 3).long())), "has shape"),
    "a sparse grid": (lambda: (None, encoded(torch.tensor([[1, 4, 6]]).to_sparse())), "image_grid_thw is not a tensor"),
    "a large grid": (lambda: (None, encoded(torch.ones(70_000, 3).long())), "numbers need no more|at most 2 dim"),
    "a grid in words": (lambda: (None, "1x4x6"), "image_grid_thw is not"),
    "an object": (lambda: (None, {"t": 1}), "must be numbers"),
    "a deep list": (lambda: (None, [[[[1]]]]), "must be numbers"),
    "another grid": (lambda: (None, [1, 4, 8]), "has 6 vectors, and an item with image_grid_thw .1, 4, 8. has 8"),
    "patches that are not merged": (lambda: (None, [2, 3, 4]), "3 x 4 patches, of which 2 x 2 are merged"),
    "another width": (lambda: (encoded(VECTORS[:, :60]), None), "expected .vectors, 64."),
    "not a number": (lambda: (encoded(VECTORS * torch.nan), None), "must be finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_refused(name: str, asked: Asked) -> None:
    make, why = HOSTILE[name]
    vectors, grid = make()
    part = asked.part(vectors, None if grid is ... else grid)
    if grid is ...:
        del part["image_embeds"]["image_grid_thw"]
    with pytest.raises(openai.BadRequestError, match=why):
        asked.said(part, QUESTION)
    assert asked.said(QUESTION)


def test_damaged_files_are_refused_or_read(asked: Asked) -> None:
    """Any byte of a grid's file changed: a 400, or an answer about another grid."""
    content, rng, refused = bytearray(base64.b64decode(encoded(asked.grid))), random.Random(0), 0
    for _ in range(60):
        broken = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        try:
            assert len(asked.said(asked.part(grid=base64.b64encode(broken).decode()), QUESTION)) == NUM
        except openai.BadRequestError:
            refused += 1
    assert refused > 10


def test_further_fields_are_refused_by_name(asked: Asked) -> None:
    part = asked.part()
    part["image_embeds"]["image_sizes"] = [[64, 48]]
    with pytest.raises(
        openai.BadRequestError, match="with 'image_sizes': this model takes image_embeds, image_grid_thw"
    ):
        asked.said(part, QUESTION)
    part["image_embeds"] |= {str(number): 1 for number in range(20)}
    with pytest.raises(openai.BadRequestError, match="has 23 fields; the limit is 8"):
        asked.said(part, QUESTION)


def test_a_video_with_its_times(tmp_path: Path) -> None:
    """Of Qwen3-VL: vectors hold those of later layers, and times are written between frames."""
    given = Given("qwen3 vl, video", tmp_path)
    with given.llm:
        arrays = given.arrays()
        shown = given.ask(ITEMS["video"], "<|video_pad|>What is it?")
    fields = {"video_embeds": encoded(given.vectors(arrays)), "video_grid_thw": encoded(arrays["video_grid_thw"]),
              "timestamps": [(0 + 1) / 48, (2 + 2) / 48]}  # fmt: skip
    write_tokenizer(tmp_path, chat_template=TEMPLATE.replace(PLACE, "<|video_pad|>"))
    part = {"type": "video_embeds", "video_embeds": fields}
    with live(str(tmp_path), engine={**ENGINE, "served_model_name": "tiny"}) as server:
        body = {"messages": [{"role": "user", "content": [part, QUESTION]}], "temperature": 0, "max_tokens": NUM,
                "logit_bias": {str(one): -100.0 for one in given.special}, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        answer = server.post("/v1/chat/completions", body).json()
        assert answer["choices"][0]["token_ids"] == list(shown.outputs[0].token_ids)
        assert answer["usage"]["prompt_tokens"] == len(shown.prompt_token_ids)
        fields["timestamps"] = encoded(torch.tensor([0.5, float("nan")], dtype=torch.float64))
        refused = server.post("/v1/chat/completions", body)
        assert refused.status_code == 400 and "timestamps has nan; expected numbers from 0" in refused.text
