"""Adapters in an engine: mixed batches, slots that change hands, reloads, verbs, and adapters that cannot be read."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncEngineArgs, AsyncLLM, BeamSearchParams, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from quire.base import env
from quire.schema.errors import InputError
from tests.tiny_adapters import TinyAdapter, greedy, linear_modules, merge, write_adapter
from tests.tiny_models import make_tiny

PROMPTS = [[5, 9, 77, 100, 41, 8, 250, 33, 12, 4, 17, 18, 19, 20, 21, 22, 23, 24], [7, 7, 30], [99, 3, 2, 1, 60, 61]]
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(
    dtype="float32", enable_lora=True, max_lora_rank=8, max_model_len=64, seed=0, kv_cache_memory_bytes=1 << 22,
)  # fmt: skip


class Case:
    """A tiny model with six adapters, and what transformers answers with each of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_tiny("LlamaForCausalLM", folder / "model")
        self.path = str(folder / "model")
        ends = linear_modules(self.model, ("embed_tokens", "lm_head"))
        everything = linear_modules(self.model, None) | ends
        self.adapters = [
            write_adapter(
                self.model, folder / f"a{n}", seed=n, rank=(2, 4, 8)[n % 3], rslora=n % 2 == 0,
                modules=everything if n % 3 == 0 else None,
            )
            for n in range(1, 7)
        ]  # fmt: skip
        self._known: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}

    def lora(self, number: int) -> LoRARequest | None:
        """0: none."""
        return LoRARequest(f"a{number}", number, self.adapters[number - 1].path) if number else None

    def expected(self, number: int, prompt: list[int]) -> list[int]:
        return self.answer(self.adapters[number - 1] if number else None, prompt)

    def answer(self, adapter: TinyAdapter | None, prompt: list[int]) -> list[int]:
        key = (None if adapter is None else adapter.path, tuple(prompt))
        if key not in self._known:
            model = self.model if adapter is None else merge(self.model, adapter)
            self._known[key] = greedy(model, prompt, SHORT.max_tokens or 0)
        return self._known[key]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def llm(case: Case) -> Iterator[LLM]:
    with LLM(case.path, **OPTIONS, max_loras=2, max_cpu_loras=3) as made:
        yield made


def ask(llm: LLM, prompts: list[list[int]], loras: Any, params: SamplingParams = SHORT) -> list[list[int]]:
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(one.outputs[0].token_ids) for one in llm.generate(given, params, lora_request=loras, use_tqdm=False)]


def test_more_adapters_than_slots_in_one_call(case: Case, llm: LLM) -> None:
    numbers = [0, 1, 2, 3, 4, 5, 6, 0, 1, 6, 3]
    prompts = [PROMPTS[i % 3] for i in range(len(numbers))]
    answers = ask(llm, prompts, [case.lora(number) for number in numbers])
    assert answers == [case.expected(n, prompt) for n, prompt in zip(numbers, prompts, strict=True)]
    assert len(llm.list_loras()) <= 5  # in two slots, and three copies
    assert ask(llm, PROMPTS, case.lora(2)) == [case.expected(2, prompt) for prompt in PROMPTS]
    assert ask(llm, PROMPTS, None) == [case.expected(0, prompt) for prompt in PROMPTS]


def test_a_prefix_belongs_to_its_adapter(case: Case, llm: LLM) -> None:
    llm.reset_prefix_cache()
    for number in (0, 1, 2, 0, 1, 2):
        assert ask(llm, PROMPTS[:1], case.lora(number)) == [case.expected(number, PROMPTS[0])]
    given: Any = {"prompt_token_ids": PROMPTS[0]}
    again = llm.generate(given, SHORT, lora_request=case.lora(2), use_tqdm=False)[0]
    assert again.num_cached_tokens and list(again.outputs[0].token_ids) == case.expected(2, PROMPTS[0])


def test_a_reload_never_sees_old_blocks(case: Case, llm: LLM, tmp_path: Path) -> None:
    first = write_adapter(case.model, tmp_path / "changing", seed=50)
    lora = LoRARequest("changing", 50, first.path)
    assert ask(llm, PROMPTS[:1], lora) == [case.answer(first, PROMPTS[0])]
    second = write_adapter(case.model, tmp_path / "changing", seed=51)
    assert llm.add_lora(LoRARequest("changing", 50, second.path, load_inplace=True)) is True
    merged = greedy(merge(case.model, second), PROMPTS[0], 6)
    assert merged != case.answer(first, PROMPTS[0])
    assert ask(llm, PROMPTS[:1], lora) == [merged]
    third = write_adapter(case.model, tmp_path / "other", seed=52)  # the same name and id, from elsewhere
    assert ask(llm, PROMPTS[:1], LoRARequest("changing", 50, third.path)) == [case.answer(third, PROMPTS[0])]
    assert llm.remove_lora(50) is True and llm.remove_lora(50) is False


