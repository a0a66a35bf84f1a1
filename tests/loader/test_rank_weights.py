"""Weights of a rank: what is sent to its device, quantized forms cut among ranks, adapters cut as matrices are."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.base.mapped import MappedFile
from quire.config import EngineArgs
from quire.layers.linear import Linear
from quire.layers.places import AdapterPlaces
from quire.layers.stored import packed_matrices
from quire.layers.table import WeightTable
from quire.loader.load import load_model, make_model
from quire.loader.safetensors_file import SafetensorsFile
from quire.ops.cpu.native import kernels
from quire.ops.op import Kernels
from quire.ops.packed import Packed, unpack
from quire.quant.plain import plain_storage
from quire.quant.shard import ALONE, ShardGroup
from quire.schema.errors import NotBuiltError
from tests.engine.test_quantized_formats import FORMS
from tests.gguf_blocks import TYPES, write_model
from tests.models.test_ranks import LOADING
from tests.products import marked
from tests.quantized import write
from tests.shard_rank import steps
from tests.thread_ranks import on_ranks
from tests.tiny_models import make_tiny, write_tiny

# Codes that are cut as they are, by rows and by columns; codes that are decoded first; one that no kernel multiplies.
ROUNDING = 0.5 / 127 + 2**-8  # to 8 bits in blocks of 32, and to bfloat16
CODED = ("gptq-4-asym", "gptq-4-act-order", "awq", "fp8-blocks", "ct-w8a8-int8", "ct-mxfp4", "bnb-nf4", "hqq-4-axis-0")


def test_a_rank_sends_its_part_only() -> None:
    group = ShardGroup(1, 2, lambda x: x)
    storage = plain_storage(torch.float32, Kernels.here("cpu"), group)
    layer = Linear("l.", 4, {"a": group.span("rows", 6)}, storage)
    sent: list[Tensor] = []

    def send(tensor: Any) -> Any:
        sent.append(tensor)
        return tensor

    weight = torch.randn(6, 4)
    assert WeightTable(layer.slots()).load("l.a.weight", weight, send)
    assert len(sent) == 1 and torch.equal(sent[0], weight[3:]) and torch.equal(layer.weight, weight[3:])
    assert sent[0].data_ptr() == weight[3:].data_ptr()  # a view: nothing of the rest was read


WIDE = dict(hidden_size=64, intermediate_size=1 << 17, vocab_size=1 << 16, num_hidden_layers=1)
NEAR = 4 << 20  # bytes that a system may map around those that are touched


@pytest.mark.parametrize(
    ("arch", "placement", "cut"),
    [
        ("LlamaForCausalLM", "", ("embed_tokens", "lm_head", "gate_proj", "up_proj")),
        ("MixtralForCausalLM", "linear", ("experts",)),
    ],
)
def test_a_rank_touches_its_own_pages_only(
    arch: str, placement: str, cut: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matrices that are cut by rows, and of whole experts: counted in this process's table of pages. Nothing is read
    ahead. What a rank has of each row of the others lies nearer together than a system reads."""
    model = make_tiny(arch, tmp_path, **(WIDE if not placement else WIDE | {"intermediate_size": 1 << 14}))
    del model
    (file,) = [SafetensorsFile(str(path)) for path in tmp_path.glob("*.safetensors")]
    sizes = {one.start: one.num_bytes for one in file.entries if any(name in one.name for name in cut)}
    assert len(sizes) >= len(cut) and sum(sizes.values()) > 0.5 * file.size
    forget, touched, ahead = MappedFile.forget, dict[int, int](), list[int]()

    def counted(file: MappedFile, start: int, num_bytes: int) -> None:
        first = np.frombuffer(file.map, np.uint8).ctypes.data + start
        with open("/proc/self/pagemap", "rb") as pages:
            pages.seek(first // mmap.PAGESIZE * 8)
            entries = np.frombuffer(pages.read(-(-num_bytes // mmap.PAGESIZE) * 8), np.uint64)
        touched[start] = int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE
        forget(file, start, num_bytes)

    monkeypatch.setattr(MappedFile, "forget", counted)
    monkeypatch.setattr(MappedFile, "expect", lambda file, start, num_bytes: ahead.append(num_bytes))
    config = config_of(tmp_path, "float32")
    load_model(config, "cpu", ALONE)
    assert sum(touched.values()) > 0.98 * file.size and sum(ahead) > 0.98 * file.size
    for rank in (0, 1):
        touched.clear()
        ahead.clear()
        load_model(config, "cpu", ShardGroup(rank, 2, lambda x: x, placement=placement))
        assert not ahead
        if placement:  # of half of the experts nothing at all
            others = [start for start, size in sizes.items() if touched[start] < size / 2]
            assert len(others) == len(sizes) / 2 and sum(touched[start] for start in others) < NEAR
        else:
            own = sum(touched[start] for start in sizes)
            assert sum(sizes.values()) / 2 <= own < sum(sizes.values()) / 2 + NEAR * len(sizes)


def config_of(folder: Path, dtype: str, **more: Any) -> Any:
    args = EngineArgs(model=str(folder), dtype=dtype, max_model_len=64, skip_tokenizer_init=True, device="cpu", **more)
    return args.create_engine_config()


def answers_of(config: Any, group: ShardGroup) -> list[Tensor]:
    with LOADING:
        model: Any = load_model(config, "cpu", group)
    return steps(model)


@pytest.mark.parametrize("name", marked(FORMS, CODED))
def test_quantized_checkpoints_decoded(name: str, tmp_path: Path) -> None:
    write(tmp_path, "LlamaForCausalLM", FORMS[name][0])
    config = config_of(tmp_path, "float32")
    whole = answers_of(config, ALONE)
    for own in on_ranks(2, lambda group: answers_of(config, group)):
        for one, other in zip(own, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * float(other.abs().max()))


def numbers_of(part: Packed | Tensor) -> Tensor:
    return (unpack(part) if isinstance(part, Packed) else part).float()


def check_stored(config: Any, *, packed: bool = True) -> None:
    """Every matrix of a rank, as it is stored for the CPU kernels, is its part of the matrix of one rank that has all;
    where rounding to blocks came in between, within that."""
    whole = packed_matrices(load_model(config, "cpu", ALONE))
    assert packed is any(isinstance(part, Packed) for matrix in whole.values() for part in matrix.parts.values())
    for rank in (0, 1):
        own = packed_matrices(load_model(config, "cpu", ShardGroup(rank, 2)))
        assert own.keys() == whole.keys()
        for name, matrix in own.items():
            width = matrix.shape.width
            for part, stored in matrix.parts.items():
                rows = matrix.shape.parts[part]
                expected = numbers_of(whole[name].parts[part])
                expected = expected[rows.start : rows.start + rows.count, width.start : width.start + width.count]
                atol = ROUNDING * float(expected.abs().max())
                assert float((numbers_of(stored) - expected).abs().max()) <= atol, f"{name} on rank {rank}"


@pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
@pytest.mark.parametrize("name", marked(FORMS, CODED))
def test_quantized_checkpoints_as_stored(name: str, tmp_path: Path) -> None:
    write(tmp_path, "LlamaForCausalLM", FORMS[name][0])
    check_stored(config_of(tmp_path, "bfloat16"))


KEPT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # blocks that CPU kernels multiply


@pytest.mark.parametrize("name", marked(TYPES, ("Q4_K", "Q8_0", "IQ4_NL")))
def test_gguf_files(name: str, tmp_path: Path) -> None:
    """In blocks of 32 numbers, and of 256, of which a rank has a half or two: decoded, and as they are stored."""
    file = write_model(tmp_path / "model.gguf", name, tied=False)
    config = config_of(file, "float32")
    whole = answers_of(config, ALONE)
    for own in on_ranks(2, lambda group: answers_of(config, group)):
        for one, other in zip(own, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * float(other.abs().max()))
    if kernels() is not None:
        check_stored(config_of(file, "auto"), packed=name in KEPT)


@pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
def test_rounded_while_loaded(tmp_path: Path) -> None:
    write_tiny("Qwen3MoeForCausalLM", tmp_path)
    check_stored(config_of(tmp_path, "bfloat16", quantization="int8_wo"))


@pytest.mark.parametrize("arch", ["Qwen2MoeForCausalLM", "Qwen3NextForCausalLM", "GPT2LMHeadModel"])
def test_adapters_are_cut_as_their_matrices_are(arch: str, tmp_path: Path) -> None:
    """B A of every rank is its part of the whole B A, for every place of the model."""
    write_tiny(arch, tmp_path)
    config = config_of(tmp_path, "float32")
    models: list[Any] = [make_model(config, Kernels.here("cpu"), ShardGroup(rank, 2)) for rank in (0, 1)]
    whole: Any = make_model(config, Kernels.here("cpu"), ALONE)
    places = AdapterPlaces(whole, whole.table()).by_name
    assert len(places) > 10
    for model in models:
        own = AdapterPlaces(model, model.table()).by_name
        assert own.keys() == places.keys()
        for name, place in places.items():
            mine = own[name]
            assert (mine.rows, mine.width, mine.experts) == (place.rows, place.width, place.experts)
            numbers = torch.arange(place.rows * place.width, dtype=torch.float64).view(place.rows, place.width)
            part = mine.own_width(mine.own_rows(numbers))
            assert mine.stop - mine.start == (place.rows if "embed_tokens" in name else part.shape[0])
            if isinstance(mine.layer, Linear):
                assert part.shape[1] == mine.layer.in_size
    for name in places:
        parts = [AdapterPlaces(model, model.table()).by_name[name] for model in models]
        if parts[0].cut_rows is not None and parts[0].cut_rows != parts[1].cut_rows:
            rows = torch.cat([part.own_rows(torch.arange(part.rows)[:, None]) for part in parts])
            assert sorted(rows.flatten().tolist()) == list(range(parts[0].rows))  # every row on one rank


def test_what_runs_by_transformers_code_is_refused(tmp_path: Path) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    config = config_of(tmp_path, "float32", model_impl="transformers")
    with pytest.raises(NotBuiltError, match="tensor_parallel_size=2 is built for declared architectures only"):
        make_model(config, Kernels.here("cpu"), ShardGroup(0, 2))
