"""Models that take media: greedy tokens equal transformers', however the work is cut up and whoever runs beside.

One engine per family, in process, whose steps are made smaller between runs. Answers never hold the token of media.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.checkpoint.media import MODALITIES
from quire.sched.gates import TokenBudget
from quire.sched.scheduler import Scheduler
from quire.schema.errors import InputError, NotBuiltError
from tests import seq2seq_models
from tests.media_models import (
    FAMILIES,
    IMAGE,
    NOT_SAID,
    DrawnItem,
    draw_item,
    is_greedy,
    make_model,
    prompt_of,
)
from tests.preempting import preempting
from tests.products import marked

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logit_bias=dict.fromkeys(NOT_SAID, -100.0))


HYBRIDS = ("Qwen3_5", "Lfm2Vl", "MiniCPMV4_", "MiniCPMOcr")  # prefixes of states are kept only if asked
WHOLE = ("PaliGemma",)  # prompts are computed whole, and no prefix is kept
SHORT = ("MolmoForCausalLM",)  # no block of these prompts ends within an item


class Served:
    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        self.name, self.model = name, make_model(name, folder)
        self.cached: list[int] = []  # tokens of the last prompts that were found
        if name.startswith(HYBRIDS):
            options["enable_prefix_caching"] = True
        self.llm = LLM(str(folder), dtype="float32", max_model_len=512, max_num_seqs=8, block_size=16, **options)
        self.items = [draw_item(name, self.model, seed) for seed in range(3)]

    @property
    def scheduler(self) -> Scheduler:
        loop: Any = self.llm.llm_engine.front.client.loop
        return loop.scheduler

    @property
    def prompts(self) -> list[list[Any]]:
        """With one item, several of which one is shared, none, and one twice."""
        a, b, c = self.items
        return [
            [text(1, 5), a, text(2, 9)],
            [text(3, 3), a, text(4, 4), b, text(5, 3), c, text(6, 2)],
            [text(7, 20)],
            [text(8, 2), b, text(9, 1)],
            [text(10, 1), c, text(12, 1), c, text(11, 5)],
        ]

    @property
    def longer(self) -> list[list[Any]]:
        """Prompts whose prefixes of those above end after an item, and in one."""
        return [[*self.prompts[0], text(20, 7)], [text(3, 3), self.items[0], text(21, 30)]]

    def answers(self, prompts: list[list[Any]], **more: Any) -> list[list[int]]:
        outputs = self.llm.generate([prompt_of(pieces) for pieces in prompts], GREEDY)
        self.cached = [output.num_cached_tokens or 0 for output in outputs]
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module", params=list(FAMILIES))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield Served(request.param, tmp_path_factory.mktemp("media"))


# in steps of every size, preempted, damaged: these always, the others with --long
THOROUGH = (
    "LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Gemma3ForConditionalGeneration",
    "PaliGemmaForConditionalGeneration", "Ovis2ForConditionalGeneration", "Phi4MultimodalForCausalLM",
    "Gemma3nForConditionalGeneration audio",
    "Molmo2ForConditionalGeneration", "MolmoForCausalLM", "MiniCPMV 2.6", "DeepseekVLV2ForCausalLM", "UltravoxModel",
)  # fmt: skip


@pytest.fixture(scope="module", params=marked(FAMILIES, THOROUGH))
def thorough(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield Served(request.param, tmp_path_factory.mktemp("media"))


def text(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, IMAGE) for _ in range(count)]


def test_tokens_equal_transformers(served: Served) -> None:
    prompts = served.prompts
    answers = served.answers(prompts)
    for pieces, answer in zip(prompts, answers, strict=True):
        assert is_greedy(served.name, served.model, pieces, answer)
    for pieces, answer in zip(served.longer, served.answers(served.longer), strict=True):
        assert is_greedy(served.name, served.model, pieces, answer)
    assert served.scheduler.kv.caching is not served.name.startswith(WHOLE)
    assert served.cached[0] > 0 or not served.scheduler.kv.caching
    check_chunks(served, prompts, answers, 7)


def ends_within(pieces: list[Any], num: int) -> bool:
    """So many tokens of a prompt: an item begins before their end, and ends behind it."""
    items = prompt_of(pieces).get("multi_modal_data", ())
    return any(item.offset < num < item.offset + item.length for item in items)


def check_chunks(served: Served, prompts: list[list[Any]], expected: list[list[int]], *sizes: int) -> None:
    """Answers of the first two prompts with prefix hits, and of all but the first without, in steps of these sizes."""
    budget = next(gate for gate in served.scheduler.planner.gates if isinstance(gate, TokenBudget))
    encoder = served.scheduler.planner.encoder
    assert encoder is not None
    if encoder.whole_items:
        if not served.scheduler.kv.caching:
            return  # prompts are computed whole
        sizes = tuple(max(size, 64 if encoder.joined else 20) for size in sizes)
    whole, hits = budget.most, []
    for chunk in sizes:
        budget.most = chunk
        assert served.answers(prompts[:2]) == expected[:2], f"with prefix hits, in chunks of {chunk}"
        hits += zip(prompts, served.cached, strict=False)  # the first prompt has one in the first size only
        served.llm.reset_prefix_cache()
        encoder.clear()
        assert served.answers(prompts[1:]) == expected[1:], f"in chunks of {chunk}"
    assert served.name.startswith((*WHOLE, *SHORT, *HYBRIDS)) or any(ends_within(*hit) for hit in hits)
    budget.most = whole


def test_steps_of_every_size(thorough: Served) -> None:
    prompts = [pieces for number, pieces in enumerate(thorough.prompts) if number != 3]
    check_chunks(thorough, prompts, thorough.answers(prompts), 64, 7, 1)


def test_items_that_attend_to_each_other(tmp_path: Path) -> None:
    """Of Molmo 2: text before and after them is cut, prefixes are found with the same items only, and what does not fit
    one step is refused."""
    name = "Molmo2ForConditionalGeneration"
    served = Served(name, tmp_path, max_num_batched_tokens=64)
    a, b, c = served.items
    budget = next(gate for gate in served.scheduler.planner.gates if isinstance(gate, TokenBudget))
    budget.most = 20
    for pieces in ([text(1, 50), a, text(2, 45)], [a, text(3, 33)], [text(4, 33), a]):
        (answer,) = served.answers([pieces])
        assert is_greedy(name, served.model, pieces, answer)
    budget.most = 64
    between = text(6, 5)
    cached = []
    for pieces in (
        [text(5, 20), a, between, b, text(7, 20)],
        [text(5, 20), a, between, b, text(8, 9)],  # all items are there
        [text(5, 20), a, between, c, text(7, 20)],  # an item before another one
        [text(5, 20), a, text(9, 5), b, text(7, 20)],  # other text between them
        [text(5, 20), a, between, text(7, 20)],  # none behind
    ):
        (output,) = served.llm.generate([prompt_of(pieces)], GREEDY, use_tqdm=False)
        cached.append(output.num_cached_tokens)
        assert is_greedy(name, served.model, pieces, list(output.outputs[0].token_ids))
    assert cached[0] == 0 and cached[1] >= 48 and cached[2:] == [16, 16, 16]
    with pytest.raises(InputError, match="a step takes 64 of a prompt at most; all items of a prompt are in one step"):
        served.answers([[a, text(10, 60), b]])
    served.llm.close()


def test_every_declared_family_is_tested() -> None:
    """Those of encoder-decoder models in test_encoder_decoders.py and test_florence.py."""
    others = (*seq2seq_models.FAMILIES, "Florence2ForConditionalGeneration")
    tested = {name.partition(" ")[0] for name in (*FAMILIES, *others)}
    assert {name for name, kinds in MODALITIES.items() if kinds} <= tested
    assert {name.partition(" ")[0] for name in FAMILIES} <= MODALITIES.keys()


@pytest.mark.parametrize("name", ["InternVLChatModel", "NVLM_D"])
def test_classes_of_other_repositories_are_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "model_type": "its_own"}))
    with pytest.raises(NotBuiltError, match=f"{name} is not in this version of Quire: it takes media through code"):
        LLM(str(tmp_path))


def test_preempted_answers_are_the_same(thorough: Served) -> None:
    served = thorough
    a, b, c = served.items
    prompts = [[text(30 + i, 3), item, text(40 + i, 8)] for i, item in enumerate((a, b, c, a, b, c))]
    expected = served.answers(prompts)
    served.llm.reset_prefix_cache()
    with preempting(served.scheduler) as seen:
        assert served.answers(prompts) == expected
    assert seen.count >= 2


def test_the_second_question_costs_no_encoding(thorough: Served) -> None:
    served, counts = thorough, [0, 0]
    encoder = served.scheduler.planner.encoder
    assert encoder is not None
    take = encoder.take_counts

    def counted() -> Any:
        taken = take()
        counts[0], counts[1] = counts[0] + taken.queries, counts[1] + taken.hits
        return taken

    encoder.take_counts = counted  # type: ignore[method-assign]
    item = draw_item(served.name, served.model, 9)
    served.answers([[text(1, 5), item, text(2, 9)]])
    assert counts == [1, 0]
    served.answers([[text(40, 5), item, text(2, 9)]])  # no prefix in common: the vectors are
    assert counts == [2, 1]
    served.answers([[text(40, 5), item, text(3, 9)]])  # the prefix is
    assert counts == [3, 2]
    served.llm.reset_mm_cache()
    served.llm.reset_prefix_cache()
    served.answers([[text(40, 5), item, text(3, 9)]])
    assert counts == [4, 2]
    del encoder.take_counts


def damaged(item: DrawnItem, more: int) -> DrawnItem:
    """So many places too many."""
    written = item.written
    if written:
        last = max(at for at, token in enumerate(written) if token in NOT_SAID)
        written = written[:last] + written[last : last + 1] * (1 + more) + written[last + 1 :]
    return DrawnItem(item.modality, item.arrays, item.count + more, written=written)


@pytest.mark.parametrize("more", [1, -1])
def test_an_item_that_cannot_be_encoded_fails_alone(thorough: Served, more: int) -> None:
    """Nor placed, where positions come from its grid."""
    served = thorough
    wrong, right = draw_item(served.name, served.model, 50), draw_item(served.name, served.model, 51)
    outputs = []
    for pieces in ([text(1, 5), damaged(wrong, more)], [text(3, 5), right, text(4, 3)]):
        try:
            outputs.append(served.llm.generate(prompt_of(pieces), GREEDY)[0].outputs[0])
        except Exception as error:  # noqa: BLE001
            outputs.append(error)
    assert "could not be encoded" in str(outputs[0]) or "cannot be placed" in str(outputs[0])
    assert list(outputs[1].token_ids)


def test_reloaded_weights_are_those_of_the_encoder_too(tmp_path: Path) -> None:
    name = "LlavaForConditionalGeneration"
    served = Served(name, tmp_path)
    pieces = [text(1, 5), served.items[0], text(2, 3)]
    before = served.answers([pieces])
    with torch.no_grad():
        for weight in served.model.model.multi_modal_projector.parameters():
            weight.mul_(-3.0)
    served.model.save_pretrained(tmp_path)
    served.llm.collective_rpc("reload_weights")
    assert served.llm.reset_prefix_cache()
    after = served.answers([pieces])
    assert after != before and is_greedy(name, served.model, pieces, after[0])
    served.llm.close()


def test_classes_of_transformers_take_no_media_and_live_on(tmp_path: Path) -> None:
    name = "LlavaForConditionalGeneration"
    model = make_model(name, tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=512, max_num_seqs=8, model_impl="transformers")
    with pytest.raises(Exception, match="no encoder for media"):
        llm.generate(prompt_of([text(1, 5), draw_item(name, model, 1)]), GREEDY)
    assert llm.generate(prompt_of([text(1, 5)]), GREEDY)[0].outputs[0].token_ids
    llm.close()
