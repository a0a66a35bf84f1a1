"""Drafters that read hidden states, end to end: their drafts are those of an implementation in plain torch, and answers
are those of plain decoding, token for token, whichever of their drafts are right.

Random drafters are hardly ever right. So a `Forced` proposer stands before each: it lets the drafter draft, compares
that with the oracle, and proposes what plain decoding said, something else, or half of each.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config import EngineArgs
from quire.drafting.proposer import NOTHING, Proposal
from quire.schema.errors import CheckpointError, ConfigError, NotBuiltError
from quire.schema.messages import EngineRequest
from quire.schema.params import ResolvedParams
from quire.schema.step import NewRow
from quire.worker.draft_features import FeatureProposer
from quire.worker.drafters import Drafter, load_drafter
from quire.worker.main import PARTS
from tests.engine.test_drafts import LENGTH, Engine, Found, ask, same_bits
from tests.engine.test_speculative import Run, answers, disturb
from tests.tiny_drafters import MTP_FAMILIES, Oracle, eagle, eagle3, medusa, mlp_speculator, mtp
from tests.tiny_models import VOCAB, make_tiny

__all__ = ["same_bits"]

COUNT = 4
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2, "ignore_eos": True},
    {"temperature": 0.8, "top_k": 8, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"temperature": 0.8, "repetition_penalty": 1.2, "logprobs": 0, "ignore_eos": True},
    {"temperature": 0.0, "min_tokens": 12, "bad_words_token_ids": [[5], [6, 7]], "logit_bias": {9: 1.0}},
    {"temperature": 0.8, "min_p": 0.1, "stop_token_ids": (21,), "prompt_logprobs": 1},
]
KINDS: dict[str, tuple[str, Callable[..., Oracle], dict[str, Any]]] = {
    "medusa": ("medusa", medusa, {}),
    "medusa with the model's head": ("medusa", medusa, {"bare": True}),
    "medusa converted": ("medusa", medusa, {"converted": True, "depth": 1}),
    "mlp_speculator": ("mlp_speculator", mlp_speculator, {"tied": False}),
    "mlp_speculator tied": ("mlp_speculator", mlp_speculator, {"tied": True}),
    "eagle": ("eagle", eagle, {"own": False}),
    "eagle with ends": ("eagle", eagle, {"own": True}),
    "eagle of the library": ("eagle", eagle, {"own": False, "library": True}),
    "eagle3": ("eagle3", eagle3, {}),
    "eagle3 of the library": ("eagle3", eagle3, {"library": True, "taps": [0, 1, 5]}),
}
METHODS = ["medusa", "mlp_speculator", "eagle", "eagle3", "mtp"]


def requests(count: int = 20) -> list[EngineRequest]:
    """Some prompts begin alike."""
    rng = random.Random(3)
    begin = [rng.randrange(4, VOCAB) for _ in range(40)]
    made = []
    for i in range(count):
        prompt = [rng.randrange(4, VOCAB) for _ in range(rng.choice((1, 5, 16, 40)))]
        made.append(ask(f"r{i}", begin * (i % 3 == 0) + prompt, rng.randint(10, 24), **PARAMS[i % len(PARAMS)]))
    return made


@dataclass
class Kind:
    """A drafter, and what is needed to know what it should draft."""

    drafter: Drafter
    oracle: Oracle
    engine: Engine
    states_of: Callable[[Sequence[int]], Tensor]  # of a text, as the drafter reads them
    plain: Found
    keys: dict[str, Any]
    asked: list[EngineRequest] = field(default_factory=requests)
    compared: float = 0.2  # of its drafts


class Forced:
    """`share`: of the drafts that are right."""

    def __init__(self, kind: Kind, own: Any, share: float) -> None:
        self._kind, self._own, self._share = kind, own, share
        self._rng = random.Random(5)
        prompts = {one.request_id: list(one.prompt_token_ids) for one in kind.asked}
        self._whole = {name: prompts[name] + said for name, (said, _, _) in kind.plain.items()}
        self._states: dict[str, Tensor] = {}
        self._texts: dict[str, list[int]] = {}
        self.num_compared = self.num_begun_late = 0

    def begin(self, new: NewRow) -> None:
        self._texts[new.request_id] = list(new.token_ids)
        self._own.begin(new)

    def a_state(self) -> Tensor:
        return self._own.a_state()

    def read(self, request_id: str, start: int, states: Tensor) -> None:
        self._own.read(request_id, start, states)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._texts[request_id] += token_ids
        self._own.extend(request_id, token_ids)

    def end(self, request_id: str) -> None:
        self._texts.pop(request_id, None)
        self._own.end(request_id)

    def propose(self, request_ids: Sequence[str], count: int) -> list[Proposal]:
        some = [name for name in request_ids if self._rng.random() < 0.8]  # others catch up later
        proposals = dict(zip(some, self._own.propose(some, count), strict=True))
        assert all(len(one.token_ids) == count for one in proposals.values()), "there is a state for every row"
        return [self._forced(name, proposals.get(name, NOTHING), count) for name in request_ids]

    def _forced(self, name: str, proposal: Proposal, count: int) -> Proposal:
        text, whole = self._texts[name], self._whole[name]
        is_over = len(text) > len(whole)  # it has ended, which is not known yet where it is planned
        assert is_over or text == whole[: len(text)]
        if proposal.token_ids and not is_over and self._rng.random() < self._kind.compared:
            base = self._own._texts[name].base if isinstance(self._own, FeatureProposer) else 0
            if name not in self._states:
                self._states[name] = self._kind.states_of(whole)
            states = self._states[name][base : len(text) - 1]
            assert proposal.token_ids == self._kind.oracle(text, states, count), (name, len(text), base)
            self.num_compared += 1
            self.num_begun_late += base > 0
        ahead = whole[len(text) : len(text) + count]
        return Proposal([token if self._rng.random() < self._share else (token + 1) % VOCAB for token in ahead])


class ForcedDrafter:
    """In the place of a Drafter."""

    def __init__(self, kind: Kind, share: float) -> None:
        self._kind, self._share = kind, share

    def proposer(self, layout: Any, length: int) -> Forced:
        self.forced = Forced(self._kind, self._kind.drafter.proposer(layout, length), self._share)
        return self.forced

    def inner_states(self) -> Any:
        return self._kind.drafter.inner_states()


def make_engine(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), dtype="float32", skip_tokenizer_init=True, **options)


def load(engine: Engine, folder: Path, keys: dict[str, Any]) -> Drafter:
    args = EngineArgs(
        model=str(folder), speculative_config=keys, dtype="float32", skip_tokenizer_init=True,
        max_model_len=LENGTH, max_num_seqs=8, max_num_batched_tokens=64, block_size=16,
    )  # fmt: skip
    worker = engine.executor.worker
    made = load_drafter(args.create_engine_config(), worker.kernels, PARTS, worker.get_model())
    assert made is not None
    return made


def states_by(model: Any, taps: Sequence[int]) -> Callable[[Sequence[int]], Tensor]:
    """Most texts are asked for by many tests."""
    known: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def states(text: Sequence[int]) -> Tensor:
        if (key := tuple(text)) not in known:
            hidden = model(torch.tensor([key]), output_hidden_states=True).hidden_states
            known[key] = torch.cat([hidden[i][0] for i in taps or [-1]], -1)
        return known[key]

    return states


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, same_bits: None) -> Iterator[tuple[Engine, Path, Any, Found]]:
    folder = tmp_path_factory.mktemp("llama")
    model = make_tiny("LlamaForCausalLM", folder, num_hidden_layers=7)
    engine = make_engine(folder)
    yield engine, folder, model, answers(engine, requests(), None).found
    engine.close()


@pytest.fixture(scope="module")
def kinds(llama: tuple[Engine, Path, Any, Found], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kind]:
    engine, folder, model, plain = llama
    made: dict[str, Kind] = {}
    readers: dict[tuple[int, ...], Callable[[Sequence[int]], Tensor]] = {}

    def kind_of(name: str) -> Kind:
        if name in made:
            return made[name]
        method, make, more = KINDS[name]
        draft = tmp_path_factory.mktemp("draft")
        table, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
        ends = {"medusa": (head,), "mlp_speculator": ()}.get(method, (table, head))
        oracle = make(draft, *ends, **more)
        keys = {"method": method, "model": str(draft), "num_speculative_tokens": COUNT, "adaptive": False}
        drafter = load(engine, folder, keys)
        taps = tuple(drafter.model.taps) if method == "eagle3" else ()
        states_of = readers.setdefault(taps, states_by(model, taps))
        made[name] = Kind(drafter, oracle, engine, states_of, plain, keys)
        return made[name]

    return kind_of


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory, same_bits: None) -> Iterator[Kind]:
    kind = mtp_kind(tmp_path_factory.mktemp("mtp"), "DeepseekV3ForCausalLM")
    yield kind
    kind.engine.close()


def mtp_kind(folder: Path, family: str, count: int = 20) -> Kind:
    model = make_tiny(family, folder)
    oracle = mtp(folder, model, family)
    keys = {"method": "mtp", "num_speculative_tokens": COUNT, "adaptive": False}
    engine = make_engine(folder, speculative_config=keys)  # of which a model with states keeps some after drafts
    return Kind(
        load(engine, folder, keys),
        oracle,
        engine,
        states_by(model, ()),
        answers(engine, requests()[:count], None).found,
        keys,
    )


@pytest.fixture(scope="module")
def of(kinds: Callable[[str], Kind], deepseek: Kind) -> Callable[[str], Kind]:
    return lambda name: deepseek if name == "mtp" else kinds(name)


def check(kind: Kind, share: float, count: int = 20, **settings: Any) -> Forced:
    """Answers under forced acceptance; some of the drafter's own drafts are compared on the way."""
    forced = ForcedDrafter(kind, share)
    run = answers(kind.engine, requests()[:count], kind.keys, drafter=forced, **settings)
    assert run.found == {name: kind.plain[name] for name in run.found} and len(run.found) == count
    assert run.num_accepted > 4 * count * share if share else not run.num_accepted
    assert forced.forced.num_compared > count / 4
    return forced.forced


