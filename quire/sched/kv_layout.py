"""From what layers keep (KVSpec) and the bytes there are to where everything lies (KVLayout).

    layers ── same kind, window, page ──▶ classes ── one page size ──▶ groups of equal size ──▶ slots
Pages of different size are made equal by giving the smaller ones more tokens per block, else by leaving room unused.
Groups have the same number of layers, so that page p of every slot can serve any group: with 10 full and 52 windowed
layers that is 1 + 5 groups over 11 slots, where a few places stay empty. Stages of a pipeline have slots of their own,
so that each allocates only those; every group has layers of all stages, as far as these have such layers.
Must not know: torch, requests, how bytes were measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from quire.base.log import logger
from quire.sched.kv_policy import make_policy
from quire.schema.errors import ConfigError
from quire.schema.kv import KVGroup, KVKind, KVLayout, KVSpec

log = logger(__name__)
GIB = 1 << 30
STATE_ALIGN = 16  # bytes
TILE = 64  # tokens: attention kernels read a block in pieces of at most this many, best if none crosses its end
PADDING = 1.1  # groups may cost this much more than the tightest arrangement, to be fewer

Class = list[KVSpec]
Stages = Sequence[Sequence[str]]  # layers of each


def place(
    specs: Sequence[KVSpec],
    free_bytes: int | Sequence[int],
    *,
    stages: Stages = (),
    num_blocks: int | None = None,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int | None = None,
) -> KVLayout:
    """Place every layer; without any, a layout of no blocks (an encoder alone). `num_blocks` replaces what the bytes
    allow; ConfigError if one longest request cannot fit. `stages`: the layers of each, where a pipeline divides them;
    then `free_bytes` are those of each stage.

    `max_num_batched_tokens` is the most one step computes (unset: a whole request): windows are held that much longer.
    """
    layout, free = arrange(specs, max_model_len, max_num_batched_tokens, stages), _room(free_bytes)
    if not layout.groups:
        log.info("No layer keeps anything between steps: there is no KV cache")
        return layout
    fitting = _blocks_that_fit(layout, free, stages)
    layout = msgspec.structs.replace(layout, num_blocks=num_blocks if num_blocks is not None else fitting)
    need = blocks_needed(layout, max_model_len, max_num_batched_tokens)
    if need > layout.num_blocks:
        raise _too_small(layout, need, min(free), num_blocks, max_model_len, max_num_batched_tokens)
    if layout.num_blocks < max_num_seqs * len(layout.groups):
        log.warning(
            "%d KV blocks are fewer than one per group for each of max_num_seqs=%d requests: not all can run at once",
            layout.num_blocks,
            max_num_seqs,
        )
    log.info(
        "KV cache: %d blocks in %d group(s), %.2f GiB, holds %.1f requests of max_model_len=%d",
        layout.num_blocks, len(layout.groups), layout.total_bytes / GIB,
        max_concurrency(layout, max_model_len, max_num_batched_tokens), max_model_len,
    )  # fmt: skip
    return layout


def fit_length(
    specs: Sequence[KVSpec],
    free_bytes: int | Sequence[int],
    *,
    longest: int,
    stages: Stages = (),
    num_blocks: int | None = None,
    max_num_batched_tokens: int | None = None,
) -> int:
    """The largest max_model_len up to `longest` of which one request fits; ConfigError if not even two tokens do."""
    if not specs:
        return longest
    free = _room(free_bytes)

    def fits(length: int) -> bool:
        layout = arrange(specs, length, max_num_batched_tokens, stages)
        there = num_blocks if num_blocks is not None else _blocks_that_fit(layout, free, stages)
        return blocks_needed(layout, length, max_num_batched_tokens) <= there

    if longest < 2 or not fits(2):
        raise ConfigError(
            f"no request of 2 tokens fits the KV cache: {min(free) / GIB:.3f} GiB are free"
            + (f", num_gpu_blocks_override={num_blocks}" if num_blocks is not None else "")
            + f", longest allowed {longest}. Raise gpu_memory_utilization or kv_cache_memory_bytes",
            param="max_model_len",
        )
    low, high = 2, longest + 1  # low fits, high does not (or is out of bounds)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def blocks_needed(layout: KVLayout, length: int, max_num_batched_tokens: int | None = None) -> int:
    """Blocks that one request of `length` tokens may hold at once, over all groups."""
    chunk = length if max_num_batched_tokens is None else max_num_batched_tokens
    return sum(make_policy(group).peak(length, chunk) for group in layout.groups)


def max_concurrency(layout: KVLayout, length: int, max_num_batched_tokens: int | None = None) -> float:
    """Requests of `length` tokens that there is room for at once; 0 in a layout without blocks."""
    need = blocks_needed(layout, length, max_num_batched_tokens)
    return layout.num_blocks / need if need else 0.0


def _room(free_bytes: int | Sequence[int]) -> list[int]:
    return [max(0, own) for own in ([free_bytes] if isinstance(free_bytes, int) else free_bytes)]


def _blocks_that_fit(layout: KVLayout, free: Sequence[int], stages: Stages) -> int:
    """As many as the stage with the least room for its own slots has; one without slots needs none."""
    counts = [_num_slots(layout, layers) for layers in stages] if stages else [len(layout.slots)]
    return min(own // (layout.page_bytes * count) for own, count in zip(free, counts, strict=True) if count)


def _num_slots(layout: KVLayout, layers: Sequence[str]) -> int:
    """Of one stage."""
    own = set(layers)
    return sum(not own.isdisjoint(slot) for slot in layout.slots)


def arrange(
    specs: Sequence[KVSpec], max_model_len: int, max_num_batched_tokens: int | None = None, stages: Stages = ()
) -> KVLayout:
    """Groups and slots, without a number of blocks."""
    if not specs:
        return KVLayout(num_blocks=0, page_bytes=0, groups=(), slots=(), specs=())
    for spec in specs:
        if (
            spec.page_bytes < 1
            or spec.block_size < 1
            or (spec.window < 1 and spec.kind in (KVKind.WINDOW, KVKind.CHUNK))
        ):
            raise ConfigError(
                f"layer {spec.layer!r} keeps {spec.page_bytes} bytes per block of {spec.block_size} tokens with window "
                f"{spec.window}: none of these may be 0"
            )
    names = [spec.layer for spec in specs]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"layer names must be unique; given more than once: {', '.join(twice)}")
    classes = _classes(_equal_pages(specs))
    chunk = max_model_len if max_num_batched_tokens is None else max_num_batched_tokens
    size = _group_size(classes, max_model_len, chunk)
    counts = [-(-len(members) // size) for members in classes]  # groups of each class
    owners = [set(layers) for layers in stages] or [set(names)]
    groups: list[KVGroup] = []
    slots: list[list[str]] = []
    for members, count in zip(classes, counts, strict=True):
        layers: list[list[str]] = [[] for _ in range(count)]
        for own in owners:
            mine = [spec.layer for spec in members if spec.layer in own]
            share = -(-len(mine) // count) if stages else size
            for i in range(count):
                layers[i] += mine[i * share : (i + 1) * share]
        first = members[0]
        groups += [
            KVGroup(kind=first.kind, block_size=first.block_size, window=first.window, layers=tuple(group))
            for group in layers if group
        ]  # fmt: skip
    for own in owners:
        of_groups = [[layer for layer in group.layers if layer in own] for group in groups]
        height = max(map(len, of_groups))
        slots += [[layers[i] for layers in of_groups if i < len(layers)] for i in range(height)]
    final = {spec.layer: spec for members in classes for spec in members}
    return KVLayout(
        num_blocks=0,
        page_bytes=_page_bytes(list(final.values())),
        groups=tuple(groups),
        slots=tuple(map(tuple, slots)),
        specs=tuple(final[name] for name in names),
    )


def _page_bytes(specs: Sequence[KVSpec]) -> int:
    """Of the largest page. Where only states lie in them, each begins at a multiple of what kernels read at once."""
    largest = max(spec.page_bytes for spec in specs)
    only_states = all(spec.kind is KVKind.STATE for spec in specs)
    return -(-largest // STATE_ALIGN) * STATE_ALIGN if only_states else largest


def _equal_pages(specs: Sequence[KVSpec]) -> list[KVSpec]:
    """More tokens per block where a page is smaller than the largest.

    A state's page does not depend on its block size. Where it is the largest, attention pages grow to at least its size
    (so that only it leaves room unused), and its snapshots are taken only where attention blocks end.
    """
    largest = max(spec.page_bytes for spec in specs)
    from_state = all(spec.kind is KVKind.STATE for spec in specs if spec.page_bytes == largest)
    scaled = []
    for spec in specs:
        if spec.kind is not KVKind.STATE:
            exact = largest % spec.page_bytes == 0
            times = -(-largest // spec.page_bytes) if from_state or exact else 1
            block_size = spec.block_size * times
            if from_state and block_size >= 8 * TILE:
                block_size = -(-block_size // math.lcm(spec.block_size, TILE)) * math.lcm(spec.block_size, TILE)
            spec = msgspec.structs.replace(spec, block_size=block_size)
        scaled.append(spec)
    attention = [spec.block_size for spec in scaled if spec.kind not in (KVKind.STATE, KVKind.CROSS)]
    unit = math.lcm(*attention)
    return [
        msgspec.structs.replace(spec, block_size=-(-spec.block_size // unit) * unit)
        if spec.kind is KVKind.STATE
        else spec
        for spec in scaled
    ]


def _classes(specs: Sequence[KVSpec]) -> list[Class]:
    """Layers that may share a table, in the order the model names them."""
    classes: dict[tuple[KVKind, int, int], Class] = {}
    for spec in specs:
        classes.setdefault((spec.kind, spec.window, spec.block_size), []).append(spec)
    return list(classes.values())


def _group_size(classes: list[Class], length: int, chunk: int) -> int:
    """Layers per group: the most for which one longest request costs hardly more than in the tightest arrangement."""
    peaks = []
    for members in classes:
        spec = members[0]
        group = KVGroup(kind=spec.kind, block_size=spec.block_size, window=spec.window, layers=())
        peaks.append(make_policy(group).peak(length, chunk))

    def cost(size: int) -> int:
        return sum(size * -(-len(m) // size) * peak for m, peak in zip(classes, peaks, strict=True))

    sizes = range(1, max(map(len, classes)) + 1)
    tightest = min(map(cost, sizes))
    return max(size for size in sizes if cost(size) <= PADDING * tightest)


def _too_small(
    layout: KVLayout, need: int, free_bytes: int, override: int | None, max_model_len: int, chunk: int | None
) -> ConfigError:
    block_bytes = layout.page_bytes * len(layout.slots)
    low, high = 1, max_model_len  # low fits (or is nothing), high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if blocks_needed(layout, middle, chunk) <= layout.num_blocks else (low, middle)
    if override is not None:
        there, more = f"num_gpu_blocks_override={override}", "raise num_gpu_blocks_override"
    else:
        there = f"{max(0, free_bytes) / GIB:.3f} GiB hold {layout.num_blocks} blocks of {block_bytes} bytes"
        more = "raise gpu_memory_utilization or kv_cache_memory_bytes (on CPU also QUIRE_CPU_KVCACHE_SPACE)"
    fitting = f"lower max_model_len to at most {low}, or {more}" if low >= 2 else more
    return ConfigError(
        f"one request of max_model_len={max_model_len} needs {need} KV blocks ({need * block_bytes / GIB:.3f} GiB), "
        f"but {there}: {fitting}",
        param="max_model_len",
        value=max_model_len,
    )
