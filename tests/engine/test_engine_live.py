"""The whole engine over a tiny real model: the same answers in process, in a process of its own and streamed."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import signal
import weakref
from pathlib import Path

import pytest
import torch

from quire import LLM, AsyncEngineArgs, AsyncLLM, BeamSearchParams, EngineArgs, LLMEngine, SamplingParams
from quire.base import env
from quire.sampling.processors import LogitsProcessor, process_dict_updates
from quire.sched.scheduler import Scheduler
from quire.schema.errors import CheckpointError, ConfigError, EngineDeadError, InputError
from quire.schema.params import RequestOutputKind
from tests.fake_engine import break_model
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("warm_children")
PROMPTS = [
    "the river ran under",
    "a",
    "seven children counted boats and argued about names. there is nothing",
    "!" * 70,
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OPTIONS = dict(dtype="float32", max_model_len=160, max_num_seqs=8, block_size=8)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return str(folder), make_tiny("LlamaForCausalLM", folder)


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny[0], **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def want(tiny, llm):
    """What transformers generates for PROMPTS."""
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([llm.get_tokenizer().encode(prompt)])
        mask = torch.ones_like(ids)
        out = tiny[1].generate(
            ids, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


def tokens(outputs) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in outputs]


@pytest.mark.parametrize("own_process", ["0", "1"])
@pytest.mark.parametrize("ahead", [False, True])
def test_greedy_equals_transformers(tiny, want, monkeypatch, own_process, ahead):
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", own_process)
    env.forget_all()
    with LLM(tiny[0], async_scheduling=ahead, max_num_batched_tokens=32, **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert tokens(outputs) == want
        again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert tokens(again) == want and any(out.num_cached_tokens for out in again)
        for out in outputs:
            assert out.outputs[0].text == llm.get_tokenizer().decode(out.outputs[0].token_ids, skip_special_tokens=True)


def test_streams_equal_transformers(tiny, want):
    async def main() -> list[list[int]]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=tiny[0], async_scheduling=True, **OPTIONS))
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

        async def one(i: int) -> list[int]:
            ids: list[int] = []
            async for out in engine.generate(PROMPTS[i], params, str(i)):
                ids += out.outputs[0].token_ids
            return ids

        try:
            return list(await asyncio.gather(*map(one, range(len(PROMPTS)))))
        finally:
            engine.shutdown()

    assert asyncio.run(main()) == want


def test_seeds_decide_whatever_else_runs(llm):
    seeded = SamplingParams(temperature=1.0, seed=11, max_tokens=16, ignore_eos=True)
    (alone,) = tokens(llm.generate("the river", seeded, use_tqdm=False))
    noise = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
    crowd = llm.generate([*PROMPTS, "the river"], [noise] * 4 + [seeded], use_tqdm=False)
    assert tokens(crowd)[-1] == alone
    (two,) = llm.generate(
        "the river", SamplingParams(temperature=1.0, seed=10, n=2, max_tokens=16, ignore_eos=True), use_tqdm=False
    )
    assert two.outputs[1].token_ids == alone and two.outputs[0].token_ids != alone


def test_unseeded_runs_repeat_with_the_engines_seed(tiny):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = []
    for seed in (5, 5, 6):
        with LLM(tiny[0], seed=seed, **OPTIONS) as llm:
            runs.append(tokens(llm.generate(PROMPTS, params, use_tqdm=False)))
    assert runs[0] == runs[1] != runs[2]


def test_resetting_the_cache_under_running_requests_changes_nothing(tiny, want):
    engine = LLMEngine.from_engine_args(EngineArgs(model=tiny[0], **OPTIONS))
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(
            str(i), prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=1)
        )
    final, step = {}, 0
    while engine.has_unfinished_requests():
        step += 1
        if step in (3, 10):
            assert engine.reset_prefix_cache(reset_running_requests=True)
        final.update({out.request_id: out for out in engine.step() if out.finished})
    assert [final[str(i)].outputs[0].token_ids for i in range(4)] == want
    assert all(len(out.prompt_logprobs) == len(out.prompt_token_ids) for out in final.values())
    engine.close()


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_beam_search_equals_transformers(tiny, llm, width, penalty):
    model, tokenizer = tiny[1], llm.get_tokenizer()
    prompts = PROMPTS[:3]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=width, max_tokens=10, length_penalty=penalty))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, num_beams=width,
            num_return_sequences=width, length_penalty=penalty, early_stopping="never", eos_token_id=2, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        for beam, tokens_there, score in zip(
            output.sequences, found.sequences.tolist(), found.sequences_scores, strict=True
        ):
            num_new = len(beam.tokens) - ids.shape[1]
            assert beam.tokens == tokens_there[: len(beam.tokens)]
            assert set(tokens_there[len(beam.tokens) :]) <= {0, 2}  # transformers pads what has ended
            assert beam.cum_logprob / num_new**penalty == pytest.approx(score.item(), abs=1e-3)


def test_the_model_can_be_reached_and_is_freed(tiny):
    llm = LLM(tiny[0], **OPTIONS)
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    count = sum(p.numel() for _, p in model.named_parameters())
    assert llm.apply_model(lambda m: sum(p.numel() for _, p in m.named_parameters())) == [count]
    gone = weakref.ref(model)
    del model, llm
    gc.collect()
    assert gone() is None


class Picky(LogitsProcessor):
    """Lets one token through for requests that name it."""

    def __init__(self, vllm_config, device, is_pin_memory) -> None:
        self.only: dict[int, int] = {}

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if (params.extra_args or {}).get("only", 0) < 0:
            raise ValueError("only must be a token id")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update) -> None:
        process_dict_updates(self.only, batch_update, lambda params, *_: (params.extra_args or {}).get("only"))

    def apply(self, logits):
        for row, token in self.only.items():
            logits[row, :token] = -float("inf")
            logits[row, token + 1 :] = -float("inf")
        return logits


@pytest.mark.parametrize("own_process", ["0", "1"])
def test_custom_processors(tiny, want, monkeypatch, own_process):
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", own_process)
    env.forget_all()
    with LLM(tiny[0], logits_processors=[Picky], **OPTIONS) as llm:
        only = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, extra_args={"only": 77})
        outputs = llm.generate([PROMPTS[0], PROMPTS[0]], [only, GREEDY], use_tqdm=False)
        assert tokens(outputs) == [[77, 77, 77], want[0]]
        with pytest.raises(InputError, match="only must be a token id"):
            llm.generate("a", SamplingParams(extra_args={"only": -1}), use_tqdm=False)


def test_a_processor_that_cannot_be_loaded(tiny):
    with pytest.raises(InputError, match="no_such_module"):
        LLM(tiny[0], logits_processors=["no_such_module:Thing"], **OPTIONS)


class Recorded(Scheduler):
    """Another scheduler, by import path."""

    made = 0

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        type(self).made += 1


def test_another_scheduler(tiny, want):
    engine = LLMEngine.from_engine_args(EngineArgs(model=tiny[0], scheduler_cls=f"{__name__}.Recorded", **OPTIONS))
    engine.add_request("r", PROMPTS[0], GREEDY)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert tokens(outputs) == want[:1] and Recorded.made == 1
    engine.close()


@pytest.mark.parametrize("named", ["no_such_module:Thing", "builtins:dict", "quire.sched.scheduler.Nothing"])
def test_what_is_no_scheduler_is_refused(tiny, named):
    with pytest.raises(ConfigError, match=f"scheduler_cls '{named}'"):
        LLM(tiny[0], scheduler_cls=named, **OPTIONS)


def test_hints_to_another_engine_change_nothing(tiny, want, monkeypatch):
    find_spec = importlib.util.find_spec  # where Ray is installed, its name is no hint: a cluster would be started
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "ray" else find_spec(name, *of))
    hints = {
        "attention_backend": "FLASH_ATTN", "distributed_executor_backend": "ray", "compilation_config": 3,
        "moe_backend": "triton", "safetensors_load_strategy": "prefetch", "performance_mode": "throughput",
        "mm_processor_cache_gb": 0, "limit_mm_per_prompt": {"image": 2}, "enable_expert_parallel": True,
        "disable_cascade_attn": False, "renderer_num_workers": 4, "disable_hybrid_kv_cache_manager": True,
    }  # fmt: skip
    llm = LLM(tiny[0], **hints, **OPTIONS)
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == want
    llm.close()


# ---- deaths and bad models


def async_engine(folder: str) -> AsyncLLM:
    return AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, **OPTIONS))


async def listen(engine: AsyncLLM, name: str, begun: asyncio.Event | None = None) -> None:
    params = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)
    async for _ in engine.generate("a", params, name):
        if begun is not None:
            begun.set()


def test_killing_the_engine_in_the_middle_of_streams(tiny):
    async def main() -> None:
        engine = async_engine(tiny[0])
        begun = asyncio.Event()
        tasks = [asyncio.create_task(listen(engine, str(i), begun)) for i in range(200)]  # 8 at once
        await asyncio.wait_for(begun.wait(), 60)
        os.kill(engine.front.client._reader.child.pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        dead = [r for r in results if r is not None]  # the first may have come to their end
        assert dead and all(isinstance(r, EngineDeadError) and "SIGKILL" in str(r) for r in dead)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await listen(engine, "late")
        engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("own_process", ["0", "1"])
def test_an_exception_inside_a_step(tiny, monkeypatch, own_process):
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", own_process)
    env.forget_all()

    async def main() -> None:
        engine = async_engine(tiny[0])
        await engine.apply_model(break_model)
        results = await asyncio.wait_for(
            asyncio.gather(*(listen(engine, str(i)) for i in range(3)), return_exceptions=True), 60
        )
        assert all(isinstance(r, EngineDeadError) and "a kernel went wrong" in str(r) for r in results)
        engine.shutdown()

    asyncio.run(main())


def test_aborting_frees_every_block(tiny):
    async def main() -> None:
        engine = async_engine(tiny[0])
        begun = asyncio.Event()
        tasks = [asyncio.create_task(listen(engine, str(i), begun)) for i in range(4)]
        await asyncio.wait_for(begun.wait(), 60)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        params = SamplingParams(max_tokens=1)
        async for _ in engine.generate("a", params, "last"):
            pass
        assert (await engine.call("stats"))["kv_usage"] == 0.0
        engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("own_process", ["0", "1"])
def test_a_bad_checkpoint_raises_its_own_error(tiny, tmp_path, monkeypatch, own_process):
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", own_process)
    env.forget_all()
    for name in os.listdir(tiny[0]):
        data = Path(tiny[0], name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2] if name.endswith(".safetensors") else data)
    with pytest.raises(CheckpointError, match="safetensors"):
        LLM(str(tmp_path), **OPTIONS)


def test_too_little_memory_is_said_in_numbers(tiny):
    with pytest.raises(InputError, match="num_gpu_blocks_override"):
        LLM(tiny[0], num_gpu_blocks_override=3, **OPTIONS)
