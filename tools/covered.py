"""Prints how many lines of each package tests have run, from the report that `coverage json` wrote.

python tools/covered.py build/coverage.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def by_package(report: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Package of quire -> (lines run, lines)."""
    run, whole = Counter[str](), Counter[str]()
    for path, about in report["files"].items():
        parts = Path(path).parts
        package = parts[1] if len(parts) > 2 else "quire"
        run[package] += about["summary"]["covered_lines"]
        whole[package] += about["summary"]["num_statements"]
    return {package: (run[package], whole[package]) for package in sorted(whole)}


def main() -> None:
    found = by_package(json.loads(Path(sys.argv[1]).read_text()))
    rows = [*found.items(), ("all", (sum(run for run, _ in found.values()), sum(whole for _, whole in found.values())))]
    for package, (run, whole) in rows:
        print(f"{package:16}{run:7} of {whole:6} lines{100 * run / max(whole, 1):7.1f}%")


if __name__ == "__main__":
    main()
