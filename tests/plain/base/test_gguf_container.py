"""The GGUF container: what a good file gives, and that no damaged or hostile file does anything but raise GGUFError."""

import random
import struct

import pytest

from quire.base import gguf
from quire.base.gguf import GGUFError, GGUFFile

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def array(kind: int, count: int, raw: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + raw


def tensor(name: str, dims: tuple[int, ...], type_id: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def container(
    keys: list[bytes], tensors: list[bytes], data: bytes = b"", *, version: int = 3, align: int = 32
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % align) + data


@pytest.fixture
def write(tmp_path):
    def write(raw: bytes) -> str:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        path.write_bytes(raw)
        return str(path)

    return write


GOOD = container(
    [
        entry("general.architecture", STRING, text("llama")),
        entry("llama.block_count", U32, struct.pack("<I", 7)),
        entry("llama.rope.freq_base", F32, struct.pack("<f", 0.5)),
        entry("flag", BOOL, b"\1"),
        entry("big", U64, struct.pack("<Q", 2**40)),
        entry("tokens", ARRAY, array(STRING, 3, text("a") + text("é") + text(""))),
        entry("numbers", ARRAY, array(I32, 2, struct.pack("<ii", -1, 5))),
        entry("nested", ARRAY, array(ARRAY, 2, array(U8, 1, b"\3") + array(U8, 2, b"\4\5"))),
    ],
    [tensor("w", (4, 2), 0, 0), tensor("rope_freqs.weight", (2,), 0, 32)],
    struct.pack("<8f", *range(8)) + struct.pack("<2f", 1.0, 8.0),
)


def test_reads_every_kind_of_value(write):
    file = GGUFFile(write(GOOD))
    assert file.metadata == {
        "general.architecture": "llama",
        "llama.block_count": 7,
        "llama.rope.freq_base": 0.5,
        "flag": True,
        "big": 2**40,
        "tokens": ["a", "é", ""],
        "numbers": [-1, 5],
        "nested": [[3], [4, 5]],
    }
    info = file.tensors["w"]
    assert info.shape == (2, 4)  # outermost first
    assert struct.unpack("<8f", file.data(info, 32)) == tuple(range(8))


def test_floats_without_a_tensor_library(write):
    file = GGUFFile(write(GOOD))
    assert file.floats("rope_freqs.weight") == [1.0, 8.0]
    assert file.floats("absent") is None
    with pytest.raises(GGUFError, match="float32 vector"):
        file.floats("w")


def test_bytes_that_are_no_text_survive(write):
    raw = container([entry("k", STRING, struct.pack("<Q", 2) + b"\xff\xfe")], [])
    assert GGUFFile(write(raw)).metadata["k"].encode("utf-8", "surrogateescape") == b"\xff\xfe"


def test_alignment_is_respected(write):
    keys = [entry("general.alignment", U32, struct.pack("<I", 256))]
    raw = container(keys, [tensor("w", (1,), 0, 256)], b"\0" * 256 + struct.pack("<f", 9.0), align=256)
    assert GGUFFile(write(raw)).floats("w") == [9.0]


def test_shared_parses_once_and_notices_a_new_file(write, tmp_path):
    path = write(GOOD)
    assert gguf.shared(path) is gguf.shared(path)
    other = container([entry("other", STRING, text("x"))], [])
    (tmp_path / "0.gguf").write_bytes(other)
    assert "other" in gguf.shared(path).metadata


def test_truncated_anywhere_is_an_error(write):
    """Every cut inside the directory is an error on opening; a cut in the data is one when the tensor is read."""
    data_start = len(GOOD) - 40
    for cut in range(0, data_start - 32, 3):
        with pytest.raises(GGUFError):
            GGUFFile(write(GOOD[:cut]))
    file = GGUFFile(write(GOOD[: data_start + 8]))
    with pytest.raises(GGUFError, match=r"truncated: tensor 'w' needs bytes \d+ to \d+, the file has"):
        file.data(file.tensors["w"], 32)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "0 bytes is too short"),
        (b"GGUF" + b"\0" * 30, "version 0"),
        (b"PK\3\4" + b"\0" * 30, "not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 30, "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "a count of 9223372036854775808"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "a count of"),
        (container([entry("k", STRING, struct.pack("<Q", 2**62))], []), "runs past the end"),
        (
            container([entry("k", ARRAY, array(U64, 2**23, b"")), entry("z", STRING, text("x" * 2**23))], []),
            "truncated",
        ),
        (container([entry("k", ARRAY, array(STRING, 2**30, b""))], []), "a count of"),
        (container([entry("k", ARRAY, array(STRING, 9, text("a")))], []), "GGUF"),
        (container([entry("k", 77, b"")], []), "unknown metadata type 77"),
        (container([entry("k", BOOL, b"\1"), entry("k", BOOL, b"\1")], []), "key 'k' is there twice"),
        (container([], [tensor("w", (1,), 0, 0), tensor("w", (1,), 0, 0)]), "tensor 'w' is there twice"),
        (container([], [tensor("w", (1,) * 9, 0, 0)]), "claims 9 dimensions"),
        (container([], [tensor("w", (0, 2**63), 0, 0)]), r"claims the sizes .*9223372036854775808"),
        (container([entry("general.alignment", U32, struct.pack("<I", 0))], []), "alignment 0"),
        (container([entry("general.alignment", U64, struct.pack("<Q", 2**63))], []), "alignment 9223"),
        (container([entry("general.alignment", STRING, text("x"))], []), "alignment 'x'"),
    ],
)
def test_damage_is_named(write, raw, says):
    with pytest.raises(GGUFError, match=says):
        GGUFFile(write(raw))


def test_deeply_nested_arrays_are_refused(write):
    raw = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(5000))
    with pytest.raises(GGUFError, match="nested deeper"):
        GGUFFile(write(container([entry("k", ARRAY, raw)], [])))


def test_random_damage_never_does_anything_else(write):
    """Flipped bytes either still read, or raise GGUFError; data() stays inside the file."""
    rng = random.Random(0)
    for _ in range(400):
        raw = bytearray(GOOD)
        for _ in range(rng.randint(1, 6)):
            raw[rng.randrange(4, len(raw))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path = write(bytes(raw))
        try:
            file = GGUFFile(path)
            for info in file.tensors.values():
                assert len(file.data(info, 8)) == 8
        except GGUFError:
            pass