def test_requests_under_way_keep_the_adapter_that_they_began_with(case: Case, tmp_path: Path) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=case.path, **OPTIONS, max_loras=1))
    first = write_adapter(case.model, tmp_path / "changing", seed=60)
    lora = LoRARequest("changing", 60, first.path)
    engine.add_request("old", {"prompt_token_ids": PROMPTS[0]}, SHORT, lora_request=lora)
    seen = 0
    while not seen:
        seen = sum(len(one.outputs[0].token_ids) for one in engine.step())
    old = case.answer(first, PROMPTS[0])
    second = write_adapter(case.model, tmp_path / "changing", seed=61)
    engine.add_lora(LoRARequest("changing", 60, second.path, load_inplace=True))
    engine.add_request("new", {"prompt_token_ids": PROMPTS[0]}, SHORT, lora_request=lora)
    done = {}
    while engine.has_unfinished_requests():
        done |= {one.request_id: list(one.outputs[0].token_ids) for one in engine.step() if one.finished}
    new = greedy(merge(case.model, second), PROMPTS[0], 6)
    assert done == {"old": old, "new": new} and old != new
    engine.close()


def test_few_blocks_and_look_ahead(case: Case) -> None:
    """Requests are preempted and start again, with their own adapter."""
    for ahead in (False, True):
        with LLM(
            case.path, **(OPTIONS | {"kv_cache_memory_bytes": None, "max_model_len": 40}), max_loras=3, max_num_seqs=6,
            num_gpu_blocks_override=14, block_size=4, async_scheduling=ahead, disable_log_stats=False,
        ) as llm:  # fmt: skip
            numbers = [1, 2, 3, 0, 4, 5, 6, 1]
            prompts = [PROMPTS[2]] * len(numbers)
            longer = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            answers = ask(llm, prompts, [case.lora(number) for number in numbers], longer)
            assert [answer[:6] for answer in answers] == [case.expected(n, PROMPTS[2]) for n in numbers]
            counted = {metric.name: metric for metric in llm.get_metrics()}
            assert counted["vllm:num_preemptions"].value > 0  # type: ignore[union-attr]


FEW_BLOCKS = {"kv_cache_memory_bytes": None, "max_model_len": 40, "num_gpu_blocks_override": 14, "block_size": 4}
INVARIANT: dict[str, dict[str, Any]] = {
    "alone": {"enable_prefix_caching": False},
    "prefix cache": {"block_size": 4},
    "preemption": {**FEW_BLOCKS, "enable_prefix_caching": False, "max_num_seqs": 7},
    "look-ahead": {"async_scheduling": True, "enable_prefix_caching": False},
    "everything": {**FEW_BLOCKS, "async_scheduling": True, "max_num_seqs": 7},
}


