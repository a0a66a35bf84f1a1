"""A real model in a worker process: the same answers as in this one, over ipc and over TCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base import env
from quire.executor.base import BACKENDS
from quire.executor.remote import RemoteExecutor
from tests.tiny_models import write_tiny

PROMPTS = [{"prompt_token_ids": [7, 9, 30, 4, 11, 80, 21, 6, 45]}, {"prompt_token_ids": [5, 6]}]


class OverTcp(RemoteExecutor):
    def __init__(self, config: Any) -> None:
        super().__init__(config, host="127.0.0.1")


def answers(folder: Path) -> list[Any]:
    llm = LLM(str(folder), device="cpu", max_model_len=64, skip_tokenizer_init=True, num_gpu_blocks_override=40)
    try:
        plain = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=1)
        drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=9, ignore_eos=True)
        done = llm.generate(PROMPTS * 2, [plain, plain, drawn, drawn])
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in done]
    finally:
        llm.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    write_tiny("LlamaForCausalLM", made)
    return made


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine runs here, where the backend can be replaced."""
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "0")
    env.forget_all()


@pytest.mark.parametrize("backend", [RemoteExecutor, OverTcp])
def test_a_process_of_its_own_changes_no_token(
    folder: Path, backend: type[RemoteExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(folder)
    monkeypatch.setitem(BACKENDS._paths, "uni", backend)
    assert answers(folder) == expected
