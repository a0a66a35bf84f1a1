"""Masks: every constrained request's place in its grammar and its thought, and the rows of bits a step needs.

    add(request) · poll() until compiled · [mask(plan) between forward and sample · advance(outputs) at commit] · drop
A place moves only by tokens that were committed, so a preempted request keeps its own, and a token thrown away never
counts. Along drafts, which `propose` tells of, it goes ahead for the rows of their offsets, and back. End tokens are
decided here: they may follow where the grammar may end and the request may stop. A request that may not stop, and after
which nothing but an end could follow, is ended by the loop.
Must not know: logits, the queue, text.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quire.base.clock import now
from quire.base.log import logger
from quire.grammar.backend import MOST_ROLLBACK, Backend, GrammarVocabulary, Matcher, Rows
from quire.grammar.compiler import Compiled, CompileLimits, Compiler
from quire.grammar.thought import Stage, Thought
from quire.schema.errors import OverloadedError, QuireError
from quire.schema.grammar import GrammarSpec
from quire.schema.messages import EngineOutput, EngineRequest
from quire.schema.step import Mask, StepPlan

log = logger(__name__)
Row = np.ndarray[tuple[int], np.dtype[np.int32]]
# For all the masks of one request, and more for each token it has said: a slower grammar would slow everyone down.
MOST_SECONDS, MORE_SECONDS = 2.0, 0.05
_QUICK = 0.02  # seconds for one mask, over which whoever needs them is looked for

_SLOW = f"the grammar is too complex: its masks took over {MOST_SECONDS:g} seconds, and {MORE_SECONDS:g} for each token"


@dataclass
class Lost:
    """A request that its grammar ends. error None: the grammar is complete, and nothing more may follow.
    `refused`: the grammar is more than a request may ask for, which is its own fault."""

    request_id: str
    error: str | None = None
    refused: bool = False


@dataclass
class _Place:
    given: EngineRequest
    matcher: Matcher | None = None  # None: still compiling, or there is no grammar
    backend: Backend | None = None
    ends: tuple[int, ...] = ()
    num_outputs: int = 0
    wrong: str | None = None
    outgrown: bool = False  # it went wrong by a limit of the backend's
    thought: Thought | None = None  # what may come before the answer
    agrees: bool = True  # the next token of a thought's start tag could be the answer's too
    num_agreed: int = 0  # tokens of the start tag that the matcher has taken
    seconds: float = 0.0  # that its grammar took
    drafts: Sequence[int] = ()  # what its next grant checks, as far as it is known

    def is_slow(self) -> bool:
        return self.seconds > MOST_SECONDS + MORE_SECONDS * self.num_outputs

    def binds(self) -> bool:
        """Whether the next token is not free."""
        thought = self.thought
        return self.matcher is not None or (thought is not None and thought.forced() is not None)

    def waits(self) -> bool:
        """Whether the grammar does not apply to the next token."""
        thought = self.thought
        if self.matcher is None or thought is None:
            return self.matcher is None
        return thought.stage is Stage.INSIDE or (thought.stage is Stage.OPENING and not self.agrees)


Watch = Callable[[EngineRequest], Thought | None]


class Masks:
    def __init__(
        self,
        vocabulary: Callable[[], GrammarVocabulary],
        *,
        limits: CompileLimits | None = None,
        watch: Watch | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`watch`: whether a request's answer may begin with a thought. `vocab_size`: the vocabulary's, to be known
        without making it."""
        self._news = threading.Event()
        self.compiler = Compiler(vocabulary, limits or CompileLimits(), self._news.set)
        self._watch = watch
        self._vocab_size = vocab_size
        self._alone = False  # each mask is timed alone
        self._places: dict[str, _Place] = {}
        self._pending: dict[str, GrammarSpec] = {}
        self._num_waiting: Counter[GrammarSpec] = Counter()  # requests that wait for each

    @property
    def compiling(self) -> bool:
        return bool(self._pending)

    def add(self, request: EngineRequest) -> bool:
        """True: it may run at once. False: once `poll` has named it. QuireError: it is known to be refused, or too many
        wait for theirs."""
        spec, place = request.sampling.grammar, _Place(request)
        if spec is None:  # a budget for its thought, and nothing else
            place.thought = self._watch(request) if self._watch is not None else None
            if place.thought is not None:
                self._places[request.request_id] = place
            return True
        outcome = self.compiler.fetch(spec)
        if isinstance(outcome, QuireError):
            raise outcome
        if outcome is None:
            self.compiler.submit(spec)
            self._pending[request.request_id] = spec
            self._num_waiting[spec] += 1
        self._places[request.request_id] = place
        if outcome is not None:
            self._start(place, outcome)
        return outcome is not None

    def poll(self) -> list[tuple[str, QuireError | None]]:
        """Requests whose grammar is ready, or refused, since the last call."""
        if not self._news.is_set():
            return []
        self._news.clear()
        found: list[tuple[str, QuireError | None]] = []
        for request_id, spec in list(self._pending.items()):
            outcome = self._outcome(spec)
            if outcome is None:
                continue
            self._forget(request_id)
            if isinstance(outcome, QuireError):
                self._places.pop(request_id, None)
                found.append((request_id, outcome))
            else:
                self._start(self._places[request_id], outcome)
                found.append((request_id, None))
        return found

    def _outcome(self, spec: GrammarSpec) -> Compiled | QuireError | None:
        outcome = self.compiler.fetch(spec)
        if outcome is None:
            try:
                self.compiler.submit(spec)  # made, and pushed out of the cache before anybody came for it
            except OverloadedError as full:
                return full
        return outcome

    def _forget(self, request_id: str) -> GrammarSpec | None:
        """It waits no longer; the grammar it waited for, if it was the last that did."""
        spec = self._pending.pop(request_id, None)
        if spec is None:
            return None
        self._num_waiting[spec] -= 1
        if self._num_waiting[spec]:
            return None
        del self._num_waiting[spec]
        return spec

    def wait(self, seconds: float) -> None:
        """Until something may have been compiled."""
        self._news.wait(seconds)

    def drop(self, request_id: str) -> None:
        self._places.pop(request_id, None)
        if (unwanted := self._forget(request_id)) is not None:
            self.compiler.drop(unwanted)

    def close(self) -> None:
        self.compiler.close()

    # ---- a step ------------------------------------------------------------------------------------------------

    def constrains(self, plan: StepPlan) -> bool:
        """Whether some request of the plan has a grammar or a budget for its thought."""
        return bool(self._places) and any(grant.request_id in self._places for grant in plan.grants)

    def mask(self, plan: StepPlan) -> tuple[Mask | None, list[Lost]]:
        """Rows for the grants that sample under a grammar, and the requests that can go no further."""
        if not self._places:
            return None, []
        wanted, lost = [], []
        for number, grant in enumerate(plan.grants):
            if grant.samples and (place := self._places.get(grant.request_id)) is not None:
                if place.wrong is not None:
                    lost.append(Lost(grant.request_id, place.wrong, refused=place.outgrown))
                elif place.binds() or grant.num_drafts:  # without a row, drafts could go past the end of a thought
                    wanted.append((number, place))
        if not wanted:
            return None, lost
        size = self.compiler.vocabulary().size if self._vocab_size is None else self._vocab_size
        rows: Rows = np.zeros((len(wanted), (size + 31) // 32), np.int32)
        lost += self._fill([place for _, place in wanted], rows)
        gone = {one.request_id for one in lost}
        kept = [i for i, (_, place) in enumerate(wanted) if place.given.request_id not in gone]
        if not kept:
            return None, lost
        ahead = [
            (wanted[i][0], offset, row)
            for i in kept
            if (count := plan.grants[wanted[i][0]].num_drafts)
            for offset, row in enumerate(_follow(wanted[i][1], rows[i], count), 1)
        ]
        if len(kept) < len(wanted):
            rows = rows[kept]
        index: tuple[int, ...] = tuple([wanted[i][0] for i in kept])
        offsets: tuple[int, ...] = ()
        if ahead:
            offsets = (*[0] * len(index), *[offset for _, offset, _ in ahead])
            index += tuple(grant for grant, _, _ in ahead)
            rows = np.concatenate([rows, [row for _, _, row in ahead]])
        return Mask(index=index, offsets=offsets, rows=rows.tobytes(), words=rows.shape[1]), lost

    def propose(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """What the next grants of these requests check."""
        for request_id, ids in drafts.items():
            if (place := self._places.get(request_id)) is not None:
                place.drafts = ids

    def advance(self, outputs: Iterable[EngineOutput]) -> None:
        """Take in what was committed."""
        if not self._places:
            return
        for output in outputs:
            if output.new_token_ids and (place := self._places.get(output.request_id)) is not None:
                began = now()
                place.drafts = ()
                _accept(place, output.new_token_ids)
                place.seconds += now() - began
                if place.matcher is None and place.thought is not None and place.thought.stage is Stage.OVER:
                    del self._places[output.request_id]

    def _start(self, place: _Place, compiled: Compiled) -> None:
        place.backend, place.matcher = compiled.backend, compiled.backend.start(compiled.loaded)
        vocabulary, given = self.compiler.vocabulary(), place.given
        silent = [i for i in given.sampling.stop_token_ids if i < len(vocabulary.tokens) and not vocabulary.tokens[i]]
        place.ends = tuple({*vocabulary.ends, *silent})
        place.thought = self._watch(given) if self._watch is not None else None

    def _fill(self, places: list[_Place], rows: Rows) -> list[Lost]:
        by_backend: dict[int, list[int]] = {}
        bound = []
        for i, place in enumerate(places):
            if place.waits():
                _fill_thought(place, rows[i], self.compiler.vocabulary().ends if place.matcher is not None else ())
            else:
                by_backend.setdefault(id(place.backend), []).append(i)
                bound.append(i)
        for own in by_backend.values():
            self._fill_with(places, own, rows)
        lost: list[Lost] = []
        for i in bound:
            place = places[i]
            assert place.matcher is not None
            if place.is_slow():
                lost.append(Lost(place.given.request_id, _SLOW, refused=True))
            elif (fault := place.matcher.fault()) is not None:
                lost.append(Lost(place.given.request_id, f"the grammar is too complex to go on: {fault}", refused=True))
            elif (ended := _set_ends(place, rows[i])) is not None:
                lost.append(ended)
        return lost

    def _fill_with(self, places: list[_Place], own: list[int], rows: Rows) -> None:
        """The rows of one backend: all at once, and once that took long each alone, until it no longer does."""
        backend = places[own[0]].backend
        assert backend is not None
        began = now()
        if not self._alone:
            backend.fill([places[i].matcher for i in own], rows, own)
            spent = now() - began
            self._alone = spent > _QUICK * len(own)
            places[own[0]].seconds += spent if len(own) == 1 else 0.0
            return
        slowest = 0.0
        for i in own:
            backend.fill([places[i].matcher], rows, [i])
            spent, began = now() - began, now()
            places[i].seconds += spent
            slowest = max(slowest, spent)
        self._alone = slowest > _QUICK


def _accept(place: _Place, token_ids: Sequence[int]) -> None:
    place.num_outputs += len(token_ids)
    matcher, thought = place.matcher, place.thought
    for token_id in token_ids:
        if thought is not None and matcher is not None and token_id == thought.opener():
            _open(place, matcher, thought, token_id)
            continue
        if thought is not None and thought.feed(token_id):
            continue
        if matcher is None or token_id in place.ends:
            return
        if not matcher.accept(token_id):
            fault = matcher.fault()
            place.outgrown = fault is not None
            place.wrong = f"token {token_id} does not follow the grammar" + (f": {fault}" if fault else "")
            return


def _open(place: _Place, matcher: Matcher, thought: Thought, token_id: int) -> None:
    """A token of the start tag. As long as it could be the answer's too, the grammar goes along, and back if it was a
    thought after all."""
    if place.agrees and matcher.accept(token_id):
        place.num_agreed += 1
    else:
        place.agrees = False
    thought.feed(token_id)
    if place.num_agreed and (thought.stage is Stage.INSIDE or not place.agrees):
        matcher.rollback(place.num_agreed)
        place.num_agreed = 0


def _fill_thought(place: _Place, row: Row, ends: Sequence[int]) -> None:
    """Everything may follow, or the one token that must; no end of the text where a grammar waits."""
    thought = place.thought
    assert thought is not None
    bits = row.view(np.uint32)
    forced = thought.forced()
    if (forced := thought.opener() if forced is None else forced) is not None:
        bits[:] = 0
        bits[forced >> 5] = np.uint32(1 << (forced & 31))
        return
    bits[:] = np.uint32(0xFFFFFFFF)
    for token_id in () if thought.marks.may_stop else ends:
        bits[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))


def _follow(place: _Place, row: Row, count: int) -> list[Row]:
    """Rows for the places after each of up to `count` drafts that the grammar allows; `row` is the one before them.
    None where a thought is watched, which cannot be taken back."""
    matcher, backend = place.matcher, place.backend
    if matcher is None or backend is None or place.thought is not None:
        return []
    began, found = now(), list[Row]()
    for draft in place.drafts[: min(count, MOST_ROLLBACK)]:
        if draft in place.ends or not row[draft >> 5] >> (draft & 31) & 1 or not matcher.accept(draft):
            break
        rows: Rows = np.zeros((1, len(row)), np.int32)
        backend.fill([matcher], rows, [0])
        row = rows[0]
        found.append(row)
        if matcher.fault() is not None or _set_ends(place, row, len(found)) is not None:
            matcher.rollback(len(found))
            return found[:-1]
    if found:
        matcher.rollback(len(found))
    place.seconds += now() - began
    return found


def _set_ends(place: _Place, row: Row, num_ahead: int = 0) -> Lost | None:
    """A thought may open; end tokens may follow if the grammar may end here and the request may stop.

    `num_ahead`: drafts that the matcher has gone along."""
    given, matcher = place.given, place.matcher
    assert matcher is not None
    words = row.data.cast("B").cast("I")  # plain integers: numpy's cost more than the grammar here
    thought = place.thought
    if thought is not None and (opener := thought.opener()) is not None:
        bit = 1 << (opener & 31)
        place.agrees = bool(words[opener >> 5] & bit)
        words[opener >> 5] |= bit
    may_end = matcher.can_end()
    params = given.sampling
    may_stop = not params.ignore_eos and place.num_outputs + num_ahead >= params.min_tokens
    for token_id in place.ends:
        if may_end and may_stop:
            words[token_id >> 5] |= 1 << (token_id & 31)
        else:
            words[token_id >> 5] &= ~(1 << (token_id & 31)) & 0xFFFFFFFF
    if may_end and not may_stop and not row.any():
        return Lost(given.request_id)
    return None
