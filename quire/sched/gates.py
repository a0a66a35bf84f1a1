"""Gates: one class per constraint on what a step may hold. Ask first, take later.

`admit` is pure: it may shrink a count, or refuse with SKIP (this request, now) or CLOSED (everyone after it too).
`take` records a grant that stands. A gate is asked after those before it, and sees the count they left.
Must not know: blocks, other gates. New constraints are new classes here; the scheduler does not change.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from quire.sched.request import Request
from quire.sched.settings import SchedulerSettings
from quire.sched.shares import LOOKED_AT, Shares

SKIP = 0
CLOSED = -1
NO_LIMIT = 1 << 60


class SchedulerLoad(NamedTuple):
    """What there is to do when a step begins."""

    running: int  # requests
    waiting: int  # requests
    waiting_tokens: int  # of prompts that have not begun


class Gate:
    """A constraint that lets everything pass; each kind overrides what it needs."""

    def open(self, load: SchedulerLoad) -> None:
        """A new step begins."""

    def closed(self) -> bool:
        """Nobody may join any more, whatever it asks: saves looking for its prefix."""
        return False

    def bars(self, request: Request) -> bool:
        """This one may not join yet, whatever it asks, nor anyone in its lane (tenants.py): all are passed by, and do
        not count as turned away."""
        return False

    def singles(self) -> int:
        """How many one-token grants to running requests pass for certain, in any order, without asking each."""
        return NO_LIMIT

    def admit(self, request: Request, count: int) -> int:
        return count

    def take(self, request: Request, count: int) -> None:
        pass

    def take_singles(self, number: int) -> None:
        """The same as `number` one-token takes by running requests."""

    def pass_over(self, request: Request) -> None:
        """A running request that needed tokens gets none in this step."""


class WholeItems(Gate):
    """A gate for which some of a prompt's tokens must be in one step."""

    def is_whole(self, request: Request) -> bool:
        """What comes next in its prompt cannot be cut."""
        return False


class Sequences(Gate):
    """max_num_seqs: requests that run at once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.left = most

    def open(self, load: SchedulerLoad) -> None:
        self.left = self.most - load.running

    def closed(self) -> bool:
        return self.left <= 0

    def admit(self, request: Request, count: int) -> int:
        return count if request.running or self.left > 0 else CLOSED

    def take(self, request: Request, count: int) -> None:
        if not request.running:
            self.left -= 1


class Hold(enum.StrEnum):
    """Who keeps a request from joining."""

    GRAMMAR = "grammar"  # its grammar is being compiled
    KV_TRANSFER = "kv_transfer"  # blocks of its prefix are on their way
    ENCODER = "encoder"  # its media are being encoded elsewhere


class Holds(Gate):
    """Requests that wait for something outside the scheduler; others go past them, and they keep their place.

    A request may have several holders. Each releases its own hold, and the request may join once none is left.
    """

    def __init__(self) -> None:
        self.by_request: dict[str, set[Hold]] = {}

    def __len__(self) -> int:
        return len(self.by_request)

    def add(self, request_id: str, reason: Hold) -> None:
        self.by_request.setdefault(request_id, set()).add(reason)

    def remove(self, request_id: str, reason: Hold) -> None:
        reasons = self.by_request.get(request_id)
        if reasons is not None:
            reasons.discard(reason)
            if not reasons:
                del self.by_request[request_id]

    def forget(self, request_id: str) -> None:
        """It ended: nobody holds it any more."""
        self.by_request.pop(request_id, None)

    def bars(self, request: Request) -> bool:
        return request.id in self.by_request


class Overlap(Gate):
    """Plans out that one request may be in, where that is fewer than there may be. What has landed the scheduler counts
    off.

    A plan takes no more than its share of the requests, so that there are others for the plans beside it: a pipeline
    one of whose stages has all requests leaves the others without work.
    """

    def __init__(self, most: int, depth: int, max_num_seqs: int) -> None:
        self.most, self._num_plans, self._max_num_seqs = most, -(-depth // most), max_num_seqs
        self.left = 0  # requests that this plan may still take

    def open(self, load: SchedulerLoad) -> None:
        self.left = -(-min(load.running + load.waiting, self._max_num_seqs) // self._num_plans)

    def singles(self) -> int:
        return 0

    def closed(self) -> bool:
        return self.left == 0

    def admit(self, request: Request, count: int) -> int:
        if request.num_flights >= self.most:
            return SKIP
        return count if self.left else CLOSED

    def take(self, request: Request, count: int) -> None:
        request.num_flights += 1
        self.left -= 1


class ChunkLimit(Gate):
    """long_prefill_token_threshold: a long prompt gets no more than this per step, and leaves room for others."""

    def __init__(self, most: int) -> None:
        self.most = most

    def admit(self, request: Request, count: int) -> int:
        return min(count, self.most)


class TokenBudget(Gate):
    """max_num_batched_tokens: tokens computed in one step."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.left = most

    def open(self, load: SchedulerLoad) -> None:
        self.left = self.most

    def closed(self) -> bool:
        return self.left <= 0

    def singles(self) -> int:
        return self.left

    def admit(self, request: Request, count: int) -> int:
        return min(count, self.left) if self.left > 0 else CLOSED

    def take(self, request: Request, count: int) -> None:
        self.left -= count

    def take_singles(self, number: int) -> None:
        self.left -= number


