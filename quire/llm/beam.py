"""Beam search over single-token requests: the state of one search, turned by whoever can run requests.

In: a prompt's ids, then, round by round, the log probabilities that followed each live beam. Out: the ids to extend
next, at last the best sequences. Scores are those of transformers: the sum of log probabilities over the number of
generated tokens to the power `length_penalty`. Must not know: engines.

    round:  live beams ──▶ 2·width best extensions ──┬── end of text and among the first `width` ──▶ completed
                                                     └── the first `width` others ──▶ live beams
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.llm.beam_form import Allowed, BeamForm
from quire.schema.errors import InputError, NotBuiltError
from quire.schema.outputs import LogprobsOnePosition, RequestOutput
from quire.schema.params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.schema.prompt import Prompt

if TYPE_CHECKING:
    from quire.engine.inputs import PreparedRequest

_MOST_NAMED = 1000  # tokens whose log probabilities are requested by id


@dataclass
class BeamSearchSequence:
    """One beam: the prompt's tokens and those that followed."""

    tokens: list[int]
    logprobs: list[LogprobsOnePosition]
    lora_request: Any = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The `beam_width` best sequences, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class BeamSearchInstance:
    """One prompt's search."""

    prompt_tokens: list[int]
    params: BeamSearchParams
    max_tokens: int  # the params', cut to what fits the model
    eos_token_ids: frozenset[int]
    cache_salt: str | None = None  # of the prompt; every extension carries it
    beams: list[BeamSearchSequence] = field(default_factory=list)
    completed: list[BeamSearchSequence] = field(default_factory=list)
    rounds: int = 0
    form: BeamForm | None = None  # what constrains every beam
    encoder_ids: tuple[int, ...] | None = None  # what the encoder of an encoder-decoder reads
    num_shown: int = 0  # of the likeliest tokens at each position, so many are to be seen in the result
    _allowed: list[Allowed] = field(default_factory=list)  # after each live beam, where there is a form

    def __post_init__(self) -> None:
        if self.params.temperature not in (0.0, 1.0):
            raise NotBuiltError(
                f"temperature={self.params.temperature} with beam search is not in this version of Quire: it ranks "
                "by the model's own probabilities (0 or 1)",
                param="temperature",
            )
        self.beams = self.beams or [BeamSearchSequence(list(self.prompt_tokens), [])]

    @classmethod
    def of(
        cls, prepared: PreparedRequest, params: BeamSearchParams, form: BeamForm | None = None
    ) -> BeamSearchInstance:
        """The search of a prompt that was checked as any request's."""
        request = prepared.requests[0]
        if request.media and prepared.encoder_ids is None:
            raise NotBuiltError("beam search with media, or embeddings as a prompt, is not in this version of Quire")
        ends = frozenset(i for i in (request.eos_token_id, *request.sampling.stop_token_ids) if i is not None)
        return cls(list(prepared.token_ids), params, request.max_tokens, ends, request.cache_salt, form=form,
                   encoder_ids=prepared.encoder_ids)  # fmt: skip

    def prompt(self, tokens: list[int]) -> Prompt:
        """Of a request that tells what may follow these. What an encoder reads is the same for all: encoded once."""
        encoder = None if self.encoder_ids is None else Prompt(token_ids=self.encoder_ids)
        return Prompt(token_ids=tuple(tokens), cache_salt=self.cache_salt, encoder=encoder)

    @property
    def num_logprobs(self) -> int:
        return 2 * self.params.beam_width

    def questions(self, vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
        """One request per live beam: its tokens, and what to ask for, so that the answers tell what may follow."""
        if self.form is None:
            most = min(max(self.num_logprobs, self.num_shown), vocab_size)
            same = _one_token(most, [])
            return [(beam.tokens, same) for beam in self.beams]
        self._allowed = [self.form.allowed(beam.tokens[len(self.prompt_tokens) :]) for beam in self.beams]
        questions = []
        for beam, allowed in zip(self.beams, self._allowed, strict=True):
            named: list[int] = allowed.nonzero()[0].tolist()
            most = max(1, self.num_shown)
            if len(named) > _MOST_NAMED:  # enough of the likeliest then, even if all that is forbidden is among them
                most = max(most, self.num_logprobs + vocab_size - len(named))
                named = []
            questions.append((beam.tokens, _one_token(min(most, vocab_size), named)))
        return questions

    def _legal(self, order: int, position: LogprobsOnePosition) -> LogprobsOnePosition:
        """The entries that may follow a beam."""
        if self.form is None:
            return position
        legal = [(token_id, entry) for token_id, entry in position.items() if self._allowed[order][token_id]]
        legal.sort(key=lambda pair: -pair[1].logprob)
        return dict(legal[: self.num_logprobs])

    def _seen(self, position: LogprobsOnePosition, legal: LogprobsOnePosition) -> LogprobsOnePosition:
        """What a result shows of a position: also what is likely and forbidden, as far as requested."""
        if self.form is None or not self.num_shown:
            return legal
        return {i: e for i, e in position.items() if i in legal or (e.rank is not None and e.rank <= self.num_shown)}

    @property
    def done(self) -> bool:
        return not self.beams or self.rounds >= self.max_tokens or self._settled()

    def advance(self, followed: Sequence[LogprobsOnePosition]) -> None:
        """Take in what may follow each live beam, in their order."""
        self.rounds += 1
        width = self.params.beam_width
        extensions = []
        for order, (beam, position) in enumerate(zip(self.beams, followed, strict=True)):
            legal = self._legal(order, position)
            seen = self._seen(position, legal)
            extensions += [(beam.cum_logprob + e.logprob, order, token_id, seen) for token_id, e in legal.items()]
        extensions.sort(key=lambda e: -e[0])
        live: list[BeamSearchSequence] = []
        for place, (total, order, token_id, position) in enumerate(extensions[: 2 * width]):
            ends = token_id in self.eos_token_ids and not self.params.ignore_eos
            if ends and place >= width:
                continue
            old = self.beams[order]
            beam = BeamSearchSequence(
                tokens=[*old.tokens, token_id], logprobs=[*old.logprobs, position], cum_logprob=total
            )
            if ends:
                beam.finish_reason, beam.stop_reason = "stop", token_id
                self.completed.append(beam)
            elif len(live) < width:
                live.append(beam)
        self.beams = live
        self.completed = self._best(self.completed)

    def output(self, cut_off: str = "length") -> BeamSearchOutput:
        """The best of those that ended and those that were cut off."""
        for beam in self.beams:
            beam.finish_reason = cut_off
        return BeamSearchOutput(self._best([*self.completed, *self.beams]))

    def score(self, beam: BeamSearchSequence) -> float:
        num_generated = max(1, len(beam.tokens) - len(self.prompt_tokens))
        return float(beam.cum_logprob / num_generated**self.params.length_penalty)

    def _best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=self.score, reverse=True)[: self.params.beam_width]

    def _settled(self) -> bool:
        """Enough have ended, and no live beam could still beat the worst of them."""
        if len(self.completed) < self.params.beam_width or not self.beams:
            return False
        longest = self.max_tokens if self.params.length_penalty > 0.0 else self.rounds
        best_possible = max(beam.cum_logprob for beam in self.beams) / longest**self.params.length_penalty
        return bool(best_possible <= min(self.score(beam) for beam in self.completed))


def check_ranks(logprobs_mode: str) -> None:
    if logprobs_mode.endswith("logits"):
        raise InputError(
            f"beam search ranks by log probabilities, and logprobs_mode is {logprobs_mode!r}", param="logprobs_mode"
        )


def followed(result: RequestOutput) -> LogprobsOnePosition:
    """What may follow a beam: the log probabilities of the one token that was generated."""
    logprobs = result.outputs[0].logprobs
    assert logprobs is not None
    return logprobs[0]


def _one_token(most: int, named: list[int]) -> SamplingParams:
    """`most` likeliest, and those named besides."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprobs=most,
        logprob_token_ids=named or None,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
