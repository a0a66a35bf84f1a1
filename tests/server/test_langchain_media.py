"""LangChain's ChatOpenAI sends an image and audio to a live server, in its own content blocks and in OpenAI's parts.

Skipped where `langchain-openai` is not installed. What is answered is compared with transformers (image) and with the
engine itself given the same samples (audio).
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.media.test_pixels_oracle import picture
from tests.media.tiny_hearing import PLACE, TinyHearing
from tests.media.tiny_llava import TinyLlava
from tests.server.live import Live, live
from tests.tiny_whisper import RATE, read_back, speech

langchain = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")
NUM = 8


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
    tiny = TinyHearing(tmp_path)
    bias = tiny.bias
    engine = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "served_model_name": "tiny"}
    data = speech(3, 1.3)
    with LLM(str(tmp_path), **engine) as llm:
        prompt: Any = {
            "prompt": f"{PLACE}What is said?",
            "multi_modal_data": {"audio": (read_back(data), RATE)},
        }
        other = {**prompt, "multi_modal_data": {"audio": (read_back(speech(5, 0.9)), RATE)}}
        params = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True, logit_bias=bias,
                                skip_special_tokens=False)  # fmt: skip
        outputs = llm.generate([prompt, other], params, use_tqdm=False)
    text = outputs[0].outputs[0].text
    assert text != outputs[1].outputs[0].text  # what is said matters
    parts = (
        {"type": "audio", "base64": encoded(data), "mime_type": "audio/wav"},
        {"type": "input_audio", "input_audio": {"data": encoded(data), "format": "wav"}},
    )
    with live(str(tmp_path), engine=engine) as server:
        for part in parts:
            assert asked(server, bias, part, {"type": "text", "text": "What is said?"}) == (text, text) and text
