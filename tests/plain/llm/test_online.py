"""llm/online.py: streams, aborts, slow callers, pauses and deaths, with the engine in its own process and in this."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from quire import AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.base import env
from quire.schema.errors import EngineDeadError, EngineGenerateError, InputError, NotBuiltError
from quire.schema.params import RequestOutputKind
from tests.fake_engine import ids_of, use_fake, write_model

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.fixture
def folder(tmp_path, monkeypatch):
    use_fake(monkeypatch)
    return write_model(tmp_path)


@pytest.fixture(params=["1", "0"], ids=["own process", "in process"])
def engine(request, folder, monkeypatch):
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", request.param)
    env.forget_all()
    made = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, max_num_seqs=16, block_size=4, max_model_len=512))
    yield made
    made.shutdown()


async def collect(engine, prompt, request_id="r", **params) -> list:
    sampling = SamplingParams(**params)
    return [out async for out in engine.generate(prompt=prompt, sampling_params=sampling, request_id=request_id)]


async def usage(engine) -> float:
    return (await engine.call("stats")).get("kv_usage", 0.0)


async def until(test, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not await test():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.005)


async def until_running(engine, name: str = "r") -> None:
    async def running():
        return name in engine.output_processor and await usage(engine) > 0

    await until(running)


async def test_kinds_of_stream(engine):
    outs = await collect(engine, "hello", output_kind=DELTA, max_tokens=7)
    assert "".join(o.outputs[0].text for o in outs) == "hellohe"
    assert [i for o in outs for i in o.outputs[0].token_ids] == ids_of("hellohe")
    assert [o.finished for o in outs] == [False] * (len(outs) - 1) + [True]
    outs = await collect(engine, "hello", max_tokens=7)
    assert all("hellohe".startswith(o.outputs[0].text) for o in outs) and outs[-1].outputs[0].text == "hellohe"
    (out,) = await collect(engine, "hello", output_kind=FINAL, max_tokens=7, n=2)
    assert [a.text for a in out.outputs] == ["hellohe", "hellohe"]


async def test_many_at_once(engine):
    texts = [chr(97 + i % 26) * (i % 7 + 1) for i in range(60)]
    found = await asyncio.gather(
        *(collect(engine, t, str(i), output_kind=DELTA, max_tokens=20) for i, t in enumerate(texts))
    )
    for text, outs in zip(texts, found, strict=True):
        assert "".join(o.outputs[0].text for o in outs) == (text * 20)[:20]


async def test_a_slow_caller_gets_everything_merged(engine):
    pieces = []
    params = SamplingParams(max_tokens=60, output_kind=DELTA, logprobs=1)
    async for out in engine.generate("abcdef", params, "slow"):
        pieces.append(out)
        await asyncio.sleep(0.03)
    assert "".join(p.outputs[0].text for p in pieces) == "abcdef" * 10
    assert sum(len(p.outputs[0].logprobs) for p in pieces) == 60
    assert len(pieces) < 60 and pieces[-1].finished


async def test_closing_the_generator_aborts_and_frees(engine):
    stream = engine.generate("abc", SamplingParams(max_tokens=400, extra_args={"sleep": 0.05}), "r")
    async for out in stream:
        if len(out.outputs[0].token_ids) > 3:
            break
    await stream.aclose()
    assert "r" not in engine.output_processor
    await collect(engine, "x", "other", max_tokens=2)
    assert await usage(engine) == 0.0


async def test_cancelling_the_task_aborts(engine):
    task = asyncio.create_task(collect(engine, "abc", max_tokens=400, extra_args={"sleep": 0.05}))
    await until_running(engine)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(engine.output_processor) == 0
    await collect(engine, "x", "other", max_tokens=2)
    assert await usage(engine) == 0.0


async def test_abort_ends_the_stream_with_what_it_has(engine):
    task = asyncio.create_task(collect(engine, "abc", max_tokens=400, extra_args={"sleep": 0.05}))
    await until_running(engine)
    await engine.abort("r")
    await engine.abort(["r", "unknown"])
    outs = await asyncio.wait_for(task, 60)
    assert outs[-1].finished and outs[-1].outputs[0].finish_reason == "abort"


async def test_an_id_in_use(engine):
    task = asyncio.create_task(collect(engine, "abc", max_tokens=300, extra_args={"sleep": 0.05}))
    await until_running(engine)
    with pytest.raises(InputError, match="'r'"):
        await collect(engine, "abc")
    await engine.abort("r")
    await task
    assert (await collect(engine, "abc", max_tokens=1))[-1].finished


async def test_leaving_a_stream_late_spares_the_next_request_of_that_name(engine):
    old = engine.generate("hello", SamplingParams(max_tokens=3), "r")
    await anext(old)

    async def ended():  # but its caller has not seen that
        return "r" not in engine.output_processor

    await until(ended)
    new = asyncio.create_task(collect(engine, "xy", "r", max_tokens=40, extra_args={"sleep": 0.01}))
    await asyncio.sleep(0.1)
    await old.aclose()
    assert (await new)[-1].outputs[0].finish_reason == "length"


async def test_an_id_may_be_used_again_after_a_stop_string(engine):
    for _ in range(5):
        outs = await collect(engine, "abc", "r", max_tokens=400, stop="c")
        assert outs[-1].outputs[0].text == "ab"
        outs = await collect(engine, "xyz", "r", max_tokens=4)
        assert outs[-1].outputs[0].text == "xyzx" and outs[-1].outputs[0].finish_reason == "length"


async def test_errors_belong_to_their_request(engine):
    good = asyncio.create_task(collect(engine, "ab", "good", max_tokens=30, extra_args={"sleep": 0.001}))
    with pytest.raises(EngineGenerateError, match="cannot go on"):
        await collect(engine, "ab", "bad", max_tokens=9, extra_args={"fail_at": 2})
    with pytest.raises(InputError, match="600"):
        await collect(engine, [5] * 600)
    with pytest.raises(InputError, match="runner=generate, and cannot be pooled"):
        await anext(engine.encode("a", None, "r"))
    assert (await good)[-1].outputs[0].text == "ab" * 15
    assert engine.is_running and not engine.errored


async def test_long_texts_are_tokenized_elsewhere(engine):
    out = (await collect(engine, "ab" * 4000, truncate_prompt_tokens=10, max_tokens=4))[-1]
    assert out.prompt_token_ids == ids_of("ab" * 5) and out.outputs[0].text == "abab"
    with pytest.raises(InputError, match="8000"):
        await collect(engine, "ab" * 4000)


async def test_pause_and_resume(engine):
    task = asyncio.create_task(collect(engine, "abc", max_tokens=400, extra_args={"sleep": 0.05}))
    await until_running(engine)
    await engine.pause_generation()
    assert (await asyncio.wait_for(task, 60))[-1].outputs[0].finish_reason == "abort"
    assert await engine.is_paused() is True
    held = asyncio.create_task(collect(engine, "xy", max_tokens=4))
    await asyncio.sleep(0.1)
    assert not held.done()
    await engine.resume_generation()
    assert (await asyncio.wait_for(held, 60))[-1].outputs[0].text == "xyxy"
    stream = engine.generate("abc", SamplingParams(max_tokens=30, extra_args={"sleep": 0.002}), "r")
    outs = [await anext(stream)]  # it is in flight
    await engine.pause_generation(wait_for_inflight_requests=True, clear_cache=True)
    outs += [out async for out in stream]
    assert outs[-1].outputs[0].finish_reason == "length"
    await engine.resume_generation()


async def test_control(engine):
    await engine.check_health()
    await collect(engine, "abcdefgh", max_tokens=2)
    assert await engine.reset_prefix_cache() is True
    assert await engine.collective_rpc("tests.fake_engine:double", args=(4,)) == [8]
    with pytest.raises(TimeoutError):
        await engine.collective_rpc("nap", timeout=0.05, args=(1.0,))
    with pytest.raises(NotBuiltError):
        await engine.sleep(level=1)
    assert await engine.is_sleeping() is False
    assert await engine.get_supported_tasks() == ("generate",)
    assert (await engine.get_tokenizer()).encode("a") == ids_of("a")
    assert await engine.is_tracing_enabled() is False
    await engine.do_log_stats()
    assert engine.vllm_config.model_config is engine.model_config


@pytest.mark.parametrize("death", [{"raise_at": 5}, {"exit_at": 5}, {"kill_at": 5}], ids=str)
async def test_a_death_fails_every_stream_at_once(folder, death):
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, max_num_seqs=16))
    try:
        many = [
            asyncio.create_task(collect(engine, "abc", str(i), max_tokens=400, extra_args={"sleep": 0.01}))
            for i in range(8)
        ]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        many.append(asyncio.create_task(collect(engine, "abc", "guilty", max_tokens=400, extra_args=death)))
        results = await asyncio.wait_for(asyncio.gather(*many, return_exceptions=True), 100)
        assert time.monotonic() - began < 60
        words = {"raise_at": "ArithmeticError: the step went wrong", "exit_at": "exit code 7", "kill_at": "SIGKILL"}
        (word,) = (words[key] for key in death)
        assert all(type(r) is EngineDeadError and word in str(r) for r in results)
        assert engine.errored and engine.is_stopped and word in str(engine.dead_error)
        with pytest.raises(EngineDeadError, match=word):
            await collect(engine, "late")
        with pytest.raises(EngineDeadError, match=word):
            await engine.check_health()
        with pytest.raises(EngineDeadError, match=word):
            await engine.reset_prefix_cache()
    finally:
        engine.shutdown()


async def test_shutdown_fails_what_is_in_flight(engine):
    task = asyncio.create_task(collect(engine, "abc", max_tokens=400, extra_args={"sleep": 0.05}))
    await until_running(engine)
    await asyncio.to_thread(engine.shutdown)
    with pytest.raises(EngineDeadError, match="shut down"):
        await asyncio.wait_for(task, 60)
    assert engine.is_stopped and not engine.errored
    engine.shutdown()


async def test_collecting_it_ends_the_engine(folder):
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder))
    await collect(engine, "abc", max_tokens=2)
    child = engine.front.client._reader.child
    del engine
    gc.collect()
    assert child.wait(60)


def test_one_engine_serves_several_event_loops_in_turn(engine):
    for i in range(2):
        outs = asyncio.run(collect(engine, "abc", str(i), max_tokens=3))
        assert outs[-1].outputs[0].text == "abc"

    async def leave() -> None:
        async for _ in engine.generate("abc", SamplingParams(max_tokens=400, extra_args={"sleep": 0.05}), "left"):
            return

    asyncio.run(leave())
    assert asyncio.run(collect(engine, "abc", "after", max_tokens=3))[-1].outputs[0].text == "abc"


def test_requests_are_logged_when_asked(folder, caplog):
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, enable_log_requests=True))
    asyncio.run(collect(engine, "abc", "seen-id", max_tokens=1))
    engine.shutdown()
    assert any("seen-id" in record.getMessage() for record in caplog.records)
