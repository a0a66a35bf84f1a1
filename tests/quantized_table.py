"""The forms of quantized checkpoints that tests load, as the table of docs/features/quantization.md.

python -m tests.quantized_table    # writes it
"""

from __future__ import annotations

from pathlib import Path

from tests.engine.test_coded_weights import KINDS
from tests.engine.test_quantized_formats import EXACT, FORMS, MINIMA, ROUNDED

PAGE = Path(__file__).parents[1] / "docs/features/quantization.md"
BEGIN, END = "<!-- Written by `python -m tests.quantized_table`. -->\n", "<!-- End of the table. -->\n"
ERRORS = {EXACT: "none", MINIMA: "1/1024", ROUNDED: "1/254"}


def table() -> str:
    lines = ["| form | read as | on a CPU | largest error there | on a GPU |", "|---|---|---|---|---|"]
    for name, (form, kind, error) in sorted(FORMS.items()):
        method = form.config.get("quant_method", "modelopt")
        lines.append(f"| {name} | `{method}` | {kind} | {ERRORS[error]} | {KINDS[name] or 'decoded'} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{PAGE} lacks one of the marks {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
