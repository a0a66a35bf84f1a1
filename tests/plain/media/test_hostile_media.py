"""Hostile images, audio and video are refused in bounded time and memory."""

from __future__ import annotations

import io
import resource
import struct
import time
import tracemalloc
import wave
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from quire.media.audio import Audio, decode_audio, read_audio, resample
from quire.media.images import decode_image, read_image
from quire.media.video import choose_frames, decode_video, read_video
from quire.schema.errors import InputError

MEMORY = 200 << 20
SECONDS = 60.0


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, pixels: bytes = b"", colour: int = 2) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def endless_gif(frames: int) -> bytes:
    """A GIF of many frames that repeats for ever; only its first is a picture to a model."""
    head = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0x80, 0, 0) + bytes(6) + b"\x21\xff\x0bNETSCAPE2.0\x03\x01\0\0\0"
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 8, 8, 0) + b"\x02\x16\x8c\x2d\x99\x87\x2a\x1c\xdc\x33"
    frame += b"\xa0\x02\x75\xec\x95\xfa\xa8\xde\x60\x8c\x04\x91\x4c\x01\0"
    return head + frame * frames


def bounded(work: Callable[[], object]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    tracemalloc.start()
    began = time.monotonic()
    try:
        work()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
        assert time.monotonic() - began < SECONDS
        assert max(peak, grown) < MEMORY


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (png(60000, 60000), "too long|pixels"),
        (png(30000, 30000, b"\0" * 1_000_000), "more pixels than the limit"),
        (png(1_000_000, 1, bytes(3_000_001)), "too long; the limit is 32768"),
        (png(1, 1_000_000), "too long"),
        (png(9000, 9000), "81000000 pixels; the limit is 67108864"),
        (png(0, 7), "cannot be read|no content"),
        (png(100, 100)[:60], "cannot be"),
        (png(100, 100, bytes(20)), "cannot be decoded"),
        (b"\x89PNG\r\n\x1a\n" + b"\xff" * 1000, "cannot be"),
        (b"GIF89a" + b"\xff\xff\xff\xff" + bytes(100), "too long|pixels|cannot"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "known formats"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "known formats"),
        (b"", "cannot be read"),
    ],
)  # fmt: skip
def test_images_that_are_refused(data: bytes, why: str) -> None:
    def attempt() -> None:
        with pytest.raises(InputError, match=why):
            decode_image(data)

    bounded(attempt)


def test_an_error_does_not_tell_where_memory_lies() -> None:
    with pytest.raises(InputError) as failed:
        decode_image(b"no image")
    assert "the image (8 bytes) cannot be read: it has none of the formats; known formats are PNG" in str(failed.value)
    assert " at 0x" not in str(failed.value)


def test_an_endless_gif_is_its_first_frame() -> None:
    gif = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), (n % 256, 9, 9)) for n in range(3)]
    frames[0].save(gif, "GIF", save_all=True, append_images=frames[1:], loop=0)
    many = gif.getvalue()[:-1] * 2000  # what follows the first image is never looked at
    bounded(lambda: decode_image(many))
    assert decode_image(many).size == (8, 8)
    assert len(endless_gif(20000)) > 500_000
    bounded(lambda: decode_image(endless_gif(20000)))


def test_a_compression_bomb_within_the_limit_costs_no_more_than_its_pixels() -> None:
    side = 2000
    data = png(side, side, bytes((side * 3 + 1) * side) + bytes(50_000_000))  # more rows than the header says
    assert len(data) < 200_000
    bounded(lambda: decode_image(data))


def test_orientation_and_transparency() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    Image.new("RGB", (40, 20), (1, 2, 3)).save(out, "PNG", exif=exif)
    assert decode_image(out.getvalue()).size == (20, 40)
    clear = io.BytesIO()
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(clear, "PNG")
    assert decode_image(clear.getvalue()).getpixel((0, 0)) == (255, 255, 255)
    assert decode_image(clear.getvalue(), {"rgba_background_color": [9, 8, 7]}).getpixel((0, 0)) == (9, 8, 7)
    for colour in ("white", [1, 2], [1, 2, 300], [1.0, 2, 3], None):
        with pytest.raises(InputError, match="rgba_background_color"):
            decode_image(clear.getvalue(), {"rgba_background_color": colour})


