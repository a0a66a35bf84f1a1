"""Encoder-decoder models on the GPU: greedy tokens and log probabilities are transformers', alone and in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from tests.seq2seq_models import BEGIN, FAMILIES, RATE, STARTS, WHISPER, draw_audio, draw_text, greedy, make_model
from tests.tiny_models import VOCAB

pytestmark = pytest.mark.gpu
COUNT = 8


def prompt_of(given: Any) -> Any:
    if isinstance(given, np.ndarray):
        return {"prompt": BEGIN, "multi_modal_data": {"audio": (given, RATE)}}
    return {"prompt_token_ids": given}


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, config = make_model(name, tmp_path), FAMILIES[name]
    forced = config.get("forced_bos_token_id")
    start = [config["decoder_start_token_id"], *([] if forced is None else [forced])]
    if name == WHISPER:
        start = list(range(VOCAB, VOCAB + len(STARTS)))
        given: list[Any] = [draw_audio(seed, seconds=0.3 + 0.1 * seed) for seed in range(6)]
    else:
        given = [draw_text(seed, 1 + 9 * seed) for seed in range(6)]
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=0)
    wanted = [greedy(model, one, start, COUNT) for one in given]
    with LLM(str(tmp_path), dtype="float32", max_num_seqs=8, kv_cache_memory_bytes=64 << 20) as llm:
        together = llm.generate([prompt_of(one) for one in given], params, use_tqdm=False)
        alone = llm.generate([prompt_of(given[3])], params, use_tqdm=False)
    for own, expected in zip([*together, *alone], [*wanted, wanted[3]], strict=True):
        output = own.outputs[0]
        assert list(output.token_ids) == expected.tokens
        found = [each[token].logprob for each, token in zip(output.logprobs or (), output.token_ids, strict=True)]
        assert found == pytest.approx(expected.logprobs, abs=5e-3)
