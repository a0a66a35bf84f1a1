"""In float32, compiled kernels write the text that torch alone writes, however long the context and the chunks.

Rounding differs in the last bits, so where torch finds two tokens equally likely either may come; everything after that
is another text. tests/engine/test_same_as_transformers.py holds the compiled kernels against transformers on the whole
embedded model; here are contexts beyond the 1024 keys that attention sums up at once, and other forms of attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.base import env
from quire.ops.cpu.native import kernels
from quire.schema.params import SamplingParams
from tests.cut_model import cut_gguf, open_cut, tokens
from tests.tiny_models import VOCAB, write_tiny

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
LENGTHS = (1, 9, 130, 1019)  # the last one passes 1024 as it goes on
NUM_NEW, TIE, CLOSE = 8, 2e-4, 3e-4  # in log probability
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 190, "block_size": 8}


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def to(kernels: str) -> None:
        monkeypatch.setenv("QUIRE_CPU_KERNELS", kernels)
        env.forget_all()

    yield to
    monkeypatch.undo()
    env.forget_all()


def written(model: Path, prompts: list[list[int]], **options: Any) -> list[list[tuple[int, dict[int, float]]]]:
    """For each prompt its tokens, each with the log probabilities of the two best."""
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=2, detokenize=False)
    llm = open_cut(model, dtype="float32", **options)
    try:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    finally:
        llm.close()
    return [
        [
            (token, {other: entry.logprob for other, entry in near.items()})
            for token, near in zip(out.outputs[0].token_ids, out.outputs[0].logprobs, strict=True)
        ]
        for out in outputs
    ]


def assert_same(found: list, wanted: list) -> None:
    ties = 0
    for ours, torchs in zip(found, wanted, strict=True):
        for at, ((token, near), (other, reference)) in enumerate(zip(ours, torchs, strict=True)):
            if token != other:
                best, second = sorted(reference.values(), reverse=True)[:2]
                assert best - second < TIE, f"token {at} is {token}, torch says {other}"
                ties += 1
                break
            assert abs(near[token] - reference[other]) < CLOSE, f"token {at}"
    assert ties <= len(wanted) // 4


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM"])
def test_random_models(arch: str, tmp_path: Path, switch: Any) -> None:
    """Grouped heads with norms; windows and a soft cap; sinks, biases and experts."""
    write_tiny(arch, tmp_path, max_position_embeddings=2048)
    prompts = [[(7 * i + 13 * n + i * i) % (VOCAB - 4) + 4 for i in range(n)] for n in LENGTHS]
    switch("off")
    wanted = written(tmp_path, prompts)
    switch("auto")
    assert_same(written(tmp_path, prompts, max_num_seqs=2, **CHUNKS), wanted)


def test_real_weights(tmp_path: Path, switch: Any) -> None:
    file = cut_gguf(tmp_path / "cut.gguf")
    prompts = [tokens(n, start) for start, n in enumerate((1, 64, 1060))]
    switch("off")
    wanted = written(file, prompts)
    switch("auto")
    assert_same(written(file, prompts, **CHUNKS), wanted)