def test_arrays_of_pixels() -> None:
    grey = np.arange(48, dtype=np.uint8).reshape(6, 8)
    assert read_image(grey).size == (8, 6) and read_image(grey).mode == "RGB"
    assert read_image(np.zeros((3, 6, 8), np.uint8)).size == (8, 6)
    assert read_image(np.zeros((6, 8, 3), np.float32)).size == (8, 6)
    for wrong in (np.zeros((6, 8, 5), np.uint8), np.full((6, 8, 3), 300), np.full((6, 8, 3), np.nan), np.zeros(4), "x"):
        with pytest.raises(InputError):
            read_image(wrong)


# ---- audio ----------------------------------------------------------------------------------------------------------


def wav(
    rate: int = 16000,
    channels: int = 1,
    bits: int = 16,
    data: bytes = bytes(3200),
    kind: int = 1,
    size: int | None = None,
) -> bytes:
    form = struct.pack("<HHIIHH", kind, channels, rate, 0, channels * bits // 8 % 65536, bits)
    size = len(data) if size is None else size
    body = b"fmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (wav(rate=0), "sampling rate of 0"),
        (wav(rate=1), "sampling rate of 1"),
        (wav(rate=4_000_000_000), "sampling rate of 4000000000"),
        (wav(channels=0), "0 channels"),
        (wav(channels=65535), "65535 channels"),
        (wav(data=b""), "no samples"),
        (wav(data=b"x"), "no samples"),
        (wav(rate=1000, bits=8, data=bytes(3_600_001)), "limit is 3600 s"),
        (wav(bits=32, kind=3, data=struct.pack("<f", float("nan")) * 9), "not finite"),
        (wav(bits=64, kind=3, data=struct.pack("<d", 1e300) * 9), "9 of the 9 samples"),
        (wav(bits=32, kind=3, channels=2, data=struct.pack("<f", 3e38) * 18), "9 of the 9 samples"),
        (wav()[:40], "no samples"),
        (b"RIFF\0\0\0\0WAVE" + b"junk\0\0\0\0" * 5000, "more than 4096 chunks"),
        (b"RIFF\0\0\0\0WAVEfmt \x02\0\0\0ab", "must have 16"),
        (b"RIFF\0\0\0\0WAVE" + b"junk\xff\xff\xff\xff" * 100, "no samples"),
        (b"RIFF\0\0\0\0WAVEdata\x04\0\0\0abcd", "before their format"),
    ],
)
def test_audio_headers_that_are_refused(data: bytes, why: str) -> None:
    def attempt() -> None:
        with pytest.raises(InputError, match=why):
            decode_audio(data)

    bounded(attempt)


@pytest.mark.parametrize("data", [wav(bits=0), wav(kind=0), wav(kind=0xFFFE), wav(bits=65535)])
def test_codings_of_audio_that_nothing_knows(data: bytes) -> None:
    pytest.importorskip("av")
    with pytest.raises(InputError, match="cannot be decoded"):
        decode_audio(data)


def test_a_coding_of_video_that_nothing_knows() -> None:
    av = pytest.importorskip("av")
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        container.mux([*stream.encode(frame), *stream.encode()])
    data = out.getvalue()
    renamed = data.replace(b"V_MPEG4", b"V_XXXXX")
    assert renamed != data
    with pytest.raises(InputError, match="a coding that cannot be decoded"):
        decode_video(renamed)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_samples_of_other_formats_are_numbers(value: float) -> None:
    soundfile = pytest.importorskip("soundfile")
    out = io.BytesIO()
    soundfile.write(out, np.array([0.1, value, 0.2], np.float32), 16000, format="AU", subtype="FLOAT")
    with pytest.raises(InputError, match="1 of the 3 samples"):
        decode_audio(out.getvalue())


