"""Documented programs with audio and images, written against vLLM's interface and run through compat/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quire import LLM, SamplingParams
from tests.compat.test_programs import Warm, quoted, run
from tests.media.test_joined import write_model
from tests.media.test_pixels_oracle import picture
from tests.media.tiny_hearing import PLACE, TEMPLATE, TinyHearing
from tests.media.tiny_llava import TinyLlava
from tests.media.tokens import write_tokenizer
from tests.plain.media.test_hostile_media import movie
from tests.server.live import live
from tests.tiny_models import make_tiny
from tests.tiny_whisper import TinyWhisper, read_back, speech
from tests.warm_python import WarmPython


def test_encoder_decoder_multimodal(tmp_path: Path) -> None:
    """Both forms of prompt say what transformers hears, without the checkpoint's own rules, as the program asks."""
    tiny = TinyWhisper(tmp_path / "m")
    data = speech(3, 1.3)
    (tmp_path / "a.wav").write_bytes(data)
    printed = run("encoder_decoder_multimodal", "--model", str(tiny.folder), "--audio", str(tmp_path / "a.wav"))
    texts = quoted(printed, "Generated text")
    assert len(texts) == 2 and texts[0] == texts[1]
    tiny.model.generation_config.suppress_tokens = tiny.model.generation_config.begin_suppress_tokens = None
    ids = tiny.token_ids(read_back(data), 8)
    assert texts[0] == tiny.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture
def warm(warm_python: WarmPython) -> Warm:
    """A model that sees or hears is built by transformers; clients are openai's."""
    return Warm(warm_python, "transformers.modeling_utils", "openai")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> TinyLlava:
    return TinyLlava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photos")
    paths = [folder / "a.png", folder / "b.png"]
    for path, size in zip(paths, ((50, 40), (33, 70)), strict=True):
        picture(*size).save(path)
    return paths


def test_multimodal_uuids(warm: Warm, llava: TinyLlava) -> None:
    printed = warm.run("multimodal_uuids", str(llava.folder))
    assert quoted(printed, "Same") == [True] and quoted(printed, "Unknown") == [True]


def said(tiny: TinyLlava, text: str, paths: list[Path]) -> str:
    """By transformers, in as many tokens as the programs ask for."""
    _, ids = tiny.answer(text, [Image.open(path) for path in paths])
    return str(tiny.processor.tokenizer.decode(ids, skip_special_tokens=True))


def test_vision_language(warm: Warm, llava: TinyLlava, photos: list[Path]) -> None:
    printed = warm.run(
        "vision_language", "--model", str(llava.folder), "--image", str(photos[0]), "--verify-mm-cache-hit-with-uuids"
    )
    questions = ["What is the content of this image?", "Describe it."]
    expected = [said(llava, f"USER: <image>\n{one}\nASSISTANT:", photos[:1]) for one in questions] * 2
    assert quoted(printed, "Generated text") == expected == quoted(printed, "Cached text")
    assert quoted(printed, "Missed") == [True]


@pytest.mark.parametrize("method", ["generate", "chat"])
def test_vision_language_multi_image(warm: Warm, llava: TinyLlava, photos: list[Path], method: str) -> None:
    urls = [f"file://{path}" for path in photos]
    printed = warm.run(
        "vision_language_multi_image", "--model", str(llava.folder), "--method", method, "--images", *urls
    )
    text = "user: <image>\n<image>\nWhat is the content of each image?\nassistant:"
    assert quoted(printed, "Generated text") == [said(llava, text, photos)]


@pytest.mark.parametrize("kind, name, num", [("qwen2_audio", "qwen2 audio", 2), ("phi4_mm", "phi 4, audio", 0)])
def test_audio_language(warm: Warm, tmp_path: Path, kind: str, name: str, num: int) -> None:
    """Two prompts with the same words, with audio or none: those of the same prompt given to Quire's own LLM."""
    write_model(name, tmp_path, seed=5)  # one that says words, not special tokens alone
    paths = [tmp_path / f"{number}.wav" for number in range(2)]
    for number, path in enumerate(paths):
        path.write_bytes(speech(number, 0.8))
    printed = warm.run(
        "audio_language", "-m", kind, "--model", str(tmp_path), "--num-audios", str(num), "--num-prompts", "2",
        "--audio", *map(str, paths),
    )  # fmt: skip
    question = "What do the two have in common?" if num else "What is 1+1?"
    audio = "".join(f"Audio {i + 1}: <|audio_bos|><|AUDIO|><|audio_eos|>\n" for i in range(num))
    prompt: dict[str, Any] = {"prompt": f"USER: {audio}{question}\nASSISTANT:"}
    if num:
        prompt["multi_modal_data"] = {"audio": [path.read_bytes() for path in paths]}
    with LLM(str(tmp_path), dtype="float32", max_model_len=512) as llm:
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert output.outputs[0].text
    assert quoted(printed, "Generated text") == [output.outputs[0].text] * 2


