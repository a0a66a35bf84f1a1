"""Models that are released without a chat template: conversations as their own code writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.text.chat import WRITTEN, render_chat
from quire.text.known_templates import known_template
from quire.text.tokenizer import Tokenizer, load_tokenizer
from tests.media.tokens import write_tokenizer

TALK = [
    {"role": "user", "content": "<image>\nWho? "},
    {"role": "assistant", "content": " She."},
    {"role": "user", "content": "And?"},
]


def tokenizer_of(folder: Path, architecture: Any) -> Tokenizer:
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"architectures": architecture}))
    return load_tokenizer(str(folder))


def test_deepseek_vl2(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, ["DeepseekVLV2ForCausalLM"])
    text = render_chat(tokenizer, TALK, add_generation_prompt=True)
    assert text == "<s><|User|>: <image>\nWho?\n\n<|Assistant|>:She.</s><|User|>: And?\n\n<|Assistant|>:"
    parts = [{"type": "image", WRITTEN: "<image>"}, {"type": "text", "text": "Who?"}]
    talk = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]
    text = render_chat(tokenizer, talk, add_generation_prompt=False, media="first")
    assert text == "<s>Be kind.\n\n<|User|>: <image>\nWho?\n\n"


@pytest.mark.parametrize("name", ["DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM"])
def test_deepseek_ocr(name: str, tmp_path: Path) -> None:
    """The content and nothing else."""
    tokenizer = tokenizer_of(tmp_path, [name])
    assert render_chat(tokenizer, TALK[:1], add_generation_prompt=True) == "<s><image>\nWho?"
    parts = [{"type": "image", WRITTEN: "<image>"}, {"type": "text", "text": "Free OCR."}]
    assert render_chat(tokenizer, [{"role": "user", "content": parts}], media="first") == "<s><image>\nFree OCR."


def test_a_template_of_the_files_wins(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert render_chat(tokenizer_of(tmp_path, ["DeepseekVLV2ForCausalLM"]), TALK[2:]) == "And?!"


@pytest.mark.parametrize("architectures", [None, 7, [7, None], ["LlamaForCausalLM"], {"a": 1}])
def test_others_have_none(architectures: Any) -> None:
    assert known_template(architectures) is None
