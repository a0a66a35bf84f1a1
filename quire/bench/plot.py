"""Pictures of a run, as PNG files: every request over time, and the lengths of prompts and answers.

Needs matplotlib (the extra `bench`), which is loaded when a picture is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.base.registry import load
from quire.bench.datasets import Sample
from quire.bench.endpoints import MeasuredResponse
from quire.bench.report import token_times
from quire.schema.errors import InputError, MissingExtraError

_TTFT = "tab:gray"
_COLOURS = ("tab:green", "tab:orange", "tab:red", "tab:purple", "tab:brown")
_INCHES = (11.0, 6.0)


def require() -> None:
    """Fail before the run, not after it."""
    try:
        load("matplotlib:use")("Agg")
    except ImportError:
        raise MissingExtraError("drawing plots", "bench", "matplotlib") from None


def parse_limits(text: str) -> tuple[float, ...]:
    """Milliseconds where an inter-token gap changes its colour."""
    try:
        limits = tuple(sorted(float(part) for part in text.split(",")))
    except ValueError:
        raise InputError(f"--timeline-itl-thresholds must be numbers like 25,50, got {text!r}") from None
    if len(limits) >= len(_COLOURS):
        raise InputError(f"--timeline-itl-thresholds takes at most {len(_COLOURS) - 1} numbers, got {len(limits)}")
    return limits


def timeline(outcomes: Sequence[MeasuredResponse], base: Path, limits: tuple[float, ...]) -> Path:
    """One line per request: grey until the first token, then coloured by the gap before each token."""
    figure, (rows, rate) = _figure(2, heights=(3, 1))
    done = sorted((outcome for outcome in outcomes if outcome.success), key=lambda outcome: outcome.start)
    began = done[0].start if done else 0.0
    spans: dict[str, list[tuple[float, float, int]]] = {colour: [] for colour in (_TTFT, *_COLOURS)}
    for row, outcome in enumerate(done):
        spans[_TTFT].append((outcome.start - began, outcome.ttft, row))
        at = outcome.start - began + outcome.ttft
        for gap in outcome.itls:
            spans[_colour(gap * 1e3, limits)].append((at, gap, row))
            at += gap
    names = dict(zip((_TTFT, *_COLOURS), _names(limits), strict=False))
    for colour, bars in spans.items():
        if bars:
            starts, widths, positions = zip(*bars, strict=True)
            rows.barh(positions, widths, left=starts, color=colour, height=0.9, label=names[colour])
    rows.set_ylabel("request")
    rows.legend(loc="upper left", fontsize="small")
    times = [at - began for outcome in done for at in token_times(outcome)]
    if times:
        rate.hist(times, bins=max(10, min(200, int(max(times) * 4))), color="tab:blue")
    rate.set_ylabel("pieces")
    rate.set_xlabel("seconds")
    return _save(figure, base, "timeline")


def lengths(samples: Sequence[Sample], outcomes: Sequence[MeasuredResponse], base: Path) -> Path:
    figure, axes = _figure(2, heights=(1, 1))
    answers = [outcome.output_len for outcome in outcomes if outcome.success]
    for axis, values, name in (
        (axes[0], [sample.prompt_len for sample in samples], "prompt"),
        (axes[1], answers, "answer"),
    ):
        axis.hist(values, bins=40)
        axis.set_xlabel(f"{name} tokens")
        axis.set_ylabel("requests")
    return _save(figure, base, "dataset_stats")


def _figure(count: int, heights: tuple[int, ...]) -> tuple[Any, Any]:
    require()
    figure = load("matplotlib.figure:Figure")(figsize=_INCHES, layout="constrained")
    return figure, figure.subplots(count, 1, height_ratios=heights)


def _save(figure: Any, base: Path, kind: str) -> Path:
    path = base.with_name(f"{base.stem}.{kind}.png")
    figure.savefig(path, dpi=120)
    return path


def _colour(milliseconds: float, limits: tuple[float, ...]) -> str:
    return _COLOURS[sum(milliseconds >= limit for limit in limits)]


def _names(limits: tuple[float, ...]) -> list[str]:
    edges = [f"{limit:g}" for limit in limits]
    between = [f"{low} to {high} ms" for low, high in itertools.pairwise(edges)]
    first = [f"under {edges[0]} ms"] if edges else ["tokens"]
    last = [f"{edges[-1]} ms and more"] if edges else []
    return ["to the first token", *first, *between, *last]
