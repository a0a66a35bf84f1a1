"""Every declared architecture through the whole engine with processes: two ranks (gloo), two stages, two engines, and
four processes of the first two. `make ranks` (pytest --every-architecture) runs it; the ordinary suite has one
architecture here, and one of each kind in threads (tests/models) and in other files of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.engine.test_ranks_engine import OPTIONS, values_of
from tests.models.test_stages import WHOLE
from tests.tiny_models import ARCHS, write_tiny

pytestmark = pytest.mark.usefixtures("warm_children")
SMALL = OPTIONS | dict(max_model_len=48, num_gpu_blocks_override=128)
PROMPTS = ([7, 9, 30, 4, 11, 80, 21, 6, 45], [5, 6, 99])
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
SIZES: dict[str, dict[str, int]] = {
    "ranks": dict(tensor_parallel_size=2),
    "stages": dict(pipeline_parallel_size=2),
    "engines": dict(data_parallel_size=2),
    "both": dict(tensor_parallel_size=2, pipeline_parallel_size=2),
}
ONE, KINDS_OF_FOUR = "LlamaForCausalLM", ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--every-architecture")
    cases = [(arch, kind) for arch in ARCHS for kind in SIZES if is_built(arch, kind)]
    metafunc.parametrize(("arch", "kind"), [case for case in cases if every or case == (ONE, "engines")])


def is_built(arch: str, kind: str) -> bool:
    """Four processes for some of them."""
    return not (arch in WHOLE and "pipeline_parallel_size" in SIZES[kind]) and (kind != "both" or arch in KINDS_OF_FOUR)


def answer(llm: LLM, prompts: Any) -> list[tuple[list[int], list[tuple[int, float]]]]:
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS, use_tqdm=False)
    return [(list(one.outputs[0].token_ids), values_of(one.outputs[0].logprobs)) for one in done]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {}


def test_processes_answer_as_one(arch: str, kind: str, expected: dict[str, Any], tmp_path: Path) -> None:
    """Stages and engines to the bit: each has a prompt for itself, as one worker has that is given them in turn."""
    write_tiny(arch, tmp_path)
    if arch not in expected:
        with LLM(str(tmp_path), **SMALL) as llm:
            expected[arch] = [answer(llm, [prompt])[0] for prompt in PROMPTS]
    with LLM(str(tmp_path), **SIZES[kind], **SMALL) as llm:
        found = answer(llm, PROMPTS)
        assert len(llm.collective_rpc("tests.rank_probe:pid_of")) == (4 if kind == "both" else 2)
    if "tensor_parallel_size" not in SIZES[kind]:
        assert found == expected[arch]
        return
    for (tokens, values), (wanted, whole) in zip(found, expected[arch], strict=True):
        assert tokens == wanted and [token for token, _ in values] == [token for token, _ in whole]
        assert [value for _, value in values] == pytest.approx([value for _, value in whole], abs=1e-4)
