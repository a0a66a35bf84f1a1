"""Decode graphs with adapters, on CPU: an engine with a GPU's staged inputs and both sets of graphs, which are not
captured but run under what a capture fixed. Its tokens are those of merged weights in transformers, while adapters
come, go, change slots and change other layers than those before them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire import LLM, LoRARequest, SamplingParams
from quire.base import env
from quire.layers.adapters import LinearAdapters, StepAdapters
from quire.layers.batch import GroupStep
from quire.layers.linear import Linear
from quire.ops.lora import AdapterRows, LowRank
from quire.schema.adapters import AdapterPlacement
from quire.worker import worker as module
from quire.worker.adapters import WorkerAdapters
from quire.worker.capture import Capturer
from quire.worker.device_inputs import DeviceInputs, GraphFields
from quire.worker.graphs import LATE_AFTER, DecodeGraphs, Replayed
from quire.worker.inputs import StepShape
from tests.tiny_adapters import expert_modules, greedy, linear_modules, merge, write_adapter
from tests.tiny_models import make_tiny
from tests.worker.fakes import FakeModel, make_runner
from tests.worker.test_staged import StaticBackend

CPU = torch.device("cpu")
RANK, SLOTS = 8, 2
PROMPTS = [[5, 9, 77, 100, 41, 8, 250, 33, 12], [7, 7, 30], [99, 3, 2, 1, 60, 61]]
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 60, "block_size": 8, "device": "cpu",
    "max_num_batched_tokens": 24, "max_num_seqs": 4, "enable_lora": True, "max_loras": SLOTS, "max_lora_rank": RANK,
    "max_cpu_loras": 4, "async_scheduling": True, "seed": 0,
}  # fmt: skip


class LatePlan:
    """A captured plan: it learns what a step holds from the device's tensors, when it runs."""

    run_fused = None

    def __init__(self, backend: Any, step: GroupStep, group: Any) -> None:
        self._backend, self._step, self._group = backend, step, group

    def run(self, q: Tensor, k: Tensor, v: Tensor | None, cache: Any, **options: Any) -> Tensor:
        given = self._step
        assert given.contexts is not None and given.row_index is not None
        contexts = [length for length in given.contexts.tolist() if length]
        count = len(contexts)
        step = GroupStep(
            block_tables=given.block_tables[given.row_index[:count].long()], context_lens=contexts,
            query_starts=torch.arange(count + 1, dtype=torch.int32), query_lens=[1] * count, slots=given.slots[:count],
        )  # fmt: skip
        plan = self._backend.plan(step, self._group)
        out: Tensor = plan.run(q[:count], k[:count], None if v is None else v[:count], cache, **options)
        return torch.cat((out, out.new_zeros(len(q) - count, *out.shape[1:])))


