"""Requests of the embedded model at once answer as each does alone, bit for bit, with and without a known prefix.

As served by default: no mode is set. test_cpu_same_bits.py compares forms of weights on a model that is cut short.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base import env
from quire.ops.cpu.forms import ALL_ROWS, few_rows
from quire.ops.cpu.native import kernels
from quire.ops.op import Kernels
from tests.cut_model import TEXT

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
REQUESTS, TOKENS, ALONE = 24, 6, (0, 1, 7, 16, 23)


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [
        [(token, entry[token].logprob) for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
        for answer in (out.outputs[0] for out in found)
    ]


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}], ids=["as stored", "bfloat16"])
def test_answers_at_once_and_alone(options: dict[str, Any]) -> None:
    env.forget_all()
    steps: dict[str, Any] = {}
    if options and (most := few_rows(Kernels.here("cpu"), torch.bfloat16)) != ALL_ROWS:
        # This CPU has units for bfloat16 that the kernels do not use: more rows would go to torch (docs/cpu.md).
        steps["max_num_batched_tokens"] = most
    llm = LLM(
        max_model_len=256, max_num_seqs=REQUESTS, kv_cache_memory_bytes=64 << 20, device="cpu", **options, **steps
    )  # fmt: skip
    try:
        ids = llm.get_tokenizer().encode(TEXT.read_text(encoding="utf-8"))
        stem = ids[:40]  # two whole blocks and a half, which half of the requests share
        prompts = [
            (stem if i % 2 else []) + ids[100 + 7 * i : 100 + 7 * i + (1, 3, 9, 17)[i % 4]] for i in range(REQUESTS)
        ]
        at_once = answers(llm, prompts)
        hits = answers(llm, prompts)
        assert hits == at_once
        for known in (True, False):
            for i in ALONE:
                if not known:
                    assert llm.reset_prefix_cache()
                assert answers(llm, [prompts[i]]) == [at_once[i]], (i, known)
    finally:
        llm.close()