def test_a_header_that_promises_more_than_there_is() -> None:
    audio = decode_audio(wav(size=0xFFFFFFFF))
    assert len(audio.samples) == 1600


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_of_every_width(width: int) -> None:
    wanted = np.array([0.0, 0.5, -0.5, 0.25], np.float32)
    whole = np.round(wanted.astype(float) * (1 << (8 * width - 1))).astype(np.int64) + (128 if width == 1 else 0)
    raw = b"".join(int(one).to_bytes(width, "little", signed=width > 1) for one in whole for _ in range(2))
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(width)
        file.setframerate(8000)
        file.writeframes(raw)
    audio = decode_audio(out.getvalue())
    assert audio.rate == 8000
    np.testing.assert_allclose(audio.samples, wanted, atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 11025, 16001, 44100, 48000])
def test_resampling_keeps_a_tone(rate: int) -> None:
    time_ = np.arange(rate) / rate
    tone = np.sin(2 * np.pi * 440 * time_).astype(np.float32)
    out = resample(Audio(tone, rate), 16000)
    assert len(out) == 16000
    expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    assert np.abs(out - expected)[200:-200].max() < 2e-3


def test_audio_arrays() -> None:
    assert read_audio((np.zeros(100), 8000)).rate == 8000
    assert read_audio(np.zeros(100)).rate == 16000
    assert len(read_audio((np.zeros((2, 100)), 8000)).samples) == 100
    for wrong in ((np.zeros(9), 10), (np.zeros((2, 2, 2)), 16000), (np.zeros(0), 16000), (np.array(["a"]), 16000),
                  (np.zeros(9), "fast"), (np.array([np.inf]), 16000)):  # fmt: skip
        with pytest.raises(InputError):
            read_audio(wrong)


def test_compressed_audio_is_bounded_too() -> None:
    soundfile = pytest.importorskip("soundfile")
    out = io.BytesIO()
    soundfile.write(out, np.zeros(1000 * 60 * 70, np.int16), 1000, format="FLAC")  # 70 minutes in a few kilobytes
    assert len(out.getvalue()) < 200_000

    def attempt() -> None:
        with pytest.raises(InputError, match="limit is 3600 s"):
            decode_audio(out.getvalue())

    bounded(attempt)
    tone = io.BytesIO()
    soundfile.write(tone, np.sin(np.arange(8000) / 9).astype(np.float32) / 2, 8000, format="FLAC")
    np.testing.assert_allclose(decode_audio(tone.getvalue()).samples, np.sin(np.arange(8000) / 9) / 2, atol=1e-4)
    with pytest.raises(InputError, match="cannot be decoded"):
        decode_audio(b"fLaC" + bytes(1000))


# ---- video ----------------------------------------------------------------------------------------------------------


def test_frames_are_spread_evenly() -> None:
    assert choose_frames(10, 5.0, {"num_frames": 4}) == [0, 3, 6, 9]
    assert choose_frames(3, None, {}) == [0, 1, 2]
    assert choose_frames(1000, 10.0, {"num_frames": -1, "fps": 0.05}) == [0, 249, 499, 749, 999]
    assert choose_frames(50, 10.0, {"num_frames": 1}) == [0]
    for wrong in ({"num_frames": 0}, {"num_frames": -2}, {"num_frames": 2.5}, {"fps": "x"}, {"num_frames": -1}):
        with pytest.raises(InputError):
            choose_frames(1_000_000, 25.0, wrong)


