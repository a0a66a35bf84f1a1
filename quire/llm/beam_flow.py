"""BeamFlow: beam searches over an AsyncLLM, one per prompt, as a Flow of results: each when its search has ended.

In: prepared requests, of which nothing runs, and how to search. Every round is a Flow of requests of one token, one per
live beam; closing it ends that round, so a caller that leaves has nothing left in the engine. What a form allows is
worked out in another thread. Must not know: HTTP, how beams are scored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec

from quire.engine.inputs import Options, PreparedRequest
from quire.llm.beam import BeamSearchInstance, BeamSearchSequence, check_ranks, followed
from quire.schema.outputs import CompletionOutput, Logprob, LogprobsOnePosition, RequestOutput
from quire.schema.params import BeamSearchParams, SamplingParams
from quire.text.detokenize import Detokenizer

if TYPE_CHECKING:
    from quire.llm.beam_form import BeamForms
    from quire.llm.beam_limits import BeamLimits
    from quire.llm.online import AsyncLLM, Flow
    from quire.llm.request_log import RequestLog

ABORTED = "abort"
Made = TypeVar("Made")


@dataclass
class _Search:
    """One prompt's."""

    prepared: PreparedRequest
    beams: BeamSearchInstance
    num_cached_tokens: int = 0
    cut_off: str = "length"  # why beams that have not ended go no further
    names: list[str] = field(default_factory=list)  # of this round's requests

    @property
    def done(self) -> bool:
        return self.beams.done or self.cut_off == ABORTED

    def take(self, results: Sequence[RequestOutput]) -> None:
        """What came of a round's requests; one that was aborted ends the search."""
        if self.beams.rounds == 0:
            self.num_cached_tokens = results[0].num_cached_tokens or 0
        if any(not result.outputs[0].token_ids for result in results):
            self.cut_off = ABORTED
        if self.cut_off != ABORTED:
            self.beams.advance([followed(result) for result in results])