@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_those_of_the_oracle_and_answers_those_of_plain_decoding(
    of: Callable[[str], Kind], method: str
) -> None:
    check(of(method), 0.6)


@pytest.mark.parametrize("method", METHODS)
def test_whatever_is_accepted_and_however_steps_are_planned(of: Callable[[str], Kind], method: str) -> None:
    """No draft and all of them; with look-ahead, and with prompts in pieces."""
    check(of(method), 0.0, 6, depth=2)
    check(of(method), 1.0, 8, max_num_batched_tokens=9)


@pytest.mark.parametrize("method", METHODS)
def test_what_the_prefix_cache_holds_has_no_states(of: Callable[[str], Kind], method: str) -> None:
    """A drafter with keys and values begins where the model began to compute."""
    forced = check(of(method), 0.6, 12, prefix_caching=True, depth=2)
    assert (forced.num_begun_late > 0) is isinstance(forced._own, FeatureProposer)


@pytest.mark.parametrize("method", METHODS)
def test_under_load_with_aborts_and_preemption_nothing_is_lost(of: Callable[[str], Kind], method: str) -> None:
    kind = of(method)
    forced = ForcedDrafter(kind, 0.4)
    depth = 1 + METHODS.index(method) % 2
    disturb(Run(kind.engine, kind.keys, forced, depth=depth), kind.plain, requests(), depth)
    own = forced.forced._own
    assert forced.forced.num_compared > 10
    if isinstance(own, FeatureProposer):
        assert not own._texts and not own._memory.computed, "nothing is kept of rows that left"


