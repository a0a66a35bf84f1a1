"""distributed_executor_backend="external_launcher": torchrun starts the ranks, each with an engine of its own.

Here by its launcher, with ranks that are forks of an interpreter that has torch imported
(tests/compat/forked_ranks.py); its command starts the ranks of tests/compat/test_programs.py::test_torchrun_dp.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base import env
from quire.executor.launched import launched_rank, places
from quire.schema.errors import ConfigError
from tests.tiny_models import write_tiny
from tests.warm_python import WarmPython

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
def test_every_rank_has_every_answer(tensor: int, stages: int, tmp_path: Path, warm_python: WarmPython) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    launcher, probe = TESTS / "compat/forked_ranks.py", TESTS / "launched_probe.py"
    words = (str(probe), str(tmp_path), str(tmp_path), str(tensor), str(stages))
    done = warm_python.run(launcher, "2", *words, env=os.environ, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["tokens"] == second["tokens"]
    blocks = re.findall(r": (\d+) KV blocks", done.stderr)
    assert len(blocks) == 2 and len(set(blocks)) == 1  # although one has more memory
    for result in (first, second):
        assert "rank 1 was given other requests than rank 0" in result["error"]
    with LLM(str(tmp_path), device="cpu", dtype="float32", max_model_len=96, num_gpu_blocks_override=60) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        (whole,) = llm.generate([{"prompt_token_ids": [7, 9, 30, 4, 11]}], params, use_tqdm=False)
    assert first["tokens"][0][0] == list(whole.outputs[0].token_ids)


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    env.forget_all()
    with pytest.raises(
        ConfigError, match="needs RANK and WORLD_SIZE in the environment: start the program with torchrun"
    ):
        launched_rank(2)


@pytest.mark.parametrize(
    ("size", "variables", "expected"),
    [
        (2, (1, 2, 1, 2), {"nnodes": 1, "data_parallel_rank_local": 0, "num_engines_here": 1}),
        (2, (3, 4, 3, 4), {"nnodes": 1, "data_parallel_rank_local": 1, "num_engines_here": 2}),
        (4, (3, 4, 1, 2), {"nnodes": 2, "data_parallel_rank_local": 0, "num_engines_here": 1}),
        (2, (6, 8, 2, 4), {"nnodes": 1, "data_parallel_rank_local": 1, "num_engines_here": 2}),
    ],
)
def test_which_part_of_a_machine_a_rank_has(
    size: int, variables: tuple[int, ...], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), variables, strict=True):
        monkeypatch.setenv(name, str(value))
    env.forget_all()
    assert places(size) == expected and launched_rank(size) == variables[0]
    with pytest.raises(ConfigError, match=f"WORLD_SIZE is {variables[1]}"):
        launched_rank(3 if variables[1] % 3 else 7)