class BeamFlow:
    """Touched only by its event loop. `next` is not to be left and called again."""

    def __init__(
        self, engine: AsyncLLM, forms: BeamForms, requests: Sequence[PreparedRequest], params: BeamSearchParams,
        options: Options, most: BeamLimits, log: RequestLog | None,
    ) -> None:  # fmt: skip
        """`requests` say how many of the best to return (n) and what is shown of them; `params` how to search."""
        check_ranks(engine.model_config.logprobs_mode)
        self.loop = asyncio.get_running_loop()
        self._engine, self._forms, self._params, self._most, self._log = engine, forms, params, most, log
        self._options = msgspec.structs.replace(options, any_logprobs=True)
        self._size = engine.front.inputs.vocab_size
        self._live = [_Search(one, BeamSearchInstance.of(one, params)) for one in requests]
        for search in self._live:
            shown = search.prepared.params.logprobs or 0
            search.beams.num_shown = self._size if shown == -1 else shown
        self._rounds = 0
        self._flow: Flow | None = None
        self._error: Exception | None = None

    @property
    def finished(self) -> bool:
        return not self._live and self._error is None

    async def next(self) -> list[RequestOutput]:
        """The results of the searches that end next."""
        if self._rounds == 0 and self._params.structured_outputs is not None:
            form = await asyncio.to_thread(self._forms.make, self._params.structured_outputs)
            for search in self._live:
                search.beams.form = form
        while not (ended := [search for search in self._live if search.done]):
            await self._round()
        self._live = [search for search in self._live if not search.done]
        results = [self._result(search) for search in ended]
        if self._log is not None:
            for result in results:
                self._log.told(result)
        return results

    async def _round(self) -> None:
        requests: list[PreparedRequest] = []
        for search, questions in zip(self._live, await self._beside(self._questions), strict=True):
            first = self._rounds * self._params.beam_width
            search.names = [f"{search.prepared.request_id}-{first + number}" for number in range(len(questions))]
            for name, (tokens, params) in zip(search.names, questions, strict=True):
                prompt = search.beams.prompt(tokens)
                requests.append(await self._engine.prepare(name, prompt, params, self._options))
        self._check()
        results: dict[str, RequestOutput] = {}
        with self._engine.open(requests, logged=False) as self._flow:
            while not self._flow.finished:
                results |= {result.request_id: result for result in await self._flow.next()}
        self._rounds += 1
        await self._beside(lambda: self._take(results))
        self._check()

    async def _beside(self, work: Callable[[], Made]) -> Made:
        """A grammar takes its time, and others wait for this loop."""
        return work() if self._params.structured_outputs is None else await asyncio.to_thread(work)

    def _questions(self) -> list[list[tuple[list[int], SamplingParams]]]:
        questions, num_logprobs = [], 0
        for search in self._live:
            questions.append(search.beams.questions(self._size))
            num_logprobs += sum((one.logprobs or 0) + len(one.logprob_token_ids or ()) for _, one in questions[-1])
            self._most.check_round(num_logprobs)
        return questions

    def _take(self, results: dict[str, RequestOutput]) -> None:
        for search in self._live:
            search.take([results[name] for name in search.names])

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _result(self, search: _Search) -> RequestOutput:
        prepared = search.prepared
        best = search.beams.output(search.cut_off).sequences[: prepared.params.n]
        return RequestOutput(
            request_id=prepared.request_id,
            prompt=prepared.text,
            prompt_token_ids=list(prepared.token_ids),
            prompt_logprobs=None,
            outputs=[self._output(prepared, index, beam) for index, beam in enumerate(best)],
            finished=True,
            num_cached_tokens=search.num_cached_tokens,
        )

    def _output(self, prepared: PreparedRequest, index: int, beam: BeamSearchSequence) -> CompletionOutput:
        token_ids, params = beam.tokens[len(prepared.token_ids) :], prepared.params
        text = ""
        if self._engine.tokenizer is not None:
            skip = params.skip_special_tokens and not params.include_stop_str_in_output  # as LLM.beam_search does
            shown_as = msgspec.structs.replace(params, skip_special_tokens=skip)
            words = Detokenizer(self._engine.tokenizer, prepared.token_ids, shown_as)
            words.feed(token_ids, stop_terminated=beam.finish_reason == "stop")
            text = words.take(finished=True, delta=False)
        shown = None
        if (most := params.logprobs) is not None:
            shown = [_position(i, position, most) for i, position in zip(token_ids, beam.logprobs, strict=True)]
        return CompletionOutput(
            index, text, token_ids, beam.cum_logprob, shown, finish_reason=beam.finish_reason,
            stop_reason=beam.stop_reason,
        )  # fmt: skip

    async def abort(self, selects: Callable[[str], object]) -> int:
        """End the searches whose ids `selects` accepts, with what they have; how many these were."""
        ended = [one for one in self._live if one.cut_off != ABORTED and selects(one.prepared.request_id)]
        for search in ended:
            search.cut_off = ABORTED
        await self._engine.abort([name for search in ended for name in search.names])
        return len(ended)

    def fail(self, error: Exception) -> None:
        """Whoever listens gets this error, at the latest when the round is over."""
        self._error = self._error or error
        if self._flow is not None:
            self._flow.fail(error)

    def close(self) -> None:
        if self._flow is not None:
            self._flow.close()
        if self._log is not None:
            for search in self._live:
                self._log.dropped(search.prepared.request_id)
        self._live = []

    def __enter__(self) -> BeamFlow:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()


def _position(chosen: int, position: LogprobsOnePosition, most: int) -> LogprobsOnePosition:
    """The chosen token first, then the `most` likeliest. A rank beyond those is not known; any such one will do."""
    entry = position[chosen]
    rank = most + 1 if entry.rank is None else entry.rank
    likely = {i: e for i, e in position.items() if e.rank is not None and (e.rank <= most or most == -1)}
    return {chosen: Logprob(entry.logprob, rank, entry.decoded_token), **likely}
