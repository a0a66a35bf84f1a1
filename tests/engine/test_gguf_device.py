"""GGUF files in the storage of a GPU, here with the references of its kernels on the CPU: what a block means is kept to
the last bit, sizes stay near the file's, and no more is in memory than what stays and the matrices in work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineArgs
from quire.layers.batch import Batch, NoAttention
from quire.layers.stored import matrices_of, num_numbers
from quire.loader import gguf_types
from quire.loader.coded_storage import coded_storage
from quire.loader.load import load_model, reload_weights
from quire.models.build import build_model
from quire.ops.coded import CodedWeight, decode_rows, decode_weight
from quire.ops.few import few_rows, norm_linears
from quire.ops.op import Kernels
from quire.quant.arena import Arena
from quire.quant.coded_experts import CodedSide
from quire.quant.coded_scheme import CodedParts
from quire.quant.device_codes import device_codes, join, put_rows
from quire.quant.scheme import MatrixShape
from quire.quant.shard import Cut, Span
from tests.gguf_blocks import TYPES, blocks_of, numbers_of, raw_blocks, weight_of, write_model
from tests.paged import Paged
from tests.replaced_form import replaced

IDS = [list(range(4, 40)), [300, 7, 7, 25]]
BITS = {  # on a device, of a number; docs/features/quantization.md has them beside those in the file
    "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 6.5, "Q5_1": 7.0, "Q8_0": 8.5, "Q2_K": 5.125, "Q3_K": 4.625, "Q4_K": 4.625,
    "Q5_K": 6.625, "Q6_K": 6.625, "IQ1_S": 4.375, "IQ1_M": 4.625, "IQ2_XXS": 4.375, "IQ2_XS": 4.625, "IQ2_S": 4.625,
    "IQ3_XXS": 4.375, "IQ3_S": 4.375, "IQ4_NL": 4.5, "IQ4_XS": 4.375, "TQ1_0": 4.125, "TQ2_0": 4.125, "MXFP4": 4.5,
    "NVFP4": 5.0,
}  # fmt: skip


def num_bits(weight: CodedWeight) -> float:
    stored = sum(tensor.numel() * tensor.element_size() for tensor in weight.tensors().values())
    return 8 * stored / (weight.rows * weight.width)


def as_on_a_device(file: Path, dtype: torch.dtype = torch.float16) -> Any:
    args = EngineArgs(model=str(file), dtype="float16", device="cpu", skip_tokenizer_init=True)
    config = args.create_engine_config()
    about = config.model_config
    storage = coded_storage(config, Kernels(torch.device("cpu")))
    model = build_model(about.hf_config, dtype=dtype, device="cpu", max_model_len=64, storage=storage)
    reload_weights(model, config)
    return model


def in_float32(file: Path) -> Any:
    args = EngineArgs(model=str(file), dtype="float32", device="cpu", skip_tokenizer_init=True)
    return load_model(args.create_engine_config(), "cpu")


def logits(model: Any) -> list[torch.Tensor]:
    return Paged(model, IDS, block_size=16).step([(row, len(ids)) for row, ids in enumerate(IDS)])


@pytest.mark.parametrize("name", TYPES)
def test_every_number_is_what_the_file_means(name: str) -> None:
    raw = raw_blocks(name, 24, 768, seed=1)
    wanted = numbers_of(name, raw)
    weight = device_codes(blocks_of(name, raw, 768))
    assert weight is not None
    torch.testing.assert_close(decode_weight(weight, torch.float32), wanted, rtol=1e-6, atol=0)
    assert num_bits(weight) == BITS[name]
    index = torch.tensor([[5, 0], [23, 5]])
    torch.testing.assert_close(decode_rows(weight, index, torch.float32), wanted[index], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"])
@pytest.mark.parametrize("width", [32, 96, 192])
def test_narrow_rows(name: str, width: int) -> None:
    """Of 6 bits they are bytes, if they are no multiple of 64."""
    raw = raw_blocks(name, 24, width, seed=2)
    weight = device_codes(blocks_of(name, raw, width))
    assert weight is not None and num_bits(weight) <= 9
    assert (weight.kind == "int8") == (name == "Q8_0" or (name in ("Q5_0", "Q5_1") and width % 64 != 0))
    torch.testing.assert_close(decode_weight(weight, torch.float32), numbers_of(name, raw), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", TYPES)
def test_models(name: str, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", name)
    model, exact = as_on_a_device(file), in_float32(file)
    matrices = {at: matrix for at, matrix in matrices_of(model) if isinstance(matrix, CodedParts)}
    assert len(matrices) == 10  # with embeddings, which are the head too
    for at, matrix in matrices.items():
        (part,) = matrix.parts.values()
        assert isinstance(part, CodedWeight), at
        wanted = dict(matrices_of(exact))[at].numbers
        torch.testing.assert_close(decode_weight(part, torch.float32), wanted, rtol=1e-6, atol=1e-9)
    assert num_numbers(model, model.parameters()) == num_numbers(None, exact.parameters())
    for found, wanted in zip(logits(model), logits(exact), strict=True):
        assert (found.float() - wanted).norm() < 0.01 * wanted.norm()


def test_parts_of_several_types_stay_apart(tmp_path: Path) -> None:
    table = {"": "Q4_K", "attn_v": "Q6_K", "output": "Q6_K", "token_embd": "Q8_0"}
    file = write_model(tmp_path / "model.gguf", table, tied=False)
    model = as_on_a_device(file)
    kinds = {
        at: [part.kind for part in matrix.coded()]
        for at, matrix in matrices_of(model)
        if isinstance(matrix, CodedParts)
    }
    assert kinds["layers.0.attn.qkv"] == ["int4", "int4", "int6"] and kinds["layers.0.mlp.up"] == ["int4"]
    assert kinds["embed"] == ["int8"] and kinds["head"] == ["int6"]
    for found, wanted in zip(logits(model), logits(in_float32(file)), strict=True):
        assert (found.float() - wanted).norm() < 0.01 * wanted.norm()


class Echo(NoAttention):
    """Attends to the token itself: its value."""

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Any, **rest: Any) -> torch.Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def test_parts_of_several_types_in_the_way_for_a_few_rows(tmp_path: Path) -> None:
    """Queries, keys and values are multiplied side by side, behind one norm, and give what matmuls by themselves do."""
    seen = []

    def answer(width: int, dtype: torch.dtype, matrices: Any) -> int:
        seen.append([matrix.kind for matrix in matrices])
        return 2

    calls = []

    def noted(x: torch.Tensor, norm: Any, weights: Any, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append([weight.rows for weight in weights])
        return norm_linears.reference(x, norm, weights, bias)

    def forward(tokens: int) -> torch.Tensor:
        ids = torch.arange(tokens) + 5
        with torch.inference_mode():
            found: torch.Tensor = model.forward(Batch(ids, torch.arange(tokens), [Echo()], ids, tokens))
        return found

    file = write_model(tmp_path / "model.gguf", {"": "Q4_K", "attn_k": "Q8_0", "attn_v": "Q6_K"})
    with replaced(few_rows, "cpu", answer), replaced(norm_linears, "cpu", noted):
        model = as_on_a_device(file, torch.float32)
        found = forward(2)
        assert calls == [[256, 128, 128]] * 2
        assert [kinds for kinds in seen if kinds] == [["int4", "int8", "int6", "int4", "int4", "int4"]] * 2
        forward(3)
        assert len(calls) == 2  # too many rows
        for block in model.layers:
            block.few = None
        wanted = forward(2)
    assert wanted.abs().sum() > 0
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_0", "IQ4_XS", "Q8_0", "NVFP4"])
def test_cuts_of_ranks(name: str) -> None:
    """Between blocks codes stay codes; a cut through one is decoded by who makes it."""
    blocks = blocks_of(name, raw_blocks(name, 32, 768), 768)
    for cut in (Cut(0, 32, ((8, 16), (24, 32))), Cut(1, 768, ((256, 512),))):
        part = blocks.cut(cut)
        assert part is not None
        weight = device_codes(part)
        assert weight is not None
        assert torch.equal(decode_weight(weight, torch.float32), cut.of(blocks.numbers()))
    assert blocks.cut(Cut(1, 768, ((0, 392),))) is None


@pytest.mark.parametrize("name", TYPES)
def test_joined_and_replaced(name: str) -> None:
    parts = [weight_of(name, rows, 512) for rows in (16, 8, 24)]
    whole = join(parts)
    assert whole is not None and whole.rows == 48
    wanted = torch.cat([decode_weight(part, torch.float32) for part in parts])
    assert torch.equal(decode_weight(whole, torch.float32), wanted)
    assert put_rows(whole, 16, parts[0]) and put_rows(whole, 0, parts[0])
    found = decode_weight(whole, torch.float32)
    assert torch.equal(found[:16], wanted[:16]) and torch.equal(found[16:32], wanted[:16])
    other = weight_of("Q6_K" if name != "Q6_K" else "Q4_K", 16, 512)
    assert join([parts[0], other]) is None and not put_rows(whole, 0, other)


def test_nothing_is_decoded_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are opened one at a time, and none is ever numbers."""
    file = write_model(tmp_path / "model.gguf", "Q4_K")
    monkeypatch.setattr(gguf_types, "_q4_k", None)
    kind = gguf_types.tensor_type(TYPES["Q4_K"])
    monkeypatch.setitem(gguf_types._TYPES, TYPES["Q4_K"], kind._replace(decode=lambda *_: pytest.fail("decoded")))
    model = as_on_a_device(file)
    sizes = [p.numel() * p.element_size() for _, matrix in matrices_of(model) for _, p in matrix.parameters()]
    assert sum(sizes) < file.stat().st_size * 1.1 + 320 * 256  # the head's are counted once more


