"""distributed_executor_backend="ray": workers are actors; data_parallel_backend="ray": engines are. A local cluster
without a dashboard, of two nodes with one processor each, which ends with the tests. Ray is an extra and starts slowly:
`make ranks` runs this if it is there."""

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
from tests.engine.test_ranks_engine import LINEARS, answers
from tests.server.hosted import Hosted, wait_until
from tests.server.test_engines_server import Streaming
from tests.tiny_adapters import write_adapter
from tests.tiny_models import make_tiny, write_tiny

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(300)
OPTIONS: dict[str, Any] = dict(device="cpu", dtype="float32", max_model_len=96, num_gpu_blocks_override=60)
PROMPTS = [{"prompt_token_ids": [7, 9, 30, 4, 11]}, {"prompt_token_ids": [5, 6]}]
ROOT = Path(__file__).parents[2]
STORE = 80 << 20  # bytes of shared memory for each node: the least that Ray takes
NODE: dict[str, Any] = dict(num_cpus=1, object_store_memory=STORE, include_dashboard=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    write_tiny("LlamaForCausalLM", made)
    return made


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapted")
    write_adapter(make_tiny("LlamaForCausalLM", made), made / "adapter", targets=LINEARS)
    return made


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    before, plain, handler = dict(os.environ), builtins.print, signal.getsignal(signal.SIGTERM)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), before.get("PYTHONPATH")]))
    made = Cluster(initialize_head=True, head_node_args=NODE)
    made.add_node(**NODE)
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


def test_engines_on_two_nodes(cluster: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """data_parallel_backend="ray": an engine for each node, started by Ray, and the tokens of one engine."""
    with LLM(str(folder), **OPTIONS) as llm:
        whole = greedy(llm)
    before = signal.getsignal(signal.SIGTERM)
    with LLM(str(folder), data_parallel_size=2, data_parallel_backend="ray", **OPTIONS) as llm:
        assert "2 engines on 2 Ray nodes" in caplog.text
        assert greedy(llm) == whole
        assert len(set(llm.collective_rpc("tests.rank_probe:pid_of"))) == 2
        assert signal.getsignal(signal.SIGTERM) is before


def test_adapters_and_grammars_answer_as_through_processes(cluster: Any, adapted: Path) -> None:
    """Bits and all: of drawn requests, log probabilities, a grammar and an adapter, with weights of 8 bits."""
    both = dict(tensor_parallel_size=2, enable_lora=True, quantization="int8_wo", **OPTIONS)
    with LLM(str(adapted), **both) as llm:
        expected = answers(llm, adapted)
    with LLM(str(adapted), distributed_executor_backend="ray", **both) as llm:
        assert answers(llm, adapted) == expected


def test_experts_that_move(cluster: Any, tmp_path: Path) -> None:
    write_tiny("Qwen3MoeForCausalLM", tmp_path)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        whole = greedy(llm)
    moving = dict(num_redundant_experts=2, window_size=4, step_interval=4)
    whole_experts = dict(enable_expert_parallel=True, enable_eplb=True, eplb_config=moving)
    with LLM(
        str(tmp_path), tensor_parallel_size=2, distributed_executor_backend="ray", **whole_experts, **OPTIONS
    ) as llm:
        assert greedy(llm) == whole
        counted = llm.collective_rpc("tests.rank_probe:moves_of")
        assert len(counted) == 2 and counted[0][0] > 4 and counted[0] == counted[1]


def test_two_ranks_in_each_of_two_stages_on_four_nodes(cluster: Any, folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        whole = greedy(llm)
    more = [cluster.add_node(**NODE) for _ in range(2)]
    sizes = dict(tensor_parallel_size=2, pipeline_parallel_size=2)
    with LLM(str(folder), distributed_executor_backend="ray", **sizes, **OPTIONS) as llm:
        assert greedy(llm) == whole
        assert len(set(llm.collective_rpc("tests.rank_probe:ray_node_of"))) == 4
    for node in more:
        cluster.remove_node(node)


def test_engines_whose_workers_ray_places(cluster: Any, folder: Path) -> None:
    """Both backends: an engine may then have ranks on several nodes."""
    with LLM(str(folder), **OPTIONS) as llm:
        whole = greedy(llm)
    ray_twice = dict(data_parallel_backend="ray", distributed_executor_backend="ray")
    with LLM(str(folder), data_parallel_size=2, **ray_twice, **OPTIONS) as llm:
        assert greedy(llm) == whole
        assert len(set(llm.collective_rpc("tests.rank_probe:ray_node_of"))) == 2


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
    """One node is left; the next test adds another."""

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


def test_a_server_with_engines_on_two_nodes_one_of_which_is_killed(cluster: Any, folder: Path) -> None:
    """`vllm serve -dp 2 --data-parallel-backend ray`: one command. The engine of the other node goes on."""
    if not cluster.worker_nodes:
        cluster.add_node(**NODE)
    command = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main(sys.argv[1:]))"
    flags = ("-dp", "2", "--data-parallel-backend", "ray", "--max-model-len", "512", "--port", "0")
    words = (sys.executable, "-c", command, "serve", str(folder), "--dtype", "float32", "--device", "cpu", *flags)
    path = os.pathsep.join([str(ROOT / "compat"), os.environ["PYTHONPATH"]])
    process = subprocess.Popen(
        words, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    server = Hosted(process)
    try:
        server.url = server.wait_for_line(r"Listening at (\S+) ", 250)[1].replace("//0.0.0.0:", "//127.0.0.1:")
        assert "2 engines on 2 Ray nodes" in server.log
        streams = [Streaming(server, rank) for rank in range(2)]
        assert all(stream.begun.wait(60) for stream in streams), [stream.error for stream in streams]
        (victim,) = cluster.worker_nodes
        cluster.remove_node(victim, False)
        wait_until(lambda: any(stream.error for stream in streams))
        (lost,) = (rank for rank in range(2) if streams[rank].error)
        assert f"machine {ray.util.get_node_ip_address()} with engine {lost} is lost" in streams[lost].error
        health = server.get("/health")
        assert health.status_code == 200 and list(health.json()["dead_engines"]) == [str(lost)]
        assert server.complete("abc", 4).status_code == 200 and not streams[1 - lost].error
        server.signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
        server.wait(60)
