"""What is decided for a GPU, on a machine that need not have one."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.base import env
from quire.base import machine as finder
from quire.base.machine import Gpu, find_gpu
from quire.config import EngineArgs, EngineConfig
from quire.config import resolve as steps
from quire.config.graphs import default_sizes
from quire.schema.errors import ConfigError

H200 = Gpu("NVIDIA H200", 141 << 30)
RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
    "max_position_embeddings": 40960, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    return tmp_path


def resolve(folder: Path, usage: str = "LLM_CLASS", **kwargs: Any) -> EngineConfig:
    args = EngineArgs(model=str(folder), load_format="dummy", skip_tokenizer_init=True, **{"device": "cuda", **kwargs})
    return args.create_engine_config(usage)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "find_gpu", lambda: H200)


@pytest.mark.usefixtures("h200")
def test_auto_takes_the_gpu_unless_told_otherwise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TARGET_DEVICE", "")
    env.forget_all()
    assert resolve(folder, device="auto").device_config.device == "cuda"
    assert resolve(folder, device="cpu").device_config.device == "cpu"
    monkeypatch.setenv("QUIRE_TARGET_DEVICE", "cpu")
    env.forget_all()
    assert resolve(folder, device="auto").device_config.device == "cpu"


@pytest.mark.parametrize(
    "gpu, usage, tokens, requests",
    [
        (H200, "LLM_CLASS", 16384, 1024),
        (H200, "OPENAI_API_SERVER", 8192, 1024),
        (Gpu("NVIDIA A100-SXM4-80GB", 80 << 30), "LLM_CLASS", 8192, 256),
        (Gpu("NVIDIA L4", 24 << 30), "OPENAI_API_SERVER", 2048, 256),
        (Gpu("", 0), "LLM_CLASS", 8192, 256),
        (H200, "", 2048, 128),
    ],
)
def test_batches_grow_with_the_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gpu: Gpu, usage: str, tokens: int, requests: int
) -> None:
    monkeypatch.setattr(steps, "find_gpu", lambda: gpu)
    found = resolve(folder, usage).scheduler_config
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (tokens, requests)


@pytest.mark.parametrize(
    "saved, expected", [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float16"), (None, "float16")]
)
def test_dtype_on_a_gpu(folder: Path, saved: str | None, expected: str) -> None:
    (folder / "config.json").write_text(json.dumps(RAW | {"dtype": saved}))
    assert resolve(folder).model_config.dtype == expected
    assert resolve(folder, dtype="float32").model_config.dtype == "float32"


def test_looking_ahead_is_the_default_on_a_gpu(folder: Path) -> None:
    assert resolve(folder).scheduler_config.async_scheduling is True
    assert resolve(folder, async_scheduling=False).scheduler_config.async_scheduling is False
    assert resolve(folder, device="cpu").scheduler_config.async_scheduling is False


@pytest.mark.parametrize(
    "kwargs, mode",
    [
        ({}, "FULL"),
        ({"optimization_level": 0}, "NONE"),
        ({"optimization_level": 3}, "FULL"),
        ({"enforce_eager": True}, "NONE"),
        ({"enforce_eager": True, "compilation_config": {"cudagraph_mode": "FULL"}}, "NONE"),
        ({"compilation_config": {"cudagraph_mode": "none"}}, "NONE"),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, "NONE"),
        ({"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}, "FULL"),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, "FULL"),
        ({"optimization_level": 0, "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, "FULL_DECODE_ONLY"),
        ({"device": "cpu"}, "NONE"),
        ({"device": "cpu", "compilation_config": {"cudagraph_mode": "FULL"}}, "NONE"),
    ],
    ids=str,
)
def test_graph_mode(folder: Path, kwargs: dict[str, Any], mode: str) -> None:
    found = resolve(folder, **kwargs).compilation_config
    assert found.cudagraph_mode == mode
    assert bool(found.cudagraph_capture_sizes) == (mode != "NONE")


@pytest.mark.usefixtures("h200")
def test_graph_sizes(folder: Path) -> None:
    sizes = resolve(folder).compilation_config.cudagraph_capture_sizes
    assert sizes == (1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, 1025, 32))
    assert resolve(folder, max_num_seqs=5).compilation_config.cudagraph_capture_sizes == (1, 2, 4, 8)
    assert resolve(folder, max_cudagraph_capture_size=20).compilation_config.max_cudagraph_capture_size == 16
    given = resolve(folder, cudagraph_capture_sizes=[8, 2, 2]).compilation_config
    assert (given.cudagraph_capture_sizes, given.max_cudagraph_capture_size) == ((2, 8), 8)
    assert default_sizes(300, 300)[-3:] == (272, 288, 300)


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"cudagraph_capture_sizes": []}, "at least one size"),
        ({"cudagraph_capture_sizes": [0]}, "at least 1"),
        ({"cudagraph_capture_sizes": [1, 4], "max_cudagraph_capture_size": 8}, r"not the largest.*\(4\)"),
        ({"cudagraph_capture_sizes": [512], "max_num_batched_tokens": 256}, "above max_num_batched_tokens=256"),
    ],
    ids=str,
)
def test_graph_sizes_that_cannot_be(folder: Path, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(folder, **{"max_num_seqs": 16, **kwargs})


def fake_nvml(names: list[str]) -> SimpleNamespace:
    """Answers as the library does: 0 is yes, results go through pointers."""
    asked: list[int] = []

    def count(out: Any) -> int:
        out._obj.value = len(names)
        return 0

    def by_index(index: Any, out: Any) -> int:
        asked.append(index.value)
        return 0 if index.value < len(names) else 6

    def by_uuid(name: bytes, out: Any) -> int:
        asked.append([b"GPU-abc", b"GPU-xyz"].index(name))
        return 0

    def name_of(device: Any, text: Any, size: Any) -> int:
        text.value = names[asked[-1]].encode()
        return 0

    def memory_of(device: Any, out: Any) -> int:
        out._obj.total = 80 << 30
        return 0

    return SimpleNamespace(
        nvmlInit_v2=lambda: 0, nvmlShutdown=lambda: 0, nvmlDeviceGetCount_v2=count,
        nvmlDeviceGetHandleByIndex_v2=by_index, nvmlDeviceGetHandleByUUID=by_uuid, nvmlDeviceGetName=name_of,
        nvmlDeviceGetMemoryInfo=memory_of,
    )  # fmt: skip


@pytest.mark.parametrize(
    "visible, found",
    [
        (None, Gpu("A", 80 << 30)),
        ("1,0", Gpu("B", 80 << 30)),
        ("GPU-xyz", Gpu("B", 80 << 30)),
        ("7", None),
        ("", None),
        ("-1", None),
    ],
)
def test_the_driver_is_asked_for_the_first_visible_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, found: Gpu | None
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    env.forget_all()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake_nvml(["A", "B"]))
    monkeypatch.setattr(finder.importlib.util, "find_spec", lambda name: object())
    find_gpu.cache_clear()
    assert find_gpu() == found
    find_gpu.cache_clear()


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    env.forget_all()
    monkeypatch.setattr(ctypes, "CDLL", absent)
    monkeypatch.setattr(finder.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(finder.os.path, "exists", lambda path: path == "/dev/nvidia0")
    find_gpu.cache_clear()
    assert find_gpu() == Gpu("", 0)
    monkeypatch.setattr(finder.os.path, "exists", lambda path: False)
    find_gpu.cache_clear()
    assert find_gpu() is None
    find_gpu.cache_clear()


@pytest.mark.usefixtures("h200")
def test_weights_rounded_while_loading(folder: Path) -> None:
    for name, form in (("fp8", "fp8"), ("ptpc_fp8", "fp8"), ("int8_wo", "int8"), ("int4_wo", "int4")):
        assert resolve(folder, quantization=name).model_config.weight_form == form
    with pytest.raises(ConfigError, match="quantization='fp8' needs 16 bits on a GPU"):
        resolve(folder, quantization="fp8", dtype="float32")


@pytest.mark.usefixtures("h200")
def test_which_output_matrices_are_rounded(folder: Path) -> None:
    """Those of names that say how weights are kept, unless it is declined; of others if it is asked for."""
    for name, head in (("fp8", "int8"), ("ptpc_fp8", "int8"), ("int8_wo", "int8"), ("int4_wo", "int8"), ("rtn", "")):
        assert resolve(folder, quantization=name).model_config.head_form == head
        for asked in ("int8", "fp8", None):
            config = resolve(folder, quantization=name, quantization_config={"lm_head": asked})
            assert config.model_config.head_form == (asked or "")
        assert resolve(folder, quantization=name, quantization_config={}).model_config.head_form == head
    assert resolve(folder).model_config.head_form == ""
    with pytest.raises(ConfigError, match="about rounding at load, which quantization=None is not; int8_wo, int4_wo"):
        resolve(folder, quantization_config={"lm_head": "int8"})


@pytest.mark.usefixtures("h200")
def test_codes_of_a_checkpoint_stay_codes(folder: Path) -> None:
    coded = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps(RAW | {"quantization_config": coded}))
    assert resolve(folder).model_config.weight_form == "stored"
    assert resolve(folder, dtype="float32").model_config.weight_form == "plain"
    with pytest.raises(ConfigError, match="ptpc_fp8' needs an unquantized checkpoint, but this one is stored as gptq"):
        resolve(folder, quantization="ptpc_fp8")
