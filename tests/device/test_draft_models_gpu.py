"""Draft models and heads on the GPU: tokens are those of plain decoding, and drafts are those of an implementation in
plain torch.

Random heads are hardly ever right. So a `Forced` proposer stands before each: it lets the head draft, keeps what came
of it, and proposes what plain decoding said or something else. The draft model is the model with noise on its weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.base import env
from quire.drafting.proposer import NOTHING, Proposal
from quire.observe.reader import Counter
from quire.schema.step import NewRow
from quire.worker.draft_features import FeatureProposer
from quire.worker.drafters import Drafter
from tests.tiny_drafters import Oracle, eagle, eagle3, medusa, mlp_speculator, mtp
from tests.tiny_models import VOCAB, make_tiny

pytestmark = pytest.mark.gpu
COUNT, SHARE = 4, 0.6
PROMPTS = 128  # half of them greedy
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2, "ignore_eos": True, "seed": 3},
    {"temperature": 0.0, "min_tokens": 12, "logit_bias": {9: 1.0}},
    {"temperature": 0.8, "top_k": 8, "ignore_eos": True, "seed": 4},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.2, "ignore_eos": True, "seed": 5},
]
METHODS = ["draft_model", "medusa", "mlp_speculator", "eagle", "eagle3", "mtp"]
Texts = dict[tuple[int, ...], list[int]]  # by prompt: prompt and answer


@dataclass
class Made:
    """Checkpoints of a method."""

    folder: Path
    keys: dict[str, Any]
    model: Any  # transformers'
    oracle: Oracle | None = None
    taps: Sequence[int] = ()  # layers whose input the drafter reads; none: the last state


def make(method: str, folder: Path) -> Made:
    own, draft = folder / "model", folder / "draft"
    keys = {"method": method, "num_speculative_tokens": COUNT}
    if method == "mtp":
        model = make_tiny("DeepseekV3ForCausalLM", own)
        return Made(own, keys, model, mtp(own, model, "DeepseekV3ForCausalLM"))
    model, keys = make_tiny("LlamaForCausalLM", own, num_hidden_layers=7), {**keys, "model": str(draft)}
    table, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    match method:
        case "draft_model":
            noisy = make_tiny("LlamaForCausalLM", draft, num_hidden_layers=7)
            torch.manual_seed(1)
            with torch.no_grad():
                for parameter in noisy.parameters():
                    parameter += 0.005 * torch.randn_like(parameter)
            noisy.save_pretrained(draft)
            return Made(own, keys, model)
        case "medusa":
            return Made(own, keys, model, medusa(draft, head))
        case "mlp_speculator":
            return Made(own, keys, model, mlp_speculator(draft, tied=False))
        case "eagle":
            return Made(own, keys, model, eagle(draft, table, head, own=False))
    return Made(own, keys, model, eagle3(draft, table, head), (2, 3, 4))


def prompts() -> list[list[int]]:
    rng = random.Random(2)
    begin = [rng.randrange(4, VOCAB) for _ in range(40)]
    tails = [[rng.randrange(4, VOCAB) for _ in range(rng.choice((2, 5, 16, 40)))] for _ in range(PROMPTS)]
    return [begin * (i % 3 == 0) + tail for i, tail in enumerate(tails)]


class Forced:
    """Of its drafts as many as `SHARE` are right."""

    def __init__(self, own: Any, texts: Texts) -> None:
        self._own, self._texts, self._rng = own, texts, random.Random(5)
        self._said: dict[str, list[int]] = {}
        self._whole: dict[str, list[int]] = {}
        self.drafted: list[tuple[list[int], int, list[int]]] = []  # text, where it begins for the drafter, drafts

    def begin(self, new: NewRow) -> None:
        self._said[new.request_id] = list(new.token_ids)
        self._whole[new.request_id] = self._texts.get(tuple(new.token_ids[: new.num_prompt_tokens]), [])
        self._own.begin(new)

    def a_state(self) -> Tensor:
        state: Tensor = self._own.a_state()
        return state

    def read(self, request_id: str, start: int, states: Tensor) -> None:
        self._own.read(request_id, start, states)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._said[request_id] += token_ids
        self._own.extend(request_id, token_ids)

    def end(self, request_id: str) -> None:
        self._said.pop(request_id, None)
        self._own.end(request_id)

    def propose(self, request_ids: Sequence[str], count: int) -> list[Proposal]:
        some = [name for name in request_ids if self._rng.random() < 0.8]  # others catch up later
        for name, proposal in zip(some, self._own.propose(some, count), strict=True):
            base = self._own._texts[name].base if isinstance(self._own, FeatureProposer) else 0
            if proposal.token_ids:
                self.drafted.append((list(self._said[name]), base, proposal.token_ids))
        return [self._forced(name, count) for name in request_ids]

    def _forced(self, name: str, count: int) -> Proposal:
        at = len(self._said[name])
        ahead = self._whole[name][at : at + count]
        drafts = [token if self._rng.random() < SHARE else (token + 1) % VOCAB for token in ahead]
        return Proposal(drafts) if drafts else NOTHING


def answers(made: Made, dtype: str, speculative: dict[str, Any] | None, **options: Any) -> tuple[Texts, float]:
    """Texts, and how many drafts were right."""
    given = prompts()
    params = [
        SamplingParams(max_tokens=20 + i % 20, detokenize=False, **PARAMS[i % len(PARAMS)]) for i in range(len(given))
    ]
    with LLM(
        str(made.folder), dtype=dtype, skip_tokenizer_init=True, max_model_len=160, max_num_seqs=24, seed=0,
        max_num_batched_tokens=96, disable_log_stats=False, speculative_config=speculative,
        kv_cache_memory_bytes=64 << 20, **options,
    ) as llm:  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in given], params, use_tqdm=False)
        found = {one.name: one.value for one in llm.get_metrics() if isinstance(one, Counter)}
    texts = {
        tuple(prompt): [*prompt, *output.outputs[0].token_ids] for prompt, output in zip(given, outputs, strict=True)
    }
    return texts, found.get("vllm:spec_decode_num_accepted_tokens", 0)


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[[Texts], list[Forced]]:
    """Drafters that are made from here on are forced to say these texts."""
    plain = Drafter.proposer

    def begin(texts: Texts) -> list[Forced]:
        made: list[Forced] = []

        def proposer(self: Drafter, *args: Any) -> Forced:
            made.append(Forced(plain(self, *args), texts))
            return made[-1]

        monkeypatch.setattr(Drafter, "proposer", proposer)
        return made

    return begin


@torch.no_grad()
def check_drafts(made: Made, drafted: list[tuple[list[int], int, list[int]]]) -> None:
    """Some of them against the oracle, by the states that transformers computes."""
    assert made.oracle is not None and len(drafted) > 40
    for text, base, drafts in drafted[:: max(5, len(drafted) // 60)]:
        hidden = made.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        states = torch.cat([hidden[i][0] for i in made.taps or [-1]], -1)[base : len(text) - 1]
        assert drafts == made.oracle(text, states, COUNT), (len(text), base)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_plain_decoding(
    method: str,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    force: Callable[[Texts], list[Forced]],
) -> None:
    monkeypatch.setenv("QUIRE_BATCH_INVARIANT", "1")
    env.forget_all()
    made = make(method, tmp_path)
    plain, _ = answers(made, dtype, None)
    assert len(plain) == PROMPTS
    found, _ = answers(made, dtype, made.keys)  # adaptive
    assert found == plain
    every = {**made.keys, "adaptive": False}
    if method == "draft_model":
        found, num_right = answers(made, dtype, every)
        assert found == plain and num_right > 100
        return
    for options in ({}, {"enforce_eager": True}, {"async_scheduling": False}):
        forced = force(plain)
        found, num_right = answers(made, dtype, every, **options)
        assert found == plain and num_right > 100, options
        if dtype == "float32" and not options:
            check_drafts(made, forced[-1].drafted)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=str)
def test_a_draft_model_with_the_models_weights_is_right(tmp_path: Path, options: dict[str, Any]) -> None:
    """Where graphs of any mix read what it has not drafted (not in batch-invariant mode), in longer and shorter
    pieces."""
    made = make("medusa", tmp_path)
    keys = {"method": "draft_model", "model": str(made.folder), "num_speculative_tokens": COUNT, "adaptive": False}
    with LLM(
        str(made.folder), dtype="float32", skip_tokenizer_init=True, max_model_len=160, max_num_seqs=8,
        disable_log_stats=False, speculative_config=keys, kv_cache_memory_bytes=64 << 20, **options,
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], params, use_tqdm=False)
        found = {one.name: one.value for one in llm.get_metrics() if isinstance(one, Counter)}
    num_tokens = found["vllm:spec_decode_num_draft_tokens"]
    assert found["vllm:spec_decode_num_accepted_tokens"] > 0.9 * num_tokens > 400
