"""One step as it crosses from the engine to a worker and back. Integers only; the worker never learns why.

A worker keeps a row per live request. `StepPlan.joined` makes rows (first grant, or again after a preemption: the
row then starts from all tokens known so far), `left` frees them; `grants` say which tokens of which rows to compute.
The token that a grant needs as input may still be on the device only (look-ahead): a worker reads it from the row,
where its sampler wrote it, never from the plan.

    row tokens:  [ prompt ................ | outputs ... ]
                   ^start        ^start+count              a grant computes [start, start+count)
    samples=True: the grant reaches the last known token, so one new token comes back.

Block tables are kept by difference. A row's table is, per group, NewRow.blocks and then every Grant.new_blocks of that
row in the order of steps; entry i is the block of positions [i * block_size, (i + 1) * block_size) of that group, or -1
where the group needs none. Entries are never withdrawn: once no later query of the row can read a block (it fell out of
a window), the scheduler may give it to another row and says nothing, so what lies outside a window must not be read.
The blocks of a cross-attention group all come with the row's first grant, which fills them. Plans run in order.
"""

from __future__ import annotations

import msgspec

from quire.schema.params import SamplingParams

# In StepResult.failed: what a request asked for left it no token. Its own fault, unlike any other reason.
FORBIDS_ALL = "no token could be chosen: masks, allowed_token_ids, bad_words or logits processors together forbid all"


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """All a worker must know of a request for as long as its row lives."""

    request_id: str
    epoch: int  # counts preemptions; a row of an older epoch is another row
    token_ids: tuple[int, ...]  # prompt, then outputs known at this moment
    num_prompt_tokens: int
    params: SamplingParams
    seed: int  # always set: the request's own, or one the engine drew. 64 bit, unsigned
    stop_token_ids: tuple[int, ...] = ()  # end-of-text and stop ids that min_tokens must hold back
    blocks: tuple[tuple[int, ...], ...] = ()  # per group, the table before this plan's grant: the reused prefix
    lora_id: int = 0
    num_encoder_tokens: int = 0  # of the encoder's output, which cross-attention groups hold


class Grant(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step. Positional on purpose: thousands are made per second, and never in a cycle."""

    request_id: str
    start: int  # first position to compute
    count: int  # tokens to compute
    samples: bool  # reaches the end of what is known, so a token comes back
    epoch: int
    new_blocks: tuple[tuple[int, ...], ...] = ()  # per group, appended to the row's table; () when none in any group
    drafts: tuple[int, ...] = ()  # proposed tokens checked by this grant, its last `len(drafts)` inputs


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    grants: tuple[Grant, ...]
    joined: tuple[NewRow, ...] = ()
    left: tuple[str, ...] = ()  # rows to free before `joined` is applied: finished, aborted or preempted requests
    total_tokens: int = 0

    @property
    def empty(self) -> bool:
        return not self.grants


class Mask(msgspec.Struct, frozen=True, kw_only=True):
    """Grammar bitmask rows for one plan: `rows[i]` belongs to plan.grants[index[i]]; bit set = allowed."""

    index: tuple[int, ...]
    rows: bytes  # len(index) × ceil(vocab/32) little-endian int32
    words: int


class LogprobRows(msgspec.Struct, frozen=True):
    """Log probabilities of consecutive positions; entry 0 of a row is the chosen (or given) token, then the top k."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]  # of entry 0 in the whole vocabulary, 1 = most likely


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a plan; lists are parallel to plan.grants."""

    step: int
    sampled: list[list[int]]  # [] where the grant does not sample
    logprobs: list[LogprobRows | None] | None = None  # None: no request asked
    prompt_logprobs: dict[str, LogprobRows] = {}  # request id -> rows for the prompt positions computed in this step
    drafts: dict[str, list[int]] = {}  # proposals for the next step
    forward_seconds: float = 0.0
    failed: dict[str, str] = {}  # request id -> reason: that request alone is lost