class LateBackend:
    """A CPU's attention for inputs that are staged as for a GPU."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_backend"].__getattribute__(name)

    def plan(self, step: GroupStep, group: Any) -> Any:
        if step.is_static:
            return LatePlan(self._backend, step, group)
        assert step.row_index is not None
        own = step._replace(block_tables=step.block_tables[step.row_index.long()], row_index=None, contexts=None)
        return self._backend.plan(own, group)


class FrozenGraphs(DecodeGraphs):
    """Runs the step that a graph would hold, with the layers that add adapters as they were when it was captured, and
    nothing that reads slots back."""

    def __init__(self, sizes: tuple[int, ...], linears: list[LinearAdapters], *args: Any, **options: Any) -> None:
        super().__init__(sizes, *args, **options)
        self.linears, self.used, self.captures = linears, 0, 0
        self.fixed: dict[int, list[bool]] = {}

    def capture(self, seconds: float = 0.0) -> None:
        """At the start: nothing."""

    def _capture(self, bucket: int) -> None:
        self._captured[bucket] = None  # type: ignore[assignment]
        self._inputs.clear_static(bucket)
        self.fixed[bucket] = [each.was_used for each in self.linears]
        self.captures += 1

    def replay(self, bucket: int) -> Replayed:
        assert bucket in self._captured
        now = [each.was_used for each in self.linears]
        groups = AdapterRows.__dict__["groups"]
        try:
            AdapterRows.groups = property(_read_back)  # type: ignore[assignment]
            for each, was_used in zip(self.linears, self.fixed[bucket], strict=True):
                each.was_used = was_used
            replayed = self._step(bucket)
        finally:
            AdapterRows.groups = groups  # type: ignore[method-assign]
            for each, was_used in zip(self.linears, now, strict=True):
                each.was_used = was_used
        self.used += 1
        return replayed._replace(result=replayed.result.clone())


def _read_back(rows: AdapterRows) -> Any:
    raise AssertionError("a captured step reads which slots its rows have")


def add_by_stacks(y: Tensor, x: Tensor, rows: AdapterRows, low: LowRank) -> Tensor:
    """Another way to the kernel's result: every row with every piece of its slot, masked."""
    assert low.stacks is not None
    a, b, spans, scales, _ = low.stacks
    entry, column = (rows.index.long() - 1).clamp(min=0), torch.arange(y.shape[1])
    inside = (column >= spans[entry][..., :1]) & (column < spans[entry][..., 1:]) & (rows.index > 0)[:, None, None]
    h = torch.einsum("tw,tprw->tpr", x, a[entry])
    delta = torch.einsum("tpr,otr->tpo", h, b[:, entry]) * scales[entry][:, :, None]
    y += torch.where(inside, delta, 0.0).sum(1)
    return y


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Runners of engines made from now on, which run as on a GPU."""
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    env.forget_all()
    made: list[Any] = []
    plain = module.Worker.init_kv

    def init_kv(self: module.Worker, layout: Any) -> None:
        select = self._parts.select_backend
        self._parts = dataclasses.replace(self._parts, select_backend=lambda *args: LateBackend(select(*args)))
        plain(self, layout)
        runner: Any = self.model_runner
        linears = []
        for layer in runner.model.modules():
            if isinstance(layer, Linear) and layer.adapters is not None:
                like = torch.empty(0)
                layer.adapters.low.set_up_stacks(layer.parts.values(), layer.in_size, RANK, like)
                layer.adapters._add = add_by_stacks
                linears.append(layer.adapters)
        inputs = runner.inputs = DeviceInputs(runner.rows, 64, GraphFields(adapters=True))
        common = (runner.model, runner.backend, inputs, runner.sampler.plain, Capturer(CPU))
        runner.graphs = FrozenGraphs((1, 2, 4), linears, *common, max_context=64)
        runner.adapter_graphs = FrozenGraphs(
            (1, 2, 4), linears, *common, max_context=64, adapters=runner.adapters.step
        )  # fmt: skip
        made.append(runner)

    monkeypatch.setattr(module.Worker, "init_kv", init_kv)
    yield made
    env.forget_all()


class AdaptedCase:
    """A tiny model and adapters of it, by name; `ask` checks an engine's answers."""

    def __init__(self, arch: str, folder: Path) -> None:
        self.folder, self.model = folder, make_tiny(arch, folder / "model")
        self.adapters: dict[str, Any] = {}
        self.merged: dict[str, Any] = {"": self.model}

    def write(self, name: str, modules: dict[str, tuple[int, int]], seed: int) -> None:
        own = self.adapters[name] = write_adapter(
            self.model, self.folder / f"{name}{seed}", modules=modules, seed=seed, rank=2 + 2 * (seed % 3)
        )
        self.merged[name] = merge(self.model, own)

    def ask(self, llm: LLM, *names: str) -> None:
        numbers = {name: number for number, name in enumerate(self.adapters, 1)}
        loras = [LoRARequest(n, numbers[n], self.adapters[n].path) if n else None for n in names]
        prompts: Any = [{"prompt_token_ids": PROMPTS[i % 3]} for i in range(len(names))]
        answers = llm.generate(prompts, PARAMS, lora_request=loras, use_tqdm=False)
        expected = [greedy(self.merged[name], PROMPTS[i % 3], 5) for i, name in enumerate(names)]
        assert [list(answer.outputs[0].token_ids) for answer in answers] == expected, names


def test_adapters_that_come_and_go_between_replays(runners: list[Any], tmp_path: Path) -> None:
    case = AdaptedCase("LlamaForCausalLM", tmp_path)
    some = linear_modules(case.model, ("q_proj", "v_proj"))
    every, ends = linear_modules(case.model, None), linear_modules(case.model, ("embed_tokens", "lm_head"))
    case.write("some", some, 1)
    case.write("other", some, 2)
    case.write("every", every, 3)
    case.write("ends", some | ends, 4)
    with LLM(str(tmp_path / "model"), **OPTIONS) as llm:
        (runner,) = runners
        plain, adapted = runner.graphs, runner.adapter_graphs
        case.ask(llm, "", "")
        assert plain.used > 2 and not adapted.used  # nobody pays for adapters that nobody has
        case.ask(llm, "some", "", "some")
        first, captures = adapted.used, adapted.captures
        assert first > 2 and captures >= 1
        case.ask(llm, "other", "some", "")  # the same layers: what was captured serves
        assert adapted.used > first and adapted.captures <= captures + 1
        version = runner.adapters.step.version
        case.ask(llm, "every", "", "some", "other")  # more adapters than slots; further layers
        assert runner.adapters.step.version > version and adapted.captures > captures
        before, captures, version = adapted.used, adapted.captures, runner.adapters.step.version
        case.ask(llm, "ends", "")  # what no graph holds
        assert adapted.used == before and runner.adapters.step.version == version
        case.ask(llm, "some", "every")
        assert adapted.used > before
        case.write("some", some, 5)  # another adapter under the same id
        case.ask(llm, "some", "")
        assert llm.llm_engine.remove_lora(3)  # "every": what it changed is captured, and adds nothing now
        case.ask(llm, "other", "", "some")
        assert runner.adapters.step.version == version


