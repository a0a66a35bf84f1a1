"""distributed_executor_backend="ray": workers are actors. A local cluster without a dashboard, of two nodes with one
processor each, which ends with the tests. Ray is an extra and starts slowly: `make ranks` runs this if it is there."""

from __future__ import annotations

import asyncio
import builtins
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.schema.errors import EngineDeadError
from tests.tiny_models import write_tiny

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(300)
OPTIONS: dict[str, Any] = dict(device="cpu", dtype="float32", max_model_len=96, num_gpu_blocks_override=60)
PROMPTS = [{"prompt_token_ids": [7, 9, 30, 4, 11]}, {"prompt_token_ids": [5, 6]}]
ROOT = Path(__file__).parents[2]
STORE = 80 << 20  # bytes of shared memory for each node: the least that Ray takes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    write_tiny("LlamaForCausalLM", made)
    return made


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    before, plain, handler = dict(os.environ), builtins.print, signal.getsignal(signal.SIGTERM)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), before.get("PYTHONPATH")]))
    node = dict(num_cpus=1, object_store_memory=STORE, include_dashboard=False)
    made = Cluster(initialize_head=True, head_node_args=node)
    made.add_node(**node)
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    ray.shutdown()
    made.shutdown()
    builtins.print = plain  # Ray has put its own in place, in every program that it is started in
    signal.signal(signal.SIGTERM, handler)
    os.environ.clear()
    os.environ.update(before)


def greedy(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_two_nodes_answer_as_one(cluster: Any, folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        whole = greedy(llm)
    with LLM(str(folder), tensor_parallel_size=2, distributed_executor_backend="ray", **OPTIONS) as llm:
        assert greedy(llm) == whole
        nodes = llm.collective_rpc("tests.rank_probe:ray_node_of")
        assert len(set(nodes)) == 2
    with LLM(str(folder), pipeline_parallel_size=2, distributed_executor_backend="ray", **OPTIONS) as llm:
        assert greedy(llm) == whole


# An actor on the node that will be killed: prints when Ray says that it is gone.
_WATCH = """
import ray, sys, time
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(address="auto", log_to_driver=False)

@ray.remote(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=sys.argv[1], soft=False))
class Sleeper:
    def sleep(self, seconds):
        time.sleep(seconds)

sleeper = Sleeper.remote()
ray.get(sleeper.sleep.remote(0))
print("ready", flush=True)
try:
    ray.get(sleeper.sleep.remote(600))
except Exception:
    print("gone", time.monotonic(), flush=True)
"""


def test_a_documented_program(cluster: Any, folder: Path) -> None:
    """Through compat, with a worker on each node."""
    program = ROOT / "tests/compat/programs/pipeline_parallel.py"
    command = [
        sys.executable,
        str(program),
        "--model",
        str(folder),
        "-tp",
        "2",
        "--distributed-executor-backend",
        "ray",
    ]
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "compat"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^Output: '.+'$", done.stdout, re.MULTILINE)) == 4


def test_a_killed_node_fails_every_caller(cluster: Any, folder: Path) -> None:
    """The last test of this file: one node is left."""

    async def scene() -> None:
        args = AsyncEngineArgs(model=str(folder), tensor_parallel_size=2, distributed_executor_backend="ray", **OPTIONS)
        llm = AsyncLLM.from_engine_args(args)
        begun, ended = asyncio.Event(), list[float]()

        async def ask(name: str) -> str:
            params = SamplingParams(max_tokens=90, ignore_eos=True)
            try:
                for turn in range(10000):
                    async for _ in llm.generate({"prompt_token_ids": [5, 6]}, params, f"{name} {turn}"):
                        begun.set()
            except EngineDeadError as dead:
                ended.append(time.monotonic())
                return str(dead)
            return ""

        asking = [asyncio.create_task(ask(f"request {i}")) for i in range(3)]
        await asyncio.wait_for(begun.wait(), 60)
        (victim,) = cluster.worker_nodes
        assert victim.node_id in await llm.collective_rpc("tests.rank_probe:ray_node_of")
        watch = subprocess.Popen([sys.executable, "-c", _WATCH, victim.node_id], stdout=subprocess.PIPE, text=True)
        assert watch.stdout is not None and await asyncio.to_thread(watch.stdout.readline) == "ready\n"
        await asyncio.to_thread(cluster.remove_node, victim, False)
        for said in await asyncio.wait_for(asyncio.gather(*asking), 60):
            assert "worker 1 on Ray node" in said and "is gone, says Ray" in said, said
        printed, _ = await asyncio.to_thread(watch.communicate, timeout=60)
        noticed = float(re.findall(r"^gone (.*)$", printed, re.MULTILINE)[0])
        assert max(ended) - noticed < 2.0
        llm.shutdown()

    asyncio.run(scene())