def test_prompt_embed_inference(warm: Warm, tmp_path: Path) -> None:
    make_tiny("LlamaForCausalLM", tmp_path)
    printed = warm.run("prompt_embed_inference", str(tmp_path))
    batch = quoted(printed, "Batch")
    assert len(batch) == 3 and batch == quoted(printed, "Text") and quoted(printed, "Single") == batch[:1]


def test_openai_chat_completion_client_for_multimodal(warm: Warm, llava: TinyLlava, photos: list[Path]) -> None:
    engine = {"dtype": "float32", "max_model_len": 256, "allowed_local_media_path": str(photos[0].parent)}
    with live(str(llava.folder), engine=engine) as server:
        printed = "".join(
            warm.run(
                "openai_chat_completion_client_for_multimodal", "-c", kind, "--base-url", f"{server.url}/v1",
                "--path", str(photos[0]),
            )
            for kind in ("text-only", "single-image", "multi-image")
        )  # fmt: skip
    question = "What's in this image?"
    one = said(llava, f"user: {question}<image>\n\nassistant:", photos[:1])
    assert quoted(printed, "From URL") == quoted(printed, "From base64") == [one]
    two = said(llava, "user: What are these?<image>\n<image>\n\nassistant:", photos[:1] * 2)
    assert quoted(printed, "Two") == [two] and quoted(printed, "Text")[0]


def test_openai_chat_completion_client_with_audio(warm: Warm, tmp_path: Path) -> None:
    tiny = TinyHearing(tmp_path)
    path = tmp_path / "a.wav"
    path.write_bytes(speech(3, 1.3))
    engine = {"dtype": "float32", "max_model_len": 512, "allowed_local_media_path": str(tmp_path)}
    prompt = {"prompt": f"What's in this audio?{PLACE}", "multi_modal_data": {"audio": path.read_bytes()}}
    with LLM(str(tmp_path), **engine) as llm:
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    with live(str(tiny.folder), engine=engine) as server:
        printed = warm.run(
            "openai_chat_completion_client_for_multimodal", "-c", "audio", "--base-url", f"{server.url}/v1", "--path",
            str(path),
        )  # fmt: skip
    said = [output.outputs[0].text]
    assert said[0].strip()
    assert quoted(printed, "From input_audio") == quoted(printed, "From URL") == quoted(printed, "From base64") == said


def test_openai_chat_completion_client_with_video(warm: Warm, tmp_path: Path) -> None:
    write_model("qwen2 vl, video", tmp_path, seed=5)
    place = "<|vision_start|><|video_pad|><|vision_end|>"
    write_tokenizer(tmp_path, chat_template=TEMPLATE.replace(PLACE, place))
    path = tmp_path / "a.mkv"
    path.write_bytes(movie(30))
    engine = {"dtype": "float32", "max_model_len": 512, "allowed_local_media_path": str(tmp_path)}
    prompt = {"prompt": f"What's in this video?{place}", "multi_modal_data": {"video": path.read_bytes()}}
    with LLM(str(tmp_path), **engine) as llm:
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    with live(str(tmp_path), engine=engine) as server:
        printed = warm.run(
            "openai_chat_completion_client_for_multimodal", "-c", "video", "--base-url", f"{server.url}/v1", "--path",
            str(path),
        )  # fmt: skip
    said = [output.outputs[0].text]
    assert said[0].strip()
    assert quoted(printed, "From URL") == quoted(printed, "From base64") == said


def test_openai_transcription_client(warm: Warm, tmp_path: Path) -> None:
    tiny = TinyWhisper(tmp_path / "m")
    data = speech(3, 1.3)
    (tmp_path / "a.wav").write_bytes(data)
    with live(str(tiny.folder), engine={"dtype": "float32"}) as server:
        printed = warm.run(
            "openai_transcription_client", "--audio-path", str(tmp_path / "a.wav"), "--base-url", f"{server.url}/v1"
        )
    heard = read_back(data)
    assert (
        quoted(printed, "Transcription")
        == quoted(printed, "Streamed")
        == [tiny.heard(heard, 8, language="en").lstrip()]
    )
    assert quoted(printed, "Translation") == [tiny.heard(heard, 8, language="de", task="translate").lstrip()]