@pytest.mark.parametrize("arch", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_experts_and_latent_attention_have_no_graphs(arch: str, runners: list[Any], tmp_path: Path) -> None:
    """What changes them lies in a slot beside an adapter that graphs hold."""
    case = AdaptedCase(arch, tmp_path)
    linears = linear_modules(case.model, ("q_proj", "q_b_proj", "o_proj", "kv_a_proj_with_mqa"))
    apart = linear_modules(case.model, ("kv_b_proj",)) | expert_modules(case.model, (0, 2))
    case.write("linears", linears, 1)
    case.write("apart", linears | apart, 2)
    with LLM(str(tmp_path / "model"), **OPTIONS) as llm:
        graphs = runners[0].adapter_graphs
        case.ask(llm, "apart", "")
        assert not graphs.used
        case.ask(llm, "linears", "")
        used = graphs.used
        assert used > 2
        case.ask(llm, "apart", "linears")
        assert graphs.used == used


class AnyAdapter:
    """A host adapter that only says whether graphs hold it."""

    def __init__(self, in_graphs: bool) -> None:
        self.in_graphs = in_graphs

    def fill(self, slot: int, layers: Any) -> None:
        pass


def test_slots_that_change_hands() -> None:
    adapters = WorkerAdapters(lambda path: None, (), StepAdapters())  # type: ignore[arg-type, return-value]
    for serial, in_graphs in enumerate((True, False)):
        adapters._copies[serial] = AnyAdapter(in_graphs)  # type: ignore[assignment]

    def place(slot: int, serial: int) -> None:
        adapters.place([AdapterPlacement(slot=slot, serial=serial)])

    place(1, 0)
    place(2, 1)
    assert adapters.in_graphs(np.array([0, 1, 0])) and not adapters.in_graphs(np.array([1, 2]))
    place(2, 0)
    place(1, 1)
    assert adapters.in_graphs(np.array([0, 2])) and not adapters.in_graphs(np.array([1]))


def test_graphs_are_captured_again_for_further_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, step = make_runner(FakeModel(), staged=True, fields=GraphFields(adapters=True)), StepAdapters()
    graphs = DecodeGraphs(
        (1, 2, 4), runner.model, StaticBackend(), runner.inputs, runner.sampler.plain, Capturer(CPU), max_context=64,
        adapters=step,
    )  # fmt: skip
    captured: list[int] = []

    def capture(bucket: int) -> None:
        captured.append(bucket)
        graphs._captured[bucket] = None  # type: ignore[assignment]

    monkeypatch.setattr(graphs, "_capture", capture)
    assert [graphs.prepare(bucket) for bucket in (2, 1, 4)] == [2, 2, 4] and captured == [2, 4]
    step.version += 1
    assert graphs.prepare(2) == 2 and captured == [2, 4, 2]
    assert [graphs.prepare(1) for _ in range(LATE_AFTER)][-1] == 1 and captured == [2, 4, 2, 1]


def test_a_capture_that_fails_ends_graphs_with_adapters_only(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(FakeModel(), staged=True, fields=GraphFields(adapters=True))
    common = ((1, 2), runner.model, StaticBackend(), runner.inputs, runner.sampler.plain, Capturer(CPU))
    ones = np.ones(1, np.int64)
    shape = StepShape(0 * ones, 0 * ones, ones, ones, ones.astype(bool), 0 * ones)
    adapted = dataclasses.replace(shape, adapters=ones.astype(np.int32))

    def fail(bucket: int) -> None:
        raise torch.cuda.OutOfMemoryError("no memory is left")

    graphs = DecodeGraphs(*common, max_context=64, adapters=StepAdapters())
    monkeypatch.setattr(graphs, "_capture", fail)
    assert graphs.bucket_of(adapted) == 1 and graphs.prepare(1) is None and graphs.bucket_of(adapted) is None
    plain = DecodeGraphs(*common, max_context=64)
    monkeypatch.setattr(plain, "_capture", fail)
    assert plain.bucket_of(shape) == 1 and plain.bucket_of(adapted) is None
    with pytest.raises(RuntimeError, match="no memory"):
        plain.prepare(1)
