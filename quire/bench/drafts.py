"""What a server's drafts were worth during a run: its counters of speculative decoding before and after.

In: the text of /metrics. Out: keys of a result and lines of its table; none where the server drafts nothing.
Must not know: how requests were sent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from quire.bench.http_client import HTTPError, Pool

_SAMPLE = re.compile(r"^vllm:spec_decode_num_(\w+?)_total\{([^}]*)\} (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class DraftCounters:
    """Of all engines together."""

    drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted_tokens: float = 0.0
    by_position: dict[int, float] = field(default_factory=dict)


async def read_counters(pool: Pool, headers: dict[str, str]) -> DraftCounters | None:
    """None: the server has no such metrics, or none at all."""
    try:
        reply, body = await pool.get("/metrics", headers)
    except HTTPError:
        return None
    return parse(body.decode("utf-8", "replace")) if reply.status == 200 else None


def parse(page: str) -> DraftCounters | None:
    sums = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
    by_position: dict[int, float] = {}
    samples = _SAMPLE.findall(page)
    for name, labels, value in samples:
        if name in sums:
            sums[name] += float(value)
        elif name == "accepted_tokens_per_pos" and (position := _POSITION.search(labels)):
            place = int(position[1])
            by_position[place] = by_position.get(place, 0.0) + float(value)
    return DraftCounters(**sums, by_position=by_position) if samples else None


def measure(before: DraftCounters | None, after: DraftCounters | None) -> dict[str, Any]:
    """Further keys of a result: rates are shares from 0 to 100."""
    if after is None:
        return {}
    before = before or DraftCounters()
    drafts, tokens = after.drafts - before.drafts, after.draft_tokens - before.draft_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    shares = [
        (after.by_position[place] - before.by_position.get(place, 0.0)) / max(1.0, drafts)
        for place in sorted(after.by_position)
    ]
    while shares and not shares[-1]:
        shares.pop()
    return {
        "spec_decode_acceptance_rate": 100 * accepted / max(1.0, tokens),
        "spec_decode_acceptance_length": 1 + accepted / max(1.0, drafts),
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(tokens),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": shares,
    }
