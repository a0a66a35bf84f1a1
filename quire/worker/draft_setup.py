"""Speculative decoding as configured: the proposer by its method, and what steps of several tokens cost here.

In: SpeculativeConfig and a runner. Out: the runner drafts. Must not know: how a proposer works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from zlib import crc32

import torch
from torch import Tensor

from quire.base import registry
from quire.base.clock import now
from quire.base.log import logger
from quire.config.drafting import SpeculativeConfig
from quire.drafting.budget import DraftBudget
from quire.drafting.lengths import DEVICE_PROBES, PROBES, DraftLengths
from quire.drafting.proposer import METHODS, NOTHING, ModelProposer, Proposal, Proposer
from quire.ops.op import Kernels
from quire.quant.shard import ShardGroup
from quire.schema.errors import ConfigError, NotBuiltError
from quire.schema.params import ResolvedParams
from quire.schema.step import Grant, NewRow, StepPlan
from quire.worker.drafts import DraftClock, Drafts, ReadsStates

if TYPE_CHECKING:
    from quire.worker.drafters import Drafter
    from quire.worker.runner import ModelRunner

_log = logger(__name__)
_ROUNDS = 3  # of each size; the shortest counts
_PROBE_SECONDS = 2.0  # after which the larger sizes are estimated
_PACE_STEPS = 16  # that follow each other on a device without a wait, to be timed


def draft_as_configured(
    runner: ModelRunner,
    config: SpeculativeConfig,
    max_model_len: int,
    drafter: Drafter | None = None,
    clock: DraftClock | None = None,
) -> None:
    """`drafter`: the model of methods that have one. `clock`: of all ranks; None: there is one."""
    clock = clock or DraftClock()
    most = config.num_speculative_tokens or 0
    proposer = make_proposer(config) if drafter is None else drafter.proposer(runner.kv.layout, max_model_len)
    inner = None if drafter is None else drafter.inner_states()
    if not config.adaptive:
        _start(runner, Drafts(proposer, runner.rows, most), inner, config)
        return
    lengths = DraftLengths(config)
    step_seconds = measure(runner, lengths, most, max_model_len, clock)
    priced = None
    if isinstance(proposer, ModelProposer):
        pass_cost = probe_drafter(proposer, clock) / max(1e-9, step_seconds)
        priced = proposer, DraftBudget(lengths, pass_cost, step_seconds if lengths.costs.is_fixed else 0.0)
    _start(runner, Drafts(proposer, runner.rows, most, lengths, priced, clock), inner, config)


def check_bits(ranks: ShardGroup, kernels: Kernels) -> None:
    """What was right of a draft decides how many tokens the next step has, and each rank says so by itself, as each
    drafts by itself: so all have to come to the same bits, and compute with the same instructions."""
    library = kernels.library
    own = torch.backends.cpu.get_cpu_capability(), "" if library is None else library.qc_isa().decode()
    numbers = ranks.say(crc32(repr(own).encode()), kernels.device)
    other = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
    if other is not None:
        raise NotBuiltError(
            "speculative_config: ranks that draft must compute with the same instructions, and rank "
            f"{other} has others than rank 0 (rank {ranks.rank}: {' '.join(own)}); QUIRE_CPU_KERNELS and "
            "ATEN_CPU_CAPABILITY choose them",
            param="speculative_config",
        )


def _start(
    runner: ModelRunner, drafts: Drafts, inner: Callable[[int], Tensor] | None, config: SpeculativeConfig
) -> None:
    drafts.inner_states = inner
    drafts.invented = config.synthetic_acceptance_rates
    runner.draft_with(drafts)


def probe_drafter(proposer: ModelProposer, clock: DraftClock) -> float:
    """Seconds of one pass for one row."""
    row = NewRow(
        request_id="probe", epoch=0, token_ids=(0,), num_prompt_tokens=1, params=ResolvedParams(), seed=0
    )  # fmt: skip
    proposer.begin(row)
    seconds = []
    for i in range(_ROUNDS + 1):
        if isinstance(proposer, ReadsStates):
            proposer.read("probe", i, proposer.a_state())
        proposer.extend("probe", [0])
        began = clock.now()
        proposer.propose(["probe"], 2)
        seconds.append(clock.since(began) / 2)
    proposer.end("probe")
    return min(seconds)


def make_proposer(config: SpeculativeConfig) -> Proposer:
    if config.method != "custom_class":
        known: Proposer = METHODS.get(config.method or "")(config)
        return known
    try:
        named = registry.load(config.model or "")
    except ImportError as wrong:
        raise _unusable(config, f"cannot be imported: {wrong}") from None
    if not isinstance(named, type):
        raise _unusable(config, "is not a class")
    missing = [verb for verb in ("begin", "extend", "propose", "end") if verb not in dir(named)]
    if missing:
        raise _unusable(config, f"has no {', '.join(missing)}")
    made: Proposer = named(config)
    return made


def _unusable(config: SpeculativeConfig, why: str) -> ConfigError:
    return ConfigError(f"speculative_config: model {config.model!r} {why}", param="speculative_config")


def measure(runner: ModelRunner, lengths: DraftLengths, most: int, max_model_len: int, clock: DraftClock) -> float:
    """Seconds of a step of one token; the costs of steps are set from those of one row. On a device of its own, what
    waiting for tokens adds is told apart from what a step takes when it follows another."""
    if runner.inputs is None:
        seconds = probe(runner, [size for size in PROBES if size <= 8 * (most + 1)], max_model_len, clock)
        lengths.costs.probed(seconds)
        return seconds[0]
    seconds = probe(runner, [size for size in DEVICE_PROBES if size <= runner.inputs.max_tokens], max_model_len, clock)
    pace = min(seconds[0], pace_of(runner, max_model_len))
    wait = seconds[0] - pace
    lengths.costs.probed([pace, *(max(pace, one - wait) for one in seconds[1:])])
    lengths.costs.wait, lengths.costs.is_fixed = wait / max(1e-9, pace), True
    _log.info("A step after another: %.2f ms; waiting for its tokens takes %.2f ms", 1000 * pace, 1000 * wait)
    return pace


def probe(runner: ModelRunner, sizes: Sequence[int], max_model_len: int, clock: DraftClock) -> list[float]:
    """Seconds of steps of one row that verify drafts, of these sizes. Leaves no trace: the blocks it writes belong to
    nobody yet."""
    room = min(max_model_len, runner.kv.layout.num_blocks * min(table.group.block_size for table in runner.rows.tables))
    sizes = [size for size in sizes if size + 2 <= room]
    drafts = _join_alone(runner, sizes[-1] + 2)
    taken, seconds = 0.0, list[float]()
    for size in sizes:
        rounds = [_verify(runner, drafts, size, clock) for _ in range(_ROUNDS)]
        seconds.append(min(rounds))
        taken += sum(rounds)
        if taken > _PROBE_SECONDS:
            break
    runner.forward(StepPlan(step=0, grants=(), left=("probe",)))
    _log.info("Steps of %s tokens: %s ms", sizes[: len(seconds)], [round(1000 * one, 1) for one in seconds])
    return seconds


def pace_of(runner: ModelRunner, max_model_len: int) -> float:
    """Seconds of a step of one token among others that follow it without a wait."""
    count = min(_PACE_STEPS, max_model_len - 2)
    _join_alone(runner, count + 2).wants_tokens = False
    began = now()
    for start in range(1, 1 + count):
        runner.forward(StepPlan(step=0, grants=(Grant("probe", start, 1, True, 0),)))
        pending = runner.sample(0, None)
    pending.result()
    seconds = (now() - began) / count
    runner.forward(StepPlan(step=0, grants=(), left=("probe",)))
    return seconds


def _join_alone(runner: ModelRunner, longest: int) -> Drafts:
    """One row, whose first token is computed; nothing is drafted for it."""
    blocks = tuple(tuple(range(-(-longest // table.group.block_size))) for table in runner.rows.tables)
    row = NewRow(
        request_id="probe", epoch=0, token_ids=(0,), num_prompt_tokens=1, params=ResolvedParams(temperature=0.0),
        seed=0, blocks=blocks,
    )  # fmt: skip
    drafts = Drafts(_NoProposer(), runner.rows, longest)
    runner.draft_with(drafts)
    _step(runner, StepPlan(step=0, grants=(Grant("probe", 0, 1, True, 0),), joined=(row,)))
    return drafts


def _verify(runner: ModelRunner, drafts: Drafts, size: int, clock: DraftClock) -> float:
    drafts.of["probe"] = [0] * (size - 1)
    runner.rows.lengths[runner.rows.row_of["probe"]] = 2
    began = clock.now()
    _step(runner, StepPlan(step=0, grants=(Grant("probe", 1, size, True, 0, (), size - 1),)))
    return clock.since(began)


def _step(runner: ModelRunner, plan: StepPlan) -> None:
    runner.forward(plan)
    runner.sample(0, None).result()


class _NoProposer:
    """Drafts nothing."""

    def begin(self, new: NewRow) -> None: ...
    def extend(self, request_id: str, token_ids: Sequence[int]) -> None: ...
    def end(self, request_id: str) -> None: ...
    def propose(self, request_ids: Sequence[str], count: int) -> list[Proposal]:
        return [NOTHING] * len(request_ids)
