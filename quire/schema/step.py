"""One step as it crosses from the engine to a worker and back. Integers only; the worker never learns why.

A worker keeps a row per live request. `StepPlan.joined` makes rows (first grant, or again after a preemption: the
row then starts from all tokens known so far), `left` frees them; `grants` say which tokens of which rows to compute.
The token that a grant needs as input may still be on the device only (look-ahead): a worker reads it from the row,
where its sampler wrote it, never from the plan.

    row tokens:  [ prompt ................ | outputs ... ]
                   ^start        ^start+count              a grant computes [start, start+count)
    samples=True: the grant reaches the last known token, so one new token comes back.

Drafts: with `num_drafts` = k > 0, the last k of a grant's positions are for tokens that the row's drafter proposed. The
worker knows them, and how many there are; the plan only says how many it may check. One to k + 1 tokens come back: the
drafts that were right, and one more. Until that is known, later plans count all k as right, so their `start` is the
furthest the row can be: a worker starts where its own row ends, and blocks are there for the furthest case.

Moves copy blocks before the forward pass, or after it, in the order of the plan: within the cache, in from a slot of
some other memory, or out to one. A block named in a plan's tables may be one that a move of the same plan fills.

Stages of a pipeline: only the last one samples, so `StepPlan.sampled` tells the others which tokens rows have got; it
is applied before anything else of the plan. There no request is in two plans at once.

Block tables are kept by difference. A row's table is, per group, NewRow.blocks and then every Grant.new_blocks of that
row in the order of steps; entry i is the block of positions [i * block_size, (i + 1) * block_size) of that group, or -1
where the group needs none. Entries are never withdrawn: once no later query of the row can read a block (it fell out of
a window), the scheduler may give it to another row and says nothing, so what lies outside a window must not be read.
The blocks of a cross-attention group all come with the row's first grant, which fills them. Plans run in order.
"""

from __future__ import annotations

import enum

import msgspec

from quire.schema.adapters import AdapterPlacement
from quire.schema.media import MediaItem
from quire.schema.params import PoolingParams, ResolvedParams, sampling_of

# In StepResult.failed: what a request asked for left it no token. The fault of the request, unlike any other reason.
FORBIDS_ALL = "no token could be chosen: masks, allowed_token_ids, bad_words or logits processors together forbid all"


class NewRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All a worker must know of a request for as long as its row lives."""

    request_id: str
    epoch: int  # counts preemptions; a row of an older epoch is another row
    token_ids: tuple[int, ...]  # prompt, then outputs known at this moment
    num_prompt_tokens: int
    params: ResolvedParams | PoolingParams
    seed: int  # always set: the request's own, or one the engine drew. 64 bit, unsigned
    stop_token_ids: tuple[int, ...] = ()  # end-of-text and stop ids that min_tokens must hold back
    blocks: tuple[tuple[int, ...], ...] = ()  # per group, the table before this plan's grant: the reused prefix
    lora_id: int = 0  # the slot of its adapter, which stays there while the row lives; 0: none
    num_encoder_tokens: int = 0  # of the encoder's output, which cross-attention groups hold
    media: tuple[MediaItem, ...] = ()  # where its items stand, with no arrays but small ones (grids)
    scope: str = ""  # rows of the same scope may learn from each other's tokens; opaque

    @property
    def sampling(self) -> ResolvedParams:
        return sampling_of(self.params)


class Grant(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One request's share of a step. Positional on purpose: thousands are made per second, and never in a cycle."""

    request_id: str
    start: int  # first position to compute; with drafts in flight, the furthest it can be
    count: int  # tokens to compute, drafts included
    samples: bool  # reaches the end of what is known, so a token comes back
    epoch: int
    new_blocks: tuple[tuple[int, ...], ...] = ()  # per group, appended to the row's table; () when none in any group
    num_drafts: int = 0  # of `count`: positions for drafts of the row, of which there may be fewer


class RowToken(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A token that a row has got, for workers that do not sample."""

    request_id: str
    position: int
    token_id: int


class Direction(enum.StrEnum):
    """Where a block is copied from and to."""

    WITHIN = "within"  # from one block to another
    IN = "in"  # from a slot of other memory to a block
    OUT = "out"  # from a block to a slot


class Move(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One block's content, copied. Which memory has the slots is settled when it is set up."""

    source: int  # block, or slot
    target: int
    direction: Direction = Direction.WITHIN
    after: bool = False  # after the forward pass instead of before it


class EncodeItem(msgspec.Struct, frozen=True, gc=False):
    """A media item to run through its encoder in this step; the worker keeps what comes out until its key is freed. The
    only message in which the arrays of an item reach a worker."""

    request_id: str  # the first that needs it
    item: MediaItem


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    step: int
    grants: tuple[Grant, ...]
    joined: tuple[NewRow, ...] = ()
    left: tuple[str, ...] = ()  # rows to free before `joined` is applied: finished, aborted or preempted requests
    total_tokens: int = 0
    sampled: tuple[RowToken, ...] = ()  # since the plan before, where stages share the model
    moves: tuple[Move, ...] = ()
    encode: tuple[EncodeItem, ...] = ()
    free_encoded: tuple[str, ...] = ()  # keys of encoded items to forget, before any of `encode`
    adapters: tuple[AdapterPlacement, ...] = ()


class Mask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Grammar bitmask rows for one plan: `rows[i]` belongs to plan.grants[index[i]]; bit set = allowed.

    A grant that checks drafts has a row for each token it may bring, at offsets 0, 1, ... from the first of them. Where
    a grant has any rows, it brings no more tokens than it has rows.
    """

    index: tuple[int, ...]
    offsets: tuple[int, ...] = ()  # parallel to `index`; (): all 0
    rows: bytes  # len(index) × ceil(vocab/32) little-endian int32
    words: int


class LogprobRows(msgspec.Struct, frozen=True):
    """Log probabilities of consecutive positions; entry 0 of a row is the chosen (or given) token, then the top k."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]  # of entry 0 in the whole vocabulary, 1 = most likely


class Pooled(msgspec.Struct, frozen=True):
    """What a request that is pooled, not sampled, comes to."""

    shape: tuple[int, ...]
    dtype: str  # as in KVSpec
    data: bytes  # row-major, little-endian


class StepResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a plan; lists are parallel to plan.grants."""

    step: int
    sampled: list[list[int]]  # [] where the grant does not sample; several where drafts were right
    logprobs: list[LogprobRows | None] | None = None  # None: no request wants any
    prompt_logprobs: dict[str, LogprobRows] = {}  # request id -> rows for the prompt positions computed in this step
    drafts: dict[str, list[int]] = {}  # what the next grants of rows that sampled verify; of others nothing is drafted
    verified: dict[str, int] = {}  # how many drafts this step verified, where any
    no_drafts: bool = False  # for some time nothing was worth drafting: the next grants need no room for it
    pooled: dict[str, Pooled] = {}
    forward_seconds: float = 0.0
    failed: dict[str, str] = {}  # request id -> reason: that request alone is lost
