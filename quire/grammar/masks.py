"""Masks: every constrained request's state in its grammar and its reasoning, and the bitmasks of a step.

    add(request) · poll() until compiled · [mask(plan) between forward and sample · advance(outputs) at commit] · drop
A state advances only by committed tokens, so a preempted request keeps its state, and a discarded token never
counts. For drafts, announced by `propose`, it is advanced for the rows of their offsets, and rolled back. End tokens
are decided here: they may follow if the grammar may end and the request may stop. A request that may not stop, and
after which only an end could follow, is ended by the loop.
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
# For all masks of one request, and more for each of its tokens: a slower grammar would delay all requests.
MOST_SECONDS, MORE_SECONDS = 2.0, 0.05
_QUICK = 0.02  # seconds for one mask, above which the slow request is determined

_SLOW = f"the grammar is too complex: its masks took over {MOST_SECONDS:g} seconds, and {MORE_SECONDS:g} for each token"


@dataclass
class Lost:
    """A request that its grammar ends. error None: the grammar is complete, and nothing more may follow.
    `refused`: the grammar exceeds a limit, which is a client error."""

    request_id: str
    error: str | None = None
    refused: bool = False


@dataclass
class _GrammarState:
    request: EngineRequest
    matcher: Matcher | None = None  # None: still compiling, or there is no grammar
    backend: Backend | None = None
    ends: tuple[int, ...] = ()
    num_outputs: int = 0
    wrong: str | None = None
    outgrown: bool = False  # it failed because of a limit of the backend
    thought: Thought | None = None  # reasoning that may come before the answer
    agrees: bool = True  # the next token of a thought's start tag could be the answer's too
    num_agreed: int = 0  # tokens of the start tag that the matcher has taken
    seconds: float = 0.0  # spent on its masks
    drafts: Sequence[int] = ()  # what its next grant checks, as far as it is known

    def is_slow(self) -> bool:
        return self.seconds > MOST_SECONDS + MORE_SECONDS * self.num_outputs

    def binds(self) -> bool:
        """Whether the next token is constrained."""
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
        ends_slow: bool = True,
    ) -> None:
        """`watch`: whether a request's answer may start with reasoning. `vocab_size`: known before the vocabulary
        is built. `ends_slow`: a request whose masks take too long is ended."""
        self._news = threading.Event()
        self.compiler = Compiler(vocabulary, limits or CompileLimits(), self._news.set)
        self._watch = watch
        self._vocab_size, self._ends_slow = vocab_size, ends_slow
        self._alone = False  # each mask is timed separately
        self._states: dict[str, _GrammarState] = {}
        self._pending: dict[str, GrammarSpec] = {}
        self._num_waiting: Counter[GrammarSpec] = Counter()  # requests that wait for each

    @property
    def compiling(self) -> bool:
        return bool(self._pending)

    def add(self, request: EngineRequest) -> bool:
        """True: it may run at once. False: once `poll` has returned it. QuireError: it is refused, or too many
        are queued."""
        spec, state = request.sampling.grammar, _GrammarState(request)
        if spec is None:  # only a reasoning budget
            state.thought = self._watch(request) if self._watch is not None else None
            if state.thought is not None:
                self._states[request.request_id] = state
            return True
        outcome = self.compiler.fetch(spec)
        if isinstance(outcome, QuireError):
            raise outcome
        if outcome is None:
            self.compiler.submit(spec)
            self._pending[request.request_id] = spec
            self._num_waiting[spec] += 1
        self._states[request.request_id] = state
        if outcome is not None:
            self._start(state, outcome)
        return outcome is not None

    def poll(self) -> list[tuple[str, QuireError | None]]:
        """Requests whose grammar is ready, or refused, since the last call."""
        if not self._news.is_set():
            return []
        self._news.clear()
        finished: list[tuple[str, QuireError | None]] = []
        for request_id, spec in list(self._pending.items()):
            outcome = self._outcome(spec)
            if outcome is None:
                continue
            self._forget(request_id)
            if isinstance(outcome, QuireError):
                self._states.pop(request_id, None)
                finished.append((request_id, outcome))
            else:
                self._start(self._states[request_id], outcome)
                finished.append((request_id, None))
        return finished

    def _outcome(self, spec: GrammarSpec) -> Compiled | QuireError | None:
        outcome = self.compiler.fetch(spec)
        if outcome is None:
            try:
                self.compiler.submit(spec)  # compiled, and evicted from the cache before it was fetched
            except OverloadedError as full:
                return full
        return outcome

    def _forget(self, request_id: str) -> GrammarSpec | None:
        """It no longer waits; returns its grammar if it was the last one waiting for it."""
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
        self._states.pop(request_id, None)
        if (unwanted := self._forget(request_id)) is not None:
            self.compiler.drop(unwanted)

    def close(self) -> None:
        self.compiler.close()

    # ---- a step ------------------------------------------------------------------------------------------------

    def constrains(self, plan: StepPlan) -> bool:
        """Whether some request of the plan has a grammar or a reasoning budget."""
        return bool(self._states) and any(grant.request_id in self._states for grant in plan.grants)

    def mask(self, plan: StepPlan) -> tuple[Mask | None, list[Lost]]:
        """Rows for the grants that sample under a grammar, and the requests that cannot continue."""
        if not self._states:
            return None, []
        constrained, lost = [], []
        for number, grant in enumerate(plan.grants):
            if grant.samples and (state := self._states.get(grant.request_id)) is not None:
                if state.wrong is not None:
                    lost.append(Lost(grant.request_id, state.wrong, refused=state.outgrown))
                elif state.binds() or grant.num_drafts:  # without a row, drafts could go past the end of the reasoning
                    constrained.append((number, state))
        if not constrained:
            return None, lost
        size = self.compiler.vocabulary().size if self._vocab_size is None else self._vocab_size
        rows: Rows = np.zeros((len(constrained), (size + 31) // 32), np.int32)
        lost += self._fill([state for _, state in constrained], rows)
        gone = {one.request_id for one in lost}
        remaining = [i for i, (_, state) in enumerate(constrained) if state.request.request_id not in gone]
        if not remaining:
            return None, lost
        ahead = [
            (constrained[i][0], offset, row)
            for i in remaining
            if (count := plan.grants[constrained[i][0]].num_drafts)
            for offset, row in enumerate(_follow(constrained[i][1], rows[i], count, self._ends(constrained[i][1])), 1)
        ]
        if len(remaining) < len(constrained):
            rows = rows[remaining]
        index: tuple[int, ...] = tuple([constrained[i][0] for i in remaining])
        offsets: tuple[int, ...] = ()
        if ahead:
            offsets = (*[0] * len(index), *[offset for _, offset, _ in ahead])
            index += tuple(grant for grant, _, _ in ahead)
            rows = np.concatenate([rows, [row for _, _, row in ahead]])
        return Mask(index=index, offsets=offsets, rows=rows.tobytes(), words=rows.shape[1]), lost

    def propose(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """The drafts that the next grants of these requests verify."""
        for request_id, ids in drafts.items():
            if (state := self._states.get(request_id)) is not None:
                state.drafts = ids

    def advance(self, outputs: Iterable[EngineOutput]) -> None:
        """Advance by the committed tokens."""
        if not self._states:
            return
        for output in outputs:
            if output.new_token_ids and (state := self._states.get(output.request_id)) is not None:
                began = now()
                state.drafts = ()
                _accept(state, output.new_token_ids)
                state.seconds += now() - began
                if state.matcher is None and state.thought is not None and state.thought.stage is Stage.OVER:
                    del self._states[output.request_id]

    def _start(self, state: _GrammarState, compiled: Compiled) -> None:
        state.backend, state.matcher = compiled.backend, compiled.backend.start(compiled.loaded)
        vocabulary, engine_request = self.compiler.vocabulary(), state.request
        stops = engine_request.sampling.stop_token_ids
        silent = [i for i in stops if i < len(vocabulary.tokens) and not vocabulary.tokens[i]]
        state.ends = tuple({*vocabulary.ends, *silent})
        state.thought = self._watch(engine_request) if self._watch is not None else None

    def _fill(self, states: list[_GrammarState], rows: Rows) -> list[Lost]:
        by_backend: dict[int, list[int]] = {}
        bound = []
        for i, state in enumerate(states):
            if state.waits():
                assert state.thought is not None
                _fill_thought(state.thought, rows[i], self._ends(state))
            else:
                by_backend.setdefault(id(state.backend), []).append(i)
                bound.append(i)
        for indices in by_backend.values():
            self._fill_with(states, indices, rows)
        lost: list[Lost] = []
        for i in bound:
            state = states[i]
            assert state.matcher is not None
            if self._ends_slow and state.is_slow():
                lost.append(Lost(state.request.request_id, _SLOW, refused=True))
            elif (fault := state.matcher.fault()) is not None:
                lost.append(
                    Lost(state.request.request_id, f"the grammar is too complex to continue: {fault}", refused=True)
                )
            elif (ended := _set_ends(state, rows[i])) is not None:
                lost.append(ended)
        return lost

    def _ends(self, state: _GrammarState) -> Sequence[int]:
        """Tokens that may not end the text during reasoning, because a grammar waits."""
        return self.compiler.vocabulary().ends if state.matcher is not None else ()

    def _fill_with(self, states: list[_GrammarState], indices: list[int], rows: Rows) -> None:
        """The rows of one backend: all at once, or one by one while that takes too long."""
        backend = states[indices[0]].backend
        assert backend is not None
        began = now()
        if not self._alone:
            backend.fill([states[i].matcher for i in indices], rows, indices)
            spent = now() - began
            self._alone = spent > _QUICK * len(indices)
            states[indices[0]].seconds += spent if len(indices) == 1 else 0.0
            return
        slowest = 0.0
        for i in indices:
            backend.fill([states[i].matcher], rows, [i])
            spent, began = now() - began, now()
            states[i].seconds += spent
            slowest = max(slowest, spent)
        self._alone = slowest > _QUICK


def _accept(state: _GrammarState, token_ids: Sequence[int]) -> None:
    state.num_outputs += len(token_ids)
    matcher, thought = state.matcher, state.thought
    for token_id in token_ids:
        if thought is not None and matcher is not None and token_id == thought.opener():
            _open(state, matcher, thought, token_id)
            continue
        if thought is not None and thought.feed(token_id):
            continue
        if matcher is None or token_id in state.ends:
            return
        if not matcher.accept(token_id):
            fault = matcher.fault()
            state.outgrown = fault is not None
            state.wrong = f"token {token_id} does not follow the grammar" + (f": {fault}" if fault else "")
            return


def _open(state: _GrammarState, matcher: Matcher, thought: Thought, token_id: int) -> None:
    """A token of the start tag. As long as it could also be part of the answer, the grammar advances too, and is rolled
    back if it was reasoning after all."""
    if state.agrees and matcher.accept(token_id):
        state.num_agreed += 1
    else:
        state.agrees = False
    thought.feed(token_id)
    if state.num_agreed and (thought.stage is Stage.INSIDE or not state.agrees):
        matcher.rollback(state.num_agreed)
        state.num_agreed = 0


def _fill_thought(thought: Thought, row: Row, ends: Sequence[int]) -> None:
    """Everything may follow, or the one forced token; no end of the text while a grammar waits."""
    bits = row.view(np.uint32)
    forced = thought.forced()
    if (forced := thought.opener() if forced is None else forced) is not None:
        bits[:] = 0
        bits[forced >> 5] = np.uint32(1 << (forced & 31))
        return
    bits[:] = np.uint32(0xFFFFFFFF)
    for token_id in () if thought.marks.may_stop else ends:
        bits[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))


def _follow(state: _GrammarState, row: Row, count: int, ends: Sequence[int]) -> list[Row]:
    """Rows after each of up to `count` drafts that may follow; `row` is the one before them, `ends` as of `_ends`.
    None while it is open whether reasoning starts."""
    thought = None if state.thought is None or state.thought.stage is Stage.OVER else state.thought.fork()
    if thought is not None and thought.stage is not Stage.INSIDE:
        return []
    began, matcher, rows, num_accepted = now(), state.matcher, list[Row](), 0
    for draft in state.drafts[: min(count, MOST_ROLLBACK)]:
        if not row[draft >> 5] >> (draft & 31) & 1:
            break
        if thought is None and matcher is not None:
            if draft in state.ends or not matcher.accept(draft):
                break
            num_accepted += 1
        elif thought is not None:
            thought.feed(draft)
            thought = None if thought.stage is Stage.OVER else thought
        following: Row = np.zeros(len(row), np.int32)
        if thought is not None or matcher is None:
            _fill_free(thought, following, ends)
        elif not _fill_next(state, matcher, following, len(rows) + 1):
            break
        row = following
        rows.append(row)
    if matcher is not None and num_accepted:
        matcher.rollback(num_accepted)
    state.seconds += now() - began
    return rows


def _fill_free(thought: Thought | None, row: Row, ends: Sequence[int]) -> None:
    """During reasoning, or after it if there is no grammar."""
    if thought is None:
        row.view(np.uint32)[:] = np.uint32(0xFFFFFFFF)
    else:
        _fill_thought(thought, row, ends)


def _fill_next(state: _GrammarState, matcher: Matcher, row: Row, num_ahead: int) -> bool:
    """The row of a matcher that drafts have advanced; False: nothing may follow, or it is too complex."""
    assert state.backend is not None
    state.backend.fill([matcher], row[None], [0])
    return matcher.fault() is None and _set_ends(state, row, num_ahead) is None


def _set_ends(state: _GrammarState, row: Row, num_ahead: int = 0) -> Lost | None:
    """Reasoning may start; end tokens may follow if the grammar may end here and the request may stop.

    `num_ahead`: drafts by which the matcher is ahead."""
    engine_request, matcher = state.request, state.matcher
    assert matcher is not None
    as_ints = row.data.cast("B").cast("I")  # plain integers: numpy's cost more than the grammar here
    thought = state.thought
    if thought is not None and (opener := thought.opener()) is not None:
        bit = 1 << (opener & 31)
        state.agrees = bool(as_ints[opener >> 5] & bit)
        as_ints[opener >> 5] |= bit
    may_end = matcher.can_end()
    params = engine_request.sampling
    may_stop = not params.ignore_eos and state.num_outputs + num_ahead >= params.min_tokens
    for token_id in state.ends:
        if may_end and may_stop:
            as_ints[token_id >> 5] |= 1 << (token_id & 31)
        else:
            as_ints[token_id >> 5] &= ~(1 << (token_id & 31)) & 0xFFFFFFFF
    if may_end and not may_stop and not row.any():
        return Lost(engine_request.request_id)
    return None
