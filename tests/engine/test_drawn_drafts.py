"""Drafts drawn from a drafter's distributions, end to end: answers that draw are distributed as transformers says, and
those that do not are the ones of plain decoding.

A small vocabulary, so that every continuation of a prompt can be counted; drafters are random, and often wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config import EngineArgs
from quire.schema.messages import EngineRequest
from quire.schema.params import ResolvedParams
from quire.worker.drafters import Drafter, load_drafter
from quire.worker.drafts import Drafts
from quire.worker.main import PARTS
from tests import tiny_drafters
from tests.engine.test_drafts import LENGTH, Engine, same_bits
from tests.engine.test_speculative import Run, answers
from tests.products import marked
from tests.sampling.test_rejection import pearson
from tests.tiny_models import make_tiny, write_tiny

__all__ = ["same_bits"]

TOKENS, PROMPT, HEAT, KEPT, PRESENCE, DRAWS = 6, (1, 4, 2, 5), 1.6, 5, 0.4, 500
METHODS = ("draft_model", "eagle", "medusa")


@pytest.fixture(scope="module")
def few_tokens() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(tiny_drafters, "VOCAB", TOKENS)
    patch.setitem(tiny_drafters.LAYER, "vocab_size", TOKENS)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, make_tiny("LlamaForCausalLM", folder, vocab_size=TOKENS)


@pytest.fixture(scope="module")
def engine(model: tuple[Path, Any], same_bits: None) -> Iterator[Engine]:
    made = Engine(str(model[0]), dtype="float32", skip_tokenizer_init=True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def drafter_of(
    model: tuple[Path, Any], engine: Engine, few_tokens: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Drafter, dict[str, Any]]]:
    def make(method: str) -> tuple[Drafter, dict[str, Any]]:
        folder, theirs = tmp_path_factory.mktemp(method), model[1]
        ends = theirs.model.embed_tokens.weight.data, theirs.lm_head.weight.data
        if method == "draft_model":
            write_tiny("LlamaForCausalLM", folder, vocab_size=TOKENS, num_hidden_layers=1, seed=8)
        elif method == "eagle":
            tiny_drafters.eagle(folder, *ends, own=False)
        else:
            tiny_drafters.medusa(folder, ends[1], converted=True)  # which knows every second token only
        keys = {
            "method": method, "model": str(folder), "num_speculative_tokens": 3, "adaptive": False,
            "draft_sample_method": "probabilistic",
        }  # fmt: skip
        args = EngineArgs(
            model=str(model[0]), speculative_config=keys, dtype="float32", device="cpu", skip_tokenizer_init=True,
            max_model_len=LENGTH, max_num_seqs=8, max_num_batched_tokens=64, block_size=16,
        )  # fmt: skip
        worker = engine.executor.worker
        made = load_drafter(args.create_engine_config(), worker.kernels, PARTS, worker.get_model())
        assert made is not None
        return made, keys

    return make


def drawing(count: int, max_tokens: int) -> list[EngineRequest]:
    params = ResolvedParams(
        max_tokens=max_tokens, temperature=HEAT, top_k=KEPT, presence_penalty=PRESENCE, ignore_eos=True
    )
    return [
        EngineRequest(
            request_id=f"r{i}", prompt_token_ids=PROMPT, params=params, seed=i * 104729 + 1, max_tokens=max_tokens
        )
        for i in range(count)
    ]


@torch.no_grad()
def shares_after(theirs: Any, said: Tensor) -> Tensor:
    """[n, TOKENS]: of the token after [n, t], by transformers."""
    texts = torch.cat((torch.tensor(PROMPT).expand(len(said), -1), said), 1)
    logits = theirs(texts).logits[:, -1]
    logits -= PRESENCE * torch.zeros_like(logits).scatter_(1, said, 1.0)
    logits /= HEAT
    least = logits.topk(KEPT).values[:, -1:]
    return torch.softmax(logits.masked_fill(logits < least, -torch.inf), -1)


def exact(theirs: Any) -> Tensor:
    """[TOKENS, TOKENS]: of the second and the third token, whatever the first is."""
    first = shares_after(theirs, torch.zeros((1, 0), dtype=torch.int64))[0]
    every = torch.arange(TOKENS)
    second = shares_after(theirs, every[:, None])
    pairs = torch.cartesian_prod(every, every)
    third = shares_after(theirs, pairs).view(TOKENS, TOKENS, TOKENS)
    return torch.einsum("a,ab,abc->bc", first, second, third)


def counted(run: Run) -> Tensor:
    counts = torch.zeros((TOKENS, TOKENS))
    for tokens, _, _ in run.found.values():
        counts[tokens[1], tokens[2]] += 1
    return counts


@pytest.mark.parametrize("method", marked(METHODS, METHODS[:1]))
def test_answers_are_distributed_as_without_drafts(
    engine: Engine, model: tuple[Path, Any], drafter_of: Any, method: str
) -> None:
    """The first token has no draft; the second and the third have, and the third follows a second that may be kept,
    refused, or drawn after all drafts."""
    drafter, keys = drafter_of(method)
    run = answers(engine, drawing(DRAWS, 3), keys, drafter=drafter)
    statistic, bound = pearson(counted(run).flatten(), exact(model[1]).flatten())
    assert statistic < bound
    assert DRAWS / 40 < run.num_accepted < 1.9 * DRAWS, "some drafts are kept, and some are not"


def test_one_that_forgets_what_drafts_were_drawn_from_is_noticed(
    engine: Engine, model: tuple[Path, Any], drafter_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = Drafts.drawn

    def of_another(drafts: Drafts, *args: Any) -> Any:
        made = drawn(drafts, *args)
        return made and made._replace(probabilities=made.probabilities.roll(1, -1))

    monkeypatch.setattr(Drafts, "drawn", of_another)
    drafter, keys = drafter_of("draft_model")
    run = answers(engine, drawing(DRAWS, 3), keys, drafter=drafter)
    statistic, bound = pearson(counted(run).flatten(), exact(model[1]).flatten())
    assert statistic > bound


@pytest.mark.parametrize("method", METHODS)
def test_greedy_answers_are_those_of_plain_decoding(engine: Engine, drafter_of: Any, method: str) -> None:
    """Beside others that draw."""
    drafter, keys = drafter_of(method)
    greedy = ResolvedParams(max_tokens=12, temperature=0.0, presence_penalty=0.3, ignore_eos=True, logprobs=1)
    requests = drawing(12, 12)
    requests = [
        EngineRequest(
            request_id=one.request_id, prompt_token_ids=(*PROMPT, i % TOKENS), seed=one.seed, max_tokens=12,
            params=greedy if i % 2 else one.params,
        )
        for i, one in enumerate(requests)
    ]  # fmt: skip
    plain = answers(engine, requests, None).found
    run = answers(engine, requests, keys, drafter=drafter)
    assert len(run.found) == 12 and run.num_accepted > 0
    for i, one in enumerate(requests):
        assert i % 2 == 0 or run.found[one.request_id] == plain[one.request_id]
        assert len(run.found[one.request_id][0]) == 12
