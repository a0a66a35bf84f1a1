"""Draw docs/figures.svg, the chart of the README, from figures.json; `--check` says whether it is current.

    python benchmarks/chart.py

The numbers of figures.json are those of RESULTS.md (a test compares). Bars of one row share a scale; rows do not, since
their numbers are orders of magnitude apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
FIGURES, CHART = ROOT / "benchmarks/figures.json", ROOT / "docs/figures.svg"
WIDTH, LEFT, LONGEST, BAR = 760, 220, 440, 15
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 14px } .note { font-size: 11px; fill: #59636e } .value { font-size: 12px }
.Quire { fill: #2f6fd6 } .vLLM { fill: #c98a1b } .llama { fill: #8a8f98 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note { fill: #9198a1 }
  .Quire { fill: #5b9bff } .vLLM { fill: #e0a63a } .llama { fill: #a0a6ae }
}
</style>"""


def number(figure: str) -> float:
    return float(figure.replace(",", ""))


def rows_of(group: dict, y: int) -> tuple[list[str], int]:
    parts = [f'<text class="title" x="0" y="{y}">{escape(group["title"])}</text>']
    y += 17
    parts.append(f'<text class="note" x="0" y="{y}">{escape(group["note"])}</text>')
    y += 12
    for row in group["rows"]:
        figures = row["figures"]
        most = max(map(number, figures.values()))
        middle = y + len(figures) * BAR / 2 + 4
        parts.append(f'<text x="{LEFT - 10}" y="{middle:.0f}" text-anchor="end">{escape(row["label"])}</text>')
        for engine, figure in figures.items():
            length = LONGEST * number(figure) / most
            kind = engine.split(".")[0]
            parts.append(f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}"/>')
            label = f'<text class="value" x="{LEFT + length + 6:.1f}" y="{y + 11}">{figure} {escape(engine)}</text>'
            parts.append(label)
            y += BAR
        y += 9
    return parts, y + 22


def draw(figures: dict) -> str:
    parts, y = [], 18
    for group in figures["groups"]:
        drawn, y = rows_of(group, y)
        parts += drawn
    said = "Output tokens a second of Quire beside vLLM and llama.cpp; longer is better"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - 22}" role="img" aria-label="{said}">'
    return "\n".join([head, STYLE, *parts, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the chart is not current")
    text = draw(json.loads(FIGURES.read_text()))
    if parser.parse_args().check:
        return int(not CHART.is_file() or CHART.read_text() != text)
    CHART.write_text(text)
    print(f"wrote {CHART.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