@pytest.mark.parametrize("name", [name for name in KINDS if name not in METHODS])
def test_drafts_of_other_layouts(kinds: Callable[[str], Kind], name: str) -> None:
    check(kinds(name), 0.6, 8)


@pytest.mark.parametrize("family", [family for family in MTP_FAMILIES if not family.startswith("Deepseek")])
def test_multi_token_prediction_of_other_families(tmp_path: Path, family: str) -> None:
    kind = mtp_kind(tmp_path, family, 6)
    check(kind, 0.6, 6)
    kind.engine.close()


@pytest.mark.parametrize("method", METHODS)
def test_texts_that_go_on_as_drafted(of: Callable[[str], Kind], method: str) -> None:
    """As far as drafts were right; what was computed for wrong ones is noise."""
    kind, rng = of(method), random.Random(method)
    proposer: Any = kind.drafter.proposer(kind.engine.layout, LENGTH)
    texts = {name: [rng.randrange(4, VOCAB) for _ in range(count)] for name, count in (("a", 5), ("b", 40), ("c", 17))}
    drafts: dict[str, list[int]] = {name: [] for name in texts}
    for name, text in texts.items():
        proposer.begin(row_of(name, text))
        proposer.read(name, 0, kind.states_of(text)[:-1])
    for _ in range(8):
        for name, text in texts.items():
            right = rng.randint(0, len(drafts[name]))
            new = [*drafts[name][:right], rng.randrange(4, VOCAB)]
            states = kind.states_of([*text, *new])[len(text) - 1 : -1]
            proposer.read(
                name, len(text) - 1, torch.cat((states, torch.randn(len(drafts[name]) - right, states.shape[1])))
            )
            proposer.extend(name, new)
            text += new
        for name, proposal in zip(texts, proposer.propose(list(texts), COUNT), strict=True):
            drafts[name] = proposal.token_ids
            assert drafts[name] == kind.oracle(texts[name], kind.states_of(texts[name])[:-1], COUNT)


