"""Real vocabularies and templates, where somebody has them: each variable names a folder, and unset means skipped.

QUIRE_TEST_VOCABS: GGUF vocabularies with test vectors beside them (x.gguf, x.gguf.inp, x.gguf.out), as llama.cpp ships.
QUIRE_TEST_TOKENIZERS: any tree that holds tokenizer.json files. QUIRE_TEST_TEMPLATES: chat templates, *.jinja.
"""

from __future__ import annotations

import os
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Pipeline

from quire.schema.errors import InputError
from quire.schema.params import SamplingParams
from quire.text.chat import render_chat
from quire.text.detokenize import Detokenizer
from quire.text.forms.gguf import load_gguf
from quire.text.tokenizer import Tokenizer, load_tokenizer


def found(variable: str, pattern: str) -> list[Path]:
    folder = os.environ.get(variable)
    return sorted(Path(folder).rglob(pattern)) if folder else []


VOCABS = [path for path in found("QUIRE_TEST_VOCABS", "*.gguf") if Path(f"{path}.inp").exists()]
TOKENIZERS = [path.parent for path in found("QUIRE_TEST_TOKENIZERS", "tokenizer.json")]
TEMPLATES = found("QUIRE_TEST_TEMPLATES", "*.jinja")


def streamed(tokenizer: Tokenizer, ids: list[int], rng: random.Random) -> str:
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(skip_special_tokens=False))
    shown, at = [], 0
    while at < len(ids):
        step = rng.randint(1, 3)
        detokenizer.feed(ids[at : at + step])
        at += step
        shown.append(detokenizer.take(False, True))
    return "".join([*shown, detokenizer.take(True, True)])


@pytest.mark.skipif(not VOCABS, reason="QUIRE_TEST_VOCABS is not set")
@pytest.mark.parametrize("path", VOCABS, ids=lambda path: path.stem)
def test_published_vectors(path: Path) -> None:
    tokenizer = load_gguf(str(path))
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    normalizer = tokenizer.pipeline.normalizer
    compared = 0
    rng = random.Random(0)
    for text, line in zip(texts, lines, strict=False):
        if not text:
            continue
        if normalizer is not None and not unicodedata.is_normalized("NFC", text):
            continue  # vectors made without the normalisation that the model's own tokenizer has
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [int(number) for number in line.split()], text
        assert streamed(tokenizer, ids, rng) == tokenizer.decode(ids)
        compared += 1
    assert compared > 30


@pytest.mark.skipif(not TOKENIZERS, reason="QUIRE_TEST_TOKENIZERS is not set")
@pytest.mark.parametrize("folder", TOKENIZERS, ids=str)
def test_published_tokenizers(folder: Path) -> None:
    ours, oracle = load_tokenizer(str(folder)), Pipeline.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(0)
    alphabet = "abc ABC  \n\t123é ü你好こ안🦙'.,!-𝔘½"
    texts = ["Hello world", " x", *("".join(rng.choices(alphabet, k=rng.randint(1, 60))) for _ in range(300))]
    for text in texts:
        ids = oracle.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=False) == streamed(ours, ids, rng)
    for _ in range(300):
        ids = [rng.randrange(ours.vocab_size) for _ in range(rng.randint(1, 30))]
        assert streamed(ours, ids, rng) == ours.decode(ids)
        if ours.pieces is not None and ours.pieces.errors == "replace":
            assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=False)


@pytest.mark.skipif(not TEMPLATES, reason="QUIRE_TEST_TEMPLATES is not set")
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_published_templates(path: Path) -> None:
    """Where transformers renders, Quire renders the same; Quire may render more."""
    oracle = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    source = path.read_text(encoding="utf-8")
    ours = _Nameless(source)
    rng = random.Random(1)
    rendered = 0
    for _ in range(40):
        messages, tools = _conversation(rng)
        generation = rng.random() < 0.5
        try:
            expected = oracle(
                conversations=[messages], tools=tools, chat_template=source, add_generation_prompt=generation,
                **ours.special,
            )[0][0]  # fmt: skip
        except Exception:  # noqa: BLE001  # what transformers cannot render has no oracle; a template that never renders is refused below
            continue
        assert render_chat(ours, messages, tools=tools, add_generation_prompt=generation) == expected
        rendered += 1
    if not rendered:
        with pytest.raises(InputError):
            render_chat(ours, _conversation(rng)[0])


class _Nameless:
    """As much of a tokenizer as a template needs."""

    name_or_path = "here"
    render_own_chat = None

    def __init__(self, template: str) -> None:
        self.chat_template = template
        self.special = {"bos_token": "<s>", "eos_token": "</s>"}


def _conversation(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "c"}},
        "required": ["city"],
    }
    tools = [{"type": "function", "function": {"name": "get", "description": "d <x>", "parameters": parameters}}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be <b>nice</b>."}] if rng.random() < 0.5 else []
    with_tools = rng.random() < 0.5
    for number in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": rng.choice(["Hi", " padded ", "línea\n🦙", "{{ x }}"])})
        if with_tools:
            call = {"id": f"abcdefgh{number}", "type": "function"}
            call["function"] = {"name": "get", "arguments": {"city": "Zürich"}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": "get", "content": '{"t": 2}'})
        messages.append({"role": "assistant", "content": rng.choice(["Sure. ", "<think>h</think>\n\nok"])})
    if rng.random() < 0.7:
        messages.append({"role": "user", "content": "last"})
    return messages, tools if with_tools else None
