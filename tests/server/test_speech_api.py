"""Speech over HTTP: OpenAI's client and plain forms to a live server with a tiny Whisper, beside transformers."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from quire import LLM, SamplingParams
from quire.base import env
from quire.config import SpeechToTextConfig
from quire.media.speech.clips import cut_into_clips
from quire.schema.errors import CheckpointError
from quire.server.openai import speech as speech_routes
from quire.server.openai.speech_desk import DECODED_AT_ONCE
from quire.server.openai.speech_requests import SpeechCall
from tests.server.live import Live, error_of, events, live, live_fake
from tests.tiny_whisper import ID, LATEST_START, RATE, SECONDS, TinyWhisper, read_back, speech, wav

COUNT = 12
PATH = "/v1/audio/transcriptions"
SHORT, LONG = speech(3, 1.3), speech(4, 5.2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyWhisper:
    return TinyWhisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def server(tiny: TinyWhisper) -> Iterator[Live]:
    with live(str(tiny.folder), engine={"dtype": "float32", "max_num_seqs": 8, "served_model_name": "w"}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def file(data: bytes = SHORT) -> tuple[str, bytes]:
    return "speech.wav", data


def post(server: Live, data: dict[str, Any], audio: bytes | None = SHORT, path: str = PATH) -> httpx.Response:
    files = None if audio is None else {"file": ("a.wav", audio, "audio/wav")}
    return httpx.post(server.url + path, data=data, files=files or {"other": ("o", b"")}, timeout=60)


MOST = {"max_completion_tokens": COUNT}


def expected(tiny: TinyWhisper, data: bytes, **task: Any) -> str:
    """Of each clip apart, as transformers hears it."""
    clips = cut_into_clips(read_back(data), SpeechToTextConfig(max_audio_clip_s=SECONDS))
    return "".join(tiny.heard(clip.samples, COUNT, **task) for clip in clips).lstrip()


def test_transcriptions_equal_transformers(client: openai.OpenAI, tiny: TinyWhisper) -> None:
    for language in ("en", "de"):
        answer = client.audio.transcriptions.create(model="w", file=file(), language=language, extra_body=MOST)
        assert answer.text == expected(tiny, SHORT, language=language)
        assert answer.usage is not None and answer.usage.type == "duration" and answer.usage.seconds == 2
    assert expected(tiny, SHORT, language="en") != expected(tiny, SHORT, language="de") != ""


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # newer clients would rather be rid of this call
def test_a_translation_equals_transformers(client: openai.OpenAI, tiny: TinyWhisper) -> None:
    answer = client.audio.translations.create(model="w", file=file(), extra_body={**MOST, "language": "de"})
    assert answer.text == expected(tiny, SHORT, language="de", task="translate")
    assert answer.text != expected(tiny, SHORT, language="de")


def test_the_language_is_detected(client: openai.OpenAI, tiny: TinyWhisper) -> None:
    heard = set()
    for seed in range(8):
        data = speech(seed, 1.0)
        language = tiny.language(read_back(data))
        heard.add(language)
        answer = client.audio.transcriptions.create(
            model="w", file=file(data), response_format="verbose_json", extra_body=MOST
        )
        assert answer.language == language
        text = client.audio.transcriptions.create(model="w", file=file(data), extra_body=MOST).text
        assert text == expected(tiny, data, language=language)
    assert heard == {"en", "de"}


def test_a_prompt_guides(client: openai.OpenAI, tiny: TinyWhisper) -> None:
    answer = client.audio.transcriptions.create(
        model="w", file=file(), language="en", prompt=" the first words ", extra_body=MOST
    )
    assert answer.text == expected(tiny, SHORT, prompt="the first words")
    assert answer.text != expected(tiny, SHORT)


def test_long_audio_is_heard_in_clips(client: openai.OpenAI, tiny: TinyWhisper) -> None:
    answer = client.audio.transcriptions.create(model="w", file=file(LONG), language="en", extra_body=MOST)
    assert answer.text == expected(tiny, LONG)
    assert answer.usage is not None and answer.usage.seconds == 6


def test_text_and_times(client: openai.OpenAI, tiny: TinyWhisper) -> None:
    def create(form: Any, data: bytes = LONG) -> Any:
        return client.audio.transcriptions.create(
            model="w", file=file(data), language="en", response_format=form, extra_body={"max_completion_tokens": 40}
        )

    text = client.audio.transcriptions.create(
        model="w", file=file(), language="en", response_format="text", extra_body=MOST
    )
    assert text == expected(tiny, SHORT) + "\n"
    verbose = create("verbose_json")
    assert verbose.duration == pytest.approx(5.2) and verbose.segments and verbose.text
    assert verbose.text == "".join(one.text for one in verbose.segments).strip()
    starts = [one.start for one in verbose.segments]
    assert starts == sorted(starts) and starts[-1] > SECONDS  # times of later clips are shifted
    assert all(one.start <= one.end <= 5.2 for one in verbose.segments)
    assert all(one.avg_logprob < 0 and one.compression_ratio > 0 for one in verbose.segments)
    assert [one.id for one in verbose.segments] == list(range(len(verbose.segments)))
    assert re.match(r"1\n00:00:0\d,\d{3} --> 00:00:0\d,\d{3}\n", create("srt"))
    vtt = create("vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:0") and vtt.count(" --> ") == len(verbose.segments)


def test_times_are_those_of_transformers(client: openai.OpenAI, tiny: TinyWhisper) -> None:
    """The first within a limit, in pairs, none before another, and where a time is likelier than any word."""
    count, pairs = 60, 0
    for seed in range(6):
        data = speech(seed, 1.7)
        ids = tiny.token_ids(read_back(data), count, with_times=True)
        zero = ID["<|notimestamps|>"] + 1
        times = [one for one in ids if one >= zero]
        assert ids[0] >= zero and ids[0] - zero <= LATEST_START and times == sorted(times)
        pairs += sum(one >= zero and two >= zero for one, two in itertools.pairwise(ids))
        answer = client.audio.transcriptions.create(
            model="w", file=file(data), language="en", response_format="verbose_json",
            extra_body={"max_completion_tokens": count},
        )  # fmt: skip
        written = [one for segment in answer.segments or () for one in segment.tokens]
        end = ID["<|endoftext|>"]
        assert [one for one in written if one != end] == [one for one in ids if one != end][: len(written)]
        assert len(written) >= len(ids) - 3  # a last time without words behind it is of no segment
    assert pairs > 6, "no segment ended: the rules had nothing to do"


def test_streams(client: openai.OpenAI, tiny: TinyWhisper, server: Live) -> None:
    pieces: list[Any] = list(
        client.audio.transcriptions.create(
            model="w", file=file(LONG), language="en", stream=True,
            extra_body={**MOST, "stream_include_usage": True, "stream_continuous_usage_stats": True},
        )
    )  # fmt: skip
    deltas = [one for one in pieces if one.type == "transcript.text.delta"]
    assert "".join(one.delta for one in deltas) == expected(tiny, LONG)
    assert "".join(one.choices[0]["delta"]["content"] for one in deltas) == expected(tiny, LONG)
    (done,) = [one for one in pieces if one.type == "transcript.text.done"]
    assert done.text == expected(tiny, LONG) and done.choices[0]["finish_reason"] == "length"
    assert len(deltas) > 3 and pieces[-1].choices == []
    clips = cut_into_clips(read_back(LONG), SpeechToTextConfig(max_audio_clip_s=SECONDS))
    frames = [math.ceil(round(100 * clip.seconds, 6)) for clip in clips]  # of what the encoder read
    assert pieces[-1].usage["prompt_tokens"] == 4 * len(clips) + sum(frames)
    chunks = events(post(server, {"model": "w", "language": "de", "stream": "true", **MOST}, SHORT,
                         "/v1/audio/translations").text)  # fmt: skip
    assert {one["object"] for one in chunks} == {"translation.chunk"} and chunks[0]["id"].startswith("trsl-")
    text = "".join(one["choices"][0]["delta"]["content"] for one in chunks)
    assert text == expected(tiny, SHORT, language="de", task="translate")


def test_another_rate_and_other_formats(server: Live, tiny: TinyWhisper) -> None:
    soundfile = pytest.importorskip("soundfile")
    samples = read_back(SHORT)
    for kind in ("FLAC", "OGG"):
        out = io.BytesIO()
        soundfile.write(out, samples, RATE, format=kind)
        answer = post(server, {"language": "en", **MOST}, out.getvalue())
        assert answer.status_code == 200, answer.text
        if kind == "FLAC":
            assert answer.json()["text"] == expected(tiny, SHORT)
    fast = wav(np.repeat(samples, 3), 48000)
    assert post(server, {"language": "en", **MOST}, fast).json()["usage"]["seconds"] == 2


def test_sampling_is_the_request_s(server: Live) -> None:
    body = {"language": "en", "temperature": "1.5", "top_k": "50", **MOST}
    texts = [post(server, {**body, "seed": seed}).json()["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


# ---- refusals


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [({"language": "xx"}, 400, "language"), ({"model": "nope"}, 404, "model"),
     ({"response_format": "xml"}, 400, "response_format"), ({"stream": "true", "response_format": "srt"}, 400,
      "response_format"), ({"timestamp_granularities[]": "segment"}, 400, "timestamp_granularities"),
     ({"timestamp_granularities[]": "word", "response_format": "verbose_json"}, 400, "timestamp_granularities"),
     ({"temperature": "-1"}, 400, "temperature"), ({"max_completion_tokens": "0"}, 400, "max_completion_tokens"),
     ({"max_completion_tokens": "1000000"}, 400, "max_completion_tokens"), ({"include[]": "logprobs"}, 400, "include"),
     ({"prompt": "x" * 40_000}, 400, "prompt")],
    ids=str,
)  # fmt: skip
def test_what_is_refused(server: Live, fields: dict[str, Any], status: int, param: str) -> None:
    assert error_of(post(server, {**MOST, **fields}), status)["param"] == param


@pytest.mark.parametrize(
    ("audio", "why"),
    [(None, "file"), (b"", "file is empty"), (b"no audio at all" * 50, "decoded"),
     (wav([])[:44], "no samples"), (SHORT[:30], "WAV"), (b"RIFF\xff\xff\xff\xffWAVEfmt ", "WAV"),
     (SHORT[:24] + b"\xff\xff\xff\xff" + SHORT[28:], "sampling rate"),
     (SHORT[:22] + b"\xff\xff" + SHORT[24:], "channels"), (b"fLaC" + b"\xff" * 400, "decoded"),
     (b"OggS" + b"\x00" * 400, "decoded"), (b"ID3\x03" + b"\x7f" * 100, "decoded")],
    ids=[str(number) for number in range(11)],
)  # fmt: skip
def test_hostile_audio_is_refused(server: Live, audio: bytes | None, why: str) -> None:
    if why == "decoded":
        pytest.importorskip("soundfile")
    error = error_of(post(server, MOST, audio))
    assert why in error["message"] and error["param"] == "file"


def test_translations_refuse_other_targets(server: Live) -> None:
    answer = post(server, {"to_language": "de"}, SHORT, "/v1/audio/translations")
    assert error_of(answer)["param"] == "to_language"


def test_uploads_are_bounded(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    over = 27 << 20
    error = error_of(post(server, {}, b"x" * over), 413)
    assert "MAX_AUDIO_CLIP_FILESIZE_MB" in error["message"]

    def chunks() -> Iterator[bytes]:
        yield b"--b\r\n"
        for _ in range(27):
            yield b"x" * (1 << 20)

    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = httpx.post(server.url + PATH, content=chunks(), headers=headers, timeout=60)
    assert error_of(answer, 413)["code"] == 413
    monkeypatch.setattr(env.MAX_AUDIO_CLIP_FILESIZE_MB, "_value", 1)
    error = error_of(post(server, {}, b"x" * ((1 << 20) + 1)), 413)
    assert error["param"] == "file"
    wrong = httpx.post(server.url + PATH, json={"model": "w"}, timeout=60)
    assert error_of(wrong, 415)["type"] == "UnsupportedMediaTypeError"


def test_audio_longer_than_allowed(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.MAX_AUDIO_SECONDS, "_value", 3)
    assert "the limit is 3 s" in error_of(post(server, {}, LONG))["message"]


def test_a_model_that_hears_nothing(tmp_path: Path) -> None:
    with live_fake(tmp_path / "m") as text:
        for path in (PATH, "/v1/audio/translations"):
            error = error_of(post(text, {"model": "fake"}, SHORT, path))
            assert "does not support transcriptions" in error["message"] and error["param"] == "model"


def test_the_page_has_the_routes(server: Live) -> None:
    page = httpx.get(server.url + "/openapi.json", timeout=60).json()
    for path, name in ((PATH, "TranscriptionRequest"), ("/v1/audio/translations", "TranslationRequest")):
        content = page["paths"][path]["post"]["requestBody"]["content"]
        assert content == {"multipart/form-data": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        schema = page["components"]["schemas"][name]
        assert schema["properties"]["file"]["format"] == "binary" and "file" in schema["required"]
    assert "SpeechChunk" in page["components"]["schemas"]
    assert json.dumps(page)


def test_a_chat_model_is_asked_in_words(tmp_path: Path) -> None:
    """Qwen2-Audio: each clip's text is what the documented prompt gives."""
    import torch
    import transformers as tf
    from tokenizers import Tokenizer

    from tests.media.test_joined import qwen2_audio
    from tests.media.tokens import write_tokenizer

    write_tokenizer(tmp_path)
    vocab = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(3)
    tf.Qwen2AudioForConditionalGeneration(qwen2_audio(vocab)).eval().float().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_size": 16, "chunk_length": 2}))
    asked = "<|audio_bos|><|AUDIO|><|audio_eos|>Detect the language and recognize the speech: <|en|>"
    clips = cut_into_clips(read_back(LONG), SpeechToTextConfig(max_audio_clip_s=2))
    engine = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4}
    with LLM(str(tmp_path), **engine) as llm:
        prompts: Any = [{"prompt": asked, "multi_modal_data": {"audio": (clip.samples, RATE)}} for clip in clips]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=COUNT), use_tqdm=False)
    with live(str(tmp_path), engine=engine) as running:
        answer = post(running, {"language": "en", **MOST}, LONG)
        assert answer.status_code == 200, answer.text
        assert answer.json()["text"] == " ".join(one.outputs[0].text.lstrip() for one in outputs)
        assert error_of(post(running, {"response_format": "srt"}))["param"] == "response_format"
        assert error_of(post(running, {"prompt": "Hi"}))["param"] == "prompt"
        assert error_of(post(running, {}, wav([0.5])))["param"] == "file"


