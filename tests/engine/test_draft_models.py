"""Models that draft, end to end: their drafts are those of transformers' greedy decoding, and answers are those of
plain decoding, token for token, however requests come and go.

The drafter is the model itself with noise on its weights, so that some of its drafts are right and some are not.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from vllm import LLM, SamplingParams

from quire.config import EngineArgs
from quire.schema.errors import ConfigError, ModelNotFoundError, NotBuiltError
from quire.schema.messages import EngineRequest
from quire.schema.params import ResolvedParams
from quire.schema.step import NewRow
from quire.worker.drafters import Drafter, load_drafter
from quire.worker.main import PARTS
from tests.engine.test_drafts import LENGTH, Engine, Found, ask, same_bits
from tests.engine.test_speculative import Run, answers, disturb
from tests.tiny_models import VOCAB, make_tiny, write_tiny

__all__ = ["same_bits"]

COUNT = 4
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.0, "ignore_eos": True, "logprobs": 2, "repetition_penalty": 1.1},
    {"temperature": 0.3, "top_k": 8, "ignore_eos": True},
    {"temperature": 0.4, "top_p": 0.9, "logprobs": 0, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"temperature": 0.0, "min_tokens": 12, "bad_words_token_ids": [[5], [6, 7]], "logit_bias": {9: 1.0}},
    {"temperature": 0.8, "min_p": 0.3, "stop_token_ids": (21,), "prompt_logprobs": 1},
]


def requests(count: int = 32) -> list[EngineRequest]:
    rng = random.Random(3)
    return [
        ask(
            f"r{i}", [rng.randrange(4, VOCAB) for _ in range(rng.choice((1, 5, 16, 40)))], rng.randint(10, 30),
            **PARAMS[i % len(PARAMS)],
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """Of the model and of its drafter, and the drafter as transformers has it."""
    model, draft = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("draft")
    write_tiny("MistralForCausalLM", model)
    theirs = make_tiny("MistralForCausalLM", draft)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    theirs.save_pretrained(draft)
    return model, draft, theirs


@pytest.fixture(scope="module")
def tiny(folders: tuple[Path, Path, Any], same_bits: None) -> Iterator[Engine]:
    made = Engine(str(folders[0]), dtype="float32", skip_tokenizer_init=True)
    yield made
    made.close()


def speculative(folder: Path, **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": COUNT, "adaptive": False, **more}


def drafter_of(engine: Engine, model: Path, keys: dict[str, Any]) -> Drafter:
    args = EngineArgs(
        model=str(model), speculative_config=keys, dtype="float32", skip_tokenizer_init=True,
        max_model_len=LENGTH, max_num_seqs=8, max_num_batched_tokens=64, block_size=16,
    )  # fmt: skip
    worker = engine.executor.worker
    made = load_drafter(args.create_engine_config(), worker.kernels, PARTS, worker.get_model())
    assert made is not None
    return made


@pytest.fixture(scope="module")
def drafter(folders: tuple[Path, Path, Any], tiny: Engine) -> Drafter:
    return drafter_of(tiny, folders[0], speculative(folders[1]))


@pytest.fixture(scope="module")
def plain(tiny: Engine) -> Found:
    return answers(tiny, requests(), None).found


@pytest.fixture(scope="module")
def parallel(folders: tuple[Path, Path, Any], tiny: Engine, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    """Drafts all tokens in one pass; a token stands for those to come."""
    draft = shutil.copytree(folders[1], tmp_path_factory.mktemp("parallel"), dirs_exist_ok=True) / "config.json"
    draft.write_text(json.dumps(json.loads(draft.read_text()) | {"pard_token": 3}))
    return drafter_of(tiny, folders[0], speculative(draft.parent, parallel_drafting=True))


@pytest.mark.parametrize("way", ["one after another", "all in one pass"])
def test_drafts_are_the_greedy_continuation(
    folders: tuple[Path, Path, Any], tiny: Engine, drafter: Drafter, parallel: Drafter, way: str
) -> None:
    """Of texts that join with prompts of any length, go on as drafted or otherwise, and leave."""
    if is_parallel := way == "all in one pass":
        drafter = parallel
    rng, theirs = random.Random(7), folders[2]
    proposer = drafter.proposer(tiny.layout, LENGTH)
    texts: dict[str, list[int]] = {}
    for turn in range(30):
        if len(texts) < 6:
            text = texts[f"t{turn}"] = [rng.randrange(4, VOCAB) for _ in range(rng.choice((1, 3, 16, 17, 90)))]
            proposer.begin(row_of(f"t{turn}", text))
        elif turn % 5 == 0:
            name = rng.choice(list(texts))
            proposer.end(name)
            del texts[name]
        names = rng.sample(list(texts), rng.randint(1, len(texts)))
        drafts = proposer.propose(names, COUNT)
        for name, (tokens, _) in zip(names, drafts, strict=True):
            oracle = at_once if is_parallel else greedy
            assert tokens == oracle(theirs, texts[name], COUNT)
        for name, (tokens, _) in zip(names, drafts, strict=True):
            right = rng.randint(0, COUNT)
            new = [*tokens[:right], *([rng.randrange(4, VOCAB)] * rng.randint(right == 0, 1))]
            proposer.extend(name, new)
            texts[name] += new
    for name in list(texts):
        proposer.end(name)


def row_of(name: str, text: list[int]) -> NewRow:
    return NewRow(
        request_id=name, epoch=0, token_ids=tuple(text), num_prompt_tokens=len(text), params=ResolvedParams(), seed=0,
    )  # fmt: skip


@torch.no_grad()
def greedy(model: Any, text: list[int], count: int) -> list[int]:
    said: list[int] = []
    for _ in range(count):
        said.append(int(model(torch.tensor([text + said])).logits[0, -1].argmax()))
    return said


@torch.no_grad()
def at_once(model: Any, text: list[int], count: int) -> list[int]:
    said: list[int] = model(torch.tensor([text + [3] * (count - 1)])).logits[0, -count:].argmax(-1).tolist()
    return said


def test_answers_with_parallel_drafts(
    tiny: Engine, parallel: Drafter, plain: Found, folders: tuple[Path, Path, Any]
) -> None:
    run = answers(tiny, requests(), speculative(folders[1]), drafter=parallel)
    assert run.found == plain and run.num_accepted > 10


@pytest.mark.parametrize("adaptive", [False, True])
def test_answers_are_those_of_plain_decoding(
    tiny: Engine, drafter: Drafter, plain: Found, folders: tuple[Path, Path, Any], adaptive: bool
) -> None:
    run = answers(tiny, requests(), speculative(folders[1], adaptive=adaptive), drafter=drafter)
    assert run.found == plain
    assert adaptive or run.num_accepted > 100, "some drafts were right"


@pytest.mark.parametrize(
    "settings", [{"depth": 2}, {"max_num_batched_tokens": 9}, {"prefix_caching": True}, {"policy": "priority"}], ids=str
)
def test_however_steps_are_planned(
    tiny: Engine, drafter: Drafter, plain: Found, folders: tuple[Path, Path, Any], settings: dict[str, Any]
) -> None:
    run = answers(tiny, requests(16), speculative(folders[1]), drafter=drafter, **settings)
    assert run.found == {name: plain[name] for name in run.found} and len(run.found) == 16
    assert run.num_accepted > 20


@pytest.mark.parametrize("depth", [1, 2])
def test_under_load_with_aborts_and_preemption_nothing_is_lost(
    tiny: Engine, drafter: Drafter, plain: Found, folders: tuple[Path, Path, Any], depth: int
) -> None:
    disturb(Run(tiny, speculative(folders[1]), drafter, depth=depth), plain, requests(), depth)


def test_without_blocks_or_room_nothing_is_drafted(tiny: Engine, folders: tuple[Path, Path, Any]) -> None:
    keys = speculative(folders[1], max_model_len=40)
    proposer = drafter_of(tiny, folders[0], keys).proposer(tiny.layout, LENGTH)
    memory = proposer._memory  # type: ignore[attr-defined]
    total = memory.num_free
    for i, count in enumerate((30, 36, 37, 38, 80)):
        proposer.begin(row_of(f"t{i}", [5] * count))
    assert [len(one.token_ids) for one in proposer.propose([f"t{i}" for i in range(5)], COUNT)] == [4, 4, 4, 0, 0]
    assert proposer.behind("t0") == 1 and proposer.behind("t4") is None  # type: ignore[attr-defined]
    proposer.extend("t0", [5] * 12)
    assert proposer.propose(["t0"], COUNT)[0].token_ids == [], "it has become too long"
    for i in range(5):
        proposer.end(f"t{i}")
    assert memory.num_free == total
    memory._free.clear()
    proposer.begin(row_of("t", [5]))
    assert proposer.propose(["t"], COUNT)[0].token_ids == [], "another text has its blocks"


def test_programs_for_vllm_run(folders: tuple[Path, Path, Any], same_bits: None) -> None:
    common: dict[str, Any] = dict(model=str(folders[0]), dtype="float32", max_model_len=128, max_num_seqs=4)
    keys = {"model": str(folders[1]), "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1, "adaptive": False}
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5, n=3, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=1, repetition_penalty=1.1),
    ]
    drafting = LLM(**common, speculative_config=keys, disable_log_stats=False)
    texts = [said(llm, params) for llm in (drafting, LLM(**common))]
    assert texts[0] == texts[1]
    metrics = {metric.name: metric for metric in drafting.get_metrics()}
    assert metrics["vllm:spec_decode_num_accepted_tokens"].value > 10  # type: ignore[attr-defined]


def said(llm: LLM, params: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate(["the river ran under an old bridge"] * len(params), params, use_tqdm=False)
    return [[(one.token_ids, one.finish_reason) for one in output.outputs] for output in outputs]


def test_memory_is_shared_by_tokens(tiny: Engine, drafter: Drafter) -> None:
    """Both hold as many tokens, and together no more than the budget."""
    specs = tiny.layout.specs
    left = drafter.leave(1 << 20, specs)
    assert left == (1 << 20) // 2, "the drafter's layers are those of the model"
    divided = [msgspec.structs.replace(spec, context_ranks=2) for spec in specs]
    assert drafter.leave(3 << 20, divided) == 1 << 20, (
        "a rank keeps half of the model's contexts, and all of the drafter's"
    )


def test_what_cannot_draft_is_said_once(folders: tuple[Path, Path, Any], tmp_path: Path) -> None:
    for name, overrides in (("LlamaForCausalLM", {"vocab_size": VOCAB + 8}), ("MambaForCausalLM", {"state_size": 8})):
        write_tiny(name, tmp_path / name, **overrides)
    (tmp_path / "empty").mkdir()
    for folder, keys, error, words in (
        ("LlamaForCausalLM", {}, ConfigError, f"vocabulary of {VOCAB + 8} tokens, and the model one of {VOCAB}"),
        ("MambaForCausalLM", {}, NotBuiltError, "recurrent states"),
        ("empty", {}, Exception, "speculative_config: draft model .*empty"),
        ("nowhere/at/all", {}, ModelNotFoundError, "speculative_config: draft model .*nowhere"),
        ("LlamaForCausalLM", {"draft_tensor_parallel_size": 2}, ConfigError, "draft_tensor_parallel_size=2"),
        (
            "LlamaForCausalLM",
            {"draft_load_config": {"format": 1}},
            ConfigError,
            "draft_load_config has no key 'format'",
        ),
        ("LlamaForCausalLM", {"quantization": "awq"}, ConfigError, "draft model .*quantization='awq'"),
    ):
        args = EngineArgs(
            model=str(folders[0]), device="cpu", speculative_config=speculative(tmp_path / folder, **keys),
        )  # fmt: skip
        with pytest.raises(error, match=words):
            args.create_engine_config()
