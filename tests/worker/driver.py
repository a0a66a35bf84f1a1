"""Drives a ModelRunner the way an engine would, only by chance: requests in, their texts out."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from quire.schema.params import ResolvedParams
from quire.schema.step import Grant, NewRow, StepPlan
from quire.worker.runner import ModelRunner

BLOCK = 4


@dataclass
class Asked:
    name: str
    prompt: list[int]
    params: ResolvedParams
    seed: int
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    outputs: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: dict[int, tuple] = field(default_factory=dict)
    failed: str | None = None
    # the driver's own state
    planned: int = 0
    in_flight: int = 0
    epoch: int = 0
    blocks: list[int] = field(default_factory=list)
    live: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs

    @property
    def done(self) -> bool:
        return self.failed is not None or len(self.outputs) >= self.max_tokens


class Driver:
    """A scheduler reduced to chance: random chunks, order, joins, preemptions; up to `ahead` results unread."""

    def __init__(
        self, runner: ModelRunner, rng: random.Random, *, ahead: int, num_blocks: int = 64, max_rows: int = 8
    ) -> None:
        self.runner, self.rng, self.ahead, self.max_rows = runner, rng, ahead, max_rows
        blocks = list(range(num_blocks))
        rng.shuffle(blocks)
        self.free = [deque(blocks)] * len(runner.rows.tables)  # the groups share one pool
        self.flying: deque = deque()
        self.left: list[str] = []
        self.step = 0

    def run(self, asked: list[Asked], *, preempt: float = 0.05) -> None:
        for _ in range(3000):
            if all(request.done for request in asked):
                break
            self._turn([request for request in asked if not request.done], preempt)
        else:
            raise AssertionError("the requests never finished")
        while self.flying:
            self._settle()
        self.runner.forward(StepPlan(step=0, grants=(), left=tuple(self.left)))
        self.left = []

    def _turn(self, waiting: list[Asked], preempt: float) -> None:
        for request in waiting:
            if request.live and self.rng.random() < preempt:
                self._leave(request)
                request.epoch += 1
        grants, joined, shares = [], [], []
        num_live = sum(request.live for request in waiting)
        for request in self.rng.sample(waiting, len(waiting)):
            if not request.live:
                if num_live >= self.max_rows or self.rng.random() < 0.5:
                    continue
                num_live += 1
                joined.append(self._join(request))
            known = len(request.tokens) + request.in_flight
            room = known - request.planned
            if room <= 0 or len(request.outputs) + request.in_flight >= request.max_tokens or self.rng.random() < 0.2:
                continue
            count = self.rng.randint(1, room)
            grants.append(self._grant(request, count, known))
            shares.append(request)
        joined = [row for row in joined if row is not None]
        if not grants and not joined and not self.left:
            if self.flying:
                self._settle()
            return
        self.step += 1
        plan = StepPlan(step=self.step, grants=tuple(grants), joined=tuple(joined), left=tuple(self.left))
        self.left = []
        self.runner.forward(plan)
        while len(self.flying) > max(0, self.ahead - 1):
            self._settle()
        if grants:
            self.flying.append((plan, shares, self.runner.sample(plan.step, None)))
        while len(self.flying) > self.ahead:
            self._settle()

    def _join(self, request: Asked) -> NewRow:
        request.live, request.planned, request.in_flight, request.blocks = True, 0, 0, []
        return NewRow(
            request_id=request.name, epoch=request.epoch, token_ids=tuple(request.tokens),
            num_prompt_tokens=len(request.prompt), params=request.params, seed=request.seed,
            stop_token_ids=request.stop_token_ids, blocks=((),) * len(self.free),
        )  # fmt: skip

    def _leave(self, request: Asked) -> None:
        request.live = False
        self.left.append(request.name)
        for pool, block in zip(self.free * (len(request.blocks) // len(self.free)), request.blocks, strict=True):
            pool.append(block)

    def _grant(self, request: Asked, count: int, known: int) -> Grant:
        start, end = request.planned, request.planned + count
        new: list[list[int]] = [[] for _ in self.free]
        while len(request.blocks) // len(self.free) * BLOCK < end:
            for pool, own in zip(self.free, new, strict=True):
                own.append(pool.popleft())
                request.blocks.append(own[-1])
        request.planned = end
        samples = end == known
        request.in_flight += samples
        return Grant(request.name, start, count, samples, request.epoch, tuple(map(tuple, new)) if new[0] else ())

    def _settle(self) -> None:
        plan, shares, pending = self.flying.popleft()
        result = pending.result()
        assert result.step == plan.step and len(result.sampled) == len(plan.grants)
        for i, (grant, request) in enumerate(zip(plan.grants, shares, strict=True)):
            if grant.epoch != request.epoch or request.done:
                continue
            if grant.request_id in result.failed:
                request.failed = result.failed[grant.request_id]
                self._leave(request)
                continue
            if grant.request_id in result.prompt_logprobs:
                rows = result.prompt_logprobs[grant.request_id]
                for at, entry in enumerate(zip(rows.token_ids, rows.logprobs, rows.ranks, strict=True)):
                    request.prompt_logprobs[grant.start + 1 + at] = entry
            assert bool(result.sampled[i]) == grant.samples
            if grant.samples:
                request.in_flight -= 1
                request.outputs += result.sampled[i]
                request.logprobs.append(result.logprobs[i] if result.logprobs else None)
            if request.done:
                self._leave(request)
