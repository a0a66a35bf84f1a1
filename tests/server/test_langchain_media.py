"""LangChain's ChatOpenAI sends an image and audio to a live server, in its own content blocks and in OpenAI's parts.

Skipped where `langchain-openai` is not installed. What is answered is compared with transformers (image) and with the
engine itself given the same samples (audio).
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.media.test_joined import qwen2_audio
from tests.media.test_pixels_oracle import picture
from tests.media.tiny_llava import TinyLlava
from tests.media.tokens import SPECIAL, write_tokenizer
from tests.server.live import Live, live
from tests.tiny_whisper import RATE, read_back, speech

langchain = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")
NUM = 8
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|audio_bos|><|AUDIO|><|audio_eos|>{% endif %}{% endfor %}{% endfor %}"
)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def asked(server: Live, bias: dict[int, float], *content: Any) -> tuple[str, str]:
    """The answer, whole and streamed."""
    chat = langchain.ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=NUM, max_retries=0,
        logit_bias={str(one): value for one, value in bias.items()},
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )  # fmt: skip
    question = [messages.HumanMessage(content=list(content))]
    return chat.invoke(question).content, "".join(str(part.content) for part in chat.stream(question))


@pytest.mark.filterwarnings("ignore")
def test_an_image(tmp_path: Path) -> None:
    tiny = TinyLlava(tmp_path)
    image, out = picture(64, 48), io.BytesIO()
    image.save(out, "PNG")
    expected = tiny.answer("user: <image>\nWhat is shown?\nassistant:", [image])[1]
    text = tiny.processor.tokenizer.decode(expected)
    data = encoded(out.getvalue())
    parts = (
        {"type": "image", "base64": data, "mime_type": "image/png"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    )
    engine = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "served_model_name": "tiny"}
    with live(str(tmp_path), engine=engine) as server:
        for part in parts:
            answers = asked(server, {tiny.image_id: -100.0}, part, {"type": "text", "text": "What is shown?"})
            assert answers == (text, text) and text


@pytest.mark.filterwarnings("ignore")
def test_audio(tmp_path: Path) -> None:
    import torch
    import transformers as tf
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path, chat_template=TEMPLATE)
    vocab = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(3)
    tf.Qwen2AudioForConditionalGeneration(qwen2_audio(vocab)).eval().float().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_size": 16, "chunk_length": 2}))
    bias = {vocab.token_to_id(one): -100.0 for one in SPECIAL}
    engine = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "served_model_name": "tiny"}
    data = speech(3, 1.3)
    with LLM(str(tmp_path), **engine) as llm:
        prompt: Any = {
            "prompt": "<|audio_bos|><|AUDIO|><|audio_eos|>What is said?",
            "multi_modal_data": {"audio": (read_back(data), RATE)},
        }
        params = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True, logit_bias=bias,
                                skip_special_tokens=False)  # fmt: skip
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    text = output.outputs[0].text
    parts = (
        {"type": "audio", "base64": encoded(data), "mime_type": "audio/wav"},
        {"type": "input_audio", "input_audio": {"data": encoded(data), "format": "wav"}},
    )
    with live(str(tmp_path), engine=engine) as server:
        for part in parts:
            assert asked(server, bias, part, {"type": "text", "text": "What is said?"}) == (text, text) and text