@pytest.mark.parametrize("name", INVARIANT)
def test_a_batch_has_the_bits_of_each_alone(case: Case, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The base model and six adapters, some of them with an embedding and a head; twice, so that prefixes are found."""
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    try:
        params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=3)
        prompts: Any = [{"prompt_token_ids": PROMPTS[number % 3]} for number in range(7)]
        loras = [case.lora(number) for number in range(7)]
        with LLM(case.path, **OPTIONS, max_loras=6, enable_prefix_caching=False) as llm:
            alone = [
                bits_of(llm.generate(prompt, params, lora_request=lora, use_tqdm=False)[0])
                for prompt, lora in zip(prompts, loras, strict=True)
            ]
        assert len({str(one) for one in alone}) == 7
        with LLM(case.path, **(OPTIONS | INVARIANT[name]), max_loras=6, disable_log_stats=False) as llm:
            for _ in range(2):
                together = llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
                assert [bits_of(one) for one in together] == alone
            counted = {metric.name: metric for metric in llm.get_metrics()}
            if "num_gpu_blocks_override" in INVARIANT[name]:
                assert counted["vllm:num_preemptions"].value > 0  # type: ignore[union-attr]
            if name == "prefix cache":
                assert sum(one.num_cached_tokens or 0 for one in together) > 0
    finally:
        monkeypatch.undo()
        env.forget_all()


def bits_of(answer: Any) -> list[dict[int, float]]:
    """The log probabilities of every step, by token."""
    steps = answer.outputs[0].logprobs
    assert len(steps) == len(answer.outputs[0].token_ids)
    return [{token: one.logprob for token, one in step.items()} for step in steps]


def test_what_cannot_be_read_fails_alone(case: Case, llm: LLM, tmp_path: Path) -> None:
    large = write_adapter(case.model, tmp_path / "large", rank=16)
    wrong = LoRARequest("large", 90, large.path)
    with pytest.raises(InputError, match=r"'large'.*max_lora_rank \(8\)"):
        ask(llm, PROMPTS[:1], wrong)
    with pytest.raises(InputError, match="not a folder"):
        llm.add_lora(LoRARequest("gone", 91, str(tmp_path / "nowhere")))
    with pytest.raises(InputError, match="max_lora_rank"):
        llm.add_lora(wrong)
    assert not {90, 91} & llm.list_loras()
    assert ask(llm, PROMPTS, case.lora(1)) == [case.expected(1, prompt) for prompt in PROMPTS]
    large = write_adapter(case.model, tmp_path / "large", rank=4, seed=9)  # put right, and tried again
    assert ask(llm, PROMPTS[:1], wrong) == [case.answer(large, PROMPTS[0])]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object, "lora_request"), ("a1", "lora_request"), ([None], "1 lora_request were given for 3 prompts"),
        (["a1", None, None], "lora_request"), ({"lora_name": "a"}, "lora_request"),
    ],
    ids=["a type", "a name", "too few", "names", "a mapping"],
)  # fmt: skip
def test_what_is_no_adapter_is_refused(llm: LLM, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        ask(llm, PROMPTS, value)
    assert not llm.llm_engine.has_unfinished_requests()


def test_without_enable_lora_a_request_is_refused(case: Case) -> None:
    with LLM(case.path, **(OPTIONS | {"enable_lora": False})) as llm:
        with pytest.raises(InputError, match="enable_lora=True"):
            ask(llm, PROMPTS[:1], case.lora(1))
        assert ask(llm, PROMPTS[:1], None) == [case.expected(0, PROMPTS[0])]


def test_pins(case: Case, llm: LLM) -> None:
    assert llm.add_lora(case.lora(1)) and llm.pin_lora(1)
    with pytest.raises(InputError, match="one slot must stay"):
        llm.add_lora(case.lora(2))
        llm.pin_lora(2)
    with pytest.raises(InputError, match="lora_int_id 77"):
        llm.pin_lora(77)
    for number in (2, 3, 4):
        assert ask(llm, PROMPTS[:1], case.lora(number)) == [case.expected(number, PROMPTS[0])]
    assert 1 in llm.list_loras()
    llm.remove_lora(1)


def test_a_search_with_an_adapter(case: Case, llm: LLM) -> None:
    prompt: Any = [{"prompt_token_ids": PROMPTS[2]}] * 2
    found = llm.beam_search(prompt, BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True), [None, case.lora(3)])
    answers = [one.sequences[0].tokens[len(PROMPTS[2]) :] for one in found]
    assert answers == [case.expected(0, PROMPTS[2])[:4], case.expected(3, PROMPTS[2])[:4]]


def test_copies_are_let_go(case: Case, llm: LLM) -> None:
    """As many adapters as ever pass through, the worker has its slots and its copies, and no more."""
    worker: Any = llm.llm_engine.front.client.loop.executor.worker
    for number in range(1, 7):
        ask(llm, PROMPTS[1:2], case.lora(number))
    copies = worker.adapters._copies
    watched = [weakref.ref(one) for one in copies.values()]
    assert len(watched) <= 3
    for number in range(1, 7):
        ask(llm, PROMPTS[1:2], case.lora(number))
    gc.collect()
    assert len(worker.adapters._copies) <= 3 and sum(one() is not None for one in watched) <= 3


def test_an_engine_in_a_process_of_its_own(case: Case) -> None:
    args = AsyncEngineArgs(model=case.path, **OPTIONS, max_loras=2, disable_log_stats=True)

    async def go() -> None:
        engine = AsyncLLM.from_engine_args(args)
        try:

            async def one(number: int) -> list[int]:
                prompt: Any = {"prompt_token_ids": PROMPTS[0]}
                tokens: list[int] = []
                async for output in engine.generate(prompt, SHORT, f"r{number}", lora_request=case.lora(number)):
                    tokens = list(output.outputs[0].token_ids)
                return tokens

            answers = await asyncio.gather(*[one(number) for number in range(5)])
            assert answers == [case.expected(number, PROMPTS[0]) for number in range(5)]
            assert await engine.add_lora(case.lora(5)) is True
            assert 5 in await engine.list_loras() and await engine.remove_lora(5) is True
            with pytest.raises(InputError, match="not a folder"):
                await engine.add_lora(LoRARequest("gone", 91, "/nowhere/at/all"))
        finally:
            engine.shutdown()

    asyncio.run(go())


def test_a_relative_path_is_one_folder_wherever_it_is_used(
    case: Case, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pin that was set through one form of the path holds for the other: nothing is read again."""
    monkeypatch.chdir(case.folder)
    relative = LoRARequest("a1", 1, "a1")
    llm.remove_lora(1)
    llm.add_lora(relative)
    llm.pin_lora(1)
    adapters = llm.llm_engine.front.client.loop.adapters  # type: ignore[attr-defined]
    loaded = adapters._by_id[1]
    for lora in (relative, case.lora(1)):
        assert ask(llm, PROMPTS[:1], lora) == [case.expected(1, PROMPTS[0])]
    assert adapters._by_id[1] is loaded and loaded.is_pinned
    assert llm.remove_lora(1)