FORMS = {  # of experts' codes, and bits of a number; others are decoded
    "Q4_0": ("int4", 4.5), "Q4_1": ("int4", 5.5), "Q2_K": ("int4", 8.0), "Q3_K": ("int4", 6.0), "Q4_K": ("int4", 6.0),
    "TQ1_0": ("int4", 4.0625), "TQ2_0": ("int4", 4.0625), "MXFP4": ("e2m1", 4.25), "NVFP4": ("e2m1", 5.0),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_experts(name: str) -> None:
    """Of 4 bits they are kept in the forms of other formats."""
    shape = MatrixShape({"gate": Span.all(16), "up": Span.all(16)}, Span.all(512))
    side = CodedSide("w1", 3, shape, torch.float32, Arena(torch.device("cpu")), None, False)
    for expert in range(3):
        for start in (0, 16):
            side.put(expert, start, blocks_of(name, raw_blocks(name, 16, 512, seed=2 * expert + start), 512))
    weight = side.weight()
    for expert in range(3):
        wanted = torch.cat([numbers_of(name, raw_blocks(name, 16, 512, seed=2 * expert + start)) for start in (0, 16)])
        found = weight[expert] if isinstance(weight, torch.Tensor) else weight.numbers(expert)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    if name not in FORMS:
        assert isinstance(weight, torch.Tensor)
        return
    assert not isinstance(weight, torch.Tensor) and weight.form == FORMS[name][0]
    sizes = [p.numel() * p.element_size() for _, p in side.parameters()]
    assert 8 * sum(sizes) / (3 * 32 * 512) == FORMS[name][1]


def test_a_group_of_experts_that_is_one_number() -> None:
    raw = raw_blocks("Q4_K", 4, 256).clone()
    raw[:, 4] = 0  # the scale of the first group
    raw[0, :2] = 0  # all scales of a row
    wanted = numbers_of("Q4_K", raw)
    assert wanted[0, :32].unique().numel() == 1
    side = CodedSide("w2", 1, MatrixShape({"": Span.all(4)}, Span.all(256)), torch.float32, Arena(torch.device("cpu")),
                     None, False)  # fmt: skip
    side.put(0, 0, blocks_of("Q4_K", raw, 256))
    codes = side.weight()
    assert not isinstance(codes, torch.Tensor)
    torch.testing.assert_close(codes.numbers(0), wanted, rtol=1e-5, atol=1e-6)
