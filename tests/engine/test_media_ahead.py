"""Media of a list of prompts are processed ahead: answers are those of single prompts, the engine runs meanwhile, and a
prompt that is refused ends the call and leaves nothing behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire import LLM, SamplingParams
from quire.llm import media_ahead
from quire.schema.errors import InputError
from tests.media.tiny_llava import TinyLlava

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("llava")
    TinyLlava(folder)
    with LLM(str(folder), dtype="float32", max_model_len=256, max_num_seqs=4) as made:
        yield made


def draw(seed: int) -> dict[str, Any]:
    pixels = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), np.uint8)
    return {"prompt": f"user: <image>\nwhat {seed}", "multi_modal_data": {"image": Image.fromarray(pixels)}}


def answers(llm: LLM, prompts: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_answers_are_those_of_single_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_ahead, "AHEAD", 3)
    prompts = [draw(seed) if seed % 3 else {"prompt": f"user: only {seed}"} for seed in range(11)]
    assert answers(llm, prompts) == [answers(llm, [one])[0] for one in prompts]


def test_the_engine_runs_while_media_are_processed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    media = llm.llm_engine.front.inputs.media
    process, has_run, waited = media.family.process, threading.Event(), []
    loop: Any = llm.llm_engine.front.client.loop
    plan = loop.scheduler.plan

    def planned() -> Any:
        if llm.llm_engine.get_num_unfinished_requests():
            has_run.set()
        return plan()

    def processed(modality: str, value: Any, *rest: Any) -> Any:
        if value.size == (50, 50):  # the last one waits for the engine
            waited.append(has_run.wait(60))
        return process(modality, value, *rest)

    monkeypatch.setattr(loop.scheduler, "plan", planned)
    monkeypatch.setattr(media.family, "process", processed)
    last = {"prompt": "user: <image>\nlast", "multi_modal_data": {"image": Image.new("RGB", (50, 50))}}
    assert len(answers(llm, [draw(100), draw(101), last])) == 3
    assert waited == [True]


def test_more_items_than_the_queue_holds(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that come later leave room for those before them."""
    media = llm.llm_engine.front.inputs.media
    process = media.family.process

    def slowly(*given: Any) -> Any:
        time.sleep(0.1)
        return process(*given)

    monkeypatch.setattr(media.family, "process", slowly)
    monkeypatch.setattr(media.workers, "_most", 3)
    monkeypatch.setattr(media_ahead, "AHEAD", 2)
    prompts = []
    for seed in range(400, 408):
        one, other = draw(seed), draw(seed + 100)
        images = [one["multi_modal_data"]["image"], other["multi_modal_data"]["image"]]
        prompts.append({"prompt": "user: <image> <image>", "multi_modal_data": {"image": images}})
    assert len(answers(llm, prompts)) == len(prompts)


def test_a_prompt_that_is_refused_ends_the_call(llm: LLM) -> None:
    wrong = {"prompt": "user: <image>", "multi_modal_data": {"image": b"no image"}}
    with pytest.raises(InputError):
        answers(llm, [draw(200), draw(201), wrong, draw(202)])
    assert not llm.llm_engine.get_num_unfinished_requests()
    assert len(answers(llm, [draw(200), draw(203)])) == 2


def test_an_item_may_be_named_by_a_later_prompt(llm: LLM) -> None:
    first = draw(300) | {"multi_modal_uuids": {"image": ["a"]}}
    later = {**first, "multi_modal_data": {"image": [None]}}
    both = answers(llm, [first, later, {**later, "multi_modal_data": {"image": None}}])
    assert both[0] == both[1] == both[2]
