"""From outcomes to figures: totals, throughput, goodput, percentiles; the printed table and the JSON result.

In: Outcomes and how long the run took. Out: a dict with the keys other tools read, and lines of text.
Times are seconds inside and milliseconds in what is printed and stored. Must not know: how requests were sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.bench.endpoints import MeasuredResponse
from quire.schema.errors import InputError, counted

WIDTH = 50
METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
_GOALS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class ReportOptions:
    """Which figures are asked for."""

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentiles: tuple[float, ...] = (99.0,)
    goodput: tuple[tuple[str, float], ...] = ()  # metric, milliseconds at most
    max_concurrency: int | None = None
    request_rate: float = math.inf
    generates: bool = True  # False: answers have no tokens of their own


def parse_metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in METRICS:
            raise InputError(f"--percentile-metrics holds {name!r}; choose from {', '.join(METRICS)}")
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"--metric-percentiles must be numbers like 25,50,99, got {text!r}") from None
    for value in values:
        if not 0 <= value <= 100:
            raise InputError(f"--metric-percentiles must lie between 0 and 100, got {value:g}")
    return values


def parse_goodput(pairs: Iterable[str]) -> tuple[tuple[str, float], ...]:
    """'ttft:200' and so on, in milliseconds."""
    goals = {}
    for pair in pairs:
        name, colon, limit = pair.partition(":")
        try:
            value = float(limit)
        except ValueError:
            value = -1.0
        if not colon or name not in _GOALS or not value >= 0:
            raise InputError(
                f"--goodput {pair!r}: write metric:milliseconds with a metric of {', '.join(_GOALS)}", param="goodput"
            )
        goals[name] = value
    return tuple(goals.items())


def percentile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest values, by distance; `ordered` rises."""
    if not ordered:
        return 0.0
    position = (len(ordered) - 1) * share / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """mean, median, std, and p… of each percentile."""
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered) if ordered else 0.0
    variance = sum((value - mean) ** 2 for value in ordered) / len(ordered) if ordered else 0.0
    stats = {"mean": mean, "median": percentile(ordered, 50), "std": math.sqrt(variance)}
    return stats | {f"p{share:g}": percentile(ordered, share) for share in percentiles}


def tpot(outcome: MeasuredResponse) -> float:
    """Seconds per token after the first; nothing came after the first: 0."""
    return (outcome.latency - outcome.ttft) / (outcome.output_len - 1) if outcome.output_len > 1 else 0.0


def measure(outcomes: Sequence[MeasuredResponse], duration: float, options: ReportOptions) -> dict[str, Any]:
    """Every figure of a run, under the names of the JSON result."""
    done = [outcome for outcome in outcomes if outcome.success]
    total_input = sum(outcome.prompt_len for outcome in done)
    total_output = sum(outcome.output_len for outcome in done)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration,
        "request_goodput": _goodput(done, options.goodput) / duration if options.goodput else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": peak_tokens(done),
        "max_concurrent_requests": peak_requests(done),
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [outcome.output_len for outcome in outcomes],
        "start_times": [outcome.start for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itls for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }
    for name in options.metrics:
        figures = spread(_VALUES[name](done), options.percentiles)
        result |= {f"{figure}_{name}_ms": value * 1e3 for figure, value in figures.items()}
    return result


_VALUES: dict[str, Callable[[Sequence[MeasuredResponse]], list[float]]] = {
    "ttft": lambda done: [outcome.ttft for outcome in done],
    "tpot": lambda done: [tpot(outcome) for outcome in done if outcome.output_len > 1],
    "itl": lambda done: [gap for outcome in done for gap in outcome.itls],
    "e2el": lambda done: [outcome.latency for outcome in done],
}


def _goodput(done: Sequence[MeasuredResponse], goals: Sequence[tuple[str, float]]) -> int:
    """How many met every goal."""
    value: dict[str, Callable[[MeasuredResponse], float]] = {
        "ttft": lambda outcome: outcome.ttft,
        "tpot": tpot,
        "e2el": lambda outcome: outcome.latency,
    }
    return sum(all(value[name](outcome) * 1e3 <= limit for name, limit in goals) for outcome in done)