class TokenPace:
    """How long a token takes in steps that are long enough to tell, learned from those that were committed."""

    LEAST = 256  # tokens of a step from which on a GPU's time grows with them: fewer wait for the weights
    SHARE = 0.125  # of a new step in the average

    def __init__(self, least: int = LEAST) -> None:
        """`least`: tokens of a step from which on its time tells how long a token takes."""
        self._least = least
        self._seconds = 0.0  # per token

    def learn(self, tokens: int, seconds: float) -> None:
        if tokens >= self._least:
            each = seconds / tokens
            self._seconds = each if not self._seconds else self._seconds + self.SHARE * (each - self._seconds)

    def tokens_within(self, seconds: float) -> int | None:
        """How many tokens a step of so many seconds computes; None: no step was long enough to tell."""
        return int(seconds / self._seconds) if self._seconds else None


class LatencyGoal(Gate):
    """inter_token_latency_goal_ms: tokens of a step in which some requests decode, so that these do not wait long.

    The number follows the time that steps take (TokenPace). Prompts are cut to what decodes leave of it, half of it at
    least. While nobody decodes it does not bind, nor, where larger steps pay, while so much waits that prompts would be
    late themselves. A prompt may be asked about before the decodes are, since it may be older: requests that run and
    were not left with a partial prompt by the step before are taken for decodes from the start.

    Where the goal always binds, a partial prompt leaves half of its room to prompts that have just come, and goes on
    doing so as long as some of these join: short ones need not wait for the end of a long one.
    """

    GRAIN = 128  # tokens: a step takes as long as one of the next multiple, so a budget between two is no use
    SLIVER = 4  # a prompt is not begun with less than this part of a step, as its inverse
    UNKNOWN = 4  # times the least, where the goal always binds and no step was long enough to tell

    def __init__(self, goal: float, least: int, deep: int, pace: TokenPace) -> None:
        """`goal` in seconds; `least`: tokens that a step holds whatever it is; `deep`: waiting tokens, in what a step
        may hold, from which on the queue comes first, 0: never."""
        self.goal, self.least, self.deep, self.pace = goal, least, deep, pace
        self.is_whole: Callable[[Request], bool] = lambda request: False  # cannot be cut: would wait for all decodes
        self.grain = min(self.GRAIN, least)
        self.most = NO_LIMIT
        self.prompts = self.decodes = 0  # tokens of this step
        self.partial = 0  # requests that this step leaves with a partial prompt
        self.expected = 0  # decodes that this step will hold
        self.waiting = self.joined = 0  # requests
        self.divided = False  # room for prompts, between partial ones and those that wait

    def open(self, load: SchedulerLoad) -> None:
        within = self.pace.tokens_within(self.goal)
        if within is None:
            self.most = NO_LIMIT if self.deep else self.UNKNOWN * self.least
        else:
            self.most = max(self.least, within // self.grain * self.grain)
        if self.deep and load.waiting_tokens > self.deep * self.most:
            self.most = NO_LIMIT
        self.expected = max(load.running - self.partial, 0)
        has_news = load.waiting > self.waiting or (self.divided and self.joined > 0)
        self.divided = has_news and load.waiting > 0 and not self.deep
        self.waiting = load.waiting
        self.prompts = self.decodes = self.partial = self.joined = 0

    def closed(self) -> bool:
        return self._num_decodes() > 0 and self._left() <= 0

    def admit(self, request: Request, count: int) -> int:
        left = self._left()
        if self.divided and request.running:
            left -= left // 2
        if request.end - request.planned == 1 or not self._num_decodes() or count <= left or self.is_whole(request):
            return count
        if request.running:
            return left if left > 0 else SKIP
        return left if left * self.SLIVER >= self.most else CLOSED

    def take(self, request: Request, count: int) -> None:
        if request.end - request.planned == 1:  # a decode, whatever the drafts with it
            self.decodes += count
        else:
            self.prompts += count
            self.partial += count < request.end - request.planned
            self.joined += not request.running

    def take_singles(self, number: int) -> None:
        self.decodes += number

    def pass_over(self, request: Request) -> None:
        self.partial += request.end - request.planned > 1

    def _num_decodes(self) -> int:
        return max(self.decodes, self.expected)

    def _left(self) -> int:
        """For prompts."""
        return max(self.most - self._num_decodes(), self.most // 2) - self.prompts


class TenantRows(Gate):
    """Rows between tenants: whoever has its share of them leaves the last ones to those that have less (shares.py)."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self.is_shared = False  # whether several tenants run or wait in this step

    def open(self, load: SchedulerLoad) -> None:
        self.is_shared = self.shares.num_tenants > 1

    def bars(self, request: Request) -> bool:
        """All of a tenant at once: skipping its requests one by one could use up a step before others are reached."""
        return self.is_shared and not request.running and not self.shares.may_take_row(request.tenant)


class TenantTokens(Gate):
    """Prompt tokens between tenants: charges each for its own, and keeps long prompts from taking whole steps.

    A prompt that is computed in pieces leaves room to prompts of other tenants, as far as these can use it: three
    quarters of its own while its tenant is ahead of one of them, nothing once its tenant was served so much less that
    it is due, else half. Where what was left was not used, for whatever reason, nothing is left until somebody comes.
    """

    KEPT, KEPT_AHEAD = 2, 4  # parts of its room, as their inverses

    def __init__(
        self, shares: Shares, *, in_pieces: bool, is_whole: Callable[[Request], bool] = lambda request: False
    ) -> None:
        """`is_whole`: whether what comes next in its prompt cannot be cut."""
        self.waiting, self.in_pieces, self.is_whole = shares.waiting, in_pieces, is_whole
        self.num_added = 0  # requests, when the last step began
        self.partial: dict[int, int] = {}  # tokens that prompts under way lack, by tenant, after the last step
        self.coming: dict[int, int] = {}  # the same, after this one
        self.left_by: int | None = None  # the tenant that left room in this step
        self.used = False  # by another
        self.leaves = True

    def open(self, load: SchedulerLoad) -> None:
        has_news = self.waiting.num_added > self.num_added
        if has_news or self.left_by is not None:
            self.leaves = has_news or self.used
        self.num_added = self.waiting.num_added
        self.partial, self.coming = self.coming, {}
        self.left_by, self.used = None, False

    def admit(self, request: Request, count: int) -> int:
        missing = request.end - request.planned
        if missing <= 1 or not self._leaves(request.tenant) or (count >= missing and not request.running):
            return count
        if self.is_whole(request):
            return count
        needed, is_ahead = self._needed(request.tenant, count)
        return max(count - needed, count // (self.KEPT_AHEAD if is_ahead else self.KEPT), 1)

    def take(self, request: Request, count: int) -> None:
        missing = request.end - request.planned
        if request.running and missing <= 1:
            return
        self.waiting.charge(request.tenant, count)
        if request.tenant != self.left_by:
            self.used = True
            if count < missing and self._leaves(request.tenant) and self._needed(request.tenant, 1)[0]:
                self.left_by, self.used = request.tenant, False
        self._note(request, missing - count)

    def pass_over(self, request: Request) -> None:
        self._note(request, request.end - request.planned)

    def _note(self, request: Request, lacking: int) -> None:
        self.partial.pop(request.tenant, None)
        if lacking > 1:
            self.coming[request.tenant] = self.coming.get(request.tenant, 0) + lacking

    def _leaves(self, tenant: int) -> bool:
        waiting = self.waiting
        return self.leaves and self.in_pieces and waiting.level(tenant) > waiting.now - waiting.credit / 2

    def _needed(self, mine: int, most: int) -> tuple[int, bool]:
        """Tokens, `most` at most, of other tenants' prompts that may go on or join, and whether `mine` is ahead of one
        of them."""
        waiting, needed, is_ahead = self.waiting, 0, False
        level = waiting.level(mine)
        for tenant in waiting.active | self.partial.keys():
            if tenant == mine:
                continue
            tokens = self.partial.get(tenant, 0)
            if tenant in waiting.active:
                tokens += sum(request.num_prompt for request in waiting.first(tenant, LOOKED_AT))
            needed += tokens
            is_ahead = is_ahead or (tokens > 0 and waiting.level(tenant) < level)
            if needed >= most and is_ahead:
                break
        return min(needed, most), is_ahead


class WholePrompts(Gate):
    """enable_chunked_prefill=False: a prompt is computed in one step or not yet, and nobody overtakes it."""

    def admit(self, request: Request, count: int) -> int:
        return CLOSED if request.planned + count < request.end else count


class PartialPrefills(Gate):
    """max_num_partial_prefills, max_long_partial_prefills: prompts of a tenant left half-computed at once.

    Counts the running ones as they take or are passed over; binds only those that would join. One that fits whole may
    overtake. Tenants are counted apart: a long prompt of one does not keep another's from being begun.
    """

    def __init__(self, most: int, most_long: int, threshold: int) -> None:
        self.most, self.most_long = most, most_long
        self.threshold = threshold or NO_LIMIT
        self.partial: Counter[int] = Counter()  # by tenant
        self.long: Counter[int] = Counter()

    def open(self, load: SchedulerLoad) -> None:
        self.partial.clear()
        self.long.clear()

    def admit(self, request: Request, count: int) -> int:
        missing = request.end - request.planned
        if request.running or count >= missing:
            return count
        tenant = request.tenant
        if self.partial[tenant] >= self.most or (missing > self.threshold and self.long[tenant] >= self.most_long):
            return SKIP
        return count

    def take(self, request: Request, count: int) -> None:
        missing = request.end - request.planned
        if count < missing:
            self.partial[request.tenant] += 1
            self.long[request.tenant] += missing > self.threshold

    def pass_over(self, request: Request) -> None:
        if request.planned < len(request.tokens) - 1:
            self.take(request, 0)


class NoSlivers(Gate):
    """A prompt that fits one step whole is not begun with the last sliver of a step that is full of prompts.

    It would end one step later either way, but cut in two: its second part then reads the first from the cache, which
    costs more than the sliver gains. Nobody overtakes it. Steps that are full of decodes do not count, so it never
    waits for them.
    """

    SLIVER = 16  # a budget holds so many
    FULL = 2  # the share of a budget, as its inverse, that prompts must have taken

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.prompts = 0  # tokens of prompts in this step

    def open(self, load: SchedulerLoad) -> None:
        self.prompts = 0

    def admit(self, request: Request, count: int) -> int:
        missing = request.end - request.planned
        if request.running or count >= missing or missing > self.budget:
            return count
        sliver = count * self.SLIVER < self.budget and self.prompts * self.FULL >= self.budget
        return CLOSED if sliver else count

    def take(self, request: Request, count: int) -> None:
        if request.end - request.planned > 1:
            self.prompts += count


def make_gates(
    settings: SchedulerSettings, pace: TokenPace, shares: Shares, holds: Holds, encoder: WholeItems | None = None
) -> list[Gate]:
    """In the order they are asked: those that judge the final count come last."""
    gates: list[Gate] = [holds, Sequences(settings.max_num_seqs), TenantRows(shares)]
    if settings.overlap is not None and settings.overlap < settings.depth:
        gates.append(Overlap(settings.overlap, settings.depth, settings.max_num_seqs))
    if settings.long_prefill_threshold:
        gates.append(ChunkLimit(settings.long_prefill_threshold))
    gates.append(TokenBudget(settings.max_num_batched_tokens))
    if settings.latency_goal and settings.chunked_prefill:
        goal = LatencyGoal(settings.latency_goal, settings.latency_tokens, settings.latency_deep, pace)
        if encoder is not None:
            goal.is_whole = encoder.is_whole
        gates.append(goal)
    if encoder is None:
        gates.append(TenantTokens(shares, in_pieces=settings.chunked_prefill))
    else:
        tokens = TenantTokens(shares, in_pieces=settings.chunked_prefill, is_whole=encoder.is_whole)
        gates += [tokens, encoder]
    if not settings.chunked_prefill:
        gates.append(WholePrompts())
    gates.append(NoSlivers(settings.max_num_batched_tokens))
    gates.append(
        PartialPrefills(
            settings.max_partial_prefills, settings.max_long_partial_prefills, settings.long_prefill_threshold
        )
    )
    return gates
