"""How much work a beam search may be, known before it begins.

In: how wide and how long searches are. Out: nothing, or an InputError that names the product and the limit. Every token
of every beam is a request of its own, and as many extensions of it are weighed as log probabilities come back; so both
are counted. Must not know: engines, how beams are scored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.schema.errors import InputError


@dataclass(frozen=True)
class BeamLimits:
    """As a program has them that calls Quire itself; a server's are its options."""

    tokens: int = 1 << 30  # beams times prompts times tokens
    logprobs: int = 1 << 34  # weighed in all, or at once where a form needs many
    tokens_option: str = ""  # that sets the limit, for messages
    logprobs_option: str = ""

    def check(self, width: int, lengths: Iterable[int], shown: int, vocab_size: int) -> None:
        """`lengths`: of each prompt's search, the most tokens. `shown`: log probabilities requested at each."""
        each_prompt = list(lengths)
        tokens = width * sum(each_prompt)
        what = f"a beam search of {width} beams, {len(each_prompt)} prompts and {sum(each_prompt)} tokens of answers"
        if tokens > self.tokens:
            raise InputError(
                f"{what} (max_tokens) is {tokens} tokens of beams; the limit is {self.tokens}{self.tokens_option}",
                param="max_tokens",
                value=tokens,
            )
        weighed = tokens * min(max(2 * width, shown), vocab_size)
        if weighed > self.logprobs:
            raise InputError(
                f"{what} (max_tokens) weighs {weighed} log probabilities; the limit is {self.logprobs}"
                f"{self.logprobs_option}",
                param="n",
                value=weighed,
            )

    def check_round(self, num_logprobs: int) -> None:
        """Which tokens a form allows is known only on the way."""
        if num_logprobs > self.logprobs:
            raise InputError(
                f"a beam search needs {num_logprobs} log probabilities at once to find what its form allows; the limit "
                f"is {self.logprobs}{self.logprobs_option}: search with fewer beams",
                param="structured_outputs",
                value=num_logprobs,
            )
