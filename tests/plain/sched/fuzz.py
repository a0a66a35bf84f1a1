"""Scheduler fuzzer: random configurations, arrivals, holds, aborts, resets, drafts, moves and failures against a worker
that replays plans.

    python tests/plain/sched/fuzz.py --seeds 200 --steps 10000 [--drafts]

With --drafts every configuration verifies drafts.

The worker here keeps only what plans tell it, and models what each block HOLDS: every position is written as a number
that stands for the whole prefix up to it (tokens, salt, adapter, media), and every block a kernel would read must hold
exactly the request's own numbers. A state's block holds the number of one position, and that of a right draft only once
the draft is known to be right. Moves copy what blocks hold, to and from slots too. A row drafts for itself, so only
it knows where it is until a result is committed. Steps run in order; within a step attention layers write before they
read, state layers read before they write. Each request's output is compared with an independent reading of the stop
rules.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable

from msgspec.structs import replace

from quire.sched.encoder_cache import num_vectors
from quire.sched.events import AllBlocksCleared, BlockStored
from quire.sched.gates import SKIP, Gate, Hold
from quire.sched.kv_layout import blocks_needed
from quire.sched.request import Request
from quire.sched.scheduler import Scheduler
from quire.sched.settings import SchedulerSettings
from quire.schema.kv import KVGroup, KVKind, KVLayout
from quire.schema.media import MediaItem
from quire.schema.messages import EngineOutput, EngineRequest, FinishReason
from quire.schema.params import RepetitionDetectionParams, ResolvedParams
from quire.schema.step import Direction, Grant, LogprobRows, Move, NewRow, StepPlan, StepResult
from tests.plain.sched.kit import item

VOCABULARY = 9
F, W, C, S, X = KVKind.FULL, KVKind.WINDOW, KVKind.CHUNK, KVKind.STATE, KVKind.CROSS
MIXES = [
    [(F, 0)], [(F, 0)], [(F, 0), (W, 6)], [(W, 5), (F, 0), (W, 9)], [(F, 0), (C, 8)], [(F, 0), (S, 0)], [(S, 0)],
    [(W, 7)], [(C, 6)], [(F, 0), (X, 0)], [(F, 0), (W, 3), (C, 8), (S, 0), (X, 0)], [(F, 0), (F, 0), (W, 1)],
]  # fmt: skip
PARAMS = [
    ResolvedParams(), ResolvedParams(), ResolvedParams(), ResolvedParams(min_tokens=5, max_tokens=99),
    ResolvedParams(ignore_eos=True), ResolvedParams(prompt_logprobs=0), ResolvedParams(logprobs=0),
    ResolvedParams(skip_reading_prefix_cache=True),
    ResolvedParams(repetition_detection=RepetitionDetectionParams(max_pattern_size=2, min_count=2)),
]  # fmt: skip


def token_at(seed: int, position: int) -> int:
    """What the model says next: a pure function, as sampling is, so a token computed again is the same token."""
    mixed = (seed * 0x9E3779B1 + position * 0x85EBCA77) & 0xFFFFFFFF
    return (mixed ^ mixed >> 13) * 0xC2B2AE35 % 0xFFFFFFFB % VOCABULARY + 1


def key_of(given: EngineRequest) -> int:
    """What must agree besides tokens for K/V to be the same."""
    return hash((given.cache_salt, given.lora_name, given.lora_generation))


class Row:
    """A request on the device: what NewRow and Grants said, and what the device itself produced."""

    def __init__(self, new: NewRow, given: EngineRequest, *, is_cross: bool, joined: bool = False) -> None:
        """`joined`: what is computed of an item depends on all items of the prompt, and what is between them."""
        self.epoch, self.given, self.num_prompt = new.epoch, given, new.num_prompt_tokens
        self.tokens = list(new.token_ids)
        self.tables = [list(table) for table in new.blocks]
        places = [(item.offset, item.offset + item.length, item.key) for item in given.media]
        assert [(item.offset, item.offset + item.length, item.key) for item in new.media] == places, "other media"
        self.places = [] if is_cross else places
        self.media: dict[int, object] = {
            p: (key, p - first) for first, last, key in self.places for p in range(first, last)
        }
        if joined and self.places:
            first, last = self.places[0][0], self.places[-1][1]
            own = tuple((start - first, end - first, key) for start, end, key in self.places)
            self.media[first] = (own, tuple(given.prompt_token_ids[first:last]))
        self.inputs = [key for _, _, key in places] if is_cross else []  # of its encoder: what all positions depend on
        assert new.num_encoder_tokens == (sum(item.length for item in given.media) if is_cross else 0)
        self.prefix: list[int] = []  # number of each position's whole prefix
        self.fresh = True
        self.drafts: list[int] = []  # what its drafter proposed last
        self.num_behind = 0  # positions that plans count and the row does not: drafts that a result not yet in refused
        self.num_flights = 0

    def number(self, upto: int, drafts: list[int]) -> None:
        """Number the positions up to `upto`, whose last inputs are drafts."""
        tokens = self.tokens if not drafts else [*self.tokens[: upto - len(drafts)], *drafts]
        prefix = self.prefix
        last = prefix[-1] if prefix else hash((key_of(self.given), *self.inputs))
        for position in range(len(prefix), upto):
            last = hash((last, tokens[position], self.media.get(position)))
            prefix.append(last)


class Work:
    """A grant as the row that gets it sees it: what it really computes."""

    def __init__(self, grant: Grant, row: Row) -> None:
        self.grant, self.row = grant, row
        self.start = grant.start if row.fresh else len(row.prefix)
        self.drafts = row.drafts[: grant.num_drafts]
        self.upto = self.start + grant.count - grant.num_drafts + len(self.drafts)
        self.new: list[int] = []


class Worker:
    """Replays plans. `blocks[b]` is what block b holds, `homes[b]` the group that wrote it; `slots` are elsewhere."""

    def __init__(
        self, layout: KVLayout, given: dict[str, EngineRequest], rng: random.Random, *, joined: bool = False
    ) -> None:
        self.joined = joined
        self.groups, self.given, self.rng = layout.groups, given, rng
        width = max([group.block_size for group in layout.groups])
        self.blocks: list[list[object]] = [[None] * width for _ in range(layout.num_blocks)]
        self.homes = [-1] * layout.num_blocks
        self.slots: dict[int, tuple[int, list[object]]] = {}
        self.rows: dict[str, Row] = {}
        self.encoded: dict[str, int] = {}  # key -> vectors
        self.is_cross = X in [group.kind for group in layout.groups]

    def encode(self, plan: StepPlan) -> None:
        for key in plan.free_encoded:
            del self.encoded[key]
        for new in plan.encode:
            assert new.item.key not in self.encoded, "encoded again"
            assert new.item.arrays, "nothing to encode"
            self.encoded[new.item.key] = num_vectors(new.item)

    def run(self, plan: StepPlan) -> tuple[StepResult, list[Work]]:
        for name in plan.left:
            del self.rows[name]
        for new in plan.joined:
            assert new.request_id not in self.rows, "joined twice"
            self.rows[new.request_id] = Row(new, self.given[new.request_id], is_cross=self.is_cross, joined=self.joined)
        assert len({grant.request_id for grant in plan.grants}) == len(plan.grants), "two grants for one row"
        work = [Work(grant, self.rows[grant.request_id]) for grant in plan.grants]
        for one in work:
            self.prepare(one)
        self.encode(plan)
        needed = {key for one in work for first, last, key in one.row.places
                  if first < one.upto and one.start < last}  # fmt: skip
        needed |= {key for one in work if one.row.fresh for key in one.row.inputs}
        assert needed <= self.encoded.keys(), "an item was not encoded, or freed too early"
        self.copy([move for move in plan.moves if not move.after])
        for group, spec in enumerate(self.groups):
            passes = {S: (self.read_state, self.write_state), X: (self.write_cross, self.read_cross)}
            for touch in passes.get(spec.kind, (self.write, self.read)):
                for one in work:
                    touch(group, spec, one)
        self.copy([move for move in plan.moves if move.after])
        for one in work:
            one.row.fresh = False
        return self.sample(plan, work), work

    def copy(self, moves: list[Move]) -> None:
        for move in moves:
            if move.direction is Direction.IN:
                home, content = self.slots[move.source]
            else:
                home, content = self.homes[move.source], self.blocks[move.source]
            if move.direction is Direction.OUT:
                assert home >= 0, "an empty block is saved"
                self.slots[move.target] = home, list(content)
            else:
                self.homes[move.target], self.blocks[move.target] = home, list(content)

    def prepare(self, work: Work) -> None:
        grant, row = work.grant, work.row
        assert grant.epoch == row.epoch, "a grant for another row"
        assert grant.count > grant.num_drafts >= 0, "nothing is computed"
        assert grant.start == work.start + row.num_behind, "positions are skipped or done twice"
        certain = work.upto - len(work.drafts)
        assert grant.samples == (certain >= len(row.tokens)), "samples where it should not, or the reverse"
        assert certain <= len(row.tokens), "input tokens are not known"
        for table, more in zip(row.tables, grant.new_blocks, strict=False):
            table.extend(more)
        row.num_flights += 1
        row.number(work.upto, work.drafts)

    def spans(self, size: int, first: int, last: int):
        """(block index, offsets within it, positions) that cover [first, last)."""
        while first < last:
            end = min(last, (first // size + 1) * size)
            yield first // size, first % size, first % size + end - first, first, end
            first = end

    def write(self, group: int, spec: KVGroup, work: Work) -> None:
        table = work.row.tables[group]
        for index, low, high, first, last in self.spans(spec.block_size, work.start, work.upto):
            block = table[index]
            assert block >= 0, "a write to no block"
            self.homes[block] = group
            self.blocks[block][low:high] = work.row.prefix[first:last]

    def read(self, group: int, spec: KVGroup, work: Work) -> None:
        table, start = work.row.tables[group], work.start
        begin = {F: 0, W: max(0, start - spec.window + 1), C: spec.window and start // spec.window * spec.window}
        for index, low, high, first, last in self.spans(spec.block_size, begin[spec.kind], work.upto):
            block = table[index]
            assert block >= 0 and self.homes[block] == group, f"{spec.kind}: no block of this group at {index}"
            assert self.blocks[block][low:high] == work.row.prefix[first:last], (
                f"{spec.kind}: block {block} is another's"
            )

    def read_state(self, group: int, spec: KVGroup, work: Work) -> None:
        if work.start:
            block = work.row.tables[group][(work.start - 1) // spec.block_size]
            assert block >= 0 and self.homes[block] == group, "no state"
            assert self.blocks[block][0] == work.row.prefix[work.start - 1], "the state of another prefix"

    def write_state(self, group: int, spec: KVGroup, work: Work) -> None:
        """States after drafts are elsewhere until it is known which are right."""
        self.put_states(group, spec, work.row, work.start, work.upto - len(work.drafts))

    def put_states(self, group: int, spec: KVGroup, row: Row, first: int, upto: int) -> None:
        for index, _, _, _, last in self.spans(spec.block_size, first, upto):
            block = row.tables[group][index]
            assert block >= 0, "a state without a block"
            self.homes[block] = group
            self.blocks[block][0] = row.prefix[last - 1]

    def write_cross(self, group: int, spec: KVGroup, work: Work) -> None:
        if work.row.fresh:
            for index, block in enumerate(work.row.tables[group]):
                self.homes[block] = group
                self.blocks[block][0] = (work.row.given.media, index)

    def read_cross(self, group: int, spec: KVGroup, work: Work) -> None:
        table, given = work.row.tables[group], work.row.given
        assert len(table) == -(-sum(item.length for item in given.media) // spec.block_size)
        for index, block in enumerate(table):
            assert self.homes[block] == group and self.blocks[block][0] == (given.media, index), "cross"

    def sample(self, plan: StepPlan, done: list[Work]) -> StepResult:
        sampled, logprobs, prompts, failed = [], [], {}, {}
        for work in done:
            grant, row, new = work.grant, work.row, work.new
            given, drafts = row.given, work.drafts
            if grant.samples:
                at = work.upto - len(drafts)
                for draft in (*drafts, None):
                    new.append(token_at(given.seed, at))
                    at += 1
                    if new[-1] != draft:
                        break
                row.tokens += new
                for group, spec in enumerate(self.groups):
                    if spec.kind is S:
                        certain = work.upto - len(drafts)
                        self.put_states(group, spec, row, certain, certain + len(new) - 1)
                del row.prefix[len(row.tokens) - 1 :]
                row.num_behind += grant.num_drafts + 1 - len(new)
                ahead = [token_at(given.seed, len(row.tokens) + i) for i in range(self.rng.randint(0, 5))]
                row.drafts = [t if self.rng.random() < 0.75 else t % VOCABULARY + 1 for t in ahead]
            sampled.append(list(new))
            logprobs.append(rows_of(new) if given.params.logprobs is not None and new else None)
            if given.params.prompt_logprobs is not None and work.start + 1 < row.num_prompt:
                prompts[grant.request_id] = rows_of(row.tokens[work.start + 1 : min(work.upto + 1, row.num_prompt)])
            if self.rng.random() < 0.001:
                failed[grant.request_id] = "as asked"
        return StepResult(
            step=plan.step,
            sampled=sampled,
            logprobs=logprobs if any(logprobs) else None,
            prompt_logprobs=prompts,
            drafts={work.grant.request_id: list(work.row.drafts) for work in done if work.grant.samples},
            verified={work.grant.request_id: len(work.drafts) for work in done if work.drafts},
            no_drafts=self.rng.random() < 0.2,
            failed=failed,
        )


def rows_of(tokens: list[int]) -> LogprobRows:
    return LogprobRows([[t] for t in tokens], [[-float(t)] for t in tokens], list(tokens))


class Client:
    """What one caller saw, and what it should have seen."""

    def __init__(self, given: EngineRequest, max_model_len: int) -> None:
        self.given, self.max_model_len = given, max_model_len
        self.tokens: list[int] = []
        self.prompt_rows: list[int] = []
        self.finish: EngineOutput | None = None

    def take(self, output: EngineOutput) -> None:
        assert self.finish is None, "news after the end"
        if output.new_token_ids:
            assert bool(self.tokens) or output.times is not None, "the first output carries times"
        self.tokens += output.new_token_ids
        if output.logprobs is not None:
            assert output.logprobs.ranks == output.new_token_ids, "log probabilities of other tokens"
        if output.prompt_logprobs is not None:
            self.prompt_rows += output.prompt_logprobs.ranks
        if output.finish_reason is not None:
            assert output.times is not None, "the last output carries times"
            self.finish = output
            self.check(output.finish_reason)

    def check(self, reason: FinishReason) -> None:
        expected, why, stop = self.expected()
        assert self.tokens == expected[: len(self.tokens)], f"{self.given.request_id}: wrong tokens"
        if reason not in (FinishReason.ABORT, FinishReason.ERROR):
            assert (self.tokens, reason, self.finish.stop_reason) == (expected, why, stop), self.given.request_id
            if self.given.params.prompt_logprobs is not None:
                assert self.prompt_rows == list(self.given.prompt_token_ids[1:]), "prompt rows missing or twice"

    def expected(self) -> tuple[list[int], FinishReason, int | None]:
        given, params, out = self.given, self.given.params, []
        while True:
            token = token_at(given.seed, len(given.prompt_token_ids) + len(out))
            out.append(token)
            if len(out) >= params.min_tokens:
                if token == given.eos_token_id and not params.ignore_eos:
                    return out, FinishReason.STOP, None
                if token in params.stop_token_ids:
                    return out, FinishReason.STOP, token
            if len(out) >= given.max_tokens or len(given.prompt_token_ids) + len(out) >= self.max_model_len:
                return out, FinishReason.LENGTH, None
            repeats = out[-1:] == out[-2:-1] or (len(out) >= 4 and out[-2:] == out[-4:-2])
            if params.repetition_detection and len(out) >= params.min_tokens and repeats:
                return out, FinishReason.REPETITION, None


class Adapters(Gate):
    """A constraint of the kind that comes later: one adapter per step, whoever is first. Binds running requests too."""

    def open(self, num_running: int) -> None:
        self.used = 0

    def singles(self) -> int:
        return 0

    def admit(self, request: Request, count: int) -> int:
        return count if request.source.lora_id in (0, self.used or request.source.lora_id) else SKIP

    def take(self, request: Request, count: int) -> None:
        self.used = self.used or request.source.lora_id


class Hiccup(Gate):
    """Another: whoever wants several tokens gets none in every second step. Single ones pass without being asked."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def admit(self, request: Request, count: int) -> int:
        return SKIP if count > 1 and request.running and self.scheduler.step % 2 else count


