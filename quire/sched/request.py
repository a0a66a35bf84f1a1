"""Request: the engine's private, and only mutable, copy of one request's state.

Scheduling reads no phase, only counts of tokens:

    tokens   [ prompt ............ | outputs known ... ]            len(tokens)
                 ^computed    ^planned                  ^end        ^limit (never reached alive)
    computed: results are in    planned: granted, perhaps still in flight    end: known tokens and those in flight
    target:   how far `planned` may go now: `end` plus drafts, but never the last token of all, which nobody reads

Must not know: gates, order, blocks (it only carries what kv_cache.py holds for it).
"""

from __future__ import annotations

from quire.sched.kv_cache import Holding
from quire.sched.repetition import Repetition
from quire.schema.messages import EngineRequest
from quire.schema.stats import RequestTimes
from quire.schema.step import Grant, NewRow


class Request:
    __slots__ = (
        "computed", "drafts", "end", "epoch", "given", "held", "id", "last_token", "limit", "next_block", "num_cached",
        "num_flights", "num_prompt", "num_prompt_logprobs", "order", "planned", "repetition", "room", "running",
        "stops", "target", "times", "tokens", "watch_from",
    )  # fmt: skip

    def __init__(self, given: EngineRequest, *, limit: int, queued: float) -> None:
        self.given, self.id = given, given.request_id
        self.tokens: list[int] = list(given.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.limit = limit  # tokens in all, prompt included, at which it ends
        self.stops = stop_ids(given)
        rule = given.params.repetition_detection
        self.repetition = None if rule is None else Repetition(rule, start=self.num_prompt)
        self.watch_from = limit if rule is None else 0  # length from which any token may end
        self.order: tuple[float, ...] = ()
        self.running = False
        self.epoch = 0
        self.held = Holding()
        self.num_cached = 0  # prompt tokens found in the prefix cache when first admitted
        self.num_prompt_logprobs = 0  # prompt positions whose log probabilities went out
        self.times = RequestTimes(queued=queued)
        self.last_token: float | None = None  # when its newest token came
        self.restart()

    def restart(self) -> None:
        """Nothing is computed (any more); what is known stays."""
        self.computed = self.planned = 0
        self.num_flights = 0  # plans out that it is in; counted only where that is limited
        self.room = 0  # tokens its blocks can hold
        self.next_block = 0  # the KV cache has nothing to do before `computed` reaches this
        self.drafts: tuple[int, ...] = ()
        self.end = self.target = len(self.tokens)

    @property
    def reads_cache(self) -> bool:
        """Prompt log probabilities need every prompt position computed."""
        params = self.given.params
        return params.prompt_logprobs is None and not params.skip_reading_prefix_cache

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    def grant(self, count: int, new_blocks: tuple[tuple[int, ...], ...]) -> Grant:
        """Count `count` more tokens as planned; a grant that reaches the end will bring one more token (at least)."""
        start, end, drafts = self.planned, self.end, self.drafts
        self.planned = upto = start + count
        samples = upto >= end
        if samples:
            self.end = end = end + 1
            if drafts:  # the next position is unknown until these are judged, so nothing is planned past them
                self.drafts = drafts = drafts[: upto - end + 1]
                self.target = upto if drafts else min(end, self.limit - 1)
            elif end < self.limit:
                self.target = end
        return Grant(self.id, start, count, samples, self.epoch, new_blocks, drafts)

    def judge(self, num_accepted: int) -> None:
        """The drafts in flight came back; the wrong ones count as not computed."""
        num_rejected = len(self.drafts) - num_accepted
        self.computed -= num_rejected
        self.planned -= num_rejected
        self.end += num_accepted
        self.target = min(self.end, self.limit - 1)
        self.drafts = ()

    def propose(self, drafts: list[int]) -> None:
        """Check these next. Stale when a later token is already in flight; cut to what may still be generated."""
        if self.planned == len(self.tokens) - 1:
            self.drafts = tuple(drafts[: self.limit - len(self.tokens) - 1])
            self.target = self.end + len(self.drafts)

    def row(self) -> NewRow:
        given = self.given
        fresh = len(self.tokens) == self.num_prompt
        return NewRow(
            request_id=self.id,
            epoch=self.epoch,
            token_ids=given.prompt_token_ids if fresh else tuple(self.tokens),
            num_prompt_tokens=self.num_prompt,
            params=given.params,
            seed=given.seed,
            stop_token_ids=tuple(sorted(self.stops)),
            blocks=tuple(tuple(table) for table in self.held.tables),
            lora_id=given.lora_id,
        )


def stop_ids(given: EngineRequest) -> frozenset[int]:
    """Every token that may end the text."""
    eos = given.eos_token_id
    ends = () if eos is None or given.params.ignore_eos else (eos,)
    return frozenset((*ends, *given.stop_token_ids))
