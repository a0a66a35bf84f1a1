"""What a step may bring beside tokens: vectors in place of embeddings, adapters, channels of positions, several sampled
tokens of a row. Each arrives at the model, on every way a step can take; a graph that was not captured with a field is
not used for a step that has it; and a model that cannot use one says so."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from quire.layers.adapters import StepAdapters
from quire.layers.batch import Batch, GivenVectors
from quire.layers.rope import Rope, RopeKind
from quire.models.build import build_model
from quire.ops.op import Kernels
from quire.quant.plain import plain_storage
from quire.schema.errors import ConfigError, NotBuiltError
from quire.schema.params import ResolvedParams
from quire.schema.step import Grant, NewRow, StepPlan
from quire.worker.adapters import WorkerAdapters
from quire.worker.capture import Capturer
from quire.worker.device_inputs import DeviceInputs, GraphFields
from quire.worker.inputs import StepShape, sampled_places, shape_of
from quire.worker.row_extras import RowExtras
from quire.worker.runner import ModelRunner
from tests.paged import Paged
from tests.worker.fakes import BY_ADAPTER, FakeModel, by_channels, make_runner
from tests.worker.test_staged import StaticBackend, UncapturedGraphs, UncapturedMixed

CPU = torch.device("cpu")
WAYS = {  # graphs, and what they are captured with
    "cpu": None,
    "staged": (),
    "graphs": GraphFields(),
    "graphs with all": GraphFields(adapters=True, channels=3),
    "graphs with adapters": GraphFields(adapters=True),
    "graphs with channels": GraphFields(channels=3),
}


@dataclass
class Brings:
    """A request, and what it brings."""

    name: str
    tokens: list[int]
    adapter: int = 0
    channels: np.ndarray | None = None  # [3, n]
    shift: int = 0
    vectors: dict[int, list[int]] = field(default_factory=dict)  # position -> tokens that its vectors stand for

    def known(self) -> list[int]:
        """The tokens as the model sees them."""
        seen = list(self.tokens)
        for start, own in self.vectors.items():
            seen[start : start + len(own)] = own
        return seen

    def next_token(self, model: FakeModel, length: int) -> int:
        """The oracle: greedy, after the first `length` tokens."""
        added, at = BY_ADAPTER * self.adapter, length - 1
        if self.channels is not None:
            inside = at < self.channels.shape[1]
            own = self.channels[:, at] if inside else np.full(3, at + self.shift)
            added += int(by_channels(torch.from_numpy(own)[:, None], torch.tensor([at])))
        return int(np.argmax(model.logits_after(self.known()[:length], added)))


def read_adapter(path: str) -> Any:
    raise AssertionError("no test here reads one")


def made(model: FakeModel, way: str) -> ModelRunner:
    captured = WAYS[way]
    if captured is None:
        return make_runner(model)
    if not isinstance(captured, GraphFields):
        return make_runner(model, staged=True)
    runner = make_runner(model, staged=True, fields=captured)
    runner.backend = StaticBackend()
    common: Any = (model, runner.backend, runner.inputs)
    runner.graphs = UncapturedGraphs((1, 2, 4), *common, runner.sampler.plain, Capturer(CPU), max_context=64)
    runner.mixed = UncapturedMixed((8, 24), *common, Capturer(CPU))
    runner.mixed.capture()
    runner.graphs.used = 0
    if captured.adapters:
        adapters = runner.adapters = WorkerAdapters(read_adapter, (), StepAdapters())
        runner.adapter_graphs = UncapturedGraphs(
            (1, 2, 4), *common, runner.sampler.plain, Capturer(CPU), max_context=64, adapters=adapters.step
        )
        runner.adapter_graphs.used = 0
    return runner


def join(runner: ModelRunner, asked: list[Brings]) -> tuple[NewRow, ...]:
    for one in asked:
        if one.channels is not None:
            runner.rows.make_extras().set_channels(one.name, one.channels, one.shift)
        for start, own in one.vectors.items():
            key = f"{one.name} {start}"
            runner.rows.make_extras().place(one.name, np.arange(start, start + len(own)), key)
            runner.rows.encoded[key] = torch.tensor(own)[:, None].repeat(1, 2).float()
    return tuple(
        NewRow(
            request_id=one.name, epoch=0, token_ids=tuple(one.tokens), num_prompt_tokens=len(one.tokens), seed=0,
            params=ResolvedParams(temperature=0), lora_id=one.adapter, blocks=((4 * i, 4 * i + 1, 4 * i + 2),) * 2,
        )
        for i, one in enumerate(asked)
    )  # fmt: skip


def run(runner: ModelRunner, asked: list[Brings], steps: int, model: FakeModel) -> None:
    """A step of all prompts but their last tokens, then decodes; every token against the oracle."""
    joined = join(runner, asked)
    first = tuple(Grant(one.name, 0, len(one.tokens) - 1, False, 0) for one in asked)
    runner.forward(StepPlan(step=1, grants=first, joined=joined))
    for _ in range(steps):
        grants = tuple(Grant(one.name, len(one.tokens) - 1, 1, True, 0) for one in asked)
        runner.forward(StepPlan(step=1, grants=grants))
        for one, tokens in zip(asked, runner.sample(1, None).result().sampled, strict=True):
            assert tokens == [one.next_token(model, len(one.tokens))], one.name
            one.tokens += tokens
    runner.forward(StepPlan(step=1, grants=(), left=tuple(one.name for one in asked)))


def channels_of(length: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 9, (3, length))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("brings", ["nothing", "adapters", "channels", "vectors", "all"])
def test_every_field_reaches_the_model(way: str, brings: str) -> None:
    model = FakeModel()
    runner = made(model, way)
    asked = [Brings("a", [3, 1, 4, 1, 5]), Brings("b", [2, 7, 1]), Brings("c", [9, 9, 8, 1, 2, 2])]
    if brings in ("adapters", "all"):
        asked[1].adapter, asked[2].adapter = 4, 1
    if brings in ("channels", "all"):
        asked[0].channels, asked[0].shift = channels_of(7), -2  # the prompt and two tokens more, then shifted
    if brings in ("vectors", "all"):
        asked[2].vectors = {1: [30, 31], 4: [33]}
    run(runner, asked, 4, model)
    captured = WAYS[way]
    if not isinstance(captured, GraphFields):
        return
    assert runner.graphs is not None and runner.mixed is not None
    adapted, held = brings in ("adapters", "all"), brings not in ("channels", "all") or captured.channels == 3
    assert runner.graphs.used == (4 if held and not adapted else 0)  # vectors came with the prompts only
    assert (runner.adapter_graphs is not None) == captured.adapters
    if runner.adapter_graphs is not None:
        assert runner.adapter_graphs.used == (4 if held and adapted else 0)
    assert runner.mixed.used == (1 if held and brings not in ("adapters", "vectors", "all") else 0)
    assert not runner.rows.extras and not runner.rows.has_adapters  # all left
    again = [Brings("d", [5, 5, 5])]  # in the row of one that brought something
    before = runner.graphs.used
    run(runner, again, 2, model)
    assert runner.graphs.used == before + 2


def test_rows_that_move_keep_what_they_bring() -> None:
    model = FakeModel()
    runner = made(model, "graphs with all")
    gone, kept = Brings("gone", [1, 2, 3], adapter=3), Brings("kept", [4, 5, 6], adapter=2, channels=channels_of(3))
    joined = join(runner, [gone, kept])
    runner.forward(StepPlan(step=1, grants=(Grant("kept", 0, 2, False, 0),), joined=joined))
    runner.forward(StepPlan(step=2, grants=(Grant("kept", 2, 1, True, 0),), left=("gone",)))
    assert runner.rows.row_of == {"kept": 0}
    assert runner.sample(2, None).result().sampled == [[kept.next_token(model, 3)]]


def test_a_base_step_beside_adapters_stays_one() -> None:
    """Rows with adapters exist, but none takes part: nothing is said of adapters."""
    runner = made(FakeModel(), "graphs")
    asked = [Brings("a", [1, 2, 3], adapter=2), Brings("b", [4, 5])]
    runner.rows.apply(StepPlan(step=1, grants=(), joined=join(runner, asked)))
    assert runner.rows.has_adapters
    alone = shape_of([Grant("b", 0, 2, True, 0)], runner.rows)
    assert alone.adapters is None and runner.inputs is not None and runner.inputs.holds(alone)
    both = shape_of([Grant("b", 0, 2, True, 0), Grant("a", 0, 3, True, 0)], runner.rows)
    assert both.adapters is not None and both.adapters.tolist() == [2, 0] and not runner.inputs.holds(both)


def test_requests_with_other_numbers_of_channels_are_refused() -> None:
    extras = RowExtras({})
    extras.set_channels("a", channels_of(4), 0)
    with pytest.raises(RuntimeError, match="request 'b' has 2 channels of positions, others 3"):
        extras.set_channels("b", channels_of(4)[:2], 0)


def test_vectors_of_a_chunk() -> None:
    """Chunks that end and begin inside what was given, of rows in another order than they were given."""
    extras = RowExtras({"x": torch.arange(5.0)[:, None], "y": torch.tensor([[50.0]])})
    extras.place("a", np.arange(2, 7), "x")
    extras.place("b", np.arange(1), "y")
    found = extras.vectors_of(["b", "a", "c"], np.array([0, 4, 0]), np.array([2, 2, 3]))
    assert found is not None and found.places.tolist() == [0, 2, 3] and found.vectors[:, 0].tolist() == [50, 2, 3]
    assert extras.vectors_of(["a"], np.array([7]), np.array([9])) is None
    extras.place("d", np.array([1, 2, 5, 6, 8]), "x")  # between them, tokens keep their embeddings
    found = extras.vectors_of(["d"], np.array([2]), np.array([5]))
    assert found is not None and found.places.tolist() == [0, 3, 4] and found.vectors[:, 0].tolist() == [1, 2, 3]


# --- several sampled tokens of a row


def test_which_tokens_are_sampled() -> None:
    counts, starts = np.array([4, 1, 3, 2]), np.array([10, 5, 0, 7])
    shape = StepShape(
        np.arange(4), starts, counts, np.cumsum(counts), np.array([True, True, False, True]), np.arange(4),
        num_sampled=np.array([3, 1, 0, 2]),
    )  # fmt: skip
    places = sampled_places(shape)
    assert places.tokens.tolist() == [1, 2, 3, 4, 8, 9]
    assert places.positions.tolist() == [12, 13, 14, 6, 8, 9]
    assert places.entries.tolist() == [0, 0, 0, 1, 3, 3]
    single = replace(shape, num_sampled=None)
    assert sampled_places(single).tokens.tolist() == [3, 4, 9]


@pytest.mark.parametrize("way", ["cpu", "staged", "graphs"])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_several_tokens_of_a_row_are_sampled(way: str, logprobs: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a check of drafts will: a row's last three tokens, beside a row that samples one and one that samples none."""
    model = FakeModel()
    runner = made(model, way)
    asked = [Brings("a", [3, 1, 4, 1, 5]), Brings("b", [2, 7, 1]), Brings("c", [9, 9, 8, 1])]
    grants = (Grant("a", 0, 5, True, 0), Grant("b", 0, 3, True, 0), Grant("c", 0, 2, False, 0))

    def shaped(*given: Any) -> StepShape:
        return replace(shape_of(*given), num_sampled=np.array([3, 1, 0]))

    monkeypatch.setattr("quire.worker.runner.shape_of", shaped)
    params = ResolvedParams(temperature=0, logprobs=logprobs)
    joined = tuple(
        NewRow(
            request_id=one.name, epoch=0, token_ids=tuple(one.tokens), num_prompt_tokens=len(one.tokens), seed=0,
            params=params, blocks=((4 * i, 4 * i + 1),) * 2,
        )
        for i, one in enumerate(asked)
    )  # fmt: skip
    runner.forward(StepPlan(step=1, grants=grants, joined=joined))
    if runner.mixed is not None:
        assert runner.mixed.used == 1
    result = runner.sample(1, None).result()
    wanted = [asked[0].next_token(model, length) for length in (3, 4, 5)]
    assert result.sampled == [wanted, [asked[1].next_token(model, 3)], []]
    assert runner.rows.tokens[0, 3:6].tolist() == wanted  # each where it will stand
    assert runner.rows.lengths[:3].tolist() == [6, 4, 4]
    if logprobs is not None:
        assert result.logprobs is not None and result.logprobs[0] is not None and result.logprobs[2] is None
        assert [ids[0] for ids in result.logprobs[0].token_ids] == wanted
        assert len(result.logprobs[0].ranks) == 3


