"""Parts of chats besides images, through OpenAI's client to live servers: audio in every form, video, embeddings of
audio; what the counters of the encoder cache say; where media stand in templates that take strings; and hostile items,
each a 400, after which the server answers."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.hf_models.towers import load_tower
from tests.media.test_joined import FRAMES, write_model
from tests.media.test_pixels_oracle import picture
from tests.media.tiny_hearing import PLACE, TEMPLATE, TinyHearing
from tests.media.tiny_llava import TinyLlava
from tests.media.tokens import SPECIAL, write_tokenizer
from tests.plain.media.test_hostile_media import endless_gif, movie, png, wav
from tests.server.hosted import wait_until
from tests.server.live import Live, live
from tests.server.test_media_api import data_url
from tests.tiny_whisper import RATE, read_back, speech

NUM = 8
ENGINE = {
    "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "served_model_name": "tiny",
    "disable_log_stats": False,
}  # fmt: skip
QUESTION = {"type": "text", "text": "What is it?"}
SOUND = speech(3, 1.3)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def said(server: Live, bias: dict[int, float], *parts: Any) -> list[int]:
    """Tokens, because a tiny model may say bytes that are no text."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": list(parts)}], temperature=0, max_tokens=NUM,
        logit_bias={str(one): value for one, value in bias.items()},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    choice: Any = answer.choices[0]
    return list(choice.token_ids)


def counted(server: Live) -> dict[str, float]:
    """Items, and those of them that needed no encoding."""
    page = httpx.get(f"{server.url}/metrics", timeout=60).text
    found = re.findall(r"^vllm:mm_cache_(queries|hits)_total\{[^}]*\} ([0-9.e+]+)$", page, re.MULTILINE)
    return {name: float(value) for name, value in found}


def wait_for_counts(server: Live, queries: float, hits: float) -> None:
    """Who counts is told of a step after its answers are sent."""
    wait_until(lambda: counted(server)["queries"] >= queries)
    assert counted(server) == {"queries": queries, "hits": hits}


class Hearing(TinyHearing):
    """And what `LLM` says of audio."""

    def offline(self, media: dict[str, Any]) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True, logit_bias=self.bias)
        with LLM(str(self.folder), **ENGINE) as llm:
            prompt: Any = {"prompt": f"{PLACE}What is it?", "multi_modal_data": media}
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            inputs = llm.llm_engine.front.inputs.media
            self.arrays = inputs.loaded(inputs.load(media)).items["audio"][0].item.arrays
        return list(output.outputs[0].token_ids)

    def vectors(self) -> Any:
        """What transformers' encoder makes of the audio."""
        raw = json.loads((self.folder / "config.json").read_text())
        tower = load_tower(raw, str(self.folder), dtype=torch.float32, device=torch.device("cpu"))
        with torch.inference_mode():
            return tower.encode("audio", {key: torch.as_tensor(value) for key, value in self.arrays.items()}).clone()


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Hearing:
    return Hearing(tmp_path_factory.mktemp("audio"))


@pytest.fixture(scope="module")
def audio_server(hearing: Hearing) -> Iterator[Live]:
    (hearing.folder / "media").mkdir()
    (hearing.folder / "media" / "a.wav").write_bytes(SOUND)
    options = {**ENGINE, "enable_mm_embeds": True, "allowed_local_media_path": str(hearing.folder / "media")}
    with live(str(hearing.folder), engine=options) as running:
        yield running


def test_audio_in_every_form(audio_server: Live, hearing: Hearing) -> None:
    expected = hearing.offline({"audio": (read_back(SOUND), RATE)})
    saved = io.BytesIO()
    torch.save(hearing.vectors(), saved)
    for part in (
        {"type": "input_audio", "input_audio": {"data": encoded(SOUND), "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{encoded(SOUND)}"}},
        {"type": "audio_url", "audio_url": {"url": f"file://{hearing.folder}/media/a.wav"}},
        {"type": "audio_embeds", "audio_embeds": encoded(saved.getvalue())},
    ):
        assert said(audio_server, hearing.bias, part, QUESTION) == expected, part["type"]
    wait_for_counts(audio_server, 4, 2)  # the same bytes, however they come, are encoded once; embeddings are others
    part = {"type": "input_audio", "input_audio": {"data": encoded(SOUND), "format": "wav"}, "uuid": "a sound"}
    assert said(audio_server, hearing.bias, part, QUESTION) == expected
    wait_for_counts(audio_server, 5, 2)  # a name of its own
    again = {"type": "input_audio", "input_audio": None, "uuid": "a sound"}
    assert said(audio_server, hearing.bias, again, QUESTION) == expected
    wait_for_counts(audio_server, 6, 3)  # and what it names is neither sent nor encoded again
    other = {"type": "input_audio", "input_audio": {"data": encoded(speech(5, 0.9)), "format": "wav"}}
    assert said(audio_server, hearing.bias, other, QUESTION) != expected  # what is said matters