def test_reloading_reads_the_drafter_again(kinds: Callable[[str], Kind]) -> None:
    kind = kinds("eagle")
    worker, model = kind.engine.executor.worker, kind.drafter.model
    before = model.fc.weight.clone()
    model.fc.weight.data.zero_()
    worker._drafter = kind.drafter
    try:
        worker.reload_weights()
    finally:
        worker._drafter = None
    assert torch.equal(model.fc.weight, before)
    check(kind, 0.6, 8)


def test_states_are_bounded(kinds: Callable[[str], Kind]) -> None:
    """Rows that are never drafted for keep few states, and are drafted for from there on."""
    kind = kinds("eagle")
    proposer: Any = kind.drafter.proposer(kind.engine.layout, LENGTH)
    text = [7] * 150
    states = kind.states_of(text)
    for name in ("a", "b"):
        proposer.begin(row_of(name, text[:-1]))
    for start in range(0, 148, 4):
        proposer.read("a", start, states[start : start + 4])
        proposer.read("b", start, states[start : start + 4])
        assert sum(one.count for one in proposer._texts.values()) <= 2 * 64
    for name in ("a", "b"):
        proposer.read(name, 148, states[148:149])
        proposer.extend(name, [7])
        base = proposer._texts[name].base
        drafts = proposer.propose([name], COUNT)[0].token_ids
        assert base > 90 and drafts == kind.oracle(text, states[base:149], COUNT)
    proposer.extend("a", [7] * 20)
    assert proposer.behind("a") is None, "it has become too long"
    proposer.end("b")
    assert not proposer._memory.computed


def row_of(name: str, text: list[int]) -> NewRow:
    return NewRow(
        request_id=name, epoch=0, token_ids=tuple(text), num_prompt_tokens=len(text), params=ResolvedParams(), seed=0,
    )  # fmt: skip


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("name", "edit", "config", "error", "words"),
    [
        ("eagle", lambda t: t.pop("fc.weight"), {}, CheckpointError, "1 tensor is missing .fc.weight"),
        ("eagle", lambda t: t.update(more=torch.ones(2)), {}, CheckpointError, "1 tensor has no place in it .more"),
        ("eagle3", lambda t: t.update(d2t=t["d2t"] + 300), {}, CheckpointError, "'d2t' names the tokens .* has 320"),
        ("eagle3", lambda t: None, {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, ConfigError, "in rising order"),
        ("eagle3", lambda t: None, {"eagle_aux_hidden_state_layer_ids": [1, 7]}, ConfigError, "model, which has 7"),
        ("eagle3", lambda t: None, {"eagle_aux_hidden_state_layer_ids": "all"}, ConfigError, "up to 16 numbers"),
        ("eagle3", lambda t: None, {"draft_vocab_size": 100}, CheckpointError, "has shape .200"),
        ("mlp_speculator", lambda t: None, {"inner_dim": 40}, CheckpointError, "has shape"),
        ("eagle", lambda t: None, {"num_hidden_layers": 4000}, CheckpointError, "= 4000, .* its files have .* bytes"),
        ("mlp_speculator", lambda t: None, {"inner_dim": 1 << 30}, CheckpointError, "describes at least .* weights"),
        ("mlp_speculator", lambda t: None, {"n_predict": 1 << 20}, CheckpointError, "from 1 to 64"),
        ("medusa converted", lambda t: None, {"num_heads": 5}, CheckpointError, "2 tensors are missing"),
        ("medusa converted", lambda t: t["token_map"].fill_(320), {}, CheckpointError, "'token_map' names the tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_is_said_once(
    llama: tuple[Engine, Path, Any, Found],
    tmp_path: Path,
    name: str,
    edit: Callable[[dict[str, Tensor]], Any],
    config: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    engine, folder, model, _ = llama
    method, make, more = KINDS[name]
    ends = (model.model.embed_tokens.weight.data, model.lm_head.weight.data)
    make(tmp_path, *{"medusa": ends[1:], "mlp_speculator": ()}.get(method, ends), **more)
    change(tmp_path, edit)
    about = tmp_path / "config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | config))
    with pytest.raises(error, match=words):
        load(engine, folder, {"method": method, "model": str(tmp_path), "num_speculative_tokens": 1})


def test_multi_token_prediction_of_an_unknown_family(llama: tuple[Engine, Path, Any, Found]) -> None:
    engine, folder, _, _ = llama
    args = EngineArgs(
        model=str(folder), speculative_config={"method": "mtp"}, hf_overrides={"num_nextn_predict_layers": 1},
        device="cpu", dtype="float32", skip_tokenizer_init=True,
    )  # fmt: skip
    worker = engine.executor.worker
    with pytest.raises(
        NotBuiltError, match=r"method 'mtp' is built for DeepseekV3.*, and this model is LlamaForCausalL"
    ):
        load_drafter(args.create_engine_config(), worker.kernels, PARTS, worker.get_model())
