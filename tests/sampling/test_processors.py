"""Custom logits processors: names, loading, validation; and what they see while a real batch comes, goes and moves."""

import random
import sys
import types
from importlib.metadata import EntryPoint

import pytest
import torch

from quire.config.local import name_of
from quire.sampling import processors
from quire.sampling.processors import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, check_params, load_classes
from quire.schema.errors import ConfigError, InputError
from quire.schema.params import SamplingParams
from tests.sampling.oracle import resolved
from tests.worker.driver import Asked, Driver
from tests.worker.fakes import FakeModel, make_runner


class Target(LogitsProcessor):
    """Forces extra_args["target_token"] where it is given: the documented example, kept by hand."""

    @classmethod
    def validate_params(cls, params):
        target = (params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token value {target} is not int")

    def __init__(self, vllm_config, device, is_pin_memory):
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        processors.process_dict_updates(
            self.targets, batch_update, lambda params, _, __: (params.extra_args or {}).get("target_token")
        )

    def apply(self, logits):
        if not self.targets:
            return logits
        rows = torch.tensor(list(self.targets))
        columns = torch.tensor(list(self.targets.values()))
        kept = logits[rows, columns].clone()
        logits[rows] = float("-inf")
        logits[rows, columns] = kept
        return logits


class NotOne:
    pass


def test_classes_load_by_every_spelling(monkeypatch):
    module = types.ModuleType("some_processors")
    module.Target, module.NotOne = Target, NotOne
    monkeypatch.setitem(sys.modules, "some_processors", module)
    assert load_classes(["some_processors:Target", "some_processors.Target", Target]) == [Target]

    class Local(Target):
        pass

    assert load_classes([name_of(Local)]) == [Local]
    for wrong in ("some_processors:NotOne", NotOne):
        with pytest.raises(ConfigError, match="not a subclass"):
            load_classes([wrong])
    for missing in ("some_processors:Nothing", "no_such_module_here:Thing", "word"):
        with pytest.raises(ConfigError, match="cannot be loaded"):
            load_classes([missing])


@pytest.mark.parametrize("group", ["vllm.logits_processors", "quire.logits_processors"])
def test_entry_points_are_always_loaded(monkeypatch, group):
    module = types.ModuleType("some_processors")
    module.Target, module.NotOne = Target, NotOne
    monkeypatch.setitem(sys.modules, "some_processors", module)
    found = {group: [EntryPoint("t", "some_processors:Target", group)]}
    monkeypatch.setattr(processors, "entry_points", lambda group: found.get(group, []))
    assert load_classes([]) == [Target]
    found[group] = [EntryPoint("t", "some_processors:NotOne", group)]
    with pytest.raises(ConfigError, match="entry point 't'"):
        load_classes([])


def test_validation_names_the_processor():
    check_params([Target], SamplingParams(extra_args={"target_token": 3}))
    with pytest.raises(InputError, match=r"Target refuses.*not int"):
        check_params([Target], SamplingParams(extra_args={"target_token": "x"}))


def test_the_module_needs_no_torch():
    """The control side imports it to validate."""
    import subprocess

    code = "import sys, quire.sampling.processors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_an_unfinished_processor_cannot_be_made():
    class Half(LogitsProcessor):
        def apply(self, logits):
            return logits

    with pytest.raises(TypeError, match="abstract"):
        Half(None, None, False)


class Script(AdapterLogitsProcessor):
    """Makes a request say extra_args["say"], one token after the other, by its own outputs so far."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        say = (params.extra_args or {}).get("say")
        if say is None:
            return None

        def force(output_ids, logits):
            logits[torch.arange(len(logits)) != say[len(output_ids) % len(say)]] = float("-inf")
            return logits

        return force


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_processors_follow_a_living_batch(seed, ahead):
    """Both kinds at once, over joins, moves, preemptions and look-ahead; requests that use neither are untouched."""
    rng = random.Random(seed)
    model = FakeModel()
    asked, plain = [], []
    for i in range(16):
        extra = rng.choice([None, {"target_token": i}, {"say": [rng.randrange(40) for _ in range(5)]}])
        params = resolved(temperature=rng.choice([0.0, 1.0]), max_tokens=None, extra_args=extra)
        prompt = [rng.randrange(40) for _ in range(rng.randint(1, 9))]
        asked.append(Asked(f"r{i}", prompt, params, i, rng.randint(1, 10)))
        if extra is None:
            plain.append(Asked(f"r{i}", prompt, params, i, asked[-1].max_tokens))
    Driver(make_runner(model, logits_processors=(Target, Script)), rng, ahead=ahead).run(asked, preempt=0.1)
    Driver(make_runner(model), rng, ahead=ahead).run(plain)
    untouched = {request.name: request.outputs for request in plain}
    for request in asked:
        extra = request.params.extra_args
        if extra is None:
            assert request.outputs == untouched[request.name]
        elif "say" in extra:
            assert request.outputs == [extra["say"][i % 5] for i in range(request.max_tokens)]
        else:
            assert request.outputs == [extra["target_token"]] * request.max_tokens


class Witness(LogitsProcessor):
    """Notes every call."""

    calls: list[tuple] = []

    def __init__(self, vllm_config, device, is_pin_memory):
        type(self).calls = []

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        self.calls.append(("update", batch_update))

    def apply(self, logits):
        self.calls.append(("apply", tuple(logits.shape)))
        return logits


def test_updates_come_every_step_and_invariant_ones_skip_an_all_greedy_batch():
    greedy = Asked("g", [1, 2], resolved(temperature=0.0), 0, 3)
    runner = make_runner(logits_processors=(Witness,))
    Driver(runner, random.Random(0), ahead=0).run([greedy], preempt=0.0)
    kinds = [kind for kind, _ in Witness.calls]
    assert "apply" not in kinds and len(kinds) >= 3
    first = Witness.calls[0][1]
    assert first.batch_size == 1 and first.removed == [] and first.moved == []
    index, params, prompt_ids, output_ids = first.added[0]
    assert (index, prompt_ids, output_ids) == (0, [1, 2], greedy.outputs)  # the live list, read at the end
    assert params is greedy.params
    assert all(update is None for _, update in Witness.calls[1:3])
    both = [
        Asked("h", [1, 2], resolved(temperature=1.0), 0, 3),
        Asked("i", [3], resolved(temperature=0), 0, 3),
    ]
    Driver(runner, random.Random(0), ahead=0).run(both, preempt=0.0)
    assert ("apply", (2, 40)) in Witness.calls
