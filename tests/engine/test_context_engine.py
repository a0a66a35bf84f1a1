"""Context parallelism for decode through the whole engine: processes that keep a share of every context each answer as
one that keeps all of it, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.engine.test_ranks_engine import OPTIONS, values_of
from tests.tiny_models import write_tiny

pytestmark = pytest.mark.usefixtures("warm_children")
SHARED = [(7 * i) % 90 + 3 for i in range(38)]
PROMPTS = [{"prompt_token_ids": [*SHARED, 5 + i, 9, 11]} for i in range(6)]
# Blocks of eight tokens of one rank; six prompts share two or more of them, in chunks, and do not all fit at once.
SHORT = OPTIONS | dict(num_gpu_blocks_override=24, max_num_batched_tokens=16, block_size=8, enable_prefix_caching=True)


def only_with_every_architecture(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--every-architecture"):
        pytest.skip("--every-architecture")


def answers(folder: Path, **options: Any) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Tokens and log probabilities, and what was counted."""
    llm = LLM(str(folder), **SHORT | options)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    counts = dict(preempted=0)
    try:
        scheduler = llm.llm_engine.front.client.loop.scheduler
        plain = scheduler.planner.preempt

        def counted(request: Any) -> None:
            counts["preempted"] += 1
            plain(request)

        scheduler.planner.preempt = counted
        done = [one for _ in range(2) for one in llm.generate(PROMPTS, params, use_tqdm=False)]
        counts["cached"] = sum(one.num_cached_tokens or 0 for one in done)
        counts["bytes"] = llm.collective_rpc("tests.rank_probe:kv_bytes")
        counts["tokens"] = scheduler.kv.pool.num_blocks * scheduler.kv.align
        return [one.outputs[0].token_ids for one in done], [values_of(one.outputs[0].logprobs) for one in done], counts
    finally:
        llm.close()


@pytest.mark.parametrize("name", ["GPTBigCodeForCausalLM", "DeepseekV2ForCausalLM"])
def test_short_of_blocks_in_chunks_with_prefixes(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """One head of keys, and latent vectors, which the suite has in threads."""
    if name.startswith("Deepseek"):
        only_with_every_architecture(request)
    write_tiny(name, tmp_path)
    tokens, logprobs, alone = answers(tmp_path)
    found, shared, counts = answers(
        tmp_path, tensor_parallel_size=2, decode_context_parallel_size=2, num_gpu_blocks_override=12
    )
    assert found == tokens
    for own, other in zip(shared, logprobs, strict=True):
        assert [token for token, _ in own] == [token for token, _ in other]
        assert [value for _, value in own] == pytest.approx([value for _, value in other], abs=1e-4)
    assert counts["preempted"] and counts["cached"] and alone["preempted"] and alone["cached"]
    # as many tokens, in half of the memory on each rank
    assert counts["tokens"] == alone["tokens"]
    assert counts["bytes"] == [alone["bytes"][0] // 2] * 2


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("LlamaForCausalLM", dict(tensor_parallel_size=4)),  # two heads of keys, each on a pair of ranks
        ("GPTBigCodeForCausalLM", dict(tensor_parallel_size=2, pipeline_parallel_size=2)),
    ],
)
def test_four_processes(name: str, sizes: dict[str, int], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Partial results are exchanged. The suite has the ranks as threads."""
    only_with_every_architecture(request)
    write_tiny(name, tmp_path)
    tokens, _, _ = answers(tmp_path)
    more = dict(dcp_comm_backend="a2a", cp_kv_cache_interleave_size=4, num_gpu_blocks_override=12)
    found, _, _ = answers(tmp_path, decode_context_parallel_size=2, **sizes, **more)
    assert found == tokens
