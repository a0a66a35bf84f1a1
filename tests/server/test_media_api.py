"""Images through LLM and every dialect of a live server, beside transformers: the same prompts, the same words."""

from __future__ import annotations

import base64
import io
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire import LLM, SamplingParams
from quire.schema.errors import InputError
from tests.fake_engine import write_model
from tests.media.test_pixels_oracle import picture
from tests.media.tiny_llava import TinyLlava
from tests.server.live import Live, live

NUM = 8
ENGINE = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "limit_mm_per_prompt": {"image": 3}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlava:
    return TinyLlava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llm(tiny: TinyLlava) -> Iterator[LLM]:
    with LLM(str(tiny.folder), **ENGINE) as made:
        yield made


@pytest.fixture(scope="module")
def server(tiny: TinyLlava) -> Iterator[Live]:
    (tiny.folder / "media").mkdir()
    picture(40, 30).save(tiny.folder / "media" / "a.png")
    options = {
        **ENGINE,
        "allowed_media_domains": ["localhost"],
        "allowed_local_media_path": str(tiny.folder / "media"),
        "enable_mm_embeds": True,
    }
    with live(str(tiny.folder), engine=options) as running:
        yield running


def greedy(tiny: TinyLlava) -> SamplingParams:
    bias = {tiny.image_id: -100.0}
    return SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True, logit_bias=bias)