@pytest.mark.parametrize(("data", "why"), [
    (wav(rate=0), "sampling rate of 0"), (wav(rate=4_000_000_000), "sampling rate of 4000000000"),
    (wav(channels=65535), "65535 channels"), (wav(rate=1000, bits=8, data=bytes(3_600_001)), "limit is 3600 s"),
    (b"RIFF\0\0\0\0WAVE" + b"junk\0\0\0\0" * 5000, "more than 4096 chunks"),
])  # fmt: skip
def test_hostile_audio(audio_server: Live, hearing: Hearing, data: bytes, why: str) -> None:
    part = {"type": "input_audio", "input_audio": {"data": encoded(data), "format": "wav"}}
    with pytest.raises(openai.BadRequestError, match=why):
        said(audio_server, hearing.bias, part, QUESTION)
    assert said(audio_server, hearing.bias, QUESTION)


def test_video(tmp_path: Path) -> None:
    """Frames of a file are those that `LLM` takes from it; a second question about it costs no encoding."""
    write_model("qwen2 vl, video", tmp_path)
    write_tokenizer(tmp_path, chat_template=TEMPLATE.replace(PLACE, "<|vision_start|><|video_pad|><|vision_end|>"))
    vocab = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    bias = {vocab.token_to_id(one): -100.0 for one in SPECIAL}
    clip = movie(30)
    params = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True, logit_bias=bias)
    with LLM(str(tmp_path), **ENGINE) as llm:
        text = "<|vision_start|><|video_pad|><|vision_end|>What is it?"
        outputs = llm.generate([{"prompt": text, "multi_modal_data": {"video": one}} for one in (clip, FRAMES)], params,
                               use_tqdm=False)  # fmt: skip
    expected, other = (list(output.outputs[0].token_ids) for output in outputs)
    assert expected != other
    part = {"type": "video_url", "video_url": {"url": f"data:video/x-matroska;base64,{encoded(clip)}"}}
    with live(str(tmp_path), engine=ENGINE) as server:
        assert said(server, bias, part, QUESTION) == expected
        wait_for_counts(server, 1, 0)
        said(server, bias, part, {"type": "text", "text": "And what else is there?"})
        wait_for_counts(server, 2, 1)
        said(server, bias, {"type": "text", "text": "First this,"}, part)  # no prefix in common: its vectors are known
        wait_for_counts(server, 3, 2)
        with pytest.raises(openai.BadRequestError, match="cannot be decoded"):
            said(server, bias, {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAAIGZ0eXA="}})


STRINGS = "{% for message in messages %}{{ message.content }}{% endfor %}|"


@pytest.mark.parametrize(("interleave", "expected"), [
    (False, "<image>\n<image>\nbefore\nbetween\nbehind|"), (True, "before\n<image>\nbetween\n<image>\nbehind|"),
])  # fmt: skip
def test_media_between_strings(tmp_path: Path, interleave: bool, expected: str) -> None:
    """A template that takes content as a string: `LLM.chat` and the server write the same prompt."""
    tiny = TinyLlava(tmp_path)
    first, second = picture(64, 48), picture(50, 90)
    ids, answer = tiny.answer(expected, [first, second], NUM)
    texts = [{"type": "text", "text": one} for one in ("before", "between", "behind")]
    images = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in (first, second)]
    content = [texts[0], images[0], texts[1], images[1], texts[2]]
    options = {**ENGINE, "interleave_mm_strings": interleave}
    bias = {tiny.image_id: -100.0}
    with LLM(str(tmp_path), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True, logit_bias=bias)
        (output,) = llm.chat([{"role": "user", "content": content}], params, chat_template=STRINGS,
                             chat_template_content_format="string", use_tqdm=False)  # fmt: skip
    assert output.prompt_token_ids == ids and output.outputs[0].token_ids == answer
    server_options = {"chat_template": STRINGS, "chat_template_content_format": "string"}
    with live(str(tmp_path), engine=options, **server_options) as server:
        assert said(server, bias, *content) == answer


HOSTILE = (
    (png(60000, 60000), "too long|pixels"), (png(30000, 30000, bytes(1_000_000)), "more pixels than the limit"),
    (png(1_000_000, 1, bytes(3_000_001)), "too long; the limit is 32768"), (endless_gif(20000), ""),
)  # fmt: skip


def test_hostile_images(tmp_path: Path) -> None:
    TinyLlava(tmp_path)
    with live(str(tmp_path), engine=ENGINE) as server:
        for data, why in HOSTILE:
            part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(data)}"}}
            if why:
                with pytest.raises(openai.BadRequestError, match=why):
                    said(server, {}, part, QUESTION)
            else:  # of an animation the first picture is taken
                assert said(server, {}, part, QUESTION)
            assert said(server, {}, QUESTION)