def movie(frames: int, width: int = 32, height: int = 16) -> bytes:
    av = pytest.importorskip("av")
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            shade = np.full((height, width, 3), number * 200 // max(frames, 1), np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(shade)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return out.getvalue()


def test_a_video_gives_some_of_its_frames() -> None:
    data = movie(30)
    video = decode_video(data, {"num_frames": 4})
    assert video.indices == [0, 9, 19, 29] and video.total == 30 and video.fps == 25
    shades = [frame.getpixel((8, 8))[0] for frame in video.frames]
    assert shades == sorted(shades) and shades[-1] - shades[0] > 150


def test_a_video_of_too_many_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    data = movie(120, 16, 16)
    monkeypatch.setattr("quire.media.video.env.MAX_VIDEO_FRAMES._value", 100)

    def attempt() -> None:
        with pytest.raises(InputError, match=r"limit (of|is) 100"):
            decode_video(data)

    bounded(attempt)


def test_a_video_of_a_million_frames() -> None:
    """In a few megabytes: the same still frames again and again. They are counted up to the limit."""
    data = movie(101, 16, 16)
    first = data.index(b"\x1f\x43\xb6\x75")  # a cluster of frames
    last = data.find(b"\x1c\x53\xbb\x6b", first)  # and the index behind the last
    clusters = data[first : last if last > 0 else len(data)]
    segment = data.index(b"\x18\x53\x80\x67") + 4
    head = data[:segment] + b"\x01" + b"\xff" * 7 + data[segment + 8 : first]  # a segment of unknown length
    many = head + clusters * 9901
    assert len(clusters) * 9901 < 64 << 20

    def attempt() -> None:
        with pytest.raises(InputError, match="more than the limit of 36000 frames"):
            decode_video(many)

    bounded(attempt)
    assert decode_video(head + clusters * 3, {"num_frames": 4}).total == 303


def test_videos_that_cannot_be_read() -> None:
    pytest.importorskip("av")
    data = movie(5)
    for wrong in (b"", b"\x1aE\xdf\xa3" + b"\xff" * 500, data[:200], png(4, 4), wav()):
        with pytest.raises(InputError):
            decode_video(wrong)
    with pytest.raises(InputError, match="3000 frames"):
        read_video(np.zeros((3000, 2, 2, 3), np.uint8))
    assert len(read_video(np.zeros((4, 6, 8, 3), np.uint8)).frames) == 4
    with pytest.raises(InputError):
        read_video(np.zeros((4, 6, 8), np.uint8))


def test_containers_open_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats that name further files or addresses would let a caller read both."""
    pytest.importorskip("av")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.mkv").write_bytes(movie(5))
    (tmp_path / "secret.wav").write_bytes(wav())
    (tmp_path / "secret.txt").write_text("a secret\n" * 40)
    stream = b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 45554 RTP/AVP 96\n"
    lists = [f"ffconcat version 1.0\nfile {name}\n".encode() for name in ("secret.mkv", "secret.wav", "secret.txt")]
    hls = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nsecret.mkv\n#EXT-X-ENDLIST\n"
    for data in (*lists, hls, stream + b"a=rtpmap:96 H264/90000\n"):
        for decode in (decode_video, decode_audio):

            def attempt(data: bytes = data, decode: Callable[[bytes], object] = decode) -> None:
                with pytest.raises(InputError):
                    decode(data)

            bounded(attempt)


def test_frames_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    data = movie(40, 64, 64)
    monkeypatch.setattr("quire.media.video.env.MAX_IMAGE_PIXELS._value", 64 * 64)
    assert len(decode_video(data, {"num_frames": 4}).frames) == 4
    with pytest.raises(InputError, match="20480 pixels together; the limit is 16384"):
        decode_video(data, {"num_frames": 5})


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG"])
def test_a_view_is_decoded_as_its_bytes_are(kind: str) -> None:
    """A file within a form; more than a piece of it."""
    soundfile = pytest.importorskip("soundfile")
    out = io.BytesIO()
    soundfile.write(out, np.random.default_rng(1).uniform(-0.5, 0.5, 900_000), 16000, format=kind)
    data = out.getvalue()
    assert kind == "OGG" or len(data) > 1 << 20
    view = decode_audio(memoryview(bytearray(b"head" + data + b"tail"))[4:-4])
    whole = decode_audio(data)
    assert view.rate == whole.rate and np.array_equal(view.samples, whole.samples)