def data_url(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


A, B = picture(64, 48), picture(50, 90)


PROMPTS = [("USER: <image>\nWhat is shown here?", [A]), ("<image> then <image>", [B, A])]


@pytest.mark.parametrize(("text", "images"), PROMPTS)
def test_generate_equals_transformers(llm: LLM, tiny: TinyLlava, text: str, images: list[Image.Image]) -> None:
    ids, expected = tiny.answer(text, images)
    data = images[0] if len(images) == 1 else images
    (output,) = llm.generate({"prompt": text, "multi_modal_data": {"image": data}}, greedy(tiny))
    assert output.prompt_token_ids == ids and output.outputs[0].token_ids == expected
    arrays = [np.asarray(image) for image in images]
    (output,) = llm.generate({"prompt_token_ids": ids, "multi_modal_data": {"image": arrays}}, greedy(tiny))
    assert output.prompt_token_ids == ids and output.outputs[0].token_ids == expected
    other = tiny.answer(text, [picture(77, 66)] * len(images))[1]
    assert other != expected  # the image matters


def test_chat_equals_transformers(llm: LLM, tiny: TinyLlava) -> None:
    parts = [{"type": "text", "text": "What"}, {"type": "image_pil", "image_pil": A}, {"type": "text", "text": "is"},
             {"type": "image_url", "image_url": {"url": data_url(B)}}]  # fmt: skip
    ids, expected = tiny.answer("user: What<image>\nis<image>\n\nassistant:", [A, B])
    (output,) = llm.chat([{"role": "user", "content": parts}], greedy(tiny))
    assert output.prompt_token_ids == ids and output.outputs[0].token_ids == expected


def test_uuids_and_batches(llm: LLM, tiny: TinyLlava) -> None:
    text = "<image> the"
    expected = tiny.answer(text, [A])[1]
    prompts: list[Any] = [
        {"prompt": text, "multi_modal_data": {"image": A}, "multi_modal_uuids": {"image": ["a"]}},
        "no image at all",
        {"prompt": text, "multi_modal_data": {"image": None}, "multi_modal_uuids": {"image": ["a"]}},
    ]
    first, _, again = llm.generate(prompts, greedy(tiny))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == expected
    with pytest.raises(InputError, match="not in the cache"):
        llm.generate({**prompts[2], "multi_modal_uuids": {"image": ["b"]}}, greedy(tiny))
    with pytest.raises(InputError, match=r"At most 3 image\(s\)"):
        llm.generate({"prompt": "<image>" * 4, "multi_modal_data": {"image": [A] * 4}}, greedy(tiny))


def test_openai_client(server: Live, tiny: TinyLlava) -> None:
    import openai

    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    name = client.models.list().data[0].id
    bias = {str(tiny.image_id): -100.0}

    def words(parts: list[Any], **more: Any) -> tuple[list[int], str]:
        answer = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=NUM, logit_bias=bias,
            extra_body={"ignore_eos": True, "return_token_ids": True, "skip_special_tokens": False, **more},
        )  # fmt: skip
        extra: Any = answer.choices[0]
        return extra.token_ids, answer.choices[0].message.content or ""

    url = {"type": "image_url", "image_url": {"url": data_url(A)}, "uuid": "a"}
    text = {"type": "text", "text": "What is shown?"}
    expected = tiny.answer("user: <image>\nWhat is shown?\nassistant:", [A])[1]
    assert words([url, text])[0] == expected
    assert words([{"type": "image_url", "image_url": None, "uuid": "a"}, text])[0] == expected
    file_url = {"type": "image_url", "image_url": {"url": f"file://{tiny.folder}/media/a.png"}}
    both = tiny.answer("user: <image>\nthen<image>\n\nassistant:", [picture(40, 30), A])[1]
    assert words([file_url, {"type": "text", "text": "then"}, url])[0] == both
    for part, why in (
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}, "not one of those allowed"),
        ({"type": "image_url", "image_url": {"url": f"file://{tiny.folder}/config.json"}}, "outside the folder"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "cannot be read"),
        ({"type": "image_url", "image_url": None, "uuid": "unknown"}, "not in the cache"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "no audio"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "torch.save"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            words([part, text])
    with pytest.raises(openai.BadRequestError, match=r"At most 3 image\(s\)"):
        words([url] * 4)
    with pytest.raises(openai.BadRequestError, match="placeholders"):
        words([url, {"type": "text", "text": "and <image>?"}])
    with pytest.raises(openai.BadRequestError, match="does not know"):
        words([url], mm_processor_kwargs={"colour": "red"})


def test_a_slow_host_stops_nobody(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """More fetches than there are threads wait for a host that says nothing; a chat without media does not."""
    monkeypatch.setattr("quire.base.env.IMAGE_FETCH_TIMEOUT._value", 300.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made, and never answered
        url = f"http://localhost:{silent.getsockname()[1]}/x.png"
        slow = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
        text = {"messages": [{"role": "user", "content": "What"}], "max_tokens": 2}
        with ThreadPoolExecutor(12) as pool:
            waiting = [pool.submit(server.post, "/v1/chat/completions", slow) for _ in range(12)]
            assert server.post("/v1/chat/completions", text).status_code == 200
            assert not any(one.done() for one in waiting)
            silent.close()  # which ends the connections it never took
            for one in waiting:
                assert one.result().status_code == 400 and "localhost" in one.result().text


def test_image_embeddings_over_http(server: Live, tiny: TinyLlava) -> None:
    import torch

    pixels = tiny.processor(text="<image>", images=[A], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        features = tiny.model.get_image_features(pixels)
    vectors = features.pooler_output[0] if hasattr(features, "pooler_output") else features[0]
    saved = io.BytesIO()
    torch.save(vectors.clone(), saved)
    part = {"type": "image_embeds", "image_embeds": base64.b64encode(saved.getvalue()).decode()}
    body = {
        "messages": [{"role": "user", "content": [part, {"type": "text", "text": "What is shown?"}]}], "temperature": 0,
        "max_tokens": NUM, "ignore_eos": True, "return_token_ids": True, "logit_bias": {str(tiny.image_id): -100},
    }  # fmt: skip
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == tiny.answer("user: <image>\nWhat is shown?\nassistant:", [A])[1]


def test_anthropic_client(server: Live, tiny: TinyLlava) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=server.url, api_key="none")
    data = data_url(A).partition(",")[2]
    block: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    messages: Any = [{"role": "user", "content": [block, {"type": "text", "text": "What is shown?"}]}]
    ids, expected = tiny.answer("user: <image>\nWhat is shown?\nassistant:", [A])
    name = server.state.served.base.name
    answer = client.messages.create(model=name, messages=messages, max_tokens=NUM, extra_body={"temperature": 0})
    assert answer.usage.input_tokens == len(ids)
    assert answer.content[0].text == tiny.processor.tokenizer.decode(expected, skip_special_tokens=True)
    assert client.messages.count_tokens(model=name, messages=messages).input_tokens == len(ids)


@pytest.fixture
def host() -> Iterator[str]:
    """Of the picture A, over http."""

    class Host(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(base64.b64decode(data_url(A).partition(",")[2]))

        def log_message(self, *words: object) -> None: ...

    made = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://localhost:{made.server_address[1]}"
    made.shutdown()
    made.server_close()


def test_anthropic_urls_and_results_of_tools(server: Live, tiny: TinyLlava, host: str) -> None:
    """One image behind a URL, another that a tool gave."""
    data = data_url(B).partition(",")[2]
    shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    asked = {"type": "image", "source": {"type": "url", "url": f"{host}/a.png"}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [
            {"type": "text", "text": "I look."}, {"type": "tool_use", "id": "t1", "name": "see", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [shown, {"type": "text", "text": "seen"}]},
            asked, {"type": "text", "text": "What is shown?"}]},
    ]  # fmt: skip
    text = "user: Look.\nassistant: I look.\ntool: <image>\nseen\nuser: <image>\nWhat is shown?\nassistant:"
    ids, expected = tiny.answer(text, [B, A])
    assert expected != tiny.answer(text, [A, B])[1]
    body = {"messages": messages, "max_tokens": NUM, "temperature": 0, "tools": [{"name": "see", "input_schema": {}}]}
    answer = server.post("/v1/messages", {"model": server.state.served.base.name, **body})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["input_tokens"] == len(ids)
    assert answer.json()["content"][0]["text"] == tiny.processor.tokenizer.decode(expected, skip_special_tokens=True)
    asked["source"]["url"] = f"{host.replace('localhost', '127.0.0.1')}/a.png"
    refused = server.post("/v1/messages", {"model": server.state.served.base.name, **body})
    assert refused.status_code == 400 and "not one of those allowed" in refused.text
    asked["source"] = {"type": "file", "file_id": "f-1"}
    refused = server.post("/v1/messages", {"model": server.state.served.base.name, **body})
    assert refused.status_code == 400 and "messages[2].content[1].source must be of type base64 or url" in refused.text


def test_responses(server: Live, tiny: TinyLlava) -> None:
    ids, expected = tiny.answer("user: <image>\nWhat is shown?\nassistant:", [A])
    image = {"type": "input_image", "image_url": data_url(A), "detail": "auto"}
    file = {"type": "input_file", "filename": "a.png", "file_data": data_url(A)}
    for part in (image, file):
        content = [part, {"type": "input_text", "text": "What is shown?"}]
        body = {"input": [{"role": "user", "content": content}], "temperature": 0, "max_output_tokens": NUM,
                "ignore_eos": True, "logit_bias": {str(tiny.image_id): -100}}  # fmt: skip
        answer = server.post("/v1/responses", body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["usage"]["input_tokens"] == len(ids)
        words = tiny.processor.tokenizer.decode(expected, skip_special_tokens=True)
        assert found["output"][0]["content"][0]["text"] == words
        counted = server.post("/v1/responses/input_tokens", {"input": body["input"]})
        assert counted.json()["input_tokens"] == len(ids)
    pdf = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"}
    answer = server.post("/v1/responses", {"input": [{"role": "user", "content": [pdf]}]})
    assert answer.status_code == 400 and "is not an image" in answer.text


def test_a_text_model_takes_no_media(tmp_path: Path) -> None:
    with live(fake=True, model=write_model(tmp_path)) as running:
        content = [{"type": "image_url", "image_url": {"url": data_url(A)}}]
        answer = running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
        assert answer.status_code == 400 and "not supported by this model" in answer.text
