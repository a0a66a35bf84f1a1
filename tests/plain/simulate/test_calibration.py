"""Predictions for the measured H200 runs stay what they were, within the bounds wherever they were within.

Cheap loads are simulated again; benchmarks/gpu/calibration.json has all of them, and the documentation quotes it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.calibrate import STORED, STORED_AGAIN, again_table, is_within, page_table, predictions

ROOT = Path(__file__).parents[3]
ROWS = json.loads(STORED.read_text())
AGAIN = json.loads(STORED_AGAIN.read_text())
LEAST_WITHIN = 142  # of 153: a change of the model must not lose some of them unnoticed
BY_KEY = {(row["model"], row["load"], row["figure"]): row for row in ROWS}
MEASURED = {
    *((row["model"], row["work"], row["unit"]) for row in json.loads((STORED.parent / "offline.json").read_text())),
    *(
        (row["model"].removeprefix("Qwen3-"), f"{row['load']} {row['value']}", figure)
        for row in json.loads((STORED.parent / "serving.json").read_text())
        if row["server"] == "Quire"
        for figure in row
        if figure.endswith("_ms") or figure == "output_throughput"
    ),
}


@pytest.mark.parametrize(
    "model, loads",
    [
        ("0.6B", ("single", "bs32", "prefill", "prefix", "at once 1", "rate 5")),
        ("8B", ("single", "bs32", "prefill", "prefix", "at once 1", "at once 32", "rate 1", "rate 5")),
        ("30B-A3B", ("single", "bs32", "prefill", "at once 1", "at once 32", "rate 10")),
    ],
)
def test_predictions_stay_within_their_bounds(model: str, loads: tuple[str, ...]) -> None:
    rows = [row for row in predictions([model], loads) if row["load"] in loads]
    assert len(rows) >= len(loads)
    for row in rows:
        stored = BY_KEY[row["model"], row["load"], row["figure"]]
        assert row["predicted"] == pytest.approx(stored["predicted"], rel=0.02), row
        assert is_within(row) or not is_within(stored), row


def test_every_measured_figure_has_its_prediction() -> None:
    assert BY_KEY.keys() == MEASURED


def test_most_figures_are_within_the_bounds_and_all_are_in_the_documentation() -> None:
    within = [row for row in ROWS if is_within(row)]
    assert len(within) >= LEAST_WITHIN
    page = (ROOT / "docs/features/simulate.md").read_text()
    assert page_table(ROWS) in page
    assert f"{len(within)} of {len(ROWS)} figures" in page
    strict = [row for row in ROWS if not row["fitted"]]
    assert f"{sum(map(is_within, strict))} of {len(strict)} predictions" in page


def test_figures_of_another_sitting_are_in_the_documentation_beside_the_first() -> None:
    page = (ROOT / "docs/features/simulate.md").read_text()
    assert again_table(AGAIN) in page
    assert f"{sum(map(is_within, AGAIN))} of {len(AGAIN)} are" in page
    for row in AGAIN:
        assert row["first"] == BY_KEY[row["model"], row["load"], row["figure"]]["measured"]