def test_a_client_that_goes_takes_its_clips_with_it(server: Live) -> None:
    """All clips of a stream that is left are aborted, and the server hears the next one."""
    files = {"file": ("a.wav", speech(9, 20.0), "audio/wav")}
    with httpx.stream("POST", server.url + PATH, data={"language": "en", "stream": "true"}, files=files) as answer:
        next(answer.iter_lines())
    for _ in range(600):
        if not server.engine._streams.request_ids():
            break
        time.sleep(0.1)
    assert not server.engine._streams.request_ids() and server.state.load.count == 0
    assert post(server, {"language": "en", **MOST}).status_code == 200


@pytest.mark.parametrize(("field", "value", "name"), [("feature_size", 40, "num_mel_bins 20"),
                                                      ("chunk_length", 3, "max_source_positions 100")])  # fmt: skip
def test_an_extractor_of_another_model(tiny: TinyWhisper, tmp_path: Path, field: str, value: int, name: str) -> None:
    """Known when the server starts, and not by its first request."""
    shutil.copytree(tiny.folder, tmp_path / "m")
    path = tmp_path / "m" / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(CheckpointError, match=name), live(str(tmp_path / "m"), engine={"dtype": "float32"}):
        pass


def test_silence_that_unpacks_to_gigabytes(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a few bytes: samples are counted while they are decoded."""
    soundfile = pytest.importorskip("soundfile")
    monkeypatch.setattr("quire.media.audio._MOST_SAMPLES", 1 << 20)
    out = io.BytesIO()
    soundfile.write(out, np.zeros(1 << 21, np.int16), 192_000, format="FLAC")
    assert len(out.getvalue()) < 1 << 16
    error = error_of(post(server, {}, out.getvalue()))
    assert "the limit is 1048576" in error["message"] and error["param"] == "file"


def test_audio_in_work_is_bounded(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files wait for those before them only so far: then 503, with a time to try again."""
    monkeypatch.setattr("quire.server.openai.speech_desk._QUEUE", -2)
    answer = post(server, {"language": "en"})
    assert error_of(answer, 503)["type"] == "ServiceUnavailableError" and answer.headers["retry-after"]


def test_a_client_that_goes_before_its_audio_is_decoded(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its place in the queue nor its call is kept; a thread that decodes counts until it is done."""
    goes_on, begun = threading.Event(), threading.Semaphore(0)

    def slow(data: memoryview, model: Any) -> Any:
        begun.release()
        goes_on.wait(60)
        return read_clips(data, model)

    read_clips = speech_routes._read_clips
    monkeypatch.setattr(speech_routes, "_read_clips", slow)
    clients = [begin_post(server) for _ in range(4)]
    try:
        for _ in range(DECODED_AT_ONCE):
            assert begun.acquire(timeout=60)
        wait_until(lambda: server.state.load.count == 4)
        for one in clients:
            one.close()
        wait_until(lambda: server.state.load.count == 0)
        assert not begun.acquire(blocking=False)
    finally:
        goes_on.set()
    assert post(server, {"language": "en", **MOST}).status_code == 200
    assert begun.acquire(timeout=60) and not begun.acquire(blocking=False), "the two that waited were never decoded"


def test_time_that_is_up_before_audio_is_decoded(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(speech_routes, "_read_clips", lambda data, model: goes_on.wait(60))
    try:
        files = {"file": ("a.wav", SHORT, "audio/wav")}
        answer = httpx.post(server.url + PATH, files=files, headers={"x-request-timeout": "0.2"}, timeout=60)
        assert answer.status_code == 504 and "0.2 s" in error_of(answer, 504)["message"]
    finally:
        goes_on.set()


def test_a_detection_that_is_aborted(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    open_clip = SpeechCall.open

    async def aborted(*args: Any) -> Any:
        request_id, flow = await open_clip(*args)
        server.engine._streams.abort([request_id])
        return request_id, flow

    monkeypatch.setattr(SpeechCall, "open", aborted)
    for fields in ({}, {"language": "en"}):
        assert "aborted" in error_of(post(server, fields), 503)["message"]


def begin_post(server: Live) -> socket.socket:
    request = httpx.Request("POST", server.url + PATH, files={"file": ("a.wav", SHORT, "audio/wav")})
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    connection = socket.create_connection((request.url.host, request.url.port or 80))
    connection.sendall(f"POST {PATH} HTTP/1.1\r\n{head}\r\n".encode() + request.read())
    return connection


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it never was so")