def token_times(outcome: MeasuredResponse) -> list[float]:
    """When each streamed piece came."""
    at = outcome.start + outcome.ttft
    times = [at]
    for gap in outcome.itls:
        at += gap
        times.append(at)
    return times


def peak_tokens(done: Sequence[MeasuredResponse]) -> float:
    """Most tokens in any one second of the run, counted from its first request."""
    if not done:
        return 0.0
    began = min(outcome.start for outcome in done)
    seconds: dict[int, float] = {}
    for outcome in done:
        times = token_times(outcome)
        share = outcome.output_len / len(times)  # tokens per piece
        for at in times:
            seconds[int(at - began)] = seconds.get(int(at - began), 0.0) + share
    return max(seconds.values())


def peak_requests(done: Sequence[MeasuredResponse]) -> int:
    """Most requests under way at once."""
    moments = sorted(
        [(outcome.start, 1) for outcome in done] + [(outcome.start + outcome.latency, -1) for outcome in done]
    )
    most = running = 0
    for _, change in moments:
        running += change
        most = max(most, running)
    return most


def table(result: dict[str, Any], options: ReportOptions) -> list[str]:
    """The printed result."""
    rows: list[tuple[str, int | float | None]] = [
        ("Successful requests", result["completed"]),
        ("Failed requests", result["failed"]),
        ("Maximum request concurrency", options.max_concurrency),
        ("Request rate configured (RPS)", None if options.request_rate == math.inf else options.request_rate),
        ("Benchmark duration (s)", result["duration"]),
        ("Total input tokens", result["total_input_tokens"]),
        ("Total generated tokens", result["total_output_tokens"]),
        ("Request throughput (req/s)", result["request_throughput"]),
        ("Request goodput (req/s)", result["request_goodput"]),
        ("Output token throughput (tok/s)", result["output_throughput"]),
        ("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests", float(result["max_concurrent_requests"])),
        ("Total token throughput (tok/s)", result["total_token_throughput"]),
    ]
    if not options.generates:
        rows = [row for row in rows if "generated" not in row[0] and "utput token" not in row[0]]
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    lines += [_row(name, value) for name, value in rows if value is not None]
    for name in options.metrics:
        short, long = METRICS[name]
        lines.append(long.center(WIDTH, "-"))
        for figure in ("mean", "median", *(f"p{share:g}" for share in options.percentiles)):
            lines.append(_row(f"{figure.capitalize()} {short} (ms)", float(result[f"{figure}_{name}_ms"])))
    if "spec_decode_acceptance_rate" in result:
        lines += _drafts(result)
    return [*lines, "=" * WIDTH]


def _drafts(result: dict[str, Any]) -> list[str]:
    lines = [
        "Speculative Decoding".center(WIDTH, "-"),
        _row("Acceptance rate (%)", result["spec_decode_acceptance_rate"]),
        _row("Acceptance length", result["spec_decode_acceptance_length"]),
        _row("Drafts", result["spec_decode_num_drafts"]),
        _row("Draft tokens", result["spec_decode_draft_tokens"]),
        _row("Accepted tokens", result["spec_decode_accepted_tokens"]),
    ]
    shares = enumerate(result["spec_decode_per_position_acceptance_rates"])
    return lines + [_row(f"  Position {place} (%)", 100 * share) for place, share in shares]


def _row(name: str, value: int | float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name + ':':<40} {shown:<10}".rstrip()


def failures(outcomes: Sequence[MeasuredResponse], most: int = 3) -> list[str]:
    """What went wrong, most frequent first."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        if not outcome.success:
            counts[outcome.error] = counts.get(outcome.error, 0) + 1
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    lines = [f"{number} failed: {error}" for error, number in ranked[:most]]
    return lines + (
        ["and " + counted(len(ranked) - most, "other kind of failure", "other kinds of failure")]
        if len(ranked) > most
        else []
    )
