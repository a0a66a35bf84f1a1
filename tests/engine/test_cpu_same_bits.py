"""A request's bits do not depend on neighbours, chunks or threads: packed weights always, plain ones on demand.

test_batch_invariant_cpu.py does this over architectures; here are the forms that weights can have, several threads, and
contexts beyond the 1024 keys that attention sums up at once. Compared are log probabilities, in which all logits of a
place take part, of prompts and of what follows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.base import env
from quire.ops.cpu.native import kernels
from quire.schema.params import SamplingParams
from tests.cut_model import cut_folder, cut_gguf, open_cut, tokens

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
LENGTHS = (1, 40, 3, 1060, 18)
ALONE: dict[str, Any] = {"max_num_seqs": 1}
MIXED: dict[str, Any] = {"max_num_batched_tokens": 301, "max_num_seqs": 4, "block_size": 8, "threads": 3}
FORMS: dict[str, tuple[bool, dict[str, Any]]] = {  # whether the mode is needed, and options; _wo: of plain numbers
    "float32": (True, {"dtype": "float32"}),
    "bfloat16": (True, {"dtype": "bfloat16"}),
    "stored Q4_1": (False, {}),
    "stored Q4_1 in bfloat16, int8 cache": (
        False,
        {"dtype": "bfloat16", "quantization": "gguf", "kv_cache_dtype": "int8_per_token_head"},
    ),
    "int8_wo": (False, {"dtype": "bfloat16", "quantization": "int8_wo"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folder = tmp_path_factory.mktemp("cut")
    file = cut_gguf(folder / "cut.gguf")
    return {False: file, True: cut_folder(folder / "plain", file)}


@pytest.fixture
def _one_thread_again() -> Iterator[None]:
    yield
    torch.set_num_threads(1)
    library = kernels()
    assert library is not None
    library.qc_set_threads(1)


def bits_of(model: Path, patch: pytest.MonkeyPatch, threads: int = 1, **options: Any) -> list[list[float]]:
    patch.setenv("QUIRE_CPU_NUM_THREADS", str(threads))
    env.forget_all()
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False
    )
    llm = open_cut(model, enable_prefix_caching=False, **options)
    try:
        outputs = llm.generate(
            [{"prompt_token_ids": tokens(n, 3 * i)} for i, n in enumerate(LENGTHS)], params, use_tqdm=False
        )
    finally:
        llm.close()
    found = []
    for out in outputs:
        answer = out.outputs[0]
        pairs = [*zip(out.prompt_token_ids, out.prompt_logprobs, strict=True)][1:]
        pairs += zip(answer.token_ids, answer.logprobs, strict=True)
        found.append([entry[token].logprob for token, entry in pairs])
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("_one_thread_again")
def test_bits(form: str, models: dict[bool, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    mode, options = FORMS[form]
    library = kernels()
    assert library is not None
    if mode:
        monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    model = models[form.endswith("_wo")]
    assert bits_of(model, monkeypatch, **options, **MIXED) == bits_of(model, monkeypatch, **options, **ALONE)
