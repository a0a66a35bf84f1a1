"""How far logits may be from those of torch in float32 on the same numbers: bounds for every way to store and compute.

Real weights (tests/cut_model.py), errors in units of the logits' spread over the vocabulary. Bounds are twice what was
measured on dotprod; for the whole model `benchmarks/cpu/quality.py` prints the same figures, and perplexity.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.base import env
from quire.ops.cpu.native import kernels
from tests.cut_model import cut_folder, cut_gguf, logits_of, open_cut, tokens

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
NUM_TOKENS = 150
INT8_CACHE = {"kv_cache_dtype": "int8_per_token_head"}
BOUNDS: dict[str, tuple[str, dict[str, Any], float, float]] = {  # model, options; rms and largest error
    "float32": ("Q4_1", {"dtype": "float32"}, 1e-05, 0.0001),
    "bfloat16": ("Q4_1", {"dtype": "bfloat16"}, 0.011, 0.15),
    "float16": ("Q4_1", {"dtype": "float16"}, 0.0014, 0.017),
    "int8 cache": ("Q4_1", {"dtype": "float32", **INT8_CACHE}, 0.009, 0.11),
    "Q4_1": ("Q4_1", {}, 0.018, 0.19),
    "Q4_1 in bfloat16": ("Q4_1", {"dtype": "bfloat16", "quantization": "gguf"}, 0.021, 0.32),
    "Q4_0": ("Q4_0", {}, 0.018, 0.22),
    "Q5_0": ("Q5_0", {}, 0.018, 0.19),
    "Q5_1": ("Q5_1", {}, 0.018, 0.22),
    "Q8_0": ("Q8_0", {}, 0.018, 0.2),
    "int8_wo": ("folder", {"dtype": "float32", "quantization": "int8_wo"}, 0.02, 0.21),
    "int4_wo": ("folder", {"dtype": "float32", "quantization": "int4_wo"}, 0.018, 0.19),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("cut")

    @cache
    def model(name: str) -> Path:
        if name == "folder":
            return cut_folder(folder / name, model("Q4_1"))
        return cut_gguf(folder / f"{name}.gguf", None if name == "Q4_1" else name)

    return model


def run(model: Path, **options: Any) -> torch.Tensor:
    llm = open_cut(model, **options)
    try:
        return logits_of(llm, tokens(NUM_TOKENS))
    finally:
        llm.close()


@pytest.fixture(scope="module")
def exact(models: Any) -> Any:
    """Logits of torch alone."""

    @cache
    def logits(name: str) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QUIRE_CPU_KERNELS", "off")
            env.forget_all()
            found = run(models("Q4_1" if name == "folder" else name), dtype="float32")
        env.forget_all()
        return found

    return logits


@pytest.mark.parametrize("form", BOUNDS)
def test_error_of_logits(form: str, models: Any, exact: Any) -> None:
    name, options, rms, largest = BOUNDS[form]
    wanted = exact(name)
    wrong = (run(models(name), **options) - wanted) / wanted.std(-1, keepdim=True)
    assert wrong.square().mean().sqrt() < rms
    assert wrong.abs().max() < largest