class World:
    """One configuration and the traffic it gets."""

    def __init__(self, rng: random.Random, tenants: tuple[int, ...] = (), *, with_drafts: bool = False) -> None:
        """`tenants`: those that there are, if not drawn. `with_drafts`: in any case."""
        self.rng = rng
        mix = rng.choice(MIXES)
        size = rng.choice([1, 2, 4, 4, 8])
        other = rng.choice([size, size, size * 2, size * 3])
        groups = [
            KVGroup(kind=kind, block_size=rng.choice([size, other]), window=window, layers=(f"layer{i}",))
            for i, (kind, window) in enumerate(mix)
        ]
        chunked = rng.random() < 0.75
        length = rng.randint(16, 72)
        depth = rng.randint(1, 3)
        drafts = rng.choice([1, 1, 3, 4] if with_drafts else [0, 0, 1, 3, 4])
        encodes = rng.choice([3, 8, 20, 200]) if chunked else 200
        self.settings = settings = SchedulerSettings(
            max_model_len=length,
            max_num_batched_tokens=rng.choice([3, 8, 20, 64]) if chunked else length + rng.choice([0, 9]),
            max_num_seqs=rng.choice([1, 3, 6, 10]),
            policy=rng.choice(["fcfs", "priority"]),
            depth=depth,
            overlap=rng.choice([None, None, 1, rng.randint(1, depth)]),
            num_drafts=drafts,
            chunked_prefill=chunked,
            long_prefill_threshold=rng.choice([0, 0, 2, 7]) if chunked else 0,
            max_partial_prefills=rng.choice([1, 1, 3]),
            max_long_partial_prefills=rng.choice([1, 1, 2]),
            reserve_full_prompt=rng.random() < 0.6,
            watermark=rng.choice([0.0, 0.0, 0.1, 0.3]),
            max_num_queued=20,
            latency_goal=rng.choice([0.0, 0.0, 3.0, 12.0]),
            latency_tokens=rng.choice([2, 6]),
            latency_deep=rng.choice([0, 8]),
            prefix_caching=rng.random() < 0.8,
            hash_algorithm=rng.choice(["sha256", "blake2b", "sha256_cbor"]),
            events=rng.random() < 0.3,
            encoder_tokens=encodes,
            whole_media=rng.random() < 0.3 or length % 3 == 0,
            joined_media=length % 3 == 0,
        )
        self.with_media = rng.choice([0.1, 0.1, 0.6])
        self.longest_item = 9
        if settings.whole_media:
            self.longest_item = min(settings.max_num_batched_tokens, settings.long_prefill_threshold or 9)
        layout = KVLayout(num_blocks=0, page_bytes=1, groups=tuple(groups), slots=(), specs=())
        self.media = 7 if X in [group.kind for group in groups] else 0
        need = blocks_needed(layout, length, settings.max_num_batched_tokens)
        need += sum(-(-self.media // group.block_size) for group in groups if group.kind is X)
        total = int(need * rng.choice([1.0, 1.0, 1.0, 1.3, 2.0, 4.0]))
        self.layout = KVLayout(num_blocks=total, page_bytes=1, groups=tuple(groups), slots=(), specs=())
        self.scheduler = Scheduler(settings, self.layout)
        self.scheduler.pace.learn(256, 256.0)  # a second for each token
        self.one_adapter = rng.random() < 0.2
        if self.one_adapter:
            self.scheduler.planner.use_gates([Adapters(), *self.scheduler.planner.gates])
        self.tenants = tenants or rng.choice([(0,), (0, 5), (1, 2, 3, 4, 9)])
        self.given_up = 0
        self.watch_shares()
        self.plans: list[tuple[Grant, ...]] = []
        self.hiccups, self.idle = chunked and rng.random() < 0.2, 0
        if self.hiccups:
            self.scheduler.planner.use_gates([Hiccup(self.scheduler), *self.scheduler.planner.gates])
        self.given: dict[str, EngineRequest] = {}
        self.clients: dict[str, Client] = {}
        self.worker = Worker(self.layout, self.given, rng, joined=settings.joined_media)
        self.flights: deque[tuple[StepPlan, StepResult, list[Work]]] = deque()
        self.holds: dict[str, set[Hold]] = {}
        self.holding = rng.choice([0.0, 0.0, 0.3])
        self.moving = rng.choice([0.0, 0.0, 0.5]) if settings.prefix_caching else 0.0
        self.saved: dict[tuple[int, bytes], int] = {}  # slots by what they hold
        self.saving: dict[tuple[int, bytes], int] = {}  # the same, with the next plan
        self.num_slots = 0
        self.stems = [[rng.randint(1, VOCABULARY) for _ in range(length)] for _ in range(3)]
        self.aborts = rng.choice([0.0, 0.01, 0.05])
        self.resets = rng.choice([0.0, 0.0, 0.02])
        self.counter = 0
        self.stored: set[tuple[int, bytes]] = set()
        self.seen: Counter[str] = Counter()

    def arrive(self) -> None:
        rng, length = self.rng, self.settings.max_model_len
        size = rng.randint(1, min(40, length - 1))
        stem = rng.choice(self.stems)[: rng.randint(0, size)]
        prompt = tuple(stem + [rng.randint(1, VOCABULARY) for _ in range(size - len(stem))])
        siblings, parent = rng.choice([1, 1, 1, 2, 4]), f"p{self.counter}"
        generation = rng.randint(0, 1)
        salt, lora, priority = rng.choice([None, None, "a", "b"]), rng.choice([0, 0, 0, 1, 2]), rng.randint(0, 3)
        media = self.draw_media(size)
        tenant = rng.choice(self.tenants)
        params, max_tokens = rng.choice(PARAMS), rng.choice([rng.randint(1, 24), length])
        for _ in range(siblings):
            name = f"r{rng.randint(0, 60)}" if rng.random() < 0.2 else f"r{self.counter + 1000}"
            self.counter += 1
            if name in self.scheduler.requests or self.scheduler.num_waiting >= 20:
                continue
            self.given[name] = given = EngineRequest(
                request_id=name, prompt_token_ids=prompt, seed=rng.getrandbits(32),
                max_tokens=max_tokens, eos_token_id=rng.choice([None, 1]),
                params=replace(params, stop_token_ids=rng.choice([(), (2,), (1, 3)])),
                priority=priority, arrival=float(self.counter),
                tenant=tenant, cache_salt=salt, lora_id=lora, lora_name=f"adapter {lora}" if lora else None,
                parent_id=parent, lora_generation=generation if lora else 0, media=media,
            )  # fmt: skip
            self.scheduler.add(given)
            self.clients[name] = Client(given, length)
            self.holds[name] = set()
            if rng.random() < self.holding:
                for reason in rng.sample(list(Hold), rng.randint(1, len(Hold))):
                    self.scheduler.hold(name, reason)
                    self.holds[name].add(reason)
                self.seen["held"] += 1

    def draw_media(self, size: int) -> tuple[MediaItem, ...]:
        """Of a prompt of so many tokens. Equal content has equal length."""
        rng = self.rng
        if self.media:
            span = rng.randint(1, self.media)
            return (item(0, span, f"{rng.choice('xy')}{span}"),)
        items: list[MediaItem] = []
        if rng.random() < self.with_media:
            at = rng.randint(0, size - 1)
            while at < size and len(items) < 4:
                span = rng.randint(1, min(9, size - at, self.longest_item))
                mask = (1, *[rng.randint(0, 1) for _ in range(span - 1)]) if rng.random() < 0.3 else ()
                one = item(at, span, f"{rng.choice('xyzw')}{span}{mask or ''}")
                items.append(replace(one, takes_vector=bytes(mask)))
                at += span + rng.choice([0, 0, 1, 3])
        while self.settings.joined_media and len(items) > 1 and not self.fits(items):
            items.pop()
        return tuple(items)

    def fits(self, items: list[MediaItem]) -> bool:
        """One step, if they are joined."""
        settings = self.settings
        most = min(settings.max_num_batched_tokens, settings.long_prefill_threshold or 99, settings.encoder_tokens)
        return items[-1].offset + items[-1].length - items[0].offset <= most

    def watch_shares(self) -> None:
        """Whatever is given up belongs to one that has more than its share, and is claimed by one that has less."""
        shares, kv = self.scheduler.planner.shares, self.scheduler.kv
        rows_of, blocks_of = shares.row_to_give_up, shares.blocks_to_give_up

        def lose(request: Request | None, held: Counter[int], total: int, ranks: list[float]) -> Request | None:
            if request is None:
                return None
            running = self.scheduler.planner.running.items
            tenants = {one.source.tenant for one in self.scheduler.requests.values()}
            first = next(one for one in running if one.source.tenant == request.source.tenant)
            assert request is not first, "the oldest of a tenant is given up"
            assert held[request.source.tenant] > total // len(tenants), (
                "given up by one that has no more than its share"
            )
            assert ranks and request.rank >= min(ranks), "given up for nobody, or for a lower priority"
            self.given_up += 1
            return request

        def row(barred: Callable[[Request], bool]) -> Request | None:
            planner, most = self.scheduler.planner, self.settings.max_num_seqs
            rows = Counter(one.source.tenant for one in planner.running.items)
            tenants = {one.source.tenant for one in self.scheduler.requests.values()}
            claims = [one for one in planner.waiting if rows[one.source.tenant] < max(1, most // len(tenants))]
            free = [one.rank for one in claims if not self.holds[one.id]]
            return lose(rows_of(barred), rows, most, free)

        def blocks(claimant: Request) -> Request | None:
            held = Counter[int]()
            for one in self.scheduler.planner.running.items:
                held[one.source.tenant] += sum(block >= 0 for table in one.holding.tables for block in table)
            assert claimant.id in self.scheduler.requests and not claimant.running, "blocks for one that is gone"
            return lose(blocks_of(claimant), held, kv.pool.num_blocks, [claimant.rank])

        shares.row_to_give_up, shares.blocks_to_give_up = row, blocks

    def disturb(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        if rng.random() < self.aborts and scheduler.requests:
            names = list(scheduler.requests)
            for output in scheduler.abort([*rng.sample(names, rng.randint(1, (len(names) + 1) // 2)), "unknown"]):
                self.clients[output.request_id].take(output)
                self.seen["aborted"] += 1
        if rng.random() < self.resets:
            pool, force = scheduler.kv.pool, rng.random() < 0.5
            held = scheduler.num_running > 0
            assert scheduler.reset_prefix_cache(force) == (force or not held)
            assert (held and not force) or not any(pool.named), "names outlived a reset"
            if not any(pool.named):
                self.saved, self.saving = {}, {}  # whoever keeps slots forgets them too
            self.seen["resets"] += 1

    def let_go(self) -> None:
        """Holders release what they hold, each its own, and now and then what they do not."""
        rng = self.rng
        for name, reasons in self.holds.items():
            if reasons and rng.random() < 0.3:
                reason = rng.choice(list(reasons))
                reasons.discard(reason)
                self.scheduler.release(name, reason)
            elif self.holding and rng.random() < 0.1 and (others := [one for one in Hold if one not in reasons]):
                self.scheduler.release(name, rng.choice(others))
        self.holds = {name: reasons for name, reasons in self.holds.items() if name in self.scheduler.requests}

    def move(self) -> None:
        """Save what can be found, bring back what was saved and cannot, and put blocks elsewhere."""
        rng, kv = self.rng, self.scheduler.kv
        group = rng.choice([group for group, _ in kv.growing])
        if names := list(kv.pool.named[group]):
            for name in rng.sample(names, min(len(names), 3)):
                if (group, name) not in self.saved and (group, name) not in self.saving:
                    self.num_slots += 1
                    assert kv.moves.save(group, name, self.num_slots, after=rng.random() < 0.5)
                    self.saving[group, name] = self.num_slots
                    self.seen["saved"] += 1
            self.seen["relocated"] += kv.moves.relocate(group, rng.choice(names))
        for request in rng.sample(list(self.scheduler.planner.waiting), min(2, self.scheduler.num_waiting)):
            for group, size in kv.growing:
                for index in range(len(request.tokens) // size):
                    slot = self.saved.get((group, kv.name_of(request, group, index)))
                    if slot is not None:
                        self.seen["brought"] += kv.moves.bring(request, group, index, slot)

    def step(self, arrivals: bool = True) -> None:
        rng, scheduler, settings = self.rng, self.scheduler, self.settings
        if arrivals and rng.random() < 0.3 and len(scheduler.requests) < 2 * settings.max_num_seqs + 2:
            self.arrive()
        self.disturb()
        self.let_go()
        if rng.random() < self.moving:
            self.move()
        preempted = scheduler.tally.preempted
        plan = scheduler.plan()
        lacked_blocks = scheduler.tally.preempted > preempted + self.given_up
        assert not lacked_blocks or not plan.joined, "someone joined where another had to leave"
        self.seen["given up"] += self.given_up
        self.given_up = 0
        self.plans.append(plan.grants)
        if plan.grants:
            self.check_plan(plan)
            self.saved |= self.saving
            self.saving = {}
            self.flights.append((plan, *self.worker.run(plan)))
            self.check_flights(plan)
            self.check_tables(plan)
            self.seen["steps"] += 1
            self.seen["verifying"] += any(grant.num_drafts for grant in plan.grants)
            self.seen["drafts"] += sum([grant.num_drafts for grant in plan.grants])
            self.seen["accepted"] += sum([len(new) - 1 for new in self.flights[-1][1].sampled if new])
            self.seen["resumed"] += sum([new.epoch > 0 for new in plan.joined])
        self.idle = 0 if plan.grants or self.flights or not scheduler.has_runnable() else self.idle + 1
        assert self.idle <= self.hiccups, "stuck: requests wait, nothing runs, nothing is in flight"
        most = settings.depth - 1 if plan.grants else len(self.flights) - 1
        depth = rng.randint(0, max(0, most))
        while len(self.flights) > depth:
            done, result, work = self.flights.popleft()
            for one in work:
                one.row.num_flights -= 1
                one.row.num_behind -= one.grant.num_drafts + 1 - len(one.new) if one.grant.samples else 0
            for output in scheduler.commit(done, result):
                self.clients[output.request_id].take(output)
            scheduler.audit()
        self.check_events()

    def check_plan(self, plan: StepPlan) -> None:
        settings, rows = self.settings, self.worker.rows
        assert plan.total_tokens == sum([g.count for g in plan.grants]) <= settings.max_num_batched_tokens
        assert self.scheduler.num_running <= settings.max_num_seqs
        partial = Counter[int]()
        for grant in plan.grants:
            request = self.scheduler.requests[grant.request_id]
            unfinished = grant.start + grant.count < len(request.tokens)
            partial[request.source.tenant] += unfinished
            assert settings.chunked_prefill or not unfinished, "a prompt in pieces"
            given = request.source
            limit = min(len(given.prompt_token_ids) + given.max_tokens, settings.max_model_len)
            assert grant.start + grant.count < limit, "a token is computed that nobody will read"
            threshold = settings.long_prefill_threshold
            assert not threshold or grant.count <= threshold, "more than the chunk limit"
        self.check_encoding(plan)
        adapters = {self.scheduler.requests[grant.request_id].source.lora_id for grant in plan.grants}
        assert not self.one_adapter or len(adapters - {0}) <= 1, "two adapters in one step"
        most = max(partial.values(), default=0)
        assert most <= settings.max_partial_prefills, f"{most} prompts of one tenant are half-computed"
        for new in plan.joined:
            self.seen["joined"] += 1
            self.seen["hits"] += new.epoch == 0 and self.scheduler.requests[new.request_id].num_cached > 0
            assert new.request_id not in rows or new.request_id in plan.left
            assert not self.holds[new.request_id], "one that is held joined"

    def check_encoding(self, plan: StepPlan) -> None:
        settings, encoder = self.settings, self.scheduler.planner.encoder
        sizes = [num_vectors(one.item) for one in plan.encode]
        assert sum(sizes) <= settings.encoder_tokens or len(sizes) == 1, "more is encoded than the budget"
        self.seen["encoded"] += len(sizes)
        self.seen["freed"] += len(plan.free_encoded)
        for grant in plan.grants:
            media = self.scheduler.requests[grant.request_id].source.media
            upto = grant.start + grant.count
            if self.media:
                self.seen["with media"] += grant.request_id in {new.request_id for new in plan.joined}
                continue
            if settings.joined_media and encoder is not None and media:
                assert not media[0].offset < upto < media[-1].offset + media[-1].length, "items are in several steps"
                self.seen["joined media"] += (
                    len(media) > 1 and media[0].offset < upto and grant.start < media[-1].offset
                )
            if settings.whole_media and encoder is not None:
                assert not any(one.offset < upto < one.offset + one.length for one in media), "an item is split"
            self.seen["with media"] += any(one.offset < upto and grant.start < one.offset + one.length for one in media)

    def check_flights(self, plan: StepPlan) -> None:
        most = self.settings.overlap or self.settings.depth
        flights = [self.worker.rows[grant.request_id].num_flights for grant in plan.grants]
        assert max(flights) <= most, f"one request is in {max(flights)} plans, and {most} are allowed"

    def check_tables(self, plan: StepPlan) -> None:
        """The worker's tables are the scheduler's, except where the scheduler has given blocks back since."""
        for grant in plan.grants:
            ours = self.scheduler.requests[grant.request_id].holding.tables
            theirs = self.worker.rows[grant.request_id].tables
            for mine, other in zip(ours, theirs, strict=True):
                if mine != other:
                    assert len(mine) == len(other), "tables of different length"
                    assert all(a in (-1, b) for a, b in zip(mine, other, strict=True)), "tables differ"

    def check_events(self) -> None:
        if not self.settings.events:
            return
        for event in self.scheduler.take_events():
            if isinstance(event, AllBlocksCleared):
                self.stored.clear()
                continue
            names = {(event.group, name) for name in event.block_hashes}
            if isinstance(event, BlockStored):
                assert not names & self.stored and len(event.token_ids) == len(names) * event.block_size
                self.stored |= names
            else:
                assert names <= self.stored
                self.stored -= names
        named = self.scheduler.kv.pool.named
        assert self.stored == {(group, name) for group, found in enumerate(named) for name in found}, "events differ"

    def drain(self) -> None:
        """Everyone ends, every block returns, and the worker keeps no row it will not be told to free."""
        patience = 4000
        while self.scheduler.requests or self.flights:
            self.step(arrivals=False)
            patience -= 1
            assert patience, "requests do not end"
        self.scheduler.kv.moves.clear()
        pool = self.scheduler.kv.pool
        assert pool.num_free == pool.num_blocks, "blocks are still held"
        assert all(client.finish is not None for client in self.clients.values()), "a request was forgotten"
        assert set(self.worker.rows) == set(self.scheduler.planner.left), "rows are left over"
        self.scheduler.audit()
        encoder = self.scheduler.planner.encoder
        if encoder is not None:
            assert not encoder.unfinished and not encoder._made_by, "media of requests that ended"
            freed = set(encoder._freed)
            assert encoder.entries.keys() | freed >= self.worker.encoded.keys() - freed, "vectors nobody will free"
            assert encoder.entries.keys() <= self.worker.encoded.keys(), "vectors that are not there"


def run_seed(
    seed: int,
    steps: int,
    tenants: tuple[int, ...] = (),
    plans: list[tuple[Grant, ...]] | None = None,
    *,
    with_drafts: bool = False,
) -> Counter[str]:
    """`steps` non-empty steps over several worlds; what was seen. `plans`: takes what was planned."""
    rng, seen = random.Random(seed), Counter[str]()
    while seen["steps"] < steps:
        world = World(rng, tenants, with_drafts=with_drafts)
        goal = min(rng.randint(50, 500), steps - seen["steps"])
        while world.seen["steps"] < goal:
            world.step()
        world.drain()
        if plans is not None:
            plans += world.plans
        seen += world.seen + Counter(worlds=1)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz the scheduler.")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--drafts", action="store_true", help="only configurations with drafts")
    asked = parser.parse_args()
    started, total = time.perf_counter(), Counter[str]()
    for seed in range(asked.first, asked.first + asked.seeds):
        try:
            total += run_seed(seed, asked.steps, with_drafts=asked.drafts)
        except BaseException:
            print(f"seed {seed} failed", flush=True)
            raise
        print(f"seed {seed}: {dict(total)} {time.perf_counter() - started:.0f}s", flush=True)
    print(f"{asked.seeds} seeds, no invariant broken: {dict(total)}, {time.perf_counter() - started:.0f}s")


if __name__ == "__main__":
    sys.exit(main())
