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
from typing import Any

from quire.llm.beam_form import BeamForm
from quire.schema.errors import NotBuiltError
from quire.schema.outputs import LogprobsOnePosition
from quire.schema.params import BeamSearchParams

_MOST_NAMED = 1000  # tokens whose log probabilities are asked for by name


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
    form: BeamForm | None = None  # what every beam is held to

    def __post_init__(self) -> None:
        if self.params.temperature not in (0.0, 1.0):
            raise NotBuiltError(
                f"temperature={self.params.temperature} with beam search is not in this version of Quire: it ranks "
                "by the model's own probabilities (0 or 1)",
                param="temperature",
            )
        self.beams = self.beams or [BeamSearchSequence(list(self.prompt_tokens), [])]

    @property
    def num_logprobs(self) -> int:
        return 2 * self.params.beam_width

    def ask(self, beam: BeamSearchSequence, vocab_size: int) -> tuple[int, list[int]]:
        """How many of the likeliest tokens after this beam to ask for, and which besides."""
        if self.form is None:
            return min(self.num_logprobs, vocab_size), []
        allowed = self.form.allowed(beam.tokens[len(self.prompt_tokens) :])
        ids: list[int] = allowed.nonzero()[0].tolist()
        if len(ids) <= _MOST_NAMED:
            return 1, ids
        return vocab_size, []  # too many to be named: all of them

    def _held(self, beam: BeamSearchSequence, position: LogprobsOnePosition) -> LogprobsOnePosition:
        """What follows a beam and may."""
        if self.form is None:
            return position
        allowed = self.form.allowed(beam.tokens[len(self.prompt_tokens) :])
        kept = [(token_id, entry) for token_id, entry in position.items() if allowed[token_id]]
        kept.sort(key=lambda pair: -pair[1].logprob)
        return dict(kept[: self.num_logprobs])

    @property
    def done(self) -> bool:
        return not self.beams or self.rounds >= self.max_tokens or self._settled()

    def advance(self, followed: Sequence[LogprobsOnePosition]) -> None:
        """Take in what may follow each live beam, in their order."""
        self.rounds += 1
        width = self.params.beam_width
        followed = [self._held(beam, position) for beam, position in zip(self.beams, followed, strict=True)]
        extensions = [
            (beam.cum_logprob + entry.logprob, order, token_id, position)
            for order, (beam, position) in enumerate(zip(self.beams, followed, strict=True))
            for token_id, entry in position.items()
        ]
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

    def output(self) -> BeamSearchOutput:
        """The best of those that ended and those that were cut off."""
        for beam in self.beams:
            beam.finish_reason = "length"
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