def test_all_tokens_of_the_largest_step_may_be_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The staging buffer has room for it, without that of changes of the tables."""
    monkeypatch.setattr("quire.worker.device_inputs.CHANGES", 0)
    runner = make_runner(num_blocks=64)
    inputs = DeviceInputs(runner.rows, 60)
    row = NewRow(
        request_id="a", epoch=0, token_ids=(1,) * 60, num_prompt_tokens=60, params=ResolvedParams(), seed=0,
        blocks=(tuple(range(15)), tuple(range(15))),
    )  # fmt: skip
    grant = Grant("a", 0, 60, True, 0)
    runner.rows.apply(StepPlan(step=1, grants=(), joined=(row,)))
    shape = replace(shape_of([grant], runner.rows), num_sampled=np.array([60]))
    assert inputs.build(shape, runner.backend).sampled.tokens.tolist() == list(range(60))


# --- what models do with them


CONFIG = dict(
    architectures=["LlamaForCausalLM"], vocab_size=40, hidden_size=32, intermediate_size=48, num_attention_heads=4,
    num_key_value_heads=2, num_hidden_layers=2, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip


def tiny() -> Any:
    torch.manual_seed(1)
    model = build_model(CONFIG, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model.finish_weights()
    return model


def with_fields(paged: Paged, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> torch.Tensor:
    monkeypatch.setattr("tests.paged.Batch", lambda **given: Batch(**(given | fields)))
    paged.done = [0] * len(paged.prompts)
    return torch.cat(paged.whole())


def test_given_vectors_take_the_place_of_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    paged = Paged(model, [[1, 2, 3, 4]], block_size=4)
    wanted = with_fields(Paged(model, [[1, 9, 3, 8]], block_size=4), monkeypatch)
    paged = Paged(model, [[1, 2, 3, 4]], block_size=4)
    vectors = model.embed(torch.tensor([8, 9])).double()
    found = with_fields(paged, monkeypatch, input_vectors=GivenVectors(torch.tensor([3, 1]), vectors))
    assert torch.equal(found, wanted)
    assert not torch.equal(with_fields(paged, monkeypatch), wanted)


def test_what_a_model_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = Paged(tiny(), [[1, 2, 3]], block_size=4)
    with pytest.raises(NotBuiltError, match="adapters"):
        with_fields(paged, monkeypatch, adapter_index=torch.ones(3, dtype=torch.int32))
    with pytest.raises(ConfigError, match="positions have 3 channels, this rotary embedding one"):
        with_fields(paged, monkeypatch, position_channels=torch.zeros((3, 3), dtype=torch.int64))


@pytest.mark.parametrize("pairs", [False, True])
def test_each_section_turns_by_its_channel(pairs: bool) -> None:
    kind = RopeKind(theta=1e4, dim=12, pairs=pairs, sections=(2, 1, 3))
    rope = Rope(kind, 64, plain_storage(torch.float32, Kernels.here("cpu")))
    channels = torch.tensor([[0, 3, 9], [1, 3, 2], [5, 3, 7]])
    cos, sin = rope(channels[0], channels)
    angle = torch.stack([channels[c] for c in (0, 0, 1, 2, 2, 2)], 1) * rope.inv_freq  # [T, 6]
    if pairs:
        want_cos, want_sin = (
            angle.cos().repeat_interleave(2, 1),
            torch.stack((-angle.sin(), angle.sin()), -1).flatten(1),
        )
    else:
        want_cos, want_sin = angle.cos().repeat(1, 2), torch.cat((-angle.sin(), angle.sin()), 1)
    torch.testing.assert_close(cos[:, 0], want_cos)
    torch.testing.assert_close(sin[:, 0], want_sin)
    plain = rope(channels[0])
    assert torch.equal(rope(channels[0], channels[:1].repeat(3, 1)).cos, plain.cos)


def test_sections_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"sections \[2, 1\] name 3 frequencies, the rotary embedding has 6"):
        Rope(RopeKind(dim=12, sections=(2, 1)), 64, plain_storage(torch.float32, Kernels.here("cpu")))
