"""Many callers that come, go, cancel and abort at random: every answer is right, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from quire import AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.base import env
from quire.schema.errors import EngineDeadError
from quire.schema.params import RequestOutputKind
from tests.fake_engine import use_fake, write_model


async def caller(engine: AsyncLLM, name: str, rng: random.Random) -> None:
    text = "abcdefghij"[: rng.randint(1, 10)] * rng.randint(1, 6)
    stop = rng.choice([None, "de", "zz"])
    params = SamplingParams(
        max_tokens=rng.randint(1, 60), n=rng.choice([1, 1, 3]), output_kind=rng.choice(list(RequestOutputKind)),
        stop=stop, logprobs=rng.choice([None, 2]),
    )  # fmt: skip
    habit = rng.choice(["listen", "listen", "leave", "cancel", "abort"])
    answers = [""] * params.n
    stream = engine.generate(text, params, name)

    async def listen() -> None:
        async for out in stream:
            for answer in out.outputs:
                before = answers[answer.index] if params.output_kind is RequestOutputKind.DELTA else ""
                answers[answer.index] = before + answer.text
            if habit == "leave" and rng.random() < 0.3:
                return
            if rng.random() < 0.1:
                await asyncio.sleep(0.001)

    task = asyncio.create_task(listen())
    if habit in ("cancel", "abort"):
        await asyncio.sleep(rng.random() * 0.05)
        task.cancel() if habit == "cancel" else await engine.abort(name)
    try:
        await task
    except asyncio.CancelledError:
        assert habit == "cancel"
    await stream.aclose()
    if habit == "listen":
        whole = (text * 60)[: params.max_tokens]
        assert answers == [whole.partition(stop)[0] if stop else whole] * params.n


@pytest.mark.parametrize(("form", "seed", "kill"), [("1", 0, False), ("1", 1, False), ("1", 2, True), ("0", 3, False)])
def test_a_crowd(tmp_path, monkeypatch, form, seed, kill):
    use_fake(monkeypatch)
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", form)
    env.forget_all()
    args = AsyncEngineArgs(
        model=write_model(tmp_path), max_num_seqs=16, block_size=4, max_model_len=128, num_gpu_blocks_override=90,
        max_num_batched_tokens=64, async_scheduling=bool(seed % 2),
    )  # fmt: skip

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(args)
        tasks = [asyncio.create_task(caller(engine, str(i), random.Random(seed * 1000 + i))) for i in range(100)]
        if kill:
            await asyncio.sleep(0.15)
            os.kill(engine.front.client._reader.child.pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 300)
        wrong = [r for r in results if r is not None and not (kill and isinstance(r, EngineDeadError))]
        assert not wrong, wrong[:3]
        assert len(engine.output_processor) == 0 and not engine._streams.request_ids()
        if not kill:
            async for _ in engine.generate("a", SamplingParams(max_tokens=1), "last"):
                pass
            assert (await engine.call("stats"))["kv_usage"] == 0.0
        engine.shutdown()

    asyncio.run(main())


PARENT = """
import asyncio, os, sys
import quire.engine.process_client as client
client.MAIN, client.EARLY = "tests.fake_engine:main", ""
from quire import AsyncEngineArgs, AsyncLLM, SamplingParams
engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=sys.argv[1]))
reader = engine.front.client._reader
print(reader.child.pid, reader.wire.folder, flush=True)
async def main():
    async for _ in engine.generate("abc", SamplingParams(max_tokens=500, extra_args={"sleep": 0.5}), "r"):
        pass
asyncio.run(main())
"""


def test_when_the_front_is_killed_nothing_is_left(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, write_model(tmp_path)], stdout=subprocess.PIPE, text=True)
    pid, folder = parent.stdout.readline().split()
    assert os.path.isdir(folder)
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while os.path.exists(folder) or _runs(int(pid)):
        assert time.monotonic() < deadline, "the engine outlived its front"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:  # it is gone, or went while it was read
        return False
