"""One safetensors file: everything a good one holds, and one clear error for every way a file can be bad."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.loader.safetensors_file import SafetensorsFile
from quire.schema.errors import CheckpointError

DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool",
          "float8_e4m3fn", "float8_e5m2"]  # fmt: skip


def write(path, header: object, data: bytes = b"", *, length: int | None = None) -> str:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return str(path)


def read(path, *, eager: bool = False) -> dict[str, torch.Tensor]:
    file = SafetensorsFile(str(path), eager=eager)
    return {name: tensor for entry in file.entries for name, tensor in file.read(entry)}


def f32(shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("eager", [False, True])
def test_every_dtype_equals_the_library(tmp_path, eager):
    tensors = {name: torch.arange(6).view(2, 3).to(getattr(torch, name)) for name in DTYPES}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    want = load_file(tmp_path / "m.safetensors")
    got = read(tmp_path / "m.safetensors", eager=eager)
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert got[name].dtype == t.dtype and got[name].shape == t.shape
        assert got[name].view(-1).view(torch.uint8).tolist() == t.reshape(-1).view(torch.uint8).tolist(), name


def test_powers_of_two_are_read_as_their_exponents(tmp_path):
    exponents = torch.tensor([[0, 1, 127], [128, 254, 255]], dtype=torch.uint8)
    save_file({"a": exponents.view(torch.float8_e8m0fnu)}, tmp_path / "m.safetensors")
    got = read(tmp_path / "m.safetensors")["a"]
    assert got.dtype == torch.uint8 and torch.equal(got, exponents)


def test_lazy_tensors_are_views_that_stay_valid(tmp_path):
    """Kept past their turn (pages given back, map otherwise unreferenced) they still read the right bytes."""
    want = {f"t{i}": torch.randn(300, 300) for i in range(5)}
    save_file(want, tmp_path / "m.safetensors")
    kept = read(tmp_path / "m.safetensors")
    assert len({t.untyped_storage().data_ptr() for t in kept.values()}) == 1  # the one map
    for name, t in want.items():
        assert torch.equal(kept[name], t)


def test_numbers_at_odd_addresses(tmp_path):
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "b": f32([2], 1, 9)}).encode()
    path = write(tmp_path / "m.safetensors", header + b" " * (-len(header) % 8), b"\7" + struct.pack("<2f", 1.5, -2.5))
    got = read(path)
    assert got["a"].tolist() == [7] and got["b"].tolist() == [1.5, -2.5]


GOOD = {"a": f32([2], 0, 8), "b": f32([1], 8, 12)}
BAD = [
    (GOOD, b"\0" * 11, None, r"truncated: its tensors end at byte \d+, the file has \d+"),
    (GOOD, b"\0" * 13, None, "1 bytes follow the last tensor"),
    (GOOD, b"\0" * 12, 10**6, r"claims a header of 1000000 bytes, the file has \d+"),
    (GOOD, b"\0" * 12, 2**63, "claims a header of 9223372036854775808"),
    (GOOD, b"\0" * 12, 5, "header is not JSON"),
    (b"{not json", b"", None, "header is not JSON"),
    (b"[" * 50_000 + b"]" * 50_000, b"", None, "header is not JSON"),
    (b"\xff\xfe\x00", b"", None, "header is not JSON"),
    ([1, 2], b"", None, "header is a list"),
    ({"a": f32([2], 0, 8), "b": f32([2], 4, 12)}, b"\0" * 12, None, "tensor 'b' overlaps 'a'"),
    ({"a": f32([2], 0, 8), "b": f32([1], 12, 16)}, b"\0" * 16, None, "tensor 'b' leaves a hole after 'a'"),
    ({"a": f32([3], 0, 8)}, b"\0" * 8, None, r"'a' \(F32 \[3\]\) needs 12 bytes, its place has 8"),
    ({"a": f32([2**40, 2**40], 0, 8)}, b"\0" * 8, None, r"'a' has shape \[1099511627776, 1099511627776\]"),
    ({"a": f32([96, 8] * 2000, 0, 8)}, b"\0" * 8, None, r"'a' has shape \[96, 8, 96"),
    ({"a": f32([-2], 0, -8)}, b"", None, r"'a' has shape \[-2\]"),
    ({"a": f32([True], 0, 4)}, b"\0" * 4, None, r"'a' has shape \[True\]"),
    ({"a": f32("2", 0, 8)}, b"\0" * 8, None, "'a' has shape '2'"),
    ({"a": f32([2.0], 0, 8)}, b"\0" * 8, None, r"'a' has shape \[2.0\]"),
    ({"a": 5}, b"", None, "'a' has no proper dtype"),
    ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, b"", None, "'a' has no proper dtype"),
    ({"a": f32([2**63, 0], 0, 0)}, b"", None, r"'a' has shape \[9223372036854775808, 0\]"),
    ({"a": {"dtype": [], "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8, None, r"'a' has dtype \[\]; known are"),
    ({"a": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8, None, "'a' has dtype 'F31'; known are"),
]


@pytest.mark.parametrize(("header", "data", "length", "says"), BAD, ids=[case[3][:40] for case in BAD])
def test_bad_files_are_named_with_the_reason(tmp_path, header, data, length, says):
    path = write(tmp_path / "model.safetensors", header, data, length=length)
    with pytest.raises(CheckpointError, match=says) as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(path) and "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 5, 8])
def test_short_files(tmp_path, size):
    (tmp_path / "m.safetensors").write_bytes(b"\1" * size)
    with pytest.raises(CheckpointError, match=r"too few for a header|claims a header"):
        SafetensorsFile(str(tmp_path / "m.safetensors"))
