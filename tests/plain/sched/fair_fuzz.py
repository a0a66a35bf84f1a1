"""Fairness fuzzer: tenants of different kinds ask for as much as they can, and nobody may be left behind.

    python tests/plain/sched/fair_fuzz.py --seeds 500

Every tenant has prompts of its own sizes and always has some waiting; rows, blocks and step sizes are drawn. Checked
after every step, from what was granted and nothing else:
- shares: while tenants wait, the prompt tokens computed for any two of them differ by no more than a longest prompt
  and a step, however long it goes on;
- no starvation: a request that is its tenant's first is not kept waiting while others of any number are begun, also
  where each of these is another tenant's;
- rows: with all of them taken, a tenant that has fewer than its share and waits gets one.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

from quire.sched.settings import SchedulerSettings
from quire.schema.messages import EngineRequest
from tests.plain.sched.kit import Bench, request

LONGEST = 60  # tokens of a prompt
BACKLOG = 6  # requests of a tenant that wait at any time, at least


class Crowd:
    """Tenants that ask without end, and what each was given."""

    def __init__(self, rng: random.Random, *, many_rows: bool) -> None:
        self.rng = rng
        num_tenants = rng.randint(2, 5)
        self.sizes = {name: rng.choice([(1, 4), (5, 12), (30, LONGEST), (1, LONGEST)]) for name in range(num_tenants)}
        self.answers = {name: rng.choice([1, 3]) if many_rows else rng.choice([1, 9, 40]) for name in self.sizes}
        self.budget = rng.choice([64, 100])
        chunked = rng.random() < 0.8
        self.rows = 400 if many_rows else rng.choice([4, 8, 16])
        self.bench = Bench(
            num_blocks=4000 if many_rows else rng.choice([200, 4000]),
            max_model_len=128,
            max_num_batched_tokens=self.budget if chunked else 128,
            max_num_seqs=self.rows,
            chunked_prefill=chunked,
            max_partial_prefills=rng.choice([1, 1, 3]),
            latency_goal=rng.choice([0.0, 12.0]),
            latency_tokens=rng.choice([8, 16]),
            latency_deep=rng.choice([0, 8]),
            depth=rng.choice([1, 2]),
            prefix_caching=False,
        )
        self.bench.scheduler.pace.learn(256, 256.0)
        self.given: dict[str, EngineRequest] = {}
        self.computed: Counter[int] = Counter()  # prompt tokens, by tenant
        self.begun: Counter[int] = Counter()  # requests, by tenant
        self.counter = 0

    @property
    def settings(self) -> SchedulerSettings:
        return self.bench.scheduler.settings

    @property
    def slack(self) -> int:
        """What two tenants may differ by, in prompt tokens."""
        return LONGEST + self.settings.max_num_batched_tokens

    def ask(self, tenant: int, sizes: tuple[int, int], max_tokens: int) -> EngineRequest:
        self.counter += 1
        made = request(
            f"r{self.counter}", self.rng.randint(*sizes), max_tokens, tenant=tenant, arrival=float(self.counter)
        )
        self.given[made.request_id] = made
        self.bench.add(made)
        return made

    def fill(self) -> None:
        """Every tenant has its backlog; whose requests come first differs."""
        waiting = Counter(one.source.tenant for one in self.bench.scheduler.planner.waiting)
        each = {name: max(BACKLOG, 2 * self.budget // sizes[0]) for name, sizes in self.sizes.items()}
        names = [name for name in self.sizes for _ in range(each[name] - waiting[name])]
        self.rng.shuffle(names)
        for name in names:
            self.ask(name, self.sizes[name], self.answers[name])

    def step(self) -> None:
        plan = self.bench.step()
        for grant in plan.grants:
            given = self.given[grant.request_id]
            self.computed[given.tenant] += max(0, min(grant.count, len(given.prompt_token_ids) - grant.start))
        for new in plan.joined:
            self.begun[self.given[new.request_id].tenant] += 1

    def waits(self, given: EngineRequest) -> bool:
        known = self.bench.scheduler.requests.get(given.request_id)
        return known is not None and not known.running


def check_shares(seed: int, steps: int) -> int:
    """The largest difference that was seen."""
    crowd, worst = Crowd(random.Random(seed), many_rows=True), 0
    for _ in range(steps):
        crowd.fill()
        crowd.step()
        served = [crowd.computed[name] for name in crowd.sizes]
        worst = max(worst, max(served) - min(served))
        assert worst <= crowd.slack, f"tenants were served {served} prompt tokens"
    assert min(crowd.computed[name] for name in crowd.sizes) > 0
    return worst


def check_no_starvation(seed: int, steps: int) -> None:
    """One request against all that the others ask, among them ever new tenants with one request each."""
    rng = random.Random(seed)
    crowd = Crowd(rng, many_rows=True)
    for _ in range(20):
        crowd.fill()
        crowd.step()
    patient, strangers = crowd.ask(10_000, (LONGEST, LONGEST), 1), 10_000
    limit = (len(crowd.sizes) + 2 + BACKLOG) * crowd.slack
    before = crowd.computed.total()
    for _ in range(steps):
        crowd.fill()
        for _ in range(rng.randint(0, BACKLOG)):
            strangers += 1
            crowd.ask(strangers, (1, LONGEST), 1)
        crowd.step()
        if not crowd.waits(patient):
            return
        spent = crowd.computed.total() - before
        assert spent <= limit, f"{spent} tokens of others were computed, and a request still waits for its turn"


def check_regulars(seed: int, steps: int) -> None:
    """Tenants that have been served before, against strangers who come once each: they go on being served."""
    rng = random.Random(seed)
    crowd, strangers = Crowd(rng, many_rows=True), 10_000
    last = Counter[int]()  # tokens of all, when a tenant was last begun
    for _ in range(steps):
        crowd.fill()
        waiting = sum(one.source.tenant not in crowd.sizes for one in crowd.bench.scheduler.planner.waiting)
        for _ in range(BACKLOG - waiting):
            strangers += 1
            crowd.ask(strangers, (LONGEST, LONGEST), 1)
        begun = crowd.begun.copy()
        crowd.step()
        total, limit = crowd.computed.total(), (len(crowd.sizes) + BACKLOG) * crowd.slack
        for name in crowd.sizes:
            if crowd.begun[name] > begun[name]:
                last[name] = total
            assert total - last[name] <= limit, f"tenant {name} waits since {total - last[name]} tokens of others"


def check_rows(seed: int, steps: int) -> int:
    """How often rows or blocks were given up. One tenant takes all rows, then others come."""
    rng = random.Random(seed)
    crowd = Crowd(rng, many_rows=False)
    for _ in range(2 * crowd.rows):
        crowd.ask(0, (1, 4), 100)
    for _ in range(6 * crowd.rows):
        crowd.step()
    short = Counter[int]()  # steps that a tenant has waited with fewer rows than its share, and none was free
    for _ in range(steps):
        crowd.fill()
        crowd.step()
        planner = crowd.bench.scheduler.planner
        rows = Counter(one.source.tenant for one in planner.running.items)
        tenants = {one.source.tenant for one in crowd.bench.scheduler.requests.values()}
        for name in crowd.sizes:
            waits = any(one.source.tenant == name for one in planner.waiting)
            lacks = waits and len(planner.running) == crowd.rows and rows[name] < max(1, crowd.rows // len(tenants))
            short[name] = short[name] + 1 if lacks else 0
            assert short[name] <= 40, f"tenant {name} has {rows[name]} of {crowd.rows} rows and gets no more: {rows}"
    return sum(one.times.num_preemptions for one in crowd.bench.scheduler.requests.values())


CHECKS = {"shares": check_shares, "starvation": check_no_starvation, "regulars": check_regulars, "rows": check_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz fairness between tenants.")
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    for seed in range(args.seeds):
        for name, check in CHECKS.items():
            try:
                check(seed, args.steps)
            except BaseException:
                print(f"{name}: seed {seed} failed", flush=True)
                raise
    print(f"{args.seeds} seeds of {', '.join(CHECKS)}: no invariant broken")


if __name__ == "__main__":
    sys.exit(main())
